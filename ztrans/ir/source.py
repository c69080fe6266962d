"""Find the user's line for an operation, and print it.

The user's frame is the innermost frame on the stack whose code the user wrote. Code of torch, the standard library,
ztrans or an installed package is not the user's, nor is generated code. Code that was typed at a prompt, run in a cell,
or passed to `exec` has no file. Its file name is in angle brackets, like that of generated code; `is_user_frame`
distinguishes the two.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_OPS = os.path.join(os.path.dirname(_PACKAGE), "ops")  # a sibling of ztrans, linked into it
_OURS = (_PACKAGE + os.sep, _OPS + os.sep)
_TORCH = os.path.realpath(os.path.dirname(torch.__file__)) + os.sep
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep

TRACED = "run_traced"  # the function in ztrans.tracing.fx_trace that calls a step to trace it

# File names of code typed at the prompts of Python, IPython, IDLE and `code.interact`, and of code in a doctest.
_TYPED = re.compile(r"<(stdin|console|input|python-input|ipython-input|pyshell|doctest)\b")
# In a terminal, IPython names a cell by its number.
_TERMINAL_CELL = re.compile(r"<ipython-input-(\d+)-")


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

    @staticmethod
    def of(function: Callable) -> Source | None:
        """The line where the definition of a function begins, or None if Python did not compile the function."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            return None
        return Source(code.co_filename, code.co_firstlineno, code.co_qualname)

    @property
    def where(self) -> str:
        """The line as text for an error message, with the whole path."""
        return f"{_cell(self.file) or self.file}:{self.line} in {self.function}"


def where(source: Source | None, otherwise: str = "an unknown line") -> str:
    """A line as text for an error message, or `otherwise` if the line is unknown."""
    return source.where if source else otherwise


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file of code belongs to torch, the standard library, ztrans or an installed package."""
    if _is_installed(file):
        return True
    libraries = (_TORCH, _STANDARD, *_OURS)
    return not file.startswith("<") and os.path.realpath(file).startswith(libraries)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def is_ztrans(file: str) -> bool:
    """Whether a file of code belongs to ztrans itself."""
    return os.path.realpath(file).startswith(_OURS)


def is_user_code(owner: Any) -> bool:
    """Whether a class or a Python module is the user's."""
    if isinstance(owner, ModuleType):
        # Namespaces of operators, such as torch.ops.aten, have a subclass as their type.
        is_plain = type(owner) is ModuleType
        return is_plain and not is_library(getattr(owner, "__file__", None) or sys.executable)
    if owner.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return file is not None and not is_library(file)


def is_plumbing(frame: FrameType) -> bool:
    """Whether a frame runs code of torch, the standard library or ztrans, or generated code.

    Other code belongs to the user or to another installed package, such as a library of models.
    """
    if is_user_frame(frame):
        return False
    file = frame.f_code.co_filename
    is_other_package = not os.path.realpath(file).startswith((_TORCH, *_OURS))
    return not (_is_installed(file) and is_other_package)


def is_user_frame(frame: FrameType) -> bool:
    """Whether the user wrote the code of a frame.

    Code that a library generated (torch.fx, dataclasses, attrs) and frozen modules are not the user's.
    """
    file = frame.f_code.co_filename
    if not file.startswith("<"):
        return not is_library(file)
    return _is_executed(frame) if file == "<string>" else _TYPED.match(file) is not None


def user_source() -> Source | None:
    """The innermost line of the user's code on the stack, or None.

    While a step is traced, only lines of the step count, not the line that started the trace.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == TRACED and is_library(code.co_filename):
            return None
        if is_user_frame(frame):
            function = re.sub(r"\.<\w+>", "", code.co_qualname)
            return Source(code.co_filename, frame.f_lineno, function)
        frame = frame.f_back
    return None


def library_line() -> str:
    """The line of an installed package, such as a library of models, that calls PyTorch, with its text.

    It is empty if the user's own code makes the call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_plumbing(frame):
        frame = frame.f_back
    if frame is None or is_user_frame(frame):
        return ""
    code = frame.f_code
    path = re.split(r"(?:site|dist)-packages.", code.co_filename)[-1]
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{path}:{frame.f_lineno} in {code.co_qualname}: {text}"


def _is_executed(frame: FrameType) -> bool:
    """Whether the user passed this code, named `<string>`, to `exec`.

    If not, `dataclasses`, `namedtuple` or make_fx generated it, or a library runs it with its own global variables.
    """
    # make_fx evaluates a lambda that calls the function `fn`, its only global variable.
    is_lambda = frame.f_code.co_name == "<lambda>"
    is_wrapper = is_lambda and frame.f_globals.keys() == {"fn", "__builtins__"}
    is_dataclass = frame.f_code.co_qualname.startswith("__create_fn__")
    is_namedtuple = frame.f_globals.get("__name__", "").startswith("namedtuple_")
    runner = frame.f_globals.get("__file__") or "<string>"
    return not (is_wrapper or is_dataclass or is_namedtuple or is_library(runner))


def _cell(file: str) -> str:
    """The notebook cell of a file of code, such as `In[5]`; empty for any other file.

    A notebook names each cell after a temporary file; only the running shell of IPython knows the number of the cell.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        name = shell.compile.format_code_name(file)
        if name:
            return name[1]
    in_terminal = _TERMINAL_CELL.match(file)
    return f"In[{in_terminal[1]}]" if in_terminal else ""
