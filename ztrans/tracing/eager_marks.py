"""Give the marks of a step their meaning while the step runs on tensors with values, without a trace.

A trace records a mark, and a transform replaces it by a reduction over the ranks. Here the ranks reduce at once: each
gradient of an invariant value where autograd returns it, and the values of `zt.pmean`, `zt.psum`, `zt.pmax` and
`zt.pmin`. Which values vary from rank to rank is followed operation by operation, by the rules of `ir.varying`; the
result of a reduction counts as invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.ambient import without_function_modes
from ..ir.nested import tensors_in
from ..ir.op_facts import draws, is_written
from ..ops import EVERY_AXIS
from .gradient_marks import MarkGradients

_GRADIENT = torch.ops.ztrans.gradient.default
_REDUCTIONS: Mapping[Any, str] = {
    torch.ops.ztrans.pmean.default: "mean",
    torch.ops.ztrans.psum.default: "sum",
    torch.ops.ztrans.pmax.default: "max",
    torch.ops.ztrans.pmin.default: "min",
}


class Reduce(Protocol):
    """Reduces a tensor over the ranks along an axis, by default over all axes of the step, and returns a new one."""

    def __call__(self, x: torch.Tensor, op: str, axis: str | None = None) -> torch.Tensor: ...


class EagerMarks(TorchDispatchMode):
    """Runs the marks of a step as reductions over the ranks.

    A random draw in the shape of an invariant value, such as the noise of a stochastic rounding in the update, has the
    numbers of the first rank on all ranks, so that the value stays invariant. All other draws differ.

    Args:
        batch: the tensors that differ from rank to rank.
        reduce: reduces over the ranks.
        of_first_rank: the value that the first rank has for a tensor.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        batch: Iterable[torch.Tensor],
        reduce: Reduce,
        of_first_rank: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._reduce = reduce
        self._of_first_rank = of_first_rank
        # A weak reference keeps the address of a storage from being used again.
        self._varying: set[StorageWeakRef] = set()
        self._mark_varying(batch)

    def varies(self, x: torch.Tensor) -> bool:
        """Whether a tensor may differ from rank to rank."""
        return x.layout is torch.strided and StorageWeakRef(x.untyped_storage()) in self._varying

    def _mark_varying(self, tensors: Iterable[torch.Tensor]) -> None:
        for x in tensors:
            if x.layout is torch.strided:
                self._varying.add(StorageWeakRef(x.untyped_storage()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _GRADIENT:
            gradient, value = args
            return gradient.clone() if self.varies(value) else self._reduced(gradient, "mean")
        if func in _REDUCTIONS:
            x, axis = args
            return self._reduced(x, _REDUCTIONS[func], None if axis == EVERY_AXIS else axis)
        result = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(map(self.varies, tensors)):
            self._mark_varying([*tensors_in(result), *_written(func, args, kwargs)])
        elif draws(func, args, kwargs):
            if any(x.ndim for x in tensors):
                self._draw_alike(tensors_in(result))
            else:
                self._mark_varying(tensors_in(result))
        return result

    def _draw_alike(self, drawn: Iterable[torch.Tensor]) -> None:
        """Replace random numbers by those of the first rank."""
        with torch.no_grad(), without_function_modes():
            for x in drawn:
                x.copy_(self._of_first_rank(x))

    def _reduced(self, x: torch.Tensor, op: str, axis: str | None = None) -> torch.Tensor:
        with torch.no_grad(), without_function_modes():
            return self._reduce(x, op, axis)


class EagerFunctions(MarkGradients):
    """Marks gradients, and runs the branch of a `cond` that is taken as ordinary Python."""

    def run(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is not torch.ops.higher_order.cond:
            return super().run(func, args, kwargs)
        condition, if_true, if_false, *operands = (*args, *kwargs.values())
        with self:
            return (if_true if condition else if_false)(*(operands[0] if operands else ()))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, according to its schema."""
    if not isinstance(func, OpOverload):
        return []
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if is_written(argument):
            written += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return written
