"""Find equations around the widest values of forward and backward: the loss of a language model, its MLPs.

    h = mm(x, up); a = gelu(h); y = mm(a, down)       h and a are four times as wide as x and y

A value is wide if it has at least twice as many elements as what enters the widest part of the step. Values that do not
depend on the batch do not count, nor do the gradients of leaves, which have the shape of a leaf. The equations that
make or read wide values belong together if they share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from ..ir.cached_analysis import cached_on_graph
from ..ir.dependencies import components, depending, grouped, read_from_outside
from ..ir.graph import Eqn, Graph, Var, users, variables
from ..ir.liveness import liveness
from ..ir.op_facts import is_matmul
from ..ir.varying import varying

# How many times as many elements a wide value has. An MLP has 2.7 (Llama) to 4 times those of its argument; the
# residual stream has as many.
WIDE = 2


@dataclass(frozen=True, eq=False)
class WidePart:
    """Equations around wide values.

    Attributes:
        eqns: the equations, in order.
        entry: the largest value of the batch's samples that they read from outside.
        inner: the wide values that nothing else reads, each the owner of its storage.
    """

    eqns: tuple[Eqn, ...]
    entry: Var
    inner: tuple[Var, ...]

    @property
    def inner_bytes(self) -> int:
        return sum(v.nbytes for v in self.inner)

    @property
    def rows(self) -> int:
        """The number of samples, such as tokens: the product of all dims of the entry but the last."""
        return math.prod(self.entry.shape[:-1])


@cached_on_graph
def wide_parts(graph: Graph) -> tuple[WidePart, ...]:
    """The parts of forward and backward with wide values that nothing else reads, the largest first."""
    from_batch = varying(graph, ("batch",)).keys()
    eqns = [e for e in graph.eqns if e.region != "update" and any(v in from_batch for v in e.ins)]
    values = _floats_of_samples(graph, eqns)
    most = max((v.numel for v in values), default=0)
    widest = _around(eqns, {v for v in values if v.numel == most})
    entries = [_entry(part, from_batch) for part in widest]
    # Where a slice of logits is read, its gradient enters a part of its own.
    entering = min((v.numel for v in entries if v is not None), default=most)
    wide = {v for v in values if v.numel >= WIDE * entering}

    parts = []
    for around in _around(eqns, wide):
        for part in _closed_parts(graph, eqns, around):
            entry = _entry(part, from_batch)
            inner = _inner(graph, part, wide)
            if entry is not None and inner:
                parts.append(WidePart(tuple(part), entry, tuple(inner)))
    return tuple(sorted(parts, key=lambda part: -part.inner_bytes))


def _floats_of_samples(graph: Graph, eqns: Iterable[Eqn]) -> list[Var]:
    """The floats that these equations compute, but for scalars and gradients of leaves."""
    gradients = _gradients_of_leaves(graph)
    values = []
    for e in eqns:
        for v in e.results:
            if v.dtype.is_floating_point and v.shape and v not in gradients:
                values.append(v)
    return values


def _gradients_of_leaves(graph: Graph) -> set[Var]:
    """The values with the shape of a leaf that only the update reads, also by views, casts and sums.

    The shape alone does not tell: the logits of 4,096 tokens have that of the head of a model whose width is 4,096.
    """
    shapes_of_leaves = {shape for v in graph.state for shape in (v.shape, v.shape[::-1])}
    readers = users(graph)
    gradients: set[Var] = set()

    def is_on_the_way(reader: Eqn) -> bool:
        return reader.region == "update" or (
            not is_matmul(reader) and gradients.issuperset(reader.results)
        )

    for e in reversed(graph.eqns):
        for v in e.results:
            if v.shape in shapes_of_leaves and all(map(is_on_the_way, readers.get(v, ()))):
                gradients.add(v)
    return gradients


def _around(eqns: Sequence[Eqn], wide: Set[Var]) -> list[list[Eqn]]:
    """The equations that make or read wide values, grouped by the values that they share."""
    first_at: dict[Var, Eqn] = {}
    pairs: list[tuple[Eqn, Eqn]] = []
    for e in eqns:
        pairs += ((e, first_at.setdefault(v, e)) for v in (*e.ins, *e.results) if v in wide)
    group_of = components(pairs)
    return list(grouped((group_of[e], e) for e in eqns if e in group_of).values())


def _closed_parts(graph: Graph, eqns: Sequence[Eqn], around: Sequence[Eqn]) -> list[list[Eqn]]:
    """The equations with all that lie between them; those of forward and of backward alone, if leaves are read between.

    Between forward and backward of a loss there are a few operations on scalars. Between those of an MLP are all later
    layers.
    """
    both = _closed(graph, eqns, around)
    if both is not None:
        return [both]
    parts = []
    for region in ("forward", "backward"):
        part = _closed(graph, eqns, [e for e in around if e.region == region])
        if part:
            parts.append(part)
    return parts


def _closed(graph: Graph, eqns: Sequence[Eqn], around: Sequence[Eqn]) -> list[Eqn] | None:
    """The equations with all that lie between them, or None if one of these reads a leaf of the state."""
    inside = set(around)
    after = depending(eqns, (v for e in around for v in e.results))
    needed = {v for e in around for v in e.ins}
    from_state = _from_state(graph)
    closed = []
    for e in reversed(eqns):
        is_between = any(v in after for v in e.ins) and any(v in needed for v in e.results)
        if e in inside:
            closed.append(e)
        elif is_between:
            if any(v in from_state for v in e.ins):
                return None
            closed.append(e)
            needed.update(e.ins)
    return closed[::-1]


@cached_on_graph
def _from_state(graph: Graph) -> set[Var]:
    """The values that depend on the state and not on the batch, such as cast weights."""
    from_batch = varying(graph, ("batch",))
    leaves = [v for v in graph.state if v.shape]
    return {v for v in depending(graph.eqns, leaves) if v not in from_batch}


def _entry(part: Iterable[Eqn], from_batch: Set[Var]) -> Var | None:
    """The largest float that depends on the batch and that these equations read, but do not make."""
    read = read_from_outside(part)
    entries = [v for v in read if v in from_batch and v.dtype.is_floating_point and v.shape]
    return max(entries, key=lambda v: v.numel, default=None)


def _inner(graph: Graph, part: Sequence[Eqn], wide: Set[Var]) -> list[Var]:
    """The wide values that own their storage, if nothing but these equations reads it."""
    root = liveness(graph).root
    inside = set(part)
    readers = users(graph)
    made = [v for e in part for v in e.results if v in wide]
    read_outside = {root[v] for v in variables(graph.outputs)}
    for e in part:
        for v in e.results:
            if not inside.issuperset(readers.get(v, ())):
                read_outside.add(root[v])
    return [v for v in made if root[v] is v and v not in read_outside]
