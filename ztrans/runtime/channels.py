"""Channels: queues of messages between the ranks of a mesh, one for each axis and purpose.

Gathers and reductions have a channel each, so they do not queue behind each other. On GPUs of several hosts,
hierarchical reductions have another one for the first level. In one more the ranks compare their calls (see
`agreement`), one is for saves, and one for weights that leave the state (see `whole_leaves`). Each channel has a
process group of its own, with the time-out and the tuning of the user's group. Only torch's registry owns it, so
`destroy_process_group` ends it together with the mesh's own groups.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..ir.routes import Hosts
from ..ir.source import is_plumbing
from .communicators import backend_of, is_nccl, timeout_of, tuning_of

if TYPE_CHECKING:
    from .collectives import Future
    from .hierarchical import HierarchicalMessage

Axis = str | None  # an axis of the mesh or a joint one; None is the whole mesh
ONE_HOST = Hosts(1)
# What NCCL says when it finds no memory on the GPU of this rank.
_NO_MEMORY = re.compile("out of memory|CUDA [cm]alloc")


class LostRank(RuntimeError):
    """Another rank of the mesh has ended, or has not answered within the time-out. `reason` says why, if it is known.

    A state that the failing step leaves half updated is marked with the reason.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Work(Protocol):
    """An operation in progress."""

    def wait(self) -> object:
        """Return once the operation is done."""


@dataclass(eq=False)
class Channel:
    """A queue of messages between the ranks of one process group.

    Attributes:
        axis: the axis along which the ranks lie.
        purpose: the use of the messages, such as gathers.
        hosts: the hosts of the ranks.
        tags: numbers for the exchanges, equal on all ranks.
        futures: the collectives that were started on it.
        first_levels: the messages whose second level has not begun.
        is_broken: whether this rank has abandoned messages on it that other ranks may have sent.
    """

    axis: Axis
    purpose: str
    hosts: Hosts = ONE_HOST
    tags: Iterator[int] = field(default_factory=itertools.count)
    futures: weakref.WeakSet[Future] = field(default_factory=weakref.WeakSet)
    first_levels: list[HierarchicalMessage] = field(default_factory=list)
    is_broken: bool = False
    _group: weakref.ref[dist.ProcessGroup] | None = None  # None while the channel is closed

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises: RuntimeError if it has been destroyed.
        """
        return alive(self._group)

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def is_gloo(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def live_group(self) -> dist.ProcessGroup | None:
        """The process group, or None if it is closed or has been destroyed."""
        return self._group() if self._group is not None else None

    def exchange(
        self,
        pieces: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        ranks: Sequence[int] | None = None,
        tag: int | None = None,
    ) -> list[dist.Work]:
        """Send `pieces[k]` to rank `ranks[k]`, and receive `into[k]` from it, unless it is this rank.

        By default `ranks` are all ranks of the group. The tensors are contiguous and on the CPU. They are sent and
        received in place, without copies.

        Returns: the receives, then the sends. Wait in this order: when a connection ends, gloo wakes the waits for
            messages that have not begun, but not for messages that are partly sent or received (torch 2.13).
        """
        group = self.group
        if ranks is None:
            ranks = range(group.size())
        if tag is None:
            tag = next(self.tags)
        mine = ranks.index(group.rank())
        # Each rank begins with the next rank, so that no rank gets the messages of all others at once.
        peers = [(mine + step) % len(ranks) for step in range(1, len(ranks))]
        works: list[dist.Work] = []
        try:
            with self.errors():
                for k in peers:
                    works.append(group.recv([into[k]], ranks[k], tag))
                for k in peers:
                    works.append(group.send([pieces[k]], ranks[k], tag))
        except BaseException:
            works.clear()  # the error would keep them, and a message in progress its connection
            raise
        return works

    def send_and_receive(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> list[dist.Work]:
        """Send tensors to other ranks of the group, and receive others, each with a rank and a tag.

        The tensors are contiguous, on any device of the group. Returns: the receives, then the sends.
        """
        operations = []
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for x, rank, tag in messages:
                flat = x.view(-1).view(torch.uint8)
                operations.append(
                    dist.P2POp(operation, flat, group=self.group, tag=tag, group_peer=rank)
                )
        with self.errors():
            return dist.batch_isend_irecv(operations) if operations else []

    def advance(self) -> None:
        """Begin the second level of every message in progress as soon as its first level is done."""
        messages = self.first_levels
        self.first_levels = []
        for message in messages:
            message.advance()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of the connection to other ranks into `LostRank`. Use it only around calls of the backend.

        NCCL and the store raise torch's DistError, and gloo plain RuntimeErrors. Errors of other classes, such as
        torch.OutOfMemoryError, are this rank's own, and so are NCCL's errors about memory of the GPU.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) and _NO_MEMORY.search(str(error)):
                raise torch.OutOfMemoryError(
                    f"ztrans: NCCL finds no memory on the GPU of rank {dist.get_rank()} for {self.purpose} over "
                    f"{self.axis}: {error}\n"
                    f"It takes memory outside of PyTorch's allocator. Leave more to it: lower the limit of the step, "
                    f"zt.Device(reserve=...) or prefetch(memory=...)."
                ) from error
            is_of_gloo = type(error) is RuntimeError and not is_nccl(self.live_group())
            if isinstance(error, dist.DistError) or is_of_gloo:
                raise LostRank(str(error)) from error
            raise

    def make_group(self, rows: list[list[int]], base: dist.ProcessGroup, device_type: str) -> None:
        """Open the channel with a new process group: the row that has this rank. `base` is the mesh's own group."""
        timeout = timeout_of(base)
        # The host waits for comparisons and saves, so these use gloo even on GPUs. A user's group may have a backend
        # for each kind of device, while the group of a channel has one.
        is_of_hosts = self.purpose in ("ranks", "saves")
        backend = "gloo" if is_of_hosts else backend_of(base, device_type)
        options = None if is_of_hosts else tuning_of(base, timeout)
        # If only its members make a group, torch names it by the number of groups that they have made, which may differ
        # between them (pytorch#189073). So all ranks make the groups of all rows, unless the world has ranks outside of
        # this mesh, which do not take part.
        all_take_part = sum(map(len, rows)) == dist.get_world_size()
        mine = next(row for row in rows if dist.get_rank() in row)
        for row in rows if all_take_part else [mine]:
            group = dist.new_group(
                row,
                timeout,
                backend,
                options,
                use_local_synchronization=not all_take_part,
                group_desc=f"ztrans {self.purpose}",
            )
            if row is mine:
                self.open(group)

    def open(self, group: dist.ProcessGroup) -> None:
        """Use this group from now on."""
        self._group = weakref.ref(group)
        # Far more tags than messages in progress at one time.
        self.tags = itertools.cycle(range(1 << 20))
        self.is_broken = False

    def close(self) -> None:
        """End the group and its connections to the other ranks. Groups of NCCL stay, because ending them would wait."""
        for future in list(self.futures):
            future.drop()  # a reference to a message in progress would keep its connection open
        self.first_levels.clear()
        group = self.live_group()
        self._group = None
        if group is not None and not is_nccl(group):
            # It may have been destroyed already.
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):
                dist.destroy_process_group(group)


def release_messages(error: BaseException) -> None:
    """Clear the frames of an error, because a message in progress in one of them keeps its connection open.

    The frames live as long as the error, or longer, until the garbage collector runs. Frames of the user's own code are
    not cleared.
    """
    errors = [error]
    for linked_error in errors:  # the loop appends to the list
        for earlier in (linked_error.__cause__, linked_error.__context__):
            if earlier is not None and not any(earlier is x for x in errors):
                errors.append(earlier)
        for frame, _ in traceback.walk_tb(linked_error.__traceback__):
            if is_plumbing(frame):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()


def alive(reference: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup:
    """The process group that a reference points to.

    Raises: RuntimeError if it has been destroyed.
    """
    group = reference() if reference is not None else None
    if group is None:
        raise destroyed()
    return group


def destroyed() -> RuntimeError:
    return RuntimeError(
        "ztrans: the process group of this step's mesh has been destroyed.\n"
        "Make the mesh and the step again, mesh = zt.make_mesh(...), and shard the state for it."
    )
