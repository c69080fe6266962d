"""The steps that a GPU runs or is told to run, and that have not been seen to end.

The call of a step returns before a GPU has run it. If another rank fails meanwhile, kernels of this rank stop
with results that nobody may use, and no error is raised. So every step records an event after its work. A step has
ended well if its event is done, and no error is found after that. If one is found, the states of all other steps are
marked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

_LOOK = 0.01  # seconds between two looks at an event


class Event(Protocol):
    """A point in the work of a GPU, as `torch.Event`."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class End:
    """The end of a step on a GPU: the event after its work. While the host launches the step there is none.

    `torch.Event.query` keeps Python's lock. If the driver does not answer, no other thread of the process goes on.
    """

    def __init__(self) -> None:
        self.event: Event | None = None

    def query(self) -> bool:
        return self.event is not None and self.event.query()


class StepInFlight(NamedTuple):
    """A step, the leaves of the state that it writes, and its end."""

    name: str
    leaves: Sequence[Any]
    end: Event


class InFlight:
    """The steps of a mesh that are not known to have ended well, in their order.

    `find_error` returns what the kernels of this rank have found, such as a rank that did not come; an empty text if
    nothing. `given_up` is why this rank waits for the others no longer; empty while it does. `device_error` is what the
    device of this rank has said when it failed, unless this rank had given up before.
    """

    def __init__(self, find_error: Callable[[], str]) -> None:
        self.find_error = find_error
        self.given_up = ""
        self.device_error = ""
        self._steps: deque[StepInFlight] = deque()
        self._lock = threading.RLock()  # the thread that watches reads the steps too

    def add(self, step: StepInFlight) -> None:
        """Add a step that is launched now, or has been."""
        with self._lock:
            self._steps.append(step)

    def oldest(self) -> StepInFlight | None:
        """The first step that is not known to have ended well."""
        with self._lock:
            self._forget_ended()
            return self._steps[0] if self._steps else None

    def error(self) -> str:
        """Why the steps in flight will not end well, or an empty text."""
        with self._lock:
            return self._forget_ended()

    def give_up(self, step: StepInFlight, cause: str, stop: Callable[[], None]) -> None:
        """Wait for the other ranks no longer, if this step is still the oldest one: `stop` what waits for them.

        Other threads see the cause when this has been done: what they open next must not be stopped.
        """
        with self._lock:
            if self._steps and self._steps[0] is step and not self.given_up:
                self.given_up = cause
                stop()

    def renew(self) -> None:
        """Restart the time-out of the step that the host is launching: a profile runs it again.

        `Watch` knows a step by its identity, so a copy of it counts as a new step.
        """
        with self._lock:
            if self._steps:
                self._steps.append(self._steps.pop()._replace())

    def wait(self, seconds: float) -> str:
        """Let all steps end, for at most so many seconds. Returns why they did not end well, or an empty text."""
        end = time.monotonic() + seconds
        error = self.error()
        while not error and self._steps and time.monotonic() < end:
            time.sleep(_LOOK)
            error = self.error()
        return error

    def drop_failed(self) -> None:
        """Forget the step that the host is launching, because it has failed on this rank."""
        with self._lock:
            end = self._steps[-1].end if self._steps else None
            if isinstance(end, End) and end.event is None:
                self._steps.pop()

    def reset(self) -> list[StepInFlight]:
        """Forget all steps, and that this rank has given up. Returns the steps that have not ended well."""
        with self._lock:
            self._forget_ended()
            steps = list(self._steps)
            self._steps.clear()
            self.given_up = ""
            return steps

    def _forget_ended(self) -> str:
        """Forget the steps that have ended well. Returns why the others will not, or an empty text."""
        ended = 0
        try:
            while ended < len(self._steps) and self._steps[ended].end.query():
                ended += 1
        except RuntimeError as error_of_device:
            if not self.given_up:
                self.device_error = str(error_of_device).partition("\n")[0]
            return self.given_up or self.device_error
        # Looked for after the events: an error found now may belong to a step whose event is already done.
        error = self.given_up or (self.find_error() if self._steps else "")
        if not error:
            for _ in range(ended):
                self._steps.popleft()
        return error
