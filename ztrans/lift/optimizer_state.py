"""The state of an optimizer, and what it is before the first step.

A lifted step needs that state before it runs, and most optimizers create it in their first step. The classes of
torch.optim create it in a method of its own, which `create_state` calls. Any other optimizer takes one step before
`lift`.

Private attributes of torch's objects are read here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..calling.signature import is_number
from ..tracing.errors import TraceError

# The state of an optimizer for one parameter, as `exp_avg` and `step`.
Entries = dict[str, Any]

# The optimizers whose fused form runs on every device. Fused Adagrad runs on CPUs only.
_FUSIBLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch.optim."""
    return type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)


def is_based_on_torch(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is one of torch.optim, or is derived from one."""
    for base in type(optimizer).__mro__:
        if base is not Optimizer and getattr(torch.optim, base.__name__, None) is base:
            return True
    return False


def may_fuse(
    optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[torch.Tensor, Entries]
) -> bool:
    """Whether a parameter group may run the fused form of its optimizer, if the user has not set `fused`.

    The fused form agrees with the others to 1e-6 in fp32 and fp64. In half precision it rounds once, and the others
    after each operation. `state` has the entries of each parameter: fused kernels read step counts in fp32, on the
    parameter's device.
    """
    if type(optimizer) not in _FUSIBLE or group["fused"] is not None:
        return False
    if group["differentiable"] or group.get("capturable"):
        return False
    for p in group["params"]:
        if p.dtype not in (torch.float32, torch.float64):
            return False
        step = state.get(p, {}).get("step")
        if step is not None and (step.dtype != torch.float32 or step.device != p.device):
            return False
    return True


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups."""
    params: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises: ValueError for optimizers that `lift` cannot work with."""
    names = {id(p): name for name, p in model.named_parameters()}
    ids = set[int]()
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "lift: LBFGS runs the loss several times in a closure; use an optimizer whose step() takes none."
            )
        for p in params_of(optimizer):
            if id(p) not in names:
                raise ValueError(
                    f"lift: the optimizer holds a parameter {list(p.shape)} that is not the model's.\n"
                    f"Build the optimizer from model.parameters(), after moving or changing the model."
                )
            if id(p) in ids:
                raise ValueError(
                    f"lift: {names[id(p)]} is held by two optimizers; every parameter may have one."
                )
            ids.add(id(p))


def create_state(optimizer: Optimizer) -> None:
    """Give an optimizer of torch.optim the state that it has before its first step. Its parameters are not changed.

    Raises: ValueError for an optimizer whose first step differs from the others.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "lift: SparseAdam takes sparse gradients, and all gradients of a program are dense.\n"
            "Use torch.optim.Adam, and leave out sparse=True of the embeddings."
        )
    if not is_of_torch(optimizer):
        return
    # `_init_group` makes the state of parameters that have a gradient, whose values it does not read.
    fresh = [p for p in params_of(optimizer) if p.requires_grad and not optimizer.state.get(p)]
    gradients = [p.grad for p in fresh]
    try:
        for p in fresh:
            p.grad = p.detach()
        for group in optimizer.param_groups:
            _create_state_of_group(optimizer, group, fresh)
    finally:
        for p, gradient in zip(fresh, gradients):
            p.grad = gradient


def _create_state_of_group(
    optimizer: Optimizer, group: dict[str, Any], fresh: Sequence[torch.Tensor]
) -> None:
    init_group: Any = optimizer._init_group  # type: ignore[attr-defined]
    # Besides the group it takes lists, as many as the optimizer has kinds of tensors, and fills them for its step.
    _, *list_names = inspect.signature(init_group).parameters
    init_group(group, *([] for _ in list_names))

    # SGD's first step copies the gradient to the buffer. From a buffer of zeros, the later steps do the same.
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
        fresh_ids = set(map(id, fresh))
        created = [p for p in group["params"] if id(p) in fresh_ids]
        if created and group["dampening"] != 0:
            raise ValueError(_first_step(optimizer, "'momentum_buffer' without dampening"))
        for p in created:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def is_state(key: str, value: Any) -> bool:
    """Whether an optimizer's entry `key` is part of the state: a tensor, a number, or a container of these.

    Raises: ValueError for a container that also has constants.
    """
    leaves = pytree.tree_leaves(value)
    constants = [x for x in leaves if not isinstance(x, torch.Tensor) and not is_number(x)]
    if constants and len(constants) < len(leaves):
        raise ValueError(
            f"lift: the optimizer keeps {constants[0]!r} among the tensors of its state {key!r}, and a state holds "
            f"tensors and numbers alone.\nKeep it under a key of its own."
        )
    return bool(leaves) and not constants


def state_entries(state: Mapping[str, Any]) -> Entries:
    """The entries of an optimizer's state for a parameter that are part of the lifted state."""
    return {key: value for key, value in state.items() if is_state(key, value)}


def lifted_entries(optimizer: Optimizer, p: torch.Tensor) -> Entries:
    """An optimizer's entries for a parameter, as the lifted state has them.

    If the step may run the fused form of the optimizer, the step count is on the parameter's device, where fused
    kernels read it. PyTorch's default form has it on the CPU.
    """
    entries = state_entries(optimizer.state[p])
    step = entries.get("step")
    if type(optimizer) in _FUSIBLE and step is not None and not p.is_meta:
        entries["step"] = step.to(p.device)
    return entries


def constant_entries(state: Mapping[str, Any]) -> Entries:
    """The other entries: None, truth values, text."""
    return {key: value for key, value in state.items() if not is_state(key, value)}


def copied(entries: Any) -> Any:
    """These entries, or the value of one, with copies of the tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), entries)


def states_by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Entries]:
    """The state of an optimizer by the names of its parameters. `names` has them by the ids of the parameters.

    Raises: TraceError for an entry that is not for a parameter of the model.
    """
    by_name = {}
    for key, entries in optimizer.state.items():
        if id(key) not in names:
            kind = f"a tensor {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise TraceError(
                f"lift: the state of {type(optimizer).__name__} has an entry for {kind}, which is not a parameter of "
                f"the model.\n"
                f"Keep what changes in the state of a parameter, optimizer.state[p], and settings in its group."
            )
        by_name[names[id(key)]] = entries
    return by_name


def numbers_of_states(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], state: Mapping[str, Entries]
) -> Iterator[tuple[torch.Tensor, None]]:
    """The leaves of `state`, by parameter, that optimizers keep as Python numbers, such as a count of steps.

    Their signs are not known.
    """
    for optimizer in optimizers:
        for name, entries in states_by_name(optimizer, names).items():
            in_state = state.get(name, {})
            for key, value in entries.items():
                stand_ins = pytree.tree_leaves(in_state.get(key))
                for number, stand_in in zip(pytree.tree_leaves(value), stand_ins):
                    if is_number(number):
                        yield stand_in, None


def check_known(
    optimizer: Optimizer, new_state: Mapping[str, dict], known_state: Mapping[str, dict]
) -> None:
    """Raises: TraceError for state that the traced step has created, as every later step would create it again."""
    for name, state in new_state.items():
        new = [key for key in state_entries(state) if key not in known_state.get(name, {})]
        if not new:
            continue
        if not is_of_torch(optimizer):
            raise TraceError(_first_step(optimizer, f"{', '.join(map(repr, new))} for {name}"))
        raise TraceError(
            f"lift: the optimizer made {', '.join(new)} for {name}, which the lifted state does not hold.\n"
            f"If a parameter is trained from now on, or a setting of the optimizer has changed, write the state back "
            f"and lift again: zt.write_back(model, optimizer, step.unshard(state)); step, state = zt.lift(...)."
        )


def _first_step(optimizer: Optimizer, entries: str) -> str:
    return (
        f"lift: {type(optimizer).__name__} makes its state in its first step, {entries}, and lift does not know what "
        f"it is before that.\n"
        f"Take one step before lift, on every rank, and start all ranks from rank 0's state: "
        f"step.shard(state, source=0)."
    )
