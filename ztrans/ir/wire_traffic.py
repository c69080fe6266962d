"""Count the messages of a program, by mesh axis and role."""

from __future__ import annotations

from typing import NamedTuple

from .collectives import is_start, role, rules
from .graph import Graph
from .micro_batches import micro_batch_programs
from .printer import format_bytes


class WireTraffic(NamedTuple):
    """The messages of a mesh axis and role.

    Attributes:
        collectives: the number of collectives.
        values: the number of values in them.
        bytes: the bytes that a rank receives.
    """

    collectives: int = 0
    values: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        collectives = _count(self.collectives, "collective")
        return f"{collectives} of {_count(self.values, 'value')}, {format_bytes(self.bytes)}"


def wire_traffic(graph: Graph) -> dict[tuple[str, str], WireTraffic]:
    """The messages of one rank in a step, for all micro-batches together, by mesh axis and role."""
    totals: dict[tuple[str, str], WireTraffic] = {}
    for program, times in micro_batch_programs(graph).runs:
        for eqn in filter(is_start, program.eqns):
            axis_and_role = eqn.kwargs["axis"], role(eqn)
            earlier = totals.get(axis_and_role, WireTraffic())
            totals[axis_and_role] = WireTraffic(
                earlier.collectives + times,
                earlier.values + times * len(eqn.outs),
                earlier.bytes + times * rules(eqn).wire_bytes(eqn, graph.axes),
            )
    return dict(sorted(totals.items()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
