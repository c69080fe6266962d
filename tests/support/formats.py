"""Send the gathers and reductions of a program in a format, however short they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ztrans.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from ztrans.ir.graph import Graph
from ztrans.ir.rewriter import Rewriter
from ztrans.ir.wire_format import WireFormat
from ztrans.transforms.base import Transform


@dataclass(frozen=True)
class SentAs(Transform):
    """Send every planned gather, and every sum or mean that is scattered, in a format.

    Attributes:
        gathers, reductions: the formats; None for the dtype in which they are.
    """

    gathers: WireFormat | None = None
    reductions: WireFormat | None = None

    phase: ClassVar[int] = 3

    def rewrite(self, graph: Graph) -> Graph:
        wires = {ALL_GATHER: self.gathers, REDUCE_SCATTER: self.reductions}
        new = Rewriter(graph)
        for e in graph.eqns:
            wire = wires.get(e.op)
            floats = all(v.dtype in (torch.float32, torch.bfloat16) for v in (*e.ins, *e.results))
            if wire is not None and floats and e.kwargs.get("op") not in ("max", "min"):
                new.replace(e, e.replace(kwargs={**e.kwargs, "dtype": wire}))
        return new.applied()
