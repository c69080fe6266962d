"""Start the gathers of parameters before the parameters are needed.

The transform only writes hints: the gathers that may move, and limits on their moves. A plan moves them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..ir.collectives import role, rules
from ..ir.graph import Graph
from .base import Transform, byte_count, constructor


@constructor
def prefetch(
    *,
    memory: int | float | Literal["auto"] = "auto",
    max_in_flight: int | float | None = None,
    across_steps: bool = False,
) -> Transform:
    """Gather parameters in buckets, each just early enough to hide the transfer, within a memory budget.

    With `shard_params(reshard="auto")`, a gathered parameter also stays in memory from forward to backward if that
    saves time and the budget allows it. Its second gather is then dropped. If the cluster has several hosts
    (`by_host`), the ranks of a host may also keep it in parts, and gather it again among themselves.

    Rewrites:
        w1 = wait(all_gather([s1])); y = f(w1)         a, b = all_gather([s1, s2])
        w2 = wait(all_gather([s2])); z = g(y, w2) -->  w1 = wait(a); y = f(w1)
                                                       w2 = wait(b); z = g(y, w2)

    Args:
        memory: the greatest number of bytes that may be live on a rank, a hard limit on the whole step. "auto" is the
            memory of the device less its reserve, `Device.limit`. On CPUs, whose memory is shared with everything
            else on the host, it is 5% more than the unscheduled program needs, or the need of the order with one
            message at a time if that is larger.
        max_in_flight: the greatest number of bytes in gathers that have started but were not yet waited for. If the
            largest parameter is larger, its size is the limit.
        across_steps: start the first gathers of a step in the update of the step before, as soon as their parameters
            are written. The program takes them as inputs, and returns the gathers of the next step. A call with
            another state, or with a state that has changed since, starts them again. See docs/across-steps.md.

    Raises: ValueError if an option is not a number of bytes. When the program is lowered, ValueError if it needs more
        memory than the limit in every order, or has micro-batches and `across_steps`.

    Source: FSDP2's forward and backward prefetch, and its `FSDPModule.unshard(async_op=True)`, which a loop may call
        before forward; DeepCompile's prefetch and selective gather, 2025.

    >>> prefetch(max_in_flight=64 << 20)
    prefetch(max_in_flight=67108864)
    """
    limit = byte_count("prefetch: memory", memory, 1, "auto")
    in_flight = byte_count("prefetch: max_in_flight", max_in_flight, 0, None)
    if not isinstance(across_steps, bool):
        raise TypeError(f"prefetch: across_steps={across_steps!r}; it is True or False.")
    return _Prefetch(limit, in_flight, across_steps)


@dataclass(frozen=True)
class _Prefetch(Transform):
    memory: int | str = "auto"
    max_in_flight: int | None = None
    across_steps: bool = False

    @property
    def memory_limit(self) -> int | None:
        return self.memory if isinstance(self.memory, int) else None

    def within(self, limit: int) -> Transform:
        return dataclasses.replace(self, memory=limit)

    def rewrite(self, graph: Graph) -> Graph:
        if self.across_steps and graph.micro > 1:
            raise ValueError(
                f"prefetch: across_steps=True, and {graph.name} has {graph.micro} micro-batches, each of which gathers "
                f"parameters. Only the first of them could begin with gathers that the step before has started.\n"
                f"Leave out accumulate, or across_steps."
            )
        eqns = []
        for e in graph.eqns:
            is_gather = role(e) == "param" and rules(e).moves
            eqns.append(e.replace(hint="gather") if is_gather else e)
        return graph.replace(eqns=tuple(eqns)).with_hints(
            gathers_in_flight=self.max_in_flight, across_steps=self.across_steps
        )
