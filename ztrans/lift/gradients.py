"""Check that a loop step resets its gradients, or carry them in its state.

In an ordinary loop `.backward()` adds to the gradients of earlier calls, and `zero_grad` resets them. A lifted step
starts from its state alone. With `carry_grads` the state has the gradients, with zeros for missing ones. Without it,
each call starts with no gradients. That gives the results of the loop if the loop resets each gradient before it uses
it, or leaves none for the next call. Any other loop is an error.

Private attributes of torch's objects are read here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..ir.nested import tensors_in
from ..ir.source import Source, user_source, where
from ..tracing.errors import TraceError

_ZERO_GRAD = (inspect.unwrap(Optimizer.zero_grad).__code__, nn.Module.zero_grad.__code__)


def carried_gradients(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The present gradients of parameters, for a state that carries them. A missing gradient is zeros."""
    gradients = {}
    for name, p in params.items():
        if p.grad is not None:
            gradients[name] = p.grad.detach()
        elif p.requires_grad:
            gradients[name] = torch.zeros_like(p)
    return gradients


class Gradients(TorchFunctionMode):
    """Stand-ins for the tensors of a module, and a record of how a loop step uses the gradients of its parameters.

    The loop may also hold tensors that it took from the module before, such as a list of its parameters. Inside the
    context every function of PyTorch gets the stand-ins in their place.

    Args:
        module_params: the module's own parameters, by name.
        values: their values in the state.
        buffers: the buffers of the state, by the ids of the module's buffers.
        carried: the gradients of the state; None if they are not carried.
        has_optimizer: whether the loop step steps an optimizer. Without one, its purpose is the gradients.

    Attributes:
        params: the stand-ins of the parameters, with the same hooks.
        stand_ins: these and the buffers, by the ids of the module's own tensors.
        data_set: the lines that set `.data` of a parameter, by its name.
    """

    def __init__(
        self,
        module_params: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        buffers: Mapping[int, torch.Tensor],
        carried: Mapping[str, torch.Tensor] | None,
        has_optimizer: bool = True,
    ) -> None:
        super().__init__()
        self._carried = carried
        self._has_optimizer = has_optimizer
        self._names_with_old_gradient = {
            name for name, p in module_params.items() if p.grad is not None
        }
        # The parameters whose gradients have been reset so far, and those that backward has reached.
        self._reset_names: set[str] = set()
        self._reached_names: set[str] = set()
        # The line of the first backward, and of the first use of a gradient, before the gradient is reset.
        self._line_of_backward: dict[str, Source | None] = {}
        self._first_use: dict[str, tuple[str, Source | None]] = {}
        # The lines of optimizer steps on parameters that backward has not reached before.
        self._line_of_early_step: dict[str, Source | None] = {}
        self.data_set: dict[str, Source | None] = {}
        self.params: dict[str, torch.Tensor] = {}
        self.stand_ins = dict(buffers)
        for name, value in values.items():
            gradient = carried.get(name) if carried is not None else None
            p = module_params[name]
            self.params[name] = self.stand_ins[id(p)] = self._stand_in(p, value, gradient)
        self._names = {id(p): name for name, p in self.params.items()}

    def _stand_in(
        self, p: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """A tensor with this value and gradient, and with the hooks of the parameter `p` of the module."""
        stand_in = value.detach()
        if value.is_floating_point() or value.is_complex():
            # Hooks can only be added to a tensor that requires a gradient, even if `p` has been frozen since. Our hook
            # is the first, so it sees a gradient before the loop does.
            stand_in.requires_grad_()
            stand_in.register_post_accumulate_grad_hook(self._record_backward)
            for hook in (p._backward_hooks or {}).values():
                stand_in.register_hook(hook)
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                stand_in.register_post_accumulate_grad_hook(hook)
        stand_in.requires_grad_(p.requires_grad)
        stand_in.grad = gradient
        return stand_in

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(id(x) in self.stand_ins for x in tensors_in((args, kwargs))):
            stand_in_of = lambda x: self.stand_ins.get(id(x), x)
            args, kwargs = pytree.tree_map_only(torch.Tensor, stand_in_of, (args, kwargs))
        name = getattr(func, "__name__", "")
        attribute = ""
        if name in ("__get__", "__set__"):
            attribute = getattr(func.__self__, "__name__", "a property")
        tensor = id(args[0]) if args else None
        if attribute == "grad" and tensor in self._names:
            self._record_access(self._names[tensor], name, _caller())
        if attribute == "data" and name == "__set__" and tensor in self._names:
            self.data_set[self._names[tensor]] = user_source()
        return func(*args, **kwargs)

    def _record_access(self, name: str, access: str, caller: FrameType) -> None:
        """Record that the loop reads or sets the gradient of a parameter."""
        if caller.f_code in _ZERO_GRAD:
            self._record_reset(name)
            if self._carried is None and not caller.f_locals["set_to_none"]:
                raise _zero_grad_error(user_source())
        elif access == "__set__":
            self._record_reset(name)
        else:
            self._record_use(name)
            if name in self._first_use and name in self._names_with_old_gradient:
                raise _stale_gradient_error(name, *self._first_use[name])

    def _record_reset(self, name: str) -> None:
        self._reset_names.add(name)
        self._line_of_backward.pop(name, None)

    def _record_use(self, name: str) -> None:
        if self._carried is None and name not in self._reset_names:
            if name in self._line_of_backward:
                self._first_use.setdefault(name, ("adds to", self._line_of_backward[name]))
            else:
                self._first_use.setdefault(name, ("reads", user_source()))

    def _record_backward(self, p: torch.Tensor) -> None:
        """Record that backward has reached a parameter. This runs before the hooks of the loop."""
        name = self._names[id(p)]
        self._reached_names.add(name)
        if name not in self._reset_names:
            self._line_of_backward.setdefault(name, user_source())

    def after_step(self, params: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer has stepped these parameters. In a hook, this mode would not see it."""
        source = user_source()
        for p in params:
            name = self._names[id(p)]
            if name in self._line_of_backward:
                self._record_use(name)
            if name not in self._reached_names:
                self._line_of_early_step.setdefault(name, source)

    def end(self) -> dict[str, torch.Tensor] | None:
        """The gradients for the new state, if they are carried.

        Raises: TraceError if the next call would need gradients that are not carried, or if a carried gradient would
            be None in the untouched loop.
        """
        if self._carried is not None:
            return self._new_gradients(self._carried)
        uses = dict(self._first_use)
        # Without an optimizer, a loop step computes gradients that its caller uses.
        if not self._has_optimizer:
            for name, source in self._line_of_backward.items():
                uses[name] = "adds to", source
        for name, (use, source) in uses.items():
            if self.params[name].grad is not None or name in self._names_with_old_gradient:
                raise _stale_gradient_error(name, use, source)
        return None

    def _new_gradients(self, carried: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new_gradients = {}
        for name, gradient in carried.items():
            p = self.params[name]
            has_gradient = name in self._reached_names and name not in self._line_of_early_step
            starts_without = p.requires_grad and name not in self._names_with_old_gradient
            # A call that steps without a backward uses the gradients of earlier calls.
            if self._reached_names and starts_without and not has_gradient:
                raise _no_gradient_error(name, self._line_of_early_step.get(name))
            new = torch.zeros_like(gradient) if p.grad is None else p.grad.detach()
            new_gradients[name] = new
        return new_gradients


def _caller() -> FrameType:
    """The frame of the function, of PyTorch or of the loop, that made the intercepted call."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _stale_gradient_error(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step {use} the gradient that an earlier call has left for {name}: nothing resets it "
        f"before, and a lifted step starts from its state alone.\n"
        f"  at {where(source)}\n"
        f"Call optimizer.zero_grad() in the loop step, before backward and step(), or at the end; and before lift if "
        f"gradients are there. Or carry gradients from call to call: "
        f"lift(loop_step, model, optimizer, carry_grads=True)."
    )


def _zero_grad_error(source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step calls zero_grad(set_to_none=False). The gradient of a parameter that backward does not "
        f"reach is then zeros or None, as an earlier call has reached it or not, and a lifted step starts from its "
        f"state alone.\n"
        f"  at {where(source)}\n"
        f"Call zero_grad() without set_to_none=False."
    )


def _no_gradient_error(name: str, source: Source | None) -> TraceError:
    step = f"  step() is called before at {where(source)}\n" if source is not None else ""
    return TraceError(
        f"lift: backward has made no gradient for {name}. With carry_grads=True it would have one of zeros, which "
        f"momentum and weight decay use; the loop has none in its first call.\n{step}"
        f"Call backward before step(). Or freeze the parameter: requires_grad_(False)."
    )
