"""Synthetic scheduling problems: a sharded train step of a Llama-like chain, and schedules of it by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from tests.support.evaluate import evaluate
from ztrans.planning.levers import WHOLE, idle_value
from ztrans.planning.solver.problem import (
    Bucket,
    Gather,
    Lever,
    Problem,
    Reduction,
    Schedule,
    Wire,
)
from ztrans.planning.solver.search import solve


@dataclass(frozen=True)
class Case:
    """A problem, and the layer that each gather and each reduction belongs to."""

    name: str
    problem: Problem
    gather_layers: tuple[int, ...]
    reduction_layers: tuple[int, ...]
    more: int  # bytes of additional memory, to measure how much time they save


def whole_levers(gathers: Sequence[Gather]) -> tuple[Lever, ...]:
    """For each gather that repeats an earlier one, the lever that keeps the earlier value."""
    levers = []
    for i, gather in enumerate(gathers):
        if gather.repeats is not None:
            kept = idle_value(gather.bytes, gathers[gather.repeats].last, gather.use)
            levers.append(Lever(WHOLE, gather.name, i, buffers=kept))
    return tuple(sorted(levers, key=lambda lever: [b.last - b.first for b in lever.buffers]))


def llama(
    name: str,
    tokens: int,
    ranks: int,
    latency: float,
    bandwidth: float,
    *,
    layers: int = 32,
    width: int = 4096,
    hidden: int = 14336,
    kv: int = 1024,
    vocab: int = 128256,
    flops: float = 450e12,
    update_bandwidth: float = 3.3e12,
    gather_bytes: int = 2,
    more: int = 4 * 10**9,
    lanes: tuple[str, str] = ("wire", "wire"),
) -> Case:
    """Forward and backward of a chain of layers, and one update at the end.

    The activations that a layer keeps for backward have ten times the bytes of its input.
    """
    embedding, head = [vocab * width], [vocab * width + width]
    q, k, v, o = width * width + width, width * kv, width * kv, width * width
    up, gate, down = width * hidden + width, width * hidden, width * hidden
    linear: Callable[[list[int]], float] = lambda units: 2 * sum(units) * tokens / flops
    attention = 2 * tokens * tokens * width / flops
    parts = [([q, k, v], None), ([], attention), ([o], None), ([up, gate], None), ([down], None)]
    forward = [(tokens * width * 4 / 2e12, embedding, -1)]
    forward += [
        (linear(units) if t is None else t, units, layer)
        for layer in range(layers)
        for units, t in parts
    ]
    forward += [(linear(head), head, layers)]

    seconds: list[float] = []
    live: list[int] = []
    gathers: list[Gather] = []
    reductions: list[Reduction] = []
    gather_layers: list[int] = []
    reduction_layers: list[int] = []
    first: dict[tuple[int, int], int] = {}  # gather of forward, by (operation, unit)
    activations, saved = 0, 10 * tokens * width * 2 // len(parts)
    end = 2 * len(forward)
    share = lambda size: size * (ranks - 1) // ranks
    for op, (t, units, layer) in enumerate(forward):
        for j, numel in enumerate(units):
            first[op, j] = len(gathers)
            size = numel * gather_bytes
            gathers.append(Gather("gather", share(size), size, op, op))
            gather_layers.append(layer)
        activations += saved if 0 <= layer < layers else 0
        seconds.append(t)
        live.append(activations)
    for op, (t, units, layer) in reversed(list(enumerate(forward))):
        here = end - 1 - op
        for j, numel in reversed(list(enumerate(units))):
            size = numel * gather_bytes
            gathers.append(Gather("gather", share(size), size, here, here, op + 1, first[op, j]))
            reductions.append(Reduction("reduce", share(numel * 4), numel * 4, here, deadline=end))
            gather_layers.append(layer)
            reduction_layers.append(layer)
        seconds.append(2 * t)
        live.append(activations)
        activations -= saved if 0 <= layer < layers else 0
    numel = sum(sum(units) for _, units, _ in forward)
    seconds.append(numel / ranks * 28 / update_bandwidth)
    live.append(0)
    pace = 1 / bandwidth
    problem = Problem(
        tuple(seconds),
        tuple(live),
        (*tuple(bool(units) for _, units, _ in [*forward, *reversed(forward)]), False),
        tuple(gathers),
        tuple(reductions),
        {
            "gather": Wire(lanes[0], "link", latency, pace),
            "reduce": Wire(lanes[1], "link", latency, pace),
        },
        levers=whole_levers(gathers),
    )
    return Case(name, problem, tuple(gather_layers), tuple(reduction_layers), more)


def seven(lanes: tuple[str, str] = ("wire", "wire")) -> list[Case]:
    """Seven cases: six of Llama-3-8B on H100s, compute bound and wire bound, and a small model over slow Ethernet."""
    links = ((8, 20e-6, 360e9), (64, 150e-6, 180e9), (128, 300e-6, 160e9))
    cases = [
        llama(f"H100 {ranks}r {tokens} tok", tokens, ranks, latency, bandwidth, lanes=lanes)
        for tokens in (8192, 2048)
        for ranks, latency, bandwidth in links
    ]
    small = {"layers": 12, "width": 768, "hidden": 2048, "kv": 768, "vocab": 32000}
    slow = {"flops": 150e9, "update_bandwidth": 2e10, "gather_bytes": 4, "more": 10**8}
    return [*cases, llama("gloo 4r 1Gbit", 1024, 4, 1e-3, 0.11e9, lanes=lanes, **small, **slow)]


def settle(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with each reduction waited for at the first place where it has arrived, so that nothing stalls."""
    end = len(problem.seconds)
    needs = [
        min(end, *(problem.reductions[i].deadline for i in bucket.members))
        for bucket in schedule.reductions
    ]
    late = replace(
        schedule,
        reductions=tuple(replace(b, wait=need) for b, need in zip(schedule.reductions, needs)),
    )
    outcome = evaluate(problem, late)
    arrive = list(accumulate(problem.seconds, initial=0.0))
    places = sorted({0, end, *(x for m in outcome.messages for x in (m.issue, m.need))})
    delay = dict(zip(places, (a - arrive[k] for k, a in zip(places, outcome.played.arrive))))
    clock, late_by = [], 0.0
    for k, t in enumerate(arrive):
        late_by = delay.get(k, late_by)
        clock.append(t + late_by)
        if k in delay:
            late_by = outcome.played.start[places.index(k)] - t
    ended = {(m.issue, m.need): e for m, e in zip(outcome.messages, outcome.played.end)}
    waits = [
        min(
            need,
            next((k for k in range(b.start, end + 1) if clock[k] >= ended[b.start, need]), end),
        )
        for b, need in zip(late.reductions, needs)
    ]
    return replace(
        late, reductions=tuple(replace(b, wait=w) for b, w in zip(late.reductions, waits))
    )


def runs(indices: Iterable[int], layer: Callable[[int], int]) -> list[tuple[int, ...]]:
    """Neighbours of the same layer, as groups."""
    return [tuple(group) for _, group in groupby(indices, key=layer)]


def full(indices: Iterable[int], size: Callable[[int], int], most: int) -> list[tuple[int, ...]]:
    """Buckets that are filled one after the other, with `most` bytes at most, or with one larger member."""
    buckets: list[list[int]] = []
    held = 0
    for i in indices:
        if buckets and held + size(i) <= most:
            buckets[-1].append(i)
            held += size(i)
        else:
            buckets.append([i])
            held = size(i)
    return [tuple(bucket) for bucket in buckets]


def one_ahead(problem: Problem, buckets: list[tuple[int, ...]]) -> tuple[Bucket, ...]:
    """Each bucket of gathers starts where the one before it is first used."""
    uses = [min(problem.gathers[i].use for i in bucket) for bucket in buckets]
    release = [max(problem.gathers[i].release for i in bucket) for bucket in buckets]
    starts = [0] + [max(min(a, b - 1), r) for (a, b), r in zip(pairwise(uses), release[1:])]
    return tuple(Bucket(*x) for x in zip(buckets, starts, uses))


def at_birth(problem: Problem, buckets: list[tuple[int, ...]]) -> tuple[Bucket, ...]:
    starts = [max(problem.reductions[i].born for i in bucket) + 1 for bucket in buckets]
    return tuple(Bucket(bucket, start, start) for bucket, start in zip(buckets, starts))


def fsdp2(case: Case) -> Schedule:
    """The schedule of FSDP2: a bucket for each layer, one gather ahead, one reduction at a time.

    The parameters of the last layer are kept between forward and backward.
    """
    p = case.problem
    last = max(case.gather_layers)
    dropped = frozenset(
        i
        for i, g in enumerate(p.gathers)
        if g.repeats is not None and case.gather_layers[i] == last
    )
    groups = runs(
        [i for i in range(len(p.gathers)) if i not in dropped], case.gather_layers.__getitem__
    )
    reductions = at_birth(p, runs(range(len(p.reductions)), case.reduction_layers.__getitem__))
    needs = [*(b.start for b in reductions[1:]), p.reductions[-1].deadline]
    waits = tuple(replace(b, wait=need) for b, need in zip(reductions, needs))
    levers = frozenset(i for i, lever in enumerate(p.levers) if lever.drops in dropped)
    return Schedule(one_ahead(p, groups), waits, levers)


def by_size(case: Case, most: int = 25 * 10**6) -> Schedule:
    """Buckets of 25 MB in forward and in backward, and one gather ahead."""
    p = case.problem
    forward = [i for i, g in enumerate(p.gathers) if g.repeats is None]
    backward = [i for i, g in enumerate(p.gathers) if g.repeats is not None]
    groups = [
        b for part in (forward, backward) for b in full(part, lambda i: p.gathers[i].bytes, most)
    ]
    reductions = full(range(len(p.reductions)), lambda i: p.reductions[i].bytes, most)
    return settle(p, Schedule(one_ahead(p, groups), at_birth(p, reductions)))


def plan_in_the_memory_of_fsdp2() -> Schedule:
    """A plan for one of the seven problems, in the memory that FSDP's schedule takes."""
    case = seven(("gather", "reduce"))[3]
    memory = evaluate(case.problem, fsdp2(case)).peak
    return solve(replace(case.problem, memory=memory), 3000)
