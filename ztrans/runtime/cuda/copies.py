"""Messages through symmetric memory that copy engines carry: gathers, and the exchange of the terms of a reduction.

Each rank writes pieces of its messages to its buffer. After a barrier, the other ranks copy their bytes from there.
After another barrier, the next pieces may overwrite these. Apart from the two barriers no kernel runs. All ranks cut
messages of any size alike: as many pieces as the buffer has room for are copied at once.

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
    """Bytes that this rank writes to its buffer. The other ranks write as many to the same place.

    `reads` has the ranks whose bytes this rank copies from there, and where it puts them.
    """

    sent: torch.Tensor
    reads: Sequence[tuple[int, torch.Tensor]]


def gather_by_copies(
    memory: ops.Symmetric,
    received: Sequence[torch.Tensor],
    send_buffers: Sequence[torch.Tensor],
    spins: int,
) -> None:
    """Copy the parts of all ranks into `received`, which has a row for each rank. This rank's part may be there."""
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
    """Copy what each rank has for this one into its row of `received`. A send buffer has a row for each rank."""
    pieces = []
    for into, send_buffer in zip(received, send_buffers):
        outgoing, incoming = (_as_bytes(x).view(memory.ranks, -1) for x in (send_buffer, into))
        incoming[memory.rank].copy_(outgoing[memory.rank])
        for source, target in _peers(memory):
            for cut in _cuts(outgoing.shape[1], memory):
                pieces.append(Piece(outgoing[target, cut], [(source, incoming[source, cut])]))
    _copy(memory, pieces, spins)


def _copy(memory: ops.Symmetric, pieces: Sequence[Piece], spins: int) -> None:
    """Copy as many pieces at once as the buffer has room for, between two barriers."""
    for at_once in rounds([len(piece.sent) for piece in pieces], len(memory.mine)):
        spans = []
        start = 0
        for piece in pieces[at_once]:
            span = slice(start, start + len(piece.sent))
            memory.mine[span].copy_(piece.sent)
            spans.append(span)
            start = span.stop
        ops.barrier(memory, spins=spins)
        for piece, span in zip(pieces[at_once], spans):
            for source, into in piece.reads:
                into.copy_(memory.parts[source][span])
        ops.barrier(memory, spins=spins)


def _peers(memory: ops.Symmetric) -> Iterator[tuple[int, int]]:
    """For each step, the rank from which this rank copies, and the rank that copies from this one.

    In each step every rank copies from another one.
    """
    for step in range(1, memory.ranks):
        yield (memory.rank + step) % memory.ranks, (memory.rank - step) % memory.ranks


def _cuts(nbytes: int, memory: ops.Symmetric) -> list[slice]:
    """Slices of a message of so many bytes, each of which fits into the buffer."""
    room = len(memory.mine)
    return [slice(start, min(start + room, nbytes)) for start in range(0, nbytes, room)]


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
