"""The state of an optimizer, created before its first step.

A lifted step needs the state before it runs, but most optimizers create it in their first step. The classes of
torch.optim have a separate method for that, which `create_state` calls. Any other optimizer must take one step before
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
from ..ir.source import Source, where
from ..tracing.errors import OutsideTensorError, TraceError

# The state of an optimizer for one parameter, such as `exp_avg` and `step`.
Entries = dict[str, Any]

# The attributes of an optimizer that lift reads elsewhere.
_OWN = ("state", "param_groups", "defaults")

# The optimizers whose fused form runs on every device. Fused Adagrad runs on CPUs only.
_FUSIBLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch.optim."""
    return type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)


def is_based_on_torch(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer is from torch.optim, or derived from one that is."""
    for base in type(optimizer).__mro__:
        if base is not Optimizer and getattr(torch.optim, base.__name__, None) is base:
            return True
    return False


def may_fuse(
    optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[torch.Tensor, Entries]
) -> bool:
    """Whether a parameter group may run the fused form of its optimizer, if the user has not set `fused`.

    The fused form agrees with the other forms to 1e-6 in fp32 and fp64. In half precision it rounds once, but the other
    forms after each operation. Fused kernels read step counts in fp32, on the parameter's device.

    Args:
        optimizer: the optimizer.
        group: the parameter group.
        state: the optimizer's entries for each parameter.
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
                    f"lift: {type(optimizer).__name__} holds a parameter {list(p.shape)} that is not the model's.\n"
                    f"Build the optimizer from model.parameters(), after moving or changing the model. What it trains "
                    f"besides, such as the temperature of SAC, must be a parameter of the module too: "
                    f"nn.ModuleList([model, nn.ParameterList([log_alpha])]), with log_alpha = nn.Parameter(...)."
                )
            if id(p) in ids:
                raise ValueError(
                    f"lift: {names[id(p)]} is held by two optimizers; every parameter may have one."
                )
            ids.add(id(p))


def create_state(optimizer: Optimizer) -> None:
    """Create the state of an optimizer of torch.optim as it is before the first step. No parameter changes.

    Raises: ValueError for an optimizer whose first step differs from later steps, and for SparseAdam.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "lift: SparseAdam takes sparse gradients, and all gradients of a program are dense.\n"
            "Use torch.optim.Adam, and leave out sparse=True of the embeddings."
        )
    if not is_of_torch(optimizer):
        return
    # `_init_group` makes the state of parameters that have a gradient. It does not read the gradients' values.
    new_params = [p for p in params_of(optimizer) if p.requires_grad and not optimizer.state.get(p)]
    gradients = [p.grad for p in new_params]
    try:
        for p in new_params:
            p.grad = p.detach()
        for group in optimizer.param_groups:
            _create_state_of_group(optimizer, group, new_params)
    finally:
        for p, gradient in zip(new_params, gradients):
            p.grad = gradient


def _create_state_of_group(
    optimizer: Optimizer, group: dict[str, Any], new_params: Sequence[torch.Tensor]
) -> None:
    """Create the state of the parameters of a group. `new_params` are all parameters without state."""
    init_group: Any = optimizer._init_group  # type: ignore[attr-defined]
    # After the group it takes one list for each kind of tensor that the optimizer has, and fills these for its step.
    _, *list_names = inspect.signature(init_group).parameters
    init_group(group, *([] for _ in list_names))

    # SGD's first step copies the gradient to the buffer. With a buffer of zeros, a later step has the same result.
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
        new_ids = set(map(id, new_params))
        new_in_group = [p for p in group["params"] if id(p) in new_ids]
        if new_in_group and group["dampening"] != 0:
            raise ValueError(_first_step(optimizer, "'momentum_buffer' without dampening"))
        for p in new_in_group:
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
    """The entries of an optimizer's state for one parameter that are part of the lifted state."""
    return {key: value for key, value in state.items() if is_state(key, value)}


def lifted_entries(optimizer: Optimizer, p: torch.Tensor) -> Entries:
    """An optimizer's entries for a parameter in the lifted state.

    If the step may run the fused form of the optimizer, the step count is on the parameter's device, where fused
    kernels read it. PyTorch's default form keeps it on the CPU.
    """
    entries = state_entries(optimizer.state[p])
    step = entries.get("step")
    if type(optimizer) in _FUSIBLE and step is not None and not p.is_meta:
        entries["step"] = step.to(p.device)
    return entries


def constant_entries(state: Mapping[str, Any]) -> Entries:
    """The entries that are not part of the lifted state: None, bools, text."""
    return {key: value for key, value in state.items() if not is_state(key, value)}


def copied(entries: Any) -> Any:
    """Entries, or the value of one entry, with copies of their tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), entries)


def states_by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Entries]:
    """The state of an optimizer by parameter names. `names` are the names by the ids of the parameters.

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


def loose_tensors(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an optimizer keeps elsewhere than in the state of a parameter, each with its name."""
    values = {f"self.{key}": x for key, x in vars(optimizer).items() if key not in _OWN}
    for k, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                values[f"self.param_groups[{k}][{key!r}]"] = value
    for name, value in values.items():
        for keys, x in pytree.tree_leaves_with_path(value):
            if isinstance(x, torch.Tensor):
                yield name + pytree.keystr(keys), x


def explain_loose(
    error: OutsideTensorError, optimizers: Sequence[Optimizer], lifted_at: Source | None
) -> TraceError | None:
    """The error for a tensor that an optimizer keeps outside of its state; None for a tensor of something else.

    Args:
        error: the error of the trace.
        optimizers: the optimizers of the loop.
        lifted_at: the line that calls `lift`.
    """
    line = "\n".join(text for text in str(error).splitlines() if text.startswith("  "))
    for optimizer in optimizers:
        for name, x in loose_tensors(optimizer):
            if x is error.tensor:
                kind = str(x.dtype).removeprefix("torch.")
                return TraceError(
                    f"lift: {type(optimizer).__name__} keeps {name}, a tensor {list(x.shape)} ({kind}), which is not "
                    f"in the state of a parameter, so the lifted state does not have it.\n{line}\n"
                    f"  lifted at {where(lifted_at)}\n"
                    f"Keep it where the optimizer has its moments: self.state[p][key] for a tensor of the parameter p. "
                    f"For one of all parameters take the first p, self.param_groups[0]['params'][0]. Then take one "
                    f"step before lift. A constant may be a Python number in the parameter group."
                )
    return None


def numbers_of_states(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], state: Mapping[str, Entries]
) -> Iterator[tuple[torch.Tensor, None]]:
    """The leaves of `state` that optimizers keep as Python numbers, such as counts of steps. Their signs are unknown.

    Args:
        optimizers: the optimizers.
        names: the names of the parameters by their ids.
        state: the entries of the lifted state by the names of the parameters.
    """
    for optimizer in optimizers:
        for name, entries in states_by_name(optimizer, names).items():
            stand_in_entries = state.get(name, {})
            for key, value in entries.items():
                stand_ins = pytree.tree_leaves(stand_in_entries.get(key))
                for number, stand_in in zip(pytree.tree_leaves(value), stand_ins):
                    if is_number(number):
                        yield stand_in, None


def check_known(
    optimizer: Optimizer, new_state: Mapping[str, dict], known_state: Mapping[str, dict]
) -> None:
    """Raises: TraceError for state that the traced step has created: every later step would create it again."""
    for name, state in new_state.items():
        new_keys = [key for key in state_entries(state) if key not in known_state.get(name, {})]
        if not new_keys:
            continue
        if not is_of_torch(optimizer):
            raise TraceError(_first_step(optimizer, f"{', '.join(map(repr, new_keys))} for {name}"))
        raise TraceError(
            f"lift: the optimizer made {', '.join(new_keys)} for {name}, which the lifted state does not hold.\n"
            f"If a parameter is trained from now on, or a setting of the optimizer has changed, write the state back "
            f"and lift again: zt.write_back(model, optimizer, step.unshard(state)); step, state = zt.lift(...)."
        )


def _first_step(optimizer: Optimizer, entries: str) -> str:
    """The error of an optimizer that makes these entries in its first step."""
    return (
        f"lift: {type(optimizer).__name__} makes its state in its first step, {entries}, and lift does not know what "
        f"it is before that.\n"
        f"Take one step before lift, on every rank, and start all ranks from rank 0's state: "
        f"step.shard(state, source=0)."
    )
