"""The collectives that the user's step calls itself, for tensor or expert parallelism, named by mesh axis.

A step may call `torch.distributed._functional_collectives`. Its collectives stay where the user put them. The name of a
process group means nothing on another rank or in another job, so in a program a collective names the mesh axis instead.
It names this rank's group again when the program is bound to a mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import ops
from .axes import axis_of_group, members, submesh
from .graph import Eqn, Graph, Layout, Partial, Split, Var
from .layout import bytes_on_first_rank, mesh_axes
from .rules import (
    ALL_GATHER_KIND,
    ALL_REDUCE_KIND,
    ALL_TO_ALL_KIND,
    REDUCE_SCATTER_KIND,
    Axes,
    Kind,
    Memberwise,
    Sizes,
)
from .source import where

_NAMESPACE = "_c10d_functional::"


@dataclass(frozen=True, eq=False)
class UserStart(Memberwise):
    """Rules of a collective of the user's own step.

    Attributes:
        kind: what its message costs; its name says what it computes.
        elementwise: it accepts parts, because it computes each element alone.
        is_equal: the result is equal on all ranks of the axis.
        scatters: each rank gets another part.
    """

    kind: Kind
    elementwise: bool = False
    is_equal: bool = False
    scatters: bool = False

    starts = True
    lane = "(step)"

    def axis(self, eqn: Eqn) -> str:
        return eqn.args[-1]

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        axes = super().varies(eqn, axes_of)
        # A joint axis stands for all of its members.
        return axes - {*members(self.axis(eqn))} if self.is_equal else axes

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        options = eqn.args[1:-1]
        ranks = len(terms)
        match self.kind.name:
            case "all_reduce":
                return [_total(options[0], terms)] * ranks
            case "reduce_scatter":
                return [part.clone() for part in _total(options[0], terms).chunk(ranks)]
            case "all_gather":
                return [torch.cat(list(terms))] * ranks
            case "broadcast":
                return [terms[options[0]]] * ranks
            case "all_to_all":
                # Each rank sends parts of the sizes in options[1]. All ranks run one program, so they have equal sizes.
                parts_of_rank = [term.split(options[1]) for term in terms]
                return [torch.cat(received) for received in zip(*parts_of_rank)]
            case kind:
                raise ValueError(
                    f"lockstep: the step's own {kind} goes from one rank to another, and here all ranks run one "
                    f"program.\n  at {where(eqn.source)}\n"
                    f"Run the step on real ranks, lowered.compile() on each, or send with a collective "
                    f"(all_to_all, broadcast)."
                )

    def wire_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        sent = sum(bytes_on_first_rank(v, sizes) for v in eqn.ins)
        received = sum(bytes_on_first_rank(v, sizes) for v in eqn.results)
        ranks = sizes[self.axis(eqn)]
        return max(sent, received) * (ranks - 1) * self.kind.crossings // ranks


class UserWait(Memberwise):
    """Rules of the wait for a collective of the user's own step: it returns its argument."""

    waits = True
    elementwise = True

    def shares_storage(self, eqn: Eqn) -> bool:
        return True


# The collectives that a step may call, by their names in PyTorch.
_STARTS = {
    "all_reduce": UserStart(ALL_REDUCE_KIND, elementwise=True, is_equal=True),
    "reduce_scatter_tensor": UserStart(REDUCE_SCATTER_KIND, scatters=True),
    "all_gather_into_tensor": UserStart(ALL_GATHER_KIND, is_equal=True),
    "broadcast": UserStart(Kind("broadcast"), elementwise=True, is_equal=True),
    "all_to_all_single": UserStart(ALL_TO_ALL_KIND, scatters=True),
}
_WAIT = UserWait()


@functools.cache
def user_rules(op: Any) -> UserStart | UserWait | None:
    """The rules of a functional collective of PyTorch, or of the wait for one; None for any other operation.

    Collectives of one tensor and of several tensors have the same rules.
    """
    name = getattr(getattr(op, "_schema", None), "name", "")
    if not name.startswith(_NAMESPACE):
        return None
    name = name.removeprefix(_NAMESPACE).removesuffix("_coalesced")
    if name == "wait_tensor":
        return _WAIT
    return _STARTS.get(name) or UserStart(Kind(name))


def is_user_collective(eqn: Eqn) -> bool:
    """Whether the equation is a collective of the user's own step, or a wait for one."""
    return user_rules(eqn.op) is not None


def is_user_start(eqn: Eqn) -> bool:
    """Whether the equation starts a collective of the user's own step."""
    return isinstance(user_rules(eqn.op), UserStart)


def is_user_wait(eqn: Eqn) -> bool:
    """Whether the equation waits for a collective of the user's own step."""
    return isinstance(user_rules(eqn.op), UserWait)


def scatters(eqn: Eqn) -> bool:
    """Whether the equation is a collective of the user's step with another result on each rank."""
    row = user_rules(eqn.op)
    return isinstance(row, UserStart) and row.scatters


def _total(op: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return ops.reduce(terms, "mean" if op == "avg" else op, terms[0].dtype)


def accepted_layouts(eqn: Eqn, layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that a collective of the user's step needs for its arguments, and gives its results.

    An elementwise collective accepts parts, but no terms. All others need whole values. So does an elementwise
    collective over an axis that its argument is split over, because the parts of its ranks hold different elements.

    Args:
        eqn: the collective.
        layouts: the layouts of its arguments.
    """
    row = user_rules(eqn.op)
    if row is None or not row.elementwise:
        return [() for _ in layouts]
    axes = set(members(eqn.args[-1])) if _names_group(eqn) else set()

    def stays(placement: Split | Partial) -> bool:
        return isinstance(placement, Split) and axes.isdisjoint(members(placement.axis))

    return [tuple(filter(stays, layout)) for layout in layouts]


def by_axis(graph: Graph, mesh: DeviceMesh) -> Graph:
    """The program whose collectives name mesh axes instead of process groups.

    A group that the step made itself gets the name of the axis along which its ranks lie, or of a joint axis.
    """
    names: dict[str, str] = {mesh.get_group(axis).group_name: axis for axis, _ in mesh_axes(mesh)}
    other_groups = _groups(graph) - {*names, *names.values()}
    for group in other_groups:
        axis = axis_of_group(mesh, group)
        if axis is not None:
            names[group] = axis

    joint = {axis for axis in names.values() if len(members(axis)) > 1}
    new = sorted(joint.difference(graph.joint))
    return _renamed(graph, names).replace(joint=(*graph.joint, *new))


def by_group(graph: Graph, mesh: DeviceMesh) -> Graph:
    """The program whose collectives name this rank's process groups: the inverse of `by_axis`."""
    names = {}
    for axis in sorted(_groups(graph) & graph.axes.keys()):
        names[axis] = submesh(mesh, [axis]).get_group().group_name
    return _renamed(graph, names)


def _groups(graph: Graph) -> set[str]:
    """The groups or axes that the collectives of the user's step name."""
    return {eqn.args[-1] for eqn in graph.eqns if _names_group(eqn)}


def _names_group(eqn: Eqn) -> bool:
    """Whether an equation is a collective of the user's step that names its group; a wait does not."""
    return is_user_collective(eqn) and bool(eqn.args) and isinstance(eqn.args[-1], str)


def _renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    eqns = []
    for e in graph.eqns:
        if _names_group(e):
            *args, group = e.args
            e = e.replace(args=(*args, names.get(group, group)))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))
