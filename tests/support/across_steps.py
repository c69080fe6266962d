"""Steps that pass gathers to each other, on two ranks: they have the bits of steps that do not."""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import batches, slices
from ztrans.runtime.agreement import everywhere
from ztrans.runtime.carried import CarryingExecutable
from ztrans.runtime.collectives import Start

RANK = int(os.environ.get("RANK", 0))
CASE = CASES["mlp_momentum"]
ACROSS, ALONE = zt.prefetch(across_steps=True), zt.prefetch()


def report(check: str, **figures) -> None:
    print(json.dumps({"check": check, "rank": RANK, **figures}), flush=True)


@functools.cache
def made(mesh: DeviceMesh, prefetch: zt.Transform) -> zt.Step:
    """A step that all checks share, with the programs that it has lowered."""
    return zt.chain(zt.shard_params(mesh), zt.overlap_grads(), prefetch)(CASE.step)


def mine(batch: tuple, mesh: DeviceMesh) -> tuple:
    return slices(batch, mesh.size())[RANK]


class Counted:
    """How often the gathers of a step are started from the state, as there are none of a step before."""

    def __init__(self) -> None:
        self.starts = 0
        plain = CarryingExecutable.start_carried

        def start(self_, inputs):
            self.starts += 1
            return plain(self_, inputs)

        CarryingExecutable.start_carried = start


def same(a, b) -> bool:
    return all(map(torch.equal, *(map(torch.as_tensor, pytree.tree_leaves(x)) for x in (a, b))))


def compared(mesh: DeviceMesh, check: str, run: Callable, counted: Counted) -> None:
    """Run something with a step that passes gathers, and with one that does not."""
    alone = run(made(mesh, ALONE))
    counted.starts = 0
    across = run(made(mesh, ACROSS))
    report(check, bitwise=same(across, alone), starts=counted.starts)


def several(mesh: DeviceMesh, steps: int = 5) -> Callable:
    def run(step: zt.Step):
        state = step.shard(CASE.state())
        outputs = []
        for batch in batches(CASE, steps):
            state, output = step(state, *mine(batch, mesh))
            outputs.append(output)
        return step.unshard(state), outputs

    return run


def checkpointed(mesh: DeviceMesh, folder: str) -> Callable:
    """Save after two steps, take another one, load, and go on."""

    def run(step: zt.Step):
        path = Path(folder) / str(len(os.listdir(folder)))
        dist.barrier()
        state = step.shard(CASE.state())
        for k, batch in enumerate(batches(CASE, 6)):
            state, _ = step(state, *mine(batch, mesh))
            if k == 1:
                zt.save(path, state).result()
            if k == 2:
                dist.barrier()
                state = zt.load(path, state, step)
        return step.unshard(state)

    return run


def of_other_sizes(mesh: DeviceMesh) -> Callable:
    """The batch of rank 1 gets larger: it runs another program than rank 0, and both pass the same gathers."""

    def run(step: zt.Step):
        state = step.shard(CASE.state())
        torch.manual_seed(RANK)
        for k in range(5):
            state, _ = step(state, *CASE.batch(4 + (k > 1) * RANK))
        return step.unshard(state)

    return run


def of_two_states(mesh: DeviceMesh) -> Callable:
    """Two states take turns, and an evaluation runs in between."""

    def run(step: zt.Step):
        evaluate = zt.shard_params(mesh)(lambda state, batch: (state, zt.pmean(batch[0].sum())))
        states = [step.shard(CASE.state()) for _ in range(2)]
        data = batches(CASE, 6)
        for k, turn in enumerate((0, 0, 1, 1, 0, 0)):
            states[turn], _ = step(states[turn], *mine(data[k], mesh))
            if k == 4:
                evaluate(states[turn], *mine(data[k], mesh))
        return [step.unshard(state) for state in states]

    return run


def changed(mesh: DeviceMesh) -> Callable:
    """All ranks change the state between two steps."""

    def run(step: zt.Step):
        state = step.shard(CASE.state())
        for k, batch in enumerate(batches(CASE, 4)):
            state, _ = step(state, *mine(batch, mesh))
            if k == 1:
                with torch.no_grad():
                    for w in state["params"].values():
                        w.mul_(0.5)
        return step.unshard(state)

    return run


def error_of(run: Callable) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


def changed_on_one_rank(mesh: DeviceMesh) -> None:
    step = made(mesh, ACROSS)
    state = step.shard(CASE.state())
    data = batches(CASE, 4)
    state, _ = step(state, *mine(data[0], mesh))
    if RANK:
        with torch.no_grad():
            state["params"]["0.weight"].to_local().mul_(1.0)
    error = error_of(lambda: step(state, *mine(data[1], mesh)))
    report("changed on one rank", error=error)
    for batch in data[1:]:
        state, _ = step(state, *mine(batch, mesh))
    report("goes on", bitwise=same(step.unshard(state), several(mesh, 4)(made(mesh, ALONE))[0]))


def failed(mesh: DeviceMesh) -> None:
    """Rank 1 fails in its third step: at its first message, and at its last one, when it has written its state."""
    step = made(mesh, ACROSS)
    data = [mine(batch, mesh) for batch in batches(CASE, 4)]
    truth = several(mesh, 4)(made(mesh, ALONE))[0]
    for is_first in (True, False):
        state = step.shard(CASE.state())
        for batch in data[:2]:
            state, _ = step(state, *batch)
        before = step.unshard(state)
        count = len(zt.ir.pair(step.compiled(state, *data[2]).graph).starts)
        error = in_third_step(0 if is_first else count - 1, partial(step, state, *data[2]))
        torn = error_of(partial(step.unshard, state))
        if torn:
            state = step.shard(before)
        for batch in data[2:]:
            state, _ = step(state, *batch)
        bitwise = same(step.unshard(state), truth)
        report("failed", is_first=is_first, error=error, torn=torn, bitwise=bitwise)


def in_third_step(at: int, step: Callable) -> str:
    """The error of a step in which rank 1 fails when it starts message number `at`."""
    plain = Start.forward
    calls = itertools.count()

    def forward(self, *members):
        if RANK and next(calls) == at:
            raise RuntimeError("no memory")
        return plain(self, *members)

    Start.forward = forward
    error = error_of(step)
    Start.forward = plain
    return error


def tuned(mesh: DeviceMesh) -> None:
    """The steps of `tune` pass no gathers, and the program that it keeps does."""
    data = batches(CASE, 3)
    states = []
    for prefetch in (ACROSS, ALONE):
        step = made(mesh, prefetch)
        state = step.shard(CASE.state())
        step.tune(state, *mine(data[0], mesh), steps=1)
        for batch in data:
            state, _ = step(state, *mine(batch, mesh))
        states.append(step.unshard(state))
    report("tuned", bitwise=same(*states))


def main() -> None:
    mesh = zt.make_mesh("cpu", dp=2)
    counted = Counted()
    (folder, *_) = everywhere(tempfile.mkdtemp(), mesh)
    compared(mesh, "steps", several(mesh), counted)
    compared(mesh, "checkpoint", checkpointed(mesh, folder), counted)
    compared(mesh, "sizes", of_other_sizes(mesh), counted)
    compared(mesh, "two states", of_two_states(mesh), counted)
    compared(mesh, "changed", changed(mesh), counted)
    changed_on_one_rank(mesh)
    failed(mesh)
    tuned(mesh)
    several(mesh, 2)(made(mesh, ACROSS))  # gathers are under way when the process ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    dist.destroy_process_group()
