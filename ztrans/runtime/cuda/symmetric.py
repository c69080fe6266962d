"""Symmetric memory, which all ranks of a host can read, and the choice between it and NCCL.

A message is packed as for NCCL, then copied on its lane to a buffer that the other ranks of the communicator can read.
A kernel reads the messages of all ranks from there, directly into the final tensors. It sums terms of half precision in
fp32 and in rank order. The kernel starts to read when the messages of all ranks are there, and ends when all ranks have
read them, so the next message of the lane may overwrite them.

Copy engines can also copy the messages of each rank from there (see `copies`), and take no multiprocessors from
compute. The terms of a reduction are then summed like terms from NCCL.

So there are three ways: a kernel, copies, and NCCL. All ranks of the mesh choose one together, when a program is bound.
They allocate a buffer, and time a message of each new kind in all ways; the times of the slowest rank count. If all
ways give the same bits, the fastest carries messages of this kind, or copies if they are nearly as fast. If anything
fails on one rank, all ranks use NCCL, and the printed program says why.

The decisions and the buffers belong to the mesh. So all programs send a message of one kind through the same buffer,
and a rank that binds a program alone, for a batch of another size, sends its messages as the other ranks do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ... import ops
from ...ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    buffer_bytes,
    in_bytes,
    wire_format,
)
from ...ir.graph import Eqn
from ...ir.rules import Sizes
from ...ops.kernel import FLOATS
from ...ops.symmetric import (
    BLOCKS,
    BLOCKS_ON_PROCESSOR,
    allocate,
    connect,
    has_native_atomics,
    in_one_process,
)
from ..channels import Channel
from ..collectives import all_gather, message_groups
from .copies import exchange_by_copies, gather_by_copies
from .nccl import all_to_all
from .streams import back_to_back_seconds

T = TypeVar("T")
FromAll = Callable[[Any], list]  # takes the value of this rank, returns the values of all ranks
# Sends the second tensor, and fills the first.
Move = Callable[[torch.Tensor, torch.Tensor], None]

# The ways of a message: two through symmetric memory, and NCCL.
KERNEL = "a kernel"
COPIES = "copies"
NCCL = "NCCL"
# The most bytes of a message for a kernel. For a larger one the wire is the limit either way.
LARGEST_FOR_KERNEL = 32 * 2**20
# The most bytes of a message that is timed: copies and NCCL move a larger one at the same rate. Gathers up to this size
# are copied at once; reductions, whose buffer has a row for each rank, up to LARGEST_FOR_KERNEL.
LARGEST_TIMED = 256 * 2**20
_NEARLY = 1.1  # the most time that copies may take, relative to the fastest way
_TIMES = 20  # the number of messages in a timed series
# How often a kernel looks at a signal, at most, before it stops waiting: an int32. How long that takes is measured.
MOST_SPINS = (1 << 31) - 1
# The share of the time-out after which a kernel stops waiting. The process that watches acts earlier (see `watching`).
_SHARE = 0.95
_TIMED_SPINS = 1 << 16  # some tens of milliseconds
_TRIAL_SPINS = 1 << 20  # about a second: in a trial all ranks send at the same time
# Blocks of a kernel of NCCL, unless the user asks for more. Each may fill a multiprocessor.
_NCCL_BLOCKS = 32


class Times(NamedTuple):
    """Seconds of a message of about `nbytes`, by a kernel through symmetric memory, by NCCL, and by copies.

    The time of a way that cannot carry it is infinite.
    """

    kernel: float
    nccl: float
    nbytes: int
    copies: float = math.inf

    @property
    def is_copied(self) -> bool:
        """Whether copies carry it: they take no multiprocessors, so they may be a little slower."""
        return self.copies <= _NEARLY * min(self.kernel, self.nccl)

    @property
    def uses_symmetric_memory(self) -> bool:
        """Whether symmetric memory carries it, by a kernel or by copies."""
        return self.is_copied or self.kernel < self.nccl


class MessageKind(NamedTuple):
    """A kind of messages. The ranks decide once for each kind.

    Attributes:
        sums: whether ranks exchange terms, and each sums the terms of its part.
        gathers: whether they gather parts: their own, or in an all_reduce the parts that they have summed.
        wire: the dtype of the elements on the wire.
        nbytes: the bytes of the message that is timed: of one message, or of gathers that are copied together, rounded
            up to a power of two, and at most `LARGEST_TIMED`.
        lanes: how many lanes of a program may have a kernel on a device at a time, of symmetric memory or of NCCL.
    """

    sums: bool
    gathers: bool
    wire: torch.dtype
    nbytes: int
    lanes: int = 1

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel can carry them. There is none for the two halves of an all_reduce."""
        return self.nbytes <= LARGEST_FOR_KERNEL and not (self.sums and self.gathers)

    def part(self, ranks: int) -> int:
        """The number of elements that a rank gets from each other rank."""
        return max(self.nbytes // self.wire.itemsize // ranks, 1)

    def rows(self, ranks: int) -> int:
        """The number of parts that a rank sends."""
        return ranks if self.sums else 1

    def room(self, ranks: int) -> int:
        """The bytes of a rank's buffer. Copies of a larger reduction go through it in rounds."""
        sent = self.rows(ranks) * self.part(ranks) * self.wire.itemsize
        return min(sent, LARGEST_FOR_KERNEL) if self.sums else sent


# The collectives that symmetric memory carries: whether ranks sum terms, and whether they gather parts.
_HALVES: Mapping[Any, tuple[bool, bool]] = {
    ALL_GATHER: (False, True),
    REDUCE_SCATTER: (True, False),
    ALL_REDUCE: (True, True),
}


def message_kind(eqn: Eqn, sizes: Sizes, lanes: int) -> MessageKind | str:
    """The kind of the messages of a collective equation, or why symmetric memory cannot carry them."""
    if eqn.op not in _HALVES:
        return f"it carries no {eqn.op}"
    eqn = in_bytes(eqn)
    if wire_format(eqn, eqn.ins[0]).is_coded:
        return "it carries no codes"
    wire = wire_format(eqn, eqn.ins[0]).carrier
    if wire.itemsize > 8:
        return "elements of more than 8 bytes"
    messages = []
    for ks in message_groups(eqn, sizes):
        messages.append(sum(buffer_bytes(eqn, k, sizes) for k in ks))
    sums, gathers = _HALVES[eqn.op]
    nbytes = max(messages) if sums else sum(messages)  # gathers of an equation are copied together
    power_of_two = 1 << max(nbytes - 1, 0).bit_length()
    return MessageKind(sums, gathers, wire, min(power_of_two, LARGEST_TIMED), lanes)


class CudaSource:
    """Symmetric memory of the current CUDA device."""

    def device(self) -> Hashable:
        """The name of this rank's device."""
        return _uuid(torch.cuda.current_device())

    def check_room(self, lanes: int) -> None:
        """Raises: RuntimeError if the kernels of this many lanes may not fit on the device at the same time."""
        # A kernel that waits for another rank keeps its multiprocessors. If two such kernels did not fit, two ranks
        # could wait for each other forever: on each, one kernel would keep out the one that the other rank waits for.
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        processors = device.multi_processor_count
        needed = BLOCKS // BLOCKS_ON_PROCESSOR + (lanes - 1) * _NCCL_BLOCKS
        if needed > processors:
            raise RuntimeError(
                f"{lanes} lanes may need {needed} multiprocessors at once, and the GPU has {processors}"
            )

    def check_links(self, devices: Mapping[int, Hashable]) -> None:
        """Raises: RuntimeError if kernels of this rank cannot signal the devices of other ranks."""
        index_of = {_uuid(index): index for index in range(torch.cuda.device_count())}
        mine = torch.cuda.current_device()
        for rank, device in devices.items():
            if device not in index_of:
                raise RuntimeError(
                    f"CUDA_VISIBLE_DEVICES hides the GPU of rank {rank}; every rank must see all GPUs of its host"
                )
            if not has_native_atomics(mine, index_of[device]):
                raise RuntimeError(
                    f"no NVLink to the GPU of rank {rank}, and PCIe carries no atomic operations"
                )

    def allocate(self, nbytes: int, ranks: int) -> Any:
        """This rank's part of a memory. Called by each rank alone."""
        return allocate(nbytes, ranks)

    def connect(self, part: Any, nbytes: int, group: dist.ProcessGroup) -> ops.Symmetric:
        """The memory whose part on this rank is `part`. All ranks of the group call it together."""
        return connect(part, nbytes, group)


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """Symmetric memory of one channel. A kernel that waits in it looks at a signal at most `spins` times."""

    channel: Channel
    nbytes: int
    memory: ops.Symmetric
    spins: int


class Refused(Exception):
    """Symmetric memory cannot be used. All ranks raise it together, with the same reason."""


class SymmetricMemory:
    """The symmetric memory of a mesh: its buffers, and the ranks' decision for each kind of messages.

    Attributes:
        source: where the memory comes from.
        timeout: the seconds after which a missing rank is lost.
        buffers: all buffers.
        answers: by channel and kind of messages, how long one takes, or why symmetric memory cannot carry it.
        buffer_of: by channel and kind of messages, the buffer that carries them, if symmetric memory is faster.
        lane_refusals: by number of lanes, why the devices have no room for their kernels; empty if they have.
    """

    def __init__(self, source: CudaSource | None = None, timeout: float = math.inf) -> None:
        self.source = source or CudaSource()
        self.timeout = timeout
        self.buffers: list[Buffer] = []
        self.answers: dict[tuple[Channel, MessageKind], Times | str] = {}
        self.buffer_of: dict[tuple[Channel, MessageKind], Buffer] = {}
        self.lane_refusals: dict[int, str] = {}

    def answer(self, channel: Channel, kind: MessageKind) -> Times | str:
        """The ranks' decision for messages of this kind: their times, or why symmetric memory cannot carry them."""
        if channel.group.size() == 1:
            return "one rank"
        return self.answers.get(
            (channel, kind), "not tried, because this rank alone has made the program"
        )

    def reserve(self, messages: Iterable[tuple[Channel, MessageKind]], from_all: FromAll) -> None:
        """Decide for all new kinds of messages. All ranks of the mesh must call this together."""
        new: dict[Channel, list[MessageKind]] = {}
        for channel, kind in dict.fromkeys(messages):
            if channel.group.size() == 1 or (channel, kind) in self.answers:
                continue
            refusal = self._refusal_of_lanes(kind.lanes, from_all)
            if refusal:
                self.answers[channel, kind] = refusal
            else:
                new.setdefault(channel, []).append(kind)
        for channel, kinds in new.items():
            self._decide(channel, kinds, from_all)

    def error(self) -> str:
        """The error of a kernel of this rank that has waited in vain so far; empty if there is none."""
        for buffer in self.buffers:
            try:
                buffer.memory.check()
            except RuntimeError as error:
                return str(error)
        return ""

    def trial(self, buffer: Buffer, kind: MessageKind, from_all: FromAll) -> Times | str:
        """Time a message in all ways, and compare the bits that arrive. All ranks of the mesh call this together.

        Raises: Refused if it fails on one of them.
        """
        group = buffer.channel.group
        trial = on_all_ranks(lambda: _Trial(kind, group, buffer.memory), from_all)
        on_all_ranks(trial.compile, from_all)
        seconds = {KERNEL: math.inf}
        for way in (*trial.received, NCCL):
            seconds[way] = on_all_ranks(functools.partial(trial.seconds_of, way), from_all)
        is_equal = on_all_ranks(trial.gave_equal_bits, from_all)
        by_rank = from_all([is_equal, seconds])
        if not all(is_equal_there for is_equal_there, _ in by_rank):
            return "tried here, it gave other bits"
        # The ranks wait for each other, so the slowest one counts.
        slowest = {way: max(of_rank[way] for _, of_rank in by_rank) for way in seconds}
        return Times(slowest[KERNEL], slowest[NCCL], kind.nbytes, slowest[COPIES])

    def _refusal_of_lanes(self, lanes: int, from_all: FromAll) -> str:
        """Why the devices have no room for the kernels of this many lanes; empty if they have."""
        if lanes not in self.lane_refusals:
            try:
                on_all_ranks(lambda: self.source.check_room(lanes), from_all)
                self.lane_refusals[lanes] = ""
            except Refused as refused:
                self.lane_refusals[lanes] = str(refused)
        return self.lane_refusals[lanes]

    def _decide(self, channel: Channel, kinds: Sequence[MessageKind], from_all: FromAll) -> None:
        """Time messages of these kinds on a channel, and record what carries them."""
        # The trials have a buffer of their own, because a trial that fails leaves signals in it.
        ranks = channel.group.size()
        nbytes = max(kind.room(ranks) for kind in kinds)
        answers: list[Times | str]
        try:
            self._check_links(channel, from_all)
            buffer = self._allocate(channel, nbytes, from_all)
            answers = [self.trial(buffer, kind, from_all) for kind in kinds]
        except Refused as refused:
            answers = [str(refused) for _ in kinds]
        for kind, answer in zip(kinds, answers):
            self.answers[channel, kind] = answer
            if isinstance(answer, Times) and answer.uses_symmetric_memory:
                self.buffer_of[channel, kind] = self._shared(buffer)

    def _shared(self, buffer: Buffer) -> Buffer:
        """An earlier buffer of the same channel that is large enough, or else this one."""
        for shared in self.buffers:
            if shared.channel is buffer.channel and shared.nbytes >= buffer.nbytes:
                return shared
        self.buffers.append(buffer)
        return buffer

    def _check_links(self, channel: Channel, from_all: FromAll) -> None:
        if channel.hosts.count > 1:
            raise Refused(f"ranks on {channel.hosts.count} hosts")
        device_of = dict(from_all((dist.get_rank(), self.source.device())))
        members = dist.get_process_group_ranks(channel.group)
        devices = {rank: device_of[rank] for rank in members}
        on_all_ranks(lambda: self.source.check_links(devices), from_all)

    def _allocate(self, channel: Channel, nbytes: int, from_all: FromAll) -> Buffer:
        group = channel.group
        part = on_all_ranks(lambda: self.source.allocate(nbytes, group.size()), from_all)
        memory = on_all_ranks(lambda: self.source.connect(part, nbytes, group), from_all)
        spins = on_all_ranks(lambda: spins_within(_SHARE * self.timeout, memory), from_all)
        return Buffer(channel, nbytes, memory, spins)


def spins_within(seconds: float, memory: ops.Symmetric) -> int:
    """How often a kernel looks at a signal in `seconds`, as measured on signals that no other rank sees."""
    device = memory.mine.device
    if device.type != "cuda":
        return MOST_SPINS
    ops.barrier(in_one_process(memory.ranks, 0, device)[memory.rank], spins=0)  # compiles it
    begin, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    begin.record()
    ops.barrier(in_one_process(memory.ranks, 0, device)[memory.rank], spins=_TIMED_SPINS)
    end.record()
    end.synchronize()
    return spins_of(seconds, begin.elapsed_time(end) / 1e3)


def spins_of(seconds: float, seconds_of_timed: float) -> int:
    """How often a kernel looks at a signal in `seconds`, if `_TIMED_SPINS` looks take `seconds_of_timed`.

    >>> spins_of(570.0, 0.05) == 570 * 20 * 2**16
    True
    """
    return int(min(seconds / seconds_of_timed * _TIMED_SPINS, MOST_SPINS))


def on_all_ranks(run: Callable[[], T], from_all: FromAll) -> T:
    """Call `run` on all ranks. Returns its result on this rank.

    Raises: Refused on all ranks if it fails on one of them.
    """
    reason = ""
    try:
        result = run()
    except Exception as error:
        text = str(error).partition("\n")[0] or type(error).__name__
        reason = f"rank {dist.get_rank()}: {text}"
    reasons = [x for x in from_all(reason) if x]
    if reasons:
        raise Refused(reasons[0])
    return result


class _Trial:
    """A message of random values, to send by NCCL and in the ways through symmetric memory that can carry its kind.

    `received` holds the tensor that each way through symmetric memory fills, and `by_nccl` the one that NCCL fills.
    """

    def __init__(self, kind: MessageKind, group: dist.ProcessGroup, memory: ops.Symmetric) -> None:
        self.kind = kind
        self.group = group
        self.memory = memory
        ranks = group.size()
        part = kind.part(ranks)
        device = memory.mine.device
        # Its own generator, so that the user's does not change.
        generator = torch.Generator(device).manual_seed(memory.rank)
        numel = kind.rows(ranks) * part
        random_dtype = kind.wire if kind.wire in FLOATS else torch.float32
        terms = torch.randn(numel, generator=generator, device=device, dtype=random_dtype)
        self.send_buffer = terms.to(kind.wire)
        if kind.gathers:
            self.by_nccl = self.send_buffer.new_empty(ranks * part)
        else:
            self.by_nccl = self.send_buffer.new_empty(part, dtype=torch.float32)
        ways = [KERNEL, COPIES] if kind.has_kernel else [COPIES]
        self.received = {way: torch.empty_like(self.by_nccl) for way in ways}
        self.terms = torch.empty_like(self.send_buffer)  # the terms of a reduction that arrive

    def compile(self) -> None:
        """Compile and load the kernels, which may take some ranks longer than others wait in a trial.

        They run on signals that no other rank sees, and stop waiting at once.
        """
        device = self.memory.mine.device
        if device.type == "cuda":
            ranks = self.memory.ranks
            nbytes = ranks * self.kind.wire.itemsize
            if KERNEL in self.received:
                own_memory = in_one_process(ranks, nbytes, device)[self.memory.rank]
                self._send_by_kernel(own_memory, part=1, spins=0)
            if self.kind.sums:
                self._sum(self.by_nccl)
            ops.barrier(in_one_process(ranks, nbytes, device)[self.memory.rank], spins=0)
            torch.cuda.synchronize(device)

    def seconds_of(self, way: str) -> float:
        """The seconds of a message in one of the ways.

        Raises: RuntimeError if this rank has waited for another one in vain.
        """
        if way == KERNEL:
            part = self.kind.part(self.memory.ranks)
            seconds = _seconds(lambda: self._send_by_kernel(self.memory, part, _TRIAL_SPINS))
        elif way == COPIES:
            received = self.received[COPIES]
            seconds = _seconds(
                lambda: self._send(received, self._gather_copies, self._exchange_copies)
            )
        else:
            seconds = _seconds(lambda: self._send(self.by_nccl, self._gather, self._exchange))
        self.memory.check()
        return seconds

    def gave_equal_bits(self) -> bool:
        """Whether all ways have delivered the same bits as NCCL."""
        by_nccl = self.by_nccl.view(torch.uint8)
        return all(torch.equal(x.view(torch.uint8), by_nccl) for x in self.received.values())

    def _send_by_kernel(self, memory: ops.Symmetric, part: int, spins: int) -> None:
        """Send the first `part` elements of each part."""
        send_buffer = self.send_buffer[: self.kind.rows(memory.ranks) * part]
        received = self.received[KERNEL]
        if self.kind.sums:
            scatter(memory, send_buffer, [received[:part]], [part], "mean", spins)
        else:
            gather(memory, send_buffer, [received[: memory.ranks * part]], [part], spins)

    def _send(self, received: torch.Tensor, gather: Move, exchange: Move) -> None:
        """Send a message by a function that gathers parts and one that exchanges rows."""
        part = self.send_buffer
        if self.kind.sums:
            exchange(self.terms, self.send_buffer)
            part = self._sum(received)
        if self.kind.gathers:
            gather(received, part)

    def _sum(self, received: torch.Tensor) -> torch.Tensor:
        """Sum the terms that have arrived into this rank's part of `received`, and return the part."""
        ranks = self.memory.ranks
        part = received
        if self.kind.gathers:
            part = received.view(ranks, -1)[self.memory.rank]
        ops.sum_terms(self.terms.view(ranks, -1), [part], [len(part)], "mean", ranks)
        return part

    def _gather(self, received: torch.Tensor, part: torch.Tensor) -> None:
        all_gather(received.view(torch.uint8), part.view(torch.uint8), group=self.group)

    def _exchange(self, received: torch.Tensor, rows: torch.Tensor) -> None:
        all_to_all(received, rows, self.group)

    def _gather_copies(self, received: torch.Tensor, part: torch.Tensor) -> None:
        gather_by_copies(self.memory, [received], [part], _TRIAL_SPINS)

    def _exchange_copies(self, received: torch.Tensor, rows: torch.Tensor) -> None:
        exchange_by_copies(self.memory, [received], [rows], _TRIAL_SPINS)


def gather(
    memory: ops.Symmetric,
    send_buffer: torch.Tensor,
    outs: list[torch.Tensor],
    sizes: Sequence[int],
    spins: int,
) -> None:
    """Copy this rank's parts to its buffer, and read the parts of all ranks into `outs`."""
    memory.mine[: send_buffer.nbytes].view(send_buffer.dtype).copy_(send_buffer)
    ops.all_gather(memory, outs, sizes, spins=spins)


def scatter(
    memory: ops.Symmetric,
    send_buffer: torch.Tensor,
    outs: list[torch.Tensor],
    sizes: Sequence[int],
    op: str,
    spins: int,
) -> None:
    """Copy this rank's terms to its buffer, and sum the terms of all ranks for this rank into `outs`."""
    memory.mine[: send_buffer.nbytes].view(send_buffer.dtype).copy_(send_buffer)
    ops.reduce_scatter(memory, outs, sizes, op, send_buffer.dtype, spins=spins)


def _seconds(run: Callable[[], object]) -> float:
    """The seconds of one message in a series, back to back: the best of three series."""
    run()  # the first message sets up its connections
    return min(back_to_back_seconds(run, torch.device("cuda"), _TIMES) for _ in range(3))


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
