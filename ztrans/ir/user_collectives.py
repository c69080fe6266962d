"""The user's own collectives, named by mesh axis.

A step may call `torch.distributed._functional_collectives` itself (tensor parallel, expert parallel). Its collectives
stay where they are. The name of a process group means nothing on another rank or in another job, so in a program they
name the mesh axis; the group of this rank is put back when the program is bound to a mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .graph import Eqn, Graph, Layout, Split
from .layout import mesh_axes

_NAMESPACE = "_c10d_functional::"
_ELEMENTWISE = ("all_reduce", "all_reduce_coalesced", "broadcast", "wait_tensor")


@functools.cache
def functional_name(op: Any) -> str:
    """The name of a functional collective of PyTorch, as `wait_tensor`; empty for any other operation."""
    name = getattr(getattr(op, "_schema", None), "name", "")
    return name.removeprefix(_NAMESPACE) if name.startswith(_NAMESPACE) else ""


def is_users(eqn: Eqn) -> bool:
    """Whether the equation is a collective of the user's own step, or a wait for one."""
    return functional_name(eqn.op) != ""


def is_wait(eqn: Eqn) -> bool:
    """Whether the equation waits for a collective of the user's own step."""
    return functional_name(eqn.op) == "wait_tensor"


def on_parts(eqn: Eqn, have: Sequence[Layout]) -> list[Layout]:
    """The layouts in which one of the step's own collectives takes its arguments, and returns its results.

    A collective that works on each element alone takes parts as they are, once terms are reduced; all others take
    whole values. A collective over the very axis over which a value is cut takes it whole too, because the parts of
    the ranks hold different elements.
    """
    if functional_name(eqn.op) not in _ELEMENTWISE:
        return [()] * len(have)
    return [tuple(p for p in layout if isinstance(p, Split) and p.axis != eqn.args[-1]) for layout in have]


def by_axis(graph: Graph, mesh: DeviceMesh) -> Graph:
    """Name axes instead of groups."""
    return _renamed(graph, {mesh.get_group(axis).group_name: axis for axis, _ in mesh_axes(mesh)})


def by_group(graph: Graph, mesh: DeviceMesh) -> Graph:
    """Name this rank's groups instead of axes: the inverse of `by_axis`."""
    return _renamed(graph, {axis: mesh.get_group(axis).group_name for axis, _ in mesh_axes(mesh)})


def _renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    if not any(map(is_users, graph.eqns)):
        return graph

    def renamed(eqn: Eqn) -> Eqn:
        if not is_users(eqn) or not eqn.args or not isinstance(eqn.args[-1], str):
            return eqn
        return eqn.replace(args=(*eqn.args[:-1], names.get(eqn.args[-1], eqn.args[-1])))

    return graph.replace(eqns=tuple(map(renamed, graph.eqns)))
