"""A state with the leaves that transforms keep in it: `(state, kept)`, or a lifted state with more keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

# By the name of a transform, its leaves by path.
KeptLeaves = dict[str, dict[str, torch.Tensor]]


class WithKept(NamedTuple):
    """A state, and the leaves that transforms keep, by transform and path. `Step.init` makes it, and a step returns it.

    Attributes:
        state: the user's state.
        kept: for each transform, by name, its leaves by path.
    """

    state: Any
    kept: KeptLeaves


def joined(state: Any, kept: KeptLeaves, is_lifted: bool) -> Any:
    """A state with these leaves. A lifted state, which is a dict, holds them itself."""
    return {**state, **kept} if is_lifted else WithKept(state, kept)


def parted(state: Any, transforms: Collection[str], is_lifted: bool) -> WithKept:
    """The user's state, and the leaves that the transforms of these names keep beside it; {} if there are none."""
    if isinstance(state, WithKept):
        return state
    if is_lifted and isinstance(state, dict):
        own = {key: part for key, part in state.items() if key not in transforms}
        return WithKept(own, {key: state[key] for key in transforms if key in state})
    # A caller may have taken the pair apart.
    is_pair = type(state) is tuple and len(state) == 2 and isinstance(state[1], dict)
    if is_pair and state[1] and state[1].keys() <= {*transforms}:
        return WithKept(*state)
    return WithKept(state, {})
