"""Predict the figures of a step from small programs that are cut out of it.

Time, bytes and peaks are linear in the number of equal layers, so a program with two layers of each kind, and for each
kind another one with four, give those of all layers. Within a limit of memory each program gets its part of it: what
does not depend on the layers, and the share of the rest that its layers have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..ir.graph import Graph
from ..planning.cluster import Cluster
from ..planning.cost import cost, memory
from ..planning.limit import DoesNotFit
from ..planning.lower_bound import lower_bound
from ..planning.simulate import simulate
from ..stages import Lowered, Traced
from ..transforms.base import Transform
from ..transforms.offload import Offload
from ..transforms.remat import remat
from .fewer_layers import Layer, equal_layers, without_layers
from .fewer_rows import with_fewer_rows
from .knobs import without_savings

# The layers of each kind in the smallest program, and how many more the others have.
FEWEST, MORE = 2, 2
# Kinds of layers whose counts differ by at most this are cut together, such as attention and MLPs: the first or last of
# a kind may differ from the others.
ALIKE = 2
_UNLIMITED = 1 << 60  # bytes


class Figures(NamedTuple):
    """Seconds of a step, and bytes: the peak on the device and on the host, and what a rank receives."""

    seconds: float
    peak: float
    host: float
    received: float


@dataclass(frozen=True, eq=False)
class SmallSteps:
    """Small programs of a step, and how their figures give those of the whole.

    Attributes:
        programs: the smallest program, then one for each kind of layers, which has `MORE` of them in addition.
        times: for each of the latter, how many times its difference to the smallest one is added.
        layers: the numbers of layers, as text.
    """

    programs: tuple[Traced, ...]
    times: tuple[float, ...]
    layers: str

    def whole(self, values: Sequence[float]) -> float:
        """The value of the whole step, from the values of the programs."""
        smallest, *others = values
        return smallest + sum(n * (v - smallest) for n, v in zip(self.times, others))

    def without_layers(self, values: Sequence[float]) -> float:
        """The value of a step without any of these layers. It is 0 if nothing was cut out."""
        smallest, *others = values
        if not others:
            return 0.0
        return max(0.0, smallest - FEWEST / MORE * sum(v - smallest for v in others))

    def figures(self, lowered: Sequence[Lowered]) -> Figures:
        """The figures of the whole step, from planned programs."""
        columns = zip(*map(figures, lowered))
        return Figures(*map(self.whole, columns))

    def with_fewer_rows(self, parts: int) -> SmallSteps | None:
        """The programs for one of several equal parts of the batch; None if only a trace tells them."""
        programs = []
        for small in self.programs:
            graph = with_fewer_rows(small.graph, parts)
            if graph is None:
                return None
            programs.append(_with_graph(small, graph))
        return dataclasses.replace(self, programs=tuple(programs))

    def with_transforms(self, transforms: tuple[Transform, ...]) -> list[Traced]:
        """The programs with other transforms, of the same number of micro-batches."""
        return [dataclasses.replace(small, transforms=transforms) for small in self.programs]


def small_steps(traced: Traced) -> SmallSteps:
    """The small programs of a traced step: the step itself if it has no layers that can be cut out."""
    whole = SmallSteps((traced,), (), "all")
    kinds = [layers for layers in equal_layers(traced.graph) if len(layers) > FEWEST + MORE]
    groups: list[list[list[Layer]]] = []
    for layers in sorted(kinds, key=len):
        if groups and len(layers) - len(groups[-1][0]) <= ALIKE:
            groups[-1].append(layers)
        else:
            groups.append([layers])
    if not groups:
        return whole

    def cut(longer: int | None) -> Traced:
        """The program with `FEWEST` layers of each kind, and `MORE` of those in one group."""
        gone: list[Layer] = []
        for number, group in enumerate(groups):
            kept = FEWEST + (MORE if number == longer else 0)
            for layers in group:
                gone += layers[kept + len(layers) - len(group[0]) :]
        return _with_graph(traced, without_layers(traced.graph, gone))

    try:
        programs = tuple(cut(longer) for longer in (None, *range(len(groups))))
    except ValueError:  # an operation does not run on fewer layers
        return whole
    counts = [max(map(len, group)) for group in groups]
    times = tuple((len(group[0]) - FEWEST) / MORE for group in groups)
    return SmallSteps(
        programs, times, f"{FEWEST} and {FEWEST + MORE} of {' and '.join(map(str, counts))}"
    )


def _with_graph(traced: Traced, graph: Graph) -> Traced:
    recording = dataclasses.replace(traced.recording, graph=graph, fx=None)
    return dataclasses.replace(traced, recording=recording)


def figures(lowered: Lowered) -> Figures:
    """The figures of a planned program."""
    used = memory(lowered.graph)
    seconds = simulate(lowered.graph, lowered.cluster).seconds
    return Figures(seconds, used.peak, used.host_peak, cost(lowered.graph).wire_bytes)


# ---- figures, the cheapest first


def least_seconds(
    small: SmallSteps, transforms: tuple[Transform, ...], cluster: Cluster
) -> tuple[float, str, float]:
    """A bound for the seconds of a step with any order and any amount of memory, what binds it, and its state's bytes.

    It comes from programs that are not planned.
    """
    seconds: list[float] = []
    state: list[float] = []
    binds = "compute"
    for traced in small.with_transforms(without_savings(transforms)):
        graph = traced.without_order(_with_memory(cluster, _UNLIMITED)).graph
        bound = lower_bound(graph, graph, (), cluster, _UNLIMITED)
        if bound is None:
            bound = simulate(graph, cluster).seconds, "compute"
        seconds.append(bound[0])
        binds = bound[1]
        state.append(memory(graph).state)
    return small.whole(seconds), binds, small.whole(state)


def planned(
    small: SmallSteps, transforms: tuple[Transform, ...], cluster: Cluster
) -> list[Lowered]:
    """The programs as planned with memory for everything: all activations are kept on the device."""
    kept = everything_kept(transforms)
    return _planned(small, kept, cluster, [_UNLIMITED] * len(small.programs))


def planned_within(
    small: SmallSteps,
    transforms: tuple[Transform, ...],
    cluster: Cluster,
    limit: int,
    peaks: Sequence[float],
) -> list[Lowered]:
    """The programs as planned within their parts of a limit.

    Args:
        small, transforms, cluster: the step.
        limit: the limit of the whole step.
        peaks: the peaks of the programs that have memory for everything.

    Raises: DoesNotFit
    """
    rest = small.without_layers(peaks)
    try:
        limits = _shares(small, limit, [rest] * len(peaks), peaks)
        return _planned(small, transforms, cluster, limits)
    except DoesNotFit as error:
        if len(peaks) == 1:
            raise
        # What recomputation needs at one time does not grow with the layers either.
        least = [_least_peak(t, cluster) for t in small.with_transforms(transforms)]
        if small.whole(least) > limit:
            raise error
        return _planned(small, transforms, cluster, _shares(small, limit, least, peaks))


def _shares(
    small: SmallSteps, limit: int, low: Sequence[float], peaks: Sequence[float]
) -> list[int]:
    """The limit of each program, between its lowest value and its peak, so that the whole step has `limit`.

    Raises: DoesNotFit if the whole step has more than that at the lowest values.
    """
    if len(peaks) == 1:
        return [limit]
    most, least = small.whole(peaks), small.whole(low)
    share = min(1.0, (limit - least) / (most - least)) if most > least else 1.0
    return [max(1, int(lo + share * (peak - lo))) for lo, peak in zip(low, peaks)]


def _least_peak(traced: Traced, cluster: Cluster) -> int:
    """The least peak of a program among the orders that a plan tries."""
    try:
        return memory(_within(traced, cluster, 1).graph).peak
    except DoesNotFit as error:
        return error.least.peak


def everything_kept(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """The transforms of a step without those that fit activations into the memory."""
    planned_remat = remat(memory="auto")
    kept: list[Transform] = []
    for t in transforms:
        if isinstance(t, Offload) and t.where is not None:
            kept.append(dataclasses.replace(t, memory=None))
        # Any limit: `remat(memory=...)` is dropped whatever its limit is.
        elif t.within(1) != planned_remat.within(1) and not isinstance(t, Offload):
            kept.append(t)
    return tuple(kept)


def _planned(
    small: SmallSteps,
    transforms: tuple[Transform, ...],
    cluster: Cluster,
    limits: Sequence[int],
) -> list[Lowered]:
    programs = small.with_transforms(transforms)
    return [_within(traced, cluster, limit) for traced, limit in zip(programs, limits)]


def _within(traced: Traced, cluster: Cluster, limit: int) -> Lowered:
    """A program as planned within a limit, in place of that of the device and of the user's."""
    named = tuple(t if t.memory_limit is None else t.within(limit) for t in traced.transforms)
    return dataclasses.replace(traced, transforms=named).planned(_with_memory(cluster, limit))


def _with_memory(cluster: Cluster, limit: int) -> Cluster:
    if cluster.device.limit is None:
        return cluster
    device = dataclasses.replace(cluster.device, memory=float(limit), reserve=0.0)
    return dataclasses.replace(cluster, device=device)
