"""Numbers: tensors that stand for the Python numbers of a loop, so that their values are inputs of its program.

They are the floats of parameter groups, and the counts that an optimizer keeps as Python numbers. They are tensors in
fp64 and int64, and their arithmetic is that of PyTorch, with what a Python number has besides: `x += 1` gives another
number, a cast leaves it as it is, and a comparison with zero is known. A fused optimizer takes them by value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..ir.collectives import HALF
from ..ir.relations import tensors_in
from .by_value import by_value

_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bool": operator.ne,
}
_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "pow", "neg", "sqrt")
_ROUNDED_ONCE = ("mul", "mul_", "div", "div_")


class Numbers(TorchFunctionMode):
    """A mode in which some tensors stand for Python numbers. Each comes with its sign, or None if it is not known.

    Results of arithmetic on numbers alone are numbers. Equal arithmetic is computed once: optimizers repeat it for each
    of their parameters.
    """

    def __init__(self, numbers: Iterable[tuple[torch.Tensor, int | None]]) -> None:
        super().__init__()
        # Holds the tensors, so that their ids stay valid.
        self._numbers: dict[int, torch.Tensor] = {}
        self._signs: dict[int, int] = {}
        self._results: dict[tuple, torch.Tensor] = {}
        for x, sign in numbers:
            self._numbers[id(x)] = x
            if sign is not None:
                self._signs[id(x)] = sign

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        count = sum(id(x) in self._numbers for x in tensors)
        name = getattr(func, "__name__", "")
        if count == 0 or name == "__get__":
            return func(*args, **kwargs)
        if name.startswith("_fused_"):
            return by_value(func, args, kwargs)
        if count == len(tensors):
            return self._of_numbers(func, name, args, kwargs)
        if name in _ROUNDED_ONCE and args[0].dtype in HALF:
            return _rounded_once(name, *args)
        return func(*args, **kwargs)

    def _of_numbers(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of an operation on numbers alone."""
        operation = name.strip("_")
        if operation == "to":
            return args[0]
        if operation in _COMPARISONS and self._is_known(args):
            return _COMPARISONS[operation](self._signs[id(args[0])], 0)
        if operation.removeprefix("r") in _ARITHMETIC and not kwargs:
            return self._arithmetic(func, name, args)
        return func(*args, **kwargs)

    def _is_known(self, args: tuple) -> bool:
        """Whether a comparison is one with zero of a number whose sign is known."""
        zero = len(args) == 1 or (type(args[1]) in (int, float) and args[1] == 0)
        return zero and id(args[0]) in self._signs

    def _arithmetic(self, func: Callable, name: str, args: tuple) -> torch.Tensor:
        """The result of arithmetic on numbers. It is computed once."""
        if name.endswith("_") and not name.endswith("__"):  # `x += 1` gives another number
            func = getattr(torch.Tensor, name.removesuffix("_"))
        key = (func, *((id(x) if isinstance(x, torch.Tensor) else repr(x)) for x in args))
        if key not in self._results:
            if any(isinstance(x, float) for x in args) or "div" in name:
                # PyTorch would compute with a whole number and a literal in fp32.
                args = tuple(x.double() if isinstance(x, torch.Tensor) else x for x in args)
            result = func(*args)
            self._results[key] = result
            self._numbers[id(result)] = result
        return self._results[key]


def _rounded_once(name: str, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """A product with a number, or a quotient. A number on a GPU would be rounded to the dtype of `x` first."""
    result = getattr(torch.Tensor, name.rstrip("_"))(x.float(), number).to(x.dtype)
    return x.copy_(result) if name.endswith("_") else result
