"""program_order: take the collectives that a plan will place out of a program.

Transforms that schedule only write hints on equations. Planning follows all hints at once, so the order in which the
transforms were applied does not matter. `hoist` moves equations marked `birth` up to the last of their inputs.
`skeleton` then takes the planned collectives out; the remaining equations are the operations, and keep their order. A
gather must start before the first operation that reads its value, and a reduction after the one that computes its
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..ir.collectives import rules
from ..ir.donation import first_write
from ..ir.graph import Eqn, Graph, Order, Var, producers, users, variables
from ..ir.liveness import Liveness, liveness
from ..ir.op_facts import is_random
from ..ir.pairing import pair
from ..ir.relations import sorted_by

# The position of an equation, 0 for that equation itself or 1 for one moved behind it, and the former position.
Key = tuple[int, int, int]


def hoist(graph: Graph) -> Graph:
    """Move every equation marked `birth`, and every planned reduction, right behind the last of its inputs."""
    moved = {e for e in graph.eqns if e.order is not None and e.order.place in ("birth", "reduce")}
    if not moved:
        return graph
    makers = producers(graph.eqns)
    keys: dict[Eqn, Key] = {}
    for i, e in enumerate(graph.eqns):
        born = max((keys[makers[v]][0] for v in e.ins if v in makers), default=-1)
        keys[e] = (born, 1, i) if e in moved else (i, 0, i)
    eqns = sorted_by(
        keys.__getitem__, {e: {makers[v] for v in e.ins if v in makers} for e in graph.eqns}
    )
    return graph.replace(
        eqns=tuple(
            e.replace(order=None) if e.order and e.order.place == "birth" else e for e in eqns
        )
    )


@dataclass(frozen=True, eq=False)
class Planned:
    """A collective of one member that a plan places."""

    start: Eqn
    wait: Eqn
    order: Order  # the hint on its start
    then: tuple[Eqn, Eqn] | None = (
        None  # start and wait of a second reduction behind it, over the replicated axis
    )

    @property
    def value(self) -> Var:
        """The value that it returns."""
        return (self.then[1] if self.then else self.wait).out


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program without its planned collectives: `ops[k]` is operation k, right behind place k."""

    graph: Graph  # the program after `hoist`, collectives included
    ops: tuple[Eqn, ...]
    gathers: tuple[Planned, ...]  # in order of first use
    reductions: tuple[Planned, ...]  # in order of birth
    use: tuple[int, ...]  # for each gather, the first operation that reads it
    born: tuple[int, ...]  # for each reduction, the operation that computes the gradient
    need: tuple[int, ...]  # for each reduction, the first operation that reads it

    @functools.cached_property
    def places(self) -> dict[Eqn, int]:
        return {e: k for k, e in enumerate(self.ops)}

    @functools.cached_property
    def live(self) -> Liveness:
        return liveness(self.graph)

    @functools.cached_property
    def before(self) -> tuple[int, ...]:
        """The number of operations before each equation, and before the end."""
        return tuple(accumulate((e in self.places for e in self.graph.eqns), initial=0))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each place in a plan: the first result of the operation behind it, or "" for the end."""
        return (
            *(next((out.name for out in e.results), f"#{k}") for k, e in enumerate(self.ops)),
            "",
        )

    @functools.cached_property
    def asked_update(self) -> str:
        """When updates run according to `overlap_grads`: "eager" or "last"."""
        return self.reductions[0].order.update if self.reductions else "last"

    @functools.cached_property
    def floating(self) -> tuple[dict[Eqn, None], dict[Var, Eqn]]:
        """The equations that an eager update takes from their places.

        The first part has those that depend on a planned reduction, in order. The second has those that depend on the
        state only, by the values that they compute. Random draws and the step's own collectives stay at their places,
        and so does everything that depends on them.
        """
        state, reduced = set(self.graph.inputs), {p.value for p in self.reductions}
        movable: dict[Eqn, None] = {}
        free: dict[Var, Eqn] = {}
        for e in filter(_may_float, self.ops):
            if any(v in reduced for v in e.ins):
                movable[e] = None
                reduced.update(e.results)
            elif all(v in state or v in free for v in e.ins):
                free.update((out, e) for out in e.results)
        return movable, free

    @functools.cached_property
    def waits(self) -> dict[Eqn, set[Var]]:
        """For each floating equation, the leaves of the state that other equations must have read before it runs.

        These are the leaves that it reads itself, because it may overwrite them. An equation that computes a temporary
        from values that are live anyway also waits for the leaves that all its readers wait for: if it ran earlier, its
        result would only take memory.
        """
        root, used = self.live.root, users(self.graph)
        state, outputs = (
            set(self.graph.inputs[: self.graph.num_state]),
            set(variables(self.graph.outputs)),
        )
        available = self._available(outputs)
        waits: dict[Eqn, set[Var]] = {}
        for e in reversed(self.floating[0]):
            waits[e] = {root[v] for v in e.ins} & state
            readers = [
                waits.get(reader, set()) for out in e.results for reader in used.get(out, ())
            ]
            if readers and all(out in available and out not in outputs for out in e.results):
                waits[e] |= set.intersection(*readers)
        return waits

    def _available(self, outputs: set[Var]) -> set[Var]:
        """Values that are live anyway while updates run, or are computed from such values and scalars only."""
        movable, free = self.floating
        available = {*self.graph.inputs, *outputs, *free}
        for e in movable:
            if all(v in available or v.numel == 1 for v in e.ins):
                available.update(e.results)
        return available


def _may_float(e: Eqn) -> bool:
    """Whether an eager update may take an equation from its place."""
    return e.region == "update" and not rules(e).remote and not is_random(e.op)


@functools.lru_cache(maxsize=2)  # as `fingerprint`
def skeleton(graph: Graph) -> Skeleton:
    """Take the planned collectives out of a program."""
    graph = hoist(graph)
    used, makers = users(graph), producers(graph.eqns)
    planned = _planned(graph, makers)
    taken = {x for p in planned for x in (p.start, p.wait, *(p.then or ()))}
    ops = tuple(e for e in graph.eqns if e not in taken)
    place, end = {e: k for k, e in enumerate(ops)}, len(ops)

    def first_reader(p: Planned) -> int:
        return min((place.get(e, end) for e in used.get(p.value, ())), default=end)

    def birth(p: Planned) -> int:
        return max(place.get(makers[v], -1) if v in makers else -1 for v in p.start.ins)

    # If writes come last, every reduction must have been waited for before the first write.
    latest = (
        sum(e not in taken for e in graph.eqns[: first_write(graph)]) if graph.writes_last else end
    )
    gathers = sorted((p for p in planned if p.order.place == "gather"), key=first_reader)
    reductions = sorted((p for p in planned if p.order.place == "reduce"), key=birth)
    return Skeleton(
        graph,
        ops,
        tuple(gathers),
        tuple(reductions),
        tuple(map(first_reader, gathers)),
        tuple(map(birth, reductions)),
        tuple(min(first_reader(p), latest) for p in reductions),
    )


def _planned(graph: Graph, makers: Mapping[Var, Eqn]) -> list[Planned]:
    """The collectives that a plan places, in order.

    The result of a reduction may be reduced again, over the replicated axis: that reduction follows the first one. A
    hinted gather of such a result cannot move, and stays where it is.
    """
    pairs = pair(graph)
    hinted = {e: e.order for e in pairs.starts if e.order is not None}
    waited = {e: graph.eqns[pairs.starts[e].first_wait] for e in hinted}
    first_wait = {e: makers[e.ins[0]] for e in hinted if makers.get(e.ins[0]) in pairs.waits}
    second = {wait: e for e, wait in first_wait.items() if hinted[e].place == "reduce"}
    planned = []
    for e, order in hinted.items():
        if e not in first_wait:
            then = second.get(waited[e])
            planned.append(
                Planned(e, waited[e], order, (then, waited[then]) if then is not None else None)
            )
    return planned
