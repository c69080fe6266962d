"""choose: what backward repeats, and what waits for it on the host, so that the live bytes stay within a target.

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

import functools
import heapq
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from ...ir.relations import grouped
from .absences import Copied
from .model import NEVER, Computation, Model, Move, Residency

_DEPTH = 4  # of the inputs by which equal computations are told from others
_CHAIN = 15  # the most computations that are proposed together
_VARIANTS = 8  # the most sets that are proposed for one computation


_BISECTIONS = 8  # of the targets that are tried to find the lowest peak


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


class _Search:
    """A choice as it is made: each step leaves a residency that the next one changes."""

    def __init__(self, model: Model, target: float) -> None:
        self.model = model
        self.target = target
        self.residency = Residency(model, model.forced)

    def result(self) -> Residency:
        """The choice, after what was moved to the host before."""
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
        _Descent(self, lambda i: self._absence(i, copied)).run()

    def _best_repetition(self, i: int) -> tuple[float, Move | None]:
        """The best way to repeat a computation, and its score: the excess that it removes for a second of compute."""
        best: Move | None = None
        best_score = 0.0
        for variant in self._variants(i):
            move = self.residency.move(dict.fromkeys(variant, True))
            score = self._removed(move) / max(move.price, 1e-9)
            if score > best_score:
                best = move
                best_score = score
        return best_score, best

    def _variants(self, i: int) -> Iterator[frozenset[int]]:
        """Sets that repeat a computation: with all before it that are dead by then, and with fewer of them."""
        computation = self.model.computations[i]
        if i in self.residency.repeated or i in self.residency.on_host:
            return
        place = min((self.residency.first[v] for v in computation.droppable), default=NEVER)
        if place == NEVER:
            return
        chain = self._with_dead(i, place, -1)
        yield chain
        seen = {chain}
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
                is_there = max(value.forward, self.residency.last[v]) >= place
                maker = value.maker
                if is_there or not value.may_go or maker == stop or maker in found:
                    continue
                if maker not in self.residency.repeated and maker not in self.residency.on_host:
                    found[maker] = None
                    unread.append(maker)
        return frozenset(found)

    def _absence(self, i: int, copied: Copied) -> tuple[float, Move | None]:
        """The move of results of a computation to the host, and the excess that it removes for a byte of the link."""
        size = self._movable_bytes(i)
        if not size or i in self.residency.repeated:
            return 0.0, None
        move = self.residency.move({}, {i: copied})
        score = self._removed(move) / size
        return (score, move) if score > 0 else (0.0, None)

    def wait_instead(self) -> None:
        """Let results wait on the host instead of computing them again, the dearest first for their bytes.

        Compute hides all copies, because a value is away only while no lane has it.
        """
        prices: dict[int, float] = {}
        for i in self.residency.repeated.difference(self.model.forced):
            size = self._movable_bytes(i)
            if size:
                prices[i] = self.model.computations[i].seconds / size
        for i in sorted(prices, key=lambda i: (-prices[i], i)):
            move = self.residency.move({i: False}, {i: "hidden"})
            if move.price < 0 and self._removed(move) >= 0:
                self.residency.apply(move)

    def _movable_bytes(self, i: int) -> int:
        """The bytes of the results of a computation that may wait on the host."""
        return sum(self.model.values[v].bytes for v in self.model.computations[i].movable)

    def _removed(self, move: Move) -> float:
        """The excess that a move removes."""
        before, after = self.residency.window(move)
        return _excess(before, self.target) - _excess(after, self.target)

    def give_back(self) -> None:
        """Keep again what fits within the target, the dearest first."""
        residency = self.residency
        repeated = residency.repeated.difference(self.model.forced)
        dearest = sorted(repeated, key=lambda i: (-self.model.computations[i].seconds, i))
        for i in (*dearest, *sorted(residency.on_host, reverse=True)):
            stays = {i: None} if i in residency.on_host else {}
            move = residency.move({i: False}, stays)
            _, after = residency.window(move)
            if move.price <= 0 and after.max(initial=0) <= self.target:
                residency.apply(move)


# The best move for a computation, and its score; None if no move helps.
Weigh = Callable[[int], tuple[float, Move | None]]


class _Descent:
    """Moves that bring the live bytes down to a target, the best first."""

    def __init__(self, search: _Search, weigh: Weigh) -> None:
        self.search = search
        self.residency = search.residency
        self.weigh = weigh
        # The members of each class that have not been proposed, the earliest last.
        self.unproposed = [list(members[::-1]) for members in classes(search.model)]
        self.class_of = {i: k for k, members in enumerate(self.unproposed) for i in members}
        self.fronts: set[int] = set()  # the members that stand for their classes
        # The negative of a score, and a computation. Only the last score of a computation counts.
        self.proposals: list[tuple[float, int]] = []
        self.score_of: dict[int, float] = {}

    def run(self) -> None:
        """Make moves until the live bytes are within the target, or nothing helps."""
        if self.residency.peak <= self.search.target:
            return
        for members in self.unproposed:
            self._propose_next(members)
        while self.residency.peak > self.search.target and self.proposals:
            score, i = heapq.heappop(self.proposals)
            if self.score_of[i] == -score:
                self._weigh_again(i)

    def _weigh_again(self, i: int) -> None:
        """Make the best move for a computation, if it is still the best of all.

        Most scores have become worse since they were computed, so an old one is an upper estimate.
        """
        score, move = self.weigh(i)
        if move is None:
            self._leave(i)
        elif self.proposals and score < -self.proposals[0][0]:
            self._propose(i, score)
        else:
            self._make(move)

    def _propose(self, i: int, score: float) -> None:
        self.score_of[i] = score
        heapq.heappush(self.proposals, (-score, i))

    def _leave(self, i: int) -> None:
        """Propose a computation no more. If it stood for its class, the next member does."""
        self.score_of[i] = 0.0
        if i in self.fronts:
            self.fronts.remove(i)
            self._propose_next(self.unproposed[self.class_of[i]])

    def _propose_next(self, members: list[int]) -> None:
        """Propose the earliest member of a class that helps."""
        while members:
            i = members.pop()
            score, move = self.weigh(i)
            if move is not None:
                self.fronts.add(i)
                self._propose(i, score)
                return
            self.score_of[i] = 0.0

    def _make(self, move: Move) -> None:
        self.residency.apply(move)
        for i in (*move.repeats, *move.hosts):
            self._leave(i)
        # A score may rise if what was kept longer for it is now kept, or recomputed, anyway.
        for i in sorted(self._around(move)):
            if i not in self.residency.repeated and i in self.score_of:
                score, better = self.weigh(i)
                if better is not None and score > self.score_of[i]:
                    self._propose(i, score)

    def _around(self, move: Move) -> set[int]:
        """The computations that compute what the repeated ones read, or read what they compute."""
        model = self.search.model
        around: set[int] = set()
        for i in move.repeats:
            computation = model.computations[i]
            around.update(model.values[v].maker for v in computation.args)
            for v in computation.results:
                around.update(model.readers[v])
        return around


def _excess(live: np.ndarray, target: float) -> float:
    return float(np.maximum(live - target, 0).sum())


@functools.lru_cache(maxsize=2)  # the same model is asked about for many targets
def classes(model: Model) -> tuple[tuple[int, ...], ...]:
    """The computations that may be repeated or moved to the host, in classes of equal ones, each in order.

    Equal are those of the same operation and types, with equal inputs up to a few equations before them, which the same
    operations of backward and forward read.
    """
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    computations = model.computations
    keys = [number(_description(model, computation)) for computation in computations]
    readers = []
    for computation in computations:
        of_results = [keys[i] for v in computation.results for i in model.readers[v]]
        readers.append(tuple(sorted(of_results)))
    for _ in range(_DEPTH):
        inputs = [tuple(keys[model.values[v].maker] for v in c.args) for c in computations]
        keys = [number(pair) for pair in zip(keys, inputs)]
    members = grouped(zip(zip(keys, readers), range(len(computations))))
    return tuple(
        tuple(of_class) for of_class in members.values() if _may_change(model, of_class[0])
    )


def _may_change(model: Model, i: int) -> bool:
    """Whether a computation may be repeated, or its results moved, and that of all equal ones."""
    computation = model.computations[i]
    return bool(computation.droppable or computation.movable)


def _description(model: Model, computation: Computation) -> Hashable:
    """What a computation is by itself: its operation, its types, and which results backward reads."""
    values = [model.values[v] for v in computation.results]
    read = tuple((v.may_go, v.may_wait, v.first == NEVER) for v in values)
    return computation.eqn.op, tuple(v.type for v in computation.eqn.results), read
