"""variation: what a schedule takes when things do not last as long as they were said to.

Operations of a real step take more or less than those that were measured, and messages mostly more.
A schedule that is on time to the second is late then. Chance has a fixed seed.
"""

from __future__ import annotations

import random

from .outcome import evaluate
from .play import play
from .problem import Problem, Schedule

# Of every operation of a step, of the latency and of the pace of every message: times what they were said to be.
_STEPS = ((0.85, 1.1), (0.9, 1.25), (1.05, 1.0), (0.95, 0.95))
_APART = 0.2  # single operations differ by up to this much from the others


class Variation:
    """A problem's operations and messages as they might turn out, a few times."""

    def __init__(self, problem: Problem) -> None:
        self.problem, chance = problem, random.Random(0)
        apart = lambda: chance.uniform(1 - _APART, 1 + _APART)  # noqa: E731
        self.steps = [([s * compute * apart() for s in problem.seconds], wire) for compute, wire in _STEPS]

    def seconds(self, schedule: Schedule) -> float:
        """The mean of a schedule's seconds."""
        messages, total = evaluate(self.problem, schedule).messages, 0.0
        places = sorted({0, len(self.problem.seconds), *(m.issue for m in messages), *(m.need for m in messages)})
        for operations, wire in self.steps:
            slower = [m._replace(latency=m.latency * wire, seconds=m.seconds * wire) for m in messages]
            total += play(operations, slower, places).seconds
        return total / len(self.steps)
