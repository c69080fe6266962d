"""A function as the runner of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ztrans.runtime.runner import Runner


class FunctionRunner(Runner):
    """Runs a step by a function from flat inputs to flat outputs."""

    def __init__(self, run: Callable[[Sequence[torch.Tensor]], list[Any]]) -> None:
        self.run = run

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        return self.run(inputs)
