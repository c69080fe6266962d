"""The updates and second reductions that follow the waits for reductions, while a schedule is simulated or written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from .problem import END, Problem

T = TypeVar("T")


class PendingUpdates:
    """The updates of a problem that have not run yet.

    An update may run once the last reduction that it needs has been waited for, but not before its release: until then
    something else reads the state that it writes. `run` is called where updates run.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.updates = problem.updates
        self.dependents = problem.dependents
        self.dependents_of = problem.dependents_of
        # For each group of dependents, the number of reductions that have not been waited for.
        self.missing = [len(group.reductions) for group in self.dependents]
        self.ready_updates = list(problem.unawaited_updates)
        self.pending = set(range(len(self.updates)))
        # The first release of the ready updates that follow a reduction.
        self.first_release = END

    def complete(self, reductions: Iterable[int]) -> None:
        """Add the updates that are ready once these reductions have been waited for."""
        if not self.pending:
            return
        for r in reductions:
            ready: list[int] = []
            for k in self.dependents_of.get(r, ()):
                self.missing[k] -= 1
                if not self.missing[k]:
                    ready += self.dependents[k].updates
            for u in sorted(ready):
                self.ready_updates.append(u)
                self.first_release = min(self.first_release, self.updates[u].release)

    def runnable_after(self, reductions: Iterable[int], place: int) -> list[int]:
        """The updates that can run at a place only once these reductions have been waited for too."""
        missing: dict[int, int] = {}
        updates: list[int] = []
        for r in reductions:
            for k in self.dependents_of.get(r, ()):
                missing[k] = missing.get(k, self.missing[k]) - 1
                if not missing[k]:
                    updates += self.dependents[k].updates
        return [u for u in updates if self.updates[u].release <= place]

    def runnable(self, place: int) -> list[int]:
        """The updates that can run at a place."""
        # Updates that need no reduction run together with the first one that needs some.
        if place < self.first_release:
            return []
        return [u for u in self.ready_updates if self.updates[u].release <= place]

    def run(self, place: int) -> list[int]:
        """Remove the updates that can run at a place, and return them in the order in which they run."""
        runnable = self.runnable(place)
        if not runnable:
            return []
        unreleased: list[int] = []
        self.first_release = END
        for u in self.ready_updates:
            update = self.updates[u]
            if update.release > place:
                unreleased.append(u)
                if update.after:
                    self.first_release = min(self.first_release, update.release)
        self.ready_updates = unreleased
        self.pending.difference_update(runnable)
        runnable.sort(key=self._order)
        return runnable

    def _order(self, u: int) -> tuple[int, int, int]:
        """Sort key: the last reduction that an update needs, the number of its reductions, and its release."""
        update = self.updates[u]
        return max(update.after, default=-1), len(update.after), update.release

    def seconds(self, place: int) -> float:
        """Run the updates that can run at a place, and return their seconds."""
        return self.problem.update_seconds(self.run(place))

    @property
    def seconds_left(self) -> float:
        """The seconds of the updates that have not run. They run at the end."""
        return self.problem.update_seconds(sorted(self.pending))


class SecondReductions(Generic[T]):
    """The second reductions under way. Each reduces the result of a first one over replicas.

    Memory is reserved for one. So once the next one has been sent, the previous one is waited for.
    """

    def __init__(self) -> None:
        # At most one, with the place at which it is needed.
        self.under_way: list[tuple[T, int]] = []

    def add(self, second: T, need: int) -> list[T]:
        """Add a second reduction that has been sent, and return the previous one, which is waited for now."""
        previous = [earlier for earlier, _ in self.under_way]
        self.under_way = [(second, need)]
        return previous

    def needed(self, place: int) -> list[T]:
        """Remove and return the second reduction that is needed at a place."""
        if self.under_way and self.under_way[0][1] <= place:
            return [self.under_way.pop()[0]]
        return []
