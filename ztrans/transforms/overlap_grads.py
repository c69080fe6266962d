"""overlap_grads: reduce gradients while the backward pass goes on."""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT
from ..graph import Eqn, Graph, Order, Var, is_view_or_cast, producers, users, variables
from .base import Transform


def overlap_grads(*, max_in_flight: int | None = None) -> Transform:
    """Start each gradient's reduction where the gradient is born, and wait for it as late as memory allows.

    The views and casts between a gradient's matmul and its reduction move with it: a program that
    casts all its parameters at the top of the loss makes every gradient's cast at the very end of
    backward, and would start every reduction there.

    Rewrites (order only):
        g0 = mm(x, dy)                          g0 = mm(x, dy)
        ...rest of backward...                  g1 = cast(t(g0)); f = reduce_scatter(g1)
        g1 = cast(t(g0))                 -->    ...rest of backward...
        f = reduce_scatter(g1)                  g = wait(f)
        g = wait(f); w1 = update(w, g)          w1 = update(w, g)

    Args:
        max_in_flight: bytes of gradients whose reduction was started and not yet waited for (default:
            twice the largest). Two reductions are always allowed; a gradient in whole dies with its wait.

    Raises: ValueError when the program has no gradient reductions: apply shard_params first.

    Source: Li et al., PyTorch Distributed, 2020; XLA's latency-hiding scheduler.

    >>> overlap_grads()
    overlap_grads()
    """
    if max_in_flight is not None and (not isinstance(max_in_flight, int) or max_in_flight < 0):
        raise ValueError(f"overlap_grads: max_in_flight={max_in_flight!r}; it is a number of bytes, or None.")
    return _OverlapGrads(max_in_flight)


@dataclass(frozen=True, repr=False)
class _OverlapGrads(Transform):
    max_in_flight: int | None = None

    @property
    def name(self) -> str:
        return "overlap_grads"

    def rewrite(self, graph: Graph) -> Graph:
        made, used = producers(graph.eqns), users(graph)
        starts = [
            e for e in graph.eqns if e.op in (REDUCE_SCATTER, ALL_REDUCE) and e.provenance.role in ("grad", "pmean")
        ]
        if not starts:
            raise ValueError(
                "overlap_grads: the program has no gradient reductions to overlap.\n"
                "Apply shard_params first: it must be the innermost decorator, or the first in zt.chain."
            )
        outputs = set(variables(graph.outputs))
        hints: dict[Eqn, Order] = {}
        for start in starts:
            waits = [u for out in start.outs for u in used[out]]
            if any(made[v].op is WAIT for v in start.ins if v in made):
                continue  # the second reduction of a hierarchy follows the first one's wait
            hints[start] = Order("birth")
            for v in start.ins:
                hints.update((e, Order("birth")) for e in _chain(v, made, used, outputs))
            hints.update((w, Order("use", self.max_in_flight)) for w in waits if not _feeds_start(w, used))
        return graph.replace(eqns=tuple(e.replace(order=hints[e]) if e in hints else e for e in graph.eqns))


def _feeds_start(wait: Eqn, used: dict[Var, list[Eqn]]) -> bool:
    return any(
        u.op in (REDUCE_SCATTER, ALL_REDUCE) and u.provenance.role in ("grad", "pmean")
        for u in used.get(wait.outs[0], ())
    )


def _chain(v: Var, made: dict[Var, Eqn], used: dict[Var, list[Eqn]], outputs: set[Var]) -> list[Eqn]:
    """The views and casts, used nowhere else, that lead from a gradient's birth to `v`."""
    found: list[Eqn] = []
    while v in made and v not in outputs and len(used[v]) == 1 and is_view_or_cast(made[v]):
        found.append(made[v])
        v = made[v].ins[0]
    return found
