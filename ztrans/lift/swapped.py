"""Swapped: the tensors of a lifted state in place of those of a module and its optimizers.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.optim import Optimizer

from ..ir.ambient import having
from .hyperparameters import Group
from .lifted_state import State, constants

# Optimizers that choose an update by a value that they read, unless they are capturable.
_CHOOSING = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
_COUNTS = ("step", "eta", "mu")  # in their state


@contextlib.contextmanager
def swapped(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    names: dict[int, str],
    state: State,
    inputs: Sequence[Group],
) -> Iterator[dict[str, torch.Tensor]]:
    """While this is active, the module and the optimizers use the tensors of the state and these inputs of groups."""
    own = dict(model.named_parameters())
    params = {
        name: p.detach().requires_grad_(own[name].requires_grad)
        for name, p in state["params"].items()
    }
    for name, p in own.items():
        for hook in (p._backward_hooks or {}).values():
            params[name].register_hook(hook)
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            params[name].register_post_accumulate_grad_hook(hook)
    tensors = {**params, **state["buffers"]}
    with (
        stateless._reparametrize_module(model, tensors, tie_weights=True),
        contextlib.ExitStack() as stack,
    ):
        rest = iter(inputs)
        for o in optimizers:
            stack.enter_context(
                _held(o, params, names, [next(rest) for _ in o.param_groups], state["optimizer"])
            )
        yield params


@contextlib.contextmanager
def _held(
    optimizer: Optimizer,
    params: Mapping[str, torch.Tensor],
    names: dict[int, str],
    inputs: list[Group],
    state: Mapping,
) -> Iterator[None]:
    """While this is active, the optimizer uses these parameters, these inputs and its part of `state`."""
    old_groups, old_state = optimizer.param_groups, optimizer.state
    own = [[names[id(p)] for p in group["params"]] for group in old_groups]
    groups = [
        {**g, "params": [params[name] for name in mine], **new}
        for g, mine, new in zip(old_groups, own, inputs)
    ]
    changes = {"foreach": False} | (
        {"capturable": True} if isinstance(optimizer, _CHOOSING) else {}
    )
    for group in (
        groups
    ):  # one parameter at a time, as a program has one equation for each parameter in any case
        if not group.get("fused"):
            group.update({k: v for k, v in changes.items() if k in group})
    held = {names[id(p)]: constants(s) for p, s in old_state.items() if id(p) in names}
    new_state = {
        params[k]: {**held.get(k, {}), **state[k]} for mine in own for k in mine if k in state
    }
    with having(optimizer, param_groups=groups, state=defaultdict(dict, new_state)):
        yield


def widened(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """The counts of optimizers in `_CHOOSING`, widened to fp64, as outside of a trace they are Python numbers."""
    counts: list[torch.Tensor] = []
    for state in (s for o in optimizers if isinstance(o, _CHOOSING) for s in o.state.values()):
        wide = {k: state[k].to(torch.float64, copy=True) for k in _COUNTS if k in state}
        state.update(wide)
        counts += wide.values()
    return counts
