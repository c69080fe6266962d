"""The user's own collectives, by mesh axis: process group names mean nothing on another rank or in another job.

A step may call `torch.distributed._functional_collectives` itself (tensor parallel, expert
parallel). Its collectives stay where they are; in a program they name the axis, and the group of
this rank is put back when the program is bound to a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from .graph import Eqn, Graph, Layout, Split

_NAMESPACE = "_c10d_functional::"
_ELEMENTWISE = ("all_reduce", "all_reduce_coalesced", "broadcast", "wait_tensor")


def is_users(eqn: Eqn) -> bool:
    """Whether the equation is a collective of the user's own step."""
    return getattr(getattr(eqn.op, "_schema", None), "name", "").startswith(_NAMESPACE)


def is_wait(eqn: Eqn) -> bool:
    """Whether the equation waits for a collective of the user's own step."""
    return is_users(eqn) and eqn.op._schema.name == f"{_NAMESPACE}wait_tensor"


def on_parts(eqn: Eqn, have: Sequence[Layout]) -> list[Layout]:
    """How one of the step's own collectives takes values that lie as `have` says, and how it gives them back:
    one that works element by element takes parts as they are; terms are reduced first, and others take whole values.
    So does one over the axis over which the parts are cut: the ranks' parts are of different elements.
    """
    if eqn.op._schema.name.removeprefix(_NAMESPACE) not in _ELEMENTWISE:
        return [()] * len(have)
    return [tuple(p for p in layout if isinstance(p, Split) and p.axis != eqn.args[-1]) for layout in have]


def by_axis(graph: Graph, mesh: DeviceMesh) -> Graph:
    """Name axes instead of groups."""
    return _renamed(graph, {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names})


def by_group(graph: Graph, mesh: DeviceMesh) -> Graph:
    """Name this rank's groups instead of axes: the inverse of `by_axis`."""
    return _renamed(graph, {axis: mesh.get_group(axis).group_name for axis in mesh.mesh_dim_names})


def _renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    if not any(map(is_users, graph.eqns)):
        return graph

    def renamed(eqn: Eqn) -> Eqn:
        if not is_users(eqn) or not eqn.args or not isinstance(eqn.args[-1], str):
            return eqn
        return eqn.replace(args=(*eqn.args[:-1], names.get(eqn.args[-1], eqn.args[-1])))

    return graph.replace(eqns=tuple(map(renamed, graph.eqns)))
