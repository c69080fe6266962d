"""The state of a lifted loop: parameters, buffers, optimizer state, and, with `carry_grads`, gradients.

`state_of` reads it from a module and its optimizers, `write_back` writes it into them, and `module_state_dict` has its
tensors by the names under which the module saves them. The buffers include plain tensors in attributes of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..calling.host_memory import let_copies_end
from ..calling.meta_leaves import ValuesOfMeta
from ..ir.printer import nearest
from .gradients import carried_gradients
from .module_tensors import buffers_of, replace, substituted, tensors_of
from .moved_weights import has_moved, is_without_memory, moving_back
from .optimizer_state import (
    Entries,
    copied,
    create_state,
    lifted_entries,
    params_of,
    states_by_name,
)
from .scaler import scale_of

State = dict[str, Any]


def as_tuple(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """One optimizer, several or none as a tuple.

    Raises: TypeError for anything else, such as a scheduler or parameter groups.
    """
    if optimizer is None:
        return ()
    optimizers = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"expected an optimizer, or a sequence of optimizers, got {type(each).__name__}: "
                f"lift(loop_step, model, optimizer), write_back(model, optimizer, state)."
            )
    return optimizers


def state_of(model: nn.Module, optimizers: Sequence[Optimizer], carry_grads: bool) -> State:
    """The present state of a loop. An optimizer of torch.optim without state gets the state before its first step."""
    params = dict(model.named_parameters())
    names = {id(p): name for name, p in params.items()}
    entries_by_name: dict[str, Entries] = {}
    for optimizer in optimizers:
        with ValuesOfMeta():
            create_state(optimizer)
        for name, entries in states_by_name(optimizer, names).items():
            if entries:
                entries_by_name[name] = lifted_entries(optimizer, params[name])

    values = {name: p.detach() for name, p in params.items()}
    if has_moved(model):
        # Another state has the values.
        values = {name: torch.empty_like(x, device="meta") for name, x in values.items()}
    # The optimizer state is in the order of the parameters, also with several optimizers.
    state: State = {
        "params": values,
        "buffers": {name: x.detach() for name, x in buffers_of(model).items()},
        "optimizer": {name: entries_by_name[name] for name in params if name in entries_by_name},
    }
    if carry_grads:
        with ValuesOfMeta():
            state["grads"] = carried_gradients(params)
    return state


def write_back(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    state: State,
    *,
    scaler: GradScaler | None = None,
) -> None:
    """Write a lifted state (full tensors) back to the module and the optimizer or optimizers that it came from.

    Parameter groups stay as they are: learning rates belong to the optimizer and its scheduler, not to the state.

    Args:
        model: the module that was passed to `lift`.
        optimizer: the optimizer or optimizers that were passed to `lift`.
        state: the result of `Step.unshard`, or the state of a step without transforms.
        scaler: the GradScaler that was passed to `lift`.

    Raises: ValueError if the state belongs to another module, or to a loop without a scaler.
    """
    check_lifted_from(state, model, scaler)
    let_copies_end()
    with moving_back(model), torch.no_grad():
        for name, p in model.named_parameters():
            _write(p, state["params"][name])
        _write_buffers(model, state.get("buffers", {}))
        _write_optimizers(model, as_tuple(optimizer), state)
        for name, gradient in state.get("grads", {}).items():
            p = model.get_parameter(name)
            # Zeros may stand for a gradient that is None. Then it stays None.
            if p.grad is not None or gradient.any():
                p.grad = _in_layout_of(gradient, p).to(p.device, copy=True)
        if scaler is not None:
            device = next(iter(state["scaler"].values()), torch.empty(())).device
            for key, value in scale_of(scaler, device).items():
                value.copy_(state["scaler"][key])


def module_state_dict(model: nn.Module, state: State) -> dict[str, Any]:
    """`model.state_dict()` with the values of a lifted state: its own leaves. The module's values are not needed."""
    if not isinstance(model, nn.Module) or not isinstance(state, Mapping) or "params" not in state:
        raise TypeError(
            "state_dict: pass the module and the state of its lifted loop: zt.state_dict(model, state)."
        )
    check_lifted_from(state, model, None, "state_dict")
    values = {**state.get("buffers", {}), **state["params"]}
    own = tensors_of(model)
    with substituted(model, {id(x): values[name] for name, x in own.items() if name in values}):
        saved = dict(model.state_dict(keep_vars=True))
    stale = {id(x) for name, x in own.items() if name not in values}
    for name, x in saved.items():
        if id(x) in stale:
            raise ValueError(
                f"state_dict: the state has no {name}, and the module saves it.\n"
                f"Pass the whole state of the lifted loop, with its buffers."
            )
    return saved


def _write_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    expanded = {}
    for name, x in buffers_of(model).items():
        if name not in values:
            continue
        # The elements of an expanded tensor share memory, so it cannot be written.
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
            expanded[id(x)] = values[name].clone()
        else:
            _write(x, values[name])
    replace(model, expanded)


def _write_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], state: State) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p in params_of(optimizer):
            for key, value in state["optimizer"].get(names[id(p)], {}).items():
                present = optimizer.state[p].get(key)
                if present is None:
                    optimizer.state[p][key] = copied(value)
                else:
                    optimizer.state[p][key] = pytree.tree_map(_write, present, value)


def _write(present: Any, value: Any) -> Any:
    """Write a value of a state to a tensor, and return it; for a number, return the new one."""
    if isinstance(value, DTensor) and not isinstance(present, DTensor):
        raise TypeError(
            "write_back: the state has the parts of this rank, and the module has whole tensors.\n"
            "Gather it first: zt.write_back(model, optimizer, step.unshard(state))."
        )
    if isinstance(present, torch.Tensor) and is_without_memory(present):
        return copied(value)
    if isinstance(present, torch.Tensor):
        return present.copy_(_in_layout_of(value, present))
    return type(present)(value.item())


def _in_layout_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor in the layout of `like`; nothing is sent."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def check_lifted(state: Any, step: str, keys: Sequence[str]) -> None:
    """Raises: TypeError if the first argument of a lifted step is not a lifted state with these keys."""
    if isinstance(state, Mapping) and "params" in state:
        for key in keys:
            if key not in state:
                raise TypeError(
                    f"lift: the state that {step} was called with has no {key!r}.\n"
                    f"Pass the whole state: state, output = {step}(state, ...)."
                )
        return
    description = f"a {type(state).__name__}"
    if isinstance(state, torch.Tensor):
        # While the step is traced, the type would be FakeTensor.
        description = "a Tensor"
    elif isinstance(state, tuple):
        description = "a tuple, as the step returns it"
    raise TypeError(
        f"lift: the first argument of {step} is {description}, and a lifted step takes its state first.\n"
        f"Call it as state, output = {step}(state, ...), with the state that lift returns."
    )


def check_lifted_from(
    state: State, model: nn.Module, scaler: GradScaler | None, call: str = "write_back"
) -> None:
    """Raises: ValueError for a state that lacks parameters of the module, or the scale of the scaler."""
    missing = [name for name, _ in model.named_parameters() if name not in state["params"]]
    if missing:
        raise ValueError(
            f"{call}: the state has no parameter {missing[0]!r}, and the module has"
            f"{nearest(missing[0], state['params'])}.\n"
            f"Pass the module that was given to lift."
        )
    if scaler is not None and "scaler" not in state:
        raise ValueError(
            "write_back: the state has no scale, because its loop was lifted without a scaler.\n"
            "Leave out scaler=..., or lift the loop with it: lift(loop_step, model, optimizer, scaler=scaler)."
        )
