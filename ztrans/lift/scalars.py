"""Scalars: Python numbers of a step as tensors, so that their values are inputs of the program.

`Numbers` is a mode in which some tensors represent Python numbers. Arithmetic among them is fp64, and a number takes
the dtype of a tensor that it is combined with, as with Python numbers.

On a CPU it computes the bits that PyTorch computes with Python numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..ir.relations import tensors_in
from ..tracing.tensor_scalars import with_tensor_scalar
from .by_value import by_value

_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")} | {
    "bool": operator.ne
}
_EXACT = (
    "add",
    "sub",
    "mul",
    "neg",
    "floordiv",
    "floor_divide",
    "mod",
    "remainder",
    "item",
    "maximum",
    "minimum",
)


class Numbers(TorchFunctionMode):
    """A mode in which tensors without dims represent Python numbers of a loop.

    Results of arithmetic on numbers alone are numbers. While `reading` is set, `.item()` also returns such a number,
    instead of a Python float, whose value would be a constant of the program. In-place operations on `counts` change
    the tensor; on other numbers they return a new one, as in Python. Each of `numbers` comes with its sign, or None.
    A comparison with 0 of a number with a sign is a bool.
    """

    def __init__(
        self, numbers: Sequence[tuple[Any, int | None]], counts: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.reading = False
        self._rebound = {id(x) for x, _ in numbers}
        self._signs = {id(x): sign for x, sign in numbers if sign is not None}
        held = (x for x in (*(x for x, _ in numbers), *counts) if isinstance(x, torch.Tensor))
        self._numbers = {
            id(x): x for x in held
        }  # keeps the tensors alive, so that their ids stay valid
        self._constants: dict[float, torch.Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.reading and func is torch.Tensor.item and args[0].dtype is not torch.bool:
            return self.read(args[0])
        scaled = with_tensor_scalar(func, args, kwargs)
        if scaled is not NotImplemented:
            return scaled
        tensors = tensors_in((args, kwargs))
        name = getattr(func, "__name__", "")
        if not any(id(x) in self._numbers for x in tensors) or name == "__get__":
            return func(*args, **kwargs)
        if "_fused_" in name:
            return by_value(func, args, kwargs)
        compared = _COMPARISONS.get(name.strip("_"))
        if compared is not None and id(args[0]) in self._signs and args[1:] in ((), (0,)):
            return compared(self._signs[id(args[0])], 0)
        return self._with_numbers(func, name, args, kwargs, tensors)

    def _with_numbers(
        self, func: Callable, name: str, args: tuple, kwargs: dict, tensors: Sequence[Any]
    ) -> Any:
        """The result of an operation on numbers, or on numbers and tensors."""
        if name == "to":  # a Python number has no dtype
            kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}
        operands = [x for x in tensors if id(x) not in self._numbers and x.dtype is not torch.bool]
        if not operands:
            return self._known(self._arithmetic(func, name, args, kwargs))
        if not any(
            map(_decides_dtype, operands)
        ):  # a number takes the dtype that it would take in Python
            dtype = lambda x: torch.result_type(operands[0], 1.0 if x.is_floating_point() else 1)
            args = pytree.tree_map(lambda x: x.to(dtype(x)) if id(x) in self._numbers else x, args)
        return func(*args, **kwargs)

    def begin_step(self, reading: bool) -> None:
        """Begin a step of an optimizer, which shares no literal numbers with the steps before."""
        self.reading, self._constants = reading, {}

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The value of a tensor of one element, as a number."""
        if id(x) in self._numbers:
            return x
        real = torch.float64 if x.is_floating_point() else torch.int64
        x = x.detach().reshape(()) if x.ndim or x.requires_grad else x
        return self._known(x.to(torch.complex128 if x.is_complex() else real, copy=True))

    def _known(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.ndim == 0 and result.dtype is not torch.bool:
            self._numbers[id(result)] = result
            self._rebound.add(id(result))
        return result

    def _arithmetic(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """The result of `func` on numbers alone, as in Python: integers stay exact, everything else is fp64."""
        if id(args[0]) in self._rebound and name.endswith("_") and not name.endswith("__"):
            func = getattr(
                torch.Tensor, name.removesuffix("_")
            )  # in Python `x += 1` binds a new number
        real = any(
            isinstance(x, float) or (isinstance(x, torch.Tensor) and x.is_floating_point())
            for x in args
        )
        if real or name.strip("_").removeprefix("r") not in _EXACT:
            args = tuple(x.to(torch.float64) if _is_whole(x) else x for x in args)
        if name in ("__rdiv__", "__rtruediv__"):  # PyTorch multiplies by the reciprocal
            return self._constant(args[1]) / args[0]
        if (
            name in ("pow", "__pow__") and isinstance(args[1], (int, float)) and real
        ):  # avoids PyTorch's special cases
            return torch.pow(args[0], self._constant(args[1]))
        return func(*args, **kwargs)

    def _constant(self, number: float) -> torch.Tensor:
        """A literal number as a tensor. Equal numbers share one tensor."""
        if number not in self._constants:
            self._constants[number] = torch.full((), number, dtype=torch.float64)
        return self._constants[number]


def _decides_dtype(x: torch.Tensor) -> bool:
    """Whether an operand decides the dtype of the result, whatever number it is combined with."""
    return x.ndim > 0 and (x.is_floating_point() or x.is_complex())


def _is_whole(x: Any) -> bool:
    """Whether a value is a tensor of integers. A bool, such as the result of a comparison, is no number."""
    return isinstance(x, torch.Tensor) and not (
        x.is_floating_point() or x.is_complex() or x.dtype is torch.bool
    )
