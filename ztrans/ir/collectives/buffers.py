"""Bytes of the buffers through which the members of a started collective travel, padding included."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..graph import Eqn, Split, Var

ALONE = 1 << 16  # bytes of one rank's part from which on a member crosses in a message of its own


def wire_dtype(eqn: Eqn, member: Var) -> torch.dtype:
    """The dtype in which a member of a started collective crosses the wire."""
    return eqn.kwargs.get("dtype") or member.dtype


def buffer_bytes(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
    """Bytes of a member of a started collective on the wire: the padded parts of all ranks together."""
    member, future, axis = eqn.ins[index], eqn.results[index], eqn.kwargs["axis"]
    total = wire_dtype(eqn, member).itemsize
    cuts = {s.dim: s.axis for v in (member, future) for s in v.layout if isinstance(s, Split)}
    for dim, rows in enumerate(member.shape):
        part = -(-rows // sizes[cuts[dim]]) if dim in cuts else rows
        total *= part * sizes[axis] if cuts.get(dim) == axis else part
    return total


def is_alone(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a member of a started collective crosses in a message of its own, instead of packed with others.

    A large member does, because copying it would cost more than a message. So does a small one that has no other
    small one to be packed with.
    """
    enough = ALONE * sizes[eqn.kwargs["axis"]]
    small = [k for k in range(len(eqn.outs)) if buffer_bytes(eqn, k, sizes) < enough]
    return index not in small or len(small) == 1
