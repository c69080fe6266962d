"""Move the weights of a module, and the moments of its optimizers, into the state of a step.

`lift` returns a state that shares the memory of the module. A step writes to its state, and the module would silently
keep old weights, and their memory. So `Step.shard`, or else the first call of a step that trains, moves them: each
parameter and each moment of an optimizer gives up its memory, and is one NaN that is expanded to its shape. Parameters
stay the same objects, because optimizers, hooks and the user's code refer to them. Whoever then runs, saves, copies or
loads the module, or saves an optimizer, gets an error that says what to write. `write_back` gives module and optimizers
their values again.

Buffers keep their memory: most are small, and a trace may read their values.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

# A parameter that has moved --> the strides that it had.
_params = WeakIdKeyDictionary()
# A module that has moved --> its hooks.
_modules: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
# The optimizers that have a hook, which refuses as long as their moments are in a state.
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class WeightsInState(RuntimeError):
    """The weights of a module are in the state of a step."""


def move_to_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Free the memory of a module's parameters and its optimizers' tensors, and refuse uses of the module.

    >>> model = nn.Linear(2, 1)
    >>> move_to_state(model, ())
    >>> model(torch.ones(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ztrans.lift.moved_weights.WeightsInState: the weights of Linear are in the state of a step...
    """
    for optimizer in optimizers:
        if optimizer not in _optimizers:
            _optimizers.add(optimizer)
            optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        for entries in optimizer.state.values():
            entries.update(pytree.tree_map_only(torch.Tensor, _without_memory, dict(entries)))
    if model in _modules:
        return
    for p in model.parameters():
        _params[p] = p.stride()
        freed = _without_memory(p)
        if freed is not p:
            p.data = freed
    _modules[model] = list(_refusals(model))


@contextlib.contextmanager
def moving_back(model: nn.Module) -> Iterator[None]:
    """Give the parameters of a module memory for their values, and allow every use after the context.

    If the context fails, the module may have some values only, so uses of it stay refused.
    """
    for p in model.parameters():
        strides = _params.get(p)
        if strides is not None and is_without_memory(p):
            p.data = torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device)
    yield
    for p in model.parameters():
        _params.pop(p, None)
    for hook in _modules.pop(model, ()):
        hook.remove()


def has_moved(x: nn.Module | torch.Tensor) -> bool:
    """Whether the weights of a module, or the values of a parameter, are in the state of a step."""
    return x in _modules if isinstance(x, nn.Module) else x in _params


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    """One NaN in the shape of a tensor, or one 0. What needs no memory stays, such as a step count.

    A DTensor stays too: it holds only this rank's part.
    """
    if type(x) not in (torch.Tensor, nn.Parameter) or x.is_meta or x.numel() <= 1:
        return x
    has_nan = x.is_floating_point() or x.is_complex()
    return x.detach().new_full((), float("nan") if has_nan else 0).expand(x.shape)


def is_without_memory(x: torch.Tensor) -> bool:
    """Whether all elements of a tensor are one number in memory."""
    return x.numel() > 1 and not any(x.stride())


def _refuse_state_dict(optimizer: Optimizer) -> None:
    """A hook that raises an error if an optimizer is saved while its moments are NaN in place of their values."""
    for x in pytree.tree_leaves(list(optimizer.state.values())):
        if isinstance(x, torch.Tensor) and is_without_memory(x):
            raise WeightsInState(
                f"the moments of {type(optimizer).__name__} are in the state of a step, and the optimizer has none.\n"
                f"  1. To save them: zt.save(path, state). Its extras hold the scheduler.\n"
                f"  2. To read the settings: optimizer.param_groups.\n"
                f"  3. To use the optimizer until the next step: zt.write_back(model, optimizer, step.unshard(state))."
            )


class _Refusal:
    """A hook that raises an error if a module is used with its own parameters, and if it is copied or pickled.

    While a step is traced, the tensors of a state stand in for the parameters.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if any(map(has_moved, module.parameters(recurse=False))):
            raise WeightsInState(self._text)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise WeightsInState(self._text)

    def __reduce__(self) -> NoReturn:
        raise WeightsInState(self._text)


def _refusals(model: nn.Module) -> Iterator[RemovableHandle]:
    """Register the hooks, on each module that has parameters of its own."""
    refusal = _Refusal(
        f"the weights of {type(model).__name__} are in the state of a step, and the module has none.\n"
        f"  1. To evaluate or to generate with them: step.eval(fn)(state, *batch), where fn(*batch) uses the module.\n"
        f"  2. To save them: zt.save(path, state), or as safetensors zt.export(path, zt.state_dict(model, state)).\n"
        f"  3. To use the module until the next step: zt.write_back(model, optimizer, step.unshard(state))."
    )
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield module.register_forward_pre_hook(refusal)
            yield module.register_state_dict_pre_hook(refusal)
            yield module.register_load_state_dict_pre_hook(refusal)
