"""Trace fit: fit the figures of links to the times at which the messages of a step were done.

Messages queue behind each other and share wires, so the duration of a single message says little about its link. The
fit therefore simulates all messages from the times at which they were issued, and changes the figures of the links
until the simulated messages end when the measured ones did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..planning.cluster import Link
from ..planning.event_simulator import Message, play
from .link_fit import Figures, solve

_MOST = 300  # the most messages that are simulated; the first ones of a step suffice
_PRIOR = 0.3  # the weight of each earlier figure, in messages; equal sizes cannot separate latency from bandwidth
_NOISE = 50e-6  # the seconds that it takes to issue a message, and to notice that it is done


class Observed(NamedTuple):
    """One measured message. All times are in seconds."""

    axis: str
    ranks: int  # of the axis
    kind: str  # of the collective
    received: int  # bytes that a rank received
    lane: str  # the queue of its communicator
    issued: float  # when it was issued
    done: float  # when it was done
    spent: float = 0.0  # how long it took to issue it
    unpacked: float = 0.0  # how long it took to turn its bytes into values


def explain(
    links: Sequence[tuple[str, Link]], observed: Sequence[Observed]
) -> tuple[tuple[str, Link], ...]:
    """`links` with the latency, bandwidth and efficiencies that explain best when the messages `observed` ended.

    Figures that the messages do not determine stay as they were, and so do `hop`, `host`, `call` and `unpack`.

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
    """`link` with the bandwidth at which the largest message moved, if no other message used the wire."""
    sizes = [
        (m.received, m.done - m.issued) for m in observed if m.axis == axis and m.done > m.issued
    ]
    received, seconds = max(sizes, default=(0, 0.0))
    return dataclasses.replace(link, bandwidth=received / seconds) if received else link


def _durations(links: Mapping[str, Link], observed: Sequence[Observed]) -> list[float]:
    """The simulated duration of every message, from its issue to its end."""
    sent = []
    for k, m in enumerate(observed):
        link = links[m.axis]
        sent.append(
            Message(k, len(observed), m.lane, link.name, *link.seconds(m.kind, m.received, m.ranks))
        )
    simulated = play([*(b.issued - a.issued for a, b in pairwise(observed)), 0.0], sent)
    return [end + observed[0].issued - m.issued + _NOISE for end, m in zip(simulated.end, observed)]
