"""The work of lowering, code generation, simulation and drawing grows as the program does, and not as its square.

Work is counted in executed lines, function by function, not in seconds.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import ztrans as zt
from ztrans.ir.micro_batches import micro_batch_programs
from ztrans.report.page import page
from ztrans.rewrites.update_groups import group_updates
from ztrans.runtime.codegen import to_fx
from ztrans.stages import Traced

pytestmark = pytest.mark.slow

LAYERS = 2
MOST = 2.3  # times as many lines for twice as many layers
FEW = 1000  # lines, below which a function is not looked at
PACKAGE = str(Path(zt.__file__).parent)
SCHEDULES = zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()


def init(layers: int) -> dict:
    weights = {}
    for k in range(layers):
        weights[f"up{k}"] = torch.empty(16, 64, device="meta")
        weights[f"down{k}"] = torch.empty(64, 16, device="meta")
        weights[f"scale{k}"] = torch.empty(16, device="meta")
    return {"params": weights, "m": dict(weights)}


def step(state: dict, x: torch.Tensor, layers: int, clip: bool) -> tuple[dict, torch.Tensor]:
    def loss(params: dict) -> torch.Tensor:
        h = x
        for k in range(layers):
            up, down = (params[f"{name}{k}"].bfloat16() for name in ("up", "down"))
            h = h + F.gelu(F.layer_norm(h, (16,), params[f"scale{k}"]).bfloat16() @ up) @ down
        return h.square().mean()

    grads, value = grad_and_value(loss)(state["params"])
    if clip:
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        grads = {key: g / norm.clamp(min=1) for key, g in grads.items()}
    m = {key: 0.9 * m + 0.1 * grads[key] for key, m in state["m"].items()}
    params = {key: p - 0.01 * m[key] for key, p in state["params"].items()}
    return {"params": params, "m": m}, value


CASES: dict[str, tuple[bool, tuple[zt.Transform, ...]]] = {
    "updates during backward": (
        False,
        (zt.shard_params(zt.AbstractMesh(dp=8), reshard="always"), *SCHEDULES, zt.remat()),
    ),
    "micro-batches, clipped": (
        True,
        (
            zt.shard_params(zt.AbstractMesh(host=2, dp=8), replicate_axis="host", stage=1),
            *SCHEDULES,
            zt.accumulate(3),
        ),
    ),
}


def traced(case: str, layers: int) -> Traced:
    clip, transforms = CASES[case]
    chained = zt.chain(*transforms)(functools.partial(step, layers=layers, clip=clip))
    return chained.trace(init(layers), torch.empty(6, 16, device="meta"))


def whole_way(program: Traced) -> None:
    """Lower a program, write its code, simulate it and draw it."""
    lowered = program.lower()
    for part in micro_batch_programs(lowered.graph).in_order:
        ordered, groups = group_updates(part)
        to_fx(ordered, donate=True, groups=groups)
    timeline = lowered.timeline()
    page([timeline])
    lowered.with_plan(lowered.plan)
    for text in (lowered, lowered.plan, timeline, lowered.memory_analysis()):
        str(text)


def lines_of(run: Callable[[], Any]) -> Counter[CodeType]:
    """How many lines each function of ztrans executes."""
    lines: Counter[CodeType] = Counter()

    def count(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            lines[frame.f_code] += 1
        return count

    def enter(frame: Any, event: str, _: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(PACKAGE) else None

    earlier = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(earlier)
    return lines


@pytest.mark.parametrize("case", CASES)
def test_twice_as_many_layers_are_twice_as_much_work(case):
    counts = []
    for layers in (LAYERS, 2 * LAYERS):
        program = traced(case, layers)
        program.lower()  # the search, whose effort has a limit of its own, keeps its schedule
        counts.append(lines_of(functools.partial(whole_way, program)))
    once, twice = counts
    grown = []
    for code, lines in twice.items():
        if lines > FEW and lines > MOST * once[code]:
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}"
            grown.append(f"{where}: {once[code]} lines, then {lines}")
    assert not grown, "\n".join(grown)
