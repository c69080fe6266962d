"""Gather leaves of a state one after the other, each whole, on one rank or on several.

A rank holds one box of a leaf: an offset and a shape. The ranks tell each other their boxes once. Then a receiver
allocates the whole leaf, and the other boxes arrive in their places in it, without further buffers. A shard is cast to
the dtype of the receiver before it is sent.

Every box is sent to a receiver by one rank that holds it, on the same host if there is one. If several ranks of a host
receive a leaf, its boxes on other hosts cross to that host once: one rank of the host receives a box, and passes it on.
A leaf with parts along another dim than its first one is received in buffers, and takes twice its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..calling.inputs import local_part
from ..calling.leaf_records import RECORDS
from ..ir.dependencies import grouped
from ..ir.layout import mesh_axes
from .channels import Channel
from .replicas import digest
from .session import Session


class Box(NamedTuple):
    """A part of a leaf: the index of its first element along each dim, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(leaf: torch.Tensor) -> Box:
        """The box of a leaf that this rank holds.

        Raises: RuntimeError if the leaf is a term of a sum.
        """
        if not isinstance(leaf, DTensor):
            return Box((0,) * leaf.ndim, tuple(leaf.shape))
        (chunk,) = leaf.__create_chunk_list__()
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))

    def __call__(self, whole: Any) -> Any:
        """This part of a whole leaf, as a view. Another value with slices, such as a file's, works too."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape))]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A leaf to gather.

    Attributes:
        name: its name.
        part: this rank's part.
        shape: the shape of the whole leaf.
        dtype: the dtype in which it is sent.
        holders: for each box, the ranks that hold it. A rank is an index into the ranks of the mesh, in their order.
    """

    name: str
    part: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: Mapping[Box, Sequence[int]]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf, as it is sent."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Ranks(NamedTuple):
    """The ranks that exchange boxes.

    Attributes:
        own: the index of this rank.
        hosts: the host of each rank.
        channel: the channel between them; None for one process.
    """

    own: int = 0
    hosts: Sequence[Hashable] = (None,)
    channel: Channel | None = None

    @staticmethod
    def of(session: Session | None) -> Ranks:
        """The ranks of a mesh. All of them must call this together."""
        if session is None or session.is_alone:
            return Ranks()
        channel = session.channel(None, "weights")
        return Ranks(channel.group.rank(), session.hosts, channel)


def sent_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent if floats are to be sent in `dtype`."""
    return dtype if dtype is not None and x.is_floating_point() else x.dtype


def located(
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    session: Session | None,
    call: str,
) -> list[Leaf]:
    """Find out which rank holds which box of each tensor. All ranks must call it together, with the same tensors.

    Args:
        tensors: DTensors, or tensors that are the same on all ranks, by name.
        dtype: the dtype in which floats are sent; None for their own.
        session: the session of their mesh; None in one process.
        call: the name of the call, for errors.

    Raises: ValueError on all ranks if copies of a box differ, as those of replicas that train apart: only one would be
        sent.
    """
    mine = []
    for x in tensors.values():
        # Reading a shard once costs less than sending it, but most leaves have no copies.
        has_copies = session is not None and not _is_split_over_all(x, len(session.ranks))
        mine.append((Box.of(x), digest(local_part(x)) if has_copies else None))
    by_rank = [mine] if session is None or session.is_alone else session.from_all(mine)
    leaves = []
    for i, (name, x) in enumerate(tensors.items()):
        rank_by_copy: dict[Box, int] = {}
        for rank, boxes in enumerate(by_rank):
            box, values = boxes[i]
            first = rank_by_copy.setdefault(box, rank)
            if by_rank[first][i][1] != values:
                raise _copies_differ(f"{call}: {name}", x, first, rank)
        pairs = ((boxes[i][0], rank) for rank, boxes in enumerate(by_rank))
        holders = grouped((box, rank) for box, rank in pairs if 0 not in box.shape)
        if sum(torch.Size(box.shape).numel() for box in holders) != x.numel():
            raise RuntimeError(
                f"{call}: the parts of {name} do not make up the whole tensor. Are the other ranks of the mesh fake?"
            )
        leaves.append(Leaf(name, local_part(x), tuple(x.shape), sent_dtype(x, dtype), holders))
    return leaves


def _copies_differ(name: str, x: torch.Tensor, first: int, rank: int) -> ValueError:
    text = f"{name} has other values on rank {rank} than on rank {first}, "
    independent = RECORDS.of(x).independent
    if independent:
        return ValueError(
            f"{text}because replicas have trained apart (independent_axis).\n"
            f"Average them in a step first: zt.pmean(p, {independent[0]!r})."
        )
    return ValueError(
        f"{text}although the layout says that they have copies. With tensor or expert parallelism, cut the leaf over "
        f"its axis as a DTensor."
    )


def whole_leaves(
    leaves: Sequence[Leaf], receivers: Sequence[Sequence[int]], ranks: Ranks, window: int
) -> Generator[tuple[Leaf, torch.Tensor | None]]:
    """Gather leaves in their order. All ranks must call it together, and iterate to the end.

    Args:
        leaves: the leaves, from `located`.
        receivers: for each leaf, the ranks that receive it.
        ranks: the ranks of the mesh.
        window: the bytes that this rank may hold for leaves in progress. One leaf is always in progress.

    Returns: each leaf with its whole tensor, or None on a rank that does not receive it.
    """
    started: deque[_Gather] = deque()

    def first_ended() -> tuple[Leaf, torch.Tensor | None]:
        ended = started[0].end()
        started.popleft()
        return ended

    try:
        for leaf, to in zip(leaves, receivers):
            nbytes = leaf.nbytes if ranks.own in to else leaf.part.numel() * leaf.dtype.itemsize
            while started and sum(x.nbytes for x in started) + nbytes > window:
                yield first_ended()
            started.append(_Gather(leaf, to, ranks, nbytes))
        while started:
            yield first_ended()
    finally:
        for gather in started:
            gather.drop()


# For each box of a leaf, the ranks that hold it and the ranks that need it.
_Round = Sequence[tuple[Box, Sequence[int], Sequence[int]]]


class _Gather:
    """A leaf on its way to its receivers.

    Attributes:
        leaf: the leaf.
        nbytes: the bytes that this rank holds for it.
    """

    def __init__(self, leaf: Leaf, receivers: Sequence[int], ranks: Ranks, nbytes: int) -> None:
        self.leaf = leaf
        self.nbytes = nbytes
        self._ranks = ranks
        device = leaf.part.device
        if ranks.channel is not None and not ranks.channel.is_gloo:  # a leaf may be on the host
            device = torch.device("cuda", torch.cuda.current_device())
        self._whole: torch.Tensor | None = None
        if ranks.own in receivers:
            self._whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        self._device = device
        self._own_box = next((box for box in leaf.holders if ranks.own in leaf.holders[box]), None)
        if self._own_box is not None and self._whole is not None:
            self._own_box(self._whole).copy_(leaf.part)
        # One process has the whole leaf.
        is_alone = ranks.channel is None
        self._rounds = [] if is_alone else _rounds(leaf.holders, receivers, ranks.hosts)
        self._works: list[dist.Work] = []
        self._buffers: list[tuple[Box, torch.Tensor]] = []
        self._sent: list[torch.Tensor] = []
        self._begin_round()

    def _begin_round(self) -> None:
        own, channel = self._ranks.own, self._ranks.channel
        if channel is None or not self._rounds:
            return
        sends, receives = [], []
        hosts = self._ranks.hosts
        for box, holders, receivers in self._rounds.pop(0):
            tag = next(channel.tags)  # on all ranks the same
            have = set(holders)
            if own in have:
                others = (rank for rank in receivers if rank not in have)
                to = [rank for rank in others if _sender(holders, rank, hosts) == own]
                if to:
                    piece = self._piece(box)
                    sends += [(piece, rank, tag) for rank in to]
            elif own in receivers and self._whole is not None:
                part = box(self._whole)
                if not part.is_contiguous():
                    part = torch.empty_like(part, memory_format=torch.contiguous_format)
                    self._buffers.append((box, part))
                receives.append((part, _sender(holders, own, hosts), tag))
        self._works = channel.send_and_receive(sends, receives)

    def _piece(self, box: Box) -> torch.Tensor:
        """A box that this rank holds, or has received, which stays in memory until it is sent."""
        if box == self._own_box:
            piece = self.leaf.part.to(self._device, self.leaf.dtype).contiguous()
        else:
            piece = box(self._whole).contiguous()
        self._sent.append(piece)
        return piece

    def end(self) -> tuple[Leaf, torch.Tensor | None]:
        while self._works or self._rounds:
            if self._ranks.channel is not None:
                with self._ranks.channel.errors():
                    while self._works:
                        self._works.pop(0).wait()
            for box, buffer in self._buffers:
                box(self._whole).copy_(buffer)
            self._buffers.clear()
            self._sent.clear()
            self._begin_round()
        whole = self._whole
        self._whole = None
        return self.leaf, whole

    def drop(self) -> None:
        """Forget the messages in progress, which would keep the connections to other ranks open."""
        self._works.clear()
        self._rounds.clear()


def _rounds(
    holders: Mapping[Box, Sequence[int]], receivers: Sequence[int], hosts: Sequence[Hashable]
) -> list[_Round]:
    """Who has each box, and who receives it, in each round. In the first of two, boxes cross to other hosts.

    >>> box = Box((0,), (1,))
    >>> [[(holders, receivers) for _, holders, receivers in x] for x in _rounds({box: [0]}, [0, 1, 2, 3], "aabb")]
    [[([0], [2])], [([0, 2], [0, 1, 2, 3])]]
    """
    rounds: list[_Round] = []
    now = {box: list(ranks) for box, ranks in holders.items()}
    receivers_by_host = grouped((hosts[rank], rank) for rank in receivers)
    if len(receivers_by_host) > 1:
        crossing = []
        for i, (box, ranks) in enumerate(now.items()):
            present = {hosts[rank] for rank in ranks}
            relays = [
                on_host[i % len(on_host)]
                for host, on_host in receivers_by_host.items()
                if host not in present
            ]
            crossing.append((box, holders[box], relays))
            ranks += relays
        rounds.append(crossing)
    return [*rounds, [(box, ranks, receivers) for box, ranks in now.items()]]


def _sender(holders: Sequence[int], receiver: int, hosts: Sequence[Hashable]) -> int:
    """The rank that sends a box to a receiver: a holder on its host if there is one. Receivers take turns."""
    near = [rank for rank in holders if hosts[rank] == hosts[receiver]] or holders
    return near[receiver % len(near)]


def _is_split_over_all(x: torch.Tensor, ranks: int) -> bool:
    """Whether no two ranks of a mesh of that many ranks have a part of a tensor in common."""
    if not isinstance(x, DTensor):
        return ranks == 1
    axes = zip(mesh_axes(x.device_mesh), x.placements)
    sizes = [size for (_, size), placement in axes if not placement.is_replicate()]
    return torch.Size(sizes).numel() == ranks
