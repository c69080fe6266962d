"""Reduce gradients while the backward pass continues.

The transform only writes hints: the equations that may move, and limits on their moves. A plan moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..ir.collectives import role, rules
from ..ir.dependencies import reachable
from ..ir.graph import Eqn, Graph, Move, Var, used_once, users
from ..ir.marks import ACCUMULATE
from ..ir.op_facts import ADD, SCALES, is_view_or_cast
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter
from .base import Transform, byte_count, check_number, constructor

# Gradients, the user's means of them, and new state that varies over the ranks, such as the statistics of a batch norm.
_REDUCED = ("grad", "pmean", "state")
_SUMS = (ADD, ACCUMULATE)


@constructor
def overlap_grads(
    *,
    bucket: int | float | Literal["auto"] = "auto",
    max_matmuls_between: int | None = 8,
    max_in_flight: int | float | None = None,
    update: Literal["eager", "last"] = "eager",
) -> Transform:
    """Reduce gradients in buckets, each as soon as its gradients are computed, and update parameters during backward.

    The views, casts and sums of micro-batches between a gradient's matmul and its reduction move with the reduction.
    Otherwise a program that casts all its parameters at the start of the loss would start every reduction at the very
    end of backward, where autograd computes the gradients of these casts. A bucket starts when its last member is
    computed. Its wait moves to the point where the reduction is complete, and the update of its parameters then runs
    while backward continues. If memory allows, several buckets are waited for at one point, and their updates share
    kernel launches. New state that varies over the ranks, such as the statistics of a batch norm, is reduced in buckets
    as well.

    Rewrites:
        g0 = mm(x, dy)                          g0 = mm(x, dy); g1 = cast(t(g0))
        ...rest of backward...                  h0 = mm(y, dz)
        g1 = cast(t(g0))                 -->    f, e = reduce_scatter([g1, h0])
        f = reduce_scatter([g1])                ...rest of backward...
        g = wait(f); w1 = update(w, g)          g = wait(f); w1 = update(w, g)
        e = reduce_scatter([h0]); h = wait(e)   h = wait(e)

    Args:
        bucket: the greatest size of a bucket in bytes. "auto" weighs the link's latency against the time lost by
            waiting for the last member. 0 reduces each gradient alone.
        max_matmuls_between: the greatest number of matmuls between the starts of two reductions, or between the first
            gradient and the first start, while a gradient is ready to be sent. None sets no limit.
        max_in_flight: the greatest size in bytes of all gradients whose reduction has started but was not yet waited
            for. If the largest gradient is larger, its size is the limit. An unreduced gradient is freed at its wait.
            None leaves only the limit of the whole step.
        update: "eager" updates the parameters of a bucket where it is waited for, unless the update depends on all
            gradients, for instance by a global norm. "last" writes the state only when every reduction of the step is
            complete. A step that fails before then leaves the old state unchanged, but "last" takes more memory and
            overlaps less. On one rank, where nothing is reduced, "eager" runs updates during backward as soon as their
            gradients add up to a bucket, by default 32 MiB, unless that takes more memory.

    A step without gradients, such as an evaluation, has nothing to overlap: its program does not change.

    Raises: ValueError if the program is not sharded: apply shard_params first.

    Source: Li et al., PyTorch Distributed, 2020; XLA's latency-hiding scheduler; AutoParallel #481.

    >>> overlap_grads(bucket=25 << 20)
    overlap_grads(bucket=26214400)
    """
    in_flight = byte_count("overlap_grads: max_in_flight", max_in_flight, 0, None)
    bucket_bytes = byte_count("overlap_grads: bucket", bucket, 0, "auto")
    between = "overlap_grads: max_matmuls_between"
    check_number(between, max_matmuls_between, "a number of matmuls, at least 1", 1, None)
    if update not in ("eager", "last"):
        raise ValueError(f"overlap_grads: update={update!r}; use 'eager' or 'last'.")
    return _OverlapGrads(bucket_bytes, max_matmuls_between, in_flight, update)


@dataclass(frozen=True)
class _OverlapGrads(Transform):
    bucket: int | str = "auto"
    max_matmuls_between: int | None = 8
    max_in_flight: int | None = None
    update: Literal["eager", "last"] = "eager"

    def rewrite(self, graph: Graph) -> Graph:
        starts = [e for e in graph.eqns if role(e) in _REDUCED]
        if not starts and not graph.mesh:
            raise ValueError(
                "overlap_grads: the program is not sharded, so it has no gradient reductions to overlap.\n"
                "Apply shard_params first: it must be the innermost decorator, or the first in zt.chain."
            )
        makers = used_once(graph)
        moves: dict[Eqn, Move] = dict.fromkeys(starts, "reduce")
        for start in starts:
            for v in start.ins:
                moves.update(dict.fromkeys(_preparation(v, makers), "birth"))
        new = Rewriter(graph)
        for e, hint in moves.items():
            new.replace(e, e.replace(hint=hint))
        readers = users(graph)
        for wait, awaited in pair(graph).waits.items():
            axis = awaited.start.kwargs["axis"]
            if awaited.start not in moves or graph.axes[axis] == 1:
                continue
            # The wait moves down, to the update. So does the sum of its values over micro-batches.
            for e in readers.get(wait.out, ()):
                if rules(e).over_all_micro_batches and e.out in readers:
                    new.drop(e)
                    new.insert_before(readers[e.out][0], e.replace(region="update", hint=None))
        return new.applied().with_hints(
            reductions_in_flight=self.max_in_flight,
            bucket=self.bucket if isinstance(self.bucket, int) else None,
            matmuls_between=self.max_matmuls_between,
            update=self.update,
        )


def _preparation(v: Var, makers: Mapping[Var, Eqn]) -> Iterator[Eqn]:
    """The views, casts, sums and scales between the matmul of a gradient and `v`.

    `makers` has the values with one reader only: a value with other readers stays in its place.
    """

    def makers_of(values: Iterable[Var]) -> list[Eqn]:
        eqns = [makers[x] for x in values if x in makers]
        return [e for e in eqns if is_view_or_cast(e) or e.op in _SUMS or e.op in SCALES]

    # Not recursive: a parameter with a thousand uses has a chain of a thousand sums.
    return reachable(makers_of([v]), lambda e: makers_of(e.ins))
