"""Pairing: which waits belong to which start, and at which index of the program they are.

equation 4:  f, g = all_gather([a, b], axis=dp)        Started(start, index=4, waits=(5, 9), first_wait=5)
equation 5:  x = wait(f)                               Waited(that, member=0)
equation 9:  y = wait(g)                               Waited(that, member=1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import Eqn, Graph, Var
from ..relations import kept
from .table import is_start, rules


@dataclass(frozen=True, eq=False)
class Started:
    """A collective of a program.

    Attributes:
        start: the equation that starts it.
        index: the index of that equation in the program.
        waits: the index of the wait for each member. A result of the user's own collective may have no wait.
        first_wait: the least of these, or the number of equations of the program if there is no wait.
    """

    start: Eqn
    index: int
    waits: tuple[int, ...]
    first_wait: int


@dataclass(frozen=True, eq=False)
class Waited:
    """A wait of a program: the collective that it waits for, and the number of the member."""

    started: Started
    member: int

    @property
    def start(self) -> Eqn:
        """The equation that starts the collective."""
        return self.started.start


@dataclass(frozen=True, eq=False)
class Pairs:
    """The collectives of a program, and the waits for them."""

    starts: Mapping[Eqn, Started]  # by the equation that starts it, in program order
    waits: Mapping[Eqn, Waited]  # by the equation that waits


@kept
def pair(graph: Graph, own: bool = False) -> Pairs:
    """Pair the start of every collective of a program with the waits for its members.

    Args:
        graph: the program.
        own: include the collectives that the user's step calls itself.
    """
    is_own = lambda e: not (is_start(e) or rules(e).reads_futures)
    remote = [
        (i, e) for i, e in enumerate(graph.eqns) if rules(e).remote and (own or not is_own(e))
    ]
    waiting = [(i, e) for i, e in remote if rules(e).waits]
    indices = {
        e.ins[0]: i for i, e in reversed(waiting)
    }  # for each future, the index of its first wait
    starts = {e: _started(graph, i, indices) for i, e in remote if rules(e).starts}
    members = {out: Waited(s, k) for s in starts.values() for k, out in enumerate(s.start.results)}
    return Pairs(starts, {e: members[e.ins[0]] for _, e in waiting if e.ins[0] in members})


def _started(graph: Graph, index: int, indices: Mapping[Var, int]) -> Started:
    """The collective that equation `index` starts, given the indices of the waits for each future."""
    start = graph.eqns[index]
    waits = tuple(indices[out] for out in start.results if out in indices)
    return Started(start, index, waits, min(waits, default=len(graph.eqns)))
