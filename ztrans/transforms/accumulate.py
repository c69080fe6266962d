"""accumulate: run a step in micro-batches, whose gradients are averaged before the update.

The program is written for one micro-batch. Marks say which of its values are summed or joined over all micro-batches;
`ir.micro_batches` says how such a program runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..ir.collectives import role, rules
from ..ir.graph import Eqn, Graph, Names, Order, Var, substitute, users, variables
from ..ir.marks import ACCUMULATE, JOIN, KEEP
from ..ir.pairing import pair
from ..ir.source import Source, where
from .base import Transform, check_number, constructor
from .edits import Edits, widened
from .micro_roles import Gradient, Roles

aten = torch.ops.aten
_COUNT = "Return a mean, such as an accuracy, as a float; or the values of the samples, to be summed after the step."


@constructor
def accumulate(micro: int, *, keep: Literal["whole", "shard", "auto"] = "auto") -> Transform:
    """Run a step in micro-batches: their gradients are averaged, and the update runs once.

    Each leaf of the batch is cut along dim 0 into `micro` equal parts, one for each micro-batch. Numbers and scalars
    are passed to all of them. Scalar outputs are averaged; other outputs are joined along dim 0. The step is traced for
    one micro-batch, so the length of the program does not depend on their number. The reductions of the last
    micro-batch overlap with its backward, as without micro-batches. The transform may stand anywhere in a chain.

    A leaf of the state that depends on the batch itself, such as a running mean of batch norm, changes with every
    micro-batch. A count that does not depend on the batch changes once a step. In the step `len(x)` is the size of one
    micro-batch.

    Rewrites:
        g = wait(reduce_scatter(g0, mean))         s = accumulate(g0)
        w1 = update(w, g)                    -->   g = div(wait(reduce_scatter(s, mean)), micro); w1 = update(w, g)

    Args:
        micro: the number of micro-batches.
        keep: what is kept between micro-batches. "whole" keeps the sum of whole gradients, which is reduced once.
            "shard" reduces the gradients of each micro-batch, and keeps the sum of their shards. "auto" is "whole" at
            stages 0 and 1, and "shard" at stages 2 and 3.

    Raises: ValueError if an option is unknown. When the step is traced, ValueError if a leaf of the batch cannot be
        cut. When it is lowered, ValueError if something other than gradients and scalars of a micro-batch enters the
        update, or parameters are updated before the last backward.

    Source: PyTorch's `no_sync` and FSDP2's `set_requires_gradient_sync`; optax.MultiSteps.

    >>> accumulate(4)
    accumulate(micro=4)
    """
    check_number("accumulate: micro", micro, "the number of micro-batches, at least 1", 1)
    if keep not in ("whole", "shard", "auto"):
        raise ValueError(f"accumulate: keep={keep!r}; use 'whole', 'shard' or 'auto'.")
    return _Accumulate(micro, keep)


@dataclass(frozen=True, repr=False)
class _Accumulate(Transform):
    phase: ClassVar[int] = 3

    micro: int
    keep: Literal["whole", "shard", "auto"] = "auto"

    @property
    def micro_batches(self) -> int:
        return self.micro

    def rewrite(self, graph: Graph) -> Graph:
        if self.micro == 1:
            return graph
        stage = graph.stage or 0
        keep = ("whole" if stage <= 1 else "shard") if self.keep == "auto" else self.keep
        marking = _Marking(graph.replace(micro=self.micro), keep == "whole")
        return marking.run(kept=stage in (1, 2))


class _Marking:
    """Write the marks of a program: `edits` holds the new equations, and what others then read."""

    def __init__(self, graph: Graph, whole: bool) -> None:
        self.graph, self.whole, self.roles, self.edits = graph, whole, Roles(graph), Edits(graph)
        self.names = Names(v.name for v in (*graph.inputs, *self.roles.makers))
        self.readers = users(graph)

    def run(self, kept: bool) -> Graph:
        """The program with marks; with `kept`, parameters are gathered once for all micro-batches."""
        self.roles.check_state()
        n = self.graph.num_state
        returned = [v for v in variables(self.graph.outputs[n:]) if v in self.roles.changes]
        over_all = {v: self.over_all(v) for v in dict.fromkeys((*self.roles.entering, *returned))}
        self.keep_gathered(kept)
        results = substitute(self.graph.outputs[n:], lambda v: over_all.get(v, v))
        return self.edits.applied().replace(outputs=(*self.graph.outputs[:n], *results))

    def over_all(self, v: Var) -> Var:
        """The value over all micro-batches that the update reads, or the step returns, in place of `v`."""
        readers = self.roles.entering.get(v, [])
        at = readers[0] if readers else None
        is_float = v.dtype.is_floating_point or v.dtype.is_complex
        if v in self.roles.gradients:
            total = self.sum_of_gradient(v, self.roles.gradients[v], at)
        elif not v.shape and is_float:
            total = self.new(v, "sum")
            self.edits.before(at, self.eqn(ACCUMULATE, (v,), total, at))
        elif not v.shape or readers:
            raise self.not_averaged(v, at)
        else:
            joined = self.new(v, "joined", shape=(v.shape[0] * self.graph.micro, *v.shape[1:]))
            self.edits.before(at, self.eqn(JOIN, (v,), joined, at))
            return joined
        mean = self.new(v, "mean")
        self.edits.before(at, self.eqn(aten.div.Tensor, (total, self.graph.micro), mean, at))
        self.edits.read(readers, v, mean)
        return mean

    def sum_of_gradient(self, v: Var, gradient: Gradient, at: Eqn | None) -> Var:
        """Sum a gradient over micro-batches, before its reduction or behind it, and return the reduced sum."""
        start, after = gradient.start, self.roles.entering.get(v, [])
        if start is not None and self.whole and len(self.readers.get(v, ())) == len(after):
            self.sum_whole(v, gradient.term, start, gradient.planned)
            return v
        term, total = gradient.term if start is None else v, self.new(v, "sum")
        maker, add = self.roles.makers.get(term), self.eqn(ACCUMULATE, (term,), total, at)
        if gradient.planned or maker is None:  # a plan moves it behind the wait
            self.edits.before(at, add)
        else:
            self.edits.after(maker, add.replace(region=maker.region))
        return total

    def sum_whole(self, v: Var, term: Var, start: Eqn, planned: bool) -> None:
        """Sum a gradient before its reduction, in the dtype of the result: only the sum is rounded when it is sent."""
        there = start.replace(kwargs={}, provenance=None, order=Order("birth") if planned else None)
        total = dataclasses.replace(term, name=self.names.fresh(f"{v.name}.sum"), dtype=v.dtype)
        self.edits.read([start], term, total)
        cast, term = widened(term, v.dtype, self.names.fresh(f"{term.name}.wide"), there)
        self.edits.before(start, *cast, there.replace(op=ACCUMULATE, args=(term,), outs=(total,)))

    def keep_gathered(self, whole: bool) -> None:
        """Mark what only the first micro-batch computes: maxima of parameters, and if `whole`, gathered parameters."""
        for e, waited in pair(self.graph).waits.items():
            of_param = role(waited.start) == "param" and e.out not in self.roles.changes
            if of_param and (whole or not rules(waited.start).moves):
                value = self.new(e.out, "kept")
                self.edits.after(e, e.replace(op=KEEP, args=(e.out,), outs=(value,)))
                self.edits.read(self.readers.get(e.out, ()), e.out, value)

    def new(self, v: Var, kind: str, **changes: Any) -> Var:
        """A value like `v`, with a name that says its kind."""
        return dataclasses.replace(v, name=self.names.fresh(f"{v.name}.{kind}"), **changes)

    def eqn(self, op: Any, args: tuple, out: Var, at: Eqn | None) -> Eqn:
        """An equation of the update, with the line of the equation that reads its result."""
        return Eqn(
            op, args, (out,), region="update", source=at.source if at else self.source(args[0])
        )

    def source(self, v: Var) -> Source | None:
        maker = self.roles.makers.get(v)
        return maker.source if maker else None

    def not_averaged(self, v: Var, reader: Eqn | None) -> ValueError:
        reads = "the update reads" if reader else "the step returns"
        kind = "no gradient" if v.shape else "a scalar that is no float"
        correct = (
            "Compute what the update needs of it before the last backward." if v.shape else _COUNT
        )
        return ValueError(
            f"accumulate: {reads} {v}, which differs from micro-batch to micro-batch and is {kind}: it has no mean.\n"
            f"  at {where(reader.source if reader else self.source(v), 'the step arguments')}\n"
            f"Gradients, values of zt.pmean and float scalars are averaged, other outputs are joined along dim 0. "
            f"{correct}"
        )
