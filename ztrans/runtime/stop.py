"""Request a stop after a step, for instance before a pre-emption. All ranks of a mesh learn of it in the same step.

A signal reaches one process, at any moment. If that process left its loop, the others would wait for it. So a request
is stored here, and sent with the record that ranks compare before each step (see `agreement`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_requested = threading.Event()
_watched: set[int] = set()  # the signals that request a stop


def request_stop() -> None:
    """Ask all ranks to stop after the same step: after it, `step.stop_requested` is true on all of them.

    Any rank may call this, at any time, from any thread. The request holds until the process ends.
    """
    _requested.set()


def stop_on(*signals: int) -> None:
    """Treat these signals as requests to stop, such as the SIGTERM that a scheduler sends before it ends a job.

    Call this on all ranks before the first step, in the main thread. A handler that a signal already has is still
    called. The signals no longer end the process by default, but a second Ctrl-C does.

    Raises: TypeError without signals; ValueError outside the main thread.
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
    """Whether `stop_on` has been called, so that some signals request a stop."""
    return bool(_watched)


def _handler(previous: Any) -> Callable[[int, FrameType | None], None]:
    """A handler that requests a stop, and then calls the previous handler."""

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = not _requested.is_set()
        _requested.set()
        # The default handler of Ctrl-C raises, which would end the last step too early.
        if previous is signal.default_int_handler and is_first:
            return
        if callable(previous):
            previous(number, frame)

    return handle
