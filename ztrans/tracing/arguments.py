"""The arguments of a step: how the caller passed them, which part a rank holds, which the step may overwrite."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..calling.call import BoundCall
from ..calling.trees import none_as_empty
from ..ir.graph import Graph, Var
from ..ir.layout import Own, as_tensor
from ..ir.micro_batches import full_shape
from ..ir.trees.known_tree import KnownTree
from .captured import Key, changes
from .trace import Abstract, Program, shape_of


def state_key(call: BoundCall) -> StateKey:
    """The properties of the state that a program is specialised on."""
    leaves, tree = pytree.tree_flatten(none_as_empty(call.state))
    return StateKey((tree, tuple(_described(x, is_state=True) for x in leaves)))


def batch_like(call: BoundCall, last: KnownBatch | None) -> tuple[list, KnownBatch]:
    """The leaves of the batch, and what is known of it, which is `last` for a batch of the same kind."""
    batch = (*call.batch, *call.extra)
    if last is not None and last.key.names == call.names and (known := last.leaves(batch)) is not None:
        return known, last
    leaves, tree = pytree.tree_flatten(batch)
    key = BatchKey(tree, call.names, tuple(_described(x, is_state=False) for x in leaves))
    return leaves, KnownBatch(KnownTree(batch), key)


def _described(x: Any, is_state: bool) -> tuple:
    # A number in the state comes back as a tensor; in the batch it is something else: it does not vary.
    is_tensor = isinstance(x, torch.Tensor)
    placements = (x.device_mesh, x.placements) if isinstance(x, DTensor) else None
    return Abstract.of(x, is_state), placements, is_state or is_tensor, is_tensor and x.requires_grad


class StateKey(tuple):
    """The properties of a state, hashed once. The state that a step returns has the same one in every call."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class BatchKey(NamedTuple):
    """The properties of a batch: its tree, the arguments that were passed by name, and its leaves."""

    tree: pytree.TreeSpec
    names: tuple[str, ...]
    leaves: tuple[tuple, ...]

    def any_size(self) -> BatchKey:
        """This key without the sizes of the batch."""
        return self._replace(
            leaves=tuple(
                (len(x.shape), x.dtype, x.device, *more) if isinstance(x, Abstract) else (x, *more)
                for x, *more in self.leaves
            )
        )


class KnownBatch(NamedTuple):
    """The structure and the properties of a batch."""

    tree: KnownTree
    key: BatchKey

    def leaves(self, batch: tuple) -> list | None:
        """The leaves of a batch of the same structure and properties; None for another one."""
        leaves = self.tree.leaves(batch)
        if leaves is None or not all(isinstance(x, torch.Tensor | float) for x in leaves):
            return None
        # A batch that holds None has fewer leaves here than in its key, and is flattened anew.
        return leaves if tuple([_described(x, is_state=False) for x in leaves]) == self.key.leaves else None


class StepKey(NamedTuple):
    """What a program of a step is made for: a state, a batch, and what the step reads besides its arguments."""

    state: StateKey
    batch: BatchKey
    captured: Key

    def any_size(self) -> StepKey:
        """This key without the sizes of the batch."""
        return self._replace(batch=self.batch.any_size())


def traced_leaves(program: Program, name: str, call: BoundCall) -> list:
    """The leaves of a call that are inputs of the program.

    Raises: TypeError if the other leaves, or the tree, differ from those that the program was traced for.
    """
    leaves, tree = pytree.tree_flatten(call.tree())
    if (tree, call.names) != (program.in_tree, program.names):
        raise TypeError(
            f"{name}: {_difference(program, tree, call)}.\n"
            f"Lower the step for such arguments, or call the step itself, which compiles a program for each structure."
        )
    for i, constant in program.static.items():
        path = program.paths[i]
        if leaves[i] != constant:
            raise TypeError(f"{name}: compiled for {path}={constant!r}, called with {leaves[i]!r}.")
    return [x for i, x in enumerate(leaves) if i not in program.static]


def _difference(program: Program, tree: pytree.TreeSpec, call: BoundCall) -> str:
    """How the structure of a call differs from that of its program, by leaves if these differ."""
    paths = call.leaf_names(program.captured.fn)[1]
    new, lost = ([x for x in a if x not in b] for a, b in ((paths, program.paths), (program.paths, paths)))
    changes = [f"called with {', '.join(new[:4])}, which it was compiled without"] * bool(new)
    changes += [f"called without {', '.join(lost[:4])}, which it was compiled with"] * bool(lost)
    return "; ".join(changes) or f"compiled for arguments {program.in_tree}, called with {tree}"


def check_captured(program: Program, name: str) -> None:
    """Check that the values that the step reads besides its arguments have not changed since it was traced.

    Raises: TypeError that names the values that have changed.
    """
    now = program.captured.key()
    if now != program.made_for:
        listed = "".join(f"  * {change}\n" for change in changes(program.made_for, now)[:4])
        raise TypeError(
            f"{name}: what the step reads besides its arguments has changed since it was traced:\n{listed}"
            f"Lower it again, or call the step itself, which is then traced again."
        )


def local_inputs(
    program: Program, graph: Graph, call: BoundCall, caller: str | None = None
) -> tuple[list, list[torch.Tensor]]:
    """The leaves of a call that are inputs of the program, and this rank's part of each as a tensor.

    `caller` names the call in errors, by default with the name of the program.

    Raises: TypeError if their shapes or dtypes differ from those that the program was compiled for, or if the step
        divides them in another way.
    """
    leaves = traced_leaves(program, caller or graph.name, call)
    local = [local_part(x) if i < graph.num_state else _read(x) for i, x in enumerate(leaves)]
    for v, own, axes, x, y in zip(graph.inputs, program.owns, program.axes, leaves, local, strict=True):
        now, shape = Own.of(x, axes), shape_of(x)
        wanted = own.shape if own else full_shape(graph, v)
        if own != now or shape != wanted or v.dtype != y.dtype:
            made_for, got = dataclasses.replace(v, shape=wanted), Var("", y.dtype, shape).type
            raise TypeError(
                f"{caller or graph.name}: compiled for {made_for}{own or ''}, called with {got}{now or ''}.\n"
                f"Lower the step for such arguments, or call the step itself, which compiles a program for each size."
            )
    return leaves, local


def local_batch(program: Program, num_state: int, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that this rank holds of the leaves of a batch whose key is that of one that `flat` has accepted."""
    return [_read(x) for i, x in enumerate(leaves, num_state) if i not in program.static]


def _read(x: Any) -> torch.Tensor:
    """This rank's part of an argument in memory. A lazily conjugated or negated tensor is not what its memory holds."""
    return local_part(x).resolve_conj().resolve_neg()


def local_part(x: Any) -> torch.Tensor:
    """This rank's part of an argument: the local tensor of a DTensor, a number as a tensor, any other tensor itself."""
    x = x.to_local() if isinstance(x, DTensor) else as_tensor(x)
    return x.detach() if x.requires_grad else x


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that a step may overwrite its state: each leaf of it is contiguous and shares memory with no other input.

    Raises: TypeError that names the leaf, or the two inputs that share memory.
    """
    for v, x in zip(graph.inputs[: graph.num_state], inputs):
        if x.is_conj() or x.is_neg():
            raise TypeError(_donated(graph, f"{v.name} is conjugated or negated only when it is read"))
        if not x.is_contiguous():
            raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
    for i, j in overlapping(inputs):
        if min(i, j) < graph.num_state:
            raise TypeError(_donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory"))


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """For each tensor that shares memory with one that begins before it: their positions."""
    spans = []
    for i, x in enumerate(tensors):
        size = x.numel()
        if size and not x.is_contiguous():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if size:
            spans.append((x.data_ptr(), x.data_ptr() + size * x.itemsize, i))
    farthest = last = 0  # the end of the memory of the tensors so far, and the position of the one that ends there
    for start, end, i in sorted(spans):
        if start < farthest:
            yield last, i
        if end > farthest:
            farthest, last = end, i


def _donated(graph: Graph, reason: str) -> str:
    return (
        f"{graph.name}: {reason}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )
