"""Find the narrow points of forward and backward, and the stretches of equations between them.

A narrow point is a place at which only one large value passes from the earlier equations of a region to its later ones:
the residual stream in forward, its gradient in backward. A Llama has two in each layer, after attention and after the
MLP; where a layer is a checkpoint, backward has one, because it recomputes the layer as a whole.

    x1 = add(x0, mm(..., wo))         -- narrow: x1 passes
    y = norm(x1)                         x1 and y pass
    h = mm(y, up)                        x1 and h pass
    x2 = add(x1, mm(gelu(h), down))   -- narrow: x2 passes

What does not count: values of forward that only backward reads; values that are the same for all samples, such as cast
weights; values that no parameter enters, such as masks; and gradients of leaves on their way to the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ..ir.cached_analysis import cached_on_graph
from ..ir.dependencies import depending
from ..ir.graph import Eqn, Graph, Region, Var, producers
from ..ir.liveness import liveness
from ..ir.marks import GRADIENT
from ..ir.varying import varying

# The bytes of the largest value that passes a narrow point, as a part of all that pass. The rest may be small values,
# such as the losses of the routers of earlier layers.
LARGEST_SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Stretch:
    """The equations of a region between two narrow points that depend on the batch and on the state, in order.

    Attributes:
        region: "forward" or "backward".
        eqns: the equations.
        entry: the value that passes the point before it; None for the first stretch.
        exit: the value that passes the point after it; None for the last stretch.
        leaves: the leaves of the state that it reads, also through their casts and views.
    """

    region: Region
    eqns: tuple[Eqn, ...]
    entry: Var | None
    exit: Var | None
    leaves: frozenset[Var]


@cached_on_graph
def stretches(graph: Graph, region: Region) -> tuple[Stretch, ...]:
    """The stretches of a region of a program as it was traced, in order.

    They have the equations that depend on the batch and on the state. Each stretch reads a leaf, or computes the
    gradient of one that the region does not read, such as an embedding. A cast of a gradient is in the stretch of that
    gradient, right after it, wherever autograd has put it.
    """
    from_batch = varying(graph, ("batch",))
    from_state = depending(graph.eqns, graph.state)
    counted = {v for v in from_batch if v in from_state}
    eqns = [e for e in graph.eqns if e.region == region and any(v in counted for v in e.results)]
    gradients = _gradients_of_one_leaf(graph)
    eqns = _casts_after_gradients(eqns, gradients)
    counted.difference_update(gradients)
    leaves = _leaves_of_invariants(graph, from_batch)
    users_of_leaves = _users_of_leaves(eqns, leaves, gradients)
    points = _narrow_points(users_of_leaves, _passing(graph, eqns, counted))

    bounds = [(0, None), *((point.place, point.value) for point in points), (len(eqns), None)]
    parts = []
    for (start, entry), (end, exit) in itertools.pairwise(bounds):
        inside = tuple(eqns[start:end])
        parts.append(Stretch(region, inside, entry, exit, _leaves_read(inside, leaves)))
    return tuple(parts)


# ---- what passes each place


@dataclass(frozen=True)
class _Passing:
    """What passes a place, before equation `place` of the region: all bytes, and the value that has nearly all of them,
    if there is one, with the owner of its storage.
    """

    place: int
    total: int
    value: Var | None = None
    owner: Var | None = None


def _narrow_points(users_of_leaves: Set[int], passing: Sequence[_Passing]) -> list[_Passing]:
    """The narrow points of a region.

    Between two equations that use leaves, the point is where the fewest bytes pass. Of several such places it is the
    one after the last equation that computes: after an activation function or a cast to bf16, before views.

    Args:
        users_of_leaves: the positions of the equations that use leaves.
        passing: what passes after each equation.
    """
    points: list[_Passing] = []
    narrowest: _Passing | None = None
    uses_leaf = False
    for k, here in enumerate(passing):
        if k in users_of_leaves:
            if narrowest is not None:
                points.append(narrowest)
            narrowest = None
            uses_leaf = True
        if not uses_leaf or here.value is None:
            continue
        if narrowest is not None and here.total > narrowest.total:
            continue
        if narrowest is None or here.total < narrowest.total or here.owner is not narrowest.owner:
            narrowest = here
    return points


def _passing(graph: Graph, eqns: Sequence[Eqn], counted: Set[Var]) -> list[_Passing]:
    """What passes after each of the equations of a region; only `counted` values count."""
    root = liveness(graph).root
    made = {v for e in eqns for v in e.results if v in counted}
    last_read: dict[Var, int] = {}  # of each storage
    for k, e in enumerate(eqns):
        last_read.update((root[v], k) for v in e.ins if v in made)

    passing = []
    live: dict[Var, Var] = {}  # each storage, with the value in it that was made last
    for k, e in enumerate(eqns):
        live.update((root[v], v) for v in e.results if v in made and root[v] in made)
        live = {owner: v for owner, v in live.items() if last_read.get(owner, -1) > k}
        sizes = {owner: owner.nbytes for owner in live}
        here = _Passing(k + 1, sum(sizes.values()))
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is not None and sizes[largest] >= LARGEST_SHARE * here.total:
            here = replace(here, value=live[largest], owner=largest)
        passing.append(here)
    return passing


def _leaves_of_invariants(graph: Graph, from_batch: Container[Var]) -> dict[Var, frozenset[Var]]:
    """For each value that is computed from leaves alone, these leaves."""
    leaves = {v: frozenset({v}) for v in graph.state}
    for e in graph.eqns:
        of_eqn = _leaves_read([e], leaves)
        if of_eqn:
            leaves.update((v, of_eqn) for v in e.results if v not in from_batch)
    return leaves


def _leaves_read(eqns: Iterable[Eqn], leaves: Mapping[Var, frozenset[Var]]) -> frozenset[Var]:
    return frozenset(leaf for e in eqns for v in e.ins for leaf in leaves.get(v, ()))


def _users_of_leaves(
    eqns: Sequence[Eqn], leaves: Mapping[Var, frozenset[Var]], gradients: Mapping[Var, Var]
) -> set[int]:
    """The positions of the equations that read a leaf, or compute the gradient of one that no equation reads."""
    read_leaves = _leaves_read(eqns, leaves)
    positions = set()
    for k, e in enumerate(eqns):
        reads = any(v in leaves for v in e.ins)
        if reads or any(v in gradients and gradients[v] not in read_leaves for v in e.results):
            positions.add(k)
    return positions


def _gradients_of_one_leaf(graph: Graph) -> dict[Var, Var]:
    """The values with the shape of a leaf, or of its transpose, that only the gradient of this leaf depends on."""
    leaf_of: dict[Var, Var | None] = {}  # None if the gradients of several leaves depend on a value
    for e in reversed(graph.eqns):
        if e.op is GRADIENT:
            leaves = {e.args[1]}
        elif e.region == "update":
            continue
        else:
            leaves = {leaf_of[v] for v in e.results if v in leaf_of}
        if not leaves:
            continue
        leaf = leaves.pop() if len(leaves) == 1 else None
        for v in e.ins:
            leaf_of[v] = leaf if leaf_of.get(v, leaf) is leaf else None
    gradients = {}
    for v, leaf in leaf_of.items():
        if leaf is not None and v.shape in (leaf.shape, leaf.shape[::-1]):
            gradients[v] = leaf
    return gradients


def _casts_after_gradients(eqns: Sequence[Eqn], gradients: Container[Var]) -> list[Eqn]:
    """The equations, where those that read only gradients of leaves come right after these gradients.

    Autograd casts the gradients of weights that were cast before forward only at the end of backward.
    """
    makers = producers(eqns)
    position = {e: k for k, e in enumerate(eqns)}
    followers: dict[Eqn, list[Eqn]] = {}
    order: list[Eqn] = []
    for e in eqns:
        if e.ins and all(v in gradients and v in makers for v in e.ins):
            last = max((makers[v] for v in e.ins), key=position.__getitem__)
            followers.setdefault(last, []).append(e)
        else:
            order.append(e)
    moved: list[Eqn] = []
    stack = order[::-1]
    while stack:
        e = stack.pop()
        moved.append(e)
        stack += reversed(followers.get(e, ()))
    return moved
