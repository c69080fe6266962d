"""Pair the start of each collective with its waits.

equation 4:  f, g = all_gather([a, b], axis=dp)        PairedStart(start, index=4, waits=(5, 9), first_wait=5)
equation 5:  x = wait(f)                               PairedWait(that, member=0)
equation 9:  y = wait(g)                               PairedWait(that, member=1)

Copies between two memories are paired with their waits in the same way if a caller asks for copies.

A gather or a copy may start in one step, with its wait in the next. Then a program has two of them: a start without
waits, for the next step, and a start at index -1, in the previous step, with its waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .cached_analysis import cached_on_graph
from .collectives import is_start, rules
from .graph import Eqn, Graph, Var


@dataclass(frozen=True, eq=False)
class PairedStart:
    """A collective of a program, or a copy between two memories.

    Attributes:
        start: the equation that starts it.
        index: the index of that equation in the program; -1 if it ran in the previous step.
        waits: the indices of the waits for its members. A result of the user's own collective may have no wait.
        first_wait: the first of these indices; without a wait, the number of equations of the program.
    """

    start: Eqn
    index: int
    waits: tuple[int, ...]
    first_wait: int


@dataclass(frozen=True, eq=False)
class PairedWait:
    """A wait of a program: its collective, and the number of the member."""

    started: PairedStart
    member: int

    @property
    def start(self) -> Eqn:
        """The equation that starts the collective."""
        return self.started.start


@dataclass(frozen=True, eq=False)
class Pairs:
    """The collectives of a program, and the waits for them."""

    starts: Mapping[Eqn, PairedStart]  # by the starting equation, in program order
    waits: Mapping[Eqn, PairedWait]  # by the waiting equation


@cached_on_graph
def pair(graph: Graph, include_user: bool = False, include_copies: bool = False) -> Pairs:
    """Pair the start of every collective of a program with the waits for its members.

    Args:
        graph: the program.
        include_user: include the collectives that the user's step calls itself.
        include_copies: include the copies between device and host.
    """

    def is_included(start: Eqn) -> bool:
        if rules(start).copies:
            return include_copies
        return include_user or is_start(start)

    index_of: dict[Eqn, int] = {}  # of each start
    wait_eqns: list[Eqn] = []
    first_waits: dict[Var, int] = {}  # for each future
    for index, e in enumerate(graph.eqns):
        if rules(e).waits:
            wait_eqns.append(e)
            first_waits.setdefault(e.ins[0], index)
        elif rules(e).starts and is_included(e):
            index_of[e] = index

    starts: dict[Eqn, PairedStart] = {}
    members = _carried_members(graph, index_of, first_waits)
    for e, index in index_of.items():
        indices = tuple(first_waits[v] for v in e.results if v in first_waits)
        starts[e] = PairedStart(e, index, indices, min(indices, default=len(graph.eqns)))
        for k, v in enumerate(e.results):
            members[v] = PairedWait(starts[e], k)
    waits = {e: members[e.ins[0]] for e in wait_eqns if e.ins[0] in members}
    return Pairs(starts, waits)


def _carried_members(
    graph: Graph, starts: Iterable[Eqn], first_waits: Mapping[Var, int]
) -> dict[Var, PairedWait]:
    """The futures that the previous step started, as members of the equations that started them there."""
    input_of = graph.carried_futures
    members: dict[Var, PairedWait] = {}
    if not input_of:
        return members
    # A gather or a copy starts in every step alike, so this step's equation stands for that of the previous step.
    for e in starts:
        futures = {k: input_of[v] for k, v in enumerate(e.results) if v in input_of}
        if not futures:
            continue
        indices = tuple(first_waits[v] for v in futures.values())
        paired = PairedStart(e, -1, indices, min(indices))
        for k, v in futures.items():
            members[v] = PairedWait(paired, k)
    return members
