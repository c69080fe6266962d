"""Loops for `zt.lift`. `lifted` has buffers, a tied weight, sizes that no number of ranks divides, and AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import ztrans as zt


class Net(nn.Module):
    """Two layers of which the second uses the weight of the first, a norm, and a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(7, 7), nn.Linear(7, 7), nn.BatchNorm1d(7)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)))) * self.scale.sum()


def loop_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An ordinary loop step: the mean of the squared output, backward, and the optimizer."""

    def loop_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return loop_step


def lifted(seed: int = 0):
    """The model, its optimizer, the step and its state."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters()], "lr": 1e-2}])
    return model, optimizer, *zt.lift(loop_of(model, optimizer), model, optimizer)


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
