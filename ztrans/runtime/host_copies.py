"""Copy values of one rank between the memory of its device and the memory of its host.

On a CPU both are the same memory, but copies are still made and counted, so tests on CPUs cover programs with copies.
`CarriedCopies` holds the copies that a step leaves to the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from .collectives import Future, Member


class HostCopy(torch.nn.Module):
    """Copies one value to the other memory. A call takes the value, and the tensor to overwrite if there is one."""

    def forward(self, value: torch.Tensor, over: torch.Tensor | None = None) -> Member:
        copy = value.clone() if over is None else over.copy_(value)
        return Member(Future(None, None, {0: copy}), 0)

    def join(self) -> None:
        """Make compute wait for the copy. On a CPU it has ended."""


class CarriedCopies:
    """The copies of new leaves to the host that a step on a device has started, and has not waited for.

    They belong to the device, like the queues of copies (see `carried_copies`). The next step on the device that
    copies anything takes the copies of its own leaves. At its start it waits for all others, if its state is another
    one or its program carries no copies: then the memory that they read is free. A step that fails leaves no copies.
    """

    def __init__(self) -> None:
        self.futures: dict[int, Future] = {}  # by the address of the leaf

    def take(self, *leaves: torch.Tensor) -> tuple[Member, ...]:
        """The copies that overwrite these leaves, as futures. The future of a leaf without a copy has the leaf itself.

        Waits for the copies that overwrite other leaves.
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
        """Leave these copies to the next step. Returns their leaves, which may not be completely written yet."""
        leaves = []
        for member in members:
            future = member.future
            if future.finish is None:
                leaves.append(future.value(0))  # the copy has ended, as on a CPU
                continue
            leaf = future.finish()[0]
            if leaf.numel():  # empty leaves have no address of their own
                self.futures[leaf.data_ptr()] = future
            leaves.append(leaf)
        return tuple(leaves)


def release_carried_copies() -> None:
    """Free the memory that carried copies read on all GPUs. The copies have ended."""
    for device in range(torch.cuda.device_count()):
        carried_copies(torch.cuda, device).futures.clear()


@functools.cache
def carried_copies(cuda: Any, device: Hashable) -> CarriedCopies:
    """The copies that each step on a device leaves to the next. `cuda` is `torch.cuda`, or a double of it."""
    return CarriedCopies()
