"""How long gradients live, and how many bytes they take, by the printed program and by the memory analysis.

The model is a chain of square layers, W x W in fp32, on four ranks. The batch has so few rows that only weights and
their gradients count. A whole weight has P bytes, a shard of it has p.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.func import grad

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, lower_traced, on_ranks
from ztrans.ir.collectives import reduce, rules
from ztrans.ir.graph import Split, Var
from ztrans.planning.cluster import Link
from ztrans.runtime.collectives import Start

W, RANKS, ROWS, LAYERS = 128, 4, 2, 5
P, p = W * W * 4, W * W * 4 // RANKS
ACTIVATIONS = (
    56 * ROWS * W * 4
)  # an upper limit for the activations of five layers, their masks and gradients: below P
VIEWS = {
    "t",
    "view",
    "permute",
    "transpose",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "alias",
    "detach",
}
FAST, SLOW, LATE = (
    zt.cluster("cpu", dp=Link("wire", *how)) for how in ((1e-9, 1e15), (1e-9, 1e6), (1.0, 1e15))
)


def chain(params, x, y):
    for w in params.values():
        x = torch.relu(x @ w)
    return (x - y).square().mean()


def state(layers: int = LAYERS) -> dict:
    return {f"w{i}": torch.zeros(W, W) for i in range(layers)}


def plain(params, x, y):
    grads = grad(chain)(params, x, y)
    return {k: w - 0.1 * grads[k] for k, w in params.items()}, None


def accumulated(params, x, y):
    first, second = (
        grad(chain)(params, *(t[rows] for t in (x, y))) for rows in (slice(0, 2), slice(2, 4))
    )
    return {k: w - 0.1 * (first[k] + second[k]) for k, w in params.items()}, None


def twice(params, x, y):
    """Two backward passes with an update between them."""
    ahead, _ = plain(params, x, y)
    return plain(ahead, x, y)


def frozen(params, x, y):
    """Only every other layer is trained."""
    held = {k: w for i, (k, w) in enumerate(params.items()) if i % 2}
    free = {k: w for k, w in params.items() if k not in held}
    grads = grad(lambda free: chain({k: {**free, **held}[k] for k in params}, x, y))(free)
    return {k: w - 0.1 * grads[k] if k in grads else w for k, w in params.items()}, None


def then_no_reductions(params, x, y):
    """A backward pass for the parameters, then one for the inputs, whose gradients are not reduced."""
    new, _ = plain(params, x, y)
    return new, grad(chain, 1)(params, x, y)


@dataclass(frozen=True)
class Line:
    region: str
    outs: dict[str, str]  # by name: the type
    op: str
    args: list[str]


def read(lowered: zt.stages.Lowered) -> list[Line]:
    """The equations of a program, read off their text."""
    lines = []
    for e in lowered.graph.eqns:
        results, op, args = re.fullmatch(r"(\S+: .+?) = (\w+)\((.*)\)", zt.ir.equation(e)).groups()
        outs = dict(re.findall(r"([\w.']+): (\w+\[[^\]]*\](?:\{[^}]*\})?!?)", results))
        lines.append(Line(e.region, outs, op, re.findall(r"[A-Za-z_][\w.']*", args)))
    return lines


def gradients(lines: list[Line]) -> dict[str, tuple[int, int]]:
    """The lines at which the storage of each whole gradient is live: from the line that computes it to its last use.

    A gradient that is being reduced is in use until the wait for its reduction.
    """
    root: dict[str, str] = {}
    spans: dict[str, tuple[int, int]] = {}
    under_way: dict[str, str] = {}
    for i, line in enumerate(lines):
        needed = [root.get(a, a) for a in line.args]
        if line.op == "wait":
            needed += [under_way[a] for a in line.args if a in under_way]
        if line.op in ("reduce_scatter", "all_reduce"):
            under_way.update(zip(line.outs, needed))
        for name in needed:
            if name in spans:
                spans[name] = (spans[name][0], i)
        for name, kind in line.outs.items():
            root[name] = root.get(line.args[0], line.args[0]) if line.op in VIEWS else name
            if (
                root[name] == name
                and line.region == "backward"
                and line.op in ("mm", "add")
                and kind == f"f32[{W},{W}]"
            ):
                spans[name] = (i, i)
    return spans


def at_once(spans: dict[str, tuple[int, int]], at: range) -> int:
    return max((sum(a <= i <= b for a, b in spans.values()) for i in at), default=0)


@functools.cache
def traced(step: Callable, rows: int) -> zt.stages.Traced:
    return zt.Step.of(step).trace(state(), torch.zeros(rows, W), torch.zeros(rows, W))


@functools.cache
def lower(
    step: Callable, stage: int, cluster: zt.Cluster, rows: int = ROWS, more: tuple = (), **how
) -> zt.stages.Lowered:
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS), stage=stage, outputs="local")
    transformed = zt.chain(shard, zt.overlap_grads(**how), *more)(step)
    lowered = lower_traced(traced(step, rows), transformed, cluster=cluster)
    zt.ir.check(lowered.graph)
    return lowered


ONE = {"bucket": 0, "max_in_flight": 0}
STEPS = {plain: ROWS, accumulated: 2 * ROWS, twice: ROWS, frozen: ROWS, then_no_reductions: ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("wire", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_at_most_two_whole_gradients_are_live(step, stage, wire):
    """One is being reduced while the next is computed.

    Stages 0 and 1 hold more when they accumulate: the five gradients of the first micro-batch, one of the second, and
    their sum.
    """
    lowered = lower(step, stage, wire, STEPS[step], **ONE)
    lines = read(lowered)
    spans = gradients(lines)
    sums = LAYERS if step is accumulated and stage < 2 else 0
    trained = {plain: 5, accumulated: 10, twice: 10, frozen: 3, then_no_reductions: 5}[step]
    assert len(spans) == trained + sums
    assert at_once(spans, range(len(lines))) <= (LAYERS + 2 if sums else 2)
    # Each dies with the wait for its reduction. Nothing needs it later, and no wait is delayed to the end.
    ends = {i for i, line in enumerate(lines) if line.op in ("wait", "add")}
    assert {last for _, last in spans.values()} <= ends
    assert all(last < len(lines) - 1 for _, last in spans.values())


# The bytes above state and batch, computed by hand. A reduce_scatter receives three shards of p bytes each, and an
# all_reduce sums into a copy of P bytes. Stages 1 and 2 gather five layers and drop them from last to first. Stage 3
# gathers one layer at a time.
BACKWARD = {
    0: 2 * P + P + P,
    1: 5 * P + 2 * P + 3 * p + 2 * p,
    2: 5 * P + 2 * P + 3 * p + 2 * p,
    3: P + 2 * P + 3 * p + 2 * p,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("step", [plain, twice, frozen], ids=lambda step: step.__name__)
def test_no_equation_needs_more_bytes_than_computed_by_hand(step, stage):
    lowered = lower(step, stage, FAST, **ONE)
    memory = lowered.memory_analysis()
    batch = 2 * ROWS * W * 4
    assert memory.state == (5 * P if stage == 0 else 5 * p)
    aside = [live - memory.state - batch for live in memory.live]
    assert max(aside) <= BACKWARD[stage] + ACTIVATIONS
    lines = read(lowered)
    last = max(i for i, line in enumerate(lines) if line.op == "wait" and ".grad" in line.args[0])
    # After the last wait: two temporaries, and one reduced gradient, or all of them if updates come last.
    waiting = {"eager": 1, "last": LAYERS}[lowered.plan.update]
    assert max(aside[last + 1 :]) <= (waiting + 2) * (P if stage == 0 else p) + ROWS * W * 4 * 8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_buffer_of_a_bucket_is_freed_before_the_update_starts(stage):
    """All five gradients are one message: 5 P bytes are packed, 15 p are received, and 5 p remain after the wait."""
    much = (zt.prefetch(memory=1 << 30),)
    lowered = lower(
        plain, stage, LATE, more=much, bucket=5 * P, update="last", max_matmuls_between=None
    )
    lines, memory = read(lowered), lowered.memory_analysis()
    (start,) = (i for i, line in enumerate(lines) if line.op == "reduce_scatter")
    waits = [i for i, line in enumerate(lines) if line.op == "wait" and ".grad" in line.args[0]]
    assert len(lines[start].outs) == len(waits) == 5
    aside = [live - memory.state - 2 * ROWS * W * 4 for live in memory.live]
    assert 5 * P + 15 * p <= aside[start + 1] <= 5 * P + 15 * p + ACTIVATIONS + P, (
        "packed, and on the wire"
    )
    update = [i for i, line in enumerate(lines) if line.region == "update" and i > max(waits)]
    assert len(update) == 10
    assert max(aside[i] for i in update) <= 5 * p + 2 * p + ROWS * W * 4 * 8 < 2 * P
    assert at_once(gradients(lines), range(update[0], len(lines))) == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_gradient_stays_live_through_a_pass_without_reductions(stage):
    """The second backward pass is for the inputs, and reduces nothing."""
    lines = read(lower(then_no_reductions, stage, FAST, **ONE))
    spans = gradients(lines)
    last = max(birth for birth, _ in spans.values())
    after = [i for i, line in enumerate(lines) if line.op == "mm" and i > last]
    assert len(after) >= LAYERS and at_once(spans, range(after[1], len(lines))) == 0


@pytest.mark.parametrize("stage, most", [(0, 7), (1, 7), (2, 2), (3, 2)])
def test_gradients_of_micro_batches_are_added_as_soon_as_they_are_computed(stage, most):
    """The sum of a leaf's two gradients is computed and reduced while the second backward pass still runs."""
    lines = read(lower(accumulated, stage, FAST, 2 * ROWS, **ONE))
    products = [i for i, line in enumerate(lines) if line.op == "mm"]
    starts = [
        i
        for i, line in enumerate(lines)
        if line.op in ("reduce_scatter", "all_reduce") and ".grad" in next(iter(line.outs))
    ]
    assert len(starts) == (LAYERS if stage < 2 else 2 * LAYERS)
    assert sum(start < products[-1] for start in starts) == len(starts) - 1
    assert at_once(gradients(lines), range(len(lines))) <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_adam", "cast_inside", "clipped", "lora", "sam", "accumulation", "weight_penalty"]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_reads_a_gradient_once_it_is_reduced(name, stage):
    lowered = on_ranks(CASES[name], 4, zt.shard_params(zt.AbstractMesh(dp=4), stage=stage), *ALL)
    lines = read(lowered)
    ended: set[str] = set()
    members: dict[str, list[str]] = {}
    for line in lines:
        assert not ended & set(line.args) or line.region == "update" or name == "weight_penalty", (
            line
        )
        if line.op in ("reduce_scatter", "all_reduce") and any(".grad" in out for out in line.outs):
            members.update((out, [arg]) for out, arg in zip(line.outs, line.args))
        elif line.op == "wait" and line.args[0] in members:
            ended.update(a for a in members[line.args[0]] if "@" not in a)


def test_the_only_small_member_of_a_bucket_is_sent_without_packing():
    """A large weight is sent from its own storage. If only one bias is left, that is too; both live until the wait."""
    shapes = {"w": (4096, 64), "b": (64,), "c": (64,)}
    weight, bias, bias_2 = (Var(name, torch.float32, shape) for name, shape in shapes.items())
    for members, unpacked in (
        ((weight, bias), [True, True]),
        ((weight, bias, bias_2), [True, False, False]),
        ((bias,), [True]),
    ):
        eqn = reduce(list(members), [f"{v.name}.grad" for v in members], "dp", "mean", Split("dp"))
        start = Start(eqn, {"dp": 2}, {"dp": 0}, None)
        assert [
            rules(eqn).sends_without_copy(eqn, k, {"dp": 2}) for k in range(len(members))
        ] == unpacked
        assert [[k] in start.members_by_message for k in range(len(members))] == unpacked
