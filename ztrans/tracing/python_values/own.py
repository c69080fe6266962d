"""Own: whether a class or a Python module is the user's, so that its attributes are values which a step may read."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...ir.source import is_library

NAMESPACES = (SimpleNamespace, argparse.Namespace)  # classes of the standard library that hold values of the user


def _is_own(kind: Any) -> bool:
    """Whether a class or a Python module is the user's."""
    if isinstance(kind, ModuleType):
        is_plain = type(kind) is ModuleType  # namespaces of operators, such as torch.ops.aten, are not
        return is_plain and not is_library(getattr(kind, "__file__", None) or sys.executable)
    if kind in NAMESPACES:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not is_library(file))


is_own: Callable[[Any], bool] = functools.cache(_is_own)
