"""Operation: the record of an operation that a step has run while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..ir.source import Source
from .nested.checkpoints import Mark
from .regions import Fact


@dataclass(frozen=True, slots=True)
class Seen:
    """The properties of a result at the time of the operation. Later operations may change those of the tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(result: Any) -> Any:
        """The properties of the tensors in a result."""
        if isinstance(result, (list, tuple)):
            return [Seen.of(x) for x in result]
        if not isinstance(result, torch.Tensor):
            return result
        if result.layout is not torch.strided:
            return Seen(result.dtype, result.shape, (), 0)
        return Seen(result.dtype, result.shape, result.stride(), int(result.storage_offset()))

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset


class Origin(NamedTuple):
    """Where an operation comes from: the user's line, the facts for its region, and the checkpoint around it."""

    source: Source | None
    fact: Fact
    mark: Mark | None = None
    policy: Mapping[str, Any] = MappingProxyType({})  # what a selective checkpoint has written before the operation


class Place:
    """A tensor in operations that are kept from trace to trace (see `lifting.repeated_updates`)."""


def mapped(tree: Any, other: Callable[[Any], Any]) -> Any:
    """A tree of lists, tuples and dicts with `other(x)` in place of each tensor or `Place` x."""
    if isinstance(tree, (torch.Tensor, Place)):
        return other(tree)
    if isinstance(tree, (list, tuple)):
        return [mapped(x, other) for x in tree]
    return {k: mapped(v, other) for k, v in tree.items()} if isinstance(tree, dict) else tree


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a step has run. Its tensors are fake, or places, and known by their identity."""

    op: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    seen: Any  # the properties of the result
    origin: Origin
    meta: dict[str, Any]  # in which a selective checkpoint writes its policy, after the operation or before
