"""The process groups that ztrans makes for a mesh: one for each axis and purpose, beside the mesh's own.

Gathers and reductions each have a group of their own, so that neither queues behind the other, and what ranks
tell each other has one more. All of them have the time-out of the user's group. `destroy_process_group` ends
them with it, because only torch's registry of groups owns them. When a step fails on one rank, the rank closes
them: its peers then stop waiting at once, because their connections to it are gone.

Private torch APIs live here; checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_DIRECT = 8  # ranks: in larger groups a collective of the backend needs fewer messages than one to every rank

Axis = str | None  # a mesh axis; None is the whole mesh


class LostRank(RuntimeError):
    """Another rank of the mesh is gone, or has not come within the time-out."""


@dataclass(eq=False)
class Channel:
    """A queue of messages between the ranks of one process group.

    `tags` number the exchanges: all ranks start them in one order. `futures` are the collectives started here.
    """

    axis: Axis
    purpose: str
    owned: bool = True  # whether ztrans made the group
    tags: Iterator[int] = field(default_factory=itertools.count)
    futures: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    _group: weakref.ref[dist.ProcessGroup] | None = None  # None while the channel is closed

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises: RuntimeError when it has been destroyed.
        """
        group = self._group() if self._group is not None else None
        if group is None:
            raise _destroyed()
        return group

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def is_direct(self) -> bool:
        """Whether ranks send to each other directly: over gloo, in groups of a few ranks."""
        return dist.get_backend(self.group) == "gloo" and self.group.size() <= _DIRECT

    def exchange(self, pieces: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Send `pieces[r]` to rank r of the group, and receive `into[r]` from it, for every r but this rank.

        The tensors are contiguous and on the CPU. They are sent and received where they lie.
        """
        group, tag = self.group, next(self.tags)
        rank, size = group.rank(), group.size()
        others = [(rank + step) % size for step in range(1, size)]
        with self.errors():
            received = [group.recv([into[r]], r, tag) for r in others]
            return received + [group.send([pieces[r]], r, tag) for r in others]

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Name the errors of the backend, which has only RuntimeErrors, for what they are."""
        try:
            yield
        except RuntimeError as error:
            raise LostRank(str(error)) from error

    def open(self, group: dist.ProcessGroup) -> None:
        self._group, self.tags = weakref.ref(group), itertools.cycle(range(1 << 20))

    def close(self) -> None:
        """End the group, if ztrans made it, and with it the connections to the other ranks."""
        for future in list(self.futures):
            future.drop()  # a message under way would keep its connection open
        group, self._group = self._group and self._group(), None
        if self.owned and group is not None:
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # when it is gone already
                dist.destroy_process_group(group)


class ProcessGroups:
    """The channels of one mesh, in the order in which its ranks first asked for them: the same on all ranks.

    `runner` is the thread that runs a step (see `failure.alone`). `epoch` counts how often closed channels were opened
    again, `calls` what the
    ranks of the mesh have called together.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.runner: dict[str, int] = {}
        self.epoch = self.calls = 0
        self.ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        # The mesh keeps its groups alive, so nothing here may keep the mesh or its groups.
        self._bases = {axis: weakref.ref(mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ()}
        self._is_alone = len(self.ranks) == 1 or dist.get_backend(mesh.get_group(0)) == "fake"
        self._rows = {axis: _rows(mesh, axis) for axis in (None, *self._bases)}
        self._channels: dict[tuple[Axis, str], Channel] = {}
        self.farewell: weakref.finalize | None = None  # what tells the other ranks that this one has ended

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.ranks.index(dist.get_rank())

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to talk to: a mesh of one, or one whose other ranks are pretended."""
        return self._is_alone

    def channel(self, axis: Axis, purpose: str) -> Channel:
        """The channel along a mesh axis for one purpose. All ranks of the mesh must ask for it when one does."""
        key = axis, purpose
        if key not in self._channels:
            self._channels[key] = self._open(Channel(axis, purpose))
        return self._channels[key]

    def open(self) -> None:
        """Open the channels that a failure has closed. All ranks must come, within the time-out.

        Raises: RuntimeError when the process group of the mesh has been destroyed.
        """
        closed = [channel for channel in self._channels.values() if channel.is_closed]
        for channel in self._channels.values():
            _ = channel.is_closed or channel.group
        self.epoch += bool(closed)
        for channel in closed:
            with channel.errors():
                self._open(channel)

    def close(self) -> None:
        """Close all channels, so that the other ranks do not wait for this one."""
        for channel in self._channels.values():
            channel.close()

    def store(self) -> dist.Store:
        """What the ranks of the mesh can write to and read from at any time."""
        (base, *_) = self._bases.values()
        return dist.PrefixStore(f"ztrans/{'-'.join(map(str, self.ranks))}/{self.epoch}", base().get_group_store())

    def _open(self, channel: Channel) -> Channel:
        base = next(iter(self._bases.values()))() if channel.axis is None else self._bases[channel.axis]()
        if channel.axis is not None and channel.purpose == "gathers" and dist.get_backend(base) != "gloo":
            channel.owned = False  # a communicator of NCCL takes memory of the GPU
            channel.open(base)
            return channel
        options = {
            "backend": "gloo" if channel.axis is None else None,
            "timeout": _timeout(base),
            "group_desc": f"ztrans {channel.purpose}",
        }
        rows = self._rows[channel.axis]
        if sum(map(len, rows)) < dist.get_world_size():  # the ranks of other meshes are not here
            mine = next(row for row in rows if dist.get_rank() in row)
            channel.open(dist.new_group(mine, use_local_synchronization=True, **options))
            return channel
        # Torch names a group that its members alone make by how many groups they have, and ranks may have made
        # different numbers of them (pytorch#189073). So all ranks make the groups of all rows.
        groups = [dist.new_group(row, **options) for row in rows]
        channel.open(next(group for row, group in zip(rows, groups) if dist.get_rank() in row))
        return channel


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, ProcessGroups]] = weakref.WeakKeyDictionary()


def process_groups(mesh: DeviceMesh) -> ProcessGroups:
    """The process groups of a mesh, which live as long as the mesh's own group does.

    Raises: RuntimeError when that has been destroyed.
    """
    try:
        base = mesh.get_group(0)
    except (RuntimeError, ValueError):
        raise _destroyed() from None
    by_ranks = _groups.setdefault(base, {})
    key = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)
    if key not in by_ranks:
        by_ranks[key] = ProcessGroups(mesh)
    return by_ranks[key]


def _destroyed() -> RuntimeError:
    return RuntimeError(
        "ztrans: the process group of this step's mesh has been destroyed.\n"
        "Make the mesh and the step again, mesh = zt.make_mesh(...), and shard the state for it."
    )


def _rows(mesh: DeviceMesh, axis: Axis) -> list[list[int]]:
    """The ranks of every group along an axis of the mesh."""
    if axis is None:
        return [mesh.mesh.flatten().tolist()]
    k = (mesh.mesh_dim_names or ()).index(axis)
    return mesh.mesh.movedim(k, -1).reshape(-1, mesh.size(k)).tolist()


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shorter of the time-outs of a group and of the world; None where the backend has none."""
    timeouts = []
    for each in (group, dist.group.WORLD):
        for device in each._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):
                timeouts.append(each._get_backend(device).options._timeout)
    return min(timeouts, default=None)
