"""What follows the waits for reductions of a schedule, while it is simulated or written: updates, second reductions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from .problem import END, Problem

T = TypeVar("T")


class PendingUpdates:
    """The updates of a problem that have not run yet.

    An update may run once the last reduction that it needs has been waited for; `run` is called where updates run. It
    may not run before its release, because until then something else reads the state that it writes.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.updates = problem.updates
        self.dependents = problem.dependents
        self.dependents_of = problem.dependents_of
        self.missing = [len(each.reductions) for each in self.dependents]
        self.ready_updates = list(problem.unawaited_updates)
        self.pending = set(range(len(self.updates)))
        # The first place at which one of the ready updates that follow a reduction may run.
        self.first_release = END

    def complete(self, reductions: Iterable[int]) -> None:
        """Note that reductions have been waited for."""
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
        """The updates that can run at a place. Those that need no reduction wait for one that does."""
        if place < self.first_release:
            return []
        return [u for u in self.ready_updates if self.updates[u].release <= place]

    def run(self, place: int) -> list[int]:
        """Take the updates that can run at a place, in the order in which they run."""
        runnable = self.runnable(place)
        if not runnable:
            return []
        waiting: list[int] = []
        self.first_release = END
        for u in self.ready_updates:
            update = self.updates[u]
            if update.release > place:
                waiting.append(u)
                if update.after:
                    self.first_release = min(self.first_release, update.release)
        self.ready_updates = waiting
        self.pending.difference_update(runnable)
        runnable.sort(key=self._order)
        return runnable

    def _order(self, u: int) -> tuple[int, int, int]:
        """Sort key: by the last reduction that an update needs, by how many it needs, and by its release."""
        update = self.updates[u]
        return max(update.after, default=-1), len(update.after), update.release

    def seconds(self, place: int) -> float:
        """Run the updates that can run at a place, and return their seconds."""
        return self.problem.update_seconds(self.run(place))

    @property
    def seconds_left(self) -> float:
        """The seconds of the updates that have not run: they run at the end."""
        return self.problem.update_seconds(sorted(self.pending))


class SecondReductions(Generic[T]):
    """Second reductions that are under way: each reduces over replicas what a first one has reduced.

    Memory is reserved for one. So when another has been sent, the one before is waited for.
    """

    def __init__(self) -> None:
        # At most one, with the place at which it is needed.
        self.sent: list[tuple[T, int]] = []

    def add(self, second: T, need: int) -> list[T]:
        """Add one that has been sent, and take out the one before."""
        before = [each for each, _ in self.sent]
        self.sent = [(second, need)]
        return before

    def needed(self, place: int) -> list[T]:
        """Take out the one that is needed at a place."""
        if self.sent and self.sent[0][1] <= place:
            return [self.sent.pop()[0]]
        return []
