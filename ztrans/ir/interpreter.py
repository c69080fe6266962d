"""The interpreter, which defines what a program means: it runs the equations one by one on plain tensors.

`evaluate` runs a program on one rank. `lockstep` runs all ranks of a lowered program in one process, equation by
equation, so it computes the result of eight ranks in milliseconds. It also runs the collectives that the user's own
step calls. The tests compare every transform with this file, which uses no processes, streams or buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .ambient import refuse_inside, without_autocast
from .axes import groups_along, with_joint_indices
from .collectives import rules
from .dependencies import grouped
from .graph import Eqn, Graph, Var, substitute, variables
from .layout import cut, localize
from .micro_batches import Carry, micro_batch_programs

Coordinates = Mapping[str, int]  # the index of a rank along each axis


def evaluate(graph: Graph, *inputs: torch.Tensor) -> list[Any]:
    """The outputs of a program on one rank for its flat inputs.

    >>> x, y = Var("x", torch.float32, (2,)), Var("y", torch.float32, (2,))
    >>> double = Graph("double", (x,), (Eqn(torch.ops.aten.mul.Tensor, (x, 2), (y,)),), (y,), 0)
    >>> evaluate(double, torch.tensor([1.0, 2.0]))
    [tensor([2., 4.])]
    """
    return lockstep(graph, [inputs])[0]


def coordinates(mesh: Sequence[tuple[str, int]], joint: Iterable[str] = ()) -> list[dict[str, int]]:
    """The index of each rank along every axis of a mesh, along joint axes, and among neighbours, in rank order.

    >>> coordinates([("host", 2), ("dp", 2)])[2]
    {'host': 1, 'dp': 0}
    """
    sizes = dict(mesh)
    indices = itertools.product(*map(range, sizes.values()))
    return [with_joint_indices(dict(zip(sizes, index)), sizes, joint) for index in indices]


def lockstep(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """The outputs of every rank for every rank's flat inputs, which stay unchanged.

    Raises:
        ValueError: the mesh has another number of ranks, or a collective of the user's step runs over a group that is
            not an axis of the mesh, or sends from one rank to another.
        TypeError: lockstep is called inside a transform of torch.func.
    """
    refuse_inside("lockstep", ranks)
    if graph.micro > 1:
        return _micro_batches(graph, ranks)
    rank_coordinates = coordinates(graph.mesh, graph.joint)
    if len(ranks) != len(rank_coordinates):
        raise ValueError(
            f"lockstep: the program is for {len(rank_coordinates)} ranks and was given inputs for {len(ranks)}."
        )
    values = [dict(zip(graph.inputs, inputs, strict=True)) for inputs in ranks]
    dead_after = _dead_after(graph)
    with torch.no_grad(), without_autocast():
        for eqn in graph.eqns:
            _run(eqn, graph, rank_coordinates, values)
            for v in dead_after.get(eqn, ()):
                for env in values:
                    del env[v]
    return [list(substitute(graph.outputs, env.__getitem__)) for env in values]


def _dead_after(graph: Graph) -> dict[Eqn, list[Var]]:
    """For each equation, the values that nothing reads after it."""
    last_reader: dict[Var, Eqn] = {}
    for e in graph.eqns:
        for v in e.ins:
            last_reader[v] = e
    for v in variables(graph.outputs):
        last_reader.pop(v, None)
    return grouped((e, v) for v, e in last_reader.items())


def _micro_batches(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """Run `lockstep` on one micro-batch after the other."""
    programs = micro_batch_programs(graph)
    carries = [Carry(graph, programs, inputs) for inputs in ranks]
    for program in programs.before_last:
        outputs = lockstep(program, [carry.inputs() for carry in carries])
        for carry, results in zip(carries, outputs):
            carry.take(results)
    return lockstep(programs.last, [carry.inputs() for carry in carries])


def _run(
    eqn: Eqn,
    graph: Graph,
    rank_coordinates: Sequence[Coordinates],
    values: Sequence[dict[Var, Any]],
) -> None:
    """Compute one equation on every rank, group by group, and add its results to `values`."""
    for group in _groups(graph, rules(eqn).axis(eqn)):
        local_eqns = [localize(eqn, graph.axes, rank_coordinates[rank]) for rank in group]
        results = rules(eqn).meaning(local_eqns, [values[rank] for rank in group])
        for rank, rank_results in zip(group, results):
            for v, x in zip(eqn.outs, rank_results):
                if v is not None:
                    values[rank][v] = x


def split_state(graph: Graph, state: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Every rank's part of a full flat state."""
    ranks = []
    for rank_coordinates in coordinates(graph.mesh, graph.joint):
        parts = []
        for v, leaf in zip(graph.state, state):
            split = v.split
            if split is not None:
                index = rank_coordinates[split.axis]
                leaf = cut(leaf, split, graph.axes[split.axis], index)
            parts.append(leaf)
        ranks.append(parts)
    return ranks


def join_state(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The full flat state, joined from the parts of all ranks: the inverse of `split_state`."""
    full = []
    for i, v in enumerate(graph.state):
        leaf = ranks[0][i]
        if v.split is not None:
            # All groups along this axis hold the same parts, so take the first.
            group = _groups(graph, v.split.axis)[0]
            leaf = torch.cat([ranks[rank][i] for rank in group], v.split.dim)
        full.append(leaf)
    return full


def _groups(graph: Graph, axis: str | None) -> list[list[int]]:
    """The groups of ranks that differ only along `axis`, in its order. Without an axis each rank is a group."""
    sizes = dict(graph.mesh)
    count = math.prod(sizes.values())
    if axis is None:
        return [[rank] for rank in range(count)]
    if axis not in graph.axes:
        axes = ", ".join(map(repr, graph.axes))
        raise ValueError(f"lockstep: {axis!r} is not an axis of the mesh, which has {axes}.")
    ranks = torch.arange(count, device="cpu").view(tuple(sizes.values()))
    return groups_along(ranks, tuple(sizes), [axis])
