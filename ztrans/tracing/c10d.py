"""Record the in-place collectives of torch.distributed as functional collectives.

`dist.all_reduce(x)` changes `x`. In a trace the call is an operation of the namespace c10d, whose schema does not
declare that it writes `x`. This module records a functional form instead:

    dist.all_reduce(x)   -->   x.copy_(wait_tensor(all_reduce(x, "sum", group)))

In the trace a call with `async_op=True` completes at once, and so does the `Work` that it returns. Three kinds of
collectives are errors: ranks play different roles (a scatter from one rank), the input is a list, or no values move (a
barrier).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..ir.op_facts import arguments_by_name

functional = torch.ops._c10d_functional


class NoForm(Exception):
    """A collective has no functional form. The message says why."""


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
                "a sum of scaled terms is not a reduction of a program; scale the tensor first"
            )
        # Functional collectives write these names in lower case.
        return name.lower()

    def run(self, op: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Run a functional collective on `x`, wait for it, and return its result."""
        return functional.wait_tensor.default(op(x, *args, self.group.group_name))


def is_outside_programs(op: Any) -> bool:
    """Whether an operation is a collective that no program contains: in-place, or called by one rank alone."""
    return op.namespace == "c10d" or op._schema.name in _ONE_RANK_OPS


def functionalized(op: Any, finished_work: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Run `op(*args, **kwargs)` by functional operations, which the trace records, and return its result.

    `finished_work` makes the `Work` that the caller waits for, already finished.

    Raises: NoForm for a collective that has no functional form.
    """
    name = op._schema.name.split("::")[1]
    if name not in _FORMS:
        raise NoForm(
            "ranks take different parts in it, it takes a list of tensors, or it moves no values"
        )
    form, output_name, input_name = _FORMS[name]
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    call = Call(defaults | arguments_by_name(op, args, kwargs))
    form(call, _without_list(call[output_name]), _without_list(call[input_name]))
    # Some collectives also return their output.
    if len(op._schema.returns) == 2:
        return call[output_name], finished_work()
    return finished_work()


def _without_list(argument: Any) -> Any:
    """The argument of this process. PyTorch passes some in a list with one entry for each device of the process."""
    return argument[0] if isinstance(argument, list) else argument


def _all_reduce(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    if call.get("sparse_indices") is not None:
        raise NoForm("its tensor is sparse")
    output.copy_(call.run(functional.all_reduce.default, x, call.reduction))


def _broadcast(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    output.copy_(call.run(functional.broadcast.default, x, call["root_rank"]))


def _gather_into(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    output.copy_(_gathered(call, x).view(output.shape))


def _gather_to_list(call: Call, outputs: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    if any(output.shape != x.shape for output in outputs):
        raise NoForm("its tensors differ in shape from rank to rank")
    gathered = _gathered(call, x).view(call.ranks, *x.shape)
    for output, part in zip(outputs, gathered.unbind()):
        output.copy_(part)


def _gathered(call: Call, x: torch.Tensor) -> torch.Tensor:
    # The functional collectives join values along dim 0, which a scalar does not have.
    return call.run(functional.all_gather_into_tensor.default, torch.atleast_1d(x), call.ranks)


def _scatter_sum(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    rows, *rest = torch.atleast_1d(output).shape
    terms = x.reshape(call.ranks * rows, *rest)
    part = call.run(functional.reduce_scatter_tensor.default, terms, call.reduction, call.ranks)
    output.copy_(part.view(output.shape))


def _all_to_all(call: Call, output: torch.Tensor, x: torch.Tensor) -> None:
    """Exchange rows with every rank. An empty list of sizes means equal numbers of rows."""
    receive_sizes = call["output_split_sizes"] or [len(output) // call.ranks] * call.ranks
    send_sizes = call["input_split_sizes"] or [len(x) // call.ranks] * call.ranks
    output.copy_(call.run(functional.all_to_all_single.default, x, receive_sizes, send_sizes))


# For each collective: its functional form, the name of its output, and the name of its input.
_FORMS: dict[str, tuple[Callable[[Call, Any, Any], None], str, str]] = {
    "allreduce_": (_all_reduce, "tensors", "tensors"),
    "broadcast_": (_broadcast, "tensors", "tensors"),
    "_allgather_base_": (_gather_into, "output_tensor", "input_tensor"),
    "allgather_": (_gather_to_list, "output_tensors", "input_tensors"),
    "_reduce_scatter_base_": (_scatter_sum, "output_tensor", "input_tensor"),
    "alltoall_base_": (_all_to_all, "output", "input"),
}
_ONE_RANK_OPS = tuple(f"_c10d_functional::{name}" for name in ("isend", "irecv", "batch_p2p_ops"))
