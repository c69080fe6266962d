"""The levers of a program: choices between memory and time that drop a gather.

A kind of lever is a function in `_KINDS`, which finds its levers in a program. A `ProgramLever` says what it does to
the program. Everything else follows from that: the numbers that the solver and its bound need (`formulate`), the names
in a plan, and the program in the order of a plan (`realise`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from ..ir.axes import neighbour_count, whole_axis
from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Var
from ..ir.layout import bytes_on_first_rank
from ..rewrites.neighbours import gather_of_parts, kept_part
from .buffers import Buffer
from .skeleton import Collective, Skeleton
from .solver.problem import LeverKind


@dataclass(frozen=True, eq=False)
class ProgramLever:
    """What a lever does to a program.

    Attributes:
        kind: its kind.
        name: its name in a plan, if it sends nothing. Otherwise a plan names the gathers that it sends.
        drops: the gather that is not sent, by index.
        sends: the gathers that are sent in its place.
        eqns: the equations that it adds, each with the operation before which it runs. They run after the waits there.
        reads: the values that are read in place of others, which the program no longer has.
        buffers: the bytes that it keeps live.
        note: a note of the plan, with `{count}` for the number of pulled levers that have it.
    """

    kind: LeverKind
    name: str
    drops: int
    sends: tuple[Collective, ...] = ()
    eqns: tuple[tuple[int, Eqn], ...] = ()
    reads: Mapping[Var, Var] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    note: str = ""

    @property
    def slots_held(self) -> int:
        """The number of slots at which its bytes are live."""
        return sum(buffer.last + 1 - buffer.first for buffer in self.buffers)


WHOLE = LeverKind("whole", shares=(0.0, 0.125, 0.25, 0.5, 0.75, 1.0))
PARTS = LeverKind("parts", shares=(0.0, 0.5, 1.0))


def _keep_whole(s: Skeleton) -> Iterator[ProgramLever]:
    """Do not gather a value again: the value of the earlier gather stays live from its last use there to this use."""
    for i, earlier in enumerate(s.repeats):
        if earlier is None:
            continue
        again = s.gathers[i]
        size = rules(again.start).value_bytes(again.start, 0, s.graph.axes)
        yield ProgramLever(
            WHOLE,
            again.name,
            drops=i,
            reads={again.value: s.gathers[earlier].value},
            buffers=idle_value(size, s.spans[earlier].last, s.spans[i].first),
        )


def idle_value(size: int, last: int, use: int) -> tuple[Buffer, ...]:
    """The buffer of a value that is kept from one use to another one; none if it is live anyway.

    >>> idle_value(8, 2, 5), idle_value(8, 2, 3)
    ((Buffer(bytes=8, first=6, last=9),), ())
    """
    return (Buffer(size, 2 * last + 2, 2 * use - 1),) if use > last + 1 else ()


def _keep_parts(s: Skeleton) -> Iterator[ProgramLever]:
    """Gather a value again among neighbours, each of which keeps a part of the earlier value in between.

    A part is copied where the earlier value is waited for. The options are axes such as dp/8.
    """
    sizes = s.graph.axes
    repeats = sum(earlier is not None for earlier in s.repeats)
    for i, earlier in enumerate(s.repeats):
        if earlier is None:
            continue
        replaced = s.gathers[i]
        for option in s.lever_options:
            axis = whole_axis(option)
            count = neighbour_count(option) or 1
            divides = 1 < count < sizes.get(axis, 0) and sizes[axis] % count == 0
            if not divides or replaced.start.kwargs["axis"] != axis:
                continue
            copied_at = s.spans[earlier].first
            part = kept_part(s.gathers[earlier].wait, replaced.start, count)
            start = gather_of_parts(part[-1].out, replaced.start)
            gather = dataclasses.replace(replaced, start=start, arrival=None)
            size = bytes_on_first_rank(part[-1].out, {**sizes, option: count})
            yield ProgramLever(
                PARTS,
                gather.name,
                drops=i,
                sends=(gather,),
                eqns=tuple((copied_at, e) for e in part),
                buffers=(Buffer(size, 2 * copied_at, 2 * s.spans[i].first),),
                note=f"each {count} neighbours of {axis} keep {{count}} of the {repeats} values that are gathered "
                f"again, a part on each",
            )


# Where several levers drop the same gather, a search replaces a lever of a later kind by one of an earlier kind.
_KINDS: tuple[Callable[[Skeleton], Iterator[ProgramLever]], ...] = (_keep_whole, _keep_parts)


@cached_on_graph
def program_levers(s: Skeleton) -> tuple[ProgramLever, ...]:
    """The levers of a program by kind. Of each kind, the ones that keep bytes for the shortest time come first."""
    levers: list[ProgramLever] = []
    for levers_of_kind in _KINDS:
        levers += sorted(levers_of_kind(s), key=lambda lever: lever.slots_held)
    return tuple(levers)


def pulled_levers(s: Skeleton, indices: Iterable[int]) -> list[ProgramLever]:
    """Some levers of a program, in the order of the gathers that they drop."""
    levers = [program_levers(s)[i] for i in sorted(indices)]
    return sorted(levers, key=lambda lever: lever.drops)


@cached_on_graph
def all_gathers(s: Skeleton) -> tuple[Collective, ...]:
    """All gathers that a plan may send: first the gathers of the program, then the gathers of levers."""
    in_order = sorted(program_levers(s), key=lambda lever: lever.drops)
    return (*s.gathers, *chain.from_iterable(lever.sends for lever in in_order))


@cached_on_graph
def with_all_axes(s: Skeleton) -> Graph:
    """The program with the axes of all gathers that a plan may send."""
    axes = [gather.start.kwargs["axis"] for gather in all_gathers(s)]
    new_axes = dict.fromkeys(axis for axis in axes if axis not in s.graph.axes)
    return s.graph.replace(joint=(*s.graph.joint, *new_axes)) if new_axes else s.graph


def lever_notes(pulled: Iterable[ProgramLever]) -> list[str]:
    """The notes of a plan on its levers."""
    counts = Counter(lever.note for lever in pulled if lever.note)
    return [note.replace("{count}", str(count)) for note, count in counts.items()]
