"""Show the progress of tracing, planning and compiling, with the seconds of each stage.

The logger "ztrans" reports when a step is traced, transformed, planned and compiled, once a job, on rank 0. On a
terminal, one line shows the current stage, and stages of more than a second leave a line. Elsewhere nothing is shown
unless `ZTRANS_LOG=info` or `ZTRANS_LOG=debug` is set, or the program sets the level of the logger:
`logging.getLogger("ztrans").setLevel(logging.INFO)`. The level of the root logger alone shows nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

log = logging.getLogger("ztrans")
_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_CLEAR = "\r\x1b[K"  # erases the line
_LONG = 1.0  # seconds; a shorter stage leaves no line on a terminal


@contextlib.contextmanager
def stage(step: str, name: str, level: int = logging.INFO) -> Iterator[None]:
    """Log that a stage of `step` begins, and at its end how many seconds it took."""
    _prepare()
    if log.level == logging.NOTSET or not log.isEnabledFor(level) or not _is_first_rank():
        yield
        return
    begin = time.monotonic()
    text = "%s: %s failed after %.1f s"
    log.log(level, "%s: %s", step, name, extra={"seconds": None})
    try:
        yield
        text = "%s: %s, %.1f s"
    finally:
        seconds = time.monotonic() - begin
        log.log(level, text, step, name, seconds, extra={"seconds": seconds})


def _is_first_rank() -> bool:
    if dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


@functools.cache
def _prepare() -> None:
    """Show progress on stderr, if it is a terminal or ZTRANS_LOG asks for it, and the program does not log itself.

    Raises: ValueError if ZTRANS_LOG is neither "info" nor "debug".
    """
    requested_level = os.environ.get("ZTRANS_LOG", "").lower()
    if requested_level and requested_level not in _LEVELS:
        raise ValueError(f"ZTRANS_LOG={requested_level}: it is info or debug.")
    handler: logging.StreamHandler | None = None
    if requested_level:
        handler = logging.StreamHandler()
    elif sys.stderr.isatty():
        handler = _Terminal()
    if handler is not None and not log.hasHandlers():
        handler.setFormatter(logging.Formatter("ztrans: %(message)s"))
        log.addHandler(handler)
        log.setLevel(_LEVELS.get(requested_level, logging.DEBUG))
    elif requested_level:
        log.setLevel(_LEVELS[requested_level])


class _Terminal(logging.StreamHandler):
    """Shows the running stage on the last line of a terminal, and replaces it when the stage ends.

    Long stages and errors leave a line.
    """

    terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        seconds = getattr(record, "seconds", None)
        text = super().format(record)
        if seconds is not None:
            text = f"{text}\n" if seconds >= _LONG else ""
        elif record.levelno >= logging.WARNING:
            text = f"{text}\n"
        return f"{_CLEAR}{text}"
