"""updates: the compute that waits for reductions while a schedule is played.

With update="eager" an update runs when the last reduction that it needs has been waited for. It may not run
before its release, because until then something else reads the state that it writes. An update that is released later
runs before the next wait for a gather or a reduction, while that message is still under way.
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

    def follow(self, reductions: Iterable[int], place: int) -> float:
        """The seconds of the updates that run once these reductions have been waited for at a place."""
        for r in reductions:
            for u in self.updated.get(r, ()):
                self.missing[u] -= 1
                if not self.missing[u]:
                    self.ready.append(u)
        return self.run(place)

    def run(self, place: int) -> float:
        """Run the updates that can run at a place, and return their seconds."""
        runnable = [u for u in self.ready if self.updates[u].release <= place]
        if runnable:
            self.ready = [u for u in self.ready if self.updates[u].release > place]
            self.waiting.difference_update(runnable)
        return sum(self.updates[u].seconds for u in runnable)

    @property
    def left(self) -> float:
        """The seconds of the updates that have not run: they run at the end."""
        return sum(self.updates[u].seconds for u in sorted(self.waiting))
