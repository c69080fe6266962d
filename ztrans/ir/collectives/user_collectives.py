"""The collectives that the user's step calls itself, named by mesh axis.

A step may call `torch.distributed._functional_collectives` itself (tensor parallel, expert parallel). Its collectives
stay where the user put them. The name of a process group means nothing on another rank or in another job, so in a
program a collective names the mesh axis. The name of this rank's group returns when the program is bound to a mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..axes import axis_of_group, members, submesh
from ..graph import Eqn, Graph, Layout, Split
from ..layout import mesh_axes

_NAMESPACE = "_c10d_functional::"
_ELEMENTWISE = ("all_reduce", "all_reduce_coalesced", "broadcast", "wait_tensor")


@functools.cache
def functional_name(op: Any) -> str:
    """The name of a functional collective of PyTorch, such as `wait_tensor`; empty for any other operation."""
    name = getattr(getattr(op, "_schema", None), "name", "")
    return name.removeprefix(_NAMESPACE) if name.startswith(_NAMESPACE) else ""


def is_users(eqn: Eqn) -> bool:
    """Whether the equation is a collective of the user's own step, or a wait for one."""
    return functional_name(eqn.op) != ""


def is_wait(eqn: Eqn) -> bool:
    """Whether the equation waits for a collective of the user's own step."""
    return functional_name(eqn.op) == "wait_tensor"


def on_parts(eqn: Eqn, have: Sequence[Layout]) -> list[Layout]:
    """The layouts that a collective of the user's step takes its arguments in, and returns its results in.

    Args:
        eqn: the collective.
        have: the layouts that its arguments have.

    An elementwise collective takes parts as they are, but no unreduced terms. All others take whole values. So does an
    elementwise collective over the axis that its argument is split over, because the parts of its ranks hold different
    elements.
    """
    if functional_name(eqn.op) not in _ELEMENTWISE:
        return [()] * len(have)
    over = set(members(eqn.args[-1])) if _names_group(eqn) else set()
    return [
        tuple(p for p in x if isinstance(p, Split) and over.isdisjoint(members(p.axis)))
        for x in have
    ]


def by_axis(graph: Graph, mesh: DeviceMesh) -> Graph:
    """The program with mesh axes in place of the process groups that its collectives name.

    A group that the step made itself is named by the axis along which its ranks lie, several axes as a joint axis.
    """
    names: dict[str, str] = {mesh.get_group(axis).group_name: axis for axis, _ in mesh_axes(mesh)}
    for group in {eqn.args[-1] for eqn in graph.eqns if _names_group(eqn)} - {
        *names,
        *names.values(),
    }:
        axis = axis_of_group(mesh, group)
        names |= {group: axis} if axis is not None else {}
    joint = {axis for axis in names.values() if len(members(axis)) > 1}
    return _renamed(graph, names).replace(
        joint=(*graph.joint, *sorted(joint.difference(graph.joint)))
    )


def by_group(graph: Graph, mesh: DeviceMesh) -> Graph:
    """The program with this rank's process groups in place of mesh axes: the inverse of `by_axis`."""
    axes = {eqn.args[-1] for eqn in graph.eqns if _names_group(eqn)} & graph.axes.keys()
    return _renamed(
        graph, {axis: submesh(mesh, [axis]).get_group().group_name for axis in sorted(axes)}
    )


def _names_group(eqn: Eqn) -> bool:
    """Whether an equation is a collective of the user's step, which names its group, and no wait for one."""
    return is_users(eqn) and bool(eqn.args) and isinstance(eqn.args[-1], str)


def _renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    renamed = lambda e: e.replace(args=(*e.args[:-1], names.get(e.args[-1], e.args[-1])))
    return graph.replace(eqns=tuple(renamed(e) if _names_group(e) else e for e in graph.eqns))
