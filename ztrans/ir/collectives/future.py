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

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        if len(eqn.ins) != len(eqn.outs):
            return "a wait has another number of results than of futures"
        values = [
            out is not None and not out.future and out.is_like(future)
            for future, out in zip(eqn.ins, eqn.outs)
        ]
        return None if all(values) else f"wait changes the type of {eqn.ins[values.index(False)]}"


WAIT = Primitive("wait", Wait())


def wait(future: Var, **eqn) -> Eqn:
    """Wait for `future`; its value has the future's name without the quote."""
    out = dataclasses.replace(future, name=future.name.removesuffix("'"), future=False)
    return Eqn(WAIT, (future,), (out,), **eqn)
