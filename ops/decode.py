"""decode_unpack(buffer, sizes, shapes, dtype, bits, block, kind): the whole values of gathered `encode_pack` buffers.

    buffer  uint8[ranks, sum of coded_bytes(size)], with contiguous rows: row r is what rank r encoded
    sizes   elements of each value's part in a row, padding included
    shapes  the shapes of the whole values, with at most ranks * size elements; other elements are padding
    dtype   of the values: float32, bfloat16 or float16
    ->      one contiguous tensor for each value: code * scale in fp32, rounded once to `dtype`

`sum_coded` decodes reductions. Errors: other formats or dtypes, a buffer of another shape, a shape with more elements
than the buffer has for it. Bytes moved at least: one read of the buffer and one write of every value; 8 bits to bf16 is
3.02 bytes an element. On GPUs one launch decodes all values, unless `has_kernel` excludes the format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .encode import RUN, Run, check_buffer, coded_bytes, constants, has_kernel, pieces_of, runs
from .kernel import FLOATS, element, kernel, tl
from .operation import check_like, define
from .reduce_scatter import finished
from .tables import addresses

# `decode_blocks` of one format, which writes the values of codes and scales to dtype[blocks, block], or adds them.
DecodeBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
# Returns `decode_blocks` compiled for a dtype; with True, one that adds.
CompiledDecode = Callable[[torch.dtype, bool], DecodeBlocks]


def decode(
    codes: torch.Tensor,
    elements: int,
    dtype: torch.dtype,
    bits: int,
    block: int,
    kind: str = "int",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values dtype[parts, elements] of the codes uint8[parts, nbytes] that `encode` returns.

    >>> from .encode import encode
    >>> decode(encode(torch.tensor([[127.0, -3.2, 0.0]]), 8, 4), 3, torch.float32, 8, 4)
    tensor([[127.,  -3.,   0.]])
    """
    if out is None:
        out = codes.new_empty(len(codes), elements, dtype=dtype)
    if out.dtype != dtype:
        raise TypeError(f"decode: out is {out.dtype}, not {dtype}.")
    torch.ops.ztrans.decode.default(codes, [elements], bits, block, kind, [out])
    return out


def decode_unpack(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    bits: int,
    block: int,
    kind: str = "int",
) -> list[torch.Tensor]:
    """The whole values of `buffer`. The docstring of this file describes the arguments.

    >>> from .encode import encode_pack
    >>> buffer = encode_pack([torch.tensor([0.0, 7.0, -7.0])], [2], 4, 2, ranks=2)
    >>> decode_unpack(buffer, [2], [(3,)], torch.float32, 4, 2)
    [tensor([ 0.,  7., -7.])]
    """
    outs = [buffer.new_empty(tuple(shape), dtype=dtype) for shape in shapes]
    torch.ops.ztrans.decode.default(buffer, sizes, bits, block, kind, outs)
    return outs


def reference(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    bits: int,
    block: int,
    kind: str,
    outs: Sequence[torch.Tensor],
    compiled: CompiledDecode | None = None,
) -> None:
    """decode_unpack in plain torch, value by value, or by what is compiled of `decode_blocks`."""
    places = buffer.split([coded_bytes(size, bits, block, kind) for size in sizes], 1)
    for out, size, place in zip(outs, sizes, places, strict=True):
        if out.numel() == len(buffer) * size:
            decode_rows(place, size, bits, block, kind, out.view(len(buffer), size), compiled)
            continue
        for r, row in enumerate(place.unsqueeze(1)):
            here = out.view(-1)[r * size : (r + 1) * size]
            decode_rows(row, size, bits, block, kind, here.view(1, -1), compiled)


def decode_rows(
    place: torch.Tensor,
    size: int,
    bits: int,
    block: int,
    kind: str,
    out: torch.Tensor,
    compiled: CompiledDecode | None,
) -> None:
    """Decode the first elements of the parts of `size` elements in uint8[ranks, bytes] into rows of `out`."""
    decode = decoder(bits, kind, compiled, out.dtype)
    for run in runs(place, size, bits, block, RUN if compiled is None else None):
        here = out[run.ranks, run.elements]
        blocks = run.codes.shape[0] * run.codes.shape[1]
        if here.is_contiguous() and here.numel() == blocks * block:
            decode(*codes_and_scale(run), here.view(blocks, block))
        else:
            values = out.new_empty(blocks, block)
            decode(*codes_and_scale(run), values)
            here.copy_(values.view(len(here), -1)[:, : here.shape[1]])


def codes_and_scale(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of a run, int8[blocks, bytes of a block] and float32[blocks, 1]."""
    scales = run.scales.clone(memory_format=torch.contiguous_format)  # so that they are aligned
    return run.codes.flatten(0, 1).contiguous(), scales.view(torch.float32).view(-1, 1)


def decoder(
    bits: int, kind: str, compiled: CompiledDecode | None, dtype: torch.dtype, add: bool = False
) -> DecodeBlocks:
    """decode_blocks of a format, compiled or in plain torch."""
    if compiled is not None:
        return compiled(dtype, add)
    return functools.partial(decode_blocks, bits=bits, kind=kind, add=add)


def decode_blocks(
    codes: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    bits: int,
    kind: str,
    add: bool = False,
) -> None:
    """The meaning of decoding: dtype[blocks, block] of int8[blocks, bytes of a block] and float32[blocks, 1].

    With `add`, the values are added to `out`, which is float32.
    """
    write = torch.Tensor.add_ if add else torch.Tensor.copy_
    if kind == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    y = codes.to(torch.float32)
    if bits == 8:
        write(out, y * scale)
        return
    low_values, high_values = out.chunk(2, -1)
    high = ((y + 8) * 0.0625).floor()  # never a negative zero
    write(low_values, (y - high * 16) * scale)
    write(high_values, high * scale)


@kernel
def _term(
    base,
    codes,
    scales,
    g,
    j,
    exists,
    here,
    whole,
    BYTES: tl.constexpr,
    FP8: tl.constexpr,
    BITS: tl.constexpr,
):
    """The values of the elements j of blocks, and with 4 bits of the elements BYTES + j."""
    scale = tl.load((base + scales).to(tl.pointer_type(tl.float32)) + g, mask=here, other=0)[
        :, None
    ]
    pointer = (base + codes).to(tl.pointer_type(tl.int8))
    i = g[:, None] * BYTES + j[None, :]
    if whole & (((base + codes) & 15) == 0):
        code = tl.load(tl.multiple_of(pointer, 16) + i)
    else:
        code = tl.load(pointer + i, mask=exists & here[:, None], other=0)
    if FP8:
        low = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        high = low
    elif BITS == 8:
        low = code.to(tl.float32)
        high = low
    else:
        both = code.to(tl.int32)
        upper = (both + 8) >> 4
        low = (both - 16 * upper).to(tl.float32)
        high = upper.to(tl.float32)
    return low * scale, high * scale


@kernel
def decode_rows_of(
    rows, terms, bases,
    OUT: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, WORLD: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    # The sum of WORLD terms, in rank order; each has its codes at the same place of a buffer of its own.
    BYTES: tl.constexpr = BLOCK * BITS // 8
    row = rows + tl.program_id(0).to(tl.int64) * 7
    start = tl.load(row + 6)
    n = (tl.load(row + 2) - start).to(tl.int32)
    first = start // BLOCK
    codes = tl.load(row + 3) + first * BYTES
    scales = tl.load(row + 4) + first * 4
    dst = tl.load(bases + tl.load(row)) + (tl.load(row + 1) + start) * (OUT.primitive_bitwidth // 8)
    g = tl.arange(0, GROUP)
    j = tl.arange(0, WIDTH)
    exists = j[None, :] < BYTES
    here = g * BLOCK < n
    whole = (WIDTH == BYTES) & (n >= GROUP * BLOCK)
    low, high = _term(tl.load(terms), codes, scales, g, j, exists, here, whole, BYTES, FP8, BITS)
    if WORLD > 1:  # Triton 3.6 does not compile a loop that never runs
        p = 1
        while p < WORLD:
            base = tl.load(terms + p)
            a, b = _term(base, codes, scales, g, j, exists, here, whole, BYTES, FP8, BITS)
            low += a
            high += b
            p += 1
    low = finished(low, True, DIVISOR).to(OUT)
    i = g[:, None] * BLOCK + j[None, :]
    pointer = dst.to(tl.pointer_type(OUT))
    if whole & ((dst & 15) == 0):
        aligned = tl.multiple_of(pointer, 16)
        tl.store(aligned + i, low)
        if BITS == 4:
            tl.store(aligned + i + BYTES, finished(high, True, DIVISOR).to(OUT))
    else:
        tl.store(pointer + i, low, mask=exists & (i < n))
        if BITS == 4:
            high_values = finished(high, True, DIVISOR).to(OUT)
            tl.store(pointer + i + BYTES, high_values, mask=exists & (i + BYTES < n))


def launch(
    buffer: torch.Tensor,
    sizes: Sequence[int],
    bits: int,
    block: int,
    kind: str,
    outs: Sequence[torch.Tensor],
) -> None:
    """decode_unpack by the kernel: one launch."""
    if has_kernel(bits, block, kind, buffer):
        launch_sum([buffer], outs, sizes, 1, bits, block, kind, len(buffer), buffer.stride(0))
    else:
        reference(buffer, sizes, bits, block, kind, outs)


def launch_sum(
    terms: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    divisor: int,
    bits: int,
    block: int,
    kind: str,
    ranks: int = 1,
    stride: int = 0,
) -> None:
    """Sum `terms`, each with the parts of `ranks` ranks, and divide the sum."""
    device = terms[0].device
    numels = tuple(out.numel() for out in outs)
    form, mine = (bits, block), tuple(range(len(outs)))
    rows = pieces_of(tuple(sizes), numels, ranks, stride, form, mine, False, device)
    if not len(rows):
        return
    with torch.cuda.device_of(terms[0]):
        decode_rows_of[(len(rows),)](
            rows, addresses(terms, device), addresses(outs, device),
            OUT=element(outs[0].dtype), FP8=kind == "fp8", WORLD=len(terms), DIVISOR=divisor,
            **constants(bits, block),
        )  # fmt: skip


def _check(buffer, sizes, bits, block, kind, outs) -> None:
    if not outs or len(sizes) != len(outs):
        raise ValueError(f"decode: {len(sizes)} sizes, but {len(outs)} values.")
    nbytes = sum(coded_bytes(size, bits, block, kind) for size in sizes)
    check_buffer("decode", buffer, len(buffer), nbytes)
    if outs[0].dtype not in FLOATS:
        raise TypeError(f"decode: {outs[0].dtype} is not fp32, bf16 or fp16.")
    check_like("decode", "value", outs, outs[0].dtype, buffer.device)
    for k, (out, size) in enumerate(zip(outs, sizes)):
        if out.numel() > len(buffer) * size:
            raise ValueError(
                f"decode: value {k} has {out.numel()} elements, the buffer {len(buffer)} times {size} for it."
            )


define(
    "decode(Tensor buffer, int[] sizes, int bits, int block, str kind, Tensor(a!)[] outs) -> ()",
    _check,
    reference,
    launch,
)
