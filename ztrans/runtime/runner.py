"""What runs a step of one rank, and what it does around the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..calling.inputs import Inputs

if TYPE_CHECKING:
    from .executable import StepExecutable


class Runner:
    """A step of one rank as a function from flat inputs to flat outputs, and what it does around the step.

    By default it does nothing there. Subclasses run the executable in another way, such as in a CUDA graph.
    """

    @property
    def executable(self) -> StepExecutable:
        """The code of the step."""
        raise NotImplementedError

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return False

    def uses_carried(self, inputs: Inputs) -> bool:
        """Whether a step on these inputs uses gathers that the step before has started."""
        return False

    def check_state(self, state: Sequence[torch.Tensor]) -> None:
        """Raises: ValueError if a call cannot update this state, which is not the one of the last call."""

    def check_numbers(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises: ValueError if a call would compute with other numbers than those among these inputs."""

    def step_ended(self, inputs: Inputs) -> None:
        """Let the next step use what this one leaves to it. Called after a step on these inputs has succeeded."""

    def close(self) -> None:
        """Release what is kept for the next call."""

    def placed(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """These inputs on the devices where the executable reads them."""
        return inputs

    def start_carried(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Start the gathers that the executable reads after these inputs, which a step before would have started."""
        return ()
