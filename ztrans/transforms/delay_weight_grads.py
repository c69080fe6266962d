"""delay_weight_grads: compute weight gradients while the step's own collectives are under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..ir.graph import Eqn, Graph, Var, producers, users
from ..ir.marks import GRADIENT
from ..ir.op_facts import is_matmul, is_random, is_view_or_cast
from ..ir.relations import needed, reachable
from ..ir.user_collectives import is_users, is_wait
from .base import Transform, check_number, constructor


@constructor
def delay_weight_grads(*, most: int = 4) -> Transform:
    """Let matmuls of weight gradients run while a collective that the step's own backward calls is under way.

    Autograd computes a layer's weight gradients before, or between, the gradients of its inputs. Tensor parallelism
    sums the gradients of inputs over ranks, and the equations that read the sum wait for it. This transform moves
    matmuls that such a collective does not depend on between its start and its wait: the last `most` before it. Views
    and casts of their results move with them, and so do equations whose results only they read. Collectives keep their
    order. The inputs of the moved matmuls live longer.

    Rewrites:
        dw = mm(t(x), dy)                       dx = mm(dy, t(w))
        dx = mm(dy, t(w))                       s = all_reduce(dx, tp)
        s = all_reduce(dx, tp)           -->    dw = mm(t(x), dy)
        y = wait_tensor(s)                      y = wait_tensor(s)

    Args:
        most: the greatest number of matmuls that move behind the start of one collective.

    Raises: ValueError if `most` is below 1.

    Source: Megatron-LM's asynchronous all-reduce of input gradients; Qi et al., "Zero bubble pipeline
    parallelism", 2023, which separates the two halves of backward.

    >>> delay_weight_grads(most=2)
    delay_weight_grads(most=2)
    """
    check_number("delay_weight_grads: most", most, "a number of matmuls, at least 1", 1)
    return _DelayWeightGrads(most)


@dataclass(frozen=True, repr=False)
class _DelayWeightGrads(Transform):
    most: int = 4

    phase: ClassVar[int] = 1

    def rewrite(self, graph: Graph) -> Graph:
        used = users(graph)
        eqns: list[Eqn] = []
        since: list[Eqn] = []  # the equations after the last collective of the user
        for e in graph.eqns:
            if not is_users(e):
                since.append(e)
                continue
            later = self._later(e, since, used) if e.region == "backward" and not is_wait(e) else ()
            eqns += [*(x for x in since if x not in later), e, *(x for x in since if x in later)]
            since = []
        return graph.replace(eqns=(*eqns, *since))

    def _later(self, collective: Eqn, since: Sequence[Eqn], used: dict[Var, list[Eqn]]) -> set[Eqn]:
        """The equations that move behind a collective, of those between it and the one before it, `since`."""
        among, before = set(since), needed([collective], producers(since))
        delayed, matmuls = set[Eqn](), 0
        for e in reversed(since):
            if e in before or e.region != "backward" or is_random(e.op):
                continue
            if not is_matmul(e):
                readers = {x for v in e.results for x in used.get(v, ())}
                delayed |= {e} if readers and readers <= delayed else set()
            elif matmuls < self.most and all(map(_prepares, after := _after(e, among, used))):
                delayed |= {e, *after}
                matmuls += 1
        return delayed


def _prepares(e: Eqn) -> bool:
    return is_view_or_cast(e) or e.op is GRADIENT


def _after(e: Eqn, among: set[Eqn], used: dict[Var, list[Eqn]]) -> set[Eqn]:
    """The equations of `among` that depend on `e`."""
    readers = lambda e: [x for v in e.results for x in used.get(v, ()) if x in among]
    return set(reachable(readers(e), readers))
