"""tables: the integers that a kernel reads to know where its pieces lie, on its device.

A launch over many tensors needs their addresses and, for each block, which tensor it belongs to.
Both repeat from step to step, so each table is made once and kept for good: a captured graph or
another stream may still read one that nobody asks for any more.

A captured graph has memory of its own, so its tables are new; what would fill them must not be
captured. `filled_after_capture` fills them when the capture is over, before anything reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

_unfilled: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each capture under way: tables, and what goes there


def addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64[len(tensors)]: where each tensor lies, on `device`."""
    return _integers(tuple(t.data_ptr() for t in tensors), device)


@functools.cache
def _integers(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor(values, dtype=torch.int64), device)


def check_device(who: str, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless all `tensors` are on `device`: their addresses mean nothing on another."""
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"{who}: all must be on one device, got {device} and {tensor.device}.")


@contextlib.contextmanager
def filled_after_capture() -> Iterator[None]:
    """Around the capture of a CUDA graph: tables that it needs are filled when this ends."""
    _unfilled.append([])
    try:
        yield
    finally:
        for table, rows in _unfilled.pop():
            table.copy_(rows)


def on_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`rows` on `device`; while a CUDA graph is captured they come later, or it is an error."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return rows.to(device)
    if not _unfilled:
        raise RuntimeError(
            "These tensors are new to a kernel: run the step once on them, then capture it, or capture it in "
            "ztrans.ops.filled_after_capture()."
        )
    table = torch.empty_like(rows, device=device)
    _unfilled[-1].append((table, rows))
    return table


def blocks(
    pieces: Sequence[tuple[int, ...]], lengths: Sequence[int], block: int, moving: Sequence[int]
) -> torch.Tensor:
    """int64[blocks, columns]: each piece cut into blocks of `block` elements.

    A piece is a row of integers and has a length. Its columns `moving` grow by `block` from block to
    block; one written as `~column` counts elements and says how many of them are left to the block.

    >>> blocks([(7, 0, 5)], [5], 4, moving=(1, ~2))
    tensor([[7, 0, 4],
            [7, 4, 1]])
    """
    columns = len(pieces[0]) if pieces else 0
    rows = []
    for piece, length in zip(pieces, lengths, strict=True):
        start = torch.arange(0, length, block)
        row = torch.tensor(piece, dtype=torch.int64).repeat(len(start), 1)
        for column in moving:
            if column >= 0:
                row[:, column] += start
            else:
                row[:, ~column] = (row[:, ~column] - start).clamp(0, block)
        rows.append(row)
    return torch.cat(rows) if rows else torch.empty(0, columns, dtype=torch.int64)
