"""A text that every machine has: the source code of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def stdlib_bytes(limit: int = 4 << 20) -> Tensor:
    """The first `limit` bytes of the modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


def draw(text: Tensor, step: int, batch: int, sequence: int) -> Tensor:
    """The global batch of a step. It is the same on every rank; each rank then takes its own rows of it."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
    return text[starts + torch.arange(sequence + 1)].long()
