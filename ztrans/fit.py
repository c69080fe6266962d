"""fit: the latency and bandwidth of a link, from how long messages over it took.

A message of kind k takes `latency + bytes / (bandwidth * efficiency[k])`, with one latency for all
kinds. What is made small is the error in the logarithm, so small and large messages count alike:
squared while it is noise, absolute beyond, so that the few that were held up count little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .cluster import Link

Array = np.ndarray
_PRIOR = 0.02  # how many messages the link as it was counts for
_NOISE = 0.25  # errors below this are squared
_STEPS = 200
_ALIKE = 0.05  # kinds whose bandwidths are nearer than this have one


class Sample(NamedTuple):
    """One message: its kind of collective, the bytes that a rank received, the seconds from start to end."""

    kind: str
    received: float
    seconds: float


def fit(link: Link, samples: Sequence[Sample], ranks: int) -> Link:
    """`link` with the latency, bandwidth and efficiencies that explain `samples` best.

    What they do not tell stays as it was: a bandwidth when all are small, `hop` and `host` always.

    >>> wire = Link("wire", latency=1e-4, bandwidth=1e9)
    >>> found = fit(wire, [Sample("all_gather", n, 1e-3 + n / 1e8) for n in (1e4, 1e5, 1e6)], ranks=2)
    >>> f"{found.latency:.4f} s, {found.bandwidth:.1e} B/s"
    '0.0010 s, 1.0e+08 B/s'
    """
    samples = [s for s in samples if s.received > 0 and s.seconds > 0]
    if not samples:
        return link
    reference, *others = sorted({s.kind for s in samples}, key=lambda kind: (kind != "all_gather", kind))
    known = dict(link.efficiency)
    hops = [link.seconds(s.kind, 0, ranks)[0] - link.latency for s in samples]
    start = np.array([max(link.latency, 1e-6), 1 / link.bandwidth, *(1 / known.get(kind, 1.0) for kind in others)])
    received = np.array([s.received / (known.get(reference, 1.0) if s.kind == reference else 1) for s in samples])
    is_kind = np.array([[s.kind == kind for s in samples] for kind in others], float).reshape(len(others), len(samples))
    latency, pace, *slow = _explain(np.array([s.seconds for s in samples]), received, is_kind, np.array(hops), start)
    efficiency = {**known, **{kind: 1 / x for kind, x in zip(others, slow)}}
    differ = tuple(sorted((kind, e) for kind, e in efficiency.items() if abs(e - 1) > _ALIKE))
    return dataclasses.replace(link, latency=latency, bandwidth=1 / pace, efficiency=differ)


def _explain(took: Array, received: Array, is_kind: Array, hops: Array, start: Array) -> list[float]:
    """Latency, seconds a byte, and how much slower each further kind is: damped Newton steps in their logarithms."""
    prior = found = np.log(start)
    for _ in range(_STEPS):
        moving = received * np.exp(found[1] + found[2:] @ is_kind)
        whole = np.exp(found[0]) + hops + moving
        error = np.log(whole / took)
        slope = np.stack([np.exp(found[0]) / whole, moving / whole, *(moving / whole * is_kind)])
        weight = 1 / np.maximum(np.abs(error), _NOISE)
        pull = slope @ (weight * error) + _PRIOR * (found - prior)
        bend = (slope * weight) @ slope.T + _PRIOR * np.eye(len(found))
        found = found - np.clip(np.linalg.solve(bend, pull), -0.5, 0.5)
    return np.exp(found).tolist()
