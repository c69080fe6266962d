"""The flat tensors of a call on this rank, and whether a step may overwrite its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..ir.graph import Graph
from ..ir.layout import as_tensor
from ..ir.source import Source
from .errors import bad_state_leaf
from .host_memory import is_pinned
from .signature import is_number


class Inputs(NamedTuple):
    """The inputs of a program in a call: the state as the caller passed it, and this rank's tensor of each input."""

    state: Sequence[Any]
    tensors: list[torch.Tensor]


class KnownValue(NamedTuple):
    """An input whose value the step read while it was traced. The program is valid only for this value.

    Attributes:
        position: the index of the input, a leaf of the state, among the inputs of the program.
        value: the whole value, on the CPU.
        source: the user's line that read it first.
    """

    position: int
    value: torch.Tensor
    source: Source | None

    def is_in(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf has this value, bit for bit. For a DTensor, only this rank's part is compared."""
        value = self.value
        if isinstance(leaf, DTensor):
            # Without a source rank, each rank cuts its own copy, and nothing is sent.
            part = distribute_tensor(value, leaf.device_mesh, leaf.placements, src_data_rank=None)
            value = part.to_local()
        return have_equal_bits(value, local_part(leaf))


def have_equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits: NaN equals itself, and 0.0 is not -0.0."""
    both = [x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (first, second)]
    return torch.equal(*both)


def check_state(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises: TypeError if a leaf of the state is neither a tensor nor a number."""
    for path, x in zip(paths, leaves):
        if not isinstance(x, torch.Tensor) and not is_number(x):
            raise bad_state_leaf(path, x)


def computed_local_part(x: Any) -> torch.Tensor:
    """This rank's part of an argument that a step only reads. Lazy conjugates and negations are computed."""
    return local_part(x).resolve_conj().resolve_neg()


def local_part(x: Any) -> torch.Tensor:
    """This rank's part of an argument, detached: the local tensor of a DTensor, a tensor for a number."""
    x = x.to_local() if isinstance(x, DTensor) else as_tensor(x)
    return x.detach() if x.requires_grad else x


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that a step may overwrite its state: its leaves are ordinary, contiguous, and share no memory.

    Raises: TypeError that names the leaf, or the two inputs that share memory.
    """
    for v, x in zip(graph.state, inputs):
        # Only in inference mode does PyTorch let a step write to inference tensors.
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise _not_writable(graph, f"{v.name} was made under torch.inference_mode()")
        if x.is_conj() or x.is_neg():
            raise _not_writable(graph, f"{v.name} is conjugated or negated only when it is read")
        if not x.is_contiguous():
            raise _not_writable(graph, f"{v.name} is not contiguous")
    for i, j in overlapping(inputs):
        if min(i, j) < graph.num_state:
            names = f"{graph.inputs[i].name} and {graph.inputs[j].name}"
            raise _not_writable(graph, f"{names} share memory")


def check_memory(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that the leaves which a step keeps on the host are in memory that its GPU can copy.

    Raises: TypeError that names the leaf.
    """
    # On CPUs both memories are the same.
    if device_of(inputs) is None:
        return
    for v, x in zip(graph.state, inputs):
        if v.memory == "host" and not is_pinned(x):
            place = "in memory that is not pinned" if x.is_cpu else f"on {x.device}"
            raise TypeError(
                f"{graph.name}: {v.name} is {place}, and the step keeps it in pinned memory of the host.\n"
                f"Call `state = step.shard(state)` once, before the loop: it copies the state to where it belongs."
            )


def device_of(inputs: Iterable[torch.Tensor]) -> torch.device | None:
    """The GPU of the first input on a GPU, or None. Other inputs may be on the host."""
    return next((x.device for x in inputs if x.is_cuda), None)


def _not_writable(graph: Graph, reason: str) -> TypeError:
    """The error of a state that a step cannot write in place."""
    return TypeError(
        f"{graph.name}: {reason}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )


def span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the byte after the last one."""
    start = x.data_ptr()
    return start, start + extent(x)


def extent(x: torch.Tensor) -> int:
    """The number of bytes from the first byte of a tensor to its last one, both included."""
    count = x.numel()
    # There may be gaps between its elements.
    if count and not x.is_contiguous():
        count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return count * x.itemsize


def overlapping(
    tensors: Sequence[torch.Tensor], span_of: Callable[[torch.Tensor], tuple[Any, Any]] = span
) -> Iterator[tuple[int, int]]:
    """The positions of pairs of tensors that share memory: one for each tensor that begins inside another one.

    `span_of` gives the begin and the end of a tensor.
    """
    spans = [(*span_of(x), i) for i, x in enumerate(tensors) if x.numel()]
    # The end of the memory of the tensors so far, and the position of the tensor that ends there.
    farthest_end: Any = None
    farthest = 0
    for start, end, i in sorted(spans):
        if farthest_end is not None and start < farthest_end:
            yield farthest, i
        if farthest_end is None or end > farthest_end:
            farthest_end = end
            farthest = i
