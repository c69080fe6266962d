"""The state of a lifted loop: parameters, buffers, optimizer state, and with `carry_grads` gradients.

`state_of` reads it from a module and its optimizers, and `write_back` writes it into them. Plain tensors in attributes
of the module are among the buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..calling.host_memory import let_copies_end
from ..calling.inputs import extent, local_part, overlapping
from ..calling.trees import named_leaves
from ..ir.source import Source, where
from ..tracing.errors import TraceError
from ..tracing.function_mode import storage_of
from .gradients import carried_gradients
from .module_tensors import buffers_of, replace
from .optimizer_state import Entries, create_state, params_of, state_entries, states_by_name
from .scaler import copied, scale_of

State = dict[str, Any]


def as_tuple(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """One optimizer, several or none as a tuple."""
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())


def state_of(model: nn.Module, optimizers: Sequence[Optimizer], carry_grads: bool) -> State:
    """The present state of a loop. An optimizer of torch.optim without state gets its state before the first step."""
    params = dict(model.named_parameters())
    names = {id(p): name for name, p in params.items()}
    of_optimizers: dict[str, Entries] = {}
    for optimizer in optimizers:
        create_state(optimizer)
        for name, entries in states_by_name(optimizer, names).items():
            if entries:
                of_optimizers[name] = state_entries(entries)

    # The optimizer's state is in the order of the parameters, however many optimizers have them.
    state: State = {
        "params": {name: p.detach() for name, p in params.items()},
        "buffers": {name: x.detach() for name, x in buffers_of(model).items()},
        "optimizer": {name: of_optimizers[name] for name in params if name in of_optimizers},
    }
    if carry_grads:
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
        model: the module that was given to `lift`.
        optimizer: the optimizer or optimizers that were given to `lift`.
        state: what `Step.unshard` returns, or the state of a step without transforms.
        scaler: the GradScaler that was given to `lift`.

    Raises: ValueError if the state is that of another module, or of a loop without a scaler.
    """
    check_lifted_from(state, model, scaler)
    let_copies_end()
    with torch.no_grad():
        for name, p in model.named_parameters():
            _write(p, state["params"][name])
        _write_buffers(model, state.get("buffers", {}))
        _write_optimizers(model, as_tuple(optimizer), state)
        for name, gradient in state.get("grads", {}).items():
            p = model.get_parameter(name)
            # Zeros may stand for a gradient that is None, and then it stays None.
            if p.grad is not None or gradient.any():
                p.grad = _laid_out(gradient, p).to(p.device, copy=True)
        if scaler is not None:
            device = next(iter(state["scaler"].values()), torch.empty(())).device
            for key, value in scale_of(scaler, device).items():
                value.copy_(state["scaler"][key])


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
    if isinstance(present, torch.Tensor):
        return present.copy_(_laid_out(value, present))
    return type(present)(value.item())


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A full tensor in the layout of `like`; nothing is sent."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def check_lifted(state: Any, step: str) -> None:
    """Raises: TypeError if the first argument of a lifted step is not a state, as `lift` returns it."""
    if isinstance(state, Mapping) and "params" in state:
        return
    description = f"a {type(state).__name__}"
    if isinstance(state, torch.Tensor):
        # While the step is traced, its type is that of a fake tensor.
        description = "a Tensor"
    elif isinstance(state, tuple):
        description = "a tuple, as the step returns it"
    raise TypeError(
        f"lift: the first argument of {step} is {description}, and a lifted step takes its state first.\n"
        f"Call it as state, output = {step}(state, ...), with the state that lift returns."
    )


def check_lifted_from(state: State, model: nn.Module, scaler: GradScaler | None) -> None:
    """Raises: ValueError for a state that lacks parameters of the module, or the scale of the scaler."""
    missing = [name for name, _ in model.named_parameters() if name not in state["params"]]
    if missing:
        raise ValueError(
            f"write_back: the state has no parameter {missing[0]!r}, and the module has.\n"
            f"Pass the module that was given to lift."
        )
    if scaler is not None and "scaler" not in state:
        raise ValueError(
            "write_back: the state has no scale, because its loop was lifted without a scaler.\n"
            "Leave out scaler=..., or lift the loop with it: lift(loop_step, model, optimizer, scaler=scaler)."
        )


def check_apart(state: State, model: nn.Module) -> list[tuple[str, str]]:
    """The pairs of buffers that share memory, by their names in the state. The loop step may not change these.

    Raises: ValueError for other tensors that share memory, because leaves of a state do not.
    """
    in_memory = {}
    for name, x in named_leaves(state).items():
        if isinstance(x, torch.Tensor) and not x.is_meta and x.layout is torch.strided:
            in_memory[name] = local_part(x)
    names = list(in_memory)
    registered = {f"buffers.{name}" for name, _ in model.named_buffers()}
    of_buffers = []
    for i, j in overlapping(list(in_memory.values())):
        pair = names[i], names[j]
        if all(name.startswith("buffers.") for name in pair):
            of_buffers.append(pair)
            continue
        advice = "Use one parameter for both, first.weight = second.weight, or give one of them a copy: .clone()."
        for name in pair:
            # nn.utils.spectral_norm has the parameter's own memory in an attribute before the first forward.
            if name.startswith("buffers.") and name not in registered:
                advice = (
                    f"{name} is a plain attribute. Call the model once before lift, if its forward computes it; or "
                    f"delete it."
                )
        raise ValueError(
            f"lift: {pair[0]} and {pair[1]} share memory, and in a state each would have its own.\n{advice}"
        )
    return of_buffers


def check_unchanged(of_buffers: Sequence[tuple[str, str]], changed: Collection[str]) -> None:
    """Raises: TraceError if the loop step changes one of two buffers that share memory.

    Args:
        of_buffers: the pairs that share memory, as `check_apart` returns them.
        changed: the names of the leaves that the loop step changes.
    """
    for pair in of_buffers:
        for name in pair:
            if name in changed:
                raise TraceError(
                    f"lift: {pair[0]} and {pair[1]} share memory, and the loop step changes {name}. In a state each "
                    f"has its own memory, so the other one would not change.\n"
                    f"Let the module have one of them, and make the other from it where it is used: self.table[0]; or "
                    f"give one a copy before lift: .clone()."
                )


def check_still_apart(new: State, data_set: Mapping[str, Source | None]) -> None:
    """Raises: TraceError if a parameter shares memory with another leaf after the loop step.

    Args:
        new: the state after the loop step.
        data_set: the lines that set `.data` of parameters, by the names of these.
    """
    tensors = {}
    for name, x in named_leaves(new).items():
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            tensors[name] = x
    names = list(tensors)
    # The order of the names decides which pair is named, not the addresses of storages.
    storages: dict[int | None, int] = {}

    # While a step is traced, tensors have no addresses.
    def span_in_storage(x: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        storage = storages.setdefault(storage_of(x), len(storages))
        start = int(x.storage_offset()) * x.itemsize
        return (storage, start), (storage, start + extent(x))

    for i, j in overlapping(list(tensors.values()), span_in_storage):
        pair = names[i], names[j]
        for name in pair:
            if name.startswith("params."):
                line = data_set.get(name.removeprefix("params."))
                raise TraceError(
                    f"lift: after the loop step {pair[0]} and {pair[1]} share memory, so in the loop a later step "
                    f"would change both. In a state each has its own memory.\n"
                    f"  at {where(line)}\n"
                    f"Copy the value: p.data.copy_(q.data), not p.data = q.data."
                )
