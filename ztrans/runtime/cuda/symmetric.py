"""Symmetric memory: collectives whose messages the other ranks of a host read out of this rank's memory.

A message is packed as for NCCL, then copied on its lane to the symmetric memory of the communicator. A kernel reads the
messages of all ranks from there, directly into the final tensors. It sums terms of half precision in fp32 and in rank
order. The kernel starts to read when the messages of all ranks are there, and ends when all ranks have read them, so
the next message of the lane may overwrite them.

A message can go through symmetric memory or by NCCL. Both are timed when a program is bound, once for each kind of
message and power of two of its bytes, and the faster one carries it if both give the same bits. Every rank uses the
times of the slowest rank, so all ranks choose the same.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ... import ops
from ...ir.collectives import ALL_GATHER, HALF, REDUCE_SCATTER, buffer_bytes, wire_dtype
from ...ir.graph import Eqn, Primitive
from ...ir.printer import format_bytes, format_seconds
from ...ir.routes import TWO_LEVELS, Route, route_of
from ...ops.kernel import FLOATS
from ..collectives import Start, all_gather
from ..process_groups import Channel, host_name
from .nccl import BY_HOST, EXCHANGE, Message, StreamedStart, Transport, moved_back
from .streams import Streams, back_to_back_seconds

T = TypeVar("T")
Allocate = Callable[[int, dist.ProcessGroup], ops.Symmetric]

MOST = 32 * 2**20  # bytes of a whole message; for a larger one the wire is the limit either way
_TIMES = 20  # the number of messages in a timed series
# How often a kernel looks at a signal before it gives up. It takes tens of minutes: a rank may write a checkpoint.
_SPINS = 1 << 30

_answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


def side_streams(device: str) -> Streams | None:
    """Streams in addition to the compute stream if the devices are CUDA devices, or None."""
    return Streams(symmetric=SymmetricMemory()) if device == "cuda" else None


def start(
    eqn: Eqn,
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
    channel: Channel | None,
    streams: Streams | None,
) -> Start:
    """The module that starts a collective equation, on `streams` if there are any."""
    if streams is None or channel is None:
        return Start(eqn, sizes, coordinates, channel)
    symmetric = streams.symmetric
    kind: Any = eqn.op
    wire = wire_dtype(eqn, eqn.ins[0])

    def times() -> Times | str:
        if symmetric is None:
            return "none was given"
        nbytes = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
        return symmetric.times(channel.group, kind, wire, nbytes)

    route = route_of(eqn, sizes, channel.hosts, gloo=False)
    carrier = transport(kind, eqn.kwargs.get("op"), wire, times, route)
    if symmetric is not None and carrier.call.startswith("symmetric"):
        return SymmetricStart(symmetric, eqn, sizes, coordinates, channel, streams, carrier)
    return StreamedStart(eqn, sizes, coordinates, channel, streams, carrier)


def check(program: torch.nn.Module) -> None:
    """Raises: RuntimeError if this rank has given up waiting for another one, in the part that has run so far."""
    starts = [module for module in program.modules() if isinstance(module, SymmetricStart)]
    for symmetric in {id(each.symmetric): each.symmetric for each in starts}.values():
        symmetric.check()


class Times(NamedTuple):
    """Seconds of a message of about `nbytes`, through symmetric memory and by NCCL."""

    symmetric: float
    nccl: float
    nbytes: int


def transport(
    kind: Primitive,
    op: str | None,
    wire: torch.dtype,
    times: Callable[[], Times | str],
    route: Route | None = None,
) -> Transport:
    """Choose what carries a collective, given its kind, its reduction, its dtype on the wire, and its route.

    `times` is called if both ways give the same bits. It returns the seconds of each, or why symmetric memory cannot be
    used.

    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: Times(12e-6, 21e-6, 2**20)))
    symmetric all_gather (moves bytes; 12.00 us for 1.00 MiB, NCCL 21.00 us)
    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: "ranks on 2 hosts"))
    nccl all_gather (moves bytes; no symmetric memory: ranks on 2 hosts)
    """
    is_half = kind is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF
    if not is_half and kind is not ALL_GATHER:
        dtype = str(wire).removeprefix("torch.")
        return Transport(f"nccl {kind.name}", f"reduces {dtype} on the way")
    if route is not None and route.way == TWO_LEVELS:
        work = "sums half precision in fp32 and in the order of hosts"
        return Transport(BY_HOST, f"{work}; {route.reason}")
    work = "sums half precision in fp32 and in rank order" if is_half else "moves bytes"
    nccl_call = EXCHANGE if is_half else f"nccl {kind.name}"
    seconds = times()
    if isinstance(seconds, str):
        return Transport(nccl_call, f"{work}; no symmetric memory: {seconds}")
    size = format_bytes(seconds.nbytes)
    symmetric = format_seconds(seconds.symmetric)
    nccl = format_seconds(seconds.nccl)
    if seconds.symmetric < seconds.nccl:
        return Transport(f"symmetric {kind.name}", f"{work}; {symmetric} for {size}, NCCL {nccl}")
    return Transport(nccl_call, f"{work}; {nccl} for {size}, symmetric memory {symmetric}")


class SymmetricStart(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, over symmetric memory."""

    def __init__(self, symmetric: SymmetricMemory, *common: Any) -> None:
        """`common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.symmetric = symmetric
        rows = 1 if self.kind is ALL_GATHER else self.size
        elements = max(rows * sum(self.parts[k] for k in ks) for ks in self.groups)
        symmetric.reserve(self.group, elements * self.wire.itemsize)

    def _call(self, received: list[torch.Tensor], send_buffer: list[torch.Tensor]) -> None:
        """Do nothing: the kernel that finishes a message also communicates."""

    def _gathered(self, ks: list[int], shards: Sequence[torch.Tensor]) -> Message:
        shapes = [self.shapes[k] for k in ks]
        return self._message(ks, shards, 1, shapes, self.wire, gather)

    def _scattered(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        shapes = [self.part_shape(k) for k in ks]
        read = functools.partial(scatter, op=self.op)
        return self._message(ks, terms, self.size, shapes, self.outs[ks[0]].dtype, read)

    def _message(
        self,
        ks: list[int],
        members: Sequence[torch.Tensor],
        ranks: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        read: Callable[..., None],
    ) -> Message:
        """A message with a row for each of `ranks` ranks.

        `read` takes the symmetric memory, the packed message, the flat tensors that it fills, which become the values,
        and the number of elements that each has for a rank.
        """
        sizes = [self.parts[k] for k in ks]
        rows = [member.movedim(self.dim, 0) for member in members]
        send_buffer = members[0].new_empty(ranks * sum(sizes), dtype=self.wire)
        values = [
            send_buffer.new_empty(moved_back(shape, self.dim), dtype=dtype) for shape in shapes
        ]
        # The kernel returns fp32 or half precision; values of other dtypes are then cast.
        read_dtype = dtype if ranks == 1 or dtype in FLOATS else torch.float32

        def pack() -> None:
            ops.cast_pack(rows, sizes, self.wire, ranks=ranks, out=send_buffer)

        def finish(received: torch.Tensor) -> None:
            memory = self.symmetric.buffer(self.group)
            if self.dim == 0 and read_dtype == dtype:
                read(memory, send_buffer, [value.view(-1) for value in values], sizes)
                return
            flat = [send_buffer.new_empty(math.prod(shape), dtype=read_dtype) for shape in shapes]
            read(memory, send_buffer, flat, sizes)
            for x, value, shape in zip(flat, values, shapes):
                value.copy_(x.view(shape).movedim(0, self.dim))

        return Message(send_buffer, values, pack, lambda: send_buffer, finish)


def gather(
    memory: ops.Symmetric, send_buffer: torch.Tensor, outs: list[torch.Tensor], sizes: Sequence[int]
) -> None:
    """Copy this rank's parts to where the other ranks read them, and read the parts of all ranks into `outs`."""
    memory.mine[: send_buffer.nbytes].view(send_buffer.dtype).copy_(send_buffer)
    ops.all_gather(memory, outs, sizes, spins=_SPINS)


def scatter(
    memory: ops.Symmetric,
    send_buffer: torch.Tensor,
    outs: list[torch.Tensor],
    sizes: Sequence[int],
    op: str,
) -> None:
    """Copy this rank's terms to where the other ranks read them, and sum the terms for this rank into `outs`."""
    memory.mine[: send_buffer.nbytes].view(send_buffer.dtype).copy_(send_buffer)
    ops.reduce_scatter(memory, outs, sizes, op, send_buffer.dtype, spins=_SPINS)


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
        refused = _once(group, (self.allocate,), lambda: _refusal(group, self.allocate))
        if refused:
            return refused
        rounded = 1 << max(nbytes - 1, 0).bit_length()
        key = self.allocate, kind, wire, rounded
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


def _once(group: dist.ProcessGroup, question: Hashable, ask: Callable[[], T]) -> T:
    """The answer of `ask()` to a question about a group. It is asked once, and kept as long as the group lives."""
    answers = _answers.setdefault(group, {})
    if question not in answers:
        answers[question] = ask()
    return answers[question]


def _refusal(group: dist.ProcessGroup, allocate: Allocate) -> str:
    """Why the ranks of a group cannot read each other's memory; empty if they can."""
    if group.size() == 1:
        return "one rank"
    hosts = len(set(_from_all(host_name(), group)))
    if hosts > 1:
        return f"ranks on {hosts} hosts"
    reason = ""
    try:
        allocate(0, group)
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
    generator = torch.Generator().manual_seed(group.rank())  # so the user's does not change
    if kind is ALL_GATHER:
        send_buffer = torch.randn(count, generator=generator).to(memory.mine.device, wire)
        ours, theirs = (send_buffer.new_empty(n * count) for _ in range(2))

        def by_symmetric_memory() -> None:
            gather(memory, send_buffer, [ours], [count])

        def by_nccl() -> None:
            all_gather(theirs.view(torch.uint8), send_buffer.view(torch.uint8), group=group)
    else:
        send_buffer = torch.randn(n * count, generator=generator).to(memory.mine.device, wire)
        ours, theirs = (send_buffer.new_empty(count, dtype=torch.float32) for _ in range(2))
        terms = torch.empty_like(send_buffer)

        def by_symmetric_memory() -> None:
            scatter(memory, send_buffer, [ours], [count], "mean")

        def by_nccl() -> None:
            dist.all_to_all_single(
                terms.view(torch.uint8), send_buffer.view(torch.uint8), group=group
            )
            ops.sum_terms(terms.view(n, count), [theirs], [count], "mean", n)

    seconds = [_seconds(by_symmetric_memory), _seconds(by_nccl)]
    if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        seconds[0] = math.inf
    symmetric, nccl = map(max, zip(*_from_all(seconds, group)))
    if symmetric == math.inf:
        return "tried here, it gave other bits"
    return Times(symmetric, nccl, nbytes)


def _seconds(run: Callable[[], object]) -> float:
    """Time one message out of a back-to-back series; return the best of three series."""
    run()  # the first message sets up its connections and compiles its kernels
    return min(back_to_back_seconds(run, torch.device("cuda"), _TIMES) for _ in range(3))


def _from_all(mine: T, group: dist.ProcessGroup) -> list[T]:
    """The values that all ranks of a group pass, in rank order."""
    values = [mine] * group.size()
    dist.all_gather_object(values, mine, group=group)
    return values
