"""User source lines: which frame of the stack is the user's, and how it prints.

A line of a program is worth reading only when it says where it came from. The user's frame is
the innermost one outside torch, the standard library and ztrans.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from dataclasses import dataclass

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # ztrans; ops, a link in it, lies beside it
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        os.path.dirname(torch.__file__),
        sysconfig.get_path("stdlib"),
        _PACKAGE,
        os.path.join(os.path.dirname(_PACKAGE), "ops"),
    )
)


@dataclass(frozen=True)
class Source:
    """A line of the user's program.

    >>> str(Source("/home/me/train.py", 12, "loss_fn"))
    'train.py:12 loss_fn'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"

    @property
    def where(self) -> str:
        """The line as error messages give it, with the whole path."""
        return f"{self.file}:{self.line} in {self.function}"


def where(source: Source | None, otherwise: str = "an unknown line") -> str:
    """A line as error messages give it, if it is known."""
    return source.where if source else otherwise


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file of code is torch's, the standard library's, ours, or was installed."""
    installed = "site-packages" in file or "dist-packages" in file
    return installed or (not file.startswith("<") and os.path.realpath(file).startswith(_LIBRARIES))


def is_users(file: str) -> bool:
    """Whether a file of code is the user's; code without a file, which something has generated, is nobody's."""
    return not file.startswith("<") and not is_library(file)


def user_source(depth: int = 1) -> Source | None:
    """The innermost user frame at or above `depth`; None when the call did not start in user code."""
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, re.sub(r"\.<\w+>", "", code.co_qualname))
        frame = frame.f_back
    return None
