"""Choose open options of a step within its memory limit, and find ways to fit a step that exceeds it.

A transform may leave an option open, such as the stage of `shard_params`. Then the step is planned and simulated with
each value of the option. `frontier` plans a step once for each of several limits. A step that does not fit is tried
with other transforms, so that its error can say what to write.

All decisions here depend only on the program, the transforms and the cluster, so ranks with equal batch sizes and
devices decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from .ir.dependencies import grouped
from .ir.graph import Graph, Var
from .ir.printer import format_bytes
from .planning.cluster import Cluster
from .planning.cost import Memory
from .planning.limit import DoesNotFit, Way
from .planning.place_copies import HostIsFull
from .planning.plan import Plan
from .planning.simulate import simulate
from .planning.skeleton import skeleton
from .transforms.accumulate import accumulate
from .transforms.base import Transform
from .transforms.offload import Offload, offload
from .transforms.remat import remat
from .transforms.shard_params import ShardParams

# Steps whose times differ by less than this share count as equally fast: two searches may differ by this much.
EQUAL = 0.01
# How many numbers of micro-batches to try, each twice the one before.
_TRIES = 3
# The total equations of all tries: a step of 5,000 equations gets 30 tries, enough for every way to fit, and a step of
# 50,000 gets 3, because each try takes long.
_EQNS_TO_TRY = 150_000
_LEAST_TRIES = 3


# `stages` imports this module, so protocols stand for its classes here.


class Planned(Protocol):
    """The program of one rank, as `stages.Lowered`."""

    @property
    def graph(self) -> Graph: ...
    @property
    def unordered(self) -> Graph: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def traced(self) -> Variant[Self]: ...
    def memory_analysis(self) -> Memory: ...
    def with_plan(self, plan: Plan) -> Self: ...
    def with_notes(self, notes: Sequence[str]) -> Self: ...


P_co = TypeVar("P_co", bound=Planned, covariant=True)
P = TypeVar("P", bound=Planned)


class Variant(Protocol[P_co]):
    """A step and its transforms, as `stages.Traced`."""

    @property
    def graph(self) -> Graph: ...
    @property
    def transforms(self) -> tuple[Transform, ...]: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def variants(self) -> Sequence[Variant[P_co]]: ...
    def with_transforms(self, transforms: tuple[Transform, ...]) -> Variant[P_co]: ...
    def without_order(self, cluster: Cluster | None, plan: Plan | None = None) -> P_co: ...
    def planned(self, cluster: Cluster | None) -> P_co: ...


class Trial(NamedTuple, Generic[P]):
    """A step in its planned order, with its simulated time in seconds."""

    lowered: P
    seconds: float

    @staticmethod
    def of(traced: Variant[P], cluster: Cluster | None) -> Trial[P]:
        """Raises: DoesNotFit if the step needs more memory than its limit."""
        lowered = with_chosen_options(traced, cluster)
        return Trial(lowered, simulate(lowered.graph, lowered.cluster).seconds)

    @property
    def peak(self) -> int:
        """The most bytes that are live on the device of a rank."""
        return self.lowered.memory_analysis().peak

    def way(self, line: str) -> Way:
        """This step as a way to fit. `line` is the code that the user adds."""
        return Way(line, self.seconds, self.peak)


# Open options.


def with_chosen_options(traced: Variant[P], cluster: Cluster | None) -> P:
    """Plan a step with the first of its fastest variants that fit.

    The notes of the plan name the chosen variant, and the time and memory of each.

    Raises: DoesNotFit if no variant fits: the error of the variant that needs the least memory. HostIsFull if the host
        has too little memory for any of them.
    """
    variants = traced.variants
    if len(variants) == 1:
        return traced.planned(cluster)
    results = [_result(variant, cluster) for variant in variants]
    trials = [result for result in results if isinstance(result, Trial)]
    if not trials:
        raise _closest_error(results)
    chosen = _first_of_fastest(trials)

    notes = []
    for variant, result in zip(variants, results):
        verb = "chosen" if result is chosen else "not chosen"
        notes.append(f"{verb}: {_takes(_chosen_options(traced, variant), result)}")
    return chosen.lowered.with_notes(notes)


def _closest_error(results: Sequence[Trial[P] | DoesNotFit | HostIsFull]) -> ValueError:
    """The error of the variant that needs the least device memory, among variants that fit on the host.

    If none fits there, it is the first error.
    """
    errors = [result for result in results if not isinstance(result, Trial)]
    too_large = [error for error in errors if isinstance(error, DoesNotFit)]
    if too_large:
        return min(too_large, key=lambda error: error.least.peak)
    return errors[0]


def _first_of_fastest(trials: Sequence[Trial[P]]) -> Trial[P]:
    fastest = min(trial.seconds for trial in trials)
    as_fast = [trial for trial in trials if trial.seconds <= fastest * (1 + EQUAL)]
    return as_fast[0]


def _chosen_options(traced: Variant[Any], variant: Variant[Any]) -> str:
    """The transforms of a variant that differ from the step's, with the options chosen."""
    return ", ".join(repr(t) for t in variant.transforms if t not in traced.transforms)


def _result(variant: Variant[P], cluster: Cluster | None) -> Trial[P] | DoesNotFit | HostIsFull:
    try:
        return Trial.of(variant, cluster)
    except (DoesNotFit, HostIsFull) as error:
        return error


def _takes(options: str, result: Trial[P] | DoesNotFit | HostIsFull) -> str:
    """A note on the time and memory of a variant with these options, or why it does not fit."""
    if isinstance(result, Trial):
        return str(result.way(options))
    if isinstance(result, HostIsFull):
        return f"{options}: the host has too little memory"
    return f"{options}: it needs {format_bytes(result.least.peak)}"


def variant_of_plan(traced: Variant[P], plan: Plan, cluster: Cluster | None) -> P:
    """The variant of a step whose program a plan is for, before it has an order; the first variant if there is none."""
    variants = [variant.without_order(cluster, plan) for variant in traced.variants]
    # Fingerprints take time, so a single variant is not compared.
    if len(variants) > 1:
        for variant in variants:
            if skeleton(variant.unordered).fingerprint == plan.program:
                return variant
    return variants[0]


# Several limits.


def frontier(traced: Variant[P], limits: Sequence[int], cluster: Cluster | None) -> list[P | None]:
    """For each limit, the fastest program that fits it, among the programs planned for all limits; None if none fits.

    Raises: ValueError if no transform of the step has a memory limit. DoesNotFit or HostIsFull if no limit is enough.
    """
    results: dict[int, Trial[P] | DoesNotFit | HostIsFull] = {}
    for limit in dict.fromkeys(limits):
        results[limit] = _result(_within(traced, limit), cluster)
    trials = {limit: trial for limit, trial in results.items() if isinstance(trial, Trial)}
    if results and not trials:
        raise _closest_error([results[limit] for limit in sorted(results, reverse=True)])

    programs: list[P | None] = []
    for limit in limits:
        planned_for = fastest_within(trials, limit)
        if planned_for is None:
            programs.append(None)
        elif planned_for == limit:
            programs.append(trials[limit].lowered)
        else:
            programs.append(_with_limit(trials[planned_for].lowered, planned_for, limit))
    return programs


def fastest_within(trials: Mapping[int, Trial[Any]], limit: int) -> int | None:
    """The limit that the fastest trial within `limit` was planned for; None if no trial fits.

    Args:
        trials: the planned steps by the limit that each was planned for.
        limit: the bytes that may be live.
    """
    fitting = [planned_for for planned_for, trial in trials.items() if trial.peak <= limit]

    def rank(planned_for: int) -> tuple[float, bool, int]:
        trial = trials[planned_for]
        return trial.seconds, planned_for != limit, trial.peak

    return min(fitting, key=rank, default=None)


def _within(traced: Variant[P], limit: int) -> Variant[P]:
    """A step within another memory limit.

    Raises: ValueError if no transform has a limit, or if a transform keeps its own.
    """
    transforms = tuple(t.within(limit) for t in traced.transforms)
    for t in transforms:
        if t.memory_limit not in (None, limit):
            raise ValueError(
                f"{t!r}: it names a limit of memory, and it cannot be given another one.\n"
                f"Write its method `within(self, limit)`, which returns this transform with that limit."
            )
    if all(t.memory_limit is None for t in transforms):
        raise ValueError(
            f"{traced.graph.name}: no transform of this step has a limit of memory.\n"
            f'Add zt.prefetch(), or zt.remat(memory="auto") to choose what backward recomputes.'
        )
    return traced.with_transforms(transforms)


def _with_limit(lowered: P, planned_for: int, limit: int) -> P:
    """The program of a step within `limit`, in the order that was planned for another limit."""
    plan = lowered.plan
    limited = _within(lowered.traced, limit).without_order(lowered.cluster, plan)
    note = f"found within {format_bytes(planned_for)}"
    fingerprint = skeleton(limited.unordered).fingerprint
    return limited.with_plan(
        dataclasses.replace(plan, program=fingerprint, notes=(note, *plan.notes))
    )


# Ways to fit.

# A line of code that may help, and the step with it.
Proposal = tuple[str, Variant[Any]]
# A generator of proposals of one kind for a step that does not fit, from the smallest change to the largest.
Remedy = Callable[[Variant[Any], DoesNotFit], Iterator[Proposal]]


class _Attempt(NamedTuple):
    """A step that does not fit, with the lines added so far, and the remedies that may still be added."""

    lines: tuple[str, ...]
    traced: Variant[Any]
    error: DoesNotFit
    remedies: tuple[Remedy, ...]


def ways_to_fit(traced: Variant[Any], cluster: Cluster | None, error: DoesNotFit) -> list[Way]:
    """The ways to make a step fit its limit: one more transform each, or several where one is not enough.

    Each try plans and simulates the step, which takes as long as lowering it, so a large step gets few tries. Their
    number depends only on the size of the program, so all ranks try the same ways.
    """
    tries_left = max(_LEAST_TRIES, _EQNS_TO_TRY // max(1, len(traced.graph.eqns)))
    attempts = [_Attempt((), traced, error, _REMEDIES)]
    while attempts:
        ways: list[Way] = []
        failed: list[_Attempt] = []
        for attempt in attempts:
            for number, remedy in enumerate(attempt.remedies):
                if not tries_left:
                    return ways
                tries_left -= 1
                # Only later remedies may follow this one, so that no combination is tried twice.
                later_remedies = attempt.remedies[number + 1 :]
                result = _tried(attempt, remedy, later_remedies, cluster)
                if isinstance(result, Way):
                    ways.append(result)
                elif result is not None:
                    failed.append(result)
        # Report the ways with the fewest lines: longer ones are tried only if all of these fail.
        if ways:
            return ways
        attempts = failed
    return []


def _tried(
    attempt: _Attempt, remedy: Remedy, later_remedies: tuple[Remedy, ...], cluster: Cluster | None
) -> Way | _Attempt | None:
    """The first way that fits among the proposals of a remedy.

    If none fits, the attempt with the proposal that needs the least memory; None if no proposal needs less than before.
    """
    best = attempt
    for line, variant in remedy(attempt.traced, attempt.error):
        lines = _with_line(attempt.lines, line)
        try:
            return Trial.of(variant, cluster).way(" and ".join(lines))
        except DoesNotFit as error:
            if error.least.peak < best.error.least.peak:
                best = _Attempt(lines, variant, error, later_remedies)
        except ValueError:
            # The transform refuses this step, or the host has too little memory for it.
            continue
    return best if best is not attempt else None


def _with_line(lines: tuple[str, ...], line: str) -> tuple[str, ...]:
    """These lines and one more, which replaces an earlier line with the same transform.

    >>> _with_line(("zt.accumulate(2)", "zt.offload(where='m.*')"), "zt.offload(where='m.*', memory='auto')")
    ('zt.accumulate(2)', "zt.offload(where='m.*', memory='auto')")
    """
    transform = line.partition("(")[0]
    others = [other for other in lines if other.partition("(")[0] != transform]
    return (*others, line)


def _higher_stages(traced: Variant[Any], error: DoesNotFit) -> Iterator[Proposal]:
    for t in traced.transforms:
        if isinstance(t, ShardParams) and isinstance(t.stage, int):
            for stage in range(t.stage + 1, 4):
                higher = dataclasses.replace(t, stage=stage)
                yield f"zt.shard_params(..., stage={stage})", _with(traced, higher)


def _recomputation(traced: Variant[Any], error: DoesNotFit) -> Iterator[Proposal]:
    planned_remat = remat(memory="auto")
    present = [t for t in traced.transforms if type(t) is type(planned_remat)]
    if error.room > 0 and not present:
        yield 'zt.remat(memory="auto")', _with(traced, planned_remat)
    elif error.room > 0 and present == [remat()]:
        yield 'zt.remat(memory="auto") in place of zt.remat()', _with(traced, planned_remat)


def _activations_on_host(traced: Variant[Any], error: DoesNotFit) -> Iterator[Proposal]:
    if error.room <= 0:
        return
    present = next((t for t in traced.transforms if isinstance(t, Offload)), None)
    if present is None:
        yield 'zt.offload(memory="auto")', _with(traced, offload(memory="auto"))
    elif present.memory is None and isinstance(present.where, str):
        # The moments are on the host already, and that is not enough.
        both = offload(where=present.where, memory="auto", across_steps=present.across_steps)
        yield f"zt.{both!r}", _with(traced, both)


def _moments_on_host(traced: Variant[Any], error: DoesNotFit) -> Iterator[Proposal]:
    if not any(isinstance(t, Offload) for t in traced.transforms):
        pattern = pattern_of_moments(traced.graph)
        if pattern:
            yield f"zt.offload(where={pattern!r})", _with(traced, offload(where=pattern))


def pattern_of_moments(graph: Graph) -> str:
    """A pattern for as many leaves as one pattern can name among those that only the update reads; "" for none."""
    sizes = _bytes_of_moments(graph)
    if not sizes:
        return ""
    # Names of one letter, such as "m" and "v" of Adam, fit into one pattern.
    letters = "".join(name for name in sizes if len(name) == 1)
    if len(letters) == len(sizes) > 1:
        return f"[{letters}].*"
    largest = max(sizes, key=lambda name: sizes[name])
    return f"{largest}.*"


def _bytes_of_moments(graph: Graph) -> dict[str, int]:
    """The bytes of the parts of the state that only the update reads, by the first name of their paths."""
    read_before: set[Var] = set()
    for e in graph.eqns:
        if e.region != "update":
            read_before.update(e.ins)
    leaves_in_parts: list[tuple[str, Var]] = []
    for v in graph.inputs[: graph.num_state]:
        part, dot, _ = v.name.partition(".")
        if dot:
            leaves_in_parts.append((part, v))
    sizes = {}
    for name, leaves in grouped(leaves_in_parts).items():
        size = sum(v.numel * v.dtype.itemsize for v in leaves if v.shape)
        if size and read_before.isdisjoint(leaves):
            sizes[name] = size
    return sizes


def _micro_batches(traced: Variant[Any], error: DoesNotFit) -> Iterator[Proposal]:
    """The smallest number of micro-batches that may be enough, and its doublings."""
    if error.room <= 0:
        return
    # At best, n micro-batches divide the live bytes other than the state by n.
    times_too_large = (error.least.peak - error.least.state) / error.room
    first = max(1, math.ceil(math.log2(times_too_large)))
    for doublings in range(first, first + _TRIES):
        micro = traced.micro_batches << doublings
        try:
            variant = _with(traced, accumulate(micro))
        except Exception:
            # The step itself may fail on smaller batches with any error.
            return
        yield f"zt.accumulate({micro})", variant


_REMEDIES: tuple[Remedy, ...] = (
    _higher_stages,
    _recomputation,
    _moments_on_host,
    _activations_on_host,
    _micro_batches,
)


def _with(traced: Variant[Any], transform: Transform) -> Variant[Any]:
    """A step with a transform, which replaces one of the same kind."""
    transforms = list(traced.transforms)
    for i, present in enumerate(transforms):
        if type(present) is type(transform):
            transforms[i] = transform
            return traced.with_transforms(tuple(transforms))
    return traced.with_transforms((*transforms, transform))
