"""prefetch: start gathers before they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives import ALL_GATHER
from ..graph import Graph, Order
from .base import Transform


def prefetch(*, max_in_flight: int | None = None) -> Transform:
    """Start each parameter's gather ahead of its use, with a bound on the bytes in flight.

    Rewrites (order only):
        w1 = wait(all_gather(s1)); y = f(w1)           a = all_gather(s1); b = all_gather(s2)
        w2 = wait(all_gather(s2)); z = g(y, w2)  -->   w1 = wait(a); y = f(w1)
                                                       w2 = wait(b); z = g(y, w2)

    Args:
        max_in_flight: bytes of gathers started and not yet waited for (default: twice the largest
            gather). One gather ahead is always allowed.

    Source: FSDP2's forward and backward prefetch; DeepCompile, 2025.

    >>> prefetch(max_in_flight=64 << 20)
    prefetch(max_in_flight=67108864)
    """
    if max_in_flight is not None and (not isinstance(max_in_flight, int) or max_in_flight < 0):
        raise ValueError(f"prefetch: max_in_flight={max_in_flight!r}; it is a number of bytes, or None.")
    return _Prefetch(max_in_flight)


@dataclass(frozen=True, repr=False)
class _Prefetch(Transform):
    max_in_flight: int | None = None

    @property
    def name(self) -> str:
        return "prefetch"

    def rewrite(self, graph: Graph) -> Graph:
        hint = Order("early", self.max_in_flight)
        gathers = {e for e in graph.eqns if e.op is ALL_GATHER and e.provenance.role == "param"}
        return graph.replace(eqns=tuple(e.replace(order=hint) if e in gathers else e for e in graph.eqns))
