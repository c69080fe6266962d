"""`Layer`: one random layer of a model, and the leaves of the state that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

IDS = 5  # the integers in the batch are below this


@dataclass(frozen=True)
class Leaf:
    """A leaf of the state: its shape, its dtype, and whether it is trained."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    trained: bool = True

    def draw(self) -> torch.Tensor:
        """The first value of the leaf, drawn from the default generator."""
        numel = torch.Size(self.shape).numel()
        if self.dtype is torch.uint8:  # the bytes of fp64 numbers
            return torch.randn(numel // 8, dtype=torch.float64).view(torch.uint8).view(self.shape)
        if self.dtype is torch.int64:
            return torch.randn(numel, dtype=torch.float64).view(torch.int64).view(self.shape)
        drawn = torch.randn(
            self.shape, dtype=self.dtype if self.dtype.is_complex else torch.float64
        )
        return (0.5 * drawn).to(self.dtype)


@dataclass(frozen=True)
class Layer:
    """`run(x, ids, *leaves)` maps `x` [n, width] to [n, out]. Each sample is computed alone, unless `together` is set.

    rounds: gradients are rounded, so the mean over the ranks differs from the gradient of the whole batch.
    together: the layer computes over the whole batch, by `pmean`, so no rank alone has the plain step's gradient.
    by_autograd: the layer runs under autograd only, not under torch.func.
    once: the layer has no second derivative.
    mapped: the layer runs under vmap.
    placed: DTensor has a rule for the operations on the leaves. It is needed where a leaf is the result of an update
    and no gradient is taken for it.
    """

    name: str
    leaves: tuple[Leaf, ...]
    run: Callable[..., torch.Tensor]
    out: int
    rounds: bool = False
    together: bool = False
    by_autograd: bool = False
    once: bool = False
    mapped: bool = True
    placed: bool = True


def size(chance: Random) -> int:
    """A random width or number of rows: small numbers, which leave every remainder when they are cut over ranks."""
    return chance.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9])
