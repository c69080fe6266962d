"""unpack(buffer, sizes, shapes, ranks): split a gathered buffer into whole values: rank-major to value-major order.

    buffer  any dtype[ranks * sum(sizes)], contiguous: row r holds the elements that rank r sent
    sizes   elements of each value's part in a row, padding included
    shapes  the shapes of the whole values, with at most ranks * size elements; other elements are padding
    ->      one contiguous tensor for each value; a value that is contiguous in the buffer is a view of it

Errors: a shape with more elements than the buffer has for it, a buffer of the wrong length. Bytes moved at least: one
read and one write of every element but padding; none for a value gathered alone, or on one rank. One launch copies all
values. It is needed where a gather cannot write its values in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from .move import is_movable, move, parts_of, plan
from .operation import check_like, define


def unpack(
    buffer: torch.Tensor, sizes: Sequence[int], shapes: Sequence[Sequence[int]], ranks: int
) -> list[torch.Tensor]:
    """The whole values of `buffer`. The docstring of this file describes the arguments.

    >>> unpack(torch.arange(6.0), [1, 2], [(2,), (3,)], 2)
    [tensor([0., 3.]), tensor([1., 2., 4.])]
    """
    numels = [math.prod(shape) for shape in shapes]
    if len(sizes) == 1 or ranks == 1:
        _check(buffer, sizes, numels, ranks)
        starts = accumulate(sizes, initial=0)
        flat = [buffer.view(-1)[start : start + n] for start, n in zip(starts, numels)]
    else:
        flat = [buffer.new_empty(n) for n in numels]
        torch.ops.ztrans.unpack.default(buffer, sizes, ranks, flat)
    return [value.view(shape) for value, shape in zip(flat, shapes)]


def reference(
    buffer: torch.Tensor, sizes: Sequence[int], ranks: int, outs: Sequence[torch.Tensor]
) -> None:
    """unpack in plain torch, value by value and rank by rank."""
    parts = buffer.view(ranks, sum(sizes)).split(list(sizes), dim=1)
    for value, size, rows in zip(outs, sizes, parts, strict=True):
        for r, row in enumerate(rows):
            here = value.view(-1)[r * size : (r + 1) * size]
            here.copy_(row[: here.numel()])


def launch(
    buffer: torch.Tensor, sizes: Sequence[int], ranks: int, outs: Sequence[torch.Tensor]
) -> None:
    """unpack by the kernel: one launch."""
    if not is_movable(buffer.dtype, buffer.dtype):
        reference(buffer, sizes, ranks, outs)
        return
    rows = _rows(tuple(sizes), tuple(v.numel() for v in outs), ranks, buffer.device)
    move(rows, [*outs, buffer], buffer.dtype, buffer.dtype)


@functools.cache
def _rows(
    sizes: tuple[int, ...], numels: tuple[int, ...], ranks: int, device: torch.device
) -> torch.Tensor:
    buffer = len(sizes)
    pieces = []
    for k, start, place, count in parts_of(sizes, numels, ranks):
        pieces.append((buffer, place, k, start, count, count))
    return plan(pieces, device)


def _check(buffer: torch.Tensor, sizes: Sequence[int], numels: Sequence[int], ranks: int) -> None:
    if len(sizes) != len(numels):
        raise ValueError(f"unpack: {len(sizes)} sizes, but {len(numels)} values.")
    if not buffer.is_contiguous() or buffer.numel() != ranks * sum(sizes):
        raise ValueError(
            f"unpack: the buffer must be contiguous and hold {ranks} times {sum(sizes)} elements."
        )
    for k, (size, n) in enumerate(zip(sizes, numels)):
        if n > ranks * size:
            raise ValueError(
                f"unpack: value {k} has {n} elements, the buffer {ranks} times {size} for it."
            )


def _check_outs(
    buffer: torch.Tensor, sizes: Sequence[int], ranks: int, outs: Sequence[torch.Tensor]
) -> None:
    _check(buffer, sizes, [v.numel() for v in outs], ranks)
    check_like("unpack", "value", outs, buffer.dtype, buffer.device)


define(
    "unpack(Tensor buffer, int[] sizes, int ranks, Tensor(a!)[] outs) -> ()",
    _check_outs,
    reference,
    launch,
)
