"""Gradients: whether a loop step resets the gradients of its parameters, or carries them in its state.

In an ordinary loop `.backward()` adds to the gradients of earlier calls, and `zero_grad` resets them. A lifted step
starts from its state alone. So if a call uses a gradient before it resets it, the gradients must be carried in the
state. Otherwise this is an error.

If they are not carried, each parameter starts a call with a placeholder as its gradient. What the loop does to the
placeholder shows whether it resets the gradient. For backward and for optimizers a placeholder counts as None. That is
right if the loop resets the gradient later, before the call ends.

If they are carried, a gradient is a tensor from the first call on, and begins with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..ir.relations import tensors_in
from ..ir.source import Source, user_source, where
from ..tracing.errors import TraceError

_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_ZEROS = ("zero_", "_foreach_zero_")
_DETACHES = ("detach_", "requires_grad_")  # which `zero_grad` calls before it sets zeros


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
    """Watch the gradients of parameters while a loop step runs.

    Args:
        params: the tensors that stand for the parameters of the module, by name.
        module_params: the parameters that the module itself has, by name.
        carried: the gradients of the state; None if they are not carried.
        has_optimizer: whether the loop step steps an optimizer. If it has none, the gradients are what it is for.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        module_params: Mapping[str, torch.Tensor],
        carried: Mapping[str, torch.Tensor] | None,
        has_optimizer: bool = True,
    ) -> None:
        super().__init__()
        self._has_optimizer = has_optimizer
        self._params = params
        self._carried = carried
        self._names = {id(p): name for name, p in params.items()}
        self._names_in_module = {id(p): name for name, p in module_params.items()}
        # The parameters that have a gradient from before `lift`.
        self._earlier = {name for name, p in module_params.items() if p.grad is not None}
        self._placeholders: dict[str, torch.Tensor] = {}
        self._computed_from: dict[str, Source | None] = {}  # placeholders that gave other values
        self._reset: set[str] = set()
        self._zeroed: set[str] = set()  # those that `zero_grad(set_to_none=False)` has reset
        # Gradients that backward has added to a gradient which is not reset, with its line.
        self._added: dict[str, Source | None] = {}
        # What used a gradient that is not reset, and where.
        self._used: dict[str, tuple[str, Source | None]] = {}
        self._reached: set[str] = set()  # the parameters that backward has reached
        # Those that an optimizer stepped before that, with its line.
        self._stepped_before: dict[str, Source | None] = {}
        self._ran_backward = False
        for name, p in params.items():
            if carried is not None:
                p.grad = carried.get(name)
            else:
                self._placeholders[name] = p.grad = torch.zeros_like(p)
        # The placeholders, and what backward has computed in their place, by their ids.
        self._not_reset = {id(g): (name, g) for name, g in self._placeholders.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _BACKWARD:
            return self._backward(func, args, kwargs)
        name = getattr(func, "__name__", "")
        attribute = ""
        if name in ("__get__", "__set__"):
            attribute = getattr(func.__self__, "__name__", "a property")
        if args and id(args[0]) in self._names_in_module and _has_effect(name, attribute):
            used = f".{attribute}" if attribute else name
            raise _taken_before(self._names_in_module[id(args[0])], used, user_source(2))
        if attribute == "grad" and name == "__set__" and id(args[0]) in self._names:
            self._set(self._names[id(args[0])], args[1])
        elif self._carried is None and not attribute:
            for x in tensors_in((args, kwargs)):
                if id(x) in self._not_reset:
                    self._see(self._not_reset[id(x)][0], x, name)
        return func(*args, **kwargs)

    def _set(self, name: str, gradient: torch.Tensor | None) -> None:
        """Record that the loop sets the gradient of a parameter."""
        if gradient is not None and self._has_placeholder(name) and name in self._computed_from:
            raise _from_none(name, self._computed_from[name])
        self._mark_reset(name)

    def _mark_reset(self, name: str) -> None:
        self._reset.add(name)
        self._added.pop(name, None)

    def _see(self, name: str, gradient: torch.Tensor, called: str) -> None:
        """Record that a function was called with a gradient that is not reset, or was not when it was computed."""
        is_placeholder = gradient is self._placeholders.get(name)
        if is_placeholder and called in _ZEROS:
            self._mark_reset(name)
            self._zeroed.add(name)
            return
        if is_placeholder and called in _DETACHES:
            return
        if is_placeholder and not called.endswith("_"):
            self._computed_from.setdefault(name, user_source(3))
        if name not in self._reset:
            use = "adds to" if name in self._added else f"reads ({called})"
            self._used.setdefault(name, (use, user_source(3)))

    def _backward(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run backward with None in place of placeholders, so that it sets gradients instead of adding to zeros."""
        source = user_source(3)
        waiting = [name for name in self._params if self._has_placeholder(name)]
        before = {name: _version(p.grad) for name, p in self._params.items()}
        for name in waiting:
            self._params[name].grad = None
            if name not in self._reset:
                # Before backward, because a hook may step an optimizer meanwhile.
                self._added[name] = source
        result = func(*args, **kwargs)
        self._ran_backward = True
        for name in waiting:
            gradient = self._params[name].grad
            if gradient is None:
                self._params[name].grad = self._placeholders[name]
                self._added.pop(name, None)
            elif name not in self._reset:
                self._not_reset[id(gradient)] = name, gradient
        self._reached |= {
            name for name, p in self._params.items() if _version(p.grad) != before[name]
        }
        return result

    def _has_placeholder(self, name: str) -> bool:
        placeholder = self._placeholders.get(name)
        return placeholder is not None and self._params[name].grad is placeholder

    def before_step(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare for a step of an optimizer with these parameters: a placeholder is None for it.

        Raises: TraceError for a gradient of zeros that backward has not reached.
        """
        source = user_source(3)
        for p in params:
            name = self._names[id(p)]
            if self._carried is not None:
                if name not in self._reached and name not in self._earlier and p.grad is not None:
                    self._stepped_before.setdefault(name, source)
            elif self._has_placeholder(name):
                if name in self._zeroed:
                    raise _of_zeros(name, source)
                is_reset = name in self._reset
                p.grad = None
                if not is_reset:
                    self._reset.discard(name)  # it is not the loop that has set None
                    self._used.setdefault(name, ("uses", source))
            elif name in self._added:
                self._used.setdefault(name, ("adds to", self._added[name]))

    def end(self) -> dict[str, torch.Tensor] | None:
        """The gradients for the new state, if they are carried.

        Raises: TraceError if the next call would need gradients that are not carried, or if a carried gradient would
            be None in the untouched loop.
        """
        if self._carried is not None:
            return self._new_carried()
        uses = dict(self._used)
        if not self._has_optimizer:
            uses.update({name: ("adds to", source) for name, source in self._added.items()})
        for name, (use, source) in uses.items():
            is_none = self._params[name].grad is None or self._has_placeholder(name)
            if not is_none or name in self._earlier:
                raise _not_reset(name, use, source)
        return None

    def _new_carried(self) -> dict[str, torch.Tensor]:
        for name, source in self._stepped_before.items():
            if name in self._reached:
                raise _early(name, source)
        new = {}
        for name, gradient in (self._carried or {}).items():
            p = self._params[name]
            if self._ran_backward and p.requires_grad and name not in self._reached | self._earlier:
                raise _not_reached(name)
            new[name] = torch.zeros_like(gradient) if p.grad is None else p.grad.detach()
        return new


def _has_effect(name: str, attribute: str) -> bool:
    """Whether a function changes a tensor, or reads its gradient, by its name or that of the attribute."""
    in_place = name.endswith("_") and not name.endswith("__")
    return attribute == "grad" or name == "__set__" or in_place or name.startswith("register_")


def _version(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """What shows whether a gradient is another one, or has changed."""
    return None if gradient is None else (id(gradient), gradient._version)


def _taken_before(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step uses {name} as it was taken from the module before ({use}). While the loop runs "
        f"another tensor stands in for it, and this one has no effect.\n"
        f"  at {where(source)}\n"
        f"Take parameters from the module inside the loop step: model.parameters()."
    )


def _not_reset(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step {use} the gradient that an earlier call has left for {name}: nothing resets it "
        f"before, and a lifted step starts from its state alone.\n"
        f"  at {where(source)}\n"
        f"Call optimizer.zero_grad() in the loop step, before backward and step(), or at the end; and before lift if "
        f"gradients are there. Or carry gradients from call to call: "
        f"lift(loop_step, model, optimizer, carry_grads=True)."
    )


def _from_none(name: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step computes a gradient for {name} from the one that it has, and backward has made none.\n"
        f"  at {where(source)}\n"
        f"Freeze the parameter, requires_grad_(False), or leave it out of what changes gradients."
    )


def _of_zeros(name: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: backward makes no gradient for {name}, and zero_grad(set_to_none=False) leaves the optimizer one of "
        f"zeros if an earlier call has made one, and none otherwise.\n"
        f"  at {where(source)}\n"
        f"Call zero_grad() without set_to_none=False, or keep the parameter out of the optimizer."
    )


def _not_reached(name: str) -> TraceError:
    return TraceError(
        f"lift: backward makes no gradient for {name}, and with carry_grads=True it would have one of zeros, which "
        f"momentum and weight decay use.\n"
        f"Freeze the parameter: requires_grad_(False)."
    )


def _early(name: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step calls step() before backward has made a gradient for {name}; the first call has none, "
        f"later calls have one, and a program is the same for all.\n"
        f"  at {where(source)}\n"
        f"Call backward before step() in the loop step."
    )
