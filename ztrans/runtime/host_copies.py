"""Host copies: the copies of one rank between the memory of its device and that of its host.

On a CPU both are the same memory. A copy is made all the same, and counted apart, so that what runs on a GPU is tested
there.
"""

from __future__ import annotations

import torch

from .collectives import Future, Member


class HostCopy(torch.nn.Module):
    """Copies one value to the other memory. A call takes the value and, if there is one, the tensor to write over."""

    def forward(self, value: torch.Tensor, over: torch.Tensor | None = None) -> Member:
        copy = value.clone() if over is None else over.copy_(value)
        return Member(Future(None, None, {0: copy}), 0)

    def join(self) -> None:
        """Let compute wait for the copy. On a CPU it has ended."""
