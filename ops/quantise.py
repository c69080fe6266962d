"""quantise(parts, sizes, kind): a send buffer of 8 bits an element and a scale for each group.

    parts   float32, bfloat16 or float16, of one dtype and device
    sizes   elements that each part has in the buffer, at least its own; codes of zero behind them
    kind    "int8": the nearest of 255 steps, ties to even.  "fp8": float8_e4m3fn
    ->      uint8[row_bytes(sizes)], to be gathered as bytes: the codes, then float32 scales

`dequantise` is the inverse, and `all_gather` can carry the bytes in between. A group is 128 adjacent
elements of one part; its scale is its greatest magnitude over the greatest code. The error is at
most half a step: 1/254 of the greatest magnitude of the group with int8, 1/16 of the value itself
with fp8, subnormals aside. Groups below 2**-100 become zero; a group with an element that is not
finite becomes NaN. It changes numerics, so it is used only where it is asked for by name.
Errors: another kind, dtypes or devices mixed, a size too small. Bytes moved at least: 5.03 an
element from fp32, and over the wire 1.03 for bf16's 2. One launch, after that of the zeros behind the
codes; fp8 below sm_90 is done by torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .kernel import FLOATS, element, kernel
from .tables import addresses, on_device

if TYPE_CHECKING:
    import triton.language as tl

_lib = torch.library.Library("ztrans", "FRAGMENT")
_lib.define("quantise(Tensor[] parts, int[] sizes, str kind) -> Tensor")

GROUP = 128
GROUPS = 16  # of a block
_TINY = 2.0**-100
GREATEST = {"int8": 127.0, "fp8": 448.0}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def row_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the buffer of one rank: codes, then scales, each padded to 16 bytes.

    >>> row_bytes([128, 1])
    160
    """
    return _padded(sum(sizes)) + _padded(4 * sum(map(groups, sizes)))


def quantise(parts: Sequence[torch.Tensor], sizes: Sequence[int], kind: str) -> torch.Tensor:
    """The send buffer of `parts`, as the head of this file says.

    >>> quantise([torch.tensor([1.0, -0.5])], [2], "int8")[:2].view(torch.int8)
    tensor([127, -64], dtype=torch.int8)
    """
    if not parts:
        raise ValueError("quantise: no parts.")
    return torch.ops.ztrans.quantise.default(parts, sizes, kind)


def reference(parts: Sequence[torch.Tensor], sizes: Sequence[int], kind: str, out: torch.Tensor) -> None:
    """The meaning of quantise, part by part."""
    out.zero_()
    codes, scales = split(out.view(1, -1), sizes)
    at = group = 0
    for part, size in zip(parts, sizes, strict=True):
        x = part.new_zeros(groups(size) * GROUP, dtype=torch.float32)
        x[: part.numel()].copy_(part.reshape(-1))
        x = x.view(-1, GROUP)
        greatest = x.abs().nan_to_num(math.inf, math.inf).amax(1, keepdim=True)
        greatest = torch.where(greatest < _TINY, 0.0, greatest)
        factor = torch.full_like(greatest, GREATEST[kind]).div_(greatest)  # with a number it would be rounded twice
        y = torch.where(greatest > 0, x * factor, 0.0)
        y = y.nan_to_num(0.0).clamp_(-GREATEST[kind], GREATEST[kind])
        code = y.round().to(torch.int8) if kind == "int8" else y.to(torch.float8_e4m3fn)
        codes[0, at : at + size] = code.view(-1)[:size].view(torch.uint8)
        scales[0, group : group + len(x)] = (greatest / torch.full_like(greatest, GREATEST[kind])).view(-1)
        at, group = at + size, group + len(x)


@kernel
def _quantise(
    rows, bases, out, scales, GREATEST: tl.constexpr, TINY: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 6
    start, have, want = tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    src = (tl.load(bases + tl.load(row)) + start * (SRC.primitive_bitwidth // 8)).to(tl.pointer_type(SRC))
    dst = out + tl.load(row + 4)
    g = tl.arange(0, GROUPS)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if (have >= GROUP * GROUPS) & ((src.to(tl.int64, bitcast=True) & 15) == 0):
        x = tl.load(tl.multiple_of(src, 16) + i).to(tl.float32)
    else:
        x = tl.load(src + i, mask=i < have, other=0).to(tl.float32)
    greatest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    greatest = tl.where(greatest < TINY, 0.0, greatest)
    factor = tl.where(greatest > 0, tl.div_rn(GREATEST, tl.where(greatest > 0, greatest, 1.0)), 0.0)
    y = tl.where(greatest[:, None] > 0, x * factor[:, None], 0.0)  # of a group below, no zero is negative
    y = tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), -GREATEST), GREATEST)
    if DST == tl.int8:  # noqa: SIM108, SIM300
        code = ((y + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23: nothing is left behind the point
    else:
        code = y.to(DST).to(tl.int8, bitcast=True)
    if (want >= GROUP * GROUPS) & ((dst.to(tl.int64, bitcast=True) & 15) == 0):
        tl.store(tl.multiple_of(dst, 16) + i, code)
    else:
        tl.store(dst + i, code, mask=i < want)
    tl.store(scales + tl.load(row + 5) + g, tl.div_rn(greatest, GREATEST), mask=g * GROUP < want)


def launch(parts: Sequence[torch.Tensor], sizes: Sequence[int], kind: str, out: torch.Tensor) -> None:
    """quantise by the kernel."""
    if not has_kernel(kind, out.device):
        return reference(parts, sizes, kind, out)
    parts = [p.contiguous() for p in parts]
    codes, scales = split(out.view(1, -1), sizes)
    out[sum(sizes) :].zero_()
    rows = _parts(tuple(sizes), tuple(p.numel() for p in parts), out.device)
    if len(rows):
        with torch.cuda.device_of(out):
            _quantise[(len(rows),)](
                rows, addresses(parts, out.device), codes.view(torch.int8), scales,
                GREATEST=GREATEST[kind], TINY=_TINY, SRC=element(parts[0].dtype), DST=element(CODES[kind]),
                GROUP=GROUP, GROUPS=GROUPS, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return None


@functools.cache
def _parts(sizes: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # part, start in it, elements there are, elements wanted, where their codes go, where their scales go
    pieces, at, group, block = [], 0, 0, GROUP * GROUPS
    for k, (size, numel) in enumerate(zip(sizes, numels)):
        for start in range(0, size, block):
            have, want = (max(0, min(n - start, block)) for n in (numel, size))
            pieces.append((k, start, have, want, at + start, group + start // GROUP))
        at, group = at + size, group + groups(size)
    return on_device(torch.tensor(pieces, dtype=torch.int64).view(-1, 6), device)


def split(buffer: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of a buffer of [ranks, row_bytes(sizes)]."""
    end = _padded(sum(sizes))
    scales = buffer[:, end:]
    return buffer[:, :end], scales.view(torch.float32) if scales.numel() else scales.float()


def groups(size: int) -> int:
    """How many groups there are in a part of `size` elements."""
    return -(-size // GROUP)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def has_kernel(kind: str, device: torch.device) -> bool:
    """Whether the kernel may be used: below sm_90 Triton rounds fp32 to fp8 by way of fp16, which rounds twice."""
    return kind == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def check_sizes(kind: str, dtype: torch.dtype, sizes: Sequence[int], numels: Sequence[int], room: int) -> None:
    """Raise unless tensors of `numels` elements fit in `room` times `sizes`."""
    if kind not in CODES:
        raise ValueError(f"quantise: unknown kind {kind!r}; use 'int8' or 'fp8'.")
    if dtype not in FLOATS:
        raise TypeError(f"quantise: {dtype} is not a float of 16 or 32 bits.")
    if not sizes or len(sizes) != len(numels):
        raise ValueError(f"quantise: {len(numels)} tensors, but {len(sizes)} sizes.")
    for k, (size, numel) in enumerate(zip(sizes, numels)):
        if not 0 <= numel <= room * size:
            raise ValueError(f"quantise: tensor {k} has {numel} elements, room is for {room} times {size}.")


def _by(run):
    def implementation(parts, sizes, kind):
        check_sizes(kind, parts[0].dtype, sizes, [p.numel() for p in parts], 1)
        if len({(p.dtype, p.device) for p in parts}) > 1:
            raise TypeError("quantise: parts must be of one dtype and on one device.")
        out = parts[0].new_empty(row_bytes(sizes), dtype=torch.uint8)
        run(parts, sizes, kind, out)
        return out

    return implementation


_lib.impl("quantise", _by(reference), "CPU")
_lib.impl("quantise", _by(launch), "CUDA")
torch.library.register_fake("ztrans::quantise", _by(lambda *_: None), lib=_lib)
