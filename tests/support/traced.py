"""Trace a plain function, without a `Step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ztrans.calling.call import BoundCall, StepFunction
from ztrans.tracing import trace as tracing
from ztrans.tracing.recording import Recording


def trace(fn: Callable, state: Any, *batch: Any, **options: Any) -> Recording:
    """The program of `fn(state, *batch)`."""
    return tracing.trace(fn, BoundCall(state, batch), StepFunction(fn), **options)
