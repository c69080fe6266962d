"""source: the user's line of an operation, and how it prints.

The user's frame is the innermost one on the stack whose code the user wrote: not torch's, not the standard
library's, not ours, not installed, and not generated. Code that the user typed at a prompt, ran in a cell, or passed
to `exec` has no file; Python gives it a name in angle brackets, as it does to generated code, so `is_users` tells
the two apart.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # ztrans; ops, a link in it, is its sibling
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        os.path.dirname(torch.__file__),
        sysconfig.get_path("stdlib"),
        _PACKAGE,
        os.path.join(os.path.dirname(_PACKAGE), "ops"),
    )
)

# Names of code that a person typed: at the prompts of Python, IPython, IDLE and `code.interact`, and in a doctest.
_TYPED = re.compile(r"<(stdin|console|input|python-input|ipython-input|pyshell|doctest)\b")
_TERMINAL_CELL = re.compile(r"<ipython-input-(\d+)-")  # IPython in a terminal puts the number of the cell into the name


@dataclass(frozen=True)
class Source:
    """A line of the user's program.

    >>> str(Source("/home/me/train.py", 12, "loss_fn")), str(Source("<ipython-input-5-0a1b2c3d4e5f>", 3, "step"))
    ('train.py:12 loss_fn', 'In[5]:3 step')
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_cell(self.file) or os.path.basename(self.file)}:{self.line} {self.function}"

    @property
    def where(self) -> str:
        """The line as error messages give it, with the whole path."""
        return f"{_cell(self.file) or self.file}:{self.line} in {self.function}"


def where(source: Source | None, otherwise: str = "an unknown line") -> str:
    """A line as error messages give it, or `otherwise` where it is not known."""
    return source.where if source else otherwise


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file of code is torch's, the standard library's, ours, or was installed."""
    installed = "site-packages" in file or "dist-packages" in file
    return installed or (not file.startswith("<") and os.path.realpath(file).startswith(_LIBRARIES))


def is_users(frame: FrameType) -> bool:
    """Whether the user wrote the code of a frame.

    Code that a library generated (torch.fx, dataclasses, attrs) and frozen modules are not the user's.
    """
    file = frame.f_code.co_filename
    if not file.startswith("<"):
        return not is_library(file)
    return _is_executed(frame) if file == "<string>" else _TYPED.match(file) is not None


def user_source(depth: int = 1) -> Source | None:
    """The innermost line of the user, `depth` frames up or higher; None when no frame is the user's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if is_users(frame):
            code = frame.f_code
            return Source(code.co_filename, frame.f_lineno, re.sub(r"\.<\w+>", "", code.co_qualname))
        frame = frame.f_back
    return None


def _is_executed(frame: FrameType) -> bool:
    """Whether code named `<string>` was passed to `exec` by the user.

    A method that `dataclasses` generates is the exception, and code that a library runs among its own variables.
    """
    generated = frame.f_code.co_qualname.startswith("__create_fn__")
    return not generated and not is_library(frame.f_globals.get("__file__") or "<string>")


def _cell(file: str) -> str:
    """The cell that a file of code is, as `In[5]`; empty for other files.

    A notebook names each cell after a temporary file, so only the running shell of IPython knows its number.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = shell.compile.format_code_name(file) if shell is not None else None
    typed = _TERMINAL_CELL.match(file)
    return named[1] if named else f"In[{typed[1]}]" if typed else ""
