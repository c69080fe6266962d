"""Fusion without a look at memory: equations may join a kernel at any place."""

from __future__ import annotations

from ztrans.ir.graph import Graph
from ztrans.rewrites.update_groups import group_updates
from ztrans.runtime.inductor.fusion import FusedGroup, fuse, runs_in_one_call


def fused_anywhere(graph: Graph) -> tuple[Graph, tuple[FusedGroup, ...]]:
    """The program with the equations of each group next to each other, and its groups."""
    return fuse(*group_updates(graph, runs_in_one_call))
