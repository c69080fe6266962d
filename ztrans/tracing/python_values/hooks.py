"""Hooks: functions that PyTorch calls at modules, gradients and optimizers. The code of a step does not name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle


class Hooks:
    """Places where hooks may be added: dicts of hooks, and parameters.

    Every call of a step asks for the present hooks. PyTorch numbers each hook that is added anywhere, so all places are
    looked through only if a number was given since, or if a dict that had hooks has fewer.
    """

    def __init__(self) -> None:
        self._dicts: list[dict] = []
        self._parameters: list[nn.Parameter] = []
        self._number, self._held, self._hooks = -1, list[tuple[dict, int]](), list[Callable]()

    def add(self, dicts: Iterable[dict], parameters: Iterable[nn.Parameter]) -> list[Callable]:
        """Add places, and return the hooks that they have."""
        added = Hooks()
        added._dicts, added._parameters = list(dicts), list(parameters)
        self._dicts += added._dicts
        self._parameters += added._parameters
        return added.present()

    def present(self) -> list[Callable]:
        """All hooks, in the same list as before if there was no change."""
        number = RemovableHandle.next_id
        if number != self._number or any(len(hooks) != count for hooks, count in self._held):
            of_parameters = ((p._backward_hooks, p._post_accumulate_grad_hooks) for p in self._parameters)
            dicts = [*self._dicts, *(hooks for pair in of_parameters for hooks in pair)]
            self._number, self._held = number, [(hooks, len(hooks)) for hooks in dicts if hooks]
            self._hooks = [hook for hooks, _ in self._held for hook in hooks.values()]
        return self._hooks
