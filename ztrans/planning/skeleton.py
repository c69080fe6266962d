"""skeleton: a program without the collectives that a plan will place.

Transforms that schedule only write hints on equations. Planning follows all hints at once, so the order in which the
transforms were applied does not matter. `hoist` moves equations marked `birth` up to the last of their inputs.
`skeleton` then takes the planned collectives out; the remaining equations are the operations, and keep their order. A
gather must start before the first operation that reads its value, and a reduction after the one that computes its
gradient. With eager updates, `update_groups` takes equations of the update from their places too: each of them runs as
soon as the reductions that it needs have been waited for.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain

from ..ir.axes import neighbour_count
from ..ir.collectives import bucket_key, is_start, role, rules
from ..ir.donation import donation, first_write
from ..ir.graph import Eqn, Graph, Var, producers, users, variables
from ..ir.liveness import Liveness, liveness
from ..ir.neighbours import gather_of_parts, gathered_value, kept_part
from ..ir.op_facts import is_matmul, is_random
from ..ir.pairing import pair
from ..ir.printer import header
from ..ir.relations import grouped, needed, sorted_by
from ..ir.user_collectives import is_users

THE_START = "the start"
THE_END = "the end"


def hoist(graph: Graph) -> Graph:
    """Move every equation marked `birth`, and every planned reduction, right after the last of its inputs."""
    hoisted = {e for e in graph.eqns if e.order in ("birth", "reduce")}
    if not hoisted:
        return graph
    makers = producers(graph.eqns)
    # The position of an equation, 0 for that equation itself or 1 for one moved after it, and the former position.
    keys: dict[Eqn, tuple[int, int, int]] = {}
    needs: dict[Eqn, set[Eqn]] = {}
    for i, e in enumerate(graph.eqns):
        born = max((keys[makers[v]][0] for v in e.ins if v in makers), default=-1)
        keys[e] = (born, 1, i) if e in hoisted else (i, 0, i)
        needs[e] = {makers[v] for v in e.ins if v in makers}
    eqns = []
    for e in sorted_by(keys.__getitem__, needs):
        # An equation at its birth needs its hint no longer.
        eqns.append(e.replace(order=None) if e.order == "birth" else e)
    return graph.replace(eqns=tuple(eqns))


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of one member that a plan places."""

    start: Eqn
    wait: Eqn
    second: tuple[Eqn, Eqn] | None = None  # start and wait of a reduction of its result

    @property
    def value(self) -> Var:
        """The value that it returns."""
        return (self.second[1] if self.second else self.wait).out

    @property
    def name(self) -> str:
        """Its name in a plan; a gather among neighbours has theirs in it."""
        name = self.start.out.name.removesuffix("'")
        axis = self.start.kwargs["axis"]
        return name if neighbour_count(axis) is None else f"{name}@{axis}"

    @property
    def eqns(self) -> tuple[Eqn, ...]:
        return (self.start, self.wait, *(self.second or ()))


@dataclass(frozen=True, eq=False)
class GatherOfParts:
    """A gather among neighbours, which a plan may send in place of one over all ranks.

    Attributes:
        first, instead: the gather of whose value each neighbour keeps a part, and the one that it replaces, by index.
        part: the equations that keep the part.
        collective: the gather of the parts.
    """

    first: int
    instead: int
    part: tuple[Eqn, Eqn]
    collective: Collective


Neighbours = tuple[
    tuple[str, int], ...
]  # axes, each with the number of neighbours that may keep parts


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program without its planned collectives: `ops[k]` is operation k, right after place k.

    Attributes:
        graph: the program after `hoist`, collectives included.
        gathers, use: in order of first use; for each, the first operation that reads it.
        reductions, born, need: in order of birth; for each, the operation that computes the gradient, and the first
            operation that reads the result.
        of_parts: gathers among neighbours, which are in no program yet.
    """

    graph: Graph
    ops: tuple[Eqn, ...]
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    use: tuple[int, ...]
    born: tuple[int, ...]
    need: tuple[int, ...]
    of_parts: tuple[GatherOfParts, ...] = ()

    @property
    def all_gathers(self) -> tuple[Collective, ...]:
        """All gathers that a plan may send, those of parts last."""
        return (*self.gathers, *(each.collective for each in self.of_parts))

    @functools.cached_property
    def repeats(self) -> tuple[int | None, ...]:
        """For each gather, the earlier gather of the same value, if a plan may keep that value."""
        return _repeats(self.gathers)

    @functools.cached_property
    def sized_graph(self) -> Graph:
        """The program with an axis for all neighbours that may gather parts."""
        axes = dict.fromkeys(each.collective.start.kwargs["axis"] for each in self.of_parts)
        return self.graph.replace(joint=(*self.graph.joint, *axes)) if axes else self.graph

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of all axes, with those of neighbours that may gather parts."""
        return self.sized_graph.axes

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
    def landmarks(self) -> tuple[tuple[int, str], ...]:
        """The operations by which a plan names places, in order, each with its name.

        They are matmuls (convolutions and attention among them), the operations that compute gradients, and the
        collectives that no plan places. All batch sizes have the same ones. Between them, a batch of another size may
        need another copy or view.
        """
        births = set(self.born)
        counts: Counter[str] = Counter()
        landmarks = []
        for k, e in enumerate(self.ops):
            if is_matmul(e):
                kind = "matmul"
            elif k in births:
                kind = "gradient"
            elif is_start(e) or is_users(e):
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

        A program for another batch size may have fewer operations before the next landmark. Then it is the last place.
        """
        if name == THE_END:
            return (len(self.ops),) * 3
        landmark, _, offset = name.partition(" + ")
        if landmark not in self._stretches or not (offset.isdecimal() or landmark == name):
            return None
        first, last = self._stretches[landmark]
        return min(first + int(offset or 0), last), first, last

    @functools.cached_property
    def _stretches(self) -> dict[str, tuple[int, int]]:
        """The first and the last place after each landmark and before the next, by its name."""
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
            digest.update(f"{collective.name} {bucket_key(start)}".encode())
            if role(start) not in ("output", "pmean"):  # these may have the shape of the batch
                digest.update(repr(start.ins[0].type).encode())
        digest.update(" ".join(name for _, name in self.landmarks).encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def asked_update(self) -> str:
        """When updates run according to `overlap_grads`: "eager" or "last"."""
        return (self.graph.hints.update or "last") if self.reductions else "last"

    @functools.cached_property
    def movable(self) -> tuple[list[Eqn], dict[Var, Eqn]]:
        """The equations that an eager update may take from their places.

        The first part has, in order, the equations that depend on a planned reduction. The second has the equations
        that depend on the state only, by the values that they compute. Random draws and the step's own collectives
        stay at their places, and so does everything that depends on them.
        """
        state = set(self.graph.inputs)
        reduced = {collective.value for collective in self.reductions}
        after_reductions: list[Eqn] = []
        of_state: dict[Var, Eqn] = {}
        for e in self.ops:
            if e.region != "update" or rules(e).remote or is_random(e):
                continue
            if any(v in reduced for v in e.ins):
                after_reductions.append(e)
                reduced.update(e.results)
            elif all(v in state or v in of_state for v in e.ins):
                of_state.update((out, e) for out in e.results)
        return after_reductions, of_state

    @functools.cached_property
    def awaited_values(self) -> dict[Eqn, set[Var]]:
        """For each movable equation, the values that other equations must have read before it runs.

        These are the leaves of the state that it reads, and other values whose storage it takes, because it may
        overwrite them. An equation that computes a temporary from values that are live anyway also waits for the values
        that all its readers wait for: if it ran earlier, its result would only take memory.
        """
        root = self.lifetimes.root
        owner = donation(self.graph).owner
        readers = users(self.graph)
        state = set(self.graph.inputs[: self.graph.num_state])
        outputs = set(variables(self.graph.outputs))
        available = self._available(outputs)
        awaited: dict[Eqn, set[Var]] = {}
        for e in reversed(self.movable[0]):
            overwritten = {owner[out] for out in e.results}
            awaited[e] = {root[v] for v in e.ins if root[v] in state or owner[v] in overwritten}
            of_readers = []
            for out in e.results:
                of_readers += [awaited.get(reader, set()) for reader in readers.get(out, ())]
            if of_readers and all(out in available and out not in outputs for out in e.results):
                awaited[e] |= set.intersection(*of_readers)
        return awaited

    def _available(self, outputs: set[Var]) -> set[Var]:
        """Values that are live anyway while updates run, or are computed from such values and scalars only."""
        after_reductions, of_state = self.movable
        available = {*self.graph.inputs, *outputs, *of_state}
        for e in after_reductions:
            if all(v in available or v.numel == 1 for v in e.ins):
                available.update(e.results)
        return available


@functools.lru_cache(maxsize=2)  # the same program is asked about several times in a row
def skeleton(graph: Graph, neighbours: Neighbours = ()) -> Skeleton:
    """Take the planned collectives out of a program; `neighbours` may keep parts of gathered values."""
    graph = hoist(graph)
    readers = users(graph)
    makers = producers(graph.eqns)
    collectives = _collectives(graph, makers)
    planned_eqns = set(chain.from_iterable(collective.eqns for collective in collectives))
    ops = tuple(e for e in graph.eqns if e not in planned_eqns)
    places = {e: k for k, e in enumerate(ops)}
    end = len(ops)

    def first_reader(collective: Collective) -> int:
        return min((places.get(e, end) for e in readers.get(collective.value, ())), default=end)

    def birth(collective: Collective) -> int:
        return max(places.get(makers[v], -1) if v in makers else -1 for v in collective.start.ins)

    latest = _last_wait(graph, planned_eqns, end)
    gathers = sorted((c for c in collectives if c.start.order == "gather"), key=first_reader)
    reductions = sorted((c for c in collectives if c.start.order == "reduce"), key=birth)
    return Skeleton(
        graph,
        ops,
        tuple(gathers),
        tuple(reductions),
        use=tuple(map(first_reader, gathers)),
        born=tuple(map(birth, reductions)),
        need=tuple(min(first_reader(c), latest) for c in reductions),
        of_parts=tuple(_gathers_of_parts(gathers, graph.axes, neighbours)),
    )


def _repeats(gathers: Sequence[Collective]) -> tuple[int | None, ...]:
    latest: dict[Hashable, int] = {}
    repeats = []
    for i, collective in enumerate(gathers):
        start = collective.start
        value = gathered_value(start)
        may_keep = start.provenance is not None and start.provenance.regather == "auto"
        repeats.append(latest.get(value) if may_keep else None)
        latest[value] = i
    return tuple(repeats)


def _gathers_of_parts(
    gathers: Sequence[Collective], sizes: Mapping[str, int], neighbours: Neighbours
) -> Iterator[GatherOfParts]:
    """The gathers of parts, if `neighbours` keep them: in place of each gather that repeats an earlier one."""
    for instead, first in enumerate(_repeats(gathers) if neighbours else ()):
        again = gathers[instead]
        for axis, count in neighbours:
            divides = 1 < count < sizes.get(axis, 0) and sizes[axis] % count == 0
            if first is not None and divides and again.start.kwargs["axis"] == axis:
                part = kept_part(gathers[first].wait, again.start, count)
                start = gather_of_parts(part[-1].out, again.start)
                yield GatherOfParts(first, instead, part, Collective(start, again.wait))


def _last_wait(graph: Graph, planned_eqns: Set[Eqn], end: int) -> int:
    """The last place for waits. If writes come last, all reductions are waited for before the first write."""
    if graph.hints.update != "last":
        return end
    return sum(e not in planned_eqns for e in graph.eqns[: first_write(graph)])


def _collectives(graph: Graph, makers: Mapping[Var, Eqn]) -> list[Collective]:
    """The collectives that a plan places, in order.

    The result of a reduction may be reduced again, over the replicated axis: that reduction follows the first one. A
    hinted gather of such a result cannot move, and stays where it is.
    """
    pairs = pair(graph)
    hinted_starts = [e for e in pairs.starts if e.order is not None]
    first_wait = {e: graph.eqns[pairs.starts[e].first_wait] for e in hinted_starts}
    of_result = {e for e in hinted_starts if makers.get(e.ins[0]) in pairs.waits}
    second = {makers[e.ins[0]]: (e, first_wait[e]) for e in of_result if e.order == "reduce"}
    collectives = []
    for e in hinted_starts:
        if e not in of_result:
            wait = first_wait[e]
            collectives.append(Collective(e, wait, second.get(wait)))
    return collectives


@dataclass(frozen=True)
class UpdateGroup:
    """Equations of the update that need the same reductions and may run from the same place on."""

    after: tuple[int, ...]  # the indices of these reductions
    release: int  # the first place at which they may run
    eqns: tuple[Eqn, ...]  # in program order


_GroupKey = tuple[frozenset[int], int]  # the reductions that a group needs, and its release


def update_groups(s: Skeleton) -> tuple[UpdateGroup, ...]:
    """The equations of the update that leave their places, in groups.

    An equation may need a value that an operation at a fixed place computes after the last reduction was waited for,
    such as the scale of a global norm. No reduction is waited for after that, so the equation stays at its place.
    """
    after_reductions, of_state = s.movable
    leaving = set(after_reductions)
    while True:
        groups = _by_need(s, leaving)
        grouped_eqns = set(chain.from_iterable(groups.values()))
        if leaving <= grouped_eqns:
            break
        # What stays reads the state at its place, so more equations may have to stay.
        leaving = grouped_eqns
    for key, eqns in _state_computations(of_state, groups).items():
        groups.setdefault(key, []).extend(eqns)
    update: list[UpdateGroup] = []
    for (reductions, release), eqns in groups.items():
        in_order = tuple(sorted(eqns, key=s.places.__getitem__))
        update.append(UpdateGroup(tuple(sorted(reductions)), release, in_order))
    return tuple(update)


def _by_need(s: Skeleton, leaving: set[Eqn]) -> dict[_GroupKey, list[Eqn]]:
    """The equations among `leaving` that can leave their places, by what they need."""
    after_reductions, of_state = s.movable
    exists, last_read = _places(s, needed(leaving, of_state))
    latest = max(s.need, default=0)
    needed_reductions = {c.value: frozenset([i]) for i, c in enumerate(s.reductions)}
    groups: dict[_GroupKey, list[Eqn]] = {}
    for e in after_reductions:
        if e not in leaving:
            continue
        reductions = _union([needed_reductions[v] for v in e.ins if v in needed_reductions])
        # It may run once its arguments exist, and once all that must read the old state has done so.
        place = max([exists.get(v, 0) for v in e.ins], default=0)
        for v in s.awaited_values[e]:
            place = max(place, last_read.get(v, 0))
        if place > latest:
            place = s.places[e] + 1
        else:
            groups.setdefault((reductions, place), []).append(e)
        for out in e.results:
            needed_reductions[out] = reductions
            exists[out] = place
    return groups


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The union of sets; one of them itself, if it has all members.

    What follows from a norm of all gradients needs all reductions, and shares one set of them.
    """
    largest = max(sets, key=len, default=frozenset[int]())
    if all(each <= largest for each in sets):
        return largest
    return largest.union(*sets)


def _state_computations(
    of_state: Mapping[Var, Eqn], groups: Mapping[_GroupKey, Sequence[Eqn]]
) -> dict[_GroupKey, list[Eqn]]:
    """The equations that depend on the state only, by the group that needs them.

    An equation that several groups need is in a group without reductions. One that no group needs stays at its place.
    """
    keys: dict[Eqn, list[_GroupKey]] = {}
    for key, eqns in groups.items():
        for e in needed(eqns, of_state).difference(eqns):
            keys.setdefault(e, []).append(key)
    shared = (frozenset[int](), 0)
    return grouped((needing[0] if len(needing) == 1 else shared, e) for e, needing in keys.items())


def _places(s: Skeleton, floating: set[Eqn]) -> tuple[dict[Var, int], dict[Var, int]]:
    """For each value, the first place at which it exists, and the place after its last reader at a fixed place."""
    root = s.lifetimes.root
    exists: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    for k, e in enumerate(s.ops):
        if e not in floating:
            exists.update((out, k + 1) for out in e.results)
            last_read.update((root[v], k + 1) for v in e.ins)
    for c, use in zip(s.gathers, s.use):
        place_after = min(use + 1, len(s.ops))
        exists[c.value] = place_after
        for v in c.start.ins:
            last_read[root[v]] = max(last_read.get(root[v], 0), place_after)
    return exists, last_read


def deadlines(s: Skeleton, floating: Set[Eqn]) -> list[int]:
    """The last place to wait for each reduction: before what needs it, and before the floating equations there."""
    starts = [0]  # for each place, the first of the floating equations right before it
    for k, e in enumerate(s.ops):
        starts.append(starts[k] if e in floating else k + 1)
    return [max(starts[need], min(born + 1, need)) for born, need in zip(s.born, s.need)]
