"""Shorten tracebacks to the user's frames, without those of ztrans, torch and the standard library.

The methods that users call are decorated with `ends_at_user`. `ZTRANS_TRACEBACK=full` keeps all frames.

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
# The types of errors that ztrans raises for a user's mistake.
_USER_ERRORS = (TypeError, ValueError, RuntimeError, OSError)


def ends_at_user(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that users call, so that the tracebacks of its errors leave out the frames of libraries."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get("ZTRANS_TRACEBACK") != "full" and not _is_defect(error):
                for link in _chain(error):
                    link.__traceback__ = _shortened(link.__traceback__)
                if _NOTE not in getattr(error, "__notes__", ()):
                    error.add_note(_NOTE)
            raise  # a bare raise keeps this frame out of the traceback as well

    return wrapper


def _is_defect(error: BaseException) -> bool:
    """Whether an error is a defect of ztrans: a line of ztrans raised it, but its type is not one of a user's mistakes.

    Such an error keeps all frames, for a bug report.
    """
    entries = list(_entries(error.__traceback__))
    if isinstance(error, _USER_ERRORS) or not entries:
        return False
    return is_ztrans(entries[-1].tb_frame.f_code.co_filename)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its causes: the errors that it was raised from, or while handling."""
    chain = [error]
    for later in chain:  # the loop also visits the errors that it appends
        for cause in (later.__cause__, later.__context__):
            if cause is not None and not any(cause is link for link in chain):
                chain.append(cause)
    return chain


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _shortened(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of libraries. Code of other packages, such as models, stays."""
    shortened: TracebackType | None = None
    for tb in reversed(list(_entries(traceback))):
        if not is_plumbing(tb.tb_frame):
            shortened = TracebackType(shortened, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return shortened
