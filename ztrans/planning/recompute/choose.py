"""Choose what backward repeats and what waits for it on the host, so that the live bytes stay within a target.

    repeated = the computations that the user demands
    while some live bytes exceed the target:
        repeat the computations that remove most excess for each second of compute
    move the dearest results to the host instead, as far as compute hides the copies
    keep again what still fits, the dearest first

A byte on the host saves the seconds of its recomputation, so the link to the host is for the results that are dearest
to recompute. Values that cannot be repeated go there too, if the target asks for it: first with hidden copies, then
with copies for which compute waits. A second choice begins with the host. It is better if the link has time for all
values that must go.

Excess is an area: the bytes above the target, summed over all places. The values of the earliest layers are live for
longest, so they go first. The last layer, whose backward runs at the peak, is left as it is. A computation is repeated
together with earlier ones whose results are dead by then, or with some of them. Their inputs are kept for longer.

Equal layers have equal computations, which form a class. Only the earliest member of a class is proposed. Every
proposal is scored by its own change, so layers that only look equal do no harm.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import numpy as np

from ...ir.cached_analysis import cached_on_graph
from ...ir.op_facts import op_facts
from .absences import Copied
from .model import NOWHERE, Computation, Model
from .residency import Residency, ResidencyChange

# The depth of equations before a computation that distinguish it from others.
_DEPTH = 4
# The most computations that one change repeats, and the most such sets that are scored for one computation.
_CHAIN = 15
_VARIANTS = 8
# The number of targets that are tried to find the lowest peak.
_BISECTIONS = 6


def choose(model: Model, target: float) -> Residency:
    """Choose what backward repeats and what waits on the host, so that the live bytes stay within `target` if they can.

    If they cannot, the result is the choice at which the search ends.
    """
    may_repeat = any(computation.droppable for computation in model.computations)
    may_move = any(computation.movable for computation in model.computations)
    choices: list[Residency] = []
    if may_repeat or not may_move:
        choices.append(_Search(model, target).result())
    if may_move:
        search = _Search(model, target)
        search.move_to_host("hidden")
        choices.append(search.result())
    return min(choices, key=lambda choice: (max(choice.peak, target), choice.price))


def choose_least(model: Model) -> Residency:
    """The choice with the lowest peak that the search can find.

    A search by price may end without attention, the dearest computation: once its neighbours are repeated, repeating
    it no longer lowers the peak. So the search also runs as if attention took no time, and as if no computation did.
    A Llama of three layers then needs 18.19 GiB instead of 18.44, and a GPT of ten layers 0.64 instead of 0.74.
    """
    best = _least(model)
    for is_free in (_is_attention, lambda computation: True):
        computations = []
        for computation in model.computations:
            if is_free(computation):
                computation = computation._replace(seconds=0.0)
            computations.append(computation)
        lowest = _least(dataclasses.replace(model, computations=tuple(computations)))
        if lowest.peak < best.peak:
            best = Residency(model, lowest.repeated)
            best.apply(best.change({}, lowest.on_host))
    return best


def _is_attention(computation: Computation) -> bool:
    return "attention" in op_facts(computation.eqn.op).name


def _least(model: Model) -> Residency:
    """The choice with the lowest peak of a search for several targets.

    One search for a target that is far too low makes the area as small as it can, but not the peak.
    """
    best = choose(model, 0.0)
    low = 0.0
    high = float(min(best.peak, model.live.max(initial=0)))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        residency = choose(model, middle)
        if residency.peak < best.peak:
            best = residency
        if residency.peak <= middle:
            high = float(residency.peak)
        else:
            low = middle
    return best


class Proposal(NamedTuple):
    """A change that removes excess, and its score: the excess that it removes, divided by its cost."""

    score: float
    change: ResidencyChange


class _Search:
    """One search for a choice: each step changes the residency of the previous one."""

    def __init__(self, model: Model, target: float) -> None:
        self.model = model
        self.target = target
        self.residency = Residency(model, model.forced)

    def result(self) -> Residency:
        """The choice, beginning with the values that are on the host already."""
        self.repeat()
        self.move_repeated()
        self.move_to_host("hidden")
        self.move_to_host("exposed")
        if self.residency.peak <= self.target:
            self.keep_what_fits()
        return self.residency

    def repeat(self) -> None:
        """Repeat more computations, the best first, until the live bytes are within the target, or nothing helps."""
        _Descent(self, self._best_repetition).run()

    def move_to_host(self, copied: Copied) -> None:
        """Move more results to the host, until the live bytes are within the target, or nothing helps.

        The results that wait longest go first: they remove most excess for their time on the link.
        """
        _Descent(self, lambda i: self._host_move(i, copied)).run()

    def _best_repetition(self, i: int) -> Proposal | None:
        """The best way to repeat a computation: it removes most excess for each second of compute."""
        best: Proposal | None = None
        for variant in self._variants(i):
            change = self.residency.change(dict.fromkeys(variant, True))
            # A change may be free. The best free change removes most.
            score = self._removed_excess(change) / max(change.price, 1e-9)
            if score > 0 and (best is None or score > best.score):
                best = Proposal(score, change)
        return best

    def _variants(self, i: int) -> Iterator[frozenset[int]]:
        """Sets that repeat a computation: with all earlier ones that are dead by then, and with fewer of them."""
        if i in self.residency.repeated or i in self.residency.on_host:
            return
        computation = self.model.computations[i]
        place = min((self.residency.first[v] for v in computation.droppable), default=NOWHERE)
        if place == NOWHERE:
            return
        chain = self._with_dead(i, place, -1)
        yield chain
        variants = {chain}
        # The results that a shorter chain leaves out are kept for longer instead.
        for stop in sorted(chain - {i}, reverse=True):
            variant = self._with_dead(i, place, stop)
            if variant not in variants:
                variants.add(variant)
                yield variant
            if len(variants) == _VARIANTS - 1:
                break
        if frozenset([i]) not in variants:
            yield frozenset([i])

    def _with_dead(self, i: int, place: int, stop: int) -> frozenset[int]:
        """A computation, and earlier ones whose results are dead at a place. `stop` and what only it reads stay out."""
        model = self.model
        chain = {i: None}
        unread = [i]
        while unread and len(chain) < _CHAIN:
            for v in model.computations[unread.pop()].args:
                value = model.values[v]
                maker = value.maker
                is_live = max(value.use.forward, self.residency.last[v]) >= place
                if is_live or not value.droppable or maker == stop or maker in chain:
                    continue
                if maker in self.residency.repeated or maker in self.residency.on_host:
                    continue
                chain[maker] = None
                unread.append(maker)
        return frozenset(chain)

    def _host_move(self, i: int, copied: Copied) -> Proposal | None:
        """The move of a computation's results to the host, scored by the excess that it removes for each byte."""
        size = self._movable_bytes(i)
        if not size or i in self.residency.repeated or not self._has_room(size):
            return None
        change = self.residency.change({}, {i: copied})
        score = self._removed_excess(change) / size
        return Proposal(score, change) if score > 0 else None

    def move_repeated(self) -> None:
        """Move repeated results to the host instead, in descending order of their seconds for each byte.

        Compute does not wait for these copies: if a lane is busy, a value stays on the device for longer instead.
        """
        prices: dict[int, float] = {}
        for i in self.residency.repeated.difference(self.model.forced):
            size = self._movable_bytes(i)
            if size:
                prices[i] = self.model.computations[i].seconds / size
        # Equal prices are in the order of the program, so that every rank makes the same choice.
        for i in sorted(prices, key=lambda i: (-prices[i], i)):
            if not self._has_room(self._movable_bytes(i)):
                continue
            change = self.residency.change({i: False}, {i: "hidden"})
            if change.price < 0 and self._removed_excess(change) >= 0:
                self.residency.apply(change)

    def _movable_bytes(self, i: int) -> int:
        """The bytes of a computation's results that may wait on the host."""
        return sum(self.model.values[v].use.bytes for v in self.model.computations[i].movable)

    def _has_room(self, size: int) -> bool:
        """Whether the host has room for `size` more bytes. At the end of forward it has all values that go there."""
        link = self.model.link
        on_host = sum(self._movable_bytes(i) for i in self.residency.on_host)
        return link is not None and on_host + size <= link.room

    def _removed_excess(self, change: ResidencyChange) -> float:
        """The excess that a change removes."""
        before, after = self.residency.window(change)
        return _excess(before, self.target) - _excess(after, self.target)

    def keep_what_fits(self) -> None:
        """Keep again what fits within the target, the dearest first."""
        residency = self.residency
        repeated = residency.repeated.difference(self.model.forced)
        dearest = sorted(repeated, key=lambda i: (-self.model.computations[i].seconds, i))
        for i in (*dearest, *sorted(residency.on_host, reverse=True)):
            host_moves = {i: None} if i in residency.on_host else {}
            change = residency.change({i: False}, host_moves)
            _, after = residency.window(change)
            if change.price <= 0 and after.max(initial=0) <= self.target:
                residency.apply(change)


# The best change for a computation; None if no change helps.
BestChange = Callable[[int], Proposal | None]


class _Descent:
    """Changes that reduce the live bytes to a target, the best first."""

    def __init__(self, search: _Search, best_change: BestChange) -> None:
        self.search = search
        self.residency = search.residency
        self.best_change = best_change
        # The members of each class that have not been proposed, the earliest last.
        self.unproposed = [list(members[::-1]) for members in classes(search.model)]
        self.class_of: dict[int, int] = {}
        for k, members in enumerate(self.unproposed):
            for i in members:
                self.class_of[i] = k
        # The computations that are proposed for their classes.
        self.fronts: set[int] = set()
        # A heap of the negative of a score, and a computation. Only the last score of a computation counts.
        self.proposals: list[tuple[float, int]] = []
        self.score_of: dict[int, float] = {}

    def run(self) -> None:
        """Make changes until the live bytes are within the target, or nothing helps."""
        if self.residency.peak <= self.search.target:
            return
        for members in self.unproposed:
            self._propose_next(members)
        while self.residency.peak > self.search.target and self.proposals:
            score, i = heapq.heappop(self.proposals)
            if self.score_of[i] == -score:
                self._try(i)

    def _try(self, i: int) -> None:
        """Make the best change for a computation, if it is still the best of all.

        Most scores have become worse since they were computed, so an old score is an upper estimate.
        """
        proposal = self.best_change(i)
        if proposal is None:
            self._withdraw(i)
        elif self.proposals and proposal.score < -self.proposals[0][0]:
            self._propose(i, proposal.score)
        else:
            self._apply(proposal.change)

    def _propose(self, i: int, score: float) -> None:
        self.score_of[i] = score
        heapq.heappush(self.proposals, (-score, i))

    def _withdraw(self, i: int) -> None:
        """Withdraw the proposal of a computation. If it was proposed for its class, propose the next member."""
        self.score_of[i] = 0.0  # so that its old proposals, which stay in the heap, do not count
        if i in self.fronts:
            self.fronts.remove(i)
            self._propose_next(self.unproposed[self.class_of[i]])

    def _propose_next(self, members: list[int]) -> None:
        """Propose the earliest member of a class that helps."""
        while members:
            i = members.pop()
            proposal = self.best_change(i)
            if proposal is not None:
                self.fronts.add(i)
                self._propose(i, proposal.score)
                return
            self.score_of[i] = 0.0

    def _apply(self, change: ResidencyChange) -> None:
        """Apply a change, and propose its neighbours again if their scores have risen."""
        self.residency.apply(change)
        for i in (*change.repeats, *change.host_moves):
            self._withdraw(i)
        # A score rises if a value that would be kept longer for it is now kept, or recomputed, anyway.
        for i in sorted(self._neighbours(change)):
            if i in self.residency.repeated or i not in self.score_of:
                continue
            proposal = self.best_change(i)
            if proposal is not None and proposal.score > self.score_of[i]:
                self._propose(i, proposal.score)

    def _neighbours(self, change: ResidencyChange) -> set[int]:
        """The computations that make an input of a repeated one, or read a result of it."""
        model = self.search.model
        neighbours: set[int] = set()
        for i in change.repeats:
            computation = model.computations[i]
            neighbours.update(model.values[v].maker for v in computation.args)
            for v in computation.results:
                neighbours.update(model.readers[v])
        return neighbours


def _excess(live: np.ndarray, target: float) -> float:
    return float(np.maximum(live - target, 0).sum())


@cached_on_graph  # a model is searched for many targets
def classes(model: Model) -> tuple[tuple[int, ...], ...]:
    """The computations that may be repeated or moved to the host, in classes of equal ones, each in order.

    Two computations are equal if they have the same operation and types, and equal inputs up to `_DEPTH` equations
    before them, if the same operations of forward read their results, and if backward reads the same results.
    """
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    computations = model.computations
    keys = [number(_description(model, computation)) for computation in computations]
    reader_keys: list[tuple[int, ...]] = []
    for computation in computations:
        result_readers: list[int] = []
        for v in computation.results:
            result_readers += [keys[i] for i in model.readers[v]]
        reader_keys.append(tuple(sorted(result_readers)))
    # Each round separates computations whose inputs the previous round has separated.
    for _ in range(_DEPTH):
        new_keys = []
        for key, computation in zip(keys, computations):
            inputs = tuple(keys[model.values[v].maker] for v in computation.args)
            new_keys.append(number((key, inputs)))
        keys = new_keys

    # Equal computations have results of the same kinds, so the members of a class are all included, or none.
    members: dict[Hashable, list[int]] = {}
    for i, computation in enumerate(computations):
        if computation.droppable or computation.movable:
            members.setdefault((keys[i], reader_keys[i]), []).append(i)
    return tuple(map(tuple, members.values()))


def _description(model: Model, computation: Computation) -> Hashable:
    """A computation by itself: its operation, its types, and what may become of its results."""
    values = [model.values[v] for v in computation.results]
    read = tuple((v.droppable, v.movable, v.use.first == NOWHERE) for v in values)
    return computation.eqn.op, tuple(v.type for v in computation.eqn.results), read
