"""Repeated updates: when a loop is traced again for another batch, steps of its optimizers are not.

What an optimizer of PyTorch does follows from its parameter groups, and from the types of its parameters, gradients and
state. If all of these are as they were in the trace before, the operations recorded then are repeated on the tensors of
this trace. They are the same, in the same order.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim import Optimizer

from ...ir.relations import tensors_in
from ...ir.source import user_source
from ..operation import Operation, Place, mapped
from .optimizer_state import is_torchs


@dataclass(frozen=True)
class _Update:
    """The operations of a step of an optimizer, with places for its tensors."""

    key: Hashable  # everything that the operations follow from
    inputs: Sequence[Place]
    written: Sequence[int]  # the inputs that the operations change
    operations: Sequence[Operation]


class RepeatedUpdates:
    """The updates of the last trace of a loop, by their numbers in it."""

    def __init__(self) -> None:
        self._last: dict[int, _Update] = {}

    def begin(
        self, numbers: Iterator[int], settings: Hashable, optimizer: Optimizer, has_closure: bool
    ) -> Callable[[], None]:
        """Begin a step of `optimizer`, and return the function that ends it.

        If the update is repeated, the optimizer has no parameters until then, so its own `step` does nothing.

        Args:
            numbers: gives each step of a trace its number.
            settings: the constants of the program that the optimizers hold.
            optimizer: the optimizer that steps.
            has_closure: whether its `step` is given a closure.
        """
        number = next(numbers)
        mode: Any = get_proxy_mode()  # a `Watch`
        tree = _step_inputs(optimizer)
        inputs = tensors_in(tree)
        if mode is None or has_closure or not _is_known(optimizer, inputs):
            return lambda: None
        key, last = (settings, user_source(2), id(optimizer), _key(tree, inputs)), self._last.get(number)
        if last is not None and last.key == key:
            return _repeating(optimizer, last, inputs, mode.operations)
        start, versions = len(mode.operations), [x._version for x in inputs]

        def keep() -> None:
            written = [k for k, x in enumerate(inputs) if x._version != versions[k]]
            places = {id(x): Place() for x in inputs}
            operations = _with_places(mode.operations[start:], places)
            if operations is not None and [*map(id, tensors_in(_step_inputs(optimizer)))] == [*map(id, inputs)]:
                self._last[number] = _Update(key, [places[id(x)] for x in inputs], written, operations)

        return keep


def _repeating(optimizer: Optimizer, last: _Update, inputs: Sequence, operations: list[Operation]) -> Callable:
    params = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []

    def end() -> None:
        for group, own in zip(optimizer.param_groups, params):
            group["params"] = own
        tensors = {id(place): x for place, x in zip(last.inputs, inputs)}
        operations.extend(_substituted(o, tensors) for o in last.operations)
        torch.autograd.graph.increment_version([inputs[k] for k in last.written])

    return end


def _is_known(optimizer: Optimizer, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether it is an optimizer of PyTorch, without hooks of its own, that steps on plain tensors after backward."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    in_backward = torch._C._current_autograd_node() is not None
    return is_torchs(optimizer) and not hooks and not in_backward and all(type(x) is FakeTensor for x in inputs)


def _step_inputs(optimizer: Optimizer) -> list:
    """What a step of an optimizer reads: the parameter groups, and the gradient and state of each parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.param_groups, [(p.grad, optimizer.state.get(p)) for p in params]]


def _key(tree: list, inputs: Sequence[torch.Tensor]) -> Hashable:
    """What the operations of a step follow from: types of tensors, which of them are the same, and all else."""
    first: dict[int, int] = {}
    with torch._C.DisableTorchFunction():  # otherwise every mode of the trace is asked for each property
        types = [
            (x.shape, x.dtype, x.stride(), x.device, x.requires_grad, first.setdefault(id(x), k))
            for k, x in enumerate(inputs)
        ]
    device = inputs[0].device.type if inputs else "cpu"
    ambient = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype()
    return tuple(types), repr(mapped(tree, lambda x: ...)), ambient


def _with_places(operations: Sequence[Operation], places: dict[int, Place]) -> list[Operation] | None:
    """Operations with a place for each tensor; None if they use a tensor of the trace that is none of the inputs."""
    kept: list[Operation] = []
    for o in operations:
        if any(isinstance(x, FakeTensor) and id(x) not in places for x in tensors_in((o.args, o.kwargs))):
            return None
        places.update((id(x), Place()) for x in tensors_in(o.result) if id(x) not in places)
        kept.append(_substituted(o, places))
    return kept


def _substituted(o: Operation, others: Mapping[int, Any]) -> Operation:
    """An operation on other tensors or places, by the ids of its own."""
    other = lambda x: others.get(id(x), x)
    args, kwargs, result = (mapped(x, other) for x in (o.args, o.kwargs, o.result))
    return Operation(o.op, args, kwargs, result, o.seen, o.origin, o.meta)
