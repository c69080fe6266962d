"""What backward repeats, and what waits for it on the host, so that the live bytes stay within a target.

    repeated = what the user demands
    while some live bytes exceed the target:
        repeat what removes most excess for each second of compute
    let the dearest wait on the host instead, as far as compute hides the copies
    keep again what still fits, the dearest first

A byte that waits on the host saves what its recomputation would take, so the link to the host is for what is dear to
recompute. What cannot be repeated goes there too, if the target asks for it: first the values whose copies are hidden,
then those for which compute waits. A second choice begins with the host, which is better where its link has time for
all that must go.

Excess is an area: the bytes above the target, summed over all places. The values of the earliest layers are live for
longest, so they go first, and the last layer, whose backward runs at the peak, is left alone. A computation is repeated
together with those before it whose results are dead by then, or with some of them, while what they read is kept longer.

Equal layers have equal computations, which form a class. Only the earliest member of a class is proposed. Every
proposal is weighed by what it changes itself, so layers that only look equal do no harm.
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

# How many equations before a computation tell it from others.
_DEPTH = 4
# The most computations that are repeated by one change, and the most such sets that are weighed for one computation.
_CHAIN = 15
_VARIANTS = 8
# How many targets are tried to find the lowest peak.
_BISECTIONS = 6


def choose(model: Model, target: float) -> Residency:
    """Choose what backward repeats and what waits on the host, so that the live bytes stay within `target` if they can.

    If they cannot, the result is as far as the search came.
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
    """Choose what backward repeats so that the peak is as low as the search can make it.

    A search by price may end without attention, the dearest computation: once its neighbours are repeated, repeating
    it no longer lowers the peak. So the model is also searched as if attention took no time, and as if nothing did.
    A Llama of three layers then needs 18.19 GiB instead of 18.44, and a GPT of ten layers 0.64 instead of 0.74.
    """
    best = _least(model)
    for is_free in (_is_attention, lambda computation: True):
        computations = []
        for computation in model.computations:
            if is_free(computation):
                computation = computation._replace(seconds=0.0)
            computations.append(computation)
        found = _least(dataclasses.replace(model, computations=tuple(computations)))
        if found.peak < best.peak:
            best = Residency(model, found.repeated)
            best.apply(best.change({}, found.on_host))
    return best


def _is_attention(computation: Computation) -> bool:
    return "attention" in op_facts(computation.eqn.op).name


def _least(model: Model) -> Residency:
    """The lowest peak of a search for several targets.

    A target that is far too low takes everything that makes the area smaller, which is not the lowest peak.
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
    """A change that removes excess, and its score: the excess that it removes for what it costs."""

    score: float
    change: ResidencyChange


class _Search:
    """A choice as it is made: each step leaves a residency that the next one changes."""

    def __init__(self, model: Model, target: float) -> None:
        self.model = model
        self.target = target
        self.residency = Residency(model, model.forced)

    def result(self) -> Residency:
        """The choice, beginning with what has been moved to the host before."""
        self.repeat()
        self.wait_instead()
        self.move_to_host("hidden")
        self.move_to_host("exposed")
        if self.residency.peak <= self.target:
            self.give_back()
        return self.residency

    def repeat(self) -> None:
        """Repeat more, the best first, until the live bytes are within the target, or nothing helps."""
        _Descent(self, self._best_repetition).run()

    def move_to_host(self, copied: Copied) -> None:
        """Move more to the host, until the live bytes are within the target, or nothing helps.

        Results that wait the longest go first: they remove most excess for the time that they take of the link.
        """
        _Descent(self, lambda i: self._move(i, copied)).run()

    def _best_repetition(self, i: int) -> Proposal | None:
        """The best way to repeat a computation: it removes most excess for a second of compute."""
        best: Proposal | None = None
        for variant in self._variants(i):
            change = self.residency.change(dict.fromkeys(variant, True))
            # A change may be free. Of such changes, the one that removes most is the best.
            score = self._removed(change) / max(change.price, 1e-9)
            if score > 0 and (best is None or score > best.score):
                best = Proposal(score, change)
        return best

    def _variants(self, i: int) -> Iterator[frozenset[int]]:
        """Sets that repeat a computation: with all before it that are dead by then, and with fewer of them."""
        if i in self.residency.repeated or i in self.residency.on_host:
            return
        computation = self.model.computations[i]
        place = min((self.residency.first[v] for v in computation.droppable), default=NOWHERE)
        if place == NOWHERE:
            return
        chain = self._with_dead(i, place, -1)
        yield chain
        seen = {chain}
        # What a shorter chain leaves out is kept for longer instead.
        for stop in sorted(chain - {i}, reverse=True):
            variant = self._with_dead(i, place, stop)
            if variant not in seen:
                seen.add(variant)
                yield variant
            if len(seen) == _VARIANTS - 1:
                break
        if frozenset([i]) not in seen:
            yield frozenset([i])

    def _with_dead(self, i: int, place: int, stop: int) -> frozenset[int]:
        """A computation and those before it whose results are dead at a place, up to `stop`, which is left out."""
        model = self.model
        found = {i: None}
        unread = [i]
        while unread and len(found) < _CHAIN:
            for v in model.computations[unread.pop()].args:
                value = model.values[v]
                maker = value.maker
                is_live = max(value.use.forward, self.residency.last[v]) >= place
                if is_live or not value.droppable or maker == stop or maker in found:
                    continue
                if maker in self.residency.repeated or maker in self.residency.on_host:
                    continue
                found[maker] = None
                unread.append(maker)
        return frozenset(found)

    def _move(self, i: int, copied: Copied) -> Proposal | None:
        """To move the results of a computation to the host. The score is the excess that this removes for a byte."""
        size = self._movable_bytes(i)
        if not size or i in self.residency.repeated or not self._has_room(size):
            return None
        change = self.residency.change({}, {i: copied})
        score = self._removed(change) / size
        return Proposal(score, change) if score > 0 else None

    def wait_instead(self) -> None:
        """Let results wait on the host instead of computing them again, the dearest first for their bytes.

        Compute waits for none of these copies: if a lane is busy, a value stays on the device for longer instead.
        """
        prices: dict[int, float] = {}
        for i in self.residency.repeated.difference(self.model.forced):
            size = self._movable_bytes(i)
            if size:
                prices[i] = self.model.computations[i].seconds / size
        # Equal prices in the order of the program, so that every rank comes to the same choice.
        for i in sorted(prices, key=lambda i: (-prices[i], i)):
            if not self._has_room(self._movable_bytes(i)):
                continue
            change = self.residency.change({i: False}, {i: "hidden"})
            if change.price < 0 and self._removed(change) >= 0:
                self.residency.apply(change)

    def _movable_bytes(self, i: int) -> int:
        """The bytes of the results of a computation that may wait on the host."""
        return sum(self.model.values[v].use.bytes for v in self.model.computations[i].movable)

    def _has_room(self, size: int) -> bool:
        """Whether the host has room for so many bytes more: at the end of forward it has all values that go there."""
        link = self.model.link
        on_host = sum(self._movable_bytes(i) for i in self.residency.on_host)
        return link is not None and on_host + size <= link.room

    def _removed(self, change: ResidencyChange) -> float:
        """The excess that a change removes."""
        before, after = self.residency.window(change)
        return _excess(before, self.target) - _excess(after, self.target)

    def give_back(self) -> None:
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
Weigh = Callable[[int], Proposal | None]


class _Descent:
    """Changes that bring the live bytes down to a target, the best first."""

    def __init__(self, search: _Search, weigh: Weigh) -> None:
        self.search = search
        self.residency = search.residency
        self.weigh = weigh
        # The members of each class that have not been proposed, the earliest last.
        self.unproposed = [list(members[::-1]) for members in classes(search.model)]
        self.class_of: dict[int, int] = {}
        for k, members in enumerate(self.unproposed):
            self.class_of.update(dict.fromkeys(members, k))
        # The members that stand for their classes.
        self.fronts: set[int] = set()
        # The negative of a score, and a computation. Only the last score of a computation counts.
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
                self._weigh_again(i)

    def _weigh_again(self, i: int) -> None:
        """Make the best change for a computation, if it is still the best of all.

        Most scores have become worse since they were computed, so an old one is an upper estimate.
        """
        proposal = self.weigh(i)
        if proposal is None:
            self._leave(i)
        elif self.proposals and proposal.score < -self.proposals[0][0]:
            self._propose(i, proposal.score)
        else:
            self._make(proposal.change)

    def _propose(self, i: int, score: float) -> None:
        self.score_of[i] = score
        heapq.heappush(self.proposals, (-score, i))

    def _leave(self, i: int) -> None:
        """Propose a computation no more. If it stood for its class, the next member does."""
        self.score_of[i] = 0.0  # so that its old proposals, which stay in the heap, do not count
        if i in self.fronts:
            self.fronts.remove(i)
            self._propose_next(self.unproposed[self.class_of[i]])

    def _propose_next(self, members: list[int]) -> None:
        """Propose the earliest member of a class that helps."""
        while members:
            i = members.pop()
            proposal = self.weigh(i)
            if proposal is not None:
                self.fronts.add(i)
                self._propose(i, proposal.score)
                return
            self.score_of[i] = 0.0

    def _make(self, change: ResidencyChange) -> None:
        self.residency.apply(change)
        for i in (*change.repeats, *change.host_moves):
            self._leave(i)
        # A score may rise if what was kept longer for it is now kept, or recomputed, anyway.
        for i in sorted(self._around(change)):
            if i in self.residency.repeated or i not in self.score_of:
                continue
            proposal = self.weigh(i)
            if proposal is not None and proposal.score > self.score_of[i]:
                self._propose(i, proposal.score)

    def _around(self, change: ResidencyChange) -> set[int]:
        """The computations that compute what the repeated ones read, or read what they compute."""
        model = self.search.model
        around: set[int] = set()
        for i in change.repeats:
            computation = model.computations[i]
            around.update(model.values[v].maker for v in computation.args)
            for v in computation.results:
                around.update(model.readers[v])
        return around


def _excess(live: np.ndarray, target: float) -> float:
    return float(np.maximum(live - target, 0).sum())


@cached_on_graph  # the same model is asked about for many targets
def classes(model: Model) -> tuple[tuple[int, ...], ...]:
    """The computations that may be repeated or moved to the host, in classes of equal ones, each in order.

    Two computations are equal if they have the same operation and types, and equal inputs up to `_DEPTH` equations
    before them, if the same operations of forward read their results, and if backward reads the same of these.
    """
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    computations = model.computations
    keys = [number(_description(model, computation)) for computation in computations]
    readers = []
    for computation in computations:
        of_results: list[int] = []
        for v in computation.results:
            of_results += [keys[i] for i in model.readers[v]]
        readers.append(tuple(sorted(of_results)))
    # Each round tells apart computations whose inputs the round before has told apart.
    for _ in range(_DEPTH):
        new_keys = []
        for key, computation in zip(keys, computations):
            inputs = tuple(keys[model.values[v].maker] for v in computation.args)
            new_keys.append(number((key, inputs)))
        keys = new_keys

    # Equal computations have results of the same kinds, so all of a class are kept, or none.
    members: dict[Hashable, list[int]] = {}
    for i, computation in enumerate(computations):
        if computation.droppable or computation.movable:
            members.setdefault((keys[i], readers[i]), []).append(i)
    return tuple(map(tuple, members.values()))


def _description(model: Model, computation: Computation) -> Hashable:
    """What a computation is by itself: its operation, its types, and which results backward reads."""
    values = [model.values[v] for v in computation.results]
    read = tuple((v.droppable, v.movable, v.use.first == NOWHERE) for v in values)
    return computation.eqn.op, tuple(v.type for v in computation.eqn.results), read
