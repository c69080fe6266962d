"""The bars of a timeline, and the curve of live bytes under them."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Eqn
from ..ir.printer import op_name
from ..ir.wire_format import Coded

COMPUTE = "compute"  # the lane of operations; every other lane has messages
Curve = tuple[tuple[float, int], ...]  # (time, live bytes)


def most_bytes(curve: Curve) -> int:
    """The most bytes that are live at a time."""
    return max((live for _, live in curve), default=0)


@dataclass(frozen=True)
class Event:
    """One bar: an equation on a lane, from `start` for `seconds`. Compute waited for it for `stall` seconds.

    Attributes:
        bytes: the bytes that a message brings.
        arrives: whether it ends in this step. A message for the next step may arrive in that step.
    """

    lane: str
    start: float
    seconds: float
    eqn: Eqn
    stall: float = 0.0
    bytes: int = 0
    arrives: bool = True

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def title(self) -> str:
        """The equation in short: its first result, the number of further results, its operation, its codes."""
        names = [out.base_name for out in self.eqn.results]
        further = f" +{len(names) - 1}" if len(names) > 1 else ""
        wire = self.eqn.kwargs.get("dtype")
        codes = f" as {wire}" if isinstance(wire, Coded) else ""
        return f"{names[0] if names else '_'}{further} = {op_name(self.eqn.op)}{codes}"

    @property
    def source_line(self) -> str:
        """The user's line of the equation, or "" if it is unknown."""
        return str(self.eqn.source or "")
