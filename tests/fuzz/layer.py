"""Layer: one random part of a model, and the leaves that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

IDS = 5  # the batch's whole numbers are below this


@dataclass(frozen=True)
class Leaf:
    """A leaf of the state: its shape, its dtype, and whether it is trained."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    trained: bool = True

    def made(self) -> torch.Tensor:
        """Its first value, drawn from the default generator."""
        numel = torch.Size(self.shape).numel()
        if self.dtype is torch.uint8:  # the bytes of doubles
            return torch.randn(numel // 8, dtype=torch.float64).view(torch.uint8).view(self.shape)
        if self.dtype is torch.int64:
            return torch.randn(numel, dtype=torch.float64).view(torch.int64).view(self.shape)
        drawn = torch.randn(self.shape, dtype=self.dtype if self.dtype.is_complex else torch.float64)
        return (0.5 * drawn).to(self.dtype)


@dataclass(frozen=True)
class Layer:
    """`run(x, ids, *leaves)` makes [n, out] of [n, width], for each sample alone.

    `rounds` says that it rounds gradients: the mean over ranks is then another one than that of the whole batch.
    `together` says that it computes over the whole batch, by `pmean`: no rank alone has the plain step's gradient.
    `by_autograd` says that it runs under autograd alone, and not under torch.func; `once` that it has no second
    derivative; `mapped` that it runs under vmap; `placed` that DTensor knows how its leaves' parts are computed with,
    which is asked of leaves that an update has made and no gradient is taken for.
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
    """A width or a number of rows: small, and of every remainder."""
    return chance.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9])
