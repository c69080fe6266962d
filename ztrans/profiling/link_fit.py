"""link_fit: figures of a link from how long messages took, and what they took of compute.

A message of kind k takes `latency + bytes / (bandwidth * efficiency[k])`, with one latency for all
kinds. What is made small is the error in the logarithm, so small and large messages count alike:
squared while it is noise, absolute beyond, so that the few that were held up count little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..planning.cluster import Link

_PRIOR = 0.02  # how many messages each of the figures to start from counts for
_NOISE = 0.25  # errors below this are squared
_STEPS = 60
_ALIKE = 0.05  # kinds whose bandwidths are nearer than this have one


class Sample(NamedTuple):
    """One message: its kind of collective, the bytes that a rank received, the seconds from start to end."""

    kind: str
    received: float
    seconds: float


def fit(link: Link, samples: Sequence[Sample], ranks: int) -> Link:
    """`link` with the latency, bandwidth and efficiencies that explain `samples` best.

    What they do not tell stays as it was: a bandwidth when all are small; `hop`, `host`, `call` and `unpack` always.

    >>> wire = Link("wire", latency=1e-4, bandwidth=1e9)
    >>> found = fit(wire, [Sample("all_gather", n, 1e-3 + n / 1e8) for n in (1e4, 1e5, 1e6)], ranks=2)
    >>> f"{found.latency:.4f} s, {found.bandwidth:.1e} B/s"
    '0.0010 s, 1.0e+08 B/s'
    """
    samples = [s for s in samples if s.received > 0 and s.seconds > 0]
    figures = Figures((link,), [(0, s.kind) for s in samples])

    def predict(values: np.ndarray) -> list[float]:
        (changed,) = figures.put(values)
        return [sum(changed.seconds(s.kind, s.received, ranks)) for s in samples]

    (found,) = figures.put(solve(predict, [s.seconds for s in samples], figures.start))
    alike = tuple((kind, e) for kind, e in found.efficiency if abs(e - 1) > _ALIKE)
    return dataclasses.replace(found, efficiency=alike)


def sending(link: Link, messages: Sequence[tuple[float, float]]) -> Link:
    """`link` with the `call` and `host` that explain what sending took of compute: pairs of bytes and seconds.

    >>> found = sending(Link("wire", 1e-4, 1e9), [(n, 2e-4 + n / 1e9) for n in (1e3, 1e5, 1e6)])
    >>> f"{found.call:.0e} s, {found.host:.0e} s/B"
    '2e-04 s, 1e-09 s/B'
    """
    received, seconds = np.array([m for m in messages if min(m) > 0]).reshape(-1, 2).T
    if not len(seconds):
        return link
    start = [max(link.call, 1e-6), max(link.host, 1e-12)]
    halves = [seconds.mean() / 2, seconds.sum() / received.sum() / 2]
    call, host = solve(lambda x: x[0] + x[1] * received, seconds, start, other=halves)
    return dataclasses.replace(link, call=call, host=host)


def unpacking(link: Link, messages: Sequence[tuple[str, float, float]]) -> Link:
    """`link` with the `unpack` of messages: of each its kind, its bytes, and the seconds that making values of it took.

    >>> unpacking(Link("wire", 1e-4, 1e9), [("all_gather", 1e6, 1e-3), ("all_gather", 3e6, 7e-3)]).unpack
    (('all_gather', 2e-09),)
    """
    known = dict(link.unpack)
    for kind in {kind for kind, received, _ in messages if received > 0}:
        received, seconds = map(sum, zip(*(m[1:] for m in messages if m[0] == kind)))
        known[kind] = seconds / received
    return dataclasses.replace(link, unpack=tuple(sorted(known.items())))


class Figures:
    """What messages tell of links, as one vector: latency, bandwidth, the efficiency of each kind but one."""

    def __init__(self, links: Sequence[Link], seen: Sequence[tuple[int, str]]) -> None:
        self.links, self.seen, self.kinds = links, seen, []
        for i in range(len(links)):
            # Bandwidth is that of gathers, or of the first kind seen where there are none.
            kinds = sorted({kind for k, kind in seen if k == i}, key=lambda kind: (kind != "all_gather", kind))
            self.kinds.append(kinds)

    @property
    def start(self) -> list[float]:
        values = []
        for link, kinds in zip(self.links, self.kinds):
            known = dict(link.efficiency)
            values += [max(link.latency, 1e-6), link.bandwidth] if kinds else []
            values += [known.get(kind, 1.0) for kind in kinds[1:]]
        return values

    def put(self, values: Sequence[float]) -> list[Link]:
        """The links with other figures."""
        left, found = iter(map(float, values)), []
        for link, kinds in zip(self.links, self.kinds):
            if kinds:
                link = dataclasses.replace(link, latency=next(left), bandwidth=next(left))
                efficiency = {**dict(link.efficiency), **{kind: next(left) for kind in kinds[1:]}}
                link = dataclasses.replace(link, efficiency=tuple(sorted(efficiency.items())))
            found.append(link)
        return found


def solve(
    predict: Callable[[np.ndarray], Sequence[float]],
    took: Sequence[float],
    start: Sequence[float],
    prior: float = _PRIOR,
    other: Sequence[float] = (),
) -> list[float]:
    """The positive figures with which `predict` is nearest to `took`: damped Newton steps in their logarithms.

    Each figure of `start` counts as much as `prior` messages. Where `start` may be far off, so far that
    no message tells which way to go, the steps are also taken from `other` figures.

    >>> [round(x, 1) for x in solve(lambda x: [x[0], x[0] * x[1]], [3.0, 6.0], [1.0, 1.0])]
    [3.0, 2.0]
    """
    if not start:
        return []
    first = np.log(start)
    wanted = np.log(took)

    def error(at: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(at))) - wanted

    def size(error: np.ndarray) -> float:
        error = np.abs(error)
        return np.where(error < _NOISE, error**2 / _NOISE, 2 * error - _NOISE).sum()

    def loss(error: np.ndarray, at: np.ndarray) -> float:
        return size(error) + prior * size(at - first)

    def descended(found: np.ndarray) -> tuple[float, list[float]]:
        now = error(found)
        for _ in range(_STEPS):
            slope = np.stack([(error(found + 1e-3 * turn) - now) / 1e-3 for turn in np.eye(len(found))])
            weight, hold = (1 / np.maximum(np.abs(far), _NOISE) for far in (now, found - first))
            pull = slope @ (weight * now) + prior * hold * (found - first)
            bend = (slope * weight) @ slope.T + prior * np.diag(hold)
            step = np.clip(np.linalg.solve(bend, pull), -1, 1)
            for _ in range(8):
                tried = error(found - step)
                if loss(tried, found - step) < loss(now, found):
                    break
                step = step / 2
            else:
                break
            found, now = found - step, tried
            if np.abs(step).max() < 1e-4:
                break
        return loss(now, found), np.exp(found).tolist()

    return min(descended(np.log(begin)) for begin in (start, other) if len(begin))[1]
