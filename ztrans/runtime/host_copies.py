"""The copies of one rank between the memory of its device and that of its host.

On a CPU both are the same memory. A copy is made and counted all the same, so tests on CPUs cover programs with copies.
`CarriedCopies` has the copies that a step leaves to the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from .collectives import Future, Member


class HostCopy(torch.nn.Module):
    """Copies one value to the other memory. A call takes the value and, if there is one, the tensor to write over."""

    def forward(self, value: torch.Tensor, over: torch.Tensor | None = None) -> Member:
        copy = value.clone() if over is None else over.copy_(value)
        return Member(Future(None, None, {0: copy}), 0)

    def join(self) -> None:
        """Let compute wait for the copy. On a CPU it has ended."""


class CarriedCopies:
    """The copies to the host that a step on a device has started for its new leaves, and has not waited for.

    They belong to the device, as the queues of copies do (see `ir.carried_copies`). The next step on the device that
    copies anything takes the copies of its own leaves. It waits for all others when it begins, because its state is
    another one, or its program carries no copies. Then the memory that these read is free. A step that fails leaves no
    copies.
    """

    def __init__(self) -> None:
        self.futures: dict[int, Future] = {}  # by the address of the leaf

    def take(self, *leaves: torch.Tensor) -> tuple[Member, ...]:
        """The copies over these leaves, as futures. Without a copy under way, a future has the leaf itself.

        Waits for the copies over all other leaves.
        """
        futures = self.futures
        self.futures = {}
        members = []
        for leaf in leaves:
            future = futures.pop(leaf.data_ptr(), None) or Future(None, None, {0: leaf})
            members.append(Member(future, 0))
        for future in futures.values():
            future.value(0)
        return tuple(members)

    def put(self, *members: Member) -> tuple[torch.Tensor, ...]:
        """Leave these copies to the next step. Returns their leaves, which are not written completely yet."""
        leaves = []
        for member in members:
            future = member.future
            if future.finish is None:
                leaves.append(future.value(0))  # on a CPU it has ended
                continue
            leaf = future.finish()[0]
            if leaf.numel():
                self.futures[leaf.data_ptr()] = future
            leaves.append(leaf)
        return tuple(leaves)


def release_carried_copies() -> None:
    """Free what carried copies read on all GPUs. They have ended."""
    for device in range(torch.cuda.device_count()):
        carried_copies(torch.cuda, device).futures.clear()


@functools.cache
def carried_copies(cuda: Any, device: Hashable) -> CarriedCopies:
    """The copies that steps on a device leave to each other. `cuda` is `torch.cuda`, or a double of it."""
    return CarriedCopies()
