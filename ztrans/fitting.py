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
from typing import Any, Generic, NamedTuple, TypeVar

from .analyses.wide_values import wide_parts
from .ir.cached_analysis import cached_on_graph
from .ir.dependencies import grouped
from .ir.graph import Graph, Var
from .ir.printer import format_bytes
from .planning.limit import DoesNotFit, Way
from .planning.place_copies import HostIsFull
from .transforms.accumulate import accumulate
from .transforms.base import Transform, micro_batches_of, program_shardings
from .transforms.offload import Offload, offload
from .transforms.remat import remat
from .transforms.shard_params import ShardParams
from .transforms.tile import tile

# Steps whose times differ by less than this share count as equally fast: two searches may differ by this much.
EQUAL = 0.01
# How many numbers of micro-batches to try, each twice the one before.
_TRIES = 3
# The total equations of all tries: a step of 5,000 equations gets 30 tries, enough for every way to fit, and a step of
# 50,000 gets 3, because each try takes long.
_EQNS_TO_TRY = 150_000
_LEAST_TRIES = 3

T = TypeVar("T")
Transforms = tuple[Transform, ...]


class Trial(NamedTuple, Generic[T]):
    """A step in its planned order, with its simulated seconds and the most bytes that are live on a device."""

    lowered: T
    seconds: float
    peak: int

    def way(self, line: str) -> Way:
        """This step as a way to fit. `line` is the code that the user adds."""
        return Way(line, self.seconds, self.peak)


Result = Trial[T] | DoesNotFit | HostIsFull


# Open options.


def fastest_variant(results: Sequence[tuple[str, Result[T]]]) -> tuple[T, list[str]]:
    """The first of the fastest variants of a step that fit, and a note on each variant.

    Args:
        results: the options that each variant has chosen, and its trial.

    Raises: DoesNotFit or HostIsFull if none fits (see `closest_error`).
    """
    trials = [result for _, result in results if isinstance(result, Trial)]
    if not trials:
        raise closest_error([result for _, result in results])
    least_seconds = min(trial.seconds for trial in trials)
    fastest = [trial for trial in trials if trial.seconds <= least_seconds * (1 + EQUAL)]

    notes = []
    for options, result in results:
        verb = "chosen" if result is fastest[0] else "not chosen"
        notes.append(f"{verb}: {_takes(options, result)}")
    return fastest[0].lowered, notes


def closest_error(results: Sequence[Result[Any]]) -> ValueError:
    """The error of the variant that needs the least device memory, among variants that fit on the host.

    If none fits there, it is the first error.
    """
    errors = [result for result in results if not isinstance(result, Trial)]
    too_large = [error for error in errors if isinstance(error, DoesNotFit)]
    if too_large:
        return min(too_large, key=lambda error: error.least.peak)
    return errors[0]


def _takes(options: str, result: Result[Any]) -> str:
    """A note on the time and memory of a variant with these options, or why it does not fit."""
    if isinstance(result, Trial):
        return str(result.way(options))
    if isinstance(result, HostIsFull):
        return f"{options}: the host has too little memory"
    return f"{options}: it needs {format_bytes(result.least.peak)}"


# Several limits.


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


def within_limit(transforms: Transforms, limit: int, step: str) -> Transforms:
    """The transforms of a step within another memory limit.

    Raises: ValueError if no transform has a limit, or if a transform keeps its own.
    """
    limited = tuple(t.within(limit) for t in transforms)
    for t in limited:
        if t.memory_limit not in (None, limit):
            raise ValueError(
                f"{t!r}: it names a limit of memory, and it cannot be given another one.\n"
                f"Write its method `within(self, limit)`, which returns this transform with that limit."
            )
    if all(t.memory_limit is None for t in limited):
        raise ValueError(
            f"{step}: no transform of this step has a limit of memory.\n"
            f'Add zt.prefetch(), or zt.remat(memory="auto") to choose what backward recomputes.'
        )
    return limited


# Ways to fit.


# A line of code that may help, and the transforms of the step with it.
Proposal = tuple[str, Transforms]
# A generator of proposals of one kind for a step that does not fit, from the smallest change to the largest.
Remedy = Callable[["Attempt"], Iterator[Proposal]]
# Plans a step with other transforms. Raises DoesNotFit, or ValueError if the step cannot have them.
Try = Callable[[Transforms], Trial[Any]]


class Attempt(NamedTuple):
    """A step that does not fit.

    Attributes:
        graph: the program as written.
        transforms: the transforms of the step.
        error: what it needs, and its limit.
        lines: the lines added so far.
        remedies: the remedies that may still be added.
    """

    graph: Graph
    transforms: Transforms
    error: DoesNotFit
    lines: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()


def ways_to_fit(
    graph: Graph, transforms: Transforms, error: DoesNotFit, try_with: Try
) -> list[Way]:
    """The ways to make a step fit its limit: one more transform each, or several where one is not enough.

    Each try plans and simulates the step, which takes as long as lowering it, so a large step gets few tries. Their
    number depends only on the size of the program, so all ranks try the same ways.
    """
    tries_left = max(_LEAST_TRIES, _EQNS_TO_TRY // max(1, len(graph.eqns)))
    attempts = [Attempt(graph, transforms, error, remedies=_REMEDIES)]
    while attempts:
        ways: list[Way] = []
        failed: list[Attempt] = []
        for attempt in attempts:
            for number, remedy in enumerate(attempt.remedies):
                if not tries_left:
                    return ways
                tries_left -= 1
                # Only later remedies may follow this one, so that no combination is tried twice.
                later_remedies = attempt.remedies[number + 1 :]
                result = _tried(attempt, remedy, later_remedies, try_with)
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
    attempt: Attempt, remedy: Remedy, later_remedies: tuple[Remedy, ...], try_with: Try
) -> Way | Attempt | None:
    """The first way that fits among the proposals of a remedy.

    If none fits, the attempt with the proposal that needs the least memory; None if no proposal needs less than before.
    """
    best = attempt
    for line, transforms in remedy(attempt):
        lines = _with_line(attempt.lines, line)
        try:
            return try_with(transforms).way(" and ".join(lines))
        except DoesNotFit as error:
            if error.least.peak < best.error.least.peak:
                best = Attempt(attempt.graph, transforms, error, lines, later_remedies)
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


def _higher_stages(attempt: Attempt) -> Iterator[Proposal]:
    for t in attempt.transforms:
        if isinstance(t, ShardParams) and isinstance(t.stage, int):
            for stage in range(t.stage + 1, 4):
                higher = dataclasses.replace(t, stage=stage)
                yield f"zt.shard_params(..., stage={stage})", _with(attempt, higher)


def _recomputation(attempt: Attempt) -> Iterator[Proposal]:
    planned_remat = remat(memory="auto")
    present = [t for t in attempt.transforms if type(t) is type(planned_remat)]
    if attempt.error.room > 0 and not present:
        yield 'zt.remat(memory="auto")', _with(attempt, planned_remat)
    elif attempt.error.room > 0 and present == [remat()]:
        yield 'zt.remat(memory="auto") in place of zt.remat()', _with(attempt, planned_remat)


def _tiles(attempt: Attempt) -> Iterator[Proposal]:
    tiles = tile(memory="auto")
    present = any(type(t) is type(tiles) for t in attempt.transforms)
    if attempt.error.room > 0 and not present and wide_parts(attempt.graph):
        yield 'zt.tile(memory="auto")', _with(attempt, tiles)


def _activations_on_host(attempt: Attempt) -> Iterator[Proposal]:
    if attempt.error.room <= 0:
        return
    present = next((t for t in attempt.transforms if isinstance(t, Offload)), None)
    if present is None:
        yield 'zt.offload(memory="auto")', _with(attempt, offload(memory="auto"))
    elif present.memory is None and isinstance(present.where, str):
        # The moments are on the host already, and that is not enough.
        both = dataclasses.replace(present, memory="auto")
        yield f"zt.{both!r}", _with(attempt, both)


def _moments_on_host(attempt: Attempt) -> Iterator[Proposal]:
    if not any(isinstance(t, Offload) for t in attempt.transforms):
        pattern = pattern_of_moments(attempt.graph)
        if pattern:
            moments = offload(where=pattern)
            shardings = program_shardings(attempt.graph, [moments]).values()
            if all(sharding.memory == "device" for sharding in shardings):  # all leaves are small
                moments = offload(where=pattern, at_least=0)
            yield f"zt.{moments!r}", _with(attempt, moments)


@cached_on_graph
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
    for v in graph.state:
        part, dot, _ = v.name.partition(".")
        if dot:
            leaves_in_parts.append((part, v))
    sizes = {}
    for name, leaves in grouped(leaves_in_parts).items():
        size = sum(v.nbytes for v in leaves if v.shape)
        if size and read_before.isdisjoint(leaves):
            sizes[name] = size
    return sizes


def _micro_batches(attempt: Attempt) -> Iterator[Proposal]:
    """The smallest number of micro-batches that may be enough, and its doublings."""
    error = attempt.error
    if error.room <= 0:
        return
    # At best, n micro-batches divide the live bytes other than the state by n.
    times_too_large = (error.least.peak - error.least.state) / error.room
    first = max(1, math.ceil(math.log2(times_too_large)))
    for doublings in range(first, first + _TRIES):
        micro = micro_batches_of(attempt.transforms) << doublings
        yield f"zt.accumulate({micro})", _with(attempt, accumulate(micro))


_REMEDIES: tuple[Remedy, ...] = (
    _higher_stages,
    _recomputation,
    _tiles,
    _moments_on_host,
    _activations_on_host,
    _micro_batches,
)


def _with(attempt: Attempt, transform: Transform) -> Transforms:
    """The transforms of a step with one more, which replaces one of the same kind."""
    transforms = list(attempt.transforms)
    for i, present in enumerate(transforms):
        if type(present) is type(transform):
            transforms[i] = transform
            return tuple(transforms)
    return (*transforms, transform)
