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
from torch.utils import _pytree as pytree

from .ambient import refuse_inside, without_autocast
from .axes import groups_along, with_joint_indices
from .collectives import rules
from .dependencies import grouped
from .graph import Eqn, Graph, Var, substitute, variables
from .layout import cut, localize
from .micro_batches import Carry, micro_batch_programs
from .printer import counted

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
            f"lockstep: the program is for {counted(len(rank_coordinates), 'rank')} and was given inputs for "
            f"{len(ranks)}."
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
    return [on_rank(graph, state, place) for place in coordinates(graph.mesh, graph.joint)]


def on_rank(
    graph: Graph, state: Sequence[torch.Tensor], place: Mapping[str, int]
) -> list[torch.Tensor]:
    """The part of a full flat state on the rank at these coordinates."""
    parts = []
    for v, leaf in zip(graph.state, replica_state(graph, list(state), place)):
        if v.split is not None:
            leaf = cut(leaf, v.split, graph.axes[v.split.axis], place[v.split.axis])
        parts.append(leaf)
    return parts


def replica_state(graph: Graph, state: Any, place: Mapping[str, int]) -> Any:
    """A full state as its replica at these coordinates has it.

    A leaf of replicas that train apart may begin with a dim of them. Without it they are all equal.
    """
    leaves, tree = pytree.tree_flatten(state)
    own_leaves = []
    for v, leaf in zip(graph.state, leaves):
        if v.own and isinstance(leaf, torch.Tensor) and leaf.ndim > len(v.shape):
            leaf = leaf[replica(graph, v, place)]
        own_leaves.append(leaf)
    return pytree.tree_unflatten([*own_leaves, *leaves[len(own_leaves) :]], tree)


def replica(graph: Graph, v: Var, place: Mapping[str, int]) -> int:
    """The replica to which a leaf of the state belongs on the rank at these coordinates."""
    index = 0
    for axis in v.own:
        index = index * graph.axes[axis] + place[axis]
    return index


def join_state(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The full flat state, joined from the parts of all ranks: the inverse of `split_state`.

    A leaf of replicas that train apart begins with a dim of them.
    """
    places = coordinates(graph.mesh, graph.joint)
    full = []
    for i, v in enumerate(graph.state):
        split = v.split
        values: dict[int, torch.Tensor] = {}
        # The groups of one replica hold the same parts, so take the first.
        for group in _groups(graph, split.axis if split is not None else None):
            index = replica(graph, v, places[group[0]])
            if index not in values:
                parts = [ranks[rank][i] for rank in group]
                values[index] = parts[0] if split is None else torch.cat(parts, split.dim)
        full.append(torch.stack([values[k] for k in sorted(values)]) if v.own else values[0])
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
