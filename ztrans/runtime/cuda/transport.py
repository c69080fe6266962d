"""Transport: choose what carries a collective between GPUs.

Symmetric memory carries it if the ranks of a group can read each other's memory, and that was measured to be faster.
Otherwise NCCL does. Timings decide only if both give the same bits. Between hosts, half precision may be exchanged in
two levels (see `ir.routes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...ir.collectives import ALL_GATHER, HALF, REDUCE_SCATTER
from ...ir.graph import Primitive
from ...ir.printer import format_bytes, format_seconds
from ...ir.routes import TWO_LEVELS, Route

BY_HOST = "nccl all_to_all in two levels"


class Times(NamedTuple):
    """Seconds of a message of about `nbytes`, through symmetric memory and by NCCL."""

    symmetric: float
    nccl: float
    nbytes: int


@dataclass(frozen=True)
class Transport:
    """The call that carries a collective, and the reason for the choice, which printed programs show."""

    call: str
    reason: str

    @property
    def is_symmetric(self) -> bool:
        return self.call.startswith("symmetric")

    def __str__(self) -> str:
        return f"{self.call} ({self.reason})"


def transport(
    kind: Primitive,
    op: str | None,
    wire: torch.dtype,
    times: Callable[[], Times | str],
    by: Route | None = None,
) -> Transport:
    """Choose what carries a collective, given its kind, its reduction, its dtype on the wire, and its route.

    `times` is called if both ways give the same bits. It returns the seconds of each, or why symmetric memory cannot be
    used.

    >>> from ztrans.ir.collectives import ALL_GATHER
    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: Times(12e-6, 21e-6, 2**20)))
    symmetric all_gather (moves bytes; 12.00 us for 1.00 MiB, NCCL 21.00 us)
    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: "ranks on 2 hosts"))
    nccl all_gather (moves bytes; no symmetric memory: ranks on 2 hosts)
    """
    half = kind is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF
    if not half and kind is not ALL_GATHER:
        return Transport(
            f"nccl {kind.name}", f"reduces {str(wire).removeprefix('torch.')} on the way"
        )
    if by is not None and by.way == TWO_LEVELS:
        return Transport(
            BY_HOST, f"sums half precision in fp32 and in the order of hosts; {by.reason}"
        )
    work = "sums half precision in fp32 and in rank order" if half else "moves bytes"
    nccl_call, measured = "nccl all_to_all" if half else f"nccl {kind.name}", times()
    if isinstance(measured, str):
        return Transport(nccl_call, f"{work}; no symmetric memory: {measured}")
    size = format_bytes(measured.nbytes)
    symmetric, nccl = format_seconds(measured.symmetric), format_seconds(measured.nccl)
    if measured.symmetric < measured.nccl:
        return Transport(f"symmetric {kind.name}", f"{work}; {symmetric} for {size}, NCCL {nccl}")
    return Transport(nccl_call, f"{work}; {nccl} for {size}, symmetric memory {symmetric}")
