"""A program without the collectives that a plan will place.

Transforms that schedule only write hints on equations. Planning follows all hints at once, so the order of the
transforms does not matter. `hoist` moves equations with the hint `birth` right after the last of their inputs.
`skeleton` then takes the planned collectives out; the remaining equations are the operations, and keep their order. A
gather must start before the first operation that reads its value, and a reduction after the operation that computes its
gradient. With eager updates, equations of the update leave their places too (see `eager_updates`). The copy that brings
the shard of a gather to the device belongs to the gather, and stands right before it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from ..ir.axes import neighbour_count
from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import bucket_key, is_start, role, rules
from ..ir.donation import first_write
from ..ir.graph import Eqn, Graph, Var, producers, users
from ..ir.liveness import Liveness, liveness
from ..ir.micro_batches import micro_batches_of_values
from ..ir.op_facts import is_matmul
from ..ir.pairing import pair
from ..ir.printer import header
from ..ir.rewriter import reordered
from ..ir.user_collectives import is_user_collective
from ..rewrites.neighbours import gathered_value

THE_START = "the start"
THE_END = "the end"


def hoist(graph: Graph) -> Graph:
    """Move every equation with the hint `birth`, and every planned reduction, right after the last of its inputs."""
    hoisted = {e for e in graph.eqns if e.hint in ("birth", "reduce")}
    if not hoisted:
        return graph
    eqns = []
    for e in reordered(graph, lambda e: e not in hoisted).eqns:
        # The hint `birth` is fulfilled; a planned reduction is still to be placed.
        eqns.append(e.replace(hint=None) if e.hint == "birth" else e)
    return graph.replace(eqns=tuple(eqns))


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of one member that a plan places.

    Attributes:
        start, wait: its equations.
        second: start and wait of a reduction of its result.
        arrival: start and wait of the copy of what a gather sends.
        micro_batches: whether its member belongs to "each" micro-batch, to "all" of them, or to "none".
    """

    start: Eqn
    wait: Eqn
    second: tuple[Eqn, Eqn] | None = None
    arrival: tuple[Eqn, Eqn] | None = None
    micro_batches: str = "none"

    @property
    def key(self) -> Hashable:
        """Collectives with equal keys may share a bucket."""
        return bucket_key(self.start), self.micro_batches

    @property
    def value(self) -> Var:
        """The value that its last wait returns."""
        last_wait = self.second[1] if self.second else self.wait
        return last_wait.out

    @property
    def name(self) -> str:
        """Its name in a plan; a gather among neighbours has their axis in its name."""
        name = self.start.out.base_name
        axis = self.start.kwargs["axis"]
        return name if neighbour_count(axis) is None else f"{name}@{axis}"

    @property
    def eqns(self) -> tuple[Eqn, ...]:
        return (*(self.arrival or ()), self.start, self.wait, *(self.second or ()))


class Span(NamedTuple):
    """The first operation that uses a value, and the last one that needs its storage."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program without its planned collectives: `ops[k]` is operation k, right after place k.

    Attributes:
        graph: the program after `hoist`, collectives included.
        gathers: the planned gathers, in order of first use.
        reductions: the planned reductions, in order of birth.
        use: for each gather, the first operation that reads its value.
        repeats: for each gather, the earlier gather of the same value, if a plan may keep that value.
        born: for each reduction, the operation that computes the gradient.
        need: for each reduction, the first operation that reads the result.
        lever_options: what levers may use (see `levers`), such as "dp/8" for gathers among each 8 ranks of dp.
    """

    graph: Graph
    ops: tuple[Eqn, ...]
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    use: tuple[int, ...]
    repeats: tuple[int | None, ...]
    born: tuple[int, ...]
    need: tuple[int, ...]
    lever_options: tuple[str, ...] = ()

    @functools.cached_property
    def places(self) -> dict[Eqn, int]:
        return {e: k for k, e in enumerate(self.ops)}

    @functools.cached_property
    def lifetimes(self) -> Liveness:
        return liveness(self.graph)

    @functools.cached_property
    def ops_before(self) -> tuple[int, ...]:
        """The number of operations before each equation, and before the end."""
        is_operation = [e in self.places for e in self.graph.eqns]
        return tuple(accumulate(is_operation, initial=0))

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of the value of each gather."""
        end = len(self.ops) - 1
        spans = []
        for collective, first_reader in zip(self.gathers, self.use):
            storage = self.lifetimes.root[collective.value]
            equation_after = min(self.lifetimes.last[storage] + 1, len(self.graph.eqns))
            use = min(first_reader, end)
            last = min(self.ops_before[equation_after] - 1, end)
            spans.append(Span(use, max(last, use)))
        return tuple(spans)

    @functools.cached_property
    def landmarks(self) -> tuple[tuple[int, str], ...]:
        """The operations by which a plan names places, in order, each with its name.

        They are matmuls (convolutions and attention included), the operations that compute gradients, and the
        collectives that no plan places. All batch sizes have the same landmarks. Between them, a batch of another size
        may need another copy or view.
        """
        births = set(self.born)
        counts: Counter[str] = Counter()
        landmarks = []
        for k, e in enumerate(self.ops):
            if is_matmul(e):
                kind = "matmul"
            elif k in births:
                kind = "gradient"
            elif is_start(e) or is_user_collective(e):
                kind = "collective"
            else:
                continue
            counts[kind] += 1
            landmarks.append((k, f"{kind} {counts[kind]}"))
        return tuple(landmarks)

    @functools.cached_property
    def place_names(self) -> tuple[str, ...]:
        """The name of each place: "matmul 14 + 2" is two operations after the 14th matrix product."""
        names: list[str] = []
        for name, (first, last) in self._stretches.items():
            names.append(name)
            names += (f"{name} + {k - first}" for k in range(first + 1, last + 1))
        return (*names[:-1], THE_END)

    def place_range(self, name: str) -> tuple[int, int, int] | None:
        """The place with a name, and the first and the last place between the same landmarks; None if there is none.

        With another batch size, the next landmark may be nearer, so that the place is missing. Then it is the last one.
        """
        if name == THE_END:
            return (len(self.ops),) * 3
        landmark, plus, offset = name.partition(" + ")
        if landmark not in self._stretches or (plus and not offset.isdecimal()):
            return None
        first, last = self._stretches[landmark]
        return min(first + int(offset or 0), last), first, last

    @functools.cached_property
    def _stretches(self) -> dict[str, tuple[int, int]]:
        """The first and the last place between each landmark and the next one, by the name of the first landmark."""
        stretches: dict[str, tuple[int, int]] = {}
        first = 0
        name = THE_START
        for k, landmark in self.landmarks:
            stretches[name] = first, k
            first = k + 1
            name = landmark
        stretches[name] = first, len(self.ops)
        return stretches

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what a plan depends on, the same for every batch size: the collectives and the landmarks."""
        digest = hashlib.sha256(header(self.graph).encode())
        for collective in (*self.gathers, *self.reductions):
            start = collective.start
            digest.update(f"{collective.name} {tuple(bucket_key(start))}".encode())
            if collective.second is not None:
                digest.update(f" then {tuple(bucket_key(collective.second[0]))}".encode())
            if role(start) not in ("output", "pmean"):  # these may have the shape of the batch
                digest.update(repr(start.ins[0].type).encode())
        digest.update(" ".join(name for _, name in self.landmarks).encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def asked_update(self) -> str:
        """When updates run according to `overlap_grads`: "eager" or "last"."""
        return (self.graph.hints.update or "last") if self.reductions else "last"


@cached_on_graph  # planning asks for the skeleton of a program several times
def skeleton(graph: Graph, lever_options: tuple[str, ...] = ()) -> Skeleton:
    """Take the planned collectives out of a program. Its levers may use `lever_options`."""
    graph = hoist(graph)
    readers = users(graph)
    makers = producers(graph.eqns)
    collectives = _collectives(graph, makers, readers)
    planned_eqns = set(chain.from_iterable(collective.eqns for collective in collectives))
    ops = tuple(e for e in graph.eqns if e not in planned_eqns)
    places = {e: k for k, e in enumerate(ops)}
    end = len(ops)

    def first_reader(collective: Collective) -> int:
        return min((places.get(e, end) for e in readers.get(collective.value, ())), default=end)

    def birth(collective: Collective) -> int:
        last = -1  # before the first operation, where inputs are born
        for v in collective.start.ins:
            if v in makers:
                last = max(last, places.get(makers[v], -1))
        return last

    latest = _last_wait(graph, planned_eqns, end)
    gathers = sorted((c for c in collectives if c.start.hint == "gather"), key=first_reader)
    reductions = sorted((c for c in collectives if c.start.hint == "reduce"), key=birth)
    return Skeleton(
        graph,
        ops,
        tuple(gathers),
        tuple(reductions),
        use=tuple(map(first_reader, gathers)),
        repeats=_repeats(gathers),
        born=tuple(map(birth, reductions)),
        need=tuple(min(first_reader(c), latest) for c in reductions),
        lever_options=lever_options,
    )


def _repeats(gathers: Sequence[Collective]) -> tuple[int | None, ...]:
    """For each gather, the earlier gather of the same value, if a plan may keep that value."""
    latest: dict[Hashable, int] = {}
    repeats = []
    for i, collective in enumerate(gathers):
        start = collective.start
        value = gathered_value(start)
        may_keep = start.provenance is not None and start.provenance.regather == "auto"
        repeats.append(latest.get(value) if may_keep else None)
        latest[value] = i
    return tuple(repeats)


def _last_wait(graph: Graph, planned_eqns: Set[Eqn], end: int) -> int:
    """The last place for waits. If the state is written last, all reductions are waited for before the first write."""
    if graph.hints.update != "last":
        return end
    before_writes = graph.eqns[: first_write(graph)]
    return sum(e not in planned_eqns for e in before_writes)


def _collectives(
    graph: Graph, makers: Mapping[Var, Eqn], readers: Mapping[Var, Sequence[Eqn]]
) -> list[Collective]:
    """The collectives that a plan places, in order.

    The result of a reduction may be reduced again, over the replicated axis: that reduction follows the first one. A
    hinted gather of such a result cannot move, and stays where it is. A leaf on the host is copied to be gathered.
    """
    pairs = pair(graph)
    first_of_pairs = []
    second: dict[Eqn, tuple[Eqn, Eqn]] = {}  # by the wait for the first one
    arrival: dict[Eqn, tuple[Eqn, Eqn]] = {}  # by the gather of what is copied
    leaves = set(graph.inputs)
    micro_batches = micro_batches_of_values(graph)
    for e, started in pairs.starts.items():
        if e.hint is None:
            continue
        wait = graph.eqns[started.first_wait]
        maker = makers.get(e.ins[0])
        if maker is None or maker not in pairs.waits:
            first_of_pairs.append((e, wait))
        elif e.hint == "reduce":
            second[maker] = e, wait
        if e.hint == "gather" and maker is not None and rules(maker).copies:
            copy = makers[maker.ins[0]]
            if copy.ins[0] in leaves and readers[e.ins[0]] == [e]:
                arrival[e] = copy, maker
    return [
        Collective(
            start,
            wait,
            second.get(wait),
            arrival.get(start),
            micro_batches.get(start.ins[0], "none"),
        )
        for start, wait in first_of_pairs
    ]
