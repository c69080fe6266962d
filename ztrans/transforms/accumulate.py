"""accumulate: run a step in micro-batches, whose gradients are averaged before the update.

The program is written for one micro-batch. Marks say which of its values are summed or joined over all micro-batches;
`ir.micro_batches` says how such a program runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import ACCUMULATE, JOIN, KEEP, pair
from ..ir.graph import Eqn, Graph, Names, Order, Var, substitute, users, variables
from ..ir.source import Source, where
from .base import Transform, check_number
from .micro_roles import Gradient, Roles

aten = torch.ops.aten
_CAST = aten._to_copy.default


def accumulate(micro: int, *, keep: Literal["whole", "shard", "auto"] = "auto") -> Transform:
    """Run a step in micro-batches: their gradients are averaged, and the update runs once.

    Each leaf of the batch is cut along dim 0 into `micro` equal parts, one for each micro-batch. Numbers and scalars are
    passed to all of them. Scalar outputs are averaged; other outputs are joined along dim 0. The step is traced for one
    micro-batch, so the length of the program does not depend on their number. The reductions of the last micro-batch
    overlap with its backward, as without micro-batches.

    A leaf of the state that depends on the batch itself, such as a running mean of batch norm, changes with every
    micro-batch. A count that does not depend on the batch changes once a step.

    Rewrites:
        g = wait(reduce_scatter(g0, mean))         s = accumulate(g0)
        w1 = update(w, g)                    -->   g = div(wait(reduce_scatter(s, mean)), micro); w1 = update(w, g)

    Args:
        micro: the number of micro-batches.
        keep: what is kept between micro-batches. "whole" keeps the sum of whole gradients, which is reduced once.
            "shard" reduces the gradients of each micro-batch, and keeps the sum of their shards. "auto" is "whole" at
            stages 0 and 1, and "shard" at stages 2 and 3.

    Raises: ValueError if an option is unknown. When the step is traced, ValueError if a leaf of the batch cannot be cut.
        When it is lowered, ValueError if something other than gradients and scalars of a micro-batch enters the update,
        or parameters are updated before the last backward.

    >>> accumulate(4)
    accumulate(micro=4)
    """
    check_number("accumulate: micro", micro, "the number of micro-batches, at least 1", 1)
    if keep not in ("whole", "shard", "auto"):
        raise ValueError(f"accumulate: keep={keep!r}; use 'whole', 'shard' or 'auto'.")
    return _Accumulate(micro, keep)


@dataclass(frozen=True, repr=False)
class _Accumulate(Transform):
    turn: ClassVar[int] = 3

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
    """Write the marks of a program: new equations, and what other equations then read in place of a value."""

    def __init__(self, graph: Graph, whole: bool) -> None:
        self.graph, self.whole, self.roles = graph, whole, Roles(graph)
        self.names = Names([v.name for v in graph.inputs] + [o.name for e in graph.eqns for o in e.results])
        self.readers = users(graph)
        self.before: dict[Eqn | None, list[Eqn]] = {}  # by the equation that they precede; None is the end
        self.after: dict[Eqn, list[Eqn]] = {}  # by the equation that they follow
        self.instead: dict[Eqn, dict[Var, Var]] = {}

    def run(self, kept: bool) -> Graph:
        """The program with marks; with `kept`, parameters are gathered once for all micro-batches."""
        self.roles.check_state()
        results = self.graph.outputs[self.graph.num_state :]
        returned = [v for v in variables(results) if v in self.roles.changes]
        over_all = {v: self.over_all(v) for v in dict.fromkeys((*self.roles.entering, *returned))}
        if kept:
            self.keep_gathered()
        outputs = (*self.graph.outputs[: self.graph.num_state], *substitute(results, lambda v: over_all.get(v, v)))
        return self.graph.replace(eqns=tuple(self.written()), outputs=outputs)

    def written(self) -> list[Eqn]:
        """The equations of the program with the new ones among them."""
        eqns: list[Eqn] = []
        for e in self.graph.eqns:
            eqns += self.before.get(e, ())
            instead = self.instead.get(e)
            if instead is None:
                eqns.append(e)
            else:
                args, kwargs = (substitute(x, lambda v: instead.get(v, v)) for x in (e.args, e.kwargs))
                eqns.append(e.replace(args=args, kwargs=kwargs))
            eqns += self.after.get(e, ())
        return [*eqns, *self.before.get(None, ())]

    def read_instead(self, readers: Sequence[Eqn], v: Var, new: Var) -> None:
        """Let `readers` read `new` in place of `v`."""
        for e in readers:
            self.instead.setdefault(e, {})[v] = new

    def new(self, v: Var, kind: str, **changes: object) -> Var:
        """A value like `v`, with a name that says its kind."""
        return dataclasses.replace(v, name=self.names.fresh(f"{v.name}.{kind}"), **changes)

    # ---- values over all micro-batches

    def over_all(self, v: Var) -> Var:
        """The value over all micro-batches that the update reads, or the step returns, in place of `v`."""
        readers = self.roles.entering.get(v, [])
        if v in self.roles.gradients:
            return self.gradient(v, self.roles.gradients[v], readers)
        at = readers[0] if readers else None
        if not v.shape and (v.dtype.is_floating_point or v.dtype.is_complex):
            total, mean = self.new(v, "sum"), self.new(v, "mean")
            self.before.setdefault(at, []).extend((self.sum(v, total, at), self.mean(total, mean, at)))
            self.read_instead(readers, v, mean)
            return mean
        if not v.shape or readers:
            raise self.not_averaged(v, at)
        joined = self.new(v, "joined", shape=(v.shape[0] * self.graph.micro, *v.shape[1:]))
        self.before.setdefault(None, []).append(Eqn(JOIN, (v,), (joined,), {}, "update", self.source(v)))
        return joined

    def gradient(self, v: Var, gradient: Gradient, readers: Sequence[Eqn]) -> Var:
        """The mean of a gradient. It is summed before its reduction or behind it."""
        at, mean = readers[0] if readers else None, self.new(v, "mean")
        self.read_instead(readers, v, mean)
        if gradient.start is not None and self.whole and len(self.readers.get(v, ())) == len(readers):
            self.sum_whole(v, gradient, gradient.start)
            self.before.setdefault(at, []).append(self.mean(v, mean, at))
            return mean
        term, total = gradient.term if gradient.start is None else v, self.new(v, "sum")
        add, maker = self.sum(term, total, at), self.roles.makers.get(term)
        if gradient.planned or maker is None:  # a plan moves it behind the wait
            self.before.setdefault(at, []).append(add)
        else:
            self.after.setdefault(maker, []).append(add.replace(region=maker.region))
        self.before.setdefault(at, []).append(self.mean(total, mean, at))
        return mean

    def sum_whole(self, v: Var, gradient: Gradient, start: Eqn) -> None:
        """Sum a gradient before its reduction, in the dtype of the result: only the sum is rounded when it is sent."""
        term, order = gradient.term, Order("birth") if gradient.planned else None
        how = {"region": start.region, "source": start.source, "order": order}
        if term.dtype != v.dtype:
            wide = self.new(term, "wide", dtype=v.dtype)
            self.before.setdefault(start, []).append(Eqn(_CAST, (term,), (wide,), {"dtype": v.dtype}, **how))
            self.read_instead([start], term, wide)
            term = wide
        total = dataclasses.replace(term, name=self.names.fresh(f"{v.name}.sum"))
        self.before.setdefault(start, []).append(Eqn(ACCUMULATE, (term,), (total,), {}, **how))
        self.read_instead([start], gradient.term, total)

    def sum(self, v: Var, total: Var, at: Eqn | None) -> Eqn:
        return Eqn(ACCUMULATE, (v,), (total,), {}, "update", at.source if at else self.source(v))

    def mean(self, total: Var, mean: Var, at: Eqn | None) -> Eqn:
        source = at.source if at else self.source(total)
        return Eqn(aten.div.Tensor, (total, self.graph.micro), (mean,), {}, "update", source)

    # ---- parameters

    def keep_gathered(self) -> None:
        """Mark the whole parameters, which the first micro-batch gathers for all."""
        for e, waited in pair(self.graph).waits.items():
            provenance = waited.start.provenance
            if provenance is not None and provenance.role == "param" and e.out not in self.roles.changes:
                whole = self.new(e.out, "kept")
                self.after[e] = [Eqn(KEEP, (e.out,), (whole,), {}, e.region, e.source)]
                self.read_instead(self.readers.get(e.out, ()), e.out, whole)

    # ---- errors

    def source(self, v: Var) -> Source | None:
        maker = self.roles.makers.get(v)
        return maker.source if maker else None

    def not_averaged(self, v: Var, reader: Eqn | None) -> ValueError:
        reads = "the update reads" if reader else "the step returns"
        kind = "a scalar that is no float" if not v.shape else "no gradient"
        return ValueError(
            f"accumulate: {reads} {v}, which differs from micro-batch to micro-batch and is {kind}, so it has no mean.\n"
            f"  at {where(reader.source if reader else self.source(v), 'the step arguments')}\n"
            f"Gradients, values of zt.pmean and float scalars are averaged, and other outputs are joined along dim 0. "
            + ("Make it a float." if not v.shape else "Compute what the update needs of it before the last backward.")
        )
