"""In-place collectives of torch.distributed, recorded as the functional ones that a program holds.

`dist.all_reduce(x)` changes `x`. While a step is traced, PyTorch shows the call as an operation of the
namespace c10d, whose schema does not declare that it writes `x`. This module records a functional form instead:

    dist.all_reduce(x)   -->   x.copy_(wait_tensor(all_reduce(x, "sum", group)))

In the trace a call with `async_op=True` completes at once, and so does the `Work` that it returns. A collective in
which ranks do different things, such as a scatter from one rank, has no functional form, and is an error.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..overloads import named

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
            raise NoForm("a sum of scaled terms is no reduction of a program; scale the tensor first")
        return name.lower()  # functional collectives write these names in lower case

    def run(self, op: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Run a functional collective on `x`, wait for it, and return its result."""
        return functional.wait_tensor.default(op(x, *args, self.group.group_name))


def is_in_place(op: Any) -> bool:
    """Whether an operation is one of the in-place collectives of torch.distributed, which no program contains."""
    return op.namespace == "c10d"


@functools.cache
def is_point_to_point(op: Any) -> bool:
    """Whether an operation sends to, or receives from, a single rank."""
    name = op._schema.name.removeprefix("c10d::").removeprefix("_c10d_functional::")
    return name in ("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops")


def functionalized(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op(*args, **kwargs)` by functional operations, which the trace records, and return its result.

    Raises: NoForm for a collective that has no functional form.
    """
    name = op._schema.name.removeprefix("c10d::")
    if name not in _FORMS:
        moves_nothing = "it moves no values, and a program runs as soon as its values are there"
        raise NoForm(moves_nothing if name in _BARRIERS else "ranks take different parts in it")
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    written = _FORMS[name](Call(defaults | named(op, args, kwargs)))
    work = torch._C._distributed_c10d.FakeWork().boxed()
    return (written, work) if len(op._schema.returns) == 2 else work


def _all_reduce(call: Call) -> list[torch.Tensor]:
    if call.get("sparse_indices") is not None:
        raise NoForm("its tensor is sparse")
    for x in call["tensors"]:
        x.copy_(call.run(functional.all_reduce.default, x, call.reduction))
    return call["tensors"]


def _broadcast(call: Call) -> list[torch.Tensor]:
    for x in call["tensors"]:
        x.copy_(call.run(functional.broadcast.default, x, call["root_rank"]))
    return call["tensors"]


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


def _all_to_all(call: Call, output: torch.Tensor, x: torch.Tensor, to: list[int], sent: list[int]) -> None:
    """Receive `to[r]` rows from rank r and send it `sent[r]` rows. An empty list stands for equal numbers of rows."""
    to, sent = (rows or [len(t) // call.ranks] * call.ranks for rows, t in ((to, output), (sent, x)))
    output.copy_(call.run(functional.all_to_all_single.default, x, to, sent))


def _all_to_all_lists(call: Call) -> list[torch.Tensor]:
    outputs, inputs = call["output_tensors"], call["input_tensors"]
    to, sent = ([x.numel() for x in xs] for xs in (outputs, inputs))
    terms = torch.cat([x.reshape(-1) for x in inputs])
    received = call.run(functional.all_to_all_single.default, terms, to, sent)
    for output, part in zip(outputs, received.split(to)):
        output.copy_(part.view(output.shape))
    return outputs


def _over(form: Callable, outputs: str, inputs: str) -> Callable:
    """Apply `form` to one output and its input, or to each pair of two lists.

    `outputs` and `inputs` are the names of the two arguments of the collective.
    """

    def whole(call: Call) -> Any:
        pairs = zip(call[outputs], call[inputs]) if isinstance(call[outputs], list) else [(call[outputs], call[inputs])]
        for output, x in pairs:
            form(call, output, x)
        return call[outputs]

    return whole


def _reduce_scatter_lists(call: Call, output: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    _scatter_sum(call, output, torch.cat([torch.atleast_1d(x) for x in terms]))


_FORMS: dict[str, Callable[[Call], Any]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _over(_gather_into, "output_tensor", "input_tensor"),
    "allgather_into_tensor_coalesced_": _over(_gather_into, "outputs", "inputs"),
    "allgather_": _over(_gather_to_list, "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": _over(_scatter_sum, "output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": _over(_scatter_sum, "outputs", "inputs"),
    "reduce_scatter_": _over(_reduce_scatter_lists, "output_tensors", "input_tensors"),
    "alltoall_base_": lambda call: _all_to_all(
        call, call["output"], call["input"], call["output_split_sizes"], call["input_split_sizes"]
    ),
    "alltoall_": _all_to_all_lists,
}
_BARRIERS = ("barrier", "monitored_barrier_")
