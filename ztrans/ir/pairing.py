"""Which waits belong to which start, and at which index of the program they are.

equation 4:  f, g = all_gather([a, b], axis=dp)        PairedStart(start, index=4, waits=(5, 9), first_wait=5)
equation 5:  x = wait(f)                               PairedWait(that, member=0)
equation 9:  y = wait(g)                               PairedWait(that, member=1)

A copy between two memories is paired with its wait in the same way, for those who ask for copies.

A gather or a copy may start in one step and be waited for in the next. A program has it twice: as a start without
waits, for the next step, and as a start at index -1, in the step before, with its waits.
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
        index: the index of that equation in the program; -1 if it ran in the step before.
        waits: the indices of the waits for its members. A result of the user's own collective may have none.
        first_wait: the least of these, or the number of equations of the program if there is no wait.
    """

    start: Eqn
    index: int
    waits: tuple[int, ...]
    first_wait: int


@dataclass(frozen=True, eq=False)
class PairedWait:
    """A wait of a program: the collective that it waits for, and the number of the member."""

    started: PairedStart
    member: int

    @property
    def start(self) -> Eqn:
        """The equation that starts the collective."""
        return self.started.start


@dataclass(frozen=True, eq=False)
class Pairs:
    """The collectives of a program, and the waits for them."""

    starts: Mapping[Eqn, PairedStart]  # by the equation that starts it, in program order
    waits: Mapping[Eqn, PairedWait]  # by the equation that waits


@cached_on_graph
def pair(graph: Graph, include_user: bool = False, include_copies: bool = False) -> Pairs:
    """Pair the start of every collective of a program with the waits for its members.

    Args:
        graph: the program.
        include_user: include the collectives that the user's step calls itself.
        include_copies: include the copies between the memory of the device and that of the host.
    """

    def is_included(start: Eqn) -> bool:
        if rules(start).copies:
            return include_copies
        return include_user or is_start(start)

    index_of: dict[Eqn, int] = {}  # of the equations that start something
    waiting: list[Eqn] = []
    first_waits: dict[Var, int] = {}
    for index, e in enumerate(graph.eqns):
        if rules(e).waits:
            waiting.append(e)
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
    waits = {e: members[e.ins[0]] for e in waiting if e.ins[0] in members}
    return Pairs(starts, waits)


def _carried_members(
    graph: Graph, starting: Iterable[Eqn], first_waits: Mapping[Var, int]
) -> dict[Var, PairedWait]:
    """The futures that the step before has started, as members of the equations that started them there."""
    before_of = graph.carried_futures
    members: dict[Var, PairedWait] = {}
    if not before_of:
        return members
    # A gather or a copy starts in each step as it did in the one before, so this step's equation stands for that one.
    for e in starting:
        futures = {k: before_of[v] for k, v in enumerate(e.results) if v in before_of}
        if not futures:
            continue
        indices = tuple(first_waits[v] for v in futures.values())
        started = PairedStart(e, -1, indices, min(indices))
        for k, v in futures.items():
            members[v] = PairedWait(started, k)
    return members
