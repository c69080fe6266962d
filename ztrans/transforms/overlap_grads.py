"""overlap_grads: reduce gradients while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..ir.graph import Eqn, Graph, Order, Var, producers, users, variables
from ..ir.operations import is_view_or_cast
from .accumulate import SCALES, SUMS
from .base import Transform


def overlap_grads(
    *,
    bucket: int | Literal["auto"] = "auto",
    max_compute_between: int | None = 8,
    max_in_flight: int | None = None,
    update: Literal["eager", "last"] = "eager",
) -> Transform:
    """Start each gradient's reduction where the gradient is born, in buckets, and update as they come in.

    The views, casts and sums of micro-batches between a gradient's matmul and its reduction move with
    it: a program that casts all its parameters at the top of the loss makes every gradient's cast at
    the very end of backward, and would start every reduction there. A bucket starts when its last member is born;
    its wait sinks until it has come, and the update of its parameters then runs while backward goes on.

    Rewrites:
        g0 = mm(x, dy)                          g0 = mm(x, dy); g1 = cast(t(g0))
        ...rest of backward...                  h0 = mm(y, dz)
        g1 = cast(t(g0))                 -->    f, e = reduce_scatter([g1, h0])
        f = reduce_scatter([g1])                ...rest of backward...
        g = wait(f); w1 = update(w, g)          g = wait(f); w1 = update(w, g)
        e = reduce_scatter([h0]); h = wait(e)   h = wait(e)

    Args:
        bucket: bytes of gradients that one reduction may hold; "auto" weighs the link's latency against
            the time lost by waiting for the last member; 0 reduces each gradient alone.
        max_compute_between: at most so many matmuls run between the starts of two reductions, or from the
            first gradient's birth to the first one, where a gradient is born there; None does not bound them.
        max_in_flight: bytes of gradients whose reduction was started and not yet waited for (default:
            twice the largest). One bucket is always allowed; a gradient in whole dies with its wait.
        update: "eager" updates a bucket's parameters as soon as it is reduced, as far as no global norm
            stands between; "last" writes the state only when every reduction of the step is done, so that a step
            that fails before that leaves the old state whole, at the price of memory and overlap.

    Raises: ValueError when the program has no gradient reductions: apply shard_params first.

    Source: Li et al., PyTorch Distributed, 2020; XLA's latency-hiding scheduler; AutoParallel #481.

    >>> overlap_grads(bucket=25 << 20)
    overlap_grads(bucket=26214400)
    """
    for name, value, other in (("max_in_flight", max_in_flight, None), ("bucket", bucket, "auto")):
        if value != other and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"overlap_grads: {name}={value!r}; it is a number of bytes, or {other!r}.")
    most = max_compute_between
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError(
            f"overlap_grads: max_compute_between={max_compute_between!r}; "
            "it is a number of matmuls, at least 1, or None."
        )
    if update not in ("eager", "last"):
        raise ValueError(f"overlap_grads: update={update!r}; use 'eager' or 'last'.")
    return _OverlapGrads(bucket, max_compute_between, max_in_flight, update)


@dataclass(frozen=True, repr=False)
class _OverlapGrads(Transform):
    bucket: int | str = "auto"
    max_compute_between: int | None = 8
    max_in_flight: int | None = None
    update: str = "eager"

    @property
    def name(self) -> str:
        return "overlap_grads"

    def rewrite(self, graph: Graph) -> Graph:
        made, used = producers(graph.eqns), users(graph)
        starts = [
            e for e in graph.eqns if e.provenance is not None and e.provenance.role in ("grad", "pmean")
        ]
        if not starts:
            raise ValueError(
                "overlap_grads: the program has no gradient reductions to overlap.\n"
                "Apply shard_params first: it must be the innermost decorator, or the first in zt.chain."
            )
        size = None if self.bucket == "auto" else self.bucket
        hint = Order("reduce", self.max_in_flight, size, self.max_compute_between, self.update)
        outputs = set(variables(graph.outputs))
        hints: dict[Eqn, Order] = {}
        for start in starts:
            hints[start] = hint
            for v in start.ins:
                hints.update((e, Order("birth")) for e in _chain(v, made, used, outputs))
        eqns = tuple(e.replace(order=hints[e]) if e in hints else e for e in graph.eqns)
        return graph.replace(eqns=eqns, writes_last=self.update == "last")


def _chain(v: Var, made: dict[Var, Eqn], used: dict[Var, list[Eqn]], outputs: set[Var]) -> Iterator[Eqn]:
    """The views, casts and sums, used nowhere else, that lead from a gradient's birth to `v`."""
    if v in made and v not in outputs and len(used[v]) == 1 and _prepares(made[v]):
        yield made[v]
        for before in made[v].ins:
            yield from _chain(before, made, used, outputs)


def _prepares(e: Eqn) -> bool:
    """Whether an equation takes no time to speak of, and no memory that it does not give back."""
    return is_view_or_cast(e) or e.op in (*SUMS, *SCALES)
