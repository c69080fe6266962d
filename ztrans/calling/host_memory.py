"""Tensors in host memory that a GPU can copy while it computes.

A leaf of the state that a step keeps there is an ordinary CPU tensor, pinned if there is a GPU. A step returns before
its last copies have ended, so code that reads such a leaf on the host must wait for them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..ir.graph import MemoryKind
from .meta_leaves import fill_of


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor in host memory, with the shape, strides and dtype of another one."""
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())


# How a tensor is allocated in each memory beside the device's.
EMPTY_IN: Mapping[MemoryKind, Callable[[torch.Tensor], torch.Tensor]] = {"host": empty_on_host}


def copied_to(kind: MemoryKind, x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor in a memory. The copy of a meta tensor is filled (see `fill_of`)."""
    flat = torch.empty(x.shape, dtype=x.dtype, device="meta")
    copy = EMPTY_IN[kind](flat)
    if x.is_meta:
        copy.fill_(fill_of(x))
    else:
        copy.copy_(x.detach())
    return copy.requires_grad_(x.requires_grad)


def is_pinned(x: torch.Tensor) -> bool:
    """Whether a GPU can copy a tensor while it computes. An empty tensor has no memory to pin."""
    return x.is_cpu and (not x.numel() or x.is_pinned())


def let_copies_end() -> None:
    """Wait for all copies between the host and the GPUs that this process uses."""
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        # On a device that the process does not use, this would create a context.
        if torch.cuda.memory_reserved(device):
            torch.cuda.synchronize(device)
