"""Link fit: fit the figures of a link to the measured durations of messages.

A message of kind k takes `latency + bytes / (bandwidth * efficiency[k])`, with one latency for all kinds. The fit
minimises the error of the logarithm of the duration, so small and large messages have the same weight. Small errors are
noise, and count squared. Large errors count linearly, so a few messages that were delayed have little weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..ir.relations import grouped
from ..planning.cluster import Link

_PRIOR = 0.02  # the weight of each initial figure, in messages
_NOISE = 0.25  # errors below this count squared
_STEPS = 60  # the most Newton steps
_HALVINGS = 8  # how often a step that does not reduce the loss is halved
_ALIKE = 0.05  # kinds whose bandwidths differ by a smaller share than this get the same bandwidth


class Sample(NamedTuple):
    """One message: its kind of collective, the bytes that a rank received, and its duration in seconds."""

    kind: str
    received: float
    seconds: float


def fit(link: Link, samples: Sequence[Sample], ranks: int) -> Link:
    """`link` with the latency, bandwidth and efficiencies that explain `samples` best.

    Figures that the samples do not determine stay as they were: the bandwidth if all samples are small, and always
    `hop`, `host`, `call` and `unpack`.

    >>> wire = Link("wire", latency=1e-4, bandwidth=1e9)
    >>> fitted = fit(wire, [Sample("all_gather", n, 1e-3 + n / 1e8) for n in (1e4, 1e5, 1e6)], ranks=2)
    >>> f"{fitted.latency:.4f} s, {fitted.bandwidth:.1e} B/s"
    '0.0010 s, 1.0e+08 B/s'
    """
    samples = [s for s in samples if s.received > 0 and s.seconds > 0]
    figures = Figures((link,), [(0, s.kind) for s in samples])

    def predict(values: np.ndarray) -> list[float]:
        (changed,) = figures.put(values.tolist())
        return [sum(changed.seconds(s.kind, s.received, ranks)) for s in samples]

    (fitted,) = figures.put(solve(predict, [s.seconds for s in samples], figures.start))
    efficiency = tuple(
        (kind, share) for kind, share in fitted.efficiency if abs(share - 1) > _ALIKE
    )
    return dataclasses.replace(fitted, efficiency=efficiency)


def sending(link: Link, messages: Sequence[tuple[float, float]]) -> Link:
    """`link` with the `call` and `host` that explain best how much compute it took to send messages.

    Each message is a pair of its bytes and the seconds of compute that it took.

    >>> fitted = sending(Link("wire", 1e-4, 1e9), [(n, 2e-4 + n / 1e9) for n in (1e3, 1e5, 1e6)])
    >>> f"{fitted.call:.0e} s, {fitted.host:.0e} s/B"
    '2e-04 s, 1e-09 s/B'
    """
    received, seconds = np.array([m for m in messages if min(m) > 0]).reshape(-1, 2).T
    if not len(seconds):
        return link
    start = [max(link.call, 1e-6), max(link.host, 1e-12)]
    halves = [seconds.mean() / 2, seconds.sum() / received.sum() / 2]
    call, host = solve(lambda x: x[0] + x[1] * received, list(seconds), start, second_start=halves)
    return dataclasses.replace(link, call=call, host=host)


def unpacking(link: Link, messages: Sequence[tuple[str, float, float]]) -> Link:
    """`link` with the `unpack` of each kind: the seconds that it takes to turn a received byte into values.

    Each message has its kind, its bytes, and the seconds that it took to turn them into values.

    >>> unpacking(Link("wire", 1e-4, 1e9), [("all_gather", 1e6, 1e-3), ("all_gather", 3e6, 7e-3)]).unpack
    (('all_gather', 2e-09),)
    """
    rates = dict(link.unpack)
    for kind in {kind for kind, received, _ in messages if received > 0}:
        received, seconds = map(sum, zip(*(m[1:] for m in messages if m[0] == kind)))
        rates[kind] = seconds / received
    return dataclasses.replace(link, unpack=tuple(sorted(rates.items())))


class Figures:
    """The figures of links that messages determine, as one vector.

    For each link with messages these are its latency, its bandwidth, and the efficiencies of all kinds but the first.
    `seen` has, for each message, the index of its link and its kind.
    """

    def __init__(self, links: Sequence[Link], seen: Sequence[tuple[int, str]]) -> None:
        self.links, self.seen = links, seen
        of_links = grouped(seen)
        # The bandwidth is that of gathers; without gathers, that of the first kind.
        order = lambda kind: (kind != "all_gather", kind)
        self.kinds = [sorted({*of_links.get(i, ())}, key=order) for i in range(len(links))]

    @property
    def start(self) -> list[float]:
        """The figures that the links have."""
        values: list[float] = []
        for link, kinds in zip(self.links, self.kinds):
            efficiency = dict(link.efficiency)
            values += [max(link.latency, 1e-6), link.bandwidth] if kinds else []
            values += [efficiency.get(kind, 1.0) for kind in kinds[1:]]
        return values

    def put(self, values: Sequence[float]) -> list[Link]:
        """The links with the figures `values`."""
        left, changed = iter(map(float, values)), []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                link = dataclasses.replace(link, latency=next(left), bandwidth=next(left))
                efficiency = {**dict(link.efficiency), **{kind: next(left) for kind in kinds[1:]}}
                link = dataclasses.replace(link, efficiency=tuple(sorted(efficiency.items())))
            changed.append(link)
        return changed


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
    wanted = np.log(took)

    def error(at: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(at))) - wanted

    def loss(now: np.ndarray, at: np.ndarray) -> float:
        return _size(now) + prior * _size(at - first)

    def newton_step(now: np.ndarray, at: np.ndarray) -> np.ndarray:
        slope = np.stack([(error(at + 1e-3 * turn) - now) / 1e-3 for turn in np.eye(len(at))])
        weight, prior_weight = (1 / np.maximum(np.abs(far), _NOISE) for far in (now, at - first))
        gradient = slope @ (weight * now) + prior * prior_weight * (at - first)
        curvature = (slope * weight) @ slope.T + prior * np.diag(prior_weight)
        return np.clip(np.linalg.solve(curvature, gradient), -1, 1)

    def descend(at: np.ndarray) -> tuple[float, list[float]]:
        now = error(at)
        for _ in range(_STEPS):
            step = newton_step(now, at)
            steps = (step / 2**k for k in range(_HALVINGS))
            tried = ((at - each, error(at - each), np.abs(each).max()) for each in steps)
            better = next((t for t in tried if loss(t[1], t[0]) < loss(now, at)), None)
            if better is None:
                break
            at, now, length = better
            if length < 1e-4:
                break
        return loss(now, at), np.exp(at).tolist()

    return min(descend(np.log(begin)) for begin in (start, second_start) if len(begin))[1]


def _size(error: np.ndarray) -> float:
    """The loss of errors: quadratic below `_NOISE`, linear above."""
    error = np.abs(error)
    return np.where(error < _NOISE, error**2 / _NOISE, 2 * error - _NOISE).sum()
