"""A mode that replaces some functions of PyTorch while a step is traced, and explains the errors of all of them.

make_fx records the operations that these functions call. A function is replaced if it would read values, or if the
trace would not see what it does:

    torch.autograd.grad, loss.backward()    mark the gradients that they return (see `gradient_marks`)
    cond, scan, flex_attention              get functions that read only their arguments (see `higher_order`)
    add(x, y, alpha=tensor)                 becomes arithmetic on tensors (see `tensor_scalars`)
    x.data = value                          makes `x` the node of `value` in the trace
    F.one_hot(x, n)                         does not check the values of `x`

An error of any function gets the user's line and the types of its arguments.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

from ..ir.graph import Var
from ..ir.nested import tensors_in
from ..ir.source import user_source
from .errors import FAILURES, failed, operator_without_rule, outside_tensor
from .gradient_marks import BACKWARDS, MarkGradients, checked_losses, leaves_of
from .higher_order import call_closed
from .known_values import storage_of
from .tensor_scalars import with_tensor_scalar

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SET_DATA: Callable = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that read the values of a tensor from outside of the step, with no operation that a dispatch mode could see.
_READERS = (torch.Tensor.tolist, torch.tensor)
_DERIVATIVES = (torch.autograd.grad, *BACKWARDS)


class StepFunctions(MarkGradients):
    """Runs the functions of PyTorch that a step calls.

    Args:
        step: the name of the step, for errors.
        inputs: the tensors of the state and the batch by name, also for errors.
    """

    def __init__(self, step: str, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.step = step
        self._names = {storage_of(x): name for name, x in inputs.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            if func in _READERS:
                self._check_traced(args)
            if func in _DERIVATIVES:
                # No mode sees what an autograd.Function is called with.
                self._check_traced(leaves_of(checked_losses(self.step, *args[:1], **kwargs)))
            return self._run(func, args, kwargs)
        except tuple(FAILURES) as error:
            # A subclass is an error of ours or the user's.
            if type(error) not in FAILURES:
                raise
            explained = self._explained(error, func, args, kwargs)
            raise explained.with_traceback(error.__traceback__) from None

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if func in _DERIVATIVES:
            return self.run(func, args, kwargs)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(*args, **kwargs)
        result = with_tensor_scalar(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _higher_order(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        try:
            return call_closed(func, args, kwargs)
        except KeyError as error:
            # PyTorch has no rule for this operator under a transform of torch.func.
            if not isinstance(error.args[0], TransformType):
                raise
            transform = error.args[0].name.lower()
            raise operator_without_rule(func, transform, user_source(), self.step) from None

    def _check_traced(self, args: tuple | list) -> None:
        """Raises: ValueError for a tensor from outside of the step."""
        for x in tensors_in(args):
            if type(x) in _PLAIN and not is_functorch_wrapped_tensor(x):
                raise outside_tensor(x, user_source(), self.step)

    def _explained(self, error: Exception, func: Callable, args: tuple, kwargs: dict) -> Exception:
        """The error of a function, with the user's line and the types of the arguments."""
        tensors = list(tensors_in((args, kwargs)))
        descriptions = ", ".join(map(self._description, tensors))
        under_torch_func = any(map(is_functorch_wrapped_tensor, tensors))
        return failed(error, func, descriptions, user_source(), self.step, under_torch_func)

    def _description(self, x: torch.Tensor) -> str:
        """A tensor in an error: its type, and its name if it is an input of the step."""
        name = self._names.get(storage_of(x))
        var = Var(name or "", x.dtype, tuple(x.shape))
        return str(var) if name else var.type


def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    """Run `x.data = value`, which no dispatch mode sees: from now on `x` has the node of `value` in the trace."""
    mode = get_proxy_mode()
    # Nothing is being traced.
    if mode is None:
        return _SET_DATA(x, value)
    for tensor in (x, value):
        if get_proxy_slot(tensor, mode.tracer, None) is None:
            raise outside_tensor(tensor, user_source(), "the step")
    _SET_DATA(x, value)
    set_proxy_slot(x, mode.tracer, get_proxy_slot(value, mode.tracer))


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot` without a check of the values, which PyTorch's own reads under a transform of torch.func."""
    if num_classes < 0 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


_REPLACEMENTS: Mapping[Callable, Callable] = {
    _SET_DATA: _set_data,
    F.one_hot: _one_hot,
}
