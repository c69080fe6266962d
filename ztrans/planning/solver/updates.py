"""updates: the compute that waits for reductions.

With update="eager" an update runs when the last reduction that it needs has been waited for. It may not run before
its release, because until then something else reads the state that it writes; then it runs at that place.
"""

from __future__ import annotations

from collections.abc import Iterable

from .problem import Problem


class Updates:
    """The updates of a problem that have not run yet."""

    def __init__(self, problem: Problem) -> None:
        self.updates, self.updated = problem.updates, problem.updated
        self.missing = [len(update.after) for update in self.updates]
        self.ready = [u for u, count in enumerate(self.missing) if not count]
        self.waiting = set(range(len(self.updates)))

    def meet(self, reductions: Iterable[int]) -> None:
        """Note that reductions have been waited for."""
        for r in reductions:
            for u in self.updated.get(r, ()):
                self.missing[u] -= 1
                if not self.missing[u]:
                    self.ready.append(u)

    def run(self, place: int) -> list[int]:
        """Take the updates that can run at a place. Those that need no reduction run with the first that does."""
        runnable = [u for u in self.ready if self.updates[u].release <= place]
        if not any(self.updates[u].after for u in runnable):
            return []
        self.ready = [u for u in self.ready if self.updates[u].release > place]
        self.waiting.difference_update(runnable)
        return runnable

    def seconds(self, place: int) -> float:
        """Run the updates that can run at a place, and return their seconds."""
        return sum(self.updates[u].seconds for u in self.run(place))

    @property
    def left(self) -> float:
        """The seconds of the updates that have not run: they run at the end."""
        return sum(self.updates[u].seconds for u in sorted(self.waiting))
