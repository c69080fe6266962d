"""Connect a rank to the process that watches over it: report the steps of the rank, and end it.

`watching` is the other side. A mesh of several GPUs has a `Watcher` on each rank, from the first call that needs its
process groups to the end of the program. The call of a step returns before a GPU has run it, so every step records an
event after its work. A thread of the rank reports which of these the GPU has passed. While a launch blocks this thread,
no step is reported as ended, and the process that watches keeps the time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol, cast

import torch.distributed as dist

from . import watching

_MAX_TEXT = 4000  # bytes of the JSON of an error; a pipe takes 4096 at once
_START_TIMEOUT = 60.0  # seconds for the process that watches to start: it imports torch
_SILENT_WAIT = 10.0  # seconds at the end of a program before it logs that it waits for other ranks
_QUERY_INTERVAL = 0.01  # seconds between two queries of an event
_logger = logging.getLogger("ztrans")


class Place(NamedTuple):
    """Where a rank meets the others: a store, a key in it that is unique to this mesh and run, and a time-out."""

    store: dist.Store
    key: str
    rank: int
    ranks: int
    timeout: float

    def described(self) -> str:
        """The place as text, with which another process can connect to the store.

        Raises: ValueError if the store is in the memory of this process.
        """
        store: Any = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            address = {"host": store.host, "port": store.port}
        elif isinstance(store, dist.FileStore):
            address = {"path": cast(Any, store).path}
        else:
            raise ValueError(f"{type(store).__name__}: no other process can read this store")
        # Torch prefixes the keys of a store with the number of the restart, which the other process does not know. So
        # the ranks agree on a random key, through the store with its prefixes, and use it in the store without them.
        token = self.store.compare_set(f"{self.key}/token", "", os.urandom(8).hex())
        numbers = {"rank": self.rank, "ranks": self.ranks, "timeout": self.timeout}
        key = f"ztrans/{token.decode()}"
        return json.dumps(address | numbers | {"key": key, "process": os.getpid()})


class Event(Protocol):
    """A point in the work of a GPU, as `torch.Event`."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class InFlight:
    """The counts of launched and of ended steps of a mesh.

    Attributes:
        launched: the number of steps that the host has begun to launch.
        ended: the number of steps that the GPU is known to have ended.
        device_error: the error of the GPU if it has failed; empty while it works.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.ended = 0
        self.device_error = ""
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Count a step whose launch begins. Returns its number."""
        with self._lock:
            self.launched += 1
            return self.launched

    def record(self, event: Event) -> None:
        """Add the event after the work of the step that was launched last."""
        with self._lock:
            self._events.append(event)

    def look(self) -> int:
        """Query the events. Returns the number of steps that have ended."""
        with self._lock:
            try:
                while self._events and self._events[0].query():
                    self._events.popleft()
                    self.ended += 1
            except RuntimeError as error:  # only a device that has failed raises here
                self.device_error = str(error).partition("\n")[0]
            return self.ended

    def wait(self) -> None:
        """Wait until all launched steps have ended, or the device has failed. `watching` limits the time."""
        while self._events and not self.device_error:
            self.look()
            time.sleep(_QUERY_INTERVAL if self._events else 0)


class Watcher:
    """The connection of a rank to the process that watches over it.

    Attributes:
        failure: how this rank has failed; empty if it has not. After a failure no step of the mesh runs.
        in_flight: the steps that the GPU runs.
    """

    def __init__(self, place: Place, before_leaving: Callable[[], None]) -> None:
        """Start the process. At the end of the program, `before_leaving` ends what the last step has left in progress.

        Raises: ValueError if no other process can read the store.
        """
        self.failure = ""
        self.place = place
        self.in_flight = InFlight()
        self.before_leaving = before_leaving
        self._owner = os.getpid()
        self._has_left = False
        # -P: the script does not import files from its folder by accident. A session of its own: Ctrl-C, and the
        # SIGTERM with which torchrun ends a worker, reach only the rank, and the other process sees whether it goes on.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(watching.__file__)), place.described()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._input = cast(IO[bytes], self._process.stdin).fileno()
        os.set_blocking(self._input, False)  # no step waits for this process
        threading.Thread(target=self._report, name="ztrans-watch", daemon=True).start()
        atexit.register(self.leave)

    def launched(self) -> None:
        """Report that the host begins to launch a step. A second report, as in a profile, restarts the time-out."""
        self._say(f"launched {self.in_flight.launched}")

    def fail(self, text: str) -> None:
        """Report that this rank has failed. It raises its own error, and all other ranks end with this text."""
        if not self.failure:
            self.failure = text
            self._say(f"failed {_json(text)}")

    def lost(self, text: str) -> NoReturn:
        """End this process, because it has lost another rank. `text` is the backend's text about that."""
        self._say(f"lost {_json(text)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_START_TIMEOUT)
        time.sleep(watching.INTERVAL)  # the thread that ends this process has the better text
        end_process(f"ztrans: rank {self.place.rank} ends, because it has lost other ranks: {text}")

    def leave(self) -> None:
        """Report that the program of this rank ends, and wait for the programs of the other ranks.

        If the process ended at once, its last messages could be lost.
        """
        if self._has_left or self._owner != os.getpid():
            return  # a forked child has the pipe of its parent, and is not a rank
        self._has_left = True
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.fail(f"has ended its program with {described(error)}")
        if self.failure:
            return
        self.before_leaving()
        self.in_flight.wait()
        if self.in_flight.device_error:
            self.fail(f"has a GPU that failed: {self.in_flight.device_error}")
            return
        self._say("left")
        try:
            self._process.wait(_SILENT_WAIT)
        except subprocess.TimeoutExpired:
            _logger.warning(
                "ztrans: the program of rank %d has ended. It waits for those of the other ranks, for %.0f s at most.",
                self.place.rank,
                self.place.timeout,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(self.place.timeout, threading.TIMEOUT_MAX))

    def forget(self) -> None:
        """Report that this rank has left, because its process group is destroyed."""
        if not self._has_left and self._owner == os.getpid():
            self._has_left = True
            atexit.unregister(self.leave)
            self._say("left")

    def _say(self, line: str) -> None:
        # If the process has ended, the thread has warned of that. A full pipe loses this line, but a later line has
        # the next number.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._input, f"{line}\n".encode())

    def _report(self) -> None:
        """Report ended steps until the process that watches ends. It may send a text, with which this process ends."""
        output = cast(IO[bytes], self._process.stdout).fileno()
        answers = select.poll()
        answers.register(output, select.POLLIN)
        ended = 0
        while not answers.poll(watching.INTERVAL * 1000):
            if self.in_flight.look() > ended:
                ended = self.in_flight.ended
                self._say(f"ended {ended}")
            if self.in_flight.device_error:
                self.fail(f"has a GPU that failed: {self.in_flight.device_error}")
        text = b"".join(iter(lambda: os.read(output, 1 << 16), b"")).decode()
        if text:
            end_process(text)
        if not self._has_left and not self.failure:
            _logger.warning(
                "ztrans: the process that watches over rank %d has ended. If another rank is lost, this one waits for "
                "it until the time-out of NCCL.",
                self.place.rank,
            )


def end_process(text: str) -> NoReturn:
    """End this process with a text, without destructors, which would wait for kernels that never end."""
    _logger.critical(text)
    if logging.getLogger().handlers or _logger.handlers:  # the text may have gone to a file
        print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def described(error: BaseException) -> str:
    """The class of an error, and all lines of its text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _json(text: str) -> str:
    """The longest beginning of a text that takes at most `_MAX_TEXT` bytes as JSON, in one line.

    JSON writes a control character, as the colours of a terminal begin with, in six bytes.
    """
    text = text.encode(errors="replace").decode()
    size = 2  # the quotes
    for i, character in enumerate(text):
        size += len(json.dumps(character, ensure_ascii=False).encode()) - 2
        if size > _MAX_TEXT:
            text = text[:i]
            break
    return json.dumps(text, ensure_ascii=False)
