"""encode_pack(parts, sizes, bits, block, kind, ranks): a send buffer of short codes, with a scale for each block.

    parts   float32, bfloat16 or float16, on one device; any shapes, contiguous or not
    sizes   elements of each part in a row of the buffer: at least numel / ranks
    bits    of a code, 8 or 4
    block   elements that share a scale, adjacent in a row of one part; even
    kind    "int", or with 8 bits "fp8" (e4m3)
    ranks   rows of the buffer: 1 to send this rank's parts to all, W to send row r to rank r
    ->      uint8[ranks, sum of coded_bytes(size)]: for each part its codes, then the fp32 scales of its blocks

A scale is the greatest magnitude of its block over the greatest code (127, 7 or 448), rounded to nearest. A code is
x * (1 / scale), rounded to nearest even. So -128 and -8 are unused, and what was decoded in the dtype of the parts has
the same codes again. The error is at most half a scale; with fp8, 1/16 of the value, or less than half of the smallest
code. A block with NaN or infinity arrives as NaN; one without a magnitude above 2**-100, as zeros. Elements
that a part does not have are zeros. A byte of two codes of 4 bits is a + 16 * b, for elements k and k + block / 2.

Errors: other formats or dtypes, several devices, a size too small, and an `out` of another shape. Bytes moved at least:
one read of every part and one write of the buffer; fp32 to 8 bits in blocks of 256 is 5.02 bytes an element. On GPUs
there is one launch for each dtype among the parts. Torch encodes there what `has_kernel` excludes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .kernel import FLOATS, element, kernel, tl
from .operation import define
from .tables import addresses, blocks, on_device

# The greatest code of each format.
GREATEST = {("int", 8): 127.0, ("int", 4): 7.0, ("fp8", 8): 448.0}
# Blocks without a larger magnitude become zero: the reciprocal of their scale may be infinite.
LEAST = 2.0**-100
# Larger magnitudes have the scale of this one, so that no product of a code and a scale overflows.
MOST = (2 - 2.0**-20) * 2.0**127
# Elements that a CPU encodes, decodes or sums at once: all that this needs stays in its cache.
RUN = 1 << 17
# About how many elements a program of a kernel has, and the most in a block.
_PROGRAM = 4096
_LARGEST_BLOCK = 8192

# `encode_blocks` of one format: codes and scales of float[blocks, block].
EncodeBlocks = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def encode(
    rows: torch.Tensor,
    bits: int,
    block: int,
    kind: str = "int",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The codes of float[parts, elements] as uint8[parts, nbytes], with blocks of its own for every part.

    >>> codes = encode(torch.tensor([[127.0, -3.2, 0.0]]), 8, 4)
    >>> codes[:, :4].view(torch.int8), codes[:, 4:].view(torch.float32)
    (tensor([[127,  -3,   0,   0]], dtype=torch.int8), tensor([[1.]]))
    """
    parts, elements = rows.shape
    return encode_pack([rows], [elements], bits, block, kind, ranks=parts, out=out)


def encode_pack(
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    bits: int,
    block: int,
    kind: str = "int",
    *,
    ranks: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode `parts` into a send buffer: `out` if given, else a new one. The docstring of this file has the details.

    >>> encode_pack([torch.ones(3), torch.zeros(2)], [2, 1], 8, 2, ranks=2).shape
    torch.Size([2, 12])
    """
    if not parts:
        raise ValueError("encode: no parts.")
    if out is None:
        nbytes = sum(coded_bytes(size, bits, block, kind) for size in sizes)
        out = parts[0].new_empty(ranks, nbytes, dtype=torch.uint8)
    torch.ops.ztrans.encode.default(parts, sizes, ranks, bits, block, kind, out)
    return out


def coded_bytes(elements: int, bits: int, block: int, kind: str = "int") -> int:
    """The bytes of the codes and scales of a part in one row.

    >>> coded_bytes(1000, 8, 256), coded_bytes(65, 4, 64), coded_bytes(0, 8, 256)
    (1040, 72, 0)
    """
    check_format("encode", bits, block, kind)
    return -(-elements // block) * (block * bits // 8 + 4)


def reference(
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    ranks: int,
    bits: int,
    block: int,
    kind: str,
    out: torch.Tensor,
    compiled: Callable[[torch.dtype], EncodeBlocks] | None = None,
) -> None:
    """encode_pack in plain torch, part by part. `compiled` returns `encode_blocks` compiled for a dtype."""
    places = out.split([coded_bytes(size, bits, block, kind) for size in sizes], 1)
    for part, size, place in zip(parts, sizes, places, strict=True):
        flat = part.reshape(-1)
        if flat.numel() < ranks * size:
            flat = torch.nn.functional.pad(flat, (0, ranks * size - flat.numel()))
        values = flat.view(ranks, size)
        encode: EncodeBlocks = functools.partial(encode_blocks, bits=bits, kind=kind)
        if compiled is not None:
            encode = compiled(part.dtype)
        for run in runs(place, size, bits, block, RUN if compiled is None else None):
            x = values[run.ranks, run.elements]
            missing = run.codes.shape[1] * block - x.shape[1]
            if missing:
                x = torch.nn.functional.pad(x, (0, missing))
            codes, scale = encode(x.reshape(-1, block).contiguous())
            run.codes.copy_(codes.view(run.codes.shape))
            run.scales.copy_(scale.view(torch.uint8).view(run.scales.shape))


class Run(NamedTuple):
    """Some blocks of a part, of one rank or of all.

    Attributes:
        ranks, elements: where they are in the parts of all ranks; the last block may have fewer elements.
        codes: int8[ranks, blocks, bytes of a block].
        scales: the bytes of their scales, uint8[ranks, 4 * blocks].
    """

    ranks: slice
    elements: slice
    codes: torch.Tensor
    scales: torch.Tensor


def runs(place: torch.Tensor, size: int, bits: int, block: int, most: int | None) -> Iterator[Run]:
    """Cut the codes of the parts of all ranks, uint8[ranks, coded_bytes(size)], into runs of at most so many elements.

    A run has one block at least. With None there is one run for all.
    """
    ranks = len(place)
    width = block * bits // 8
    blocks = -(-size // block)
    if not blocks:
        return
    codes = place[:, : blocks * width].view(torch.int8).unflatten(1, (blocks, width))
    scales = place[:, blocks * width :]
    count = ranks * blocks if most is None else max(1, most // block)
    steps = [slice(0, ranks)]
    if ranks * blocks > count:
        steps = [slice(r, r + 1) for r in range(ranks)]
    for rows in steps:
        for first in range(0, blocks, count):
            last = min(first + count, blocks)
            elements = slice(first * block, last * block)
            yield Run(rows, elements, codes[rows, first:last], scales[rows, 4 * first : 4 * last])


def encode_blocks(x: torch.Tensor, bits: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The meaning of the codes: int8[blocks, bytes of a block] and float32[blocks, 1] of x: float[blocks, block]."""
    x = x.to(torch.float32)
    greatest = x.abs().amax(-1, keepdim=True)
    scale = torch.nn.functional.threshold(greatest, LEAST, 0.0).clamp(max=MOST)
    # A GPU would multiply by the reciprocal of a Python number, which rounds twice.
    divisor = torch.full((), GREATEST[kind, bits], device=x.device)
    scale = torch.where(greatest < math.inf, scale / divisor, math.nan)
    y = x * (1 / scale)
    if kind == "fp8":
        codes = y.to(torch.float8_e4m3fn).view(torch.int8)
    else:
        y = y.round()
        if bits == 4:
            low, high = y.chunk(2, -1)
            y = low.add(high, alpha=16)
        codes = y.to(torch.int8)
    return codes * (scale > 0), scale  # the codes of zeros and of NaN are zero


@kernel
def _finite_greatest(x, mask):
    # NaN counts as infinity, which `max` keeps on every device.
    return tl.max(tl.where(mask, tl.where(x == x, tl.abs(x), float("inf")), 0.0), 1)


@kernel
def _encode(
    rows, bases, out,
    SRC: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, GREATEST: tl.constexpr,
):  # fmt: skip
    # GROUP blocks. Byte j of a block has the code of element j, and with 4 bits of element BYTES + j too.
    BYTES: tl.constexpr = BLOCK * BITS // 8
    row = rows + tl.program_id(0).to(tl.int64) * 7
    start = tl.load(row + 6)
    have = (tl.load(row + 2) - start).to(tl.int32)
    first = start // BLOCK
    src = tl.load(bases + tl.load(row)) + (tl.load(row + 1) + start) * (SRC.primitive_bitwidth // 8)
    dst = out + tl.load(row + 3) + first * BYTES
    scales = (out + tl.load(row + 4) + first * 4).to(tl.pointer_type(tl.float32))
    g = tl.arange(0, GROUP)
    j = tl.arange(0, WIDTH)
    here = g < tl.load(row + 5) - first
    i = g[:, None] * BLOCK + j[None, :]
    exists = j[None, :] < BYTES
    high = tl.zeros([GROUP, WIDTH], tl.float32)
    # Without a mask, and aligned, a thread reads 16 bytes at a time.
    if (WIDTH == BYTES) & (have >= GROUP * BLOCK) & ((src & 15) == 0):
        aligned = tl.multiple_of(src.to(tl.pointer_type(SRC)), 16)
        low = tl.load(aligned + i).to(tl.float32)
        if BITS == 4:
            high = tl.load(aligned + i + BYTES).to(tl.float32)
    else:
        pointer = src.to(tl.pointer_type(SRC))
        low = tl.load(pointer + i, mask=exists & (i < have), other=0).to(tl.float32)
        if BITS == 4:
            high = tl.load(pointer + i + BYTES, mask=exists & (i + BYTES < have), other=0)
            high = high.to(tl.float32)
    greatest = _finite_greatest(low, exists)
    if BITS == 4:
        greatest = tl.maximum(greatest, _finite_greatest(high, exists))
    kept = tl.where(greatest > LEAST, tl.minimum(greatest, MOST), 0.0)
    scale = tl.where(greatest < float("inf"), tl.div_rn(kept, GREATEST), float("nan"))
    is_coded = scale > 0
    inverse = tl.div_rn(1.0, tl.where(is_coded, scale, 1.0))[:, None]
    low = tl.where(is_coded[:, None], low * inverse, 0.0)
    if FP8:
        code = low.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        code = _rounded(low)
        if BITS == 4:
            code += 16 * _rounded(tl.where(is_coded[:, None], high * inverse, 0.0))
        code = code.to(tl.int8)
    codes = dst.to(tl.pointer_type(tl.int8))
    if (WIDTH == BYTES) & ((dst.to(tl.int64, bitcast=True) & 15) == 0) & (have >= GROUP * BLOCK):
        tl.store(tl.multiple_of(codes, 16) + g[:, None] * BYTES + j[None, :], code)
    else:
        tl.store(codes + g[:, None] * BYTES + j[None, :], code, mask=exists & here[:, None])
    tl.store(scales + g, scale, mask=here)


@kernel
def _rounded(x):
    # To nearest even: next to 1.5 * 2**23 floats are 1 apart.
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)


def launch(
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    ranks: int,
    bits: int,
    block: int,
    kind: str,
    out: torch.Tensor,
) -> None:
    """encode_pack by the kernel: one launch for each dtype among the parts."""
    if not has_kernel(bits, block, kind, out):
        reference(parts, sizes, ranks, bits, block, kind, out)
        return
    parts = [part.contiguous() for part in parts]
    numels = tuple(part.numel() for part in parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        mine = tuple(k for k, part in enumerate(parts) if part.dtype == dtype)
        form = bits, block
        rows = pieces_of(tuple(sizes), numels, ranks, out.stride(0), form, mine, True, out.device)
        if not len(rows):
            continue
        with torch.cuda.device_of(out):
            _encode[(len(rows),)](
                rows, addresses(parts, out.device), out,
                SRC=element(dtype), FP8=kind == "fp8", LEAST=LEAST, MOST=MOST,
                GREATEST=GREATEST[kind, bits], **constants(bits, block),
            )  # fmt: skip


def has_kernel(bits: int, block: int, kind: str, buffer: torch.Tensor) -> bool:
    """Whether kernels encode and decode a format in such a buffer.

    Scales must be aligned to 4 bytes, and a block must fit into the registers of a thread block. Below sm_90 Triton
    casts to floats of 8 bits by way of fp16, which rounds twice.
    """
    if block * bits // 8 % 4 or block > _LARGEST_BLOCK:
        return False
    if buffer.data_ptr() % 4 or buffer.stride(0) % 4:
        return False
    if kind == "int" or not buffer.is_cuda:
        return True
    return torch.cuda.get_device_capability(buffer.device) >= (9, 0)


def constants(bits: int, block: int) -> dict[str, Any]:
    """The constants of a kernel for blocks, with the options of its launch."""
    width = 1 << (block * bits // 8 - 1).bit_length()
    return {
        "BITS": bits,
        "BLOCK": block,
        "WIDTH": width,
        "GROUP": _group(block),
        "num_warps": 4,
    }


def _group(block: int) -> int:
    """The blocks of a program of a kernel, a power of two: with whole blocks, 4096 elements at most."""
    return max(1, _PROGRAM >> (block - 1).bit_length())


@functools.cache
def pieces_of(
    sizes: tuple[int, ...],
    numels: tuple[int, ...],
    ranks: int,
    stride: int,
    form: tuple[int, int],
    mine: tuple[int, ...],
    is_padded: bool,
    device: torch.device,
) -> torch.Tensor:
    """A row for each program: tensor, first element of a part, its elements, codes, scales, blocks, start in the part.

    Args:
        sizes, numels, ranks: the elements of a part of each tensor, of the tensor, and the parts of a tensor.
        stride: the bytes from one row of the buffer to the next. Codes and scales are offsets in the buffer.
        form: the bits of a code, and the elements of a block.
        mine: the tensors that the launch is for.
        is_padded: whether a program runs for blocks of padding too.
    """
    bits, block = form
    pieces = []
    lengths = []
    offset = 0
    for k, (size, numel) in enumerate(zip(sizes, numels)):
        count = -(-size // block)
        for r in range(ranks if k in mine else 0):
            have = min(size, max(0, numel - r * size))
            codes = r * stride + offset
            scales = codes + count * block * bits // 8
            pieces.append((k, r * size, have, codes, scales, count, 0))
            lengths.append(count * block if is_padded else have)
        offset += count * (block * bits // 8 + 4)
    return on_device(blocks(pieces, lengths, _group(block) * block, advancing=(6,)), device)


def check_format(name: str, bits: int, block: int, kind: str) -> None:
    """Raise unless there is such a format."""
    if (kind, bits) not in GREATEST:
        raise ValueError(f"{name}: no codes of {bits} bits and kind {kind!r}.")
    if block < 2 or block % 2:
        raise ValueError(f"{name}: a block must be even, got {block}.")


def check_buffer(name: str, buffer: torch.Tensor, ranks: int, nbytes: int) -> None:
    """Raise unless a buffer has a row of so many bytes for each rank."""
    is_row_major = buffer.ndim == 2 and (buffer.shape[1] < 2 or buffer.stride(1) == 1)
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (ranks, nbytes) or not is_row_major:
        raise ValueError(
            f"{name}: the buffer must be uint8[{ranks}, {nbytes}] with contiguous rows, not "
            f"{str(buffer.dtype).removeprefix('torch.')}{[*buffer.shape]}."
        )


def _check(parts, sizes, ranks, bits, block, kind, out) -> None:
    if len(parts) != len(sizes):
        raise ValueError(f"encode: {len(parts)} parts, but {len(sizes)} sizes.")
    check_buffer("encode", out, ranks, sum(coded_bytes(n, bits, block, kind) for n in sizes))
    for k, (part, size) in enumerate(zip(parts, sizes)):
        if part.dtype not in FLOATS:
            raise TypeError(f"encode: part {k} is {part.dtype}; codes are of fp32, bf16 and fp16.")
        if size < 0 or part.numel() > ranks * size:
            raise ValueError(
                f"encode: part {k} has {part.numel()} elements, room is for {ranks} times {size}."
            )
        if part.device != out.device:
            raise ValueError(
                f"encode: all must be on one device, got {part.device} and {out.device}."
            )


define(
    "encode(Tensor[] parts, int[] sizes, int ranks, int bits, int block, str kind, Tensor(a!) out) -> ()",
    _check,
    reference,
    launch,
)
