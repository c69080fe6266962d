"""Messages of codes on GPUs. One launch encodes all members, and one decodes all values or adds all terms.

A gather moves the codes of all ranks. They are decoded at the wait, so a value takes no memory before. A reduction to
parts exchanges the codes of terms, as half precision; an all_reduce then gathers the codes of the totals. Between hosts
a sum may be sent in another format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from ... import ops
from ...ir.layout import chunk
from ...ir.wire_format import Coded, Format
from ..collectives import Start
from .packed_message import PackedMessage, fill_values, moved_back

# Gathers the parts of all ranks into the first buffer, from this rank's part.
Gather = Callable[[torch.Tensor, torch.Tensor], object]


def gather_message(
    start: Start, ks: Sequence[int], shards: Sequence[torch.Tensor]
) -> PackedMessage:
    """A gather of members of `start`."""
    sizes = [start.part_sizes[k] for k in ks]
    shapes = [start.shapes[k] for k in ks]
    rows = [shard.movedim(start.dim, 0) for shard in shards]
    send_buffer = new_rows(start.format, 1, sizes, shards[0])
    # In the memory of compute, which reads it after the wait.
    received = new_rows(start.format, start.size, sizes, shards[0])

    def decode() -> list[torch.Tensor]:
        values = _new_values(start, ks, shapes, received)
        _decode(start, received, sizes, shapes, values)
        return values

    return PackedMessage(
        send_buffers=[send_buffer.view(-1)],
        values=[],
        pack=lambda: pack(start.format, rows, sizes, 1, send_buffer),
        receive_buffer=lambda: received.view(-1),
        finish=lambda received: None,
        decode=decode,
    )


def scatter_message(
    start: Start, ks: Sequence[int], terms: Sequence[torch.Tensor], arriving: Format, rows: int
) -> PackedMessage:
    """A reduction to parts of members of `start`, of which `rows` terms or sums of hosts arrive."""
    sizes = part_elements(start, ks, False)
    shapes = [start.part_shape(k) for k in ks]
    parts = [term.movedim(start.dim, 0) for term in terms]
    send_buffer = new_rows(start.format, start.size, sizes, terms[0])
    values = _new_values(start, ks, shapes, terms[0])

    def finish(received: torch.Tensor) -> None:
        arrived = received.view(rows, -1)

        def fill(outs: list[torch.Tensor]) -> None:
            sum_rows(arriving, arrived, outs, sizes, start.reduction, start.divisor)

        fill_values(fill, values[0].dtype, start.dim, shapes, values)

    return PackedMessage(
        [send_buffer.view(-1)],
        values,
        lambda: pack(start.format, parts, sizes, start.size, send_buffer),
        lambda: new_rows(arriving, rows, sizes, send_buffer).view(-1),
        finish,
    )


def total_message(
    start: Start,
    ks: Sequence[int],
    terms: Sequence[torch.Tensor],
    arriving: Format,
    rows: int,
    gather: Gather,
) -> PackedMessage:
    """An all_reduce of members of `start`: each rank adds a part of the terms, then all gather the totals."""
    sizes = part_elements(start, ks, True)
    shapes = [start.shapes[k] for k in ks]
    send_buffer = new_rows(start.format, start.size, sizes, terms[0])
    values = _new_values(start, ks, shapes, terms[0])

    def finish(received: torch.Tensor) -> None:
        totals = [terms[0].new_empty(size, dtype=start.format.sum_dtype) for size in sizes]
        sum_rows(arriving, received.view(rows, -1), totals, sizes, start.reduction, start.divisor)
        gathered = new_rows(start.format, start.size, sizes, send_buffer)
        mine = gathered[start.rank : start.rank + 1]
        pack(start.format, totals, sizes, 1, mine)
        gather(gathered.view(-1), mine.view(-1))
        _decode(start, gathered, sizes, shapes, values)

    return PackedMessage(
        [send_buffer.view(-1)],
        values,
        lambda: pack(start.format, terms, sizes, start.size, send_buffer),
        lambda: new_rows(arriving, rows, sizes, send_buffer).view(-1),
        finish,
    )


def part_elements(start: Start, ks: Sequence[int], of_totals: bool) -> list[int]:
    """The elements of each rank's part of members. An all_reduce, `of_totals`, splits no dim, but all elements."""
    if of_totals:
        return [chunk(math.prod(start.shapes[k]), start.size) for k in ks]
    return [start.part_sizes[k] for k in ks]


def new_rows(form: Format, rows: int, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An empty buffer of rows, with parts of so many elements in each."""
    return like.new_empty(rows, row_numel(form, sizes), dtype=form.carrier)


def row_numel(form: Format, sizes: Sequence[int]) -> int:
    """The elements of a row of a buffer."""
    return sum(map(form.nbytes, sizes)) // form.carrier.itemsize


def pack(
    form: Format, parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
) -> None:
    """Encode or cast parts into the rows of a buffer."""
    if isinstance(form, Coded):
        form.pack(parts, sizes, ranks, out)
    else:
        ops.cast_pack(parts, sizes, form.carrier, ranks=ranks, out=out.view(-1))


def sum_rows(
    form: Format,
    rows: torch.Tensor,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    reduction: str,
    divisor: int,
) -> None:
    """Add the rows that have arrived, and divide a mean."""
    if isinstance(form, Coded):
        arguments = form.bits, form.block, form.kind
        ops.sum_coded(rows.unbind(), outs, sizes, reduction, divisor, *arguments)
    else:
        ops.sum_terms(rows, outs, sizes, reduction, divisor)


def _new_values(
    start: Start, ks: Sequence[int], shapes: Sequence[tuple[int, ...]], like: torch.Tensor
) -> list[torch.Tensor]:
    values = []
    for k, shape in zip(ks, shapes):
        values.append(like.new_empty(moved_back(shape, start.dim), dtype=start.outs[k].dtype))
    return values


def _decode(
    start: Start,
    buffer: torch.Tensor,
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> None:
    """Decode the parts of all ranks into the values: one launch, if all have one dtype."""
    form = cast(Coded, start.format)
    arguments = form.bits, form.block, form.kind
    if len({value.dtype for value in values}) == 1:
        members = [(buffer, sizes, shapes, values)]
    else:
        columns = buffer.split([form.nbytes(size) for size in sizes], 1)
        members = [(c, [n], [s], [v]) for c, n, s, v in zip(columns, sizes, shapes, values)]
    for codes, ns, ss, vs in members:

        def fill(outs: list[torch.Tensor], codes=codes, ns=ns) -> None:
            torch.ops.ztrans.decode.default(codes, ns, *arguments, outs)

        fill_values(fill, vs[0].dtype, start.dim, ss, vs)
