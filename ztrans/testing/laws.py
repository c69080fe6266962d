"""Check that a transform obeys the laws of SPEC.md, on a step of one's own.

All ranks run in this process, in lock-step, so no process group is needed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..calling.call import ExtraInputs
from ..calling.kept import parted
from ..calling.purity import first_difference
from ..ir.graph import Graph
from ..ir.layout import AbstractMesh
from ..ir.printer import equation
from ..ir.verifier import check
from ..stages import Lowered, Traced
from ..step import Step
from ..transforms.base import Transform, chain, micro_batches_of
from ..transforms.fuse_cast_gather import fuse_cast_gather
from ..transforms.overlap_grads import overlap_grads
from ..transforms.prefetch import prefetch
from ..transforms.shard_params import shard_params


class LawError(AssertionError):
    """A transform breaks a law."""


def check_laws(
    transform: Transform,
    step: Any,
    state: Any,
    batch: tuple,
    *,
    reference: Any = None,
    worlds: Sequence[int] = (1, 2, 3),
    stages: Sequence[Literal[0, 1, 2, 3]] = (0, 2, 3),
    tolerance: float = 0.0,
    unsharded: bool = True,
) -> None:
    """Check that a transform obeys the laws on a step: on one device, and on several ranks, sharded and scheduled.

    - It is a value: equal to a copy of itself, and hashable. Applying it twice is the same as applying it once.
    - The step has the same program when it is traced a second time, from a copy of its arguments.
    - Its programs are well formed, alone and among other transforms.
    - It has the meaning that it should: the new state and the output equal those of the step without it, or those of
      `reference`, through the same shard_params.
    - Its place among the schedules does not matter: the program has the same text in any order.

    Not checked: outputs that the transform adds; a second call, so what passes from step to step; processes, gloo,
    NCCL, GPUs and compiled kernels, because all ranks run in this process; meshes of several axes, and ranks with
    batches of different sizes; accumulate, remat and offload beside it; time and memory; and whether `reference` is
    right. The laws hold for the steps that you check, so choose one with every case that the transform treats.

    Args:
        transform: the transform.
        step: a plain step, `step(state, *batch) -> (state, output)`.
        state: its first state, with full tensors.
        batch: its arguments after the state. Tensors are cut along dim 0 into a slice for each rank; the last rows are
            dropped if they do not fill a slice.
        reference: for a transform that changes numbers, such as one that clips gradients: a plain step that does by
            hand what the transform does to `step`. It runs on the same ranks, each with its slice of the batch, so it
            may reduce over them (`zt.psum`), and gets a rank's own gradients by `zt.pvary(params, x)`.
        worlds: the numbers of ranks.
        stages: the ZeRO stages.
        tolerance: the greatest relative distance of a leaf, in norm, from the result without the transform, or of
            `reference`. 0 requires the same bits.
        unsharded: whether to check the step without shard_params too. Pass False for a transform that needs
            shard_params, such as overlap_grads or one that changes what collectives send.

    Raises: LawError with the law, the ranks, the stage and the leaf.

    >>> import ztrans as zt
    >>> def step(state, x):
    ...     return {"w": state["w"] - 0.1 * zt.pmean(x.mean(0))}, x.sum()
    >>> zt.testing.check_laws(zt.remat(), step, {"w": torch.zeros(4)}, (torch.randn(6, 4),), worlds=(1,), stages=(0,))
    """
    _check_value(transform, step)
    _check_traced_twice(Step.of(step), state, batch)
    cases: list[tuple[Sequence[tuple], Sequence[Literal[0, 1, 2, 3] | None]]] = []
    if unsharded:
        cases.append(([batch], [None]))
    for ranks in worlds:
        rows = [_slice(batch, rank, ranks) for rank in range(ranks)]
        # On one rank all stages are the same program.
        cases.append((rows, stages if ranks > 1 else stages[-1:]))
    for slices, stages_of_case in cases:
        case = _Case(step, state, slices)
        expected = case if reference is None else _Case(reference, state, slices)
        for stage in stages_of_case:
            _check_world(transform, case, expected, stage, tolerance)


class _Case:
    """A step, its state, and a slice of the batch for each rank. It is traced once."""

    def __init__(self, step: Any, state: Any, slices: Sequence[tuple]) -> None:
        self.step = Step.of(step)
        self.state = state
        self.slices = slices
        # By the number of micro-batches, and by the transforms that keep leaves of their own in the state.
        self.traces: dict[tuple, Traced] = {}

    def lowered(self, *transforms: Transform) -> Lowered:
        """The step through some transforms. Checks that every program on the way is well formed."""
        step = chain(*transforms)(self.step)
        keeping = [t for t in step.transforms if type(t).keeps is not Transform.keeps]
        key = (micro_batches_of(step.transforms), *keeping)
        if key not in self.traces:
            self.traces[key] = step.trace(step.init(self.state), *self.slices[0])
        lowered = dataclasses.replace(self.traces[key], transforms=step.transforms).lower()
        for _, graph in lowered.history:
            if isinstance(graph, Graph):  # the first stage is the FX graph
                check(graph)
        return lowered

    def results(self, lowered: Lowered) -> tuple[Any, list[Any]]:
        """The new state and the output of each rank, without the leaves and the outputs that a transform added."""
        torch.manual_seed(0)  # a step may draw random numbers
        transforms = lowered.traced.transforms
        state = Step(self.step.fn, transforms).init(self.state)
        new_state, outputs = lowered.lockstep(state, self.slices)
        is_lifted = isinstance(self.step.fn, ExtraInputs)
        new_state, _ = parted(new_state, [t.name for t in transforms], is_lifted)
        if lowered.graph.added:
            outputs = [output for output, _ in outputs]
        return new_state, outputs


def _check_world(
    transform: Transform,
    case: _Case,
    reference: _Case,
    stage: Literal[0, 1, 2, 3] | None,
    tolerance: float,
) -> None:
    """Check the transform for a number of ranks and a ZeRO stage, alone and among the schedules.

    Its results are compared with those of `reference`, the step without it or with its meaning written by hand.
    """
    ranks = len(case.slices)
    has_reference = reference is not case
    shard: tuple[Transform, ...] = ()
    world = "on one device"
    if stage is not None:
        shard = (shard_params(AbstractMesh(dp=ranks), stage=stage),)
        world = f"on {ranks} ranks, stage {stage}"
    expected = reference.results(reference.lowered(*shard))
    alone = case.lowered(*shard, transform)
    try:
        _check_same(case.results(alone), expected, tolerance, has_reference, f"{world}, alone")
    except LawError as error:
        changed = _equations(alone) != _equations(case.lowered(*shard))
        if changed or transform.phase != Transform.phase:
            raise
        raise LawError(
            f"{error}\n{transform!r} changed no equation. Its phase is {transform.phase}, and the marks of a step, "
            f"such as gradient(g, w), are there only in phases 0 and 1."
        ) from None
    if stage is None:
        return

    all_schedules = (overlap_grads(), prefetch(), fuse_cast_gather())
    # A step cannot have one transform twice with different options, so a schedule of the same class is left out.
    schedules = [schedule for schedule in all_schedules if type(schedule) is not type(transform)]
    first = case.lowered(*shard, transform, *schedules)
    last = case.lowered(*shard, *schedules, transform)
    if str(first) != str(last):
        raise LawError(
            f"{transform!r}: the program depends on its place among the schedules, {world}.\n"
            f"In its rewrite, neither read hints (`Eqn.hint`) nor overwrite the hints of other transforms."
        )
    _check_same(
        case.results(first), expected, tolerance, has_reference, f"{world}, among schedules"
    )


def _equations(lowered: Lowered) -> list[str]:
    return list(map(equation, lowered.graph.eqns))


def _check_value(transform: Transform, step: Any) -> None:
    """Check that the transform is a value, and that a second application changes nothing."""
    equal_transform = dataclasses.replace(transform)
    try:
        is_value = equal_transform == transform and hash(equal_transform) == hash(transform)
    except TypeError:  # an option has no hash
        is_value = False
    if not is_value:
        raise LawError(
            f"{transform!r} is not a value: it must be equal to a copy of itself, and have a hash.\n"
            f"Make its class a frozen dataclass, @dataclass(frozen=True), with numbers, strings, tuples or "
            f"functions as options."
        )
    if transform(transform(Step.of(step))) != transform(Step.of(step)):
        raise LawError(f"{transform!r} applied twice is not {transform!r} applied once.")


def _check_traced_twice(step: Step, state: Any, batch: tuple) -> None:
    """Check that Python code run by one trace does not change the next trace."""
    programs = []
    for _ in range(2):
        arguments = _copied((state, *batch))
        programs.append(step.trace(*arguments).graph)
    difference = first_difference(*programs)
    if difference:
        raise LawError(
            f"{step.__name__}: traced twice, it has two programs, because the first trace changed a Python value that "
            f"the second one read:\n{difference}\n"
            f"Pass the value in as an argument, or keep it in the state. docs/limits.md lists what is fixed."
        )


def _copied(arguments: tuple) -> tuple:
    """A copy of the arguments, or the arguments themselves if one cannot be copied."""
    try:
        return copy.deepcopy(arguments)
    except (RuntimeError, TypeError):
        # A tensor that is not a leaf of autograd cannot be copied, nor can an object such as a lock.
        return arguments


def _slice(batch: tuple, rank: int, ranks: int) -> tuple:
    """The rows of one rank. All ranks have equally many, because a mean over ranks gives each the same weight."""

    def rows_of_rank(x: torch.Tensor) -> torch.Tensor:
        if not x.ndim:
            return x
        rows = len(x) // ranks
        return x[rank * rows : (rank + 1) * rows]

    return pytree.tree_map_only(torch.Tensor, rows_of_rank, batch)


def _check_same(
    results: tuple[Any, list],
    expected: tuple[Any, list],
    tolerance: float,
    has_reference: bool,
    world: str,
) -> None:
    """Compare the results of two programs: the new state, and the output of each rank."""
    condition = "the same bits are asked for"
    if tolerance:
        condition = f"at most {tolerance:.1e} is allowed"
    differs = "the transform changes"
    advice = "Compare the programs: zt.ir.diff(step.lower(...), transform(step).lower(...))."
    if has_reference:
        differs = "the transform and its reference differ in"
        advice = (
            "Compare the programs: zt.ir.diff(reference.lower(...), transform(step).lower(...))."
        )
    leaves = pytree.tree_leaves_with_path(results)
    for (path, a), b in zip(leaves, pytree.tree_leaves(expected), strict=True):
        if a is None and b is None:  # an output may be None
            continue
        distance = _distance(a, b)
        if not distance <= tolerance:  # in this form, NaN is not allowed
            name = "state" if path[0] == pytree.SequenceKey(0) else "output"
            raise LawError(
                f"{differs} {name}{pytree.keystr(path[1:])} by {distance:.1e} {world}: {condition}.\n{advice}"
            )


def _distance(a: Any, b: Any) -> float:
    """The distance of two leaves in norm, relative to the norm of the second; 0 for equal bits."""
    a = torch.as_tensor(a)
    b = torch.as_tensor(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    # Infinities and NaNs that both leaves share would make the norms infinite or NaN.
    wide = torch.complex128 if b.is_complex() else torch.float64
    a = a.to(wide).masked_fill(same & ~a.isfinite(), 0)
    b = b.to(wide).masked_fill(same & ~b.isfinite(), 0)
    size = b.norm().item()
    return (a - b).norm().item() / size if size else float("inf")
