"""wait: the value of a future, which is one member of a started collective.

x = wait(f)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..graph import Eqn, Primitive, Var
from .interface import Memberwise


class Wait(Memberwise):
    """Rules of wait. Whether the value shares the storage of its future depends on the start: see `shares_buffer`."""

    waits = True
    reads_futures = True
    remote = True
    strides = "contiguous"

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        if len(eqn.ins) != len(eqn.outs):
            return "a wait has another number of results than of futures"
        wrong = (future for future, out in zip(eqn.ins, eqn.outs) if not _is_value_of(out, future))
        return next((f"wait changes the type of {future}" for future in wrong), None)


def _is_value_of(out: Var | None, future: Var) -> bool:
    if out is None or out.future:
        return False
    return (out.dtype, out.shape, out.layout) == (future.dtype, future.shape, future.layout)


WAIT = Primitive("wait", Wait())


def wait(future: Var, **eqn) -> Eqn:
    """Wait for `future`; its value has the future's name without the quote."""
    out = dataclasses.replace(future, name=future.name.removesuffix("'"), future=False)
    return Eqn(WAIT, (future,), (out,), **eqn)
