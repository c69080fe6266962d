"""Transport: what carries a collective on GPUs, and why.

It is NCCL throughout. `ops.all_gather` and `ops.reduce_scatter` over symmetric memory would serve ranks of
one node, but nobody has measured yet from and up to which size they are faster; the reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .collectives import REDUCE_SCATTER
from .graph import Primitive

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Transport:
    """The call that carries a collective, and the reason for it, which printed programs show."""

    call: str
    reason: str

    def __str__(self) -> str:
        return f"{self.call} ({self.reason})"


def transport(kind: Primitive, op: str | None, wire: torch.dtype) -> Transport:
    """How a collective of this kind is carried, given its reduction and the dtype on the wire.

    >>> from ztrans.collectives import ALL_GATHER
    >>> print(transport(ALL_GATHER, None, torch.bfloat16))
    nccl all_gather (moves bytes; symmetric memory is not measured)
    """
    unmeasured = "symmetric memory is not measured"
    if kind is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF:
        return Transport("nccl all_to_all", f"sums half precision in fp32 and in rank order; {unmeasured}")
    if op is None:
        return Transport(f"nccl {kind.name}", f"moves bytes; {unmeasured}")
    how = f"reduces {str(wire).removeprefix('torch.')} on the way"
    return Transport(f"nccl {kind.name}", f"{how}; {unmeasured}" if kind is REDUCE_SCATTER else how)
