"""Refuse loops with tensors that share memory, because each leaf of a state has its own memory.

Two buffers may share memory if the loop step changes neither of them. Other tensors may not: they are checked before
the first step, and after the loop step, which may set `.data` of a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..calling.inputs import extent, local_part, overlapping
from ..calling.trees import named_leaves
from ..ir.source import Source, where
from ..tracing.errors import TraceError
from ..tracing.known_values import storage_of
from .lifted_state import State


def sharing_buffers(state: State) -> list[tuple[str, str]]:
    """The pairs of buffers that share memory, by their names in the state. The loop step may not change these buffers.

    Raises: ValueError for other tensors that share memory.
    """
    tensors = {}
    for name, x in named_leaves(state).items():
        if isinstance(x, torch.Tensor) and not x.is_meta and x.layout is torch.strided:
            tensors[name] = local_part(x)
    names = list(tensors)
    pairs = []
    for i, j in overlapping(list(tensors.values())):
        pair = names[i], names[j]
        if all(name.startswith("buffers.") for name in pair):
            pairs.append(pair)
            continue
        raise ValueError(
            f"lift: {pair[0]} and {pair[1]} share memory, and in a state each would have its own.\n"
            f"Use one parameter for both, first.weight = second.weight, or give one of them a copy: .clone(). Call the "
            f"model once before lift, if its forward computes one of them, as that of nn.utils.spectral_norm does."
        )
    return pairs


def check_sharing_unchanged(
    pairs: Sequence[tuple[str, str]], changed_names: Collection[str]
) -> None:
    """Raises: TraceError if the loop step changes one of two buffers that share memory.

    Args:
        pairs: the pairs of buffers from `sharing_buffers`.
        changed_names: the names of the leaves that the loop step changes.
    """
    for pair in pairs:
        for name in pair:
            if name in changed_names:
                raise TraceError(
                    f"lift: {pair[0]} and {pair[1]} share memory, and the loop step changes {name}. In a state each "
                    f"has its own memory, so the other one would not change.\n"
                    f"Let the module have one of them, and make the other from it where it is used: self.table[0]; or "
                    f"give one a copy before lift: .clone()."
                )


def check_apart_after_step(state: State, data_set: Mapping[str, Source | None]) -> None:
    """Raises: TraceError if a parameter shares memory with another leaf after the loop step.

    Args:
        state: the state after the loop step.
        data_set: the lines that set `.data` of a parameter, by its name.
    """
    tensors = {}
    for name, x in named_leaves(state).items():
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            tensors[name] = x
    names = list(tensors)
    # Storages are numbered in the order of the names, so that each run reports the same pair.
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
