"""Check: one case, from its seed to what is wrong with it."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.calling.trees import named_leaves
from ztrans.planning.limit import DoesNotFit
from ztrans.transforms.base import rewritten
from ztrans.transforms.store import Store

from .options import Options
from .programs import Program
from .steps import step_of
from .truth import STEPS, distance, doubles, finite, true_steps

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
            warnings.filterwarnings(
                "error", module="ztrans"
            )  # these programs are right: nothing is to be said,
            # but that a program does not check whether a matrix is singular.
            warnings.filterwarnings("ignore", "trace: .*_linalg_check_errors", module="ztrans")
            # PyTorch says so of vmap, of the first such operation in a process.
            warnings.filterwarnings("ignore", "There is a performance drop", module="ztrans")
            check(case)
    except Exception as error:
        text = str(error).split("\n")[0]
        message = f"{type(error).__name__}: {text}" if not whole else traceback.format_exc()
        return f"{case.reproduction}    # {message}\n    {case.name}"
    return None


def check(case: Case) -> None:
    """Raises: Wrong, or what the library raises."""
    program, options = case.program, case.options
    true_state, true_outputs = true_steps(program, options)
    if not finite((true_state, true_outputs)):
        raise Wrong("the plain step itself is not finite: mend the generator")
    batches = [_cut(program.batch(options.world, k), options.world) for k in range(STEPS)]
    # Every program of the case comes from one trace, of a rank's batch: tracing takes most of the time.
    traced = zt.Step(step_of(program)).trace(program.state(), *batches[0][0])
    options = _with_possible_tiles(options, traced)
    plain = _through(traced, *options.tiles, options.sharding).lower()
    lowered = _lowered(options, traced, plain)
    for each in (plain, lowered):
        zt.ir.check(each.graph)
    _check_figures(lowered)
    sharded, outputs = _steps(plain, program.state(), batches)
    far = max(distance(sharded, true_state), distance(_means(outputs), true_outputs))
    if not far <= NEAR:
        raise Wrong(f"{far:.3g} from the truth")
    if dict(options.shard).get("outputs") != "local" and any(
        distance(output, outputs_of_rank[0])
        for outputs_of_rank in outputs
        for output in outputs_of_rank
    ):
        raise Wrong("ranks have outputs of their own")
    same, others = _steps(lowered, program.state(), batches)
    if not _equal((same, others), (sharded, outputs)):
        raise Wrong(
            f"schedules and fusion change bits: {distance((same, others), (sharded, outputs)):.3g}"
        )
    if not program.rounds and options.reduce_dtype is None:
        _check_alone(program, traced, batches)
        _check_local(program, options, batches, sharded)
    if options.codes:
        _check_codes(case, batches)
    if options.averages:
        _check_averages(case, batches)
    if case.seed % 2 == 0:
        _check_micro_batches(case, batches)


def _with_possible_tiles(options: Options, traced: zt.stages.Traced) -> Options:
    """The options without tiles if the widest values of the step cannot be cut."""
    try:
        for transform in options.tiles:
            rewritten(traced.graph, transform)
    except ValueError as error:
        if not str(error).startswith("tile: "):
            raise
        return dataclasses.replace(options, tiles=())
    return options


def _through(traced: zt.stages.Traced, *transforms: zt.Transform) -> zt.stages.Traced:
    """The traced step with these transforms."""
    return dataclasses.replace(
        traced, transforms=zt.chain(*transforms)(lambda state: state).transforms
    )


def _lowered(
    options: Options, traced: zt.stages.Traced, plain: zt.stages.Lowered
) -> zt.stages.Lowered:
    """The step through all transforms; a budget that no order meets is an error that says what one needs."""
    axes = dict.fromkeys(dict(plain.graph.mesh), options.cluster[1])
    cluster = zt.cluster(options.cluster[0], **axes)
    peak = plain.memory_analysis().peak
    try:
        # As `lower`, whose error would also say what fits, which takes many plans to find.
        return _through(traced, *options.transforms(peak)).planned(cluster)
    except DoesNotFit:
        if options.budget is None:
            raise
        return _through(traced, *options.transforms(4 * peak)).lower(cluster=cluster)


def _check_figures(lowered: zt.stages.Lowered) -> None:
    """No plan beats its bound, and no peak exceeds the limit of a plan that fits."""
    timeline = lowered.timeline()
    if timeline.bound is not None and timeline.bound[0] > timeline.seconds * (1 + 1e-9):
        raise Wrong(f"the step takes {timeline.seconds} s, and its bound is {timeline.bound[0]} s")
    if timeline.limit is not None and timeline.peak > timeline.limit:
        raise Wrong(f"the peak is {timeline.peak} bytes, and the limit {timeline.limit}")


def _check_alone(program: Program, traced: zt.stages.Traced, batches: list) -> None:
    """On one rank, compiled: code that updates in place computes what the step does."""
    step = step_of(program)
    compiled, state, truth = (
        traced.lower().compile(),
        zt.Step(step).shard(program.state()),
        program.state(),
    )
    for parts in batches:
        state, _ = compiled(state, *parts[0])
        truth, _ = step(truth, *parts[0])
    far = distance(state, truth)
    if not far <= NEAR:
        raise Wrong(f"compiled on one rank it is {far:.3g} from the truth")


def _check_codes(case: Case, batches: list) -> None:
    """With messages in codes or state in fewer bits, which fp64 does not become, schedules change no bit.

    Both programs fuse casts with gathers: what that moves before a gather, such as a maximum, is of parameters that no
    code has rounded.
    """
    program, options = case.program, case.options
    with doubles(torch.float32):
        state, narrow = pytree.tree_map(_single, (program.state(), batches))
        leaves = pytree.tree_leaves(state)
        codes = options.codes
        if not any(x.dtype == torch.float32 and x.ndim for x in leaves if torch.is_tensor(x)):
            codes = tuple(t for t in codes if not isinstance(t, Store))  # it would choose no leaf
        try:
            step_of(program)(state, *narrow[0][0])  # fake tensors allow fp32 times fp64
            step = zt.chain(*codes)(step_of(program))
            state = step.init(state)
            traced = step.trace(state, *narrow[0][0])
        except (RuntimeError, ValueError):  # a layer or a state that fp64 is written into
            return
        tiles = _with_possible_tiles(options, traced).tiles
        sharding = (options.sharding, *codes, *tiles)
        fusion = [t for t in (*options.before, *options.after) if t == zt.fuse_cast_gather()]
        plain = _through(traced, *sharding, *fusion).lower()
        chain = (*options.before, *sharding, *options.after, zt.prefetch())
        scheduled = _through(traced, *chain).lower()
        _check_figures(scheduled)
        wanted, found = (_steps(each, state, narrow) for each in (plain, scheduled))
    if not _equal(found, wanted):
        far = distance(found, wanted)
        raise Wrong(f"schedules change bits of codes: {far:.3g}")


def _check_averages(case: Case, batches: list) -> None:
    """Averages have the bits of a loop over the states of the step without them, which keeps all of its bits."""
    program, options = case.program, case.options
    (average,) = options.averages
    step = zt.Step(step_of(program), options.averages)
    try:
        state = step.init(program.state())
    except ValueError as error:  # where=SOME may choose no leaf
        if str(error).startswith("ema: "):
            return
        raise
    traced = step.trace(state, *batches[0][0])
    plain = _through(traced, options.sharding).lower()
    # Before shard_params or anywhere after it.
    chain = [*options.before, options.sharding, *options.after, zt.prefetch()]
    chain.insert(case.seed % (len(chain) + 1), average)
    lowered = _through(traced, *chain).lower()
    expected = state
    by_hand = {path: x.clone() for path, x in state.kept["ema"].items()}
    for parts in batches:
        expected, _ = plain.lockstep(expected, parts)
        state, _ = lowered.lockstep(state, parts)
        leaves = named_leaves(expected.state)
        by_hand = {
            path: torch.lerp(x, leaves[path], 1 - average.decay) for path, x in by_hand.items()
        }
    found = state.state, state.kept["ema"]
    if not _equal(found, (expected.state, by_hand)):
        far = distance(found, (expected.state, by_hand))
        raise Wrong(f"averages are {far:.3g} from those of a loop")


def _single(x: Any) -> Any:
    is_double = isinstance(x, torch.Tensor) and x.dtype == torch.float64
    return x.float() if is_double else x


def _check_micro_batches(case: Case, batches: list) -> None:
    """Two batches as micro-batches have the same bits as they are written, with all schedules, and layer by layer."""
    program, options = case.program, case.options
    both = [tuple(map(torch.cat, zip(*parts))) for parts in zip(*batches[:2])]
    traced = zt.accumulate(2)(step_of(program)).trace(program.state(), *both[0])
    keep = "whole" if case.seed % 4 == 0 else "shard"
    in_order = zt.accumulate(2, keep=keep)
    schedules = {"schedules of micro-batches": in_order}
    if keep == "whole":  # each layer reduces a whole sum
        schedules["the order of layers"] = zt.accumulate(2, order="layers")

    # Copies that go on into the next step are refused with micro-batches.
    after = [t for t in options.after if not getattr(t, "across_steps", False)]

    def stepped(*transforms: zt.Transform) -> tuple[Any, list]:
        return _through(traced, *transforms).lower().lockstep(program.state(), both)

    try:
        wanted = stepped(in_order, options.sharding)
    except ValueError as error:
        if str(error).startswith("accumulate: "):  # such as a value that has no mean
            return
        raise
    for name, accumulate in schedules.items():
        result = stepped(accumulate, *options.before, options.sharding, *after)
        if not _equal(result, wanted):
            raise Wrong(f"{name} change bits: {distance(result, wanted):.3g}")


def _check_local(program: Program, options: Options, batches: list, sharded: Any) -> None:
    """Two hosts with equal batches, which are averaged now and then, compute what one computes."""
    h, parts, has_outer = options.local or (0, 0, False)
    if not len(program.state()["params"]) >= parts > 0:
        return
    mesh = zt.AbstractMesh(host=2, dp=options.ranks)
    shard = zt.shard_params(mesh, independent_axis="host", **dict(options.shard))
    chain = zt.chain(*options.before, shard, *options.after)
    outer = zt.nesterov(1.0, 0.0) if has_outer else None
    local = zt.local_steps(chain(step_of(program)), h, outer, parts)
    first = state = local.init(program.state())
    programs: dict[zt.Step, zt.stages.Lowered] = {}
    for i, ranks in enumerate(batches):
        step = local.at(i)
        if step not in programs:
            programs[step] = step.lower(first, *ranks[0])
        state, _ = programs[step].lockstep(state, [*ranks, *ranks])
    for host in range(2):
        own = pytree.tree_map(lambda x, host=host: x[host], state["state"])
        far = distance(own, sharded)
        if not far <= NEAR:
            raise Wrong(f"in local steps {local} it is {far:.3g} from one host")


def _steps(lowered: zt.stages.Lowered, state: Any, batches: list) -> tuple[Any, list[list]]:
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
    return [
        pytree.tree_map(lambda *x: torch.stack([torch.as_tensor(y) for y in x]).mean(0), *each)
        for each in outputs
    ]


def _equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same bits."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: Any) -> torch.Tensor:
    x = torch.as_tensor(x).contiguous()
    return (
        x.view(torch.uint8)
        if x.numel() and x.ndim
        else x.reshape(1).view(torch.uint8)
        if x.numel()
        else x
    )
