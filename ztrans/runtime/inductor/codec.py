"""Compile the codec of wire formats with Inductor, for messages between CPUs.

On a CPU `ops.encode` and `ops.decode` run the operations of PyTorch. Compiled, they have the same bits in a quarter of
the time. A kernel takes any number of blocks, so a process needs one for each format and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...ir.wire_format import Coded
from ...ops.decode import compiled as decoders
from ...ops.decode import decode_blocks
from ...ops.encode import compiled as encoders
from ...ops.encode import encode_blocks
from .compiler import Strided, fused, inner_callable


def compile_encode(form: Coded, dtypes: Iterable[torch.dtype]) -> None:
    """Compile what encodes tensors of some dtypes."""

    def encode(x: torch.Tensor) -> list[torch.Tensor]:
        return [*encode_blocks(x, form.bits, form.kind)]

    for dtype in dtypes:
        key = form.bits, form.kind, form.block, dtype
        if key not in encoders:
            run = _kernel(encode, (dtype, form.block))
            encoders[key] = lambda x, bits, kind, run=run: run([x])


def compile_decode(form: Coded, dtypes: Iterable[torch.dtype], add: bool = False) -> None:
    """Compile what decodes to some dtypes, or with `add` adds to values of these dtypes."""

    def decode(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        decode_blocks(codes, scale, form.bits, form.kind, out, add)
        return []

    codes = torch.int8, form.block * form.bits // 8
    for dtype in dtypes:
        key = form.bits, form.kind, form.block, dtype, add
        if key not in decoders:
            run = _kernel(decode, codes, (torch.float32, 1), (dtype, form.block))
            decoders[key] = lambda codes, scale, bits, kind, out, run=run: run([codes, scale, out])


def _kernel(function: Callable, *columns: tuple[torch.dtype, int]) -> Callable[[list], list]:
    """A kernel of contiguous tensors with equally many rows, of any number, and these dtypes and columns."""
    cpu = torch.device("cpu")
    like = [Strided(dtype, (8, width), (width, 1), cpu) for dtype, width in columns]
    kernel = fused(function, like, any_rows=True)
    kernel(
        [layout.empty().zero_() for layout in like]
    )  # after its first call, it has the function inside
    return inner_callable(kernel)
