"""Gradient marks: while a step is traced, each gradient is marked with the value that it is the gradient of.

A torch-function mode intercepts `torch.autograd.grad`, which `torch.func.grad` calls too, and marks the gradients that
it returns (see `ops.marks`). The mode also expresses `.backward()` by `torch.autograd.grad`, and an operation whose
scalar is a tensor (`add(x, y, alpha=tensor)`) by arithmetic on tensors.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import TransformType
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.overrides import TorchFunctionMode

from ..ir.graph import Var
from ..ir.relations import reachable, tensors_in
from ..ir.source import user_source
from .dtensors import marked
from .errors import (
    FAILURES,
    failed,
    no_gradient,
    no_transform,
    outside_tensor,
    sparse_gradient,
)
from .higher_order import call_closed
from .tensor_scalars import with_tensor_scalar

_READERS = (torch.Tensor.tolist, torch.tensor)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SET_DATA: Callable = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class Marks(TorchFunctionMode):
    """Mark the gradients that `torch.autograd.grad` returns, and express `.backward()` by it.

    `inputs` are the tensors of the state and the batch by name, for the errors of functions that fail.
    """

    def __init__(self, step: str, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.step = step
        self._names = {_storage(x): name for name, x in inputs.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            if func in _READERS:
                self._check_traced(args)
            if func in _DERIVATIVES:
                self._check_differentiable(*args[:1], **(kwargs or {}))
            return self._run(func, args, kwargs or {})
        except tuple(FAILURES) as error:
            if type(error) not in FAILURES:  # a subclass, such as an error of ours
                raise
            tensors = list(tensors_in((args, kwargs)))
            described = ", ".join(map(self._described, tensors))
            by_func = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
            failure = failed(error, func, described, user_source(2), self.step, by_func)
            raise failure.with_traceback(error.__traceback__) from None

    def _described(self, x: torch.Tensor) -> str:
        """A tensor as errors show it: its type, and its name if it is an input of the step."""
        name = self._names.get(_storage(x))
        var = Var(name or "", x.dtype, tuple(x.shape))
        return str(var) if name else var.type

    def _check_traced(self, args: tuple) -> None:
        """Raises: ValueError for a tensor from outside of the step, whose values no dispatch mode sees being read."""
        for x in tensors_in(args):
            if type(x) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise outside_tensor(x, user_source(3), self.step)

    def _check_differentiable(self, outputs: Any = None, tensors: Any = None, **_: Any) -> None:
        losses = outputs if tensors is None else tensors
        if not any(x.requires_grad for x in _listed(losses)):
            raise no_gradient(user_source(), self.step)

    def _higher_order(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        try:
            return call_closed(func, args, kwargs)
        except KeyError as error:
            # PyTorch has no rule of the operator for a transform of torch.func.
            if not isinstance(error.args[0], TransformType):
                raise
            raise no_transform(
                func, error.args[0].name.lower(), user_source(2), self.step
            ) from None

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is torch.autograd.grad:
            grads = _dense(func(*args, **kwargs))
            inputs = _listed(args[1] if len(args) > 1 else kwargs["inputs"])
            return tuple(g if g is None else marked(g, p) for g, p in zip(grads, inputs))
        if func == _SET_DATA:
            return _renamed(func, *args)
        if func in _DERIVATIVES:
            return _backward(*args, **kwargs)
        if func is F.one_hot:
            return _one_hot(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        result = with_tensor_scalar(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _storage(x: torch.Tensor) -> int | None:
    """The storage of a tensor, also inside transforms of torch.func; None for a tensor without one."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def _renamed(set_data: Callable, x: torch.Tensor, value: torch.Tensor) -> None:
    """Run `x.data = value`, which no dispatch mode sees: from here on the trace knows `x` as the node of `value`."""
    mode = get_proxy_mode()
    if mode is None:  # no trace is under way
        return set_data(x, value)
    for tensor in (x, value):
        if get_proxy_slot(tensor, mode.tracer, None) is None:
            raise outside_tensor(tensor, user_source(3), "the step")
    set_data(x, value)
    set_proxy_slot(x, mode.tracer, get_proxy_slot(value, mode.tracer))


def _backward(
    loss, *, gradient=None, grad_tensors=None, inputs=None, retain_graph=None, create_graph=False
) -> None:
    """`loss.backward(gradient)` or `torch.autograd.backward(losses, grad_tensors)`: add the gradients to `.grad`."""
    losses = _listed(loss)
    seeds = gradient if grad_tensors is None else grad_tensors
    leaves = _leaves(losses) if inputs is None else _listed(inputs)
    grads = torch.autograd.grad(
        losses,
        leaves,
        None if seeds is None else _listed(seeds),
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    for leaf, g in zip(leaves, _dense(grads)):
        if g is not None:
            # A fused optimizer pairs the elements of a leaf and its gradient by their order in memory. State is
            # contiguous, so the gradient must be too. PyTorch's own `.backward()` does the same.
            g = marked(g.contiguous(), leaf)
            _accumulate(leaf, g, create_graph)


def _dense(grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """These gradients. Raises: ValueError if one is sparse: its shape depends on values."""
    if any(g is not None and g.layout is not torch.strided for g in grads):
        raise sparse_gradient(user_source(2))
    return grads


def _accumulate(leaf: torch.Tensor, g: torch.Tensor, create_graph: bool) -> None:
    """Add a gradient to `.grad` of a leaf, and run the hooks of that."""
    if leaf.grad is None:
        leaf.grad = g
    elif create_graph:
        leaf.grad = leaf.grad + g
    else:
        with torch.no_grad():
            leaf.grad.add_(g)
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot` without the check of its values: inside of torch.func's transforms, PyTorch's own reads them."""
    if num_classes < 0 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _listed(tensors: Any) -> list:
    """A tensor or several, in any form that autograd accepts, as a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list(tensors.values()) if isinstance(tensors, dict) else list(tensors)


def _leaves(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass would reach."""

    def inputs_of(node: Any) -> list:
        return [each for each, _ in node.next_functions if each is not None]

    last = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    leaves: dict[int, torch.Tensor] = {}
    for node in reachable(last, inputs_of):
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
    return list(leaves.values())
