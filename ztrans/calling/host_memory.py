"""Tensors in the memory of the host, from which a GPU copies them while it computes.

A leaf of the state that a step keeps there is an ordinary tensor on the CPU, pinned if there is a GPU. A step returns
before its last copies have ended, so whoever reads such a leaf on the host lets them end first.
"""

from __future__ import annotations

import torch

from .meta_leaves import fill_of


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of the host, for a tensor with the shape, strides and dtype of another one."""
    return torch.empty_like(like, device="cpu", pin_memory=torch.cuda.is_available())


def copied_to_host(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor in the memory of the host. The copy of a meta tensor is filled (see `fill_of`)."""
    flat = torch.empty(x.shape, dtype=x.dtype, device="meta")
    copy = empty_on_host(flat)
    if x.is_meta:
        copy.fill_(fill_of(x))
    else:
        copy.copy_(x.detach())
    return copy.requires_grad_(x.requires_grad)


def is_pinned(x: torch.Tensor) -> bool:
    """Whether a GPU can copy a tensor while it computes. An empty tensor has no memory to pin."""
    return x.is_cpu and (not x.numel() or x.is_pinned())


def let_copies_end() -> None:
    """Let all copies between the host and the GPUs that this process uses end."""
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        # A device that the process does not use would get a context here.
        if torch.cuda.memory_reserved(device):
            torch.cuda.synchronize(device)
