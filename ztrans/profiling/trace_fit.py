"""Trace fit: the links that explain when the messages of a step were done.

Messages queue behind each other and share wires, so the duration of one of them says little about its link. So all
messages are simulated from the times at which they were issued, and the figures of the links are changed until the
simulated messages end when the measured ones did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..planning.cluster import Link
from ..planning.event_simulator import Message, play
from .link_fit import Figures, solve

_MOST = 300  # messages that are simulated: the first of a step tell enough
_PRIOR = 0.3  # messages that each earlier figure counts for: messages of equal size do not tell latency from bandwidth
_NOISE = 50e-6  # seconds in which a message is issued, and noticed to be done


class Observed(NamedTuple):
    """One measured message: its mesh axis and the ranks of that, its kind of collective, the bytes that a rank
    received, its communicator, and seconds: when it was issued, when it was done, how long issuing it took and how
    long making values of its bytes took."""

    axis: str
    ranks: int
    kind: str
    received: int
    lane: str
    issued: float
    done: float
    spent: float = 0.0
    unpacked: float = 0.0


def explain(links: Sequence[tuple[str, Link]], observed: Sequence[Observed]) -> tuple[tuple[str, Link], ...]:
    """`links` with the latency, bandwidth and efficiencies with which `observed` end when they did.

    Figures that the messages say nothing about stay as they were, and so do `hop`, `host`, `call` and `unpack`.

    >>> slow = [Observed("dp", 2, "all_gather", 10**6, "dp gather", k * 0.5, k * 0.5 + 0.1) for k in range(3)]
    >>> ((_, link),) = explain((("dp", Link("wire", 1e-4, 1e9)),), slow)
    >>> f"{link.bandwidth:.0e} B/s"
    '1e+07 B/s'
    """
    observed = sorted(observed, key=lambda m: m.issued)[:_MOST]
    axes = [axis for axis, _ in links]
    figures = Figures([link for _, link in links], [(axes.index(m.axis), m.kind) for m in observed])
    took = [max(m.done - m.issued, 0.0) + _NOISE for m in observed]
    slow = Figures([_slow(link, axis, observed) for axis, link in links], figures.seen)
    predict = lambda values: _durations(dict(zip(axes, figures.put(values.tolist()))), observed)
    fitted = solve(predict, took, figures.start, _PRIOR, slow.start)
    return tuple(zip(axes, figures.put(fitted)))


def _slow(link: Link, axis: str, observed: Sequence[Observed]) -> Link:
    """`link` with the bandwidth that the largest message would have had if no other used the wire."""
    sizes = [(m.received, m.done - m.issued) for m in observed if m.axis == axis and m.done > m.issued]
    received, seconds = max(sizes, default=(0, 0.0))
    return dataclasses.replace(link, bandwidth=received / seconds) if received else link


def _durations(links: Mapping[str, Link], observed: Sequence[Observed]) -> list[float]:
    """The seconds from issue to end of every message, simulated."""
    sent = []
    for k, m in enumerate(observed):
        link = links[m.axis]
        sent.append(Message(k, len(observed), m.lane, link.name, *link.seconds(m.kind, m.received, m.ranks)))
    simulated = play([*(b.issued - a.issued for a, b in pairwise(observed)), 0.0], sent)
    return [end + observed[0].issued - m.issued + _NOISE for end, m in zip(simulated.end, observed)]
