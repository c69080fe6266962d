"""Eager steps on several ranks, against the untouched step on the whole batch. Prints a line of JSON for each check.

torchrun --standalone --nproc-per-node 2 tests/support/eager_ranks.py programs bits
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support import lifted
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, default_dtype, distance, plain, slices

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
# Steps whose gradients come from torch.func, torch.autograd.grad and .backward(), of parameters and of inputs; with
# uneven parts, batch statistics, a global norm, and sums over tokens.
PROGRAMS = (
    *("mlp_momentum", "uneven", "batch_norm_mean", "clipped", "penalty", "per_sample"),
    "token_weighted",
)


def report(check: str, **figures) -> None:
    if RANK == 0:
        sys.stdout.write(json.dumps({"check": check, **figures}) + "\n")
        sys.stdout.flush()


def trained(case, step: zt.Step, steps: int = 2):
    """The whole state and this rank's last output after some eager steps, and whether the leaves stayed in place."""
    state = step.shard(case.state())
    before = pytree.tree_leaves(state)
    with zt.eager():
        for batch in batches(case, steps):
            state, output = step(state, *slices(batch, WORLD)[RANK])
    in_place = all(x is y for x, y in zip(pytree.tree_leaves(state), before))
    return step.unshard(state), output, in_place


def scalars(output) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and not x.ndim]


def programs(mesh) -> None:
    for name in PROGRAMS if WORLD == 2 else PROGRAMS[:2]:
        case = CASES[name]
        expected, outputs = plain(case, 2)
        for stage in (0, 1, 2, 3) if name == "mlp_momentum" else (3,):
            step = zt.chain(zt.shard_params(mesh, stage=stage), *ALL)(case.step)
            state, output, in_place = trained(case, step)
            far = max(distance(state, expected), distance(scalars(output), scalars(outputs[-1])))
            report("plain", case=name, stage=stage, distance=far, in_place=in_place)


def bits(mesh) -> None:
    """An eager step goes on where a program has stopped, and the other way round."""
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh, stage=2)(case.step)
    mixed, compiled = step.shard(case.state()), step.shard(case.state())
    for i, batch in enumerate(batches(case, 3)):
        part = slices(batch, WORLD)[RANK]
        compiled, _ = step(compiled, *part)
        if i == 1:
            with zt.eager():
                mixed, _ = step(mixed, *part)
        else:
            mixed, _ = step(mixed, *part)
    same = [torch.equal(a.to_local(), b.to_local()) for a, b in zip(*map(pytree.tree_leaves, (mixed, compiled)))]  # fmt: skip
    report("bits", equal=all(same), split=isinstance(mixed["params"]["0.weight"], DTensor))


def loops(mesh) -> None:
    """A lifted loop with AdamW and batch norm; its micro-batches are one batch."""
    *_, loop_step, state = lifted.lifted()
    step = zt.chain(zt.accumulate(2), zt.shard_params(mesh))(loop_step)
    reference, optimizer = lifted.Net(), None
    reference.load_state_dict({**state["params"], **state["buffers"]}, strict=False)
    state = step.shard(state)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    plain_loop = lifted.loop_of(reference, optimizer)
    for i in range(2):
        x = torch.cat([lifted.batch(i)] * WORLD)
        with zt.eager():
            state, loss = step(state, x.chunk(WORLD)[RANK])
        expected = plain_loop(x.chunk(WORLD)[RANK])
    whole = step.unshard(state)["params"]
    far = distance(
        whole, {name: dict(reference.named_parameters())[name].detach() for name in whole}
    )
    report("lift", distance=max(far, distance(loss, expected.detach())))


def draws(mesh) -> None:
    """Dropout differs from rank to rank; a draw in the update does not."""
    torch.manual_seed(RANK)
    drawn = []

    @zt.shard_params(mesh, outputs="local")
    def step(state, x):
        kept = nn.functional.dropout(x, 0.5)
        drawn.append(kept)
        grad = torch.func.grad(lambda w: (kept * w).mean())(state)
        noise = torch.rand_like(state)
        drawn.append(noise)
        return state - grad + noise, kept.mean()

    with zt.eager():
        state, output = step(step.shard(torch.zeros(64)), torch.ones(64))
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, (*drawn, output, state.full_tensor()))
    (kept, noise, mean, whole), (other, other_noise, other_mean, other_whole) = everyone[:2]
    report("draws", dropout=torch.equal(kept, other), noise=torch.equal(noise, other_noise))
    report("draws_kept", state=torch.equal(whole, other_whole), output=bool(mean == other_mean))


def failures(mesh) -> None:
    """An error on one rank ends the step on all, and the state is the old one."""

    @zt.shard_params(mesh)
    def step(state, x):
        loss, grads = torch.func.grad_and_value(lambda w: torch.log(x @ w).mean())(state)[::-1]
        if not bool(loss > 0):
            raise FloatingPointError("the loss is not positive")
        return state - grads, loss

    state = step.shard(torch.full((6,), 2.0))
    text = ""
    with zt.eager():
        try:
            step(state, torch.ones(2, 6) * (-1 if RANK == 1 else 1))
        except (RuntimeError, FloatingPointError) as error:
            text = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
        errors = [None] * WORLD
        dist.all_gather_object(errors, text)
        state, loss = step(state, torch.ones(2, 6))
    report("failure", errors=errors, loss=loss.item())


def anomaly(mesh) -> None:
    """`detect_anomaly` names the function of autograd on the rank that has the NaN."""

    @zt.shard_params(mesh)
    def step(state, x):
        w = state.detach().requires_grad_()
        loss = torch.sqrt((x * w).square().sum())
        loss.backward()
        return state - 0.1 * w.grad, loss

    state, text = step.shard(torch.ones(6)), ""
    with zt.eager(), torch.autograd.detect_anomaly():
        try:
            step(state, torch.full((6,), 0.0 if RANK == 1 else 1.0))
        except RuntimeError as error:
            text = str(error)
    errors = [None] * WORLD
    dist.all_gather_object(errors, text)
    report("anomaly", errors=errors)


def told(mesh, check: str, step: zt.Step, state, *batch, **figures) -> None:
    """What `check_finite` finds, on all ranks, and whether the state is as it was."""
    before = [x.to_local().clone() for x in pytree.tree_leaves(state)]
    found = step.check_finite(state, *batch)
    after = [x.to_local() for x in pytree.tree_leaves(state)]
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, found)
    report(
        check,
        same=all(other == found for other in everyone),
        kept=all(torch.equal(a, b) for a, b in zip(before, after)),
        rank=None if found is None else found.rank,
        text=str(found),
        micro_batch=None if found is None else found.micro_batch,
        **figures,
    )


def first_nan(mesh) -> None:
    for stage in (0, 1, 2, 3):

        @zt.chain(zt.shard_params(mesh, stage=stage), *ALL)
        def step(state, x):
            # The derivative of the root is infinite at 0, in the first row, which is on rank 0 from stage 1 on.
            loss = lambda w: (w[0] * x[0]).sqrt().sum() + (w @ w.T @ x).square().mean()
            grads, value = torch.func.grad_and_value(loss)(state)
            return state - 0.1 * grads, value

        state = step.shard(torch.ones(4, 4))
        x = torch.ones(4, 4)
        if stage == 3:
            told(mesh, "finite", step, state, x)
        x[0, 0] = 0.0 if RANK == 1 else 1.0
        told(mesh, "first_nan", step, state, x, stage=stage)

    @zt.chain(zt.accumulate(3), zt.shard_params(mesh))
    def in_parts(state, x):
        loss = lambda w: (x @ w).log().mean()
        grads, value = torch.func.grad_and_value(loss)(state)
        return state - 0.1 * grads, value

    state = in_parts.shard(torch.ones(4))
    x = torch.ones(6, 4)
    x[2] = -1.0 if RANK == WORLD - 1 else 1.0
    told(mesh, "in_parts", in_parts, state, x)

    @zt.shard_params(mesh)
    def overflows(state, x):
        return state, zt.psum((x * state).half().sum())

    state = overflows.shard(torch.full((2,), 20000.0))
    told(mesh, "overflow", overflows, state, torch.ones(2))

    *_, loop_step, state = lifted.lifted()
    step = zt.shard_params(mesh)(loop_step)
    state = step.shard(state)
    x = lifted.batch(0)
    x[3, 2] = torch.inf if RANK == 1 else 1.0
    told(mesh, "loop", step, state, x)


CHECKS = {f.__name__: f for f in (programs, bits, loops, draws, failures, anomaly, first_nan)}


def main() -> None:
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", dp=-1)
    for name in sys.argv[1:]:
        with default_dtype(torch.float64 if name in ("programs", "bits") else torch.float32):
            CHECKS[name](mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
