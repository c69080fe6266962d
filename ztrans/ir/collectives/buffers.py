"""The sizes of the buffers in which a collective sends and receives its members, padding included."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..graph import Eqn, Split, Var

HALF = (torch.bfloat16, torch.float16)
DIRECT = (
    8  # ranks; in a larger group, a message to every rank would be more than a gather of gloo needs
)
ALONE = (
    1 << 16
)  # bytes; a member of which a rank holds this much or more is sent in a message of its own


def wire_dtype(eqn: Eqn, member: Var) -> torch.dtype:
    """The dtype in which a collective sends a member."""
    return eqn.kwargs.get("dtype") or member.dtype


def partial_dtype(eqn: Eqn, member: Var) -> torch.dtype:
    """The dtype in which the sum of a host is sent: fp32 for half precision, unless `reduce_dtype` asked for that."""
    wire = wire_dtype(eqn, member)
    return torch.float32 if wire in HALF and eqn.kwargs.get("dtype") is None else wire


def buffer_bytes(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
    """The bytes of a member as it is sent: the padded parts of all ranks together."""
    member, future, axis = eqn.ins[index], eqn.results[index], eqn.kwargs["axis"]
    total = wire_dtype(eqn, member).itemsize
    cuts = {s.dim: s.axis for v in (member, future) for s in v.layout if isinstance(s, Split)}
    for dim, rows in enumerate(member.shape):
        part = -(-rows // sizes[cuts[dim]]) if dim in cuts else rows
        total *= part * sizes[axis] if cuts.get(dim) == axis else part
    return total


def is_small(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a collective packs a member with the other small members of its bucket."""
    return buffer_bytes(eqn, index, sizes) < ALONE * sizes[eqn.kwargs["axis"]]


def is_alone(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a collective sends a member in a message of its own, instead of packed with other members.

    It does so for a large member, because a copy would cost more than a message, and for the only small one, because
    there is no other to pack it with.
    """
    # `any` ends at the first other small member, so asking for every member of a bucket takes linear time.
    others = (k for k in range(len(eqn.outs)) if k != index)
    return not is_small(eqn, index, sizes) or not any(is_small(eqn, k, sizes) for k in others)
