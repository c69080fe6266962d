"""psum quotients: warn of a loss that is divided by a `psum`, whose mean over the ranks is too small.

    loss = loss_sum / zt.psum(count)       the mean of this over n ranks is 1/n of the mean over all samples
    loss = zt.global_mean(loss_sum, count)

Gradients and scalar outputs are averaged over the ranks. So the quotient is right only if it is summed afterwards, or
multiplied by the number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..ir.graph import Eqn, Graph, Var, producers, users
from ..ir.op_facts import is_view_or_cast, op_facts
from ..ir.relations import reachable
from ..ir.source import where
from ..ir.varying import varying
from .sharding.walk import REDUCTIONS

aten = torch.ops.aten


def warn_of_psum_quotients(graph: Graph, axes: Sequence[str]) -> None:
    """Warn of the first quotient whose mean over the ranks is an output, although a `psum` has summed its divisor."""
    ranks, over = math.prod(graph.axes[a] for a in axes), varying(graph, axes)
    makers, read_by = producers(graph.eqns), users(graph)
    averaged = {v for v in graph.outputs[graph.num_state :] if v in over and not v.shape}
    for e in graph.eqns:
        if (
            ranks > 1
            and _divides_by_psum(e, over, makers)
            and not _is_scaled([makers.get(e.args[0])], ranks)
        ):
            after = list(_linear([e], read_by))
            is_averaged = any(
                REDUCTIONS.get(x.op) == "mean" or not averaged.isdisjoint(x.results) for x in after
            )
            if is_averaged and not _is_scaled(after, ranks):
                warnings.warn(
                    f"shard_params: {graph.name} divides a value of this rank, {e.args[0]}, by a psum. Gradients and "
                    f"scalar outputs are averaged over the ranks, so this is 1/{ranks} of the mean over all samples.\n"
                    f"  at {where(e.source)}\n"
                    f"Use zt.global_mean(sum, count), which is the mean over the samples of all ranks.",
                    stacklevel=2,
                )
                return


def _divides_by_psum(e: Eqn, over: Mapping[Var, object], makers: Mapping[Var, Eqn]) -> bool:
    """Whether an equation divides a value that varies by one that was computed from a `psum` alone."""
    if e.op is not aten.div.Tensor or not all(isinstance(x, Var) for x in e.args):
        return False
    value, divisor = e.args
    before = lambda x: [makers[v] for v in x.ins if v in makers and v not in over]
    is_sum = divisor not in over and not divisor.shape and divisor in makers
    return (
        value in over
        and is_sum
        and any(REDUCTIONS.get(x.op) == "sum" for x in reachable([makers[divisor]], before))
    )


def _linear(eqns: Iterable[Eqn], read_by: Mapping[Var, list[Eqn]]) -> Iterator[Eqn]:
    """The equations of forward whose results are multiples of those of `eqns`."""
    readers = lambda e: [r for v in e.results for r in read_by.get(v, ()) if r.region != "backward"]
    follows = lambda e: (
        REDUCTIONS.get(e.op) == "mean" or op_facts(e.op).linear or is_view_or_cast(e)
    )
    return reachable(eqns, lambda e: [r for r in readers(e) if follows(r)])


def _is_scaled(eqns: Iterable[Eqn | None], ranks: int) -> bool:
    """Whether one of the equations multiplies by the number of ranks."""
    return any(e is not None and e.op is aten.mul.Tensor and ranks in e.args for e in eqns)
