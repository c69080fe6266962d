"""Symmetric memory between the GPUs of one host: the buffers, and how fast messages through them are.

A message can go through symmetric memory or by NCCL. Both are timed when a program is bound, once for each kind of
message and power of two of its bytes. Every rank uses the times of the slowest rank, so all ranks choose the same.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ... import ops
from ...ir.collectives import ALL_GATHER
from ...ir.graph import Primitive
from ...ir.printer import format_bytes
from ..collectives import all_gather
from ..process_groups import host_name
from .streams import back_to_back_seconds
from .transport import Times

T = TypeVar("T")
MOST = (
    32 * 2**20
)  # the most bytes of a whole message; for a larger one the wire is the limit either way
_TIMES = 20  # the number of messages in a timed series
# How often a kernel looks at a signal before it gives up. It takes tens of minutes: a rank may write a checkpoint.
_SPINS = 1 << 30


Allocate = Callable[[int, dist.ProcessGroup], ops.Symmetric]


class SymmetricMemory:
    """The symmetric memory of a program: one buffer for each communicator, as large as its largest message.

    `allocate` takes the bytes of a buffer and its group; all ranks of the group call it together.
    """

    def __init__(self, allocate: Allocate = ops.rendezvous) -> None:
        self.allocate = allocate
        self.reserved: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = (
            weakref.WeakKeyDictionary()
        )
        self.buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, ops.Symmetric] = (
            weakref.WeakKeyDictionary()
        )

    def times(
        self, group: dist.ProcessGroup, kind: Primitive, wire: torch.dtype, nbytes: int
    ) -> Times | str:
        """The seconds that a message of `nbytes`, the parts of all ranks together, takes either way.

        All ranks of the group must call it together. If symmetric memory cannot carry the message, it returns why.
        """
        if wire.itemsize > 8:
            return "elements of more than 8 bytes"
        if nbytes > MOST:
            return f"above {format_bytes(MOST)}"
        rounded = 1 << max(nbytes - 1, 0).bit_length()
        refused = _once(group, (self.allocate,), lambda: refusal(group, self.allocate))
        if refused:
            return refused
        key = (self.allocate, kind, wire, rounded)
        return _once(group, key, lambda: _times(group, self.allocate, kind, wire, rounded))

    def reserve(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Make the buffer of a communicator at least this large. Call it before the first message is sent."""
        self.reserved[group] = max(nbytes, self.reserved.get(group, 0))

    def buffer(self, group: dist.ProcessGroup) -> ops.Symmetric:
        """The buffer of a communicator. All of its ranks allocate it together, when they send the first message."""
        if group not in self.buffers:
            self.buffers[group] = self.allocate(self.reserved[group], group)
        return self.buffers[group]

    def check(self) -> None:
        """Raises: RuntimeError if this rank has given up waiting for another one, in the work that has run so far."""
        for buffer in self.buffers.values():
            buffer.check()


_answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


def _once(group: dist.ProcessGroup, question: Hashable, ask: Callable[[], T]) -> T:
    """The answer of `ask()` to a question about a group. It is asked once, and kept as long as the group lives."""
    answers = _answers.setdefault(group, {})
    if question not in answers:
        answers[question] = ask()
    return answers[question]


def refusal(group: dist.ProcessGroup, allocate: Allocate) -> str:
    """Why the ranks of a group cannot read each other's memory; empty if they can."""
    if group.size() == 1:
        return "one rank"
    hosts = len(set(_from_all(host_name(), group)))
    if hosts > 1:
        return f"ranks on {hosts} hosts"
    try:
        allocate(0, group)
        reason = ""
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    return next(filter(None, _from_all(reason, group)), "")


def _times(
    group: dist.ProcessGroup, allocate: Allocate, kind: Primitive, wire: torch.dtype, nbytes: int
) -> Times | str:
    """Time a message both ways, and compare the bits that arrive."""
    n = group.size()
    count = max(nbytes // wire.itemsize // n, 1)  # elements of one rank's part
    memory = allocate(n * count * wire.itemsize, group)
    new = functools.partial(torch.empty, device=memory.mine.device)
    if kind is ALL_GATHER:
        sent, ours, theirs = (
            new(count, dtype=wire),
            new(n * count, dtype=wire),
            new(n * count, dtype=wire),
        )
        by_symmetric_memory = lambda: gather(memory, sent, [ours], [count])

        def by_nccl() -> None:
            all_gather(theirs.view(torch.uint8), sent.view(torch.uint8), group=group)
    else:
        sent = new(n * count, dtype=wire)
        ours, theirs = new(count, dtype=torch.float32), new(count, dtype=torch.float32)
        terms = torch.empty_like(sent)
        by_symmetric_memory = lambda: scatter(memory, sent, [ours], [count], "mean")

        def by_nccl() -> None:
            dist.all_to_all_single(terms.view(torch.uint8), sent.view(torch.uint8), group=group)
            theirs.copy_(ops.reduce(list(terms.view(n, count)), "mean", torch.float32))

    generator = torch.Generator().manual_seed(
        group.rank()
    )  # one of its own, so the user's generator does not change
    sent.copy_(torch.randn(sent.shape, generator=generator))
    seconds = [_seconds(by_symmetric_memory), _seconds(by_nccl)]
    if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        seconds[0] = math.inf
    symmetric, nccl = map(max, zip(*_from_all(seconds, group)))
    return (
        Times(symmetric, nccl, nbytes) if symmetric < math.inf else "tried here, it gave other bits"
    )


def gather(
    memory: ops.Symmetric, sent: torch.Tensor, outs: list[torch.Tensor], sizes: Sequence[int]
) -> None:
    """Copy this rank's parts to where the other ranks read them, and read the parts of all ranks into `outs`."""
    memory.mine[: sent.nbytes].view(sent.dtype).copy_(sent)
    ops.all_gather(memory, outs, sizes, spins=_SPINS)


def scatter(
    memory: ops.Symmetric,
    sent: torch.Tensor,
    outs: list[torch.Tensor],
    sizes: Sequence[int],
    op: str,
) -> None:
    """Copy this rank's terms to where the other ranks read them, and sum the terms for this rank into `outs`."""
    memory.mine[: sent.nbytes].view(sent.dtype).copy_(sent)
    ops.reduce_scatter(memory, outs, sizes, op, sent.dtype, spins=_SPINS)


def _seconds(run: Callable[[], object]) -> float:
    """Time one message out of a back-to-back series; return the best of three series."""
    run()  # the first message sets up its connections and compiles its kernels
    return min(back_to_back_seconds(run, torch.device("cuda"), _TIMES) for _ in range(3))


def _from_all(mine: T, group: dist.ProcessGroup) -> list[T]:
    """The values that all ranks of a group pass, in rank order."""
    values = [mine] * group.size()
    dist.all_gather_object(values, mine, group=group)
    return values
