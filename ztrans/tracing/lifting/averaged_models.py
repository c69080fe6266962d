"""Averaged models: a moving average of the parameters, which an `AveragedModel` of torch.optim.swa_utils keeps.

Its first update copies the parameters, and all later ones average them. It reads its count of updates to choose. A
program computes the average, and selects the copy if the count is 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from ...ir.ambient import having


@contextlib.contextmanager
def averaging(model: nn.Module) -> Iterator[None]:
    """While this is active, each averaged model in `model` updates itself without reading its count."""
    with contextlib.ExitStack() as stack:
        for m in model.modules():
            if isinstance(m, AveragedModel):
                stack.enter_context(having(m, update_parameters=_update_of(m, m.update_parameters)))
        yield


def _update_of(averaged: AveragedModel, later: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The update of an averaged model, given its update of a model that it has averaged before."""

    def update(model: nn.Module) -> None:
        is_first = averaged.n_averaged == 0
        with _Counted(averaged.n_averaged):
            later(model)
        for mine, own in zip(_values(averaged.module, averaged), _values(model, averaged)):
            mine.copy_(torch.where(is_first, own.to(mine.device), mine))

    return update


def _values(module: nn.Module, averaged: AveragedModel) -> list[torch.Tensor]:
    """The tensors of a module that are averaged."""
    buffers = module.buffers() if averaged.use_buffers else ()
    return [x.detach() for x in (*module.parameters(), *buffers)]


class _Counted(TorchFunctionMode):
    """A mode in which a count is more than 0."""

    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "").strip("_")
        if name in ("eq", "gt") and args[0] is self._count and args[1:] == (0,):
            return name == "gt"
        return func(*args, **(kwargs or {}))
