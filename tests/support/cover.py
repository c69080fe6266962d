"""Cover: which of many programs `make test` runs where one property is tested on all, so that each kind is among them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Programs of `programs.py` that have whatever the others have: attention, norms and embeddings; uneven, complex and
# empty leaves; a cast of all parameters; a frozen base; loops over time and over micro-batches; a second derivative;
# updates by a fused operation, over lists, with matmuls, by a global norm, and between two gradients; a mean inside
# forward.
COVER = (
    "gpt_adam",
    "uneven",
    "complex_weights",
    "cast_inside",
    "lora",
    "lstm",
    "accumulation",
    "weight_penalty",
    "adamw_fused",
    "adamw_foreach",
    "muon",
    "clipped",
    "sam",
    "batch_norm_mean",
)


def parameters_of(values: Iterable[Any], tested: Collection[Any] = COVER) -> list[Any]:
    """Parameters of a test: the values that `make test` runs, and the others for `make exhaustive`.

    A tuple has the values of several parameters.
    """
    parameters = []
    for value in values:
        marks = () if value in tested else pytest.mark.exhaustive
        parameters.append(
            pytest.param(*value if isinstance(value, tuple) else (value,), marks=marks)
        )
    return parameters
