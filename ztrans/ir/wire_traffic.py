"""Count the messages of a program, by mesh axis and role."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from .collectives import is_start, role, rules
from .graph import Graph
from .micro_batches import micro_batch_programs
from .printer import counted, format_bytes
from .wire_format import Coded


class WireTraffic(NamedTuple):
    """The messages of a mesh axis and role.

    Attributes:
        collectives: the number of collectives.
        values: the number of values in them.
        bytes: the bytes that a rank receives.
        coded: (format, the number of values that are sent as its codes).
    """

    collectives: int = 0
    values: int = 0
    bytes: int = 0
    coded: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        collectives = counted(self.collectives, "collective")
        texts = [f"{collectives} of {counted(self.values, 'value')}"]
        texts += (f"{values} as {wire}" for wire, values in self.coded)
        return ", ".join([*texts, format_bytes(self.bytes)])


def wire_traffic(graph: Graph) -> dict[tuple[str, str], WireTraffic]:
    """The messages of one rank in a step, for all micro-batches together, by mesh axis and role."""
    totals: dict[tuple[str, str], WireTraffic] = {}
    for program, times in micro_batch_programs(graph).runs:
        for eqn in filter(is_start, program.eqns):
            axis_and_role = eqn.kwargs["axis"], role(eqn)
            earlier = totals.get(axis_and_role, WireTraffic())
            coded = Counter(dict(earlier.coded))
            if isinstance(eqn.kwargs["dtype"], Coded):
                coded[str(eqn.kwargs["dtype"])] += times * len(eqn.outs)
            totals[axis_and_role] = WireTraffic(
                earlier.collectives + times,
                earlier.values + times * len(eqn.outs),
                earlier.bytes + times * rules(eqn).wire_bytes(eqn, graph.axes),
                tuple(sorted(coded.items())),
            )
    return dict(sorted(totals.items()))
