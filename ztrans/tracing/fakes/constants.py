"""Constants: read the elements of traced tensors that depend on no argument of the step.

    bool((mask == causal).all())

reads an element, which a traced tensor does not have. If the step computes both masks from their sizes alone, the
operations that compute them run again, on real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.graph import is_random
from ...ir.operations import is_written
from ...ir.relations import tensors_in
from ..operation import Operation, mapped
from ..overloads import named

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_LARGEST = 1 << 20  # elements of a tensor that is computed again


def read_constant(op: Any, args: Sequence[Any], operations: Sequence[Operation]) -> Any:
    """What `op`, one of `READS`, reads from tensors that the operations so far have computed.

    None if the tensors depend on an argument of the step or on random numbers. No mode of PyTorch may be active.
    """
    values: dict[int, torch.Tensor] = {}
    for o in operations:
        _follow(o, values)
    return op(*_real(args, values)) if _are_known(args, values) else None


def _follow(o: Operation, values: dict[int, torch.Tensor]) -> None:
    """Add the values of the results of an operation, if it is small and reads known values only."""
    if not isinstance(o.op, torch._ops.OpOverload):
        return
    results = tensors_in([o.result])
    if _is_pure(o.op) and _are_known([o.args, o.kwargs], values) and all(x.numel() <= _LARGEST for x in results):
        returned = o.op(*_real(o.args, values), **_real(o.kwargs, values))
        values.update(zip(map(id, results), tensors_in([returned])))
    else:
        written = {a.name for a in o.op._schema.arguments if is_written(a)}
        lost = tensors_in([x for name, x in named(o.op, o.args, o.kwargs).items() if name in written])
        memory = {values[id(x)].untyped_storage().data_ptr() for x in lost if id(x) in values}
        for k in [k for k, x in values.items() if x.untyped_storage().data_ptr() in memory]:
            del values[k]


def _is_pure(op: Any) -> bool:
    """Whether an operation may run once more. A collective would wait for ranks that do not run it."""
    return op.namespace == "aten" and not is_random(op)


def _are_known(tree: Any, values: dict[int, torch.Tensor]) -> bool:
    return all(id(x) in values or _is_literal(x) for x in tensors_in(tree))


def _real(tree: Any, values: dict[int, torch.Tensor]) -> Any:
    return mapped(tree, lambda x: x if _is_literal(x) else values[id(x)])


def _is_literal(x: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.tensor(...)` inside of the step. Those of the trace are of other classes."""
    return type(x) is torch.Tensor
