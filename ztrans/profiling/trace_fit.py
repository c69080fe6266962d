"""trace_fit: the links that explain when the messages of a step came.

Messages queue behind each other and share wires, so how long one of them took says little of the
link. All of them are played as they were issued, and the links are changed until they come when
they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..planning.cluster import Link
from ..planning.event_simulator import Message, play
from .link_fit import Figures, solve

_MOST = 300  # messages played: the first of a step tell enough
_PRIOR = 0.3  # messages that each figure from before counts for: equal ones do not tell latency from bandwidth
_NOISE = 50e-6  # seconds in which a message is issued, and noticed to be done


class Observed(NamedTuple):
    """One message: its mesh axis and the ranks of it, its kind of collective, the bytes that a rank
    received, its communicator, the times at which it was issued and done, and the seconds of issuing it and,
    once it had come, of making values of it."""

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
    """`links` with the latency, bandwidth and efficiencies with which `observed` come when they came.

    What the messages do not tell stays as it was; `hop`, `host`, `call` and `unpack` always.

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
    predict = lambda values: _took(dict(zip(axes, figures.put(values))), observed)
    found = solve(predict, took, figures.start, _PRIOR, slow.start)
    return tuple(zip(axes, figures.put(found)))


def _slow(link: Link, axis: str, observed: Sequence[Observed]) -> Link:
    """`link` with the bandwidth that the largest message would have had alone."""
    sizes = [(m.received, m.done - m.issued) for m in observed if m.axis == axis and m.done > m.issued]
    received, seconds = max(sizes, default=(0, 0.0))
    return dataclasses.replace(link, bandwidth=received / seconds) if received else link


def _took(links: Mapping[str, Link], observed: Sequence[Observed]) -> list[float]:
    """The seconds from issue to end of every message, played."""
    sent = []
    for k, m in enumerate(observed):
        link = links[m.axis]
        sent.append(Message(k, len(observed), m.lane, link.name, *link.seconds(m.kind, m.received, m.ranks)))
    played = play([*(b.issued - a.issued for a, b in pairwise(observed)), 0.0], sent)
    return [end + observed[0].issued - m.issued + _NOISE for end, m in zip(played.end, observed)]
