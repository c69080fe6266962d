"""The state of a lifted loop: parameters, buffers, optimizer state, and with `carry_grads` gradients.

`state_of` reads it from a module and its optimizers, and `restore` writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..calling.call import ExtraInputs
from ..calling.inputs import local_part, overlapping
from ..calling.signature import is_number
from ..calling.trees import named_leaves, state_leaves
from .gradients import kept
from .hyperparameters import groups_of
from .optimizer_state import copied, make
from .scaler import scale_of

State = dict[str, Any]


def several(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """One optimizer, several or none as a tuple."""
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())


def check_lifted(state: Any, step: str) -> None:
    """Raises: TypeError if the first argument of a lifted step is no state that `lift` has returned."""
    if not isinstance(state, Mapping) or "params" not in state:
        what = (
            "a tuple, as the step returns it"
            if isinstance(state, tuple)
            else f"a {type(state).__name__}"
        )
        raise TypeError(
            f"lift: the first argument of {step} is {what}, and a lifted step takes its state first.\n"
            f"Call it as state, output = {step}(state, ...), with the state that lift returns."
        )


def is_state(key: str, value: Any) -> bool:
    """Whether an optimizer's entry `key` is part of the state: a tensor, a number, or a container of these.

    Raises: ValueError for a container that also has constants.
    """
    leaves = state_leaves(value)
    changing = [isinstance(x, torch.Tensor) or is_number(x) for x in leaves]
    if any(changing) and not all(changing):
        constant = next(x for x, changes in zip(leaves, changing) if not changes)
        raise ValueError(
            f"lift: the optimizer keeps {constant!r} among the tensors of its state {key!r}, and a state holds tensors "
            f"and numbers alone.\nKeep it under a key of its own."
        )
    return any(changing)


def constants(state: dict[str, Any]) -> dict[str, Any]:
    """The constants in an optimizer's state for a parameter: None, truth values, text."""
    return {k: v for k, v in state.items() if not is_state(k, v)}


def state_of(
    model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str], carry_grads: bool
) -> State:
    """The present state of a loop. An optimizer without a state gets the one that it has before its first step.

    `names` has the names of the parameters by their ids.
    """
    for o in optimizers:
        make(o, names)
    own, states = (
        dict(model.named_parameters()),
        [item for o in optimizers for item in o.state.items()],
    )
    by_name = {
        names[id(p)]: {key: v for key, v in s.items() if is_state(key, v)} for p, s in states if s
    }
    state = {
        "params": {k: p.detach() for k, p in own.items()},
        "buffers": {k: b.detach() for k, b in model.named_buffers()},
        "optimizer": {k: by_name[k] for k in names.values() if k in by_name},
    }
    return state | ({"grads": kept(own)} if carry_grads else {})


def restore(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    state: State,
    *,
    scaler: GradScaler | None = None,
) -> None:
    """Write a lifted state (full tensors) back to the module and the optimizer or optimizers that it came from.

    Parameter groups stay as they are: learning rates belong to the optimizer and its scheduler, not to the state.

    Args:
        model: the module that was given to `lift`.
        optimizer: the optimizer or optimizers that were given to `lift`.
        state: what `Step.unshard` returns, or the state of a step without transforms.
        scaler: the GradScaler that was given to `lift`.
    """
    optimizers = several(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        tensors = {**state["params"], **state.get("buffers", {})}
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            _written(own, tensors[name])
        for o in optimizers:
            for p in (p for group in o.param_groups for p in group["params"]):
                for key, value in state["optimizer"].get(names[id(p)], {}).items():
                    held = o.state[p].get(key)
                    o.state[p][key] = (
                        copied(value) if held is None else pytree.tree_map(_written, held, value)
                    )
        for name, gradient in state.get("grads", {}).items():
            p = model.get_parameter(name)
            if p.grad is not None or gradient.any():  # zeros may represent a gradient that is None
                p.grad = _laid(gradient, p).clone()
        if scaler is not None:
            for key, value in scale_of(scaler, state["scaler"]["scale"].device).items():
                value.copy_(state["scaler"][key])


def _written(held: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, DTensor) and not isinstance(held, DTensor):
        raise TypeError(
            "restore: the state has the parts of this rank, and the module has whole tensors.\n"
            "Gather it first: zt.restore(model, optimizer, step.unshard(state))."
        )
    return (
        held.copy_(_laid(value, held))
        if isinstance(held, torch.Tensor)
        else type(held)(value.item())
    )


def _laid(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor in the layout of `like`; nothing is sent."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def completed(fn: Callable, state: Any, shard: Callable[[Any], Any]) -> Any:
    """A state with the leaves that it lacks if `fn` is lifted and parameters have been unfrozen, in their layouts."""
    missing: State = fn.missing_state(state) if isinstance(fn, ExtraInputs) else {}
    more = shard(missing) if missing else {}
    return {**state, **{key: {**state[key], **more[key]} for key in more}} if more else state


def check_apart(state: State) -> None:
    """Raises: ValueError for tensors that share memory if a step changes them, because leaves of a state do not."""
    in_memory = lambda x: (
        isinstance(x, torch.Tensor) and not x.is_meta and x.layout is torch.strided
    )
    held = {name: local_part(x) for name, x in named_leaves(state).items() if in_memory(x)}
    names = list(held)
    for i, j in overlapping(list(held.values())):
        if not (names[i].startswith("buffers.") and names[j].startswith("buffers.")):
            raise ValueError(
                f"lift: {names[i]} and {names[j]} share memory, and in a state each would have its own.\n"
                f"Use one parameter for both, first.weight = second.weight, or give one of them a copy: .clone()."
            )


def check_known(after: Mapping[str, dict], known: Mapping[str, dict]) -> None:
    """Raises: ValueError for optimizer state that the step has created, as every later step would create it again."""
    for name, state in after.items():
        new = [k for k, v in state.items() if is_state(k, v) and k not in known.get(name, {})]
        if new:
            raise ValueError(
                f"lift: the optimizer made {', '.join(new)} for {name}, which the lifted state does not hold.\n"
                f"A parameter that is trained from now on: call the step itself, which adds it to the state. Another "
                f"setting of the optimizer: call lift again."
            )


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The names of the module's parameters by their ids.

    Raises: TypeError for a model that is no module; ValueError for optimizers that `lift` cannot work with.
    """
    if not isinstance(model, nn.Module):
        of_optimizer, of_others = (
            "Pass the module first",
            "Combine several modules in one, nn.ModuleList([...])",
        )
        raise TypeError(
            f"lift: the model is a {type(model).__name__}, and no nn.Module.\n"
            f"{of_optimizer if isinstance(model, Optimizer) else of_others}: lift(loop_step, model, optimizer)."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    seen = set[int]()
    for p in (p for group in groups_of(optimizers) for p in group["params"]):
        if id(p) not in names:
            raise ValueError(
                f"lift: the optimizer holds a parameter {list(p.shape)} that is not the model's.\n"
                f"Build the optimizer from model.parameters(), after moving or changing the model."
            )
        if id(p) in seen:
            raise ValueError(
                f"lift: {names[id(p)]} is held by two optimizers; every parameter may have one."
            )
        seen.add(id(p))
    if any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise ValueError(
            "lift: LBFGS runs the loss several times in a closure; use an optimizer whose step() takes none."
        )
    return names
