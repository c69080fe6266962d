"""One message of a collective on a GPU: what is sent, what arrives, and the values that it delivers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PackedMessage:
    """One message of a collective. Its functions launch work on the current stream.

    Attributes:
        send_buffers: the packed members; one buffer, except in a hierarchical message.
        values: the values that the message delivers.
        pack: fills `send_buffers`.
        receive_buffer: returns the tensor that the collective fills, which may be a value or the send buffer.
        finish: fills `values` from that tensor.
        decode: returns the values at the wait, where compute launches the work; None if `values` has them before.
    """

    send_buffers: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    pack: Callable[[], object]
    receive_buffer: Callable[[], torch.Tensor]
    finish: Callable[[torch.Tensor], object]
    decode: Callable[[], Sequence[torch.Tensor]] | None = None


def fill_values(
    fill: Callable[[list[torch.Tensor]], object],
    dtype: torch.dtype,
    dim: int,
    shapes: Sequence[tuple[int, ...]],
    values: Sequence[torch.Tensor],
) -> None:
    """Have `fill` write flat tensors of `dtype`: the values, if they need no transposition and no cast.

    `shapes` have the split dim first, which the values have at position `dim`.
    """
    if dim == 0 and values[0].dtype == dtype:
        fill([value.view(-1) for value in values])
        return
    flat = [values[0].new_empty(math.prod(shape), dtype=dtype) for shape in shapes]
    fill(flat)
    for x, value, shape in zip(flat, values, shapes):
        value.copy_(x.view(shape).movedim(0, dim))


def moved_back(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """A shape whose first dim is moved back to position `dim`."""
    return (*shape[1 : dim + 1], shape[0], *shape[dim + 1 :]) if shape else ()
