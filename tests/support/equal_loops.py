"""Loops that train equally: untouched over the whole batch, and lifted and transformed on ranks in lock-step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

import ztrans as zt
from tests.support.worlds import distance, slices


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)


def model_of(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable = square
) -> Callable:
    """An ordinary loop step. A `loss_of` that calls `backward` itself returns a loss without a gradient."""

    def loop_step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        return loss.detach()

    return loop_step


def is_near(lifted: tuple, plain: tuple, bound: float) -> bool:
    """Whether two pairs of model and optimizer agree. The untouched loop has a state for parameters with gradients only."""
    states = zip(
        *([optimizer.state[p] for p in model.parameters()] for model, optimizer in (lifted, plain)),
        strict=True,
    )
    pairs = [
        *zip(lifted[0].parameters(), plain[0].parameters(), strict=True),
        *(pair for pair in states if pair[1]),
    ]
    return all(distance(value, wanted) <= bound for value, wanted in pairs)


def trains_equally(
    make: Callable[[], nn.Module],
    transforms: tuple[zt.Transform, ...],
    losses: tuple[Callable, ...],
    data: list[tuple],
    mesh: zt.AbstractMesh,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-9,
) -> zt.stages.Lowered:
    """Assert that lifted, transformed loops, which take turns, have the losses and final state of the untouched loops."""
    ranks = math.prod(dict(mesh.axes).values())
    models = [model_of(make, dtype) for _ in range(2)]
    plain, lifted = ((model, adam(model)) for model in models)
    pairs = [zt.lift(loop(*lifted, loss_of), *lifted) for loss_of in losses]
    state, part = pairs[0][1], slices(data[0], ranks)[0]
    programs = [zt.chain(*transforms)(step).lower(state, *part) for step, _ in pairs]
    for lowered in programs:
        zt.ir.check(lowered.graph)
    for batch in data:
        for lowered, loss_of in zip(programs, losses):
            wanted = loop(*plain, loss_of)(*batch)
            state, values = lowered.lockstep(state, slices(batch, ranks))
            assert distance(values, [wanted] * ranks) <= bound
    zt.write_back(*lifted, state)
    assert is_near(lifted, plain, bound)
    return programs[0]
