"""The collectives of one rank, asynchronous, over torch.distributed.

A started collective is a `Future`; `wait` gives its value. Gathers and scatters move bytes: a
reduce_scatter on gloo is an all-to-all and a local sum in rank order, which sends half of what
gloo's own (an all-reduce and a slice) does and gives every program order the same bits.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import ops
from .collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, without
from .graph import Eqn, Split, Var
from .layout import chunk, local_shape, part
from .redistribute import on_axis


def all_gather(received: torch.Tensor, send: torch.Tensor, **options: Any) -> Any:
    """Gather one buffer of each rank, under the name that this torch has for it (2.13 renamed it)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, send, **options)


def communicator(group: dist.ProcessGroup, gathers: bool) -> dist.ProcessGroup:
    """The communicator of a mesh axis for gathers, or for reductions: two, so that neither queues behind the other."""
    return group if gathers else _second(group)


@functools.cache
def _second(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, use_local_synchronization=True, group_desc="ztrans reductions")


@dataclass(eq=False)
class Future:
    """A value under way: `work` says when it has come, `finish` makes it from what came."""

    work: Any
    finish: Callable[[], list[torch.Tensor]]
    values: list[torch.Tensor] | None = None

    def value(self, member: int) -> torch.Tensor:
        """Wait, and give the value of one member of the bucket."""
        if self.values is None:
            self.work.wait()
            self.values = self.finish()
            self.work = self.finish = None  # and with them the send and receive buffers
        return self.values[member]


class Member(tuple):
    """One member's place in its bucket: (future, index)."""


def wait(member: Member) -> torch.Tensor:
    """The value of a future."""
    return member[0].value(member[1])


@functools.cache
def _end_gently() -> None:
    """When the process ends, let gloo's threads let go of what they sent before the interpreter does:
    a tensor that they free later than that aborts the process (pytorch#190489)."""
    atexit.register(time.sleep, 0.1)


class Start(torch.nn.Module):
    """Starts one collective equation: called with its members, returns a future of each."""

    def __init__(self, eqn: Eqn, sizes: Mapping[str, int], at: Mapping[str, int], group: dist.ProcessGroup) -> None:
        super().__init__()
        _end_gently()
        axis = eqn.kwargs["axis"]
        self.kind, self.op = eqn.op.name, eqn.kwargs.get("op")
        self.size, self.rank, self.group = sizes[axis], at[axis], group
        self.outs: Sequence[Var] = eqn.outs
        splits = (on_axis(v.layout, axis) for v in (*eqn.ins, *eqn.outs))
        self.split = next((s for s in splits if isinstance(s, Split)), Split(axis, 0))
        self.wire = eqn.kwargs.get("dtype") or eqn.ins[0].dtype
        self.start = {ALL_GATHER: self._gather, REDUCE_SCATTER: self._scatter, ALL_REDUCE: self._reduce}[eqn.op]
        # Shapes, whole over this axis, with the split dim first; and the padded elements of one rank's part.
        whole = [dataclasses.replace(v, layout=without(v.layout, axis)) for v in self.outs]
        self.shapes = [_first(local_shape(v, sizes, at), self.split.dim) for v in whole]
        self.parts = [chunk(s[0], self.size) * math.prod(s[1:]) if s else 1 for s in self.shapes]

    def extra_repr(self) -> str:
        return f"{self.kind}, ranks={self.size}, members={len(self.outs)}, wire={self.wire}"

    def forward(self, *members: torch.Tensor) -> tuple[Member, ...]:
        future = self.start(members)
        return tuple(Member((future, i)) for i in range(len(members)))

    def _gather(self, shards: Sequence[torch.Tensor]) -> Future:
        dim = self.split.dim
        send = ops.pack([s.movedim(dim, 0) for s in shards], self.parts, self.wire)
        received = send.new_empty(send.numel() * self.size)
        work = all_gather(_bytes(received), _bytes(send), group=self.group, async_op=True)

        def finish() -> list[torch.Tensor]:
            whole = ops.unpack(received, self.parts, self.shapes, self.size)
            # A value cut along another dim arrives with that dim first; its strides must be those of the trace.
            return [w if dim == 0 else w.movedim(0, dim).contiguous() for w in whole]

        return Future(_Holding(work, send), finish)

    def _scatter(self, terms: Sequence[torch.Tensor]) -> Future:
        dim, n = self.split.dim, self.size
        rows = [t.movedim(dim, 0) for t in terms]
        send = torch.cat([self._by_rank(t, p) for t, p in zip(rows, self.parts)], 1) if len(rows) > 1 else None
        send = send if send is not None else self._by_rank(rows[0], self.parts[0])
        received = torch.empty_like(send)
        work = dist.all_to_all_single(_bytes(received), _bytes(send), group=self.group, async_op=True)

        def finish() -> list[torch.Tensor]:
            values, offset = [], 0
            for out, shape, size in zip(self.outs, self.shapes, self.parts):
                mine = (part(shape[0], n, self.rank)[1], *shape[1:])
                pieces = [received[r, offset : offset + math.prod(mine)] for r in range(n)]
                value = ops.reduce(pieces, self.op, out.dtype).view(mine)
                values.append(value if dim == 0 else value.movedim(0, dim).contiguous())
                offset += size
            return values

        return Future(_Holding(work, send), finish)

    def _by_rank(self, term: torch.Tensor, size: int) -> torch.Tensor:
        """A whole term as one row per rank, zero-padded."""
        term = term.to(self.wire).contiguous()
        if term.numel() == self.size * size:
            return term.view(self.size, size)
        padded = term.new_zeros(self.size * size)
        padded[: term.numel()] = term.view(-1)
        return padded.view(self.size, size)

    def _reduce(self, terms: Sequence[torch.Tensor]) -> Future:
        kinds = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        buffer = torch.cat([t.to(self.wire).reshape(-1) for t in terms])  # the sum is made in place
        work = dist.all_reduce(buffer, kinds.get(self.op, dist.ReduceOp.SUM), group=self.group, async_op=True)

        def finish() -> list[torch.Tensor]:
            if self.op == "mean":
                buffer.div_(self.size)
            pieces = buffer.split([math.prod(s) for s in self.shapes])
            return [p.to(out.dtype).view(s) for p, out, s in zip(pieces, self.outs, self.shapes)]

        return Future(work, finish)


@dataclass(eq=False)
class _Holding:
    """Work with the buffer that it sends, which must live until it is done."""

    work: Any
    send: torch.Tensor

    def wait(self) -> None:
        self.work.wait()


def _first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else ()


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    # Moving needs no arithmetic; as bytes, every dtype crosses on every backend.
    return buffer.view(-1).view(torch.uint8) if buffer.dtype in (torch.bfloat16, torch.float16) else buffer.view(-1)
