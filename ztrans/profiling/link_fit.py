"""Fit the figures of links to measured messages.

A message of kind k takes `latency + bytes / (bandwidth * efficiency[k])`, with one latency for all kinds. The fit
minimises the error of the logarithm of the duration, so small and large messages have the same weight. Small errors are
noise, and count squared. Large errors count linearly, so a few delayed messages have little weight.

The messages of a step queue up and share wires, so the duration of one says little about its link. Instead, the fit
simulates all of them from the times at which they were issued, and changes the figures until the simulated messages end
when the measured ones did. The costs of sending and of unpacking a message are fitted to measured seconds of compute.
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

# The weight of each initial figure, in messages. It is higher in a step, whose messages may all have one size, which
# cannot separate latency from bandwidth.
_PRIOR = 0.02
_PRIOR_IN_STEP = 0.3
# Errors of a logarithm below this count squared.
_NOISE = 0.25
# The most Newton steps, and the most halvings of a step that does not reduce the loss.
_STEPS = 60
_HALVINGS = 8
# Kinds whose bandwidths differ by a smaller share than this get the same bandwidth.
_SAME_SHARE = 0.05
# The first messages of a step suffice: at most this many are simulated.
_MOST = 300
# The seconds to issue a message, and to notice that it is done.
_ISSUE = 50e-6


class Sample(NamedTuple):
    """One message: its kind of collective, the bytes that a rank received, and its duration in seconds."""

    kind: str
    received: float
    seconds: float


class Observed(NamedTuple):
    """One measured message of a step. All times are in seconds.

    Attributes:
        axis, ranks: the mesh axis, and its number of ranks.
        kind: the kind of collective.
        received: the bytes that a rank received.
        lane: the queue of its communicator.
        issued, done: the times when it was issued, and when it was done.
        spent: the duration of issuing it.
        unpacked: the duration of turning its bytes into values.
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

    Figures that the samples do not determine keep their values: the bandwidth if all samples are small, and always
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
            latency, transfer = new_link.seconds(sample.kind, sample.received, ranks)
            durations.append(latency + transfer)
        return durations

    seconds = [sample.seconds for sample in samples]
    (fitted_link,) = figures.links_with(solve(predict, seconds, figures.start))
    efficiency = []
    for kind, share in fitted_link.efficiency:
        if abs(share - 1) > _SAME_SHARE:
            efficiency.append((kind, share))
    return dataclasses.replace(fitted_link, efficiency=tuple(efficiency))


def fit_to_step(
    links: Sequence[tuple[str, Link]], observed: Sequence[Observed]
) -> tuple[tuple[str, Link], ...]:
    """`links` with the latency, bandwidth and efficiencies that make simulated messages end closest to `observed`.

    Figures that the messages do not determine keep their values, and so do `hop`, `overhead`, `byte_overhead` and
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
    # If the figures are far too fast, all messages end as soon as they are issued, and the loss has no slope. So the
    # fit also starts from slow figures.
    slow = Figures([_slowed(link, axis, observed) for axis, link in links], kinds)

    def predict(values: np.ndarray) -> list[float]:
        new_links = dict(zip(axes, figures.links_with(values.tolist())))
        return _simulated_seconds(new_links, observed)

    seconds = [max(message.done - message.issued, 0.0) + _ISSUE for message in observed]
    values = solve(predict, seconds, figures.start, _PRIOR_IN_STEP, slow.start)
    return tuple(zip(axes, figures.links_with(values)))


def _slowed(link: Link, axis: str, observed: Sequence[Observed]) -> Link:
    """`link` with the bandwidth of the largest message, as if no other message had used the wire."""
    largest = (0, 0.0)  # its bytes and its seconds
    for message in observed:
        duration = message.done - message.issued
        if message.axis == axis and duration > 0:
            largest = max(largest, (message.received, duration))
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
    """`link` with the `overhead` and `byte_overhead` that best explain the compute spent on sending messages.

    Each message is a pair: its bytes, and the seconds of compute that it took.

    >>> fitted = with_send_cost(Link("wire", 1e-4, 1e9), [(n, 2e-4 + n / 1e9) for n in (1e3, 1e5, 1e6)])
    >>> f"{fitted.overhead:.0e} s, {fitted.byte_overhead:.0e} s/B"
    '2e-04 s, 1e-09 s/B'
    """
    messages = [message for message in messages if min(message) > 0]
    if not messages:
        return link
    received, seconds = np.array(messages).T
    start = [max(link.overhead, 1e-6), max(link.byte_overhead, 1e-12)]
    # The second start gives half of the time to the calls, and half of it to the bytes.
    halves = [seconds.mean() / 2, seconds.sum() / received.sum() / 2]

    def predict(figures: np.ndarray) -> np.ndarray:
        return figures[0] + figures[1] * received

    overhead, byte_overhead = solve(predict, list(seconds), start, second_start=halves)
    return dataclasses.replace(link, overhead=overhead, byte_overhead=byte_overhead)


def with_unpack_cost(link: Link, messages: Sequence[tuple[str, float, float]]) -> Link:
    """`link` with the `unpack` of each kind: the seconds per received byte to turn bytes into values.

    Each message has its kind, its bytes, and the seconds to turn them into values.

    >>> with_unpack_cost(Link("wire", 1e-4, 1e9), [("all_gather", 1e6, 1e-3), ("all_gather", 3e6, 7e-3)]).unpack
    (('all_gather', 2e-09),)
    """
    by_kind = grouped((kind, (received, seconds)) for kind, received, seconds in messages)
    rates = dict(link.unpack)
    for kind, kind_messages in by_kind.items():
        received = sum(n for n, _ in kind_messages)
        seconds = sum(duration for _, duration in kind_messages)
        if received > 0:
            rates[kind] = seconds / received
    return dataclasses.replace(link, unpack=tuple(sorted(rates.items())))


class Figures:
    """The figures of links that messages determine, as one vector.

    For each link with messages these are its latency, its bandwidth, and the efficiencies of all kinds but the first.
    The first kind is the gather if there is one. The bandwidth is the bandwidth of the first kind.
    """

    def __init__(self, links: Sequence[Link], messages: Sequence[tuple[int, str]]) -> None:
        """Each message has the index of its link, and its kind."""
        self.links = links
        self.kinds: list[list[str]] = []
        kinds_by_link = grouped(messages)
        for i in range(len(links)):
            kinds = sorted(set(kinds_by_link.get(i, ())))
            kinds.sort(key=lambda kind: kind != "all_gather")
            self.kinds.append(kinds)

    @property
    def start(self) -> list[float]:
        """The present figures of the links."""
        values: list[float] = []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                efficiency = dict(link.efficiency)
                values += [max(link.latency, 1e-6), link.bandwidth]
                values += [efficiency.get(kind, 1.0) for kind in kinds[1:]]
        return values

    def links_with(self, values: Sequence[float]) -> list[Link]:
        """The links with `values` as their figures."""
        remaining = iter(values)
        new_links = []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                link = dataclasses.replace(link, latency=next(remaining), bandwidth=next(remaining))
                efficiency = dict(link.efficiency)
                for kind in kinds[1:]:
                    efficiency[kind] = next(remaining)
                link = dataclasses.replace(link, efficiency=tuple(sorted(efficiency.items())))
            new_links.append(link)
        return new_links


def solve(
    predict: Callable[[np.ndarray], ArrayLike],
    durations: Sequence[float],
    start: Sequence[float],
    prior: float = _PRIOR,
    second_start: Sequence[float] = (),
) -> list[float]:
    """Find the positive figures that predict `durations` best, by damped Newton steps in their logarithms.

    Args:
        predict: returns the durations of the messages, given the figures.
        durations: the measured durations of the messages.
        start: the initial figures.
        prior: the weight of each initial figure, in messages.
        second_start: other initial figures. If `start` is so far off that the loss has no slope, the steps from here
            may succeed. The better result is returned.

    >>> [round(x, 1) for x in solve(lambda x: [x[0], x[0] * x[1]], [3.0, 6.0], [1.0, 1.0])]
    [3.0, 2.0]
    """
    if not start:
        return []
    log_start = np.log(start)
    log_durations = np.log(durations)

    def error(figures: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(figures))) - log_durations

    def loss(figures: np.ndarray, errors: np.ndarray) -> float:
        return _loss(errors) + prior * _loss(figures - log_start)

    def newton_step(figures: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Each loss is replaced by a parabola with the same slope, as in iteratively reweighted least squares."""
        slopes = []
        for direction in np.eye(len(figures)):
            slopes.append((error(figures + 1e-3 * direction) - errors) / 1e-3)
        slope = np.stack(slopes)
        weight = 1 / np.maximum(np.abs(errors), _NOISE)
        prior_weight = prior / np.maximum(np.abs(figures - log_start), _NOISE)
        gradient = slope @ (weight * errors) + prior_weight * (figures - log_start)
        curvature = (slope * weight) @ slope.T + np.diag(prior_weight)
        # In one step a figure changes by a factor of e at most.
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


def _loss(errors: np.ndarray) -> float:
    """The loss of errors: quadratic below `_NOISE`, linear above."""
    errors = np.abs(errors)
    return np.where(errors < _NOISE, errors**2 / _NOISE, 2 * errors - _NOISE).sum()
