"""Tables of integers on a device, which tell a kernel where its pieces are.

A launch over many tensors needs their addresses, and the tensor of each block. Both repeat from step to step, so tables
are cached. Tables that depend on sizes alone stay cached forever. Tables of addresses may never repeat if the shapes of
batches keep changing, so only the most recently used ones are cached. Each stream has its own, because memory that a
stream has freed is reused in the order of that stream. Tables of a captured graph stay alive forever.

A captured graph has its own memory, so its addresses are new. The copies that fill their tables must not be captured.
Nor may the tables be in the graph's memory, which is reused within a replay: a kernel that runs before the reader of a
table would overwrite the table. `filled_after_capture` allocates room for these tables before the capture, and fills it
after the capture.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

# The most tuples of addresses with cached tables.
_MOST = 1 << 14
# Integers for the tables of a capture.
_ROOM = 1 << 18
# Tables are aligned to this number of integers, which is 16 bytes.
_ALIGNED = 2
# A table for each stream, by addresses and device.
_by_addresses: OrderedDict[tuple, dict[int, torch.Tensor]] = OrderedDict()
_captured: list[torch.Tensor] = []
# For each capture in progress: its room, and the tables to copy there.
_unfilled: list[tuple[torch.Tensor, list[torch.Tensor]]] = []


def addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64[len(tensors)]: the address of each tensor, on `device`."""
    key = tuple(t.data_ptr() for t in tensors), device
    by_stream = _by_addresses.setdefault(key, {})
    _by_addresses.move_to_end(key)
    if len(_by_addresses) > _MOST:
        _by_addresses.popitem(last=False)

    is_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured:
        # All work launched before the capture is done, so the table of any stream can be used.
        stream = next(iter(by_stream), stream)
    if stream not in by_stream:
        by_stream[stream] = on_device(torch.tensor(key[0], dtype=torch.int64), device, shared=False)
    if is_captured:
        _captured.append(by_stream[stream])
    return by_stream[stream]


@contextlib.contextmanager
def filled_after_capture(device: str | torch.device = "cuda", room: int = _ROOM) -> Iterator[None]:
    """A context for the capture of a CUDA graph. At its end it fills the graph's tables, of at most `room` integers."""
    _unfilled.append((torch.empty(room, dtype=torch.int64, device=device), []))
    try:
        yield
    finally:
        memory, tables = _unfilled.pop()
        if tables:
            flat = torch.cat(tables)
            memory.narrow(0, 0, len(flat)).copy_(flat)


def on_device(rows: torch.Tensor, device: torch.device, shared: bool = True) -> torch.Tensor:
    """`rows` on `device`.

    A `shared` table is for all streams. Any other table is for the current stream, and the host does not wait for its
    copy. During the capture of a CUDA graph, `filled_after_capture` fills the table later; outside of that context, a
    capture is an error.
    """
    if device.type != "cuda":
        return rows.to(device)
    if not torch.cuda.is_current_stream_capturing():
        return rows.to(device) if shared else rows.pin_memory().to(device, non_blocking=True)
    if not _unfilled:
        raise RuntimeError(
            "These tensors are new to a kernel: run the step once on them, then capture it, or capture it in "
            "ztrans.ops.filled_after_capture()."
        )
    memory, tables = _unfilled[-1]
    start = sum(map(len, tables))
    flat = torch.nn.functional.pad(rows.reshape(-1), (0, -rows.numel() % _ALIGNED))
    if start + len(flat) > len(memory):
        raise RuntimeError(
            f"The tables of this capture take more than {len(memory)} integers: run the step once before, or give them "
            f"more, ztrans.ops.filled_after_capture(room=...)."
        )
    tables.append(flat)
    return memory.narrow(0, start, rows.numel()).view(rows.shape)


def blocks(
    pieces: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    block: int,
    advancing: Sequence[int],
    remaining: Sequence[int] = (),
) -> torch.Tensor:
    """int64[blocks, columns]: each piece cut into blocks of `block` elements.

    A piece is a row of integers, and has a length. The columns `advancing` grow by `block` from block to block. The
    columns `remaining` count elements: each block gets the number that is left for it, at most `block`.

    >>> blocks([(7, 0, 5)], [5], 4, advancing=(1,), remaining=(2,))
    tensor([[7, 0, 4],
            [7, 4, 1]])
    """
    rows = []
    for piece, length in zip(pieces, lengths, strict=True):
        start = torch.arange(0, length, block)
        row = torch.tensor(piece, dtype=torch.int64).repeat(len(start), 1)
        for column in advancing:
            row[:, column] += start
        for column in remaining:
            row[:, column] = (row[:, column] - start).clamp(0, block)
        rows.append(row)
    return torch.cat(rows) if rows else torch.empty(0, 0, dtype=torch.int64)
