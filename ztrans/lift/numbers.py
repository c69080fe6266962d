"""Make Python numbers of a loop inputs of its program: tensors stand for them, and behave like numbers.

The numbers are the floats of parameter groups, and the counts that an optimizer keeps as Python numbers. The tensors
are fp64 and int64, with PyTorch's arithmetic. They differ from other tensors: `x += 1` makes a new number, a cast does
not change a number, and the result of a comparison with zero is known.

A fused kernel takes a learning rate as a tensor, and all other numbers by value: PyTorch reads a tensor there when it
calls the kernel. In a trace there is no value to read. So the call is traced with other values, and the tensors are
then written into its node. An FX graph with such a node can be read and imported, but cannot run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..ir.nested import tensors_in
from ..ops import HALF

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool")
_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "pow", "neg", "sqrt")
_ROUNDED_ONCE = ("mul", "mul_", "div", "div_")
# The numbers that a fused kernel takes as tensors.
_TENSOR_ARGUMENTS = ("lr", "grad_scale", "found_inf")
# The placeholder for a number in the traced call of a fused kernel. Any value would do.
_PLACEHOLDER = 0.5


class Numbers(TorchFunctionMode):
    """A mode that makes some tensors behave like Python numbers.

    Results of arithmetic on numbers alone are numbers too.

    Args:
        numbers: the tensors, each with its sign, or None if the sign is not known.
    """

    def __init__(self, numbers: Iterable[tuple[torch.Tensor, int | None]]) -> None:
        super().__init__()
        # The dict keeps the tensors alive, so that their ids stay valid.
        self._numbers: dict[int, torch.Tensor] = {}
        self._signs: dict[int, int] = {}
        for x, sign in numbers:
            self._numbers[id(x)] = x
            if sign is not None:
                self._signs[id(x)] = sign

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = tensors_in((args, kwargs))
        are_numbers = [id(x) in self._numbers for x in tensors]
        # `__get__` reads an attribute, such as the dtype.
        if name == "__get__" or not any(are_numbers):
            return func(*args, **kwargs)
        if name.startswith("_fused_"):
            return _call_fused(func, args, kwargs)
        if all(are_numbers):
            return self._on_numbers(func, name, args, kwargs)
        # A number on the left: PyTorch would round a tensor there to half precision.
        if name == "mul" and are_numbers[0] and len(tensors) == 2:
            args = (tensors[1], tensors[0])
        if name in _ROUNDED_ONCE and args[0].dtype in HALF:
            return _rounded_once(name, *args, **kwargs)
        return func(*args, **kwargs)

    def _on_numbers(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of an operation on numbers alone."""
        operation = name.strip("_")
        # A cast does not change a Python number.
        if operation == "to":
            return args[0]
        # The sign is part of the signature of the program, so a result that depends on it alone is known.
        sign = self._signs.get(id(args[0]))
        if operation in _COMPARISONS and sign is not None:
            if operation == "bool":
                return sign != 0
            if type(args[1]) in (int, float) and args[1] == 0:
                return getattr(operator, operation)(sign, 0)
        if operation.removeprefix("r") in _ARITHMETIC and not kwargs:
            return self._arithmetic(func, name, args)
        return func(*args, **kwargs)

    def _arithmetic(self, func: Callable, name: str, args: tuple) -> torch.Tensor:
        # `x += 1` makes a new number, and does not write into this one.
        is_special_method = name.endswith("__")
        if name.endswith("_") and not is_special_method:
            func = getattr(torch.Tensor, name.removesuffix("_"))
        # With a whole number and a literal, PyTorch would compute in fp32. Python computes in fp64.
        if "div" in name or any(isinstance(x, float) for x in args):
            args = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, args)
        result = func(*args)
        self._numbers[id(result)] = result
        return result


def _rounded_once(name: str, x: torch.Tensor, *number: Any, **options: Any) -> torch.Tensor:
    """A product or quotient, rounded once. On a GPU, PyTorch would round the number to the dtype of `x` first."""
    operation = getattr(torch.Tensor, name.rstrip("_"))
    result = operation(x.float(), *number, **options).to(x.dtype)
    return x.copy_(result) if name.endswith("_") else result


def _call_fused(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a fused optimizer, with tensors for keyword arguments that it takes by value."""
    mode = get_proxy_mode()
    if mode is None:
        return func(*args, **kwargs)
    # PyTorch would read these tensors, which have no values. So the call gets placeholders, and its node the tensors.
    number_nodes = {}
    for key, x in kwargs.items():
        if isinstance(x, torch.Tensor) and key not in _TENSOR_ARGUMENTS:
            number_nodes[key] = get_proxy_slot(x, mode.tracer).proxy.node
    if not number_nodes:
        return func(*args, **kwargs)

    placeholders = dict.fromkeys(number_nodes, _PLACEHOLDER)
    result = func(*args, **{**kwargs, **placeholders})
    # The last node of a fused optimizer is the node of this call.
    for node in reversed(mode.tracer.graph.nodes):
        if "_fused_" in str(node.target):
            node.kwargs = {**node.kwargs, **number_nodes}
            break
    return result
