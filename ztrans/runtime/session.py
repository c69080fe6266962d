"""The session of a mesh: what its steps share, and how a rank leaves it when a call fails.

A session is open while its channels connect this rank to the others. A rank that fails, or has lost another one, leaves
it: it tells the others why, and closes its channels, so that they lose their connections to it and stop waiting at
once. On CPUs the next call opens the session again, with new process groups, so its messages cannot meet messages of
the failed call that only some ranks have sent. On GPUs all ranks end instead (see `watch`). Saves have a channel that
failed steps do not close, because a save may run in parallel to steps. The mesh's own groups always stay open.

| a rank notices | the others are told | it raises | in |
|---|---|---|---|
| its own error in a step | the error | that error | `failure.ending_together` |
| its own error in another call, unless it has left before | the error | that error | `Session.failed` |
| an interrupt elsewhere, or an error after the ranks have agreed | the error | that error | `leave_if_cut_off` |
| a connection that has ended, or a time-out | that it leaves | `LostRank`, with what they tell | `Session.lost` |
| its own error before a comparison; nobody leaves | the error | that error; the others too | `say_failure` |
| different calls before anything is sent; nobody leaves | its call | one error on all ranks | `agree` |
| GPUs: others have launched a step, and it makes another call | its call | an error | `agree` |
| GPUs: others replay a graph, and it cannot | the error | that error | `Compiled._telling_refusals` |
| GPUs: different calls in a step that has been launched | the difference | one error on all ranks | `_Question.read` |

Where somebody leaves, this rank closes its channels. Only `failure.ending_together` can find a state half updated, and
marks it. On CPUs a rank tells the others by a note in the store of the process group. On GPUs it tells the process that
watches over it: the others end with that text, and in place of `LostRank` this process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import groups_along, members
from ..ir.routes import common, hosts_of
from .channels import Axis, Channel, LostRank, Work, alive, destroyed, release_messages
from .communicators import (
    backend_of,
    check_splits,
    connect,
    host_name,
    is_nccl,
    run_uninterrupted,
    timeout_of,
)
from .watch import Place, Watcher

if TYPE_CHECKING:
    from .carried import Carried
    from .cuda.symmetric import SymmetricMemory

T = TypeVar("T")
STOP_TOGETHER = (
    "stop all ranks together, or drop the last batches: DistributedSampler(..., drop_last=True)."
)
_NOTES_TIMEOUT = 0.5  # seconds to wait for the notes of other ranks


class Session:
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

    # ---- open

    @property
    def is_open(self) -> bool:
        """Whether this rank is connected to the others: it has channels, and none is closed."""
        return bool(self._channels) and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the session, and no call has opened it again."""
        return any(channel.is_closed for channel in self._channels.values())

    def check_exists(self) -> None:
        """Raises: RuntimeError if the process groups of this process have been destroyed."""
        if dist.group.WORLD is not self._world():
            raise destroyed()

    def check_goes_on(self) -> None:
        """Raises: RuntimeError if this rank of a mesh of GPUs has failed, because the other ranks are ending."""
        if self.watcher is not None and self.watcher.failure:
            raise RuntimeError(
                f"ztrans: rank {dist.get_rank()} {self.watcher.failure}. On GPUs all ranks end together, so the others "
                f"are ending, and this one runs no more steps.\n"
                f"End this process, and start all of them again from the last checkpoint, as torchrun --max-restarts "
                f"does (docs/launch.md)."
            )

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
                alive(channel._group)
        if not closed_channels:
            return
        self.epoch += 1

        def reopen() -> None:
            self._skip_names(len(closed_channels))
            for channel in closed_channels:
                self._open(channel)

        run_uninterrupted(reopen, self._device_type)

    def channel(self, axis: Axis, purpose: str) -> Channel:
        """The channel along a mesh axis for one purpose. All ranks of the mesh must call this together.

        Raises: LostRank if it is new and a rank does not join.
        """
        key = axis, purpose
        if key not in self._channels:
            # Add it first: if it does not open, it counts as closed, and all ranks open the same ones in the next call.
            self._channels[key] = Channel(axis, purpose)
            run_uninterrupted(lambda: self._open(self._channels[key]), self._device_type)
        return self._channels[key]

    def reopen(self, channel: Channel) -> None:
        """Close a channel and open it again, without its earlier messages. All ranks must call it, within the time-out.

        Raises: LostRank if a rank does not.
        """

        def reopen() -> None:
            channel.close()
            self._skip_names(1)
            with channel.errors():
                self._open(channel)

        run_uninterrupted(reopen, self._device_type)

    def _open(self, channel: Channel) -> None:
        """Open a channel. The first time, a channel along an axis learns the hosts of its ranks.

        Raises: LostRank if a rank does not join.
        """
        axes = tuple(self._bases)
        base = self._base(channel.axis or axes[0])
        rows = groups_along(
            self._mesh_ranks, axes, axes if channel.axis is None else [channel.axis]
        )
        with channel.errors():
            channel.make_group(rows, base, self._device_type)
        # A new channel has `ONE_HOST`, which counts a single rank.
        knows_hosts = channel.axis is None or channel.group.size() == channel.hosts.ranks
        if not knows_hosts and not self.is_alone:
            hosts = []
            for row in rows:
                hosts.append(hosts_of([self._host_names[rank] for rank in sorted(row)]))
            channel.hosts = common(hosts)
        if is_nccl(channel.live_group()) and not self.is_alone:
            with channel.errors():
                # Reductions are hierarchical where hosts have equally many ranks.
                count = channel.hosts.count if channel.hosts.even else 1
                connect(channel.group, channel.purpose, count)

    def _base(self, axis: str) -> dist.ProcessGroup:
        """The mesh's own group along an axis, or along the first of a joint axis."""
        return alive(self._bases[members(axis)[0]])

    def _skip_names(self, count: int) -> None:
        """Use up the names of closed groups, so that torch does not give them to the next groups.

        The store still has the addresses of the closed groups under these names, and a rank could connect to them.
        Torch names groups of a part of the world by a count. So this makes `count` permanent groups of this rank alone.
        """
        if len(self.ranks) < dist.get_world_size():
            for _ in range(count):
                dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @property
    def timeout(self) -> float:
        """The seconds after which a rank that does not answer is lost."""
        timeout = timeout_of(self._base(next(iter(self._bases))))
        return math.inf if timeout is None else timeout.total_seconds()

    # ---- exchange values

    def from_all(self, value: T) -> list[T]:
        """The values that the ranks of the mesh pass, in its order. All ranks must call it together.

        Raises: LostRank if a rank has ended or does not answer.
        """
        with self.leaving("ztrans"):
            if not self.is_alone:
                self.open()
            return self._gathered(value)

    def from_first(self, value: T) -> T:
        """The value that the first rank of the mesh passes. All ranks must call it together.

        Raises: LostRank, on the other ranks, if the first one has ended or does not answer.
        """
        values = [value]
        with self.leaving("ztrans"):
            if not self.is_alone:
                self.open()
                channel = self.channel(None, "ranks")
                with channel.errors():
                    dist.broadcast_object_list(values, group=channel.group, group_src=0)
        return values[0]

    def _gathered(self, value: T) -> list[T]:
        values = [value] * len(self.ranks)
        if not self.is_alone:
            channel = self.channel(None, "ranks")
            with channel.errors():
                dist.all_gather_object(values, value, group=channel.group)
        return values

    @functools.cached_property
    def _host_names(self) -> dict[int, tuple[str, ...]]:
        """The host of every rank of the mesh. All ranks must compute it together."""
        return dict(self._gathered((dist.get_rank(), host_name())))

    @property
    def hosts(self) -> list[tuple[str, ...]]:
        """The host of each rank, in the order of the ranks. The first time, all ranks must ask together."""
        return [self._host_names[rank] for rank in sorted(self.ranks)]

    # ---- between steps

    def read_pending(self) -> None:
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

    def error_of_kernels(self) -> str:
        """The error of a kernel of this rank whose wait for another rank has failed; empty if there is none."""
        return self.symmetric.error() if self.symmetric is not None else ""

    # ---- leave

    @contextlib.contextmanager
    def leaving(self, call: str) -> Iterator[None]:
        """Run a call that communicates with the other ranks. This rank leaves if they are lost, or if it fails.

        Raises: LostRank, with what the other ranks have told (on GPUs this process ends instead); the error of this
            rank, such as KeyboardInterrupt.
        """
        try:
            yield
        except LostRank as error:
            raise self.lost(call, error) from error
        except BaseException as error:
            self.failed(call, error)
            raise

    def failed(self, call: str, error: BaseException) -> None:
        """Leave because this rank has failed in a call, unless it has left."""
        release_messages(error)
        if self.is_open:
            self.leave(f"failed in {call} with {in_one_line(error)}")

    def lost(self, call: str, error: BaseException) -> LostRank:
        """Leave because this rank has lost other ranks in a call, so that no other rank waits for it.

        On GPUs this ends the process.

        Returns: the error to raise, with what the other ranks have told.
        """
        release_messages(error)
        text = in_one_line(error, with_type=False)
        if self.watcher is not None:
            self.watcher.lost(text)
        self.leave("")
        notes = self._read_notes()
        silent = [rank for rank in self.ranks if rank not in notes and rank != dist.get_rank()]
        causes = explain_loss(notes, silent)
        head = f"{call}: rank {dist.get_rank()} has lost other ranks of the mesh.\n"
        lines = "".join(f"  {cause}\n" for cause in causes)
        reason = causes[0].rstrip(".") if causes else ""
        return LostRank(f"{head}{lines}The backend says: {text}", reason)

    def leave(self, note: str) -> None:
        """Tell the other ranks why, and close the channels. On GPUs the other ranks end with the text of the note."""
        if self.is_alone:
            return
        if self.watcher is not None:
            self.watcher.fail(note)
        else:
            _in_time(lambda: self.store().set(f"note/{dist.get_rank()}", note))
        self.close()

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

    def store(self) -> dist.Store:
        """A key-value store that every rank of the mesh can read and write at any time."""
        return dist.PrefixStore(f"{self._key}/{self.epoch}", self._root_store())

    @property
    def _key(self) -> str:
        """The prefix of the keys of this mesh. Meshes of the same ranks may share a group and its store."""
        axes = ",".join(self._bases)
        shape = ",".join(map(str, self._mesh_ranks.shape))
        ranks = "-".join(map(str, self.ranks))
        return f"ztrans/{axes}/{shape}/{ranks}"

    def _root_store(self) -> dist.Store:
        return self._base(next(iter(self._bases))).get_group_store()

    def _read_notes(self) -> dict[int, str]:
        """The notes of the other ranks, which may take some time to arrive."""
        notes: dict[int, str] = {}
        peers = [rank for rank in self.ranks if rank != dist.get_rank()]

        def read_notes() -> None:
            store = self.store()
            end = time.monotonic() + _NOTES_TIMEOUT
            while len(notes) < len(peers) and time.monotonic() < end:
                for rank in peers:
                    if rank not in notes and store.check([f"note/{rank}"]):
                        notes[rank] = store.get(f"note/{rank}").decode()
                time.sleep(0.02)

        _in_time(read_notes)
        return dict(notes)

    def _watcher(self) -> Watcher:
        """Start the process that watches this rank. For one mesh, all ranks must call it equally often.

        Raises: ValueError if no other process can read the store of the mesh.
        """
        store = self._root_store()
        rank = dist.get_rank()
        # The store may still have the keys of an earlier mesh of the same ranks, so each watcher has its own keys.
        times = store.add(f"{self._key}/watched/{rank}", 1)
        place = Place(store, f"{self._key}/{times}", rank, len(self.ranks), self.timeout)
        this = weakref.ref(self)

        def before_leaving() -> None:
            session = this()
            # Another rank may be slower, and wait for the messages of these gathers before its last step ends.
            if session is not None:
                with contextlib.suppress(RuntimeError):  # the groups may have been destroyed
                    session.drop_carried()

        watcher = Watcher(place, before_leaving)
        weakref.finalize(self, watcher.forget).atexit = False
        return watcher


# The first group of a mesh -> the (ranks, axes, sizes) of each mesh with this group -> its session.
_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Session]] = (
    weakref.WeakKeyDictionary()
)


def session_of(mesh: DeviceMesh) -> Session:
    """The session of a mesh, which lives as long as the mesh's own group.

    Raises: RuntimeError if the mesh's own group has been destroyed, or NCCL cannot make groups for the mesh.
    """
    try:
        base = mesh.get_group(0)
    except (RuntimeError, ValueError):
        raise destroyed() from None
    by_mesh = _sessions.setdefault(base, {})
    ranks = tuple(mesh.mesh.flatten().tolist())
    key = ranks, tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)
    if key not in by_mesh:
        check_splits(ranks, base)
        by_mesh[key] = Session(mesh)
    return by_mesh[key]


def all_sessions() -> list[Session]:
    """The sessions of all meshes of this process."""
    return [session for by_mesh in _sessions.values() for session in by_mesh.values()]


def ends_together(device_type: str) -> bool:
    """Whether all ranks of a mesh of such devices end if one is lost, as on GPUs."""
    return device_type != "cpu"


def _world() -> dist.ProcessGroup:
    """The default process group. If the user has not made it, the mesh of devices has."""
    world = dist.group.WORLD
    if world is None:
        raise destroyed()
    return world


def leave_if_cut_off(mesh: object, call: str, error: BaseException) -> None:
    """Leave the session of a mesh if an error has ended a call outside of the contexts that handle errors.

    A signal handler may raise between two contexts, or inside the exit of one. Any other error that is raised outside
    of a step on which the ranks have agreed is known to all of them.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    with contextlib.suppress(RuntimeError):  # the process group of the mesh has been destroyed
        session = session_of(mesh)
        is_in_step = session.in_step == threading.get_ident()
        if is_in_step or not isinstance(error, Exception):
            session.failed(call, error)


def explain_loss(notes: Mapping[int, str], silent: Sequence[int]) -> list[str]:
    """Sentences that say why ranks are lost, from their notes. The `silent` ranks wrote none.

    A rank that failed because it had lost others writes an empty note: the lost ranks say why.
    """
    causes = [f"Rank {rank} {note}." for rank, note in sorted(notes.items()) if note]
    if silent and not causes:
        causes = [
            f"{rank_names(silent).capitalize()} said nothing: the program there has ended, or it was killed, is out of "
            f"memory, stopped, or busy with something else. See its log.",
            f"Every rank must take the same number of steps. If data ends earlier on some ranks, {STOP_TOGETHER}",
        ]
    return causes


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks as text, such as `ranks 0, 2`."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"


def in_one_line(error: BaseException, with_type: bool = True) -> str:
    """The class and the first line of an error."""
    kind = type(error).__name__
    lines = str(error).splitlines()
    if not lines:
        return kind
    return f"{kind}: {lines[0]}" if with_type else lines[0]


def _in_time(use_store: Callable[[], object]) -> None:
    """Use the store for a limited time, because the host of the store may be the one that failed."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, and its notes are lost
            use_store()

    thread = threading.Thread(target=run, name="ztrans-store", daemon=True)
    # No thread starts if memory is short, or at the end of the process. The failure itself matters more than its note.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(2 * _NOTES_TIMEOUT)
