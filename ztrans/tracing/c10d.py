"""In-place collectives of torch.distributed, recorded as the functional ones that a program holds.

`dist.all_reduce(x)` changes `x`. While a step is traced, PyTorch shows the call as an operation of the
namespace c10d, whose schema does not declare that it writes `x`. This module records a functional form instead:

    dist.all_reduce(x)   -->   x.copy_(wait_tensor(all_reduce(x, "sum", group)))

In the trace a call with `async_op=True` completes at once, and so does the `Work` that it returns. A collective in
which ranks do different things, such as a scatter from one rank, has no functional form, and is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from ..ir.relations import tensors_in
from .overloads import named

functional = torch.ops._c10d_functional


class NoForm(Exception):
    """A collective has no functional form; the message says why."""


class Call(dict[str, Any]):
    """The arguments of one call of a collective, by name."""

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.ProcessGroup.unbox(self["process_group"])

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def reduction(self) -> str:
        name = dist.ReduceOp.RedOpType(self["reduce_op"].op()).name
        if name == "PREMUL_SUM":
            raise NoForm(
                "a sum of scaled terms is no reduction of a program; scale the tensor first"
            )
        return name.lower()  # functional collectives write these names in lower case

    def run(self, op: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Run a functional collective on `x`, wait for it, and return its result."""
        return functional.wait_tensor.default(op(x, *args, self.group.group_name))


def has_no_place(op: Any) -> bool:
    """Whether an operation is a collective that no program contains: an in-place one, or one with a single rank."""
    return op.namespace == "c10d" or op._schema.name in _SINGLE


def forget_values(*args: Any, **kwargs: Any) -> Any:
    """Let PyTorch not know the values of the tensors that a functional collective is given.

    PyTorch runs an operation of literals on their values. A collective would wait for ranks that may not trace now.

    Returns: NotImplemented, so that make_fx records the collective.
    """
    mode: Any = get_proxy_mode()
    for x in tensors_in((args, kwargs)):
        slot = get_proxy_slot(x, mode.tracer, None)
        if slot is not None:
            slot.constant = None
        if hasattr(x, "constant"):
            x.constant = None
    return NotImplemented


def functionalized(op: Any, finished_work: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Run `op(*args, **kwargs)` by functional operations, which the trace records, and return its result.

    `finished_work` makes a `Work` for the caller to wait for, which has finished.

    Raises: NoForm for a collective that has no functional form.
    """
    name = op._schema.name.split("::")[1]
    if name not in _FORMS:
        moves_nothing = "it moves no values, and a program runs as soon as its values are there"
        raise NoForm(moves_nothing if name in _BARRIERS else "ranks take different parts in it")
    form, outputs, inputs = _FORMS[name]
    call = Call({a.name: a.default_value for a in op._schema.arguments} | named(op, args, kwargs))
    written, read = call[outputs], call[inputs]
    several = isinstance(written, list) and form is not _all_to_all_lists
    for output, x in zip(written, read) if several else [(written, read)]:
        form(call, output, x)
    return (written, finished_work()) if len(op._schema.returns) == 2 else finished_work()


def _all_reduce(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    if call.get("sparse_indices") is not None:
        raise NoForm("its tensor is sparse")
    output.copy_(call.run(functional.all_reduce.default, x, call.reduction))


def _broadcast(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    output.copy_(call.run(functional.broadcast.default, x, call["root_rank"]))


def _gather_into(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    whole = call.run(functional.all_gather_into_tensor.default, torch.atleast_1d(x), call.ranks)
    output.copy_(whole.view(output.shape))


def _gather_to_list(call: Call, outputs: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    if any(output.shape != x.shape for output in outputs):
        raise NoForm("its tensors differ in shape from rank to rank")
    whole = call.run(functional.all_gather_into_tensor.default, torch.atleast_1d(x), call.ranks)
    for output, part in zip(outputs, whole.view(call.ranks, *x.shape).unbind()):
        output.copy_(part)


def _scatter_sum(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    rows = torch.atleast_1d(output).shape
    terms = x.reshape(call.ranks * rows[0], *rows[1:])
    part = call.run(functional.reduce_scatter_tensor.default, terms, call.reduction, call.ranks)
    output.copy_(part.view(output.shape))


def _scatter_sum_of_list(call: Call, output: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    _scatter_sum(call, output, torch.cat([torch.atleast_1d(x) for x in terms]))


def _all_to_all(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    """Exchange rows with every rank. An empty list of sizes stands for equal numbers of rows."""
    sizes = (call["output_split_sizes"], output), (call["input_split_sizes"], x)
    received, sent = (rows or [len(t) // call.ranks] * call.ranks for rows, t in sizes)
    output.copy_(call.run(functional.all_to_all_single.default, x, received, sent))


def _all_to_all_lists(
    call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    to, sent = ([x.numel() for x in xs] for xs in (outputs, inputs))
    terms = torch.cat([x.reshape(-1) for x in inputs])
    received = call.run(functional.all_to_all_single.default, terms, to, sent)
    for output, part in zip(outputs, received.split(to)):
        output.copy_(part.view(output.shape))


# For each collective the function for one output and its input, and the names of the arguments that these are. Both may
# be lists of several.
_FORMS: dict[str, tuple[Callable[[Call, Any, Any], None], str, str]] = {
    "allreduce_": (_all_reduce, "tensors", "tensors"),
    "allreduce_coalesced_": (_all_reduce, "tensors", "tensors"),
    "broadcast_": (_broadcast, "tensors", "tensors"),
    "_allgather_base_": (_gather_into, "output_tensor", "input_tensor"),
    "allgather_into_tensor_coalesced_": (_gather_into, "outputs", "inputs"),
    "allgather_": (_gather_to_list, "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": (_scatter_sum, "output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": (_scatter_sum, "outputs", "inputs"),
    "reduce_scatter_": (_scatter_sum_of_list, "output_tensors", "input_tensors"),
    "alltoall_base_": (_all_to_all, "output", "input"),
    "alltoall_": (_all_to_all_lists, "output_tensors", "input_tensors"),
}
_SINGLE = tuple(f"_c10d_functional::{name}" for name in ("isend", "irecv", "batch_p2p_ops"))
_BARRIERS = ("barrier", "monitored_barrier_")
