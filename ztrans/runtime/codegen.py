"""Code generation: turn the program of one rank into Python code.

`to_fx` writes a program as a `torch.fx.GraphModule`, whose generated code drops each value after its last use. With
`donate`, elementwise equations write over values that nothing reads any more, the state above all. So a step holds one
copy of its state, and few temporaries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import with_joint_indices
from ..ir.collectives.user_collectives import by_group
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape, localize
from ..ir.update_groups import Group, is_fused_update, list_call
from ..ir.views import Calls, simpler_calls
from .cuda.streams import Streams
from .cuda.symmetric_start import side_streams
from .emission import EMITTERS, Emission, Emitter, operation, over_lists, unpacked, updates


@dataclass(frozen=True)
class Kernel:
    """A function that computes a group of equations: it takes the values of `ins` and returns those of `outs`."""

    call: Callable
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
    """The program of one rank (rank 0 without a mesh) as an FX module with flat inputs and outputs.

    A collective becomes a submodule, which starts it, and calls of `wait`. The metadata of a node has the equations
    that it runs, their region, and the user's line.

    Args:
        graph: the program.
        mesh: the mesh whose process groups carry the collectives. Without it the module can be printed, not run.
        donate: write over values that nothing reads any more.
        groups: equations next to each other that become a single call, of a kernel, of a fused optimizer or of an
            operation over lists.
        kernels: the kernels of groups.
        calls: functions that are called instead of the operations of equations.
        streams: the streams of the collectives; by default those of the mesh's devices.
        on_write: a function that the program calls before the first equation that writes over the state.
        emitters: for each primitive, the function that emits its calls.
    """
    if graph.micro > 1:
        raise ValueError(
            f"to_fx: {graph.name} runs for {graph.micro} micro-batches, in up to three programs.\n"
            f"Write each of them: zt.to_fx(zt.ir.parts(graph).last), and so first and middle."
        )
    at = coordinates(graph, mesh)
    if mesh is not None:
        graph, streams = by_group(graph, mesh), streams or side_streams(mesh.device_type)
    out = fx.Graph()
    nodes: dict[Var, Any] = {v: _placeholder(out, v) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), nodes, graph.axes, at, mesh, streams)
    donated = (
        donation(graph, frozenset(e for group in kernels for e in group))
        if donate
        else Donation({}, {}, {}, {})
    )
    units = list(_units(graph, groups, kernels, donated))
    instead = {**donated.twins, **calls}
    forms = _Forms(kernels, instead, emitters, *_localized(graph, at, units, instead))
    first_write = _first_write(units, kernels, donated, graph.inputs[: graph.num_state])
    ends = []  # by unit, how many nodes there are after it
    for unit in units:
        if on_write is not None and unit is first_write:
            out.call_function(on_write)
        nodes.update((v, node) for v, node in _emit(unit, emission, forms) if v is not None)
        ends.append(len(out.nodes))
    emitted = list(out.nodes)
    out.output(list(map(emission.returned, graph.outputs)))
    _describe(units, [emitted[a:b] for a, b in pairwise([len(graph.inputs), *ends])])
    return fx.GraphModule(emission.module, out, graph.name)


def coordinates(graph: Graph, mesh: DeviceMesh | None) -> dict[str, int]:
    """The index of this rank along each axis of a program; 0 without a mesh."""
    sizes = dict(graph.mesh)
    at = {axis: mesh.get_local_rank(axis) if mesh is not None else 0 for axis in sizes}
    return with_joint_indices(at, sizes, graph.joint)


def _placeholder(out: fx.Graph, v: Var) -> fx.Node:
    """A parameter of the code for an input, with a name that nothing else in the code has."""
    node = out.placeholder(
        "".join(c if c.isalnum() else "_" for c in v.name) if v.name != "self" else "self_"
    )
    node.target = node.name
    return node


class _Unit(NamedTuple):
    """Equations that run as one call, or a single one, and where the first of them stands."""

    place: int
    eqns: Group


def _units(
    graph: Graph, groups: Sequence[Group], kernels: Mapping[Group, Kernel], donated: Donation
) -> Iterator[_Unit]:
    """The units of a program, in order: the groups that have a kernel, or that one call computes, are one unit each."""
    together = {
        group[0]: group for group in groups if group in kernels or _is_one_call(group, donated)
    }
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
    if not all(in_place) or not all(
        isinstance(donated.twins[e], torch._ops.OpOverload) for e in group
    ):
        return False
    written = {donated.owner[e.ins[0]] for e in group}
    read = {donated.owner[v] for e in group for v in e.ins[1:]}
    return (
        len(written) == len(group)
        and not written & read
        and list_call(group, in_place=True) is not None
    )


class _Forms(NamedTuple):
    """What is called for the units of a program.

    Attributes:
        kernels: by group, the kernel that computes it.
        instead: by equation, what is called in place of its operation, such as one that writes in place.
        emitters: by primitive, what emits its calls.
        local: by equation of an operation, the same with the sizes of this rank.
        calls: what is called for those that are called as they are or as views allow.
    """

    kernels: Mapping[Group, Kernel]
    instead: Mapping[Eqn, Callable]
    emitters: Mapping[Primitive, Emitter]
    local: Mapping[Eqn, Eqn]
    calls: Calls


def _localized(
    graph: Graph, at: Mapping[str, int], units: Sequence[_Unit], instead: Collection[Eqn]
) -> tuple[dict[Eqn, Eqn], Calls]:
    """The equations with the sizes of the rank at these coordinates, and what is called for them there."""
    local = {e: localize(e, graph.axes, at) for e in graph.eqns}
    together = (e for unit in units if len(unit.eqns) > 1 for e in unit.eqns)
    apart = {local[e] for e in (*instead, *together)}
    shape = functools.partial(local_shape, sizes=graph.axes, at=at)
    on_this_rank = graph.replace(eqns=tuple(local.values()))
    return local, simpler_calls(on_this_rank, shape, apart)


def _emit(unit: _Unit, emission: Emission, forms: _Forms) -> Iterable[tuple[Var | None, Any]]:
    """Emit the calls of a unit. Returns its results with their nodes."""
    out, nodes, eqn = emission.out, emission.nodes, unit.eqns[0]
    if unit.eqns in forms.kernels:
        kernel = forms.kernels[unit.eqns]
        call = out.call_function(kernel.call, tuple(nodes[v] for v in kernel.ins))
        return list(zip(kernel.outs, unpacked(out, call, kernel.outs)))
    if len(unit.eqns) > 1:
        update = updates if is_fused_update(eqn) else over_lists
        results = update(emission, unit.eqns, forms.instead.get(eqn))
        return [pair for e, values in zip(unit.eqns, results) for pair in zip(e.outs, values)]
    if isinstance(eqn.op, Primitive):
        return list(zip(eqn.outs, forms.emitters[eqn.op](emission, eqn, unit.place)))
    return _emit_operation(eqn, emission, forms)


def _emit_operation(
    eqn: Eqn, emission: Emission, forms: _Forms
) -> Iterable[tuple[Var | None, Any]]:
    """Emit the calls of an operation. Returns its results with their nodes."""
    local = forms.local[eqn]
    if eqn in forms.instead:
        return list(zip(eqn.outs, operation(emission, local, forms.instead[eqn])))
    for part in forms.calls.eqns.get(local, (local,)):
        emission.nodes.update(
            (v, node) for v, node in zip(part.outs, operation(emission, part)) if v is not None
        )
    equal = [(v, forms.calls.equal[v]) for v in eqn.results if v in forms.calls.equal]
    return [
        (v, emission.nodes[x]) for v, x in equal if x in emission.nodes
    ]  # others are left out: no call reads them


def _describe(units: Sequence[_Unit], emitted: Sequence[list[fx.Node]]) -> None:
    """Write into the metadata of nodes which equations they run, in which region, and the user's line.

    `emitted` are the nodes of each unit. Equations without a node take no time. They are said to run with the next
    unit that has one; its `weights` say which equations share its time.
    """
    silent: list[Eqn] = []
    last: list[fx.Node] = []
    for unit, nodes in zip(units, emitted):
        if not nodes:
            silent += unit.eqns
            continue
        first, eqns, weights = (
            unit.eqns[0],
            (*silent, *unit.eqns),
            (*[0] * len(silent), *[1] * len(unit.eqns)),
        )
        source = str(first.source) if first.source else ""
        for node in nodes:
            node.meta.update(
                eqn=first, region=first.region, source=source, eqns=eqns, weights=weights
            )
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
