"""A request to stop after a step, as before a pre-emption, which all ranks of a mesh learn in the same step.

A signal reaches one process, at any moment. If that one left the loop by itself, the others would wait for it. So a
request is noted here, and goes with the record that ranks compare before a step anyway (see `agreement`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_requested = threading.Event()
_watched: set[int] = set()  # the signals that are a request


def request_stop() -> None:
    """Ask all ranks to stop after the same step: there `step.stop_requested` becomes true on all of them.

    Any rank may call this, at any time, from any thread. It holds until the process ends.
    """
    _requested.set()


def stop_on(*signals: int) -> None:
    """Take these signals as requests to stop, such as the SIGTERM that a scheduler sends before it ends a job.

    Call it on all ranks before the first step, in the main thread. A handler that the program has for a signal is still
    called. A signal that would end the process does not end it any more, but a second Ctrl-C does.

    Raises: TypeError if there is no signal; ValueError outside of the main thread.
    """
    if not signals:
        raise TypeError("stop_on: name the signals, as in zt.stop_on(signal.SIGTERM).")
    for number in signals:
        if number not in _watched:
            signal.signal(number, _handler(signal.getsignal(number)))
            _watched.add(number)


def is_requested() -> bool:
    """Whether this process has been asked to stop."""
    return _requested.is_set()


def is_watched() -> bool:
    """Whether signals are requests to stop."""
    return bool(_watched)


def _handler(before: Any) -> Callable[[int, FrameType | None], None]:
    """A handler that requests to stop, in addition to what the handler before does."""

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = not _requested.is_set()
        _requested.set()
        # The default handler of Ctrl-C raises, which would cut off the step that is to be the last.
        if before is signal.default_int_handler and is_first:
            return
        if callable(before):
            before(number, frame)

    return handle
