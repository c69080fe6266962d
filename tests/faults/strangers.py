"""Strangers connect to every port on which the ranks listen, as a port scanner would. They are no ranks themselves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"


def ports(processes: Iterable[int]) -> set[int]:
    """The TCP ports on which these processes listen (Linux)."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == _LISTENS and row[9] in inodes
    }


class Strangers:
    """Connects to every port of some processes as soon as it is open, sends `words`, and keeps the connection open."""

    def __init__(self, processes: Iterable[int], words: bytes = b"", seconds: float = 60.0) -> None:
        self.processes, self.words, self.end = list(processes), words, time.monotonic() + seconds
        self.met: dict[int, socket.socket] = {}
        self.thread = threading.Thread(target=self._visit, daemon=True)
        self.thread.start()

    def _visit(self) -> None:
        while time.monotonic() < self.end:
            with contextlib.suppress(OSError):
                for port in ports(self.processes) - set(self.met):
                    self.met[port] = socket.create_connection(("127.0.0.1", port), timeout=1)
                    self.met[port].sendall(self.words)
            time.sleep(0.002)

    def leave(self) -> None:
        self.end = 0.0
        self.thread.join()
        for connection in self.met.values():
            connection.close()
