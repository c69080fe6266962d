"""Cut equal layers out of a traced step: a small program that predicts what the large one costs.

    x1 = layer(x0, w0); x2 = layer(x1, w1); y = head(x2)   -->   x1 = layer(x0, w0); y = head(x1)

A layer is a stretch of forward between two narrow points, with the equations of backward that read its values. Without
it, the next layer reads what it read. Its leaves go too, with their gradients, updates and moments: whatever can no
longer be computed. A list loses these members, such as the gradients that are clipped or updated together. What
remains, such as the step count of a removed leaf, is a part of every small program, so a prediction counts it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..analyses.narrow_points import Stretch, stretches
from ..ir.dependencies import grouped, read_from_outside
from ..ir.graph import Eqn, Graph, Var, dce, rename, users, variables
from ..ir.liveness import liveness
from ..ir.marks import GRADIENT
from ..ir.op_facts import ADD, is_view
from ..ir.result_types import result_types
from ..ir.structure import structures
from ..ir.varying import varying


@dataclass(frozen=True, eq=False)
class Layer:
    """A part of a step that can be cut out.

    Attributes:
        eqns: its equations of forward and backward.
        exits: each value that the rest of forward and backward reads, with the value that takes its place.
    """

    eqns: tuple[Eqn, ...]
    exits: Mapping[Var, Var]


def equal_layers(graph: Graph) -> list[list[Layer]]:
    """The layers of a traced step in classes of equal ones, each in the order of forward.

    The first and the last stretch of forward, such as an embedding and a head, are not layers.
    """
    return list(grouped(_with_structure(graph)).values())


def without_layers(graph: Graph, layers: Iterable[Layer]) -> Graph:
    """A program without some of its layers, and without the leaves that only these have.

    Raises: ValueError if an operation cannot run on a shorter list.
    """
    gone: set[Eqn] = set()
    replacement: dict[Var, Var] = {}
    for layer in layers:
        gone.update(layer.eqns)
        replacement.update(layer.exits)
    rest = rename(graph.replace(eqns=tuple(e for e in graph.eqns if e not in gone)), replacement)

    lost = {v for e in gone for v in e.results}
    shorter: dict[Var, Var] = {}  # values that have another shape now, such as a stack of norms
    eqns: list[Eqn] = []
    for e in rest.eqns:
        e = e.with_inputs(lambda v: shorter.get(v, v))
        kept = _without_values(e, lost, shorter)
        if kept is None:
            # A sum of gradients of one leaf, or of losses, has fewer terms.
            terms = [v for v in e.ins if v not in lost and v.is_like(e.out)]
            if e.region != "update" and e.op is ADD and len(terms) == 1:
                shorter[e.out] = terms[0]
            else:
                lost.update(e.results)
        else:
            eqns.append(kept)
    small = dce(_without_results(rest.replace(eqns=tuple(eqns)), lost, shorter))
    read = {v for e in small.eqns for v in e.ins}
    for leaf in graph.state:
        if leaf in read and leaf not in small.inputs:
            raise ValueError(f"{leaf.name} has no new value without the layers that were cut out.")
    return small


# ---- layers


def _with_structure(graph: Graph) -> Iterator[tuple[Hashable, Layer]]:
    """The layers that can be cut out, each after its structure."""
    forward = stretches(graph, "forward")
    layer_of = _layer_of(graph, forward)
    starts = sorted(set(layer_of.values()))
    eqns_of = grouped((start, e) for e, start in layer_of.items())
    root = liveness(graph).root
    # The first stretch has no entry, and the last one no exit.
    for start, end in itertools.pairwise(starts[1:]):
        eqns = eqns_of[start]
        entry, exit = forward[start].entry, forward[end - 1].exit
        if entry is None or exit is None:
            continue
        exits = _exits(graph, eqns, layer_of, root[entry], root[exit])
        if exits:
            inputs = read_from_outside(eqns)
            structure = structures(eqns, inputs, tuple(exits), lambda v: v.type)
            yield structure, Layer(tuple(eqns), exits)


def _exits(
    graph: Graph,
    eqns: Sequence[Eqn],
    layer_of: Mapping[Eqn, int],
    entry: Var,
    exit: Var,
) -> dict[Var, Var]:
    """The values of a layer that other layers read, each with an input of the layer of equal type.

    Empty if there is none for the value that passes the narrow point after the layer.
    """
    if not entry.is_like(exit):
        return {}
    exits = {exit: entry}
    readers = users(graph)
    here = layer_of[eqns[0]]
    computed_or_given = {entry, *graph.inputs}.union(*(e.results for e in eqns))
    for region in ("forward", "backward"):
        mine = [e for e in eqns if e.region == region]
        free = [v for v in read_from_outside(mine) if v not in computed_or_given]
        for v in (v for e in mine for v in e.results if v is not exit):
            if any(layer_of.get(e, here) != here for e in readers.get(v, ())):
                like = next((x for x in free if x.is_like(v)), None)
                if like is not None:
                    exits[v] = like
                    free.remove(like)
    return exits


def _layer_of(graph: Graph, forward: Sequence[Stretch]) -> dict[Eqn, int]:
    """The layer of each equation of forward and backward that depends on the batch, in program order.

    An equation of backward belongs to the earliest layer that anything it depends on belongs to. If it also reads own
    values of a later one, as where a checkpoint recomputes two stretches together, both are one layer.
    """
    from_batch = varying(graph, ("batch",))
    number = _with_views_at_readers(
        graph, {e: k for k, part in enumerate(forward) for e in part.eqns}
    )
    owner = _owners(graph, forward, number)
    first = list(range(len(forward)))
    in_backward: set[Var] = set()
    for e in graph.eqns:
        owners = [owner[v] for v in e.ins if v in owner]
        if e.region != "backward" or not owners:
            continue
        k = min(owners)
        last = max((owner[v] for v in e.ins if v in owner and v not in in_backward), default=k)
        if last > k:
            first[k : last + 1] = [first[k]] * (last + 1 - k)
        for v in e.results:
            owner[v] = k
            if v in from_batch:
                in_backward.add(v)
        if e.op is GRADIENT or any(v in from_batch for v in e.results):
            number[e] = k
    number = _with_views_at_readers(graph, number)
    return {e: first[number[e]] for e in graph.eqns if e in number}


def _with_views_at_readers(graph: Graph, number: Mapping[Eqn, int]) -> dict[Eqn, int]:
    """The stretches of equations, where a view that only later stretches read belongs to the nearest of its readers.

    So one value passes a narrow point, and no view of it.
    """
    readers = users(graph)
    moved = dict(number)
    for e in reversed(graph.eqns):
        if e not in number or not is_view(e):
            continue
        reading = {
            moved[x]
            for v in e.results
            for x in readers.get(v, ())
            if x in moved and x.region == e.region
        }
        if e.region == "forward" and reading and min(reading) > moved[e]:
            moved[e] = min(reading)
        if e.region == "backward" and reading and max(reading) < moved[e]:
            moved[e] = max(reading)
    return moved


def _owners(graph: Graph, forward: Sequence[Stretch], number: Mapping[Eqn, int]) -> dict[Var, int]:
    """The stretch that each value of forward belongs to: the one that computes it, or the only one that reads it.

    What passes a narrow point belongs to the stretch after it.
    """
    root = liveness(graph).root
    owner = {v: k for e, k in number.items() for v in e.results}
    for k, part in enumerate(forward):
        if part.entry is not None:
            owner[root[part.entry]] = k
    # What is equal for all samples, such as a cast weight, is in no stretch.
    readers: dict[Var, set[int]] = {}
    for e in reversed(graph.eqns):
        if e in number:
            reading = {number[e]}
        elif e.region == "forward":
            reading = set[int]().union(*(readers.get(v, ()) for v in e.results))
        else:
            continue
        for v in e.ins:
            readers.setdefault(v, set()).update(reading)
    for v, numbers in readers.items():
        if len(numbers) == 1 and v not in graph.batch:
            owner.setdefault(v, min(numbers))
    return owner


# ---- what is lost with them


def _without_values(e: Eqn, lost: Collection[Var], shorter: dict[Var, Var]) -> Eqn | None:
    """An equation without the values that are lost; None if it cannot be computed.

    Its results get other shapes if their number or their types follow from the length of a list.
    """
    if not any(v in lost for v in e.ins) and not any(v in shorter.values() for v in e.ins):
        return e
    members = _lost_members(e, lost)
    if members is None:
        return None

    def short(x: Any) -> Any:
        if not isinstance(x, (list, tuple)) or not variables(x) or len(x) not in members:
            return x
        return [item for k, item in enumerate(x) if k not in members[len(x)]]

    new = e.replace(
        args=tuple(map(short, e.args)), kwargs={name: short(x) for name, x in e.kwargs.items()}
    )
    for n, gone in members.items():
        if len(e.outs) % n == 0:  # a result for each member of one list or several
            return new.replace(outs=tuple(v for k, v in enumerate(e.outs) if k % n not in gone))
    return _with_types(new, shorter)


def _lost_members(e: Eqn, lost: Collection[Var]) -> dict[int, set[int]] | None:
    """The positions of the members that the lists of an equation lose, by the length of the lists.

    Lists of one length belong together, such as parameters and their gradients. None if the equation needs a value that
    is lost, or a list has no member left.
    """
    lists = [x for x in (*e.args, *e.kwargs.values()) if isinstance(x, (list, tuple))]
    in_lists = {v for x in lists for v in variables(x)}
    if any(v in lost and v not in in_lists for v in e.ins):
        return None
    members: dict[int, set[int]] = {}
    for x in lists:
        gone = {k for k, item in enumerate(x) if any(v in lost for v in variables(item))}
        if gone:
            members.setdefault(len(x), set()).update(gone)
    return None if any(len(gone) == n for n, gone in members.items()) else members


def _with_types(e: Eqn, shorter: dict[Var, Var]) -> Eqn:
    """An equation with the types of results that its arguments give."""
    types = result_types(e)
    if types is None or len(types) != len(e.outs):
        raise ValueError(f"{e.op} does not run on fewer layers.")
    outs = []
    for v, expected in zip(e.outs, types):
        if v is not None and expected is not None and v.shape != expected.shape:
            shorter[v] = v = replace(v, shape=expected.shape)
        outs.append(v)
    return e.replace(outs=tuple(outs))


def _without_results(graph: Graph, lost: Collection[Var], shorter: Mapping[Var, Var]) -> Graph:
    """A program without the leaves whose new values are lost, and without the other outputs that are."""
    lost_leaves = {old.name for old, new in graph.leaves if new in lost}
    # What a transform keeps for a leaf goes with it.
    kept = tuple(k for k in graph.kept if k.like not in lost_leaves)
    lost_leaves.update(k.name for k in graph.kept if k not in kept)
    remains = [old.name not in lost_leaves for old in graph.state]
    leaves = [(old, shorter.get(new, new)) for (old, new), k in zip(graph.leaves, remains) if k]
    results = [
        x for x in graph.outputs[graph.num_state :] if not any(v in lost for v in variables(x))
    ]
    shapes = tuple(shape for shape, k in zip(graph.leaf_shapes, remains) if k)
    return graph.replace(
        inputs=(*(old for old, _ in leaves), *graph.inputs[graph.num_state :]),
        outputs=(*(new for _, new in leaves), *(shorter.get(x, x) for x in results)),
        num_state=len(leaves),
        leaf_shapes=shapes,
        kept=kept,
    )
