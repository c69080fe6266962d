"""Code generation: the program of one rank as Python code that runs.

`to_fx` writes a program as a `torch.fx.GraphModule`, whose generated code drops each value after its last use. With
`donate`, elementwise equations write over values that nothing reads any more, above all over the state; so a step
holds one copy of its state and few temporaries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Graph, Primitive, Var, substitute
from ..ir.layout import local_shape, localize
from ..ir.user_collectives import by_group
from .call_forms import list_call
from .cuda.streams import Streams
from .cuda.symmetric_start import side_streams
from .emission import EMITTERS, Emission, Emitter, operation, over_lists, updates
from .update_groups import Group, is_fused_update
from .views import Views, is_view_call


@dataclass(frozen=True)
class Kernel:
    """A module that computes a group of equations: it takes the values of `ins` and returns those of `outs`."""

    call: torch.nn.Module
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    writes: bool = False  # whether it writes over the state


def to_fx(
    graph: Graph,
    mesh: DeviceMesh | None = None,
    donate: bool = False,
    groups: Sequence[Group] = (),
    kernels: Mapping[Group, Kernel] = MappingProxyType({}),
    calls: Mapping[Eqn, Callable] = MappingProxyType({}),
    streams: Streams | None = None,
    on_write: Callable[[], None] | None = None,
    emitters: Mapping[Primitive, Emitter] = EMITTERS,
) -> fx.GraphModule:
    """The program of one rank (rank 0 without a mesh) as an FX module of flat inputs and outputs.

    Collectives are submodules that start them and calls of `wait`. The equations of a group stand side by side and
    are one call: of its kernel, of an optimizer, or of an operation over lists. `calls` says what is called instead
    of an equation's operation. Collectives run on `streams`, by default those of the mesh's devices. Node metadata
    carries the region, the user's line, and the equations of a node. The program calls `on_write` before the first
    equation that writes over the state. `emitters` has what emits the calls for each primitive.
    """
    at = coordinates(graph, mesh)
    if mesh is not None:
        graph, streams = by_group(graph, mesh), streams or side_streams(mesh.device_type)
    out = fx.Graph()
    nodes: dict[Var, Any] = {v: out.placeholder(_identifier(v.name)) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), nodes, graph.axes, at, mesh, streams)
    donated = donation(graph, {e for group in kernels for e in group}) if donate else Donation({}, {}, {}, {})
    views = Views(graph, lambda v: local_shape(v, graph.axes, at))
    units = list(_units(graph, groups, kernels, donated))
    first_write = _first_write(units, kernels, donated, graph.inputs[: graph.num_state])
    ends = []  # by unit, how many nodes there are after it
    for unit in units:
        if on_write is not None and unit is first_write:
            out.call_function(on_write)
        results = _emit(unit, emission, views, kernels, donated.twins, calls, emitters)
        nodes.update((v, node) for v, node in results if v is not None)
        ends.append(len(out.nodes))
    emitted = list(out.nodes)
    out.output([substitute(o, nodes.__getitem__) for o in graph.outputs])
    _describe(units, [emitted[a:b] for a, b in pairwise([len(graph.inputs), *ends])], _erase_unread_views(out))
    return fx.GraphModule(emission.module, out, graph.name)


def coordinates(graph: Graph, mesh: DeviceMesh | None) -> dict[str, int]:
    """The index of this rank along each axis of a program; 0 without a mesh."""
    return {axis: mesh.get_local_rank(axis) if mesh is not None else 0 for axis in graph.axes}


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


class _Unit(NamedTuple):
    """Equations that run as one call, or a single one, and where the first of them stands."""

    place: int
    eqns: Group


def _units(
    graph: Graph, groups: Sequence[Group], kernels: Mapping[Group, Kernel], donated: Donation
) -> Iterator[_Unit]:
    """The units of a program, in order: the groups that have a kernel, or that one call computes, are one unit each."""
    together = {group[0]: group for group in groups if group in kernels or _is_one_call(group, donated)}
    inside = {e for group in together.values() for e in group[1:]}
    for place, eqn in enumerate(graph.eqns):
        if eqn not in inside:
            yield _Unit(place, together.get(eqn, (eqn,)))


def _is_one_call(group: Group, donated: Donation) -> bool:
    """Whether a fused optimizer, or an operation over lists, can compute equal equations at once.

    All of them write in place, or none does. What one of them writes no other may read, for one kernel may compute
    them in any order.
    """
    in_place = [e in donated.twins for e in group]
    if is_fused_update(group[0]):
        return all(in_place)
    if not any(in_place):
        return list_call(group, in_place=False) is not None
    if not all(in_place) or not all(isinstance(donated.twins[e], torch._ops.OpOverload) for e in group):
        return False
    written = {donated.owner[e.ins[0]] for e in group}
    read = {donated.owner[v] for e in group for v in e.ins[1:]}
    return len(written) == len(group) and not written & read and list_call(group, in_place=True) is not None


def _emit(
    unit: _Unit,
    emission: Emission,
    views: Views,
    kernels: Mapping[Group, Kernel],
    twins: Mapping[Eqn, Any],
    calls: Mapping[Eqn, Callable],
    emitters: Mapping[Primitive, Emitter],
) -> Iterable[tuple[Var | None, Any]]:
    """Emit the calls of a unit. Returns its results with their nodes."""
    out, nodes, eqn = emission.out, emission.nodes, unit.eqns[0]
    if unit.eqns in kernels:
        kernel = kernels[unit.eqns]
        call = emission.call(f"kernel_{unit.place}", kernel.call, *kernel.ins)
        return [(v, out.call_function(operator.getitem, (call, k))) for k, v in enumerate(kernel.outs)]
    if len(unit.eqns) > 1:
        update = updates if is_fused_update(eqn) else over_lists
        results = update(out, unit.eqns, twins.get(eqn), nodes)
        return [pair for e, values in zip(unit.eqns, results) for pair in zip(e.outs, values)]
    if isinstance(eqn.op, Primitive):
        return list(zip(eqn.outs, emitters[eqn.op](emission, eqn, unit.place)))
    local = localize(eqn, emission.sizes, emission.at)
    if eqn in calls or eqn in twins:
        return list(zip(eqn.outs, operation(emission, local, calls.get(eqn) or twins.get(eqn))))
    return _emit_alone(local, emission, views)


def _emit_alone(eqn: Eqn, emission: Emission, views: Views) -> Iterable[tuple[Var | None, Any]]:
    """Emit the calls of an operation, in as few of them as its views allow."""
    simpler = views.fewer_calls(eqn)
    if isinstance(simpler, Var):
        return [(eqn.out, emission.nodes[simpler])]
    for part in simpler:
        results = list(zip(part.outs, operation(emission, part)))
        emission.nodes.update((v, node) for v, node in results if v is not None)
    return results


def _erase_unread_views(out: fx.Graph) -> Collection[fx.Node]:
    """Erase the views that no call reads, because what follows reads the values that they show. Returns the rest."""
    for node in reversed(out.nodes):
        if not node.users and is_view_call(node):
            out.erase_node(node)
    return set(out.nodes)


def _describe(units: Sequence[_Unit], emitted: Sequence[list[fx.Node]], present: Collection[fx.Node]) -> None:
    """Write into the metadata of nodes which equations they run, in which region, and the user's line.

    `emitted` are the nodes of each unit, of which those in `present` are still there. Equations without a node take
    no time. They are said to run with the next unit that has one; its `weights` say which equations share its time.
    """
    silent: list[Eqn] = []
    last: list[fx.Node] = []
    for unit, of_unit in zip(units, emitted):
        nodes = [node for node in of_unit if node in present]
        if not nodes:
            silent += unit.eqns
            continue
        first, eqns, weights = unit.eqns[0], (*silent, *unit.eqns), (*[0] * len(silent), *[1] * len(unit.eqns))
        source = str(first.source) if first.source else ""
        for node in nodes:
            node.meta.update(eqn=first, region=first.region, source=source, eqns=eqns, weights=weights)
        silent, last = [], nodes
    for node in last:
        node.meta["eqns"] += tuple(silent)
        node.meta["weights"] += (0,) * len(silent)


def _first_write(
    units: Sequence[_Unit], kernels: Mapping[Group, Kernel], donated: Donation, state: Sequence[Var]
) -> _Unit | None:
    """The first unit that writes over the state."""
    of_state = set(state)

    def writes(unit: _Unit) -> bool:
        if unit.eqns in kernels:
            return kernels[unit.eqns].writes
        written = (v for e in unit.eqns if e in donated.twins for v in e.outs)
        return any(donated.owner.get(v) in of_state for v in written if v is not None)

    return next(filter(writes, units), None)
