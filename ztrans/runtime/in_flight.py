"""The steps that the host has launched and a GPU may still run.

The call of a step returns before a GPU has run it, so every step records an event after its work. These events tell a
thread of the process (see `watch`), and every reader of the state, which steps have ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

_INTERVAL = 0.01  # seconds between two queries of an event


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
            time.sleep(_INTERVAL if self._events else 0)
