"""dequantise(buffer, sizes, shapes, ranks, kind, dtype): the whole values of gathered `quantise` buffers.

    buffer  uint8[ranks * row_bytes(sizes)], contiguous: row r is what rank r quantised
    sizes   elements of a value's part in a row, padding included
    shapes  the whole shapes; ranks * size elements or fewer
    kind    what it was quantised to
    dtype   of the values: float32, bfloat16 or float16; code times scale, rounded once
    ->      one contiguous tensor for each value

Errors: too little in the buffer for a shape, a buffer of another length. Bytes moved at least: 3.03
an element to bf16. One launch; fp8 below sm_90 is done by torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .kernel import element, kernel
from .quantise import CODES, GROUP, GROUPS, check_sizes, groups, has_kernel, row_bytes, split
from .tables import addresses, on_device

if TYPE_CHECKING:
    import triton.language as tl

_lib = torch.library.Library("ztrans", "FRAGMENT")
_lib.define("dequantise(Tensor buffer, int[] sizes, int[] numels, int ranks, str kind, ScalarType dtype) -> Tensor[]")


def dequantise(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    shapes: Sequence[Sequence[int]],
    ranks: int,
    kind: str,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The whole values of `buffer`, as the head of this file says.

    >>> from .quantise import quantise
    >>> dequantise(quantise([torch.tensor([1.0, -0.25])], [2], "fp8"), [2], [(2,)], 1, "fp8", torch.float32)
    [tensor([ 1.0000, -0.2500])]
    """
    numels = [math.prod(shape) for shape in shapes]
    flat = torch.ops.ztrans.dequantise.default(buffer, sizes, numels, ranks, kind, dtype)
    return [value.view(shape) for value, shape in zip(flat, shapes)]


def reference(buffer: torch.Tensor, sizes: Sequence[int], ranks: int, kind: str, out) -> None:
    """The meaning of dequantise, value by value and rank by rank."""
    codes, scales = split(buffer.view(ranks, -1), sizes)
    at = group = 0
    for value, size in zip(out, sizes, strict=True):
        for r in range(ranks):
            here = value.view(-1)[r * size : (r + 1) * size]
            code = codes[r, at : at + here.numel()].view(CODES[kind]).float()
            scale = scales[r, group : group + groups(here.numel())].repeat_interleave(GROUP)
            here.copy_(code * scale[: here.numel()])
        at, group = at + size, group + groups(size)


@kernel
def _dequantise(
    rows, bases, SRC: tl.constexpr, DST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BUFFER: tl.constexpr
):
    row = rows + tl.program_id(0).to(tl.int64) * 5
    start, n, buffer = tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(bases + BUFFER)
    dst = (tl.load(bases + tl.load(row)) + start * (DST.primitive_bitwidth // 8)).to(tl.pointer_type(DST))
    src = (buffer + tl.load(row + 3)).to(tl.pointer_type(tl.int8))
    scales = (buffer + tl.load(row + 4)).to(tl.pointer_type(tl.float32))
    g = tl.arange(0, GROUPS)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scales + g, mask=g * GROUP < n, other=0)
    whole = (n >= GROUP * GROUPS) & (((src.to(tl.int64, bitcast=True) | dst.to(tl.int64, bitcast=True)) & 15) == 0)
    if whole:  # noqa: SIM108
        code = tl.load(tl.multiple_of(src, 16) + i)
    else:
        code = tl.load(src + i, mask=i < n, other=0)
    y = code.to(SRC, bitcast=True).to(tl.float32) * scale[:, None]
    if whole:
        tl.store(tl.multiple_of(dst, 16) + i, y.to(DST))
    else:
        tl.store(dst + i, y.to(DST), mask=i < n)


def launch(buffer: torch.Tensor, sizes: Sequence[int], ranks: int, kind: str, out) -> None:
    """dequantise by the kernel."""
    if not has_kernel(kind, buffer.device):
        return reference(buffer, sizes, ranks, kind, out)
    buffer = buffer.clone() if buffer.data_ptr() % 16 else buffer  # scales are read four bytes at a time
    rows = _values(tuple(sizes), tuple(v.numel() for v in out), ranks, buffer.device)
    if len(rows):
        with torch.cuda.device_of(buffer):
            _dequantise[(len(rows),)](
                rows, addresses([*out, buffer], buffer.device), SRC=element(CODES[kind]), DST=element(out[0].dtype),
                GROUP=GROUP, GROUPS=GROUPS, BUFFER=len(out), num_warps=4,
            )  # fmt: skip
    return None


@functools.cache
def _values(sizes: tuple[int, ...], numels: tuple[int, ...], ranks: int, device: torch.device) -> torch.Tensor:
    # value, start in it, elements, bytes into the buffer of their codes and of their scales
    pieces, at, group, row, block = [], 0, 0, row_bytes(sizes), GROUP * GROUPS
    for k, (size, numel) in enumerate(zip(sizes, numels)):
        for r in range(ranks):
            n = min(size, max(0, numel - r * size))
            scales = r * row + (sum(sizes) + 15) // 16 * 16
            for s in range(0, n, block):
                codes = r * row + at + s
                pieces.append((k, r * size + s, min(n - s, block), codes, scales + 4 * (group + s // GROUP)))
        at, group = at + size, group + groups(size)
    return on_device(torch.tensor(pieces, dtype=torch.int64).view(-1, 5), device)


def _by(run):
    def implementation(buffer, sizes, numels, ranks, kind, dtype):
        check_sizes(kind, dtype, sizes, numels, ranks)
        length = ranks * row_bytes(sizes)
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() != length:
            raise ValueError(f"dequantise: the buffer must be uint8, contiguous and of {length} bytes.")
        out = [buffer.new_empty(n, dtype=dtype) for n in numels]
        run(buffer, sizes, ranks, kind, out)
        return out

    return implementation


_lib.impl("dequantise", _by(reference), "CPU")
_lib.impl("dequantise", _by(launch), "CUDA")
torch.library.register_fake("ztrans::dequantise", _by(lambda *_: None), lib=_lib)
