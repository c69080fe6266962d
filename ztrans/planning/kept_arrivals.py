"""Let a later reader of a leaf on the host find the copy that an earlier one has brought to the device.

    w' = wait(to_device(w)); dx = mm(dy, w')           w' = wait(to_device(w)); dx = mm(dy, w')
    ...                                          -->   ...
    w2 = wait(to_device(w)); w1 = sub(w2, m)           w1 = sub(w', m)

A parameter that backward has brought is still there for an update that follows soon, and the last layers of forward are
still there for backward. In between the value takes memory, so the shortest stays come first, while there is room. The
other copies need room too: `place_copies` tries several shares of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..ir.copies import is_copy
from ..ir.dependencies import grouped
from ..ir.graph import Eqn, Graph, users
from ..ir.liveness import liveness
from ..ir.rewriter import Rewriter
from .buffers import device_bytes


class _Stay(NamedTuple):
    """A value that stays on the device instead of being copied there again.

    Attributes:
        begin, end: the equations in between, by index, at which only the stay needs its storage.
        bytes: the size of the value.
        arrival: the wait for the copy that brings it.
        again: the start of the copy that is not needed.
    """

    begin: int
    end: int
    bytes: int
    arrival: Eqn
    again: Eqn


def keep_arrivals(graph: Graph, room: np.ndarray) -> Graph:
    """The program without the copies to the device of values that can stay there.

    Args:
        graph: a program that copies each value when it is needed.
        room: the bytes that stays may take at each of its equations.
    """
    if graph.micro > 1:  # forward and the update are in programs that run apart
        return graph
    room = room.copy()
    readers = users(graph)
    new = Rewriter(graph)
    for stay in sorted(_stays(graph), key=lambda stay: stay.end - stay.begin):
        if (room[stay.begin : stay.end] < stay.bytes).any():
            continue
        room[stay.begin : stay.end] -= stay.bytes
        (wait,) = readers[stay.again.out]
        new.drop(stay.again)
        new.drop(wait)
        new.alias(wait.out, stay.arrival.out)
    return new.applied()


def _stays(graph: Graph) -> list[_Stay]:
    """Each copy of a leaf to the device that follows an earlier one of the same leaf."""
    index = {e: i for i, e in enumerate(graph.eqns)}
    readers = users(graph)
    lifetimes = liveness(graph)
    size = device_bytes(graph)
    leaves = set(graph.state)
    copies = [
        e for e in graph.eqns if is_copy(e) and e.out.memory == "device" and e.ins[0] in leaves
    ]
    stays = []
    for of_leaf in grouped((e.ins[0], e) for e in copies).values():
        for earlier, again in pairwise(of_leaf):
            (arrival,) = readers[earlier.out]
            begin = lifetimes.last[lifetimes.root[arrival.out]] + 1
            stays.append(_Stay(begin, index[again], size(arrival.out), arrival, again))
    return stays
