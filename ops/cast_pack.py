"""cast_pack(parts, sizes, dtype, ranks): copy many tensors to one send buffer and cast them, in one launch.

    parts   tensors on one device; any shapes and dtypes, contiguous or not
    sizes   elements of each part in a row of the buffer: at least numel / ranks
    dtype   the buffer's dtype; float to float is rounded to nearest even, as `copy_` does
    ranks   rows of the buffer: 1 to send this rank's parts to all, W to send row r to rank r
    ->      dtype[ranks * sum(sizes)]: row r holds elements r * size .. (r + 1) * size of every part,
            zero where a part has no more

Errors: a size that is too small, several devices, and an `out` with the wrong dtype, device, length or strides. Bytes
moved at least: one read of every part and one write of the buffer; fp32 to bf16 is 6 bytes per element. There is one
launch for each dtype among the parts. Torch copies parts that are not contiguous, and parts of a dtype that Triton and
torch cast differently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from einops import rearrange

from .move import is_movable, move, parts_of, plan
from .operation import define


def cast_pack(
    parts: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    ranks: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack `parts` into a send buffer: `out` if given, else a new one. The docstring of this file has the details.

    >>> cast_pack([torch.ones(3), torch.full((2,), 2.0)], [2, 1], torch.bfloat16, ranks=2)
    tensor([1., 1., 2., 1., 0., 2.], dtype=torch.bfloat16)
    """
    if not parts:
        raise ValueError("cast_pack: no parts.")
    if out is None:
        out = parts[0].new_empty(ranks * sum(sizes), dtype=dtype)
    if out.dtype != dtype:
        raise TypeError(f"cast_pack: out is {out.dtype}, not {dtype}.")
    torch.ops.ztrans.cast_pack.default(parts, sizes, ranks, out)
    return out


def reference(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
) -> None:
    """cast_pack in plain torch, part by part."""
    for part, rows in zip(parts, out.view(ranks, -1).split(list(sizes), dim=1), strict=True):
        _copy(part, rows)


def _copy(part: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy a part to its place in every row, followed by zeros."""
    padding = rows.numel() - part.numel()
    if len(rows) == 1:  # one pass copies any strides
        row = rows[0]
        if padding:
            row, rest = row.split([part.numel(), padding])
            rest.zero_()
        row.view(part.shape).copy_(part)
        return
    flat = part.reshape(-1)
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    rows.copy_(rearrange(flat, "(rank element) -> rank element", rank=len(rows)))


def launch(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
) -> None:
    """cast_pack by the kernel: one launch for each dtype among the parts."""
    torch_indices: list[int] = []  # of the parts that torch copies
    kernel_indices: dict[torch.dtype, list[int]] = {}
    for k, part in enumerate(parts):
        if part.is_contiguous() and is_movable(part.dtype, out.dtype):
            kernel_indices.setdefault(part.dtype, []).append(k)
        else:
            torch_indices.append(k)
    if torch_indices:
        places = out.view(ranks, -1).split(list(sizes), dim=1)
        for k in torch_indices:
            _copy(parts[k], places[k])

    numels = tuple(part.numel() for part in parts)
    for dtype, indices in kernel_indices.items():
        rows = _rows(tuple(sizes), numels, tuple(indices), ranks, out.device)
        move(rows, [*parts, out], dtype, out.dtype)


@functools.cache
def _rows(
    sizes: tuple[int, ...],
    numels: tuple[int, ...],
    indices: tuple[int, ...],
    ranks: int,
    device: torch.device,
) -> torch.Tensor:
    buffer = len(sizes)
    pieces = []
    for k, start, place, count in parts_of(sizes, numels, ranks):
        if k in indices:
            pieces.append((k, start, buffer, place, count, sizes[k]))
    return plan(pieces, device)


def _check(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
) -> None:
    if len(parts) != len(sizes):
        raise ValueError(f"cast_pack: {len(parts)} parts, but {len(sizes)} sizes.")
    if ranks < 1:
        raise ValueError(f"cast_pack: ranks must be at least 1, got {ranks}.")
    for k, (part, size) in enumerate(zip(parts, sizes)):
        if size < 0 or part.numel() > ranks * size:
            raise ValueError(
                f"cast_pack: part {k} has {part.numel()} elements, room is for {ranks} times {size}."
            )
    for tensor in (*parts, out):  # an address means nothing on another device
        if tensor.device != parts[0].device:
            raise ValueError(
                f"cast_pack: all must be on one device, got {parts[0].device} and {tensor.device}."
            )
    if not out.is_contiguous() or out.numel() != ranks * sum(sizes):
        raise ValueError(
            f"cast_pack: out must be contiguous and hold {ranks * sum(sizes)} elements."
        )


define(
    "cast_pack(Tensor[] parts, int[] sizes, int ranks, Tensor(a!) out) -> ()",
    _check,
    reference,
    launch,
)
