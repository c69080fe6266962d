"""A build: a small model, a batch for it, and the loss of a loop that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 6  # two ranks have three of them each, and three ranks two


@dataclass(frozen=True)
class Build:
    """How a model is built, and trained.

    `make` returns the model; `batch` takes a generator and returns the tensors of a batch of `SAMPLES`; `loss` takes
    the model and such tensors. `apart` says that the samples of a batch depend on each other, as in a batch norm, so
    that ranks compute something else than one process does with all samples. It is trained in `dtype`.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    apart: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def title(self) -> str:
        return f"{self.library}/{self.name}"


def tokens(
    length: int = 12, vocabulary: int = 96
) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A batch of rows of tokens, which are not the special ones."""
    return lambda draw: (torch.randint(5, vocabulary, (SAMPLES, length), generator=draw),)


def images(
    size: int = 32, classes: int = 4, channels: int = 3
) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A batch of images and their classes."""
    return lambda draw: (
        torch.randn(SAMPLES, channels, size, size, generator=draw),
        torch.randint(classes, (SAMPLES,), generator=draw),
    )


def randoms(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """A batch of normal random tensors with the given shapes of a sample."""
    return lambda draw: tuple(torch.randn(SAMPLES, *shape, generator=draw) for shape in shapes)


def language_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of a causal or masked language model, or of one that maps a text to itself."""
    return model(input_ids=ids, labels=ids).loss
