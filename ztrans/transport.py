"""Transport: what carries a collective on GPUs, and why. Nothing is measured or asked here: it is a pure choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .collectives import REDUCE_SCATTER
from .graph import Primitive

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Transport:
    """The call that carries a collective, and the reason for it."""

    call: str
    reason: str

    def __str__(self) -> str:
        return f"{self.call} ({self.reason})"


def transport(kind: Primitive, op: str | None, wire: torch.dtype) -> Transport:
    """How a collective of this kind is carried, given its reduction and the dtype on the wire.

    >>> from ztrans.collectives import ALL_GATHER
    >>> print(transport(ALL_GATHER, None, torch.bfloat16))
    nccl all_gather (bytes move as they are)
    """
    if kind is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF:
        return Transport("nccl all_to_all", "half-precision terms are summed here, in fp32 and in rank order")
    if op is None:
        return Transport(f"nccl {kind.name}", "bytes move as they are")
    return Transport(f"nccl {kind.name}", f"reduced on the way, in {str(wire).removeprefix('torch.')}")
