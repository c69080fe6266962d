"""The figures of links that explain measured messages best.

A message of kind k takes `latency + bytes / (bandwidth * efficiency[k])`, with one latency for all kinds. The fit
minimises the error of the logarithm of the duration, so small and large messages have the same weight. Small errors are
noise, and count squared. Large errors count linearly, so a few messages that were delayed have little weight.

The messages of a step queue behind each other and share wires, so the duration of one says little about its link. For
them, all messages are simulated from the times at which they were issued, and the figures are changed until the
simulated messages end when the measured ones did. The costs of sending and of unpacking a message are fitted to the
seconds of compute that these took.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..ir.dependencies import grouped
from ..planning.cluster import Link
from ..planning.network import Message
from ..planning.play import play

# The weight of each initial figure, in messages. The messages of a step may be of one size, which cannot separate
# latency from bandwidth, so there earlier figures weigh more.
_PRIOR = 0.02
_PRIOR_IN_STEP = 0.3
# Errors of a logarithm below this count squared.
_NOISE = 0.25
# The most Newton steps, and how often a step that does not reduce the loss is halved.
_STEPS = 60
_HALVINGS = 8
# Kinds whose bandwidths differ by a smaller share than this get the same bandwidth.
_ALIKE = 0.05
# Messages of a step that are simulated: the first ones suffice.
_MOST = 300
# The seconds that it takes to issue a message, and to notice that it is done.
_ISSUE = 50e-6


class Sample(NamedTuple):
    """One message: its kind of collective, the bytes that a rank received, and its duration in seconds."""

    kind: str
    received: float
    seconds: float


class Observed(NamedTuple):
    """One measured message of a step. All times are in seconds.

    Attributes:
        axis, ranks: the mesh axis, and how many ranks it has.
        kind: of the collective.
        received: the bytes that a rank received.
        lane: the queue of its communicator.
        issued, done: when it was issued, and when it was done.
        spent: how long it took to issue it.
        unpacked: how long it took to turn its bytes into values.
    """

    axis: str
    ranks: int
    kind: str
    received: int
    lane: str
    issued: float
    done: float
    spent: float = 0.0
    unpacked: float = 0.0


def fit(link: Link, samples: Sequence[Sample], ranks: int) -> Link:
    """`link` with the latency, bandwidth and efficiencies that explain `samples` best.

    Figures that the samples do not determine stay as they were: the bandwidth if all samples are small, and always
    `hop`, `overhead`, `byte_overhead` and `unpack`.

    >>> wire = Link("wire", latency=1e-4, bandwidth=1e9)
    >>> fitted = fit(wire, [Sample("all_gather", n, 1e-3 + n / 1e8) for n in (1e4, 1e5, 1e6)], ranks=2)
    >>> f"{fitted.latency:.4f} s, {fitted.bandwidth:.1e} B/s"
    '0.0010 s, 1.0e+08 B/s'
    """
    # Logarithms need positive bytes and seconds.
    samples = [sample for sample in samples if sample.received > 0 and sample.seconds > 0]
    figures = Figures((link,), [(0, sample.kind) for sample in samples])

    def predict(values: np.ndarray) -> list[float]:
        (new_link,) = figures.links_with(values.tolist())
        durations = []
        for sample in samples:
            latency, seconds = new_link.seconds(sample.kind, sample.received, ranks)
            durations.append(latency + seconds)
        return durations

    took = [sample.seconds for sample in samples]
    (fitted,) = figures.links_with(solve(predict, took, figures.start))
    efficiency = [(kind, share) for kind, share in fitted.efficiency if abs(share - 1) > _ALIKE]
    return dataclasses.replace(fitted, efficiency=tuple(efficiency))


def fit_to_step(
    links: Sequence[tuple[str, Link]], observed: Sequence[Observed]
) -> tuple[tuple[str, Link], ...]:
    """`links` with the latency, bandwidth and efficiencies with which simulated messages end closest to `observed`.

    Figures that the messages do not determine stay as they were, and so do `hop`, `overhead`, `byte_overhead` and
    `unpack`.

    >>> slow = [Observed("dp", 2, "all_gather", 10**6, "dp gather", k * 0.5, k * 0.5 + 0.1) for k in range(3)]
    >>> ((_, link),) = fit_to_step((("dp", Link("wire", 1e-4, 1e9)),), slow)
    >>> f"{link.bandwidth:.0e} B/s"
    '1e+07 B/s'
    """
    observed = sorted(observed, key=lambda message: message.issued)[:_MOST]
    axes = [axis for axis, _ in links]
    kinds = [(axes.index(message.axis), message.kind) for message in observed]
    figures = Figures([link for _, link in links], kinds)
    # From figures that are far too fast, no step shows a direction: all messages end as soon as they are issued. So the
    # fit is tried from slow figures too.
    slow = Figures([_slowed(link, axis, observed) for axis, link in links], kinds)

    def predict(values: np.ndarray) -> list[float]:
        new_links = dict(zip(axes, figures.links_with(values.tolist())))
        return _simulated_seconds(new_links, observed)

    took = [max(message.done - message.issued, 0.0) + _ISSUE for message in observed]
    fitted = solve(predict, took, figures.start, _PRIOR_IN_STEP, slow.start)
    return tuple(zip(axes, figures.links_with(fitted)))


def _slowed(link: Link, axis: str, observed: Sequence[Observed]) -> Link:
    """`link` with the bandwidth at which the largest message moved, if no other message used the wire."""
    largest = (0, 0.0)  # its bytes and its seconds
    for message in observed:
        took = message.done - message.issued
        if message.axis == axis and took > 0:
            largest = max(largest, (message.received, took))
    received, seconds = largest
    return dataclasses.replace(link, bandwidth=received / seconds) if received else link


def _simulated_seconds(links: Mapping[str, Link], observed: Sequence[Observed]) -> list[float]:
    """The simulated duration of every message, from its issue to its end."""
    messages = []
    for k, message in enumerate(observed):
        link = links[message.axis]
        parts = link.seconds(message.kind, message.received, message.ranks)
        messages.append(Message(k, len(observed), message.lane, link.name, *parts))
    gaps = [later.issued - earlier.issued for earlier, later in pairwise(observed)]
    ends = play([*gaps, 0.0], messages).end
    begin = observed[0].issued if observed else 0.0
    return [begin + end - message.issued + _ISSUE for end, message in zip(ends, observed)]


def with_send_cost(link: Link, messages: Sequence[tuple[float, float]]) -> Link:
    """`link` with the `overhead` and `byte_overhead` that explain best how much compute it took to send messages.

    Each message is a pair of its bytes and the seconds of compute that it took.

    >>> fitted = with_send_cost(Link("wire", 1e-4, 1e9), [(n, 2e-4 + n / 1e9) for n in (1e3, 1e5, 1e6)])
    >>> f"{fitted.overhead:.0e} s, {fitted.byte_overhead:.0e} s/B"
    '2e-04 s, 1e-09 s/B'
    """
    messages = [message for message in messages if min(message) > 0]
    if not messages:
        return link
    received, seconds = np.array(messages).T
    start = [max(link.overhead, 1e-6), max(link.byte_overhead, 1e-12)]
    # Half of the time for the calls, and half of it for the bytes.
    halves = [seconds.mean() / 2, seconds.sum() / received.sum() / 2]

    def predict(figures: np.ndarray) -> np.ndarray:
        return figures[0] + figures[1] * received

    overhead, byte_overhead = solve(predict, list(seconds), start, second_start=halves)
    return dataclasses.replace(link, overhead=overhead, byte_overhead=byte_overhead)


def with_unpack_cost(link: Link, messages: Sequence[tuple[str, float, float]]) -> Link:
    """`link` with the `unpack` of each kind: the seconds that it takes to turn a received byte into values.

    Each message has its kind, its bytes, and the seconds that it took to turn them into values.

    >>> with_unpack_cost(Link("wire", 1e-4, 1e9), [("all_gather", 1e6, 1e-3), ("all_gather", 3e6, 7e-3)]).unpack
    (('all_gather', 2e-09),)
    """
    by_kind = grouped((kind, (received, seconds)) for kind, received, seconds in messages)
    rates = dict(link.unpack)
    for kind, of_kind in by_kind.items():
        received, seconds = map(sum, zip(*of_kind))
        if received > 0:
            rates[kind] = seconds / received
    return dataclasses.replace(link, unpack=tuple(sorted(rates.items())))


class Figures:
    """The figures of links that messages determine, as one vector.

    For each link with messages these are its latency, its bandwidth, and the efficiencies of all kinds but the first.
    The bandwidth is that of gathers; without gathers, that of the first kind.
    """

    def __init__(self, links: Sequence[Link], messages: Sequence[tuple[int, str]]) -> None:
        """Each message has the index of its link, and its kind."""
        self.links = links
        self.kinds: list[list[str]] = []
        of_links = grouped(messages)
        for i in range(len(links)):
            kinds = sorted(set(of_links.get(i, ())))
            kinds.sort(key=lambda kind: kind != "all_gather")
            self.kinds.append(kinds)

    @property
    def start(self) -> list[float]:
        """The figures that the links have."""
        values: list[float] = []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                efficiency = dict(link.efficiency)
                values += [max(link.latency, 1e-6), link.bandwidth]
                values += [efficiency.get(kind, 1.0) for kind in kinds[1:]]
        return values

    def links_with(self, values: Sequence[float]) -> list[Link]:
        """The links with the figures `values`."""
        rest = iter(values)
        new_links = []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                link = dataclasses.replace(link, latency=next(rest), bandwidth=next(rest))
                efficiency = dict(link.efficiency)
                for kind in kinds[1:]:
                    efficiency[kind] = next(rest)
                link = dataclasses.replace(link, efficiency=tuple(sorted(efficiency.items())))
            new_links.append(link)
        return new_links


def solve(
    predict: Callable[[np.ndarray], ArrayLike],
    took: Sequence[float],
    start: Sequence[float],
    prior: float = _PRIOR,
    second_start: Sequence[float] = (),
) -> list[float]:
    """Find the positive figures whose predictions are closest to `took`, by damped Newton steps in their logarithms.

    Args:
        predict: the durations of the messages, given the figures.
        took: the measured durations.
        start: the initial figures.
        prior: the weight of each initial figure, in messages.
        second_start: other initial figures. If `start` is so far off that no message shows a direction, the steps from
            here may succeed; the better result is returned.

    >>> [round(x, 1) for x in solve(lambda x: [x[0], x[0] * x[1]], [3.0, 6.0], [1.0, 1.0])]
    [3.0, 2.0]
    """
    if not start:
        return []
    first = np.log(start)
    log_took = np.log(took)

    def error(figures: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(figures))) - log_took

    def loss(figures: np.ndarray, errors: np.ndarray) -> float:
        return _size(errors) + prior * _size(figures - first)

    def newton_step(figures: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Each loss is replaced by a parabola with the same slope, as in iteratively reweighted least squares."""
        directions = np.eye(len(figures))
        slope = np.stack([(error(figures + 1e-3 * each) - errors) / 1e-3 for each in directions])
        weight = 1 / np.maximum(np.abs(errors), _NOISE)
        prior_weight = prior / np.maximum(np.abs(figures - first), _NOISE)
        gradient = slope @ (weight * errors) + prior_weight * (figures - first)
        curvature = (slope * weight) @ slope.T + np.diag(prior_weight)
        return np.clip(np.linalg.solve(curvature, gradient), -1, 1)

    def descend(figures: np.ndarray) -> tuple[float, list[float]]:
        errors = error(figures)
        for _ in range(_STEPS):
            step = newton_step(figures, errors)
            for _ in range(_HALVINGS):
                next_errors = error(figures - step)
                if loss(figures - step, next_errors) < loss(figures, errors):
                    break
                step = step / 2
            else:
                break  # no step reduces the loss
            figures = figures - step
            errors = next_errors
            if np.abs(step).max() < 1e-4:
                break
        return loss(figures, errors), np.exp(figures).tolist()

    starts = [figures for figures in (start, second_start) if len(figures)]
    _, best = min(descend(np.log(figures)) for figures in starts)
    return best


def _size(errors: np.ndarray) -> float:
    """The loss of errors: quadratic below `_NOISE`, linear above."""
    errors = np.abs(errors)
    return np.where(errors < _NOISE, errors**2 / _NOISE, 2 * errors - _NOISE).sum()
