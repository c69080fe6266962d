"""Whether a loop step resets the gradients of its parameters, or carries them in its state.

In an ordinary loop `.backward()` adds to the gradients of earlier calls, and `zero_grad` resets them. A lifted step
starts from its state alone. With `carry_grads` the state has the gradients, and zeros where there are none. Without it,
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

from ..ir.source import Source, user_source, where
from ..tracing.errors import TraceError, outside_tensor

_ZERO_GRAD = (inspect.unwrap(Optimizer.zero_grad).__code__, nn.Module.zero_grad.__code__)


def carried_gradients(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The present gradients of parameters, for a state that carries them. A missing one is zeros."""
    carried = {}
    for name, p in params.items():
        if p.grad is not None:
            carried[name] = p.grad.detach()
        elif p.requires_grad:
            carried[name] = torch.zeros_like(p)
    return carried


class Gradients(TorchFunctionMode):
    """Tensors that stand for the parameters of a module, and what a loop step does to their gradients.

    Args:
        module_params: the parameters that the module itself has, by name.
        values: their values in the state.
        carried: the gradients of the state; None if they are not carried.
        has_optimizer: whether the loop step steps an optimizer. Without one, its purpose is the gradients.

    Attributes:
        params: the tensors that stand for the parameters. They have the hooks of these.
        data_set: the lines that set `.data` of a parameter, by its name.
    """

    def __init__(
        self,
        module_params: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        carried: Mapping[str, torch.Tensor] | None,
        has_optimizer: bool = True,
    ) -> None:
        super().__init__()
        self._carried = carried
        self._has_optimizer = has_optimizer
        self._from_before_lift = {name for name, p in module_params.items() if p.grad is not None}
        # What has happened to the gradients so far, by the names of their parameters: some are reset, and some are
        # reached by backward.
        self._reset: set[str] = set()
        self._reached: set[str] = set()
        # The lines of backward, and of other uses, before a gradient is reset.
        self._line_of_backward: dict[str, Source | None] = {}
        self._first_use: dict[str, tuple[str, Source | None]] = {}
        # The lines of steps, for parameters that backward had not reached.
        self._line_of_early_step: dict[str, Source | None] = {}
        self.data_set: dict[str, Source | None] = {}
        self.params: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            gradient = carried.get(name) if carried is not None else None
            self.params[name] = self._stand_in(module_params[name], value, gradient)
        self._names = {id(p): name for name, p in self.params.items()}
        self._ids_in_module = set(map(id, module_params.values()))

    def _stand_in(
        self, p: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """A tensor with this value and gradient, and with the hooks of the parameter `p` of the module."""
        stand_in = value.detach()
        if value.is_floating_point() or value.is_complex():
            # Hooks can be added to a tensor that requires a gradient, and `p` may be frozen since. Ours comes first,
            # so it sees a gradient before the loop does.
            stand_in.requires_grad_()
            stand_in.register_post_accumulate_grad_hook(self._see_backward)
            for hook in (p._backward_hooks or {}).values():
                stand_in.register_hook(hook)
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                stand_in.register_post_accumulate_grad_hook(hook)
        stand_in.requires_grad_(p.requires_grad)
        stand_in.grad = gradient
        return stand_in

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        attribute = ""
        if name in ("__get__", "__set__"):
            attribute = getattr(func.__self__, "__name__", "a property")
        tensor = id(args[0]) if args else None
        if tensor in self._ids_in_module and _has_effect(name, attribute):
            raise outside_tensor(args[0], user_source(), "the loop step")
        if attribute == "grad" and tensor in self._names:
            self._see_access(self._names[tensor], name, _caller())
        if attribute == "data" and name == "__set__" and tensor in self._names:
            self.data_set[self._names[tensor]] = user_source()
        return func(*args, **(kwargs or {}))

    def _see_access(self, name: str, access: str, caller: FrameType) -> None:
        """Record that the loop reads or sets the gradient of a parameter."""
        if caller.f_code in _ZERO_GRAD:
            self._mark_reset(name)
            if self._carried is None and not caller.f_locals["set_to_none"]:
                raise _of_zeros(user_source())
        elif access == "__set__":
            self._mark_reset(name)
        else:
            self._mark_first_use(name)
            if name in self._first_use and name in self._from_before_lift:
                raise _not_reset(name, *self._first_use[name])

    def _mark_reset(self, name: str) -> None:
        self._reset.add(name)
        self._line_of_backward.pop(name, None)

    def _mark_first_use(self, name: str) -> None:
        if self._carried is None and name not in self._reset:
            if name in self._line_of_backward:
                self._first_use.setdefault(name, ("adds to", self._line_of_backward[name]))
            else:
                self._first_use.setdefault(name, ("reads", user_source()))

    def _see_backward(self, p: torch.Tensor) -> None:
        """Record that backward has reached a parameter, before hooks of the loop see it."""
        name = self._names[id(p)]
        self._reached.add(name)
        if name not in self._reset:
            self._line_of_backward.setdefault(name, user_source())

    def after_step(self, params: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer has stepped these parameters, maybe in a hook, where this mode sees nothing."""
        source = user_source()
        for p in params:
            name = self._names[id(p)]
            if name in self._line_of_backward:
                self._mark_first_use(name)
            if name not in self._reached:
                self._line_of_early_step.setdefault(name, source)

    def end(self) -> dict[str, torch.Tensor] | None:
        """The gradients for the new state, if they are carried.

        Raises: TraceError if the next call would need gradients that are not carried, or if a carried gradient would
            be None in the untouched loop.
        """
        if self._carried is not None:
            return self._new_carried(self._carried)
        uses = dict(self._first_use)
        # A loop step without an optimizer computes gradients for somebody else, who uses them.
        if not self._has_optimizer:
            for name, source in self._line_of_backward.items():
                uses[name] = "adds to", source
        for name, (use, source) in uses.items():
            if self.params[name].grad is not None or name in self._from_before_lift:
                raise _not_reset(name, use, source)
        return None

    def _new_carried(self, carried: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        new = {}
        for name, gradient in carried.items():
            p = self.params[name]
            has_gradient = name in self._reached and name not in self._line_of_early_step
            starts_without = p.requires_grad and name not in self._from_before_lift
            # A call that only steps, without a backward, uses the gradients of earlier calls.
            if self._reached and starts_without and not has_gradient:
                raise _missing(name, self._line_of_early_step.get(name))
            new[name] = torch.zeros_like(gradient) if p.grad is None else p.grad.detach()
        return new


def _caller() -> FrameType:
    """The function of PyTorch or of the loop that has called a function which modes have intercepted."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_effect(name: str, attribute: str) -> bool:
    """Whether a function changes a tensor or reads its gradient. `attribute` is what a property gets or sets."""
    if attribute == "grad" or name == "__set__":
        return True
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name.startswith("register_")


def _not_reset(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step {use} the gradient that an earlier call has left for {name}: nothing resets it "
        f"before, and a lifted step starts from its state alone.\n"
        f"  at {where(source)}\n"
        f"Call optimizer.zero_grad() in the loop step, before backward and step(), or at the end; and before lift if "
        f"gradients are there. Or carry gradients from call to call: "
        f"lift(loop_step, model, optimizer, carry_grads=True)."
    )


def _of_zeros(source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step calls zero_grad(set_to_none=False). The gradient of a parameter that backward does not "
        f"reach is then zeros or None, as an earlier call has reached it or not, and a lifted step starts from its "
        f"state alone.\n"
        f"  at {where(source)}\n"
        f"Call zero_grad() without set_to_none=False."
    )


def _missing(name: str, source: Source | None) -> TraceError:
    step = f"  step() is called before at {where(source)}\n" if source is not None else ""
    return TraceError(
        f"lift: backward has made no gradient for {name}. With carry_grads=True it would have one of zeros, which "
        f"momentum and weight decay use; the loop has none in its first call.\n{step}"
        f"Call backward before step(). Or freeze the parameter: requires_grad_(False)."
    )
