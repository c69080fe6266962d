"""The mesh axes over which each state leaf is sharded or replicated, and its gradient reduced.

Most leaves have the same axes. The experts of an expert-parallel model do not: each rank of `ep` holds other experts.
So their gradients are reduced over `dp` alone, and all other gradients over the joint axis `dp*ep`.

The leaves of replicas that train apart lack the axis of the replicas too. Experts are parts of one model, whose loss is
a mean over all ranks. Replicas are several models, each with a loss of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ir.axes import members, members_of
from ...ir.graph import Graph, Var
from ..base import all_axes, program_shardings

if TYPE_CHECKING:
    from ..shard_params import ShardParams


@dataclass(frozen=True)
class LeafAxes:
    """The axes of the leaves of a program.

    Attributes:
        all: the axes of the mesh over which the batch differs.
        main: the axis over which most leaves are sharded.
        by_leaf: the axes of each leaf, including joint ones; the leaf is sharded over the first.
        absent: the axes of `all` that a leaf does not have. Each rank along them holds another leaf.
        independent: the axes of `all` along which some leaves belong to replicas that train apart.
    """

    all: tuple[str, ...]
    main: str
    by_leaf: Mapping[Var, tuple[str, ...]]
    absent: Mapping[Var, frozenset[str]]
    independent: frozenset[str]

    @staticmethod
    def of_program(graph: Graph, options: ShardParams) -> LeafAxes:
        """The axes of the leaves of a plain program, from the options of `shard_params`."""
        shardings = program_shardings(graph, [options])
        by_leaf = {v: sharding.axes for v, sharding in shardings.items()}
        every_axis = all_axes([options], shardings.values())
        absent = {}
        independent: set[str] = set()
        for v, sharding in shardings.items():
            absent[v] = frozenset(every_axis) - {*members_of(sharding.axes)}
            independent.update(sharding.independent)
        # A state without leaves still has the axes that do not depend on leaves.
        sharded_axes = [axes[0] for axes in by_leaf.values()] or [*options.axes, ""]
        main = max(dict.fromkeys(sharded_axes), key=sharded_axes.count)
        return LeafAxes(every_axis, main, by_leaf, absent, frozenset(independent))

    @property
    def joined(self) -> tuple[str, ...]:
        """The axes over which the ranks train one model: all but those of replicas that train apart."""
        return tuple(axis for axis in self.all if axis not in self.independent)

    @functools.cached_property
    def joint(self) -> tuple[str, ...]:
        """The joint axes of the leaves, each once."""
        joint_axes: dict[str, None] = {}
        for axes in self.by_leaf.values():
            joint_axes.update((axis, None) for axis in axes if len(members(axis)) > 1)
        return tuple(joint_axes)

    def cover(self, varying_axes: Set[str], leaf: Var | None = None) -> list[str]:
        """The axes over which to reduce a value that differs over `varying_axes`; joint ones where possible.

        A gradient is reduced over the joint axes of its `leaf`, even if it is the same along one of their members:
        the mean does not change. Axes over which the step is not sharded come last.
        """
        leaf_axes = self.by_leaf.get(leaf, ()) if leaf is not None else ()
        axes = [axis for axis in leaf_axes if not varying_axes.isdisjoint(members(axis))]
        uncovered = set(varying_axes) - {*members_of(axes)}
        for axis in (*self.joint, *self.all):
            if uncovered >= {*members(axis)}:
                axes.append(axis)
                uncovered -= {*members(axis)}
        return [*axes, *sorted(uncovered)]
