"""Compute weight gradients while the step's own collectives are in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from ..ir.dependencies import needed, reachable
from ..ir.graph import Eqn, Graph, Var, producers, users
from ..ir.marks import GRADIENT
from ..ir.op_facts import is_matmul, is_random, is_view_or_cast
from ..ir.rewriter import reordered
from ..ir.user_collectives import is_user_collective, is_user_start
from .base import Transform, check_number, constructor


@constructor
def delay_weight_grads(*, most: int = 4) -> Transform:
    """Run matmuls of weight gradients while a collective of the step's own backward is in flight.

    Autograd computes a layer's weight gradients before, or between, the gradients of its inputs. Tensor parallelism
    sums the gradients of inputs over ranks, and the equations that read the sum wait for it. This transform moves
    matmuls from before such a collective to between its start and its wait: the last `most` that it does not depend on.
    Views and casts of their results move with them, and so do equations whose results only they read. Collectives keep
    their order. The inputs of the moved matmuls live longer.

    Rewrites:
        dw = mm(t(x), dy)                       dx = mm(dy, t(w))
        dx = mm(dy, t(w))                       s = all_reduce(dx, tp)
        s = all_reduce(dx, tp)           -->    dw = mm(t(x), dy)
        y = wait_tensor(s)                      y = wait_tensor(s)

    Args:
        most: the greatest number of matmuls that move after the start of one collective.

    Raises: ValueError if `most` is below 1.

    Source: Megatron-LM's asynchronous all-reduce of input gradients; Qi et al., "Zero bubble pipeline
    parallelism", 2023, which separates the two halves of backward.

    >>> delay_weight_grads(most=2)
    delay_weight_grads(most=2)
    """
    check_number("delay_weight_grads: most", most, "a number of matmuls, at least 1", 1)
    return _DelayWeightGrads(most)


@dataclass(frozen=True)
class _DelayWeightGrads(Transform):
    most: int = 4

    phase: ClassVar[float] = 1

    def rewrite(self, graph: Graph) -> Graph:
        readers = users(graph)
        recent: list[Eqn] = []  # the equations since the last collective of the user
        # A delayed equation has the place of its collective, and comes after it.
        places: dict[Eqn, tuple[int, bool]] = {}
        for i, e in enumerate(graph.eqns):
            places[e] = i, False
            if not is_user_collective(e):
                recent.append(e)
                continue
            if e.region == "backward" and is_user_start(e):
                places.update(dict.fromkeys(self._movable_after(e, recent, readers), (i, True)))
            recent = []
        return reordered(graph, places.__getitem__)

    def _movable_after(
        self, collective: Eqn, recent: Sequence[Eqn], readers: Mapping[Var, Sequence[Eqn]]
    ) -> set[Eqn]:
        """The equations of `recent`, those since the previous collective, that may run after `collective`."""
        prerequisites = needed([collective], producers(recent))
        candidates = set(recent)
        delayed: set[Eqn] = set()
        matmuls = 0
        # From last to first, so that the readers of an equation are decided before the equation itself.
        for e in reversed(recent):
            # Draws stay, so that they keep their order.
            if e.region != "backward" or e in prerequisites or is_random(e):
                continue
            if not is_matmul(e):
                own_readers = _result_readers(e, readers)
                if own_readers and delayed.issuperset(own_readers):
                    delayed.add(e)
            elif matmuls < self.most:
                dependents = _dependents(e, candidates, readers)
                if all(map(_prepares, dependents)):
                    delayed |= {e, *dependents}
                    matmuls += 1
        return delayed


def _result_readers(e: Eqn, readers: Mapping[Var, Sequence[Eqn]]) -> list[Eqn]:
    """The equations that read the results of an equation."""
    eqns: list[Eqn] = []
    for v in e.results:
        eqns += readers.get(v, ())
    return eqns


def _dependents(e: Eqn, candidates: Set[Eqn], readers: Mapping[Var, Sequence[Eqn]]) -> set[Eqn]:
    """The equations of `candidates` that depend on `e`."""

    def next_eqns(x: Eqn) -> list[Eqn]:
        return [reader for reader in _result_readers(x, readers) if reader in candidates]

    return set(reachable(next_eqns(e), next_eqns))


def _prepares(e: Eqn) -> bool:
    """Whether an equation only prepares a gradient for its reduction."""
    return is_view_or_cast(e) or e.op is GRADIENT
