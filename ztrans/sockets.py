"""sockets: a connection to every other rank of a group, over which pieces go both ways at once.

gloo wakes its thread for every few KB that arrive, and a rank that computes on that core pays for it.
Here a thread for each direction sleeps in the kernel, the receiving one until a good part of a piece is
there (SO_RCVLOWAT). Between two ranks pieces arrive in the order in which they were sent, so they bear
no names.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_ENOUGH = 1 << 18  # bytes worth waking up for
_LOOK = 1.0  # seconds after which the receiver looks, woken or not
_PATIENCE = 30.0  # seconds, to be connected
_LATE = 1800.0  # seconds that a piece may take, as gloo's collectives may
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # Windows has none and needs none: there `recv` awaits no low mark

Address = tuple[str, int, bytes]  # host, port, and what shows that one was told


@dataclass(eq=False)
class Piece:
    """Bytes under way."""

    buffer: memoryview | None
    rank: int
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None

    def wait(self) -> None:
        """Until they are here, or given to the kernel.

        Raises: RuntimeError when the other rank is gone, or late by half an hour.
        """
        if not self.done.wait(_LATE):
            raise RuntimeError(
                f"rank {self.rank} of the group has neither sent nor received for {_LATE / 60:.0f} minutes."
            )
        if self.error is not None:
            raise RuntimeError(
                f"rank {self.rank} of the group ended its connection ({self.error}): it has died, and says why itself."
            )


class Peer:
    """The connection to another rank."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket, self.low = rank, connected, 1
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.readable = selectors.DefaultSelector()
        self.readable.register(connected, selectors.EVENT_READ)
        self.threads: list[threading.Thread] = []
        self.coming, self.going = self._way(self._receive), self._way(connected.sendall)

    def receive(self, into: torch.Tensor) -> Piece:
        """Bytes into a contiguous tensor."""
        return self._put(self.coming, into)

    def send(self, piece: torch.Tensor) -> Piece:
        """The bytes of a contiguous tensor, which must not change until they are sent."""
        return self._put(self.going, piece)

    def _put(self, way: queue.SimpleQueue, of: torch.Tensor) -> Piece:
        piece = Piece(memoryview(of.detach().view(-1).view(torch.uint8).numpy()), self.rank)
        way.put(piece)
        return piece

    def _way(self, move: Callable[[memoryview], object]) -> queue.SimpleQueue:
        """A queue of pieces, and a thread that moves one after the other, up to None."""
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

        def run() -> None:
            while (piece := pieces.get()) is not None:
                try:
                    move(piece.buffer)
                except OSError as error:
                    piece.error = error
                piece.buffer = None  # and with them the tensor
                piece.done.set()

        self.threads.append(threading.Thread(target=run, name=f"ztrans-rank-{self.rank}", daemon=True))
        self.threads[-1].start()
        return pieces

    def close(self) -> None:
        """End the connection, and what is under way."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        for way in (self.coming, self.going):
            way.put(None)
        for thread in self.threads:
            thread.join()
        self.readable.close()
        self.socket.close()

    def _receive(self, into: memoryview) -> None:
        while into:
            low = min(len(into), _ENOUGH)
            if low != self.low and sys.platform == "linux":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
                self.low = low
            self.readable.select(_LOOK)
            # Where memory is short the kernel wakes us early. A blocking receive would then sleep until `low`
            # bytes more are there, which may be more than are left of the piece: it takes what has come.
            with contextlib.suppress(BlockingIOError):
                came = self.socket.recv_into(into, 0, _AT_ONCE)
                if not came:
                    raise ConnectionError("end of file")
                into = into[came:]


def connect(group: dist.ProcessGroup) -> dict[int, Peer] | str:
    """The other ranks of a group, or why they cannot be reached; all of its ranks must call it."""
    where: list[Address | None] = [None] * group.size()
    said = [""] * group.size()
    found: dict[int, socket.socket] = {}
    mine, why = None, ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((own_address(), 0), backlog=group.size()))
            mine = (*server.getsockname(), secrets.token_bytes(16))
        except OSError as error:
            why = str(error)
        dist.all_gather_object(where, mine, group=group)
        try:
            found = meet(server, where, group.rank()) if all(where) else {}
        except OSError as error:
            why = str(error)
    dist.all_gather_object(said, why, group=group)
    if any(said):
        for connected in found.values():
            connected.close()
        return next(f"rank {rank}: {why}" for rank, why in enumerate(said) if why)
    return {rank: Peer(rank, connected) for rank, connected in found.items()}


def meet(server: socket.socket, where: Sequence[Address], rank: int) -> dict[int, socket.socket]:
    """Connect to the ranks before, and wait for those after; who does not know the word is turned away."""
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as failed:
        for other, (host, port, word) in enumerate(where[:rank]):
            found[other] = failed.enter_context(socket.create_connection((host, port), timeout=_PATIENCE))
            found[other].sendall(word + struct.pack("!i", rank))
        server.settimeout(_PATIENCE)
        while len(found) < len(where) - 1:
            connected = failed.enter_context(server.accept()[0])
            connected.settimeout(_PATIENCE)
            try:
                said = connected.recv(20, socket.MSG_WAITALL)
            except OSError:
                said = b""
            if len(said) == 20 and secrets.compare_digest(said[:16], where[rank][2]):
                found[struct.unpack("!i", said[16:])[0]] = connected
            else:
                connected.close()
        failed.pop_all()
    return found


def own_address() -> str:
    """Where others reach this host: the interface that gloo is told to use, or the one that leads to the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            import fcntl

            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            return socket.inet_ntoa(found[20:24])
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))  # sends nothing
        return probe.getsockname()[0]
