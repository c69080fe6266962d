"""Start collectives on a GPU through symmetric memory: by copies, or by a kernel that reads all ranks' messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import ops
from ...ops.kernel import FLOATS
from .copies import exchange_by_copies, gather_by_copies
from .nccl import StreamedStart
from .packed_message import PackedMessage, fill_values, moved_back
from .symmetric import Buffer, gather, scatter


class _BufferedStart(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, through a buffer of symmetric memory."""

    def __init__(self, buffer: Buffer, *common: Any) -> None:
        """`common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.buffer = buffer


class CopiedStart(_BufferedStart):
    """Starts one collective equation, whose bytes copy engines copy from the buffers of the other ranks."""

    def _call_gather(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        gather_by_copies(self.buffer.memory, received, send_buffers, self.buffer.spins)

    def _call_exchange(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        exchange_by_copies(self.buffer.memory, received, send_buffers, self.buffer.spins)


class SymmetricStart(_BufferedStart):
    """Starts one collective equation by a kernel that reads the messages of all ranks."""

    def _call(self, received: list[torch.Tensor], send_buffers: list[torch.Tensor]) -> None:
        """Do nothing: the kernel that finishes a message also communicates."""

    def _gather_message(self, ks: list[int], shards: Sequence[torch.Tensor]) -> PackedMessage:
        shapes = [self.shapes[k] for k in ks]
        return self._message(ks, shards, 1, shapes, self.wire, gather)

    def _scatter_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        shapes = [self.part_shape(k) for k in ks]
        read = functools.partial(scatter, op=self.reduction)
        return self._message(ks, terms, self.size, shapes, self.outs[ks[0]].dtype, read)

    def _message(
        self,
        ks: list[int],
        members: Sequence[torch.Tensor],
        ranks: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        read: Callable[..., None],
    ) -> PackedMessage:
        """A message with a row for each of `ranks` ranks.

        `read` takes the symmetric memory, the packed message, the flat tensors that it fills, which become the values,
        and the number of elements of each for one rank.
        """
        sizes = [self.part_sizes[k] for k in ks]
        rows = [member.movedim(self.dim, 0) for member in members]
        send_buffer = members[0].new_empty(ranks * sum(sizes), dtype=self.wire)
        values = [
            send_buffer.new_empty(moved_back(shape, self.dim), dtype=dtype) for shape in shapes
        ]
        # The kernel returns fp32 or half precision; values of other dtypes are then cast.
        read_dtype = dtype if ranks == 1 or dtype in FLOATS else torch.float32

        def pack() -> None:
            ops.cast_pack(rows, sizes, self.wire, ranks=ranks, out=send_buffer)

        def fill(outs: list[torch.Tensor]) -> None:
            read(self.buffer.memory, send_buffer, outs, sizes, spins=self.buffer.spins)

        def finish(received: torch.Tensor) -> None:
            fill_values(fill, read_dtype, self.dim, shapes, values)

        return PackedMessage([send_buffer], values, pack, lambda: send_buffer, finish)
