"""Gathers and exchanges of terms through symmetric memory, which copy engines carry.

Each rank writes pieces of its messages to its buffer. After a barrier, the other ranks copy their bytes from there.
After another barrier, the next pieces may overwrite them. No kernel runs except the two barriers. All ranks cut
messages of any size in the same way: as many pieces as fit into the buffer are copied at once.

    gather      a rank writes its part, and copies the parts of all others
    exchange    a rank writes a row for each other rank, and copies the rows that the others have written for it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ... import ops
from .nccl import rounds


class Piece(NamedTuple):
    """One piece of a message.

    Attributes:
        outgoing: the bytes that this rank writes to its buffer. The other ranks write as many to the same place.
        reads: the ranks whose bytes this rank copies from there, each with the tensor to fill.
    """

    outgoing: torch.Tensor
    reads: Sequence[tuple[int, torch.Tensor]]


def gather_by_copies(
    memory: ops.Symmetric,
    received: Sequence[torch.Tensor],
    send_buffers: Sequence[torch.Tensor],
    spins: int,
) -> None:
    """Copy the parts of all ranks into the rows of `received`, one for each rank. This rank's part may be there."""
    pieces = []
    for into, send_buffer in zip(received, send_buffers):
        part = _as_bytes(send_buffer)
        rows = _as_bytes(into).view(memory.ranks, -1)
        if rows[memory.rank].data_ptr() != part.data_ptr():
            rows[memory.rank].copy_(part)
        peers = list(_peers(memory))
        for cut in _cuts(len(part), memory):
            pieces.append(Piece(part[cut], [(source, rows[source, cut]) for source, _ in peers]))
    _copy(memory, pieces, spins)


def exchange_by_copies(
    memory: ops.Symmetric,
    received: Sequence[torch.Tensor],
    send_buffers: Sequence[torch.Tensor],
    spins: int,
) -> None:
    """Copy each rank's row for this rank into its row of `received`. A send buffer has a row for each rank."""
    pieces = []
    for into, send_buffer in zip(received, send_buffers):
        outgoing, incoming = (_as_bytes(x).view(memory.ranks, -1) for x in (send_buffer, into))
        incoming[memory.rank].copy_(outgoing[memory.rank])
        for source, target in _peers(memory):
            for cut in _cuts(outgoing.shape[1], memory):
                pieces.append(Piece(outgoing[target, cut], [(source, incoming[source, cut])]))
    _copy(memory, pieces, spins)


def _copy(memory: ops.Symmetric, pieces: Sequence[Piece], spins: int) -> None:
    """Copy as many pieces at once as fit into the buffer, between two barriers."""
    for batch in rounds([len(piece.outgoing) for piece in pieces], len(memory.mine)):
        spans = []
        start = 0
        for piece in pieces[batch]:
            span = slice(start, start + len(piece.outgoing))
            memory.mine[span].copy_(piece.outgoing)
            spans.append(span)
            start = span.stop
        ops.barrier(memory, spins=spins)
        for piece, span in zip(pieces[batch], spans):
            for source, into in piece.reads:
                into.copy_(memory.parts[source][span])
        ops.barrier(memory, spins=spins)


def _peers(memory: ops.Symmetric) -> Iterator[tuple[int, int]]:
    """The rank that this rank copies from in each step, and the rank that copies from this one.

    In each step, every rank copies from a different one.
    """
    for step in range(1, memory.ranks):
        yield (memory.rank + step) % memory.ranks, (memory.rank - step) % memory.ranks


def _cuts(nbytes: int, memory: ops.Symmetric) -> list[slice]:
    """The slices of a message of `nbytes` bytes that fit into the buffer, each by itself."""
    room = len(memory.mine)
    return [slice(start, min(start + room, nbytes)) for start in range(0, nbytes, room)]


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
