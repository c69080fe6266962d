"""Check: one case, from its seed to what is wrong with it."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ztrans as zt

from .options import Options
from .programs import Program
from .steps import step_of
from .truth import STEPS, distance, doubles, finite, in_micro_batches, true_steps

NEAR = 1e-10


class Wrong(Exception):
    """What a case does that it must not."""


@dataclass(frozen=True)
class Case:
    """A program, and what it is lowered with."""

    seed: int
    program: Program
    options: Options

    @staticmethod
    def of(seed: int) -> Case:
        chance = Random(seed)
        program = Program.draw(seed, chance)
        return Case(seed, program, Options.draw(program, chance))

    @property
    def name(self) -> str:
        return f"{self.program.name} || {self.options.name}"

    @property
    def reproduction(self) -> str:
        return f"python -m tests.fuzz --only {self.seed}"


def failure(seed: int, whole: bool = False) -> str | None:
    """What is wrong with a case, with the line that shows it again; None if nothing is."""
    case = Case.of(seed)
    try:
        with doubles(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module="ztrans")  # these programs are right: nothing is to be said,
            # but that a program does not check whether a matrix is singular.
            warnings.filterwarnings("ignore", "trace: .*_linalg_check_errors", module="ztrans")
            check(case)
    except Exception as error:
        text = str(error).split("\n")[0]
        what = f"{type(error).__name__}: {text}" if not whole else traceback.format_exc()
        return f"{case.reproduction}    # {what}\n    {case.name}"
    return None


def check(case: Case) -> None:
    """Raises: Wrong, or what the library raises."""
    program, options = case.program, case.options
    true_state, true_outputs = true_steps(program, options)
    if not finite((true_state, true_outputs)):
        raise Wrong("the plain step itself is not finite: mend the generator")
    step = step_of(program)
    batches = [_cut(program.batch(options.world, k), options.world) for k in range(STEPS)]
    state = program.state()
    plain = zt.chain(options.sharding)(step).lower(state, *batches[0][0])
    lowered = _lowered(options, step, state, batches[0][0], plain)
    for each in (plain, lowered):
        zt.check(each.graph)
    sharded, outputs = _steps(plain, program.state(), batches)
    far = max(distance(sharded, true_state), distance(_means(outputs), true_outputs))
    if not far <= NEAR:
        raise Wrong(f"{far:.3g} from the truth")
    if dict(options.shard).get("outputs") != "local" and any(distance(each, one[0]) for one in outputs for each in one):
        raise Wrong("ranks have outputs of their own")
    same, others = _steps(lowered, program.state(), batches)
    if not _equal((same, others), (sharded, outputs)):
        raise Wrong(f"schedules and fusion change bits: {distance((same, others), (sharded, outputs)):.3g}")
    if not program.rounds and options.reduce_dtype is None:
        _check_alone(case, true_state)


def _lowered(options: Options, step: Any, state: Any, batch: tuple, plain: zt.Lowered) -> zt.Lowered:
    """The step through all transforms; a budget that no order meets is an error that says what one needs."""
    axes = dict.fromkeys(dict(plain.graph.mesh), options.cluster[1])
    cluster = zt.cluster(options.cluster[0], **axes)
    peak = plain.memory_analysis().peak
    try:
        return zt.chain(*options.transforms(peak))(step).lower(state, *batch, cluster=cluster)
    except ValueError as error:
        if options.budget is None or "is less than the step needs in any order" not in str(error):
            raise
        return zt.chain(*options.transforms(4 * peak))(step).lower(state, *batch, cluster=cluster)


def _check_alone(case: Case, true_state: Any) -> None:
    """On one rank, compiled: code that updates in place computes what the step does."""
    step = zt.Step(step_of(case.program))
    state = step.shard(case.program.state())
    for k in range(STEPS):
        batch = case.program.batch(case.options.world, k)
        state, _ = step(state, *(in_micro_batches(x, case.program, case.options) for x in batch))
    far = distance(step.unshard(state), true_state)
    if not far <= NEAR:
        raise Wrong(f"compiled on one rank it is {far:.3g} from the truth")


def _steps(lowered: zt.Lowered, state: Any, batches: list) -> tuple[Any, list[list]]:
    """Some steps of all ranks in lock-step."""
    outputs = []
    for parts in batches:
        state, each = lowered.lockstep(state, parts)
        outputs.append(each)
    return state, outputs


def _cut(batch: tuple, world: int) -> list[tuple]:
    return list(zip(*(x.chunk(world) for x in batch)))


def _means(outputs: list[list]) -> list[Any]:
    """The mean over ranks of each step's output."""
    return [pytree.tree_map(lambda *x: torch.stack([torch.as_tensor(y) for y in x]).mean(0), *each) for each in outputs]


def _equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same bits."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: Any) -> torch.Tensor:
    x = torch.as_tensor(x).contiguous()
    return x.view(torch.uint8) if x.numel() and x.ndim else x.reshape(1).view(torch.uint8) if x.numel() else x
