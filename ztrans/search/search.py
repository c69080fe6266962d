"""Search for the transforms with which a step is fastest on a cluster.

Every setting of the knobs is a candidate with a time that it cannot beat, which becomes sharper in four steps, each of
which takes longer than the one before:

    1  the compute of the step as it was traced
    2  the bound of its collectives, from small programs that are not planned
    3  the small programs as planned with memory for everything
    4  the same within the limit of memory, if that is less

The candidate that seems fastest goes one step on, until none that is left can beat the winner, or the time is over.

Source: Yuan et al., Mist, 2025; Zheng et al., Alpa, 2022, who search the same choices with costs of single layers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..calling.global_state import no_collection
from ..fitting import EQUAL
from ..ir.axes import members
from ..ir.graph import Graph
from ..ir.layout import mesh_axes
from ..ir.op_facts import is_matmul
from ..ir.printer import format_bytes, format_seconds
from ..planning.cluster import Cluster, default_cluster, default_device
from ..planning.cost import memory
from ..planning.durations import kernel_seconds
from ..planning.limit import DoesNotFit, with_device_limit
from ..planning.place_copies import HostIsFull
from ..planning.simulate import simulate
from ..report.tracebacks import ends_at_user
from ..runtime.mesh import device_memory
from ..stages import Lowered, Traced
from ..step import Step
from ..transforms.base import mesh_of, micro_batches_of, with_limit
from .found import Found, Row
from .knobs import Setting, Start, Values, rows_of, settings, with_schedules
from .small_steps import (
    Figures,
    SmallSteps,
    everything_kept,
    least_seconds,
    planned,
    planned_within,
    small_steps,
)

Planned = tuple[Row, list[Lowered]]
# Settings that may be within this share of the winner are planned too, for the table.
LISTED = 0.02
# Guesses, which decide only the order of the search. How much longer a step takes without room for any activation, as a
# share of its compute. With half of the room it is a quarter of that, because a plan recomputes what is cheap first.
RECOMPUTED = 0.2
# How much longer a step with more micro-batches takes, because its products are smaller.
SMALLER = 0.02


@dataclass(eq=False)
class _Candidate:
    """A setting on its way through the steps.

    Attributes:
        setting: its values, transforms and cluster.
        least: seconds that it cannot beat, as far as is known.
        expected: seconds that it may take; the candidate with the fewest goes on first.
        bound, binds: seconds that no order of its collectives beats, and what sets them.
        is_kept: whether its small programs were planned with memory for everything.
    """

    setting: Setting
    least: float
    expected: float
    bound: float = 0.0
    binds: str = "compute"
    is_kept: bool = False


Advance = Callable[[_Candidate], Planned | None]


@ends_at_user
@no_collection()
def search(
    step: Callable[..., Any],
    state: Any,
    *batch: Any,
    cluster: Cluster | None = None,
    knobs: Mapping[str, Sequence[Any]] | None = None,
    seconds: float = 60,
) -> Found:
    """Search for the transforms with which a step is fastest on a cluster, within the memory of its devices.

    It traces the step, plans small programs of a few of its equal layers, and predicts the step from them. Nothing
    runs, and no GPU is needed.

    Args:
        step: a step; over several ranks, one with `shard_params(mesh)`. Its `accumulate` is left out, and its other
            transforms stay; `overlap_grads`, `prefetch`, `fuse_cast_gather` and `remat(memory="auto")` are added where
            they are missing.
        state, batch: the arguments of a call on one rank. Meta tensors are enough.
        cluster: the devices and links, by default H100s on InfiniBand.
        knobs: the values to try of some knobs, in place of all: {"stage": (3,), "micro_batches": (1, 2)}. There are
            micro_batches, into which the batch is cut; order, "batches" or "layers"; stage, the ZeRO stage; replicas,
            whether each host has a replica (HSDP), for an AbstractMesh whose axis is `by_host`; codes, whether a
            transform with `bits="auto"` stays; tile, the tokens in a tile of the loss, or 0; and on_host, "nothing",
            "activations", "moments" or "everything".
        seconds: the time of the processor after which to stop, once a setting is planned. The notes say how many
            settings were not planned.

    Returns: The planned steps, the fastest first: `found[0].step`, and `found.code()` as text.

    Raises: ValueError if a knob or a value of one is unknown, if `seconds` is no number above 0, or if no setting fits
        the memory.

    >>> import torch
    >>> import ztrans as zt
    >>> step = zt.shard_params(zt.AbstractMesh(dp=8))(lambda state, x: (state, (x @ state).mean()))
    >>> found = zt.search(step, torch.ones(16, 16), torch.ones(4, 16), cluster=zt.cluster("h100", dp="nvlink4"))
    >>> found[0].layers
    'all'
    """
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"search: {seconds=}; it is a number of seconds above 0.")
    deadline = time.process_time() + seconds
    started = Step.of(step)
    plain = Step(started.fn, tuple(t for t in started.transforms if t.micro_batches == 1))
    cluster = cluster or _default_cluster(started)
    # Nothing runs, so leaves that transforms keep may start again.
    traced = plain.trace(plain.init(state), *batch)
    rows = rows_of(batch)
    start = Start(traced.graph, Setting((), with_schedules(plain.transforms), cluster), rows)
    compute = _seconds_of_products(traced.graph, cluster)
    candidates = [_Candidate(setting, compute, compute) for setting in settings(start, knobs)]
    plans = _Plans(plain, traced, rows)

    found: list[Planned] = []
    dropped: Counter[str] = Counter()
    longest: dict[str, float] = {}  # the most seconds that each step of the search has taken
    while candidates:
        for c in candidates:
            plans.learn(c)
        begin = time.process_time()
        # After half of the time there should be a row: first go on with what is nearest to one.
        is_late = not found and begin > deadline - seconds / 2
        candidate = _most_promising(candidates, is_late)
        best = min((row.seconds for row, _ in found), default=math.inf)
        margin = -EQUAL if candidate.setting.saves_memory else LISTED
        name, advance = plans.next_step(candidate)
        result: Planned | str | None
        if candidate.least > best * (1 + margin):
            result = "cannot be as fast as the first row"
        elif found and begin + longest.get(name, 0.0) > deadline:
            result = "no time was left"
        else:
            result = _attempted(advance, candidate)
            longest[name] = max(longest.get(name, 0.0), time.process_time() - begin)
        if result is not None:
            candidates.remove(candidate)
        if isinstance(result, str):
            dropped[result] += 1
        elif result is not None:
            found.append(result)
    return _found(found, dropped, plans)


def _most_promising(candidates: Sequence[_Candidate], nearest_first: bool) -> _Candidate:
    nearest = [c for c in candidates if nearest_first and c.is_kept]
    return min(nearest or candidates, key=lambda c: c.expected)


def _attempted(advance: Advance, candidate: _Candidate) -> Planned | str | None:
    """The plan of a candidate; None if it goes on, or why it is dropped."""
    try:
        return advance(candidate)
    except (DoesNotFit, HostIsFull, _TooLarge):
        return "more than the memory"
    except ValueError as error:
        return f"refused: {str(error).splitlines()[0]}"


class _TooLarge(ValueError):
    """A step needs more memory on the device, or on the host, than there is."""


@dataclass(eq=False)
class _Known:
    """What is known of the settings whose knobs differ only in how they save memory.

    Attributes:
        bound, binds: seconds that no order of their collectives beats, and what sets them.
        state: the bytes of the state.
        fastest: the seconds with memory for everything, once planned.
        expected: the seconds that the setting which does not save memory may take.
    """

    bound: float
    binds: str
    state: float
    fastest: float = 0.0
    expected: float = 0.0


class _Plans:
    """The steps of a search, and what candidates share.

    Attributes:
        step, traced: the step, and its program for the whole batch.
        rows: the samples of the batch of a rank.
        small: the small programs of the step, by the number of micro-batches.
        known: what is known of settings, by their `speed_values`.
        kept: the small programs with memory for everything, by their transforms and cluster.
        missing: the share of the activations for which the first such step has no room, by the number of micro-batches
            and whether it saves memory. The activations of the others are about as large.
    """

    def __init__(self, step: Step[..., Any], traced: Traced, rows: int) -> None:
        self.step = step
        self.traced = traced
        self.rows = rows
        self.small: dict[int, SmallSteps] = {}
        self.known: dict[Values, _Known] = {}
        self.kept: dict[Hashable, tuple[list[Lowered], Figures]] = {}
        self.missing: dict[tuple[int, bool], float] = {}

    def next_step(self, c: _Candidate) -> tuple[str, Advance]:
        """The next step of a candidate, with its name."""
        if c.is_kept:
            return "plan within the limit", self.within_limit
        if c.bound:
            return "plan", self.with_memory_for_everything
        return ("cut" if self.is_uncut(c) else "bound"), self.bounded

    def learn(self, c: _Candidate) -> None:
        """Raise what is known of a candidate by what its relatives have shown.

        With less memory a step is not faster than with memory for everything; with more micro-batches it has smaller
        products, and sends no fewer bytes.
        """
        values = c.setting.speed_values()
        own = self.known.get(values)
        larger = [self.known[v].bound for v in _with_fewer_micro_batches(values) if v in self.known]
        c.least = max(c.least, own.fastest if own else 0.0, *larger)
        missing = self.missing.get((c.setting.micro_batches, c.setting.saves_memory), 0.0)
        c.expected = max(c.expected, c.least + RECOMPUTED * missing**2 * c.bound)
        if self.is_uncut(c):
            like = min((known.bound for known in self.known.values()), default=0.0)
            c.expected = max(c.expected, max(like, c.least) * (1 + SMALLER))
        if own and c.setting.saves_memory:  # the step without it comes first
            c.expected = max(c.expected, own.expected * (1 + EQUAL))

    def is_uncut(self, c: _Candidate) -> bool:
        """Whether there are no small programs yet for the micro-batches of a candidate."""
        return c.setting.micro_batches not in self.small

    def bounded(self, c: _Candidate) -> None:
        """Cut small programs out of the step for its micro-batches, and bound them."""
        setting = c.setting
        small = self.small_steps(setting)
        key = setting.speed_values()
        if key not in self.known:
            bound, binds, state = least_seconds(small, setting.transforms, setting.cluster)
            self.known[key] = _Known(bound, binds, state, expected=bound)
        known = self.known[key]
        c.bound, c.binds = known.bound, known.binds
        limit = self.limit(setting)
        if limit is not None and known.state > limit and not setting.saves_memory:
            raise _TooLarge(setting)
        c.expected = c.least = max(c.least, c.bound)

    def small_steps(self, setting: Setting) -> SmallSteps:
        """The small programs for the micro-batches of a setting, which are traced only if nothing else tells them."""
        micro = setting.micro_batches
        if 1 not in self.small:
            self.small[1] = small_steps(self.traced)
        if micro not in self.small:
            fewer_rows = self.small[1].with_fewer_rows(micro)
            if fewer_rows is None:
                fewer_rows = small_steps(self.traced.with_transforms(setting.transforms))
            self.small[micro] = fewer_rows
        return self.small[micro]

    def with_memory_for_everything(self, c: _Candidate) -> Planned | None:
        """Plan the small programs with memory for everything: that is the plan, if it fits the limit."""
        setting = c.setting
        small = self.small[setting.micro_batches]
        key = everything_kept(setting.transforms), setting.cluster
        if key not in self.kept:
            lowered = planned(small, setting.transforms, setting.cluster)
            self.kept[key] = lowered, small.figures(lowered)
        lowered, figures = self.kept[key]
        c.is_kept = True
        known = self.known[setting.speed_values()]
        if not setting.saves_memory:
            known.fastest = figures.seconds
        limit = self.limit(setting)
        if limit is None or figures.peak <= limit:
            return self.row(c, figures), lowered
        rest = small.without_layers([memory(x.graph).peak for x in lowered])
        missing = min(1.0, (figures.peak - limit) / max(1.0, figures.peak - rest))
        c.least = max(c.least, figures.seconds)
        c.expected = c.least + RECOMPUTED * missing**2 * c.bound
        self.missing.setdefault((setting.micro_batches, setting.saves_memory), missing)
        if not setting.saves_memory:
            known.expected = c.expected
        return None

    def within_limit(self, c: _Candidate) -> Planned:
        """Plan the small programs within their parts of the limit."""
        setting = c.setting
        small = self.small[setting.micro_batches]
        limit = self.limit(setting) or 0
        kept, _ = self.kept[everything_kept(setting.transforms), setting.cluster]
        peaks = [memory(x.graph).peak for x in kept]
        lowered = planned_within(small, setting.transforms, setting.cluster, limit, peaks)
        figures = small.figures(lowered)
        return self.row(c, figures._replace(peak=min(figures.peak, limit))), lowered

    def limit(self, setting: Setting) -> int | None:
        """The bytes that may be live: the limit of the transforms, or of the device."""
        graph = with_limit(self.traced.graph, setting.transforms)
        return with_device_limit(graph, setting.cluster.device).hints.memory_limit

    def row(self, c: _Candidate, figures: Figures) -> Row:
        """The row of a candidate that was planned.

        Raises: _TooLarge if the host has less memory than it needs.
        """
        setting = c.setting
        if figures.host > setting.cluster.host_memory:
            raise _TooLarge(setting)
        mesh = mesh_of(setting.transforms)
        sizes = dict(mesh_axes(mesh)) if mesh is not None else {}
        axes = {axis for t in setting.transforms for name in t.axes for axis in members(name)}
        ranks = math.prod(sizes[axis] for axis in axes)
        seconds = max(figures.seconds, c.bound)
        return Row(
            step=Step(self.step.fn, setting.transforms),
            cluster=setting.cluster,
            values=setting.values,
            seconds=seconds,
            samples_per_second=self.rows * ranks / seconds,
            peak=int(figures.peak),
            host=int(figures.host),
            received=int(figures.received),
            bound=c.bound,
            binds=c.binds,
            layers=self.small[setting.micro_batches].layers,
            traced=self.traced,
        )


def _with_fewer_micro_batches(values: Values) -> Iterator[Values]:
    """The same values of all knobs with each smaller number of micro-batches."""
    micro = dict(values).get("micro_batches", 1)
    for fewer in (1, 2, 4, 8):
        if fewer < micro:
            yield tuple((name, fewer if name == "micro_batches" else v) for name, v in values)


def _seconds_of_products(graph: Graph, cluster: Cluster) -> float:
    """The seconds of the matrix products of a step: no number of micro-batches has fewer."""
    seconds = kernel_seconds(graph, cluster.device)
    return sum(seconds(e) for e in graph.eqns if is_matmul(e) and e.region != "update")


def _default_cluster(step: Step[..., Any]) -> Cluster:
    """The cluster that a step is planned for if none is passed."""
    mesh = step.mesh
    if mesh is None:
        return default_cluster(default_device("cuda"), {})
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda"
    memory_of_device = device_memory(kind) if isinstance(mesh, DeviceMesh) else None
    return default_cluster(default_device(kind, memory_of_device), dict(mesh_axes(mesh)))


# ---- what was found


def _found(planned_rows: Sequence[Planned], dropped: Mapping[str, int], plans: _Plans) -> Found:
    """The table of a search.

    Raises: ValueError if it is empty.
    """
    total = sum(dropped.values()) + len(planned_rows)
    notes = [f"{count} of {total} settings: {reason}" for reason, count in dropped.items()]
    if not planned_rows:
        name = plans.traced.graph.name
        raise ValueError(
            f"search: no setting of {name} was planned: {'; '.join(notes)}.\n"
            f"Take more ranks, a smaller batch or another device, or give it more seconds."
        )
    in_order = sorted(planned_rows, key=lambda planned: (planned[0].seconds, planned[0].peak))
    rows: list[Row] = []
    least_peak = math.inf
    for row, _ in in_order:
        rows.append(dataclasses.replace(row, is_pareto=row.peak < least_peak))
        least_peak = min(least_peak, row.peak)
    return Found(tuple(rows), (*_gains(*in_order[0], plans), *notes))


def _gains(winner: Row, lowered: Sequence[Lowered], plans: _Plans) -> list[str]:
    """What more memory, or a faster link, would bring to the fastest step."""
    notes = []
    kept_lowered, kept = plans.kept[everything_kept(winner.step.transforms), winner.cluster]
    if kept_lowered is not lowered:
        more = format_bytes(int(kept.peak) - winner.peak)
        gain = f"{format_seconds(kept.seconds)} a step ({kept.seconds / winner.seconds - 1:+.1%})"
        notes.append(f"with {more} more memory the first row keeps everything: {gain}")
    small = plans.small[micro_batches_of(winner.step.transforms)]
    before = small.whole([simulate(x.graph, winner.cluster).seconds for x in lowered])
    for axis, link in winner.cluster.links:
        faster = dataclasses.replace(link, bandwidth=2 * link.bandwidth)
        links = tuple(
            (*pair,) if pair[0] != axis else (axis, faster) for pair in winner.cluster.links
        )
        cluster = dataclasses.replace(winner.cluster, links=links)
        after = small.whole([simulate(x.graph, cluster).seconds for x in lowered])
        notes.append(
            f"with twice the bandwidth of {link.name} over {axis}: {after / before - 1:+.1%} time"
        )
    return notes
