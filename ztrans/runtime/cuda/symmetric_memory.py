"""symmetric_memory: ranks that can read each other's memory, and whether their messages go that way.

Both ways are timed when a program is bound, once for each kind of message and power of two of its
bytes. Every rank takes the slowest rank's seconds, so all choose alike.
"""

from __future__ import annotations

import functools
import math
import platform
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import ops
from ...ir.collectives import ALL_GATHER
from ...ir.graph import Primitive
from ...ir.printer import format_bytes
from ..collectives import all_gather
from .streams import in_a_row
from .transport import Times

MOST = 32 * 2**20  # bytes of a whole message: a larger one takes what the wire takes, whichever way it goes
_TIMES = 20  # messages in a row
_SPINS = 1 << 30  # looks at a signal: tens of minutes, for a rank may be writing a checkpoint


Make = Callable[[int, dist.ProcessGroup], ops.Symmetric]


class Near:
    """The symmetric memory of a program: one for each communicator, as large as its largest message.

    `make` makes one, given its bytes and the group.
    """

    def __init__(self, make: Make = ops.rendezvous) -> None:
        self.make = make
        self.room: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self.made: weakref.WeakKeyDictionary[dist.ProcessGroup, ops.Symmetric] = weakref.WeakKeyDictionary()

    def times(self, group: dist.ProcessGroup, kind: Primitive, wire: torch.dtype, nbytes: int) -> Times | str:
        """What a message of `nbytes`, whole, takes either way; or why it cannot go through symmetric memory.

        All ranks of the group must ask.
        """
        if wire.itemsize > 8:
            return "elements of more than 8 bytes"
        if nbytes > MOST:
            return f"above {format_bytes(MOST)}"
        rounded = 1 << max(nbytes - 1, 0).bit_length()
        refused = _once(group, (self.make,), lambda: refusal(group, self.make))
        return refused or _once(
            group, (self.make, kind, wire, rounded), lambda: _times(group, self.make, kind, wire, rounded)
        )

    def reserve(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Some message will need this much."""
        self.room[group] = max(nbytes, self.room.get(group, 0))

    def memory(self, group: dist.ProcessGroup) -> ops.Symmetric:
        """The memory of a communicator: made by all its ranks when the first message goes."""
        if group not in self.made:
            self.made[group] = self.make(self.room[group], group)
        return self.made[group]

    def check(self) -> None:
        """Raises: RuntimeError if a rank has waited in vain for another, in what has run so far."""
        for memory in self.made.values():
            memory.check()


_answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def _once(group: dist.ProcessGroup, question: Hashable, ask: Callable[[], Any]) -> Any:
    """The answer to a question about a group, asked once in the life of the group."""
    answers = _answers.setdefault(group, {})
    if question not in answers:
        answers[question] = ask()
    return answers[question]


def refusal(group: dist.ProcessGroup, make: Make) -> str:
    """Why the ranks of a group cannot read each other's memory; empty if they can."""
    if group.size() == 1:
        return "one rank"
    boot = Path("/proc/sys/kernel/random/boot_id")
    hosts = len(set(_of_all(group, (platform.node(), boot.read_text() if boot.exists() else ""))))
    if hosts > 1:
        return f"ranks on {hosts} hosts"
    try:
        make(0, group)
        said = ""
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    return next(filter(None, _of_all(group, said)), "")


def _times(group: dist.ProcessGroup, make: Make, kind: Primitive, wire: torch.dtype, nbytes: int) -> Times | str:
    n = group.size()
    count = max(nbytes // wire.itemsize // n, 1)  # of one rank's part
    memory = make(n * count * wire.itemsize, group)
    new = functools.partial(torch.empty, device=memory.mine.device)
    if kind is ALL_GATHER:
        sent, (mine, theirs) = new(count, dtype=wire), (new(n * count, dtype=wire) for _ in range(2))
        ways = (
            lambda: gather(memory, sent, [mine], [count]),
            lambda: all_gather(theirs.view(torch.uint8), sent.view(torch.uint8), group=group),
        )
    else:
        sent, (mine, theirs) = new(n * count, dtype=wire), (new(count, dtype=torch.float32) for _ in range(2))
        terms = torch.empty_like(sent)

        def by_nccl() -> None:
            dist.all_to_all_single(terms.view(torch.uint8), sent.view(torch.uint8), group=group)
            theirs.copy_(ops.reduce(list(terms.view(n, count)), "mean", torch.float32))

        ways = (lambda: scatter(memory, sent, [mine], [count], "mean"), by_nccl)
    own = torch.Generator().manual_seed(group.rank())  # and not the one that the user draws from
    sent.copy_(torch.randn(sent.shape, generator=own))
    seconds = [_seconds(way) for way in ways]
    if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
        seconds[0] = math.inf
    symmetric, nccl = map(max, zip(*_of_all(group, seconds)))
    return Times(symmetric, nccl, nbytes) if symmetric < math.inf else "tried here, it gave other bits"


def gather(memory: ops.Symmetric, sent: torch.Tensor, outs: list[torch.Tensor], sizes: list[int]) -> None:
    """Put this rank's parts where the others read them, and read theirs."""
    memory.mine[: sent.nbytes].view(sent.dtype).copy_(sent)
    ops.all_gather(memory, outs, sizes, spins=_SPINS)


def scatter(memory: ops.Symmetric, sent: torch.Tensor, outs: list[torch.Tensor], sizes: list[int], op: str) -> None:
    """Put this rank's terms where the others read them, and sum those that are for this rank."""
    memory.mine[: sent.nbytes].view(sent.dtype).copy_(sent)
    ops.reduce_scatter(memory, outs, sizes, op, sent.dtype, spins=_SPINS)


def _seconds(run: Callable[[], object]) -> float:
    """Of one of many in a row, the best of three."""
    run()  # brings all up
    return min(in_a_row(run, torch.device("cuda"), _TIMES) for _ in range(3))


def _of_all(group: dist.ProcessGroup, mine: Any) -> list:
    every: list = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    return every
