"""The process groups that ztrans makes for a mesh: one for each axis and purpose, in addition to the mesh's own.

Gathers and reductions have a group each, so they do not queue behind each other. On GPUs of several hosts, hierarchical
reductions have another group for the first level. In one more group the ranks compare their calls (see `agreement`).
All groups have the time-out and the tuning of the user's group. Only torch's registry owns them, so
`destroy_process_group` ends them together with the mesh's groups.

When a step fails on one rank, that rank closes its groups: the other ranks lose their connections to it, and stop
waiting at once. On CPUs the next step makes new groups, so its messages cannot meet messages of the failed step that
only some ranks have sent. Checkpoints have a group that failed steps do not close, because a save may run in parallel
to steps. Steps do not use the mesh's own groups, which must stay open. On GPUs all ranks end instead (see `watch`).

`ProcessGroups` holds these groups and everything else that the steps of a mesh share: the lock of the thread that runs
them, the pending answer of a comparison, carried gathers, symmetric memory, the steps in flight, and the store for
notes.

The options of a group are in private attributes of torch; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import groups_along, members
from ..ir.routes import Hosts, common, hosts_of
from .cuda.connect import connect
from .in_flight import InFlight
from .watch import Place, Watcher

if TYPE_CHECKING:
    from .carried import Carried
    from .collectives import Future
    from .cuda.symmetric import SymmetricMemory
    from .hierarchical import HierarchicalMessage

T = TypeVar("T")
ONE_HOST = Hosts(1)

# What NCCL says when it finds no memory on the GPU of this rank.
_NO_MEMORY = re.compile("out of memory|CUDA [cm]alloc")

Axis = str | None  # an axis of the mesh or a joint one; None is the whole mesh


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
        return _alive(self._group)

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
            is_of_gloo = type(error) is RuntimeError and not _is_nccl(self.live_group())
            if isinstance(error, dist.DistError) or is_of_gloo:
                raise LostRank(str(error)) from error
            raise

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
        if group is not None and not _is_nccl(group):
            # It may have been destroyed already.
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):
                dist.destroy_process_group(group)


class ProcessGroups:
    """The state that the steps of one mesh share. Its channels open in the same order on all ranks.

    Attributes:
        ranks: the ranks of the mesh.
        is_alone: whether the mesh has no other real rank: it has one rank, or its other ranks are fake.
        lock: held by the thread that runs a step (see `failure.one_thread`).
        launches_first: whether ranks launch a step before they read the answer of a comparison, as on GPUs.
        pending: the comparison whose answer has not been read yet (see `agreement`); None if there is none.
        sent_records: the sends of the last comparison, kept alive until the next one because nothing waits for them.
        carried: the gathers that the last step has started for the next one (see `carried`).
        saves: the channel of checkpoints, which a failed step does not close; `reopen` opens it.
        symmetric: the symmetric memory of the mesh, if its devices have any.
        epoch: the number of times that closed channels were reopened.
        has_compared_versions: whether the ranks know that they run the same versions.
        stop_requested: whether all ranks know that one of them has been asked to stop.
        in_step: the id of the thread that runs a step on which the ranks have agreed; 0 between steps.
        in_flight: the steps that a GPU runs.
        watcher: on several GPUs, the connection to the process that ends this one if another rank is lost.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self.is_alone = (
            len(self.ranks) == 1 or backend_of(mesh.get_group(0), mesh.device_type) == "fake"
        )
        self.launches_first = mesh.device_type != "cpu"
        self.lock = threading.RLock()
        self.pending: Any = None
        self.sent_records: list[Work] = []
        self.carried: Carried | None = None
        self.saves = Channel(None, "saves")
        self.symmetric: SymmetricMemory | None = None
        self.epoch = 0
        self.in_step = 0
        self.has_compared_versions = False
        self.stop_requested = False
        self.in_flight = InFlight()
        self.watcher: Watcher | None = None
        self._mesh_ranks = mesh.mesh
        self._device_type = mesh.device_type
        self._world = weakref.ref(_world())
        # The mesh keeps its groups alive, so this object holds weak references only.
        self._bases: dict[str, weakref.ref[dist.ProcessGroup]] = {}
        for axis in mesh.mesh_dim_names or ():
            self._bases[axis] = weakref.ref(mesh.get_group(axis))
        self._channels: dict[tuple[Axis, str], Channel] = {}
        if ends_together(mesh.device_type) and not self.is_alone:
            self.watcher = self._watcher()

    def check_exists(self) -> None:
        """Raises: RuntimeError if the process groups of this process have been destroyed."""
        if dist.group.WORLD is not self._world():
            raise _destroyed()

    @property
    def is_closed(self) -> bool:
        """Whether a failed step has closed the channels, and no call has reopened them."""
        return any(channel.is_closed for channel in self._channels.values())

    @property
    def is_open(self) -> bool:
        """Whether this rank is connected to the others: it has channels, and none is closed."""
        return bool(self._channels) and not self.is_closed

    def channel(self, axis: Axis, purpose: str) -> Channel:
        """The channel along a mesh axis for one purpose. All ranks of the mesh must call this together.

        Raises: LostRank if it is new and a rank does not join.
        """
        key = axis, purpose
        if key not in self._channels:
            # Add it first: if it does not open, it counts as closed, and all ranks open the same ones in the next call.
            self._channels[key] = Channel(axis, purpose)
            self._run_uninterrupted(lambda: self._open(self._channels[key]))
        return self._channels[key]

    def open(self) -> None:
        """Reopen the channels that a failure has closed. All ranks must call it, within the time-out.

        Raises: RuntimeError if the process group of the mesh has been destroyed, or if a mesh of GPUs has failed.
        """
        self.check_goes_on()
        closed_channels = []
        for channel in self._channels.values():
            if channel.is_closed:
                closed_channels.append(channel)
            else:
                _alive(channel._group)
        if not closed_channels:
            return
        self.epoch += 1

        def reopen() -> None:
            self._skip_names(len(closed_channels))
            for channel in closed_channels:
                self._open(channel)

        self._run_uninterrupted(reopen)

    def check_goes_on(self) -> None:
        """Raises: RuntimeError if this rank of a mesh of GPUs has failed, because the other ranks are ending."""
        if self.watcher is not None and self.watcher.failure:
            raise RuntimeError(
                f"ztrans: rank {dist.get_rank()} {self.watcher.failure}. On GPUs all ranks end together, so the others "
                f"are ending, and this one runs no more steps.\n"
                f"End this process, and start all of them again from the last checkpoint, as torchrun --max-restarts "
                f"does (docs/launch.md)."
            )

    def reopen(self, channel: Channel) -> None:
        """Close a channel and open it again, without its earlier messages. All ranks must call it, within the time-out.

        Raises: LostRank if a rank does not.
        """

        def reopen() -> None:
            channel.close()
            self._skip_names(1)
            with channel.errors():
                self._open(channel)

        self._run_uninterrupted(reopen)

    def close(self) -> None:
        """Close all channels of steps, so that the other ranks do not wait for this one."""
        self.pending = None
        self.sent_records.clear()
        self.in_step = 0
        if self.carried is not None:
            self.carried.join()
            self.carried = None
        for channel in self._channels.values():
            channel.close()

    def settle(self) -> None:
        """Read the answer about the last step, if it has not been read yet.

        Raises: RuntimeError on every rank if the ranks made different calls; LostRank if a rank has ended.
        """
        pending = self.pending
        self.pending = None
        # If the process groups have been destroyed, no answer arrives.
        if pending is not None and self.channel(None, "ranks").live_group() is not None:
            pending.read(self)

    def drop_carried(self) -> None:
        """Wait for the carried gathers, whose messages still use their buffers, and drop the results."""
        carried = self.carried
        self.carried = None
        if carried is not None:
            carried.wait()

    def forget_carried(self) -> None:
        """Forbid the use of the carried gathers. The next step drops them."""
        if self.carried is not None:
            self.carried = dataclasses.replace(self.carried, leaves=None)

    def from_all(self, value: T) -> list[T]:
        """The values that the ranks of the mesh pass, in its order. All ranks must call it together.

        Raises: LostRank if a rank has ended or does not answer.
        """
        values = [value] * len(self.ranks)
        if not self.is_alone:
            channel = self.channel(None, "ranks")
            with channel.errors():
                dist.all_gather_object(values, value, group=channel.group)
        return values

    def from_first(self, value: T) -> T:
        """The value that the first rank of the mesh passes. All ranks must call it together.

        Raises: LostRank, on the other ranks, if the first one has ended or does not answer.
        """
        values = [value]
        if not self.is_alone:
            channel = self.channel(None, "ranks")
            with channel.errors():
                dist.broadcast_object_list(values, group=channel.group, group_src=0)
        return values[0]

    @property
    def timeout(self) -> float:
        """The seconds after which a rank that does not answer is lost."""
        timeout = _timeout(self._base(next(iter(self._bases))))
        return math.inf if timeout is None else timeout.total_seconds()

    def store(self) -> dist.Store:
        """A key-value store that every rank of the mesh can read and write at any time."""
        return dist.PrefixStore(f"{self._key}/{self.epoch}", self._root_store())

    @functools.cached_property
    def _host_names(self) -> dict[int, tuple[str, ...]]:
        """The host of every rank of the mesh. All ranks must compute it together."""
        return dict(self.from_all((dist.get_rank(), host_name())))

    def error_of_kernels(self) -> str:
        """The error of a kernel of this rank whose wait for another rank has failed; empty if there is none."""
        return self.symmetric.error() if self.symmetric is not None else ""

    @property
    def _key(self) -> str:
        """The prefix of the keys of this mesh. Meshes of the same ranks may share a group and its store."""
        axes = ",".join(self._bases)
        shape = ",".join(map(str, self._mesh_ranks.shape))
        ranks = "-".join(map(str, self.ranks))
        return f"ztrans/{axes}/{shape}/{ranks}"

    def _root_store(self) -> dist.Store:
        return self._base(next(iter(self._bases))).get_group_store()

    def _watcher(self) -> Watcher:
        """Start the process that watches this rank. For one mesh, all ranks must call it equally often.

        Raises: ValueError if no other process can read the store of the mesh.
        """
        store = self._root_store()
        rank = dist.get_rank()
        # The store may still have the keys of an earlier mesh of the same ranks, so each watcher has its own keys.
        times = store.add(f"{self._key}/watched/{rank}", 1)
        place = Place(store, f"{self._key}/{times}", rank, len(self.ranks), self.timeout)
        mesh = weakref.ref(self)

        def before_leaving() -> None:
            groups = mesh()
            # Another rank may be slower, and wait for the messages of these gathers before its last step ends.
            if groups is not None:
                with contextlib.suppress(RuntimeError):  # the groups may have been destroyed
                    groups.drop_carried()

        watcher = Watcher(place, self.in_flight, before_leaving)
        weakref.finalize(self, watcher.forget).atexit = False
        return watcher

    def _base(self, axis: str) -> dist.ProcessGroup:
        """The mesh's own group along an axis, or along the first of a joint axis."""
        return _alive(self._bases[members(axis)[0]])

    def _open(self, channel: Channel) -> None:
        """Open a channel. The first time, a channel along an axis learns the hosts of its ranks.

        Raises: LostRank if a rank does not join.
        """
        axes = tuple(self._bases)
        base = self._base(channel.axis or axes[0])
        groups = groups_along(
            self._mesh_ranks, axes, axes if channel.axis is None else [channel.axis]
        )
        with channel.errors():
            self._make_group(channel, groups, base)
        # A new channel has `ONE_HOST`, which counts a single rank.
        knows_hosts = channel.axis is None or channel.group.size() == channel.hosts.ranks
        if not knows_hosts and not self.is_alone:
            hosts = []
            for row in groups:
                hosts.append(hosts_of([self._host_names[rank] for rank in sorted(row)]))
            channel.hosts = common(hosts)
        if _is_nccl(channel.live_group()) and not self.is_alone:
            with channel.errors():
                # Reductions are hierarchical where hosts have equally many ranks.
                count = channel.hosts.count if channel.hosts.even else 1
                connect(channel.group, channel.purpose, count)

    def _run_uninterrupted(self, run: Callable[[], object]) -> None:
        """Run a function that opens groups. An interrupt that arrives meanwhile is raised afterwards.

        Torch names groups by a count. If an interrupt made only some ranks count a group, the same later group would
        have different names. Signal handlers raise only in the main thread, so the function runs in another one.
        """
        # Each thread has its own current GPU.
        device = None if self._device_type == "cpu" else torch.accelerator.current_device_index()

        def run_on_device() -> None:
            with torch.accelerator.device_index(device):
                run()

        with ThreadPoolExecutor(1, "ztrans-open") as executor:  # its exit waits for the thread
            executor.submit(run_on_device).result()

    def _skip_names(self, count: int) -> None:
        """Use up the names of closed groups, so that torch does not give them to the next groups.

        The store still has the addresses of the closed groups under these names, and a rank could connect to them.
        Torch names groups of a part of the world by a count. So this makes `count` permanent groups of this rank alone.
        """
        if not self._is_world:
            for _ in range(count):
                dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @property
    def _is_world(self) -> bool:
        return len(self.ranks) == dist.get_world_size()

    def _make_group(
        self, channel: Channel, groups: list[list[int]], base: dist.ProcessGroup
    ) -> None:
        """Make a process group for the row of `groups` that has this rank, like the mesh's own group `base`."""
        timeout = _timeout(base)
        # The host waits for messages of the whole mesh, comparisons and saves, so these use gloo even on GPUs. A user's
        # group may have a backend for each kind of device, while the group of a channel has one.
        is_whole = channel.axis is None
        backend = "gloo" if is_whole else backend_of(base, self._device_type)
        options = None if is_whole else _tuning(base, timeout)
        # If only its members make a group, torch names it by the number of groups that they have made, which may differ
        # between them (pytorch#189073). So all ranks make the groups of all rows, unless the world has ranks outside of
        # this mesh, which do not take part.
        mine = next(row for row in groups if dist.get_rank() in row)
        for row in groups if self._is_world else [mine]:
            group = dist.new_group(
                row,
                timeout,
                backend,
                options,
                use_local_synchronization=not self._is_world,
                group_desc=f"ztrans {channel.purpose}",
            )
            if row is mine:
                channel.open(group)


# The first group of a mesh -> the (ranks, axes, sizes) of each mesh with this group -> its process groups.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, ProcessGroups]] = (
    weakref.WeakKeyDictionary()
)


def process_groups(mesh: DeviceMesh) -> ProcessGroups:
    """The process groups of a mesh, which live as long as the mesh's own group.

    Raises: RuntimeError if the mesh's own group has been destroyed, or NCCL cannot make groups for the mesh.
    """
    try:
        base = mesh.get_group(0)
    except (RuntimeError, ValueError):
        raise _destroyed() from None
    by_mesh = _groups.setdefault(base, {})
    ranks = tuple(mesh.mesh.flatten().tolist())
    key = ranks, tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)
    if key not in by_mesh:
        _check_splits(ranks, base)
        by_mesh[key] = ProcessGroups(mesh)
    return by_mesh[key]


def _check_splits(ranks: Sequence[int], base: dist.ProcessGroup) -> None:
    """Check that the ranks of a mesh can make NCCL groups without the other ranks of the world.

    Raises: RuntimeError if they would wait for the other ranks forever. In a world with a `device_id`, torch splits
        each new communicator from the world's communicator, and all ranks of the world must do that together.
    """
    world = dist.group.WORLD
    is_split = world is not None and world.bound_device_id is not None and _is_nccl(base)
    if is_split and len(ranks) < dist.get_world_size():
        raise RuntimeError(
            f"ztrans: the mesh has {len(ranks)} of the {dist.get_world_size()} ranks of the world, and "
            f"init_process_group was given a device_id. All ranks of such a world must make each NCCL group together, "
            f"and those outside of the mesh do not.\n"
            f"Choose the device with torch.cuda.set_device(local_rank), and call init_process_group without device_id."
        )


def ends_together(device_type: str) -> bool:
    """Whether all ranks of a mesh of such devices end if one is lost, as on GPUs."""
    return device_type != "cpu"


def all_process_groups() -> list[ProcessGroups]:
    """The process groups of all meshes of this process."""
    return [groups for by_mesh in _groups.values() for groups in by_mesh.values()]


def host_name() -> tuple[str, ...]:
    """A unique name of this host. Each network namespace of a machine counts as a host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = "/proc/self/ns/net"
    return (
        socket.gethostname(),
        boot.read_text() if boot.exists() else "",
        os.readlink(namespace) if os.path.exists(namespace) else "",
    )


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The backend for messages of a group between devices of one kind.

    None if the group has no such backend, or has been destroyed.
    """
    try:
        config = dist.get_backend_config(group)
    except (ValueError, TypeError):  # it has been destroyed
        return None
    backends = dict(pair.split(":") for pair in config.split(","))
    return backends.get(device_type)


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    """Whether NCCL sends the messages of a group between GPUs. The group may have been closed or destroyed."""
    return group is not None and backend_of(group, "cuda") == "nccl"


def _alive(reference: weakref.ref[dist.ProcessGroup] | None) -> dist.ProcessGroup:
    """The process group that a reference points to.

    Raises: RuntimeError if it has been destroyed.
    """
    group = reference() if reference is not None else None
    if group is None:
        raise _destroyed()
    return group


def _world() -> dist.ProcessGroup:
    """The default process group. If the user has not made it, the mesh of devices has."""
    world = dist.group.WORLD
    if world is None:
        raise _destroyed()
    return world


def _destroyed() -> RuntimeError:
    return RuntimeError(
        "ztrans: the process group of this step's mesh has been destroyed.\n"
        "Make the mesh and the step again, mesh = zt.make_mesh(...), and shard the state for it."
    )


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest time-out of a group and of the world; None if their backends have none."""
    timeouts = []
    for candidate in (group, dist.group.WORLD):
        if candidate is None:
            continue
        for device in candidate._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):
                timeouts.append(candidate._get_backend(device).options._timeout)
    return min(timeouts, default=None)


def _tuning(group: dist.ProcessGroup, timeout: timedelta | None) -> Any:
    """New options of NCCL with the user's tuning of a group, such as its number of blocks.

    The other options of a group concern that group alone. None for other backends, which cannot be tuned.
    """
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "config"):
            new_options: Any = type(options)()
            new_options.config = options.config
            new_options.is_high_priority_stream = options.is_high_priority_stream
            new_options._timeout = timeout
            return new_options
    return None
