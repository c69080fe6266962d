"""Kept gradients: the gradients that parameters keep from one call of a loop step to the next.

In an ordinary loop `.backward()` adds to the gradients of earlier calls, and `zero_grad` resets them. A lifted step
starts from its state alone. So if a call uses gradients before it resets them, they must be carried in the state;
otherwise this is an error.

If gradients are not carried, each parameter starts a call with a placeholder as its gradient. The operations on the
placeholder show whether the loop resets it. For backward and for optimizers a placeholder counts as None. That is right
if the parameter's gradient is also None at the end of the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..ir.relations import tensors_in
from ..ir.source import Source, user_source, where
from ..tracing.errors import TraceError

_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_ZEROS = ("zero_", "_foreach_zero_")
_OVERWRITES = ("fill_", "copy_", "_foreach_copy_")
_LOOPS = weakref.WeakKeyDictionary[nn.Module, list[set[str]]]()  # see `with_gradients`


def kept(own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The present gradients of the parameters, for a state that carries them. A missing one is zeros."""
    carried = {k: p for k, p in own.items() if p.requires_grad or p.grad is not None}
    return {
        k: torch.zeros_like(p) if p.grad is None else p.grad.detach() for k, p in carried.items()
    }


def with_gradients(model: nn.Module) -> list[set[str]]:
    """For each loop that carries gradients of a module, the parameters that have had a gradient in it.

    A loop that only steps the optimizer is given gradients that another loop has accumulated.
    """
    return _LOOPS.setdefault(model, [])


class KeptGradients(TorchFunctionMode):
    """Watch the gradients of `params`, by name, while a loop step runs.

    `carried` holds the gradients of the state, or is None if they are not carried. `had` names the parameters that
    have had a gradient in an earlier call, and `end` adds to it. The gradient of any other parameter is None, and not
    zeros, until backward reaches it.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        carried: Mapping[str, torch.Tensor] | None,
        had: set[str],
    ) -> None:
        super().__init__()
        self.params, self.carried, self.had = params, carried, had
        begin = {k: torch.zeros_like(p) for k, p in params.items() if p.requires_grad or k in had}
        self._begin = begin if carried is None else dict(carried)
        self._versions = {name: g._version for name, g in self._begin.items()}
        self._zeroed: set[str] = set()  # placeholders that the loop has set to zero
        # Gradients that backward computed as if the placeholder were None, with the line that called backward.
        self._unsure: dict[str, Source | None] = {}
        self._as_none: dict[
            str, Source | None
        ] = {}  # such gradients that were used, and placeholders that were used
        # Placeholders of parameters that backward has never reached, each with the line that has read it, if any.
        self._none: dict[str, Source | None] = {}
        self._owner = {id(p): name for name, p in params.items()}
        self._gradient_of = {id(g): (name, g) for name, g in self._begin.items()}
        for name, gradient in self._begin.items():
            params[name].grad = gradient

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _BACKWARD:
            return self._backward(func, args, kwargs, user_source(2))
        if getattr(func, "__name__", "") == "__set__" and func.__self__.__name__ == "grad":
            self._set(self._owner.get(id(args[0]), ""), args[1])
        given = [
            self._gradient_of[id(x)]
            for x in tensors_in((args, kwargs))
            if id(x) in self._gradient_of
        ]
        result = func(*args, **kwargs)
        for name, gradient in given:
            self._see(name, gradient, func, args, result)
        return result

    def _is_as_begun(self, name: str) -> bool:
        """Whether a parameter still has the gradient with which the call began, unchanged or set to zero."""
        gradient = self._begin.get(name)
        return (
            gradient is not None
            and self.params[name].grad is gradient
            and gradient._version == self._versions[name]
        )

    def _backward(self, func: Callable, args: tuple, kwargs: dict, source: Source | None) -> Any:
        """Run backward with None in place of placeholders, so that it sets gradients instead of adding to zeros."""
        placeholders = {
            name: g
            for name, g in self._begin.items()
            if self.carried is None and self._is_as_begun(name)
        }
        for name in placeholders:
            self.params[name].grad = None
        # Before backward, because a hook may step an optimizer during backward.
        self._unsure |= dict.fromkeys(placeholders.keys() - self._zeroed, source)
        result = func(*args, **kwargs)
        for name, gradient in placeholders.items():
            computed = self.params[name].grad
            if computed is not None:
                self._gradient_of[id(computed)] = name, computed
                continue
            self._unsure.pop(name, None)
            if name not in self._as_none:
                self.params[name].grad = gradient
        self._find_none()
        return result

    def _find_none(self) -> None:
        """After backward, find the placeholders of parameters that backward has never reached, which are None."""
        before, self._none = (
            self._none,
            {k: None for k in self._begin.keys() - self.had if self._is_as_begun(k)},
        )
        self._none |= {name: line for name, line in before.items() if name in self._none}
        if self.carried is None:
            reached = before.keys() - self._none.keys() - self._zeroed
            self._as_none |= {name: before[name] for name in reached if before[name]}

    def _is_none(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether a gradient is a placeholder that backward has never reached."""
        return name in self._none and gradient is self._begin[name]

    def _set(self, name: str, gradient: torch.Tensor | None) -> None:
        """Record that the loop sets the gradient of a parameter."""
        self._unsure.pop(name, None)
        if gradient is not None and (source := self._none.pop(name, None)) is not None:
            raise _from_none(name, source)

    def _see(
        self, name: str, gradient: torch.Tensor, func: Callable, args: tuple, result: Any
    ) -> None:
        """Record that `func` was called with a gradient that parameter `name` has, or has had."""
        called = getattr(func, "__name__", "")
        results = {*map(id, tensors_in(result))} - {id(gradient)}
        begins = gradient is self._begin.get(name) and name not in self._zeroed
        if self._is_none(name, gradient):  # no optimizer sees what the loop does to it
            self._versions[name] = gradient._version
            self._none[name] = user_source(3) if results else self._none[name]
        if called in _ZEROS:
            self._unsure.pop(name, None)
            self._zeroed |= {name} if begins else set()
            self._versions[name] = gradient._version
        elif self.carried is not None or self._is_none(name, gradient):
            return
        elif called in _OVERWRITES and args[0] is gradient:
            self._unsure.pop(name, None)
            self._begin.pop(name, None)
        elif begins and (results or gradient._version != self._versions[name]):
            raise _kept(name, f"reads ({called})", user_source(3))
        elif results and name in self._unsure:
            self._as_none[name] = self._unsure[name]

    def before_step(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare for a step of an optimizer with these parameters: set placeholders to None, so that it skips them."""
        for name in (self._owner[id(p)] for p in params):
            if name in self._unsure:
                self._as_none[name] = self._unsure[name]
            stays = name in self.had and (self.carried is not None or name in self._zeroed)
            if self._is_as_begun(name) and not stays:
                self.params[name].grad = None
                self._as_none[name] = user_source(2)

    def end(self) -> dict[str, torch.Tensor] | None:
        """The gradients for the new state, if they are carried.

        Raises: ValueError if the next call would need gradients that are not carried, or if a gradient that counted
            as None is not None in every call.
        """
        for name, source in self._as_none.items():
            if self.params[name].grad is not None or (self.carried is None and name in self.had):
                raise (
                    _early(name, source)
                    if self.carried is not None
                    else _kept(name, "adds to", source)
                )
        self.had.update(
            k for k, p in self.params.items() if p.grad is not None and not self._is_as_begun(k)
        )
        return None if self.carried is None else self._new_carried()

    def _new_carried(self) -> dict[str, torch.Tensor]:
        """The gradients for the new state. Zeros take the place of None."""
        now = {name: None if name in self._none else self.params[name].grad for name in self._begin}
        stays = self._as_none.keys() - self._none.keys()
        none = {
            name: g if name in stays else torch.zeros_like(g) for name, g in self._begin.items()
        }
        return {name: none[name] if g is None else g.detach() for name, g in now.items()}


def _kept(name: str, use: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step {use} the gradient that an earlier call has left for {name}: nothing resets it "
        f"before, and a lifted step starts from its state alone.\n"
        f"  at {where(source)}\n"
        f"Call optimizer.zero_grad() in the loop step, before backward and step(), or at the end with "
        f"set_to_none=True; and before lift if gradients are there. Or carry gradients from call to call: "
        f"lift(loop_step, model, optimizer, carry_grads=True)."
    )


def _from_none(name: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step computes a gradient for {name} from the one that it has, and backward has made none.\n"
        f"  at {where(source)}\n"
        f"Freeze the parameter, requires_grad_(False), or leave it out of what changes gradients."
    )


def _early(name: str, source: Source | None) -> TraceError:
    return TraceError(
        f"lift: the loop step calls step() before backward has made a gradient for {name}; the first call has none, "
        f"later calls have one, and a program is the same for all.\n"
        f"  at {where(source)}\n"
        f"Call backward before step() in the loop step."
    )
