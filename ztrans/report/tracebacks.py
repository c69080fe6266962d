"""An error ends at the user's line, without the frames of ztrans, torch and the standard library.

The methods that a user calls are decorated with `ends_at_user`. `ZTRANS_TRACEBACK=full` keeps all frames.

Source: JAX's traceback filtering.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from ..ir.source import is_plumbing, is_ztrans

P = ParamSpec("P")
T = TypeVar("T")

_NOTE = "ztrans: the frames of ztrans and torch are left out; ZTRANS_TRACEBACK=full shows them."
# The kinds of errors that ztrans raises for a user's mistake.
_OURS = (TypeError, ValueError, RuntimeError, OSError)


def ends_at_user(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that users call, so that the tracebacks of its errors have no frames of libraries."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get("ZTRANS_TRACEBACK") != "full" and not _is_defect(error):
                for each in _chained(error):
                    each.__traceback__ = _shortened(each.__traceback__)
                if _NOTE not in getattr(error, "__notes__", ()):
                    error.add_note(_NOTE)
            raise  # a bare raise keeps this frame out of the traceback as well

    return wrapper


def _is_defect(error: BaseException) -> bool:
    """Whether an error is a defect of ztrans: one of its own lines raised it, and it is of no kind that ztrans raises.

    All frames of such an error are kept, for a report.
    """
    entries = list(_entries(error.__traceback__))
    if isinstance(error, _OURS) or not entries:
        return False
    return is_ztrans(entries[-1].tb_frame.f_code.co_filename)


def _chained(error: BaseException) -> list[BaseException]:
    """An error, and those that it is raised from or while handling."""
    chain = [error]
    for each in chain:  # which grows meanwhile
        for earlier in (each.__cause__, each.__context__):
            if earlier is not None and not any(earlier is link for link in chain):
                chain.append(earlier)
    return chain


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _shortened(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of libraries. The code of other packages, such as models, is kept."""
    shortened: TracebackType | None = None
    for tb in reversed(list(_entries(traceback))):
        if not is_plumbing(tb.tb_frame):
            shortened = TracebackType(shortened, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return shortened
