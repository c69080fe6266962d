"""Run a step in micro-batches, and average their gradients before the update.

The program is written for one micro-batch. Marks say which values are summed or joined over all micro-batches;
`ir.micro_batches` says how such a program runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ..ir.collectives import SHARD, role, rules
from ..ir.dependencies import depending, needed
from ..ir.graph import Eqn, Graph, Move, Var, producers, substitute, users, variables
from ..ir.marks import ACCUMULATE, GRADIENT, JOIN, KEEP, PMEAN
from ..ir.micro_batches import changing
from ..ir.op_facts import CAST
from ..ir.pairing import pair
from ..ir.source import Source, where
from ..ir.varying import varying
from ..rewrites.rewriter import Rewriter
from .base import Transform, check_number, constructor


@constructor
def accumulate(micro: int, *, keep: Literal["whole", "shard", "auto"] = "auto") -> Transform:
    """Run a step in micro-batches: their gradients are averaged, and the update runs once.

    Each leaf of the batch is cut along dim 0 into `micro` equal parts, one for each micro-batch. Every micro-batch gets
    all numbers and scalars. Scalar outputs are averaged; other outputs are joined along dim 0. The step is traced for
    one micro-batch, so the length of the program does not depend on their number. The reductions of the last
    micro-batch overlap with its backward, as without micro-batches. The transform may stand anywhere in a chain.

    A state leaf that depends on the batch itself, such as a running mean of batch norm, changes with every micro-batch.
    A count that does not depend on the batch changes once a step. In the step `len(x)` is the size of one micro-batch.

    Rewrites:
        g = wait(reduce_scatter(g0, mean))         s = accumulate(g0)
        w1 = update(w, g)                    -->   g = div(wait(reduce_scatter(s, mean)), micro); w1 = update(w, g)

    Args:
        micro: the number of micro-batches.
        keep: the sum that stays in memory between micro-batches. "whole" sums whole gradients, and reduces them once.
            "shard" reduces the gradients of each micro-batch, and sums their shards. "auto" is "whole" at stages 0
            and 1, and "shard" at stages 2 and 3.

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
        self._refuse_across_steps(graph)
        stage = graph.zero_stage or 0
        keeps_whole = self.keep == "whole" or (self.keep == "auto" and stage <= 1)
        marking = _Marking(graph.replace(micro=self.micro), keeps_whole)
        # Stage 3 drops a parameter after each forward, so each micro-batch gathers it.
        return marking.run(gathers_once=stage in (1, 2))

    def _refuse_across_steps(self, graph: Graph) -> None:
        """Raises: ValueError if the step passes gathers or copies to the next one: here forward runs several times."""
        if graph.hints.across_steps:
            raise ValueError(
                f"prefetch: across_steps=True, and {graph.name} has {self.micro} micro-batches, each of which gathers "
                f"parameters. Only the first of them could begin with gathers that the step before has started.\n"
                f"Leave out accumulate, or across_steps."
            )
        if graph.hints.carry_copies:
            raise ValueError(
                f"offload: across_steps=True, and {graph.name} has {self.micro} micro-batches. Forward runs once for "
                f"each of them, and the copies of the step before could go on under the first one only.\n"
                f"Leave out accumulate, or across_steps."
            )


# ---- averages


class Average(NamedTuple):
    """A value that is averaged over micro-batches: a gradient, or the user's `pmean`.

    Attributes:
        term: the value before its reductions.
        end: the last wait, or a mark.
        start: the first reduction, or None if there is none.
        is_planned: whether a plan places that reduction.
        paths: the state leaves whose gradient it is; empty for a `pmean`.
    """

    term: Var
    end: Eqn
    start: Eqn | None = None
    is_planned: bool = False
    paths: tuple[str, ...] = ()

    @property
    def is_gradient(self) -> bool:
        return bool(self.paths)


def find_averages(graph: Graph) -> dict[Var, Average]:
    """The values of a program that are averaged over micro-batches."""
    averages: dict[Var, Average] = {}
    depends_on_batch = varying(graph, ("batch",))
    for e in graph.eqns:
        if e.op not in (GRADIENT, PMEAN):
            continue
        leaves = e.ins[1:]  # a gradient's leaf; a pmean has none
        # A gradient for a value that depends on the batch belongs to samples, so it is not averaged.
        if not any(leaf in depends_on_batch for leaf in leaves):
            averages[e.out] = Average(e.args[0], e, paths=tuple(leaf.name for leaf in leaves))
    for e, wait in pair(graph).waits.items():
        if _is_average(wait.start):
            term = wait.start.ins[wait.member]
            if term in averages:
                # The reduction over the replicated axis follows the one over the sharded axis.
                averages[e.out] = averages.pop(term)._replace(end=e)
            else:
                averages[e.out] = _reduced_average(graph, wait.start, term, e)
    return averages


def _is_average(start: Eqn) -> bool:
    """Whether a collective reduces gradients, or a `pmean` of the user."""
    return role(start) == "grad" or (role(start) == "pmean" and start.kwargs["op"] == "mean")


def _reduced_average(graph: Graph, start: Eqn, term: Var, end: Eqn) -> Average:
    is_planned = start.hint is not None and graph.axes[start.kwargs["axis"]] > 1
    paths: tuple[str, ...] = ()
    if start.provenance is not None and role(start) == "grad":
        paths = start.provenance.paths
    return Average(term, end, start, is_planned, paths)


# ---- equations of each micro-batch


class Partition:
    """The division of a program into the equations of each micro-batch and the equations that run once a step.

    Forward and backward run in each micro-batch, with everything that they need. The update runs once: equations that
    reach the state or depend on a gradient, unless forward or backward needs them. All others, such as an accuracy that
    is computed after backward, run in each micro-batch too.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = producers(graph.eqns)
        self.averages = find_averages(graph)
        self.gradients = {v for v, average in self.averages.items() if average.is_gradient}

    @functools.cached_property
    def changing_values(self) -> set[Var]:
        """The values that differ from micro-batch to micro-batch."""
        repeated = tuple(e for e in self.graph.eqns if e not in self._once_eqns)
        return changing(self.graph.replace(eqns=repeated))

    @functools.cached_property
    def update_readers(self) -> Mapping[Var, list[Eqn]]:
        """The values of micro-batches that the update reads, each with the equations that read it."""
        readers: dict[Var, list[Eqn]] = {}
        for e in self.graph.eqns:
            if e in self._once_eqns:
                for v in dict.fromkeys(e.ins):
                    if v in self.changing_values:
                        readers.setdefault(v, []).append(e)
        return readers

    @functools.cached_property
    def _once_eqns(self) -> set[Eqn]:
        """The equations that run once a step: the update, as far as no micro-batch needs it."""
        new_values = []
        for v in self.graph.outputs[: self.graph.num_state]:
            if v in self.makers:
                new_values.append(self.makers[v])
        reaching_state = needed(new_values, self.makers)
        repeated = self._repeated_eqns()
        from_gradients = set(self.gradients)
        once: set[Eqn] = set()
        for e in self.graph.eqns:
            if e.region != "update" or e in repeated:
                continue
            depends_on_gradient = any(v in from_gradients for v in e.ins)
            if e in reaching_state or role(e) == "output" or depends_on_gradient:
                once.add(e)
                from_gradients.update(e.results)
        return once

    def _repeated_eqns(self) -> set[Eqn]:
        """The equations that every micro-batch runs: forward and backward, and everything that they need."""
        independent = self._independent_eqns()
        eqns = []
        for e in self.graph.eqns:
            if e.region != "update" or e in independent:
                eqns.append(e)
        return needed(eqns, self.makers)

    def _independent_eqns(self) -> set[Eqn]:
        """The equations of the update that every micro-batch runs, because they depend on no gradient.

        These are the user's means, and the equations that bring values of forward into the new state or the output.
        """
        candidates = {average.end for average in self.averages.values() if not average.is_gradient}
        for e, wait in pair(self.graph).waits.items():
            if _enters_state_or_output(wait.start):
                candidates.add(e)
        candidates |= self._cuts_of_forward()
        # A gradient is complete only after the last micro-batch, so an equation that depends on one runs once.
        from_gradients = depending(self.graph.eqns, self.gradients)
        return {e for e in candidates if from_gradients.isdisjoint(e.ins)}

    def _cuts_of_forward(self) -> set[Eqn]:
        """The equations of the update that cut a value of forward."""
        eqns = set()
        for e in self.graph.eqns:
            if e.op is SHARD:
                maker = self.makers.get(e.args[0])
                if maker is not None and maker.region != "update":
                    eqns.add(e)
        return eqns

    def check_state(self) -> None:
        """Check that no parameter is updated in the middle of a micro-batch.

        Raises: ValueError with the name of the leaf.
        """
        trained: set[str] = set()
        for average in self.averages.values():
            trained.update(average.paths)
        updated = depending(self.graph.eqns, self.averages) & self.changing_values
        for old, new in zip(self.graph.inputs, self.graph.outputs[: self.graph.num_state]):
            if old.name in trained and new in updated:
                maker = self.makers.get(new)
                raise ValueError(
                    f"accumulate: state {old} is updated before the last backward of the step, so every micro-batch "
                    f"would update it.\n  at {where(maker.source if maker else None)}\n"
                    f"Compute all gradients first, or make each update a step of its own, with its own zt.accumulate."
                )


def _enters_state_or_output(start: Eqn) -> bool:
    """Whether a reduction brings a value of forward into the new state, or into an output with dims."""
    return role(start) == "state" or (role(start) == "output" and any(v.shape for v in start.ins))


# ---- the marks


class _Marking:
    """Writes the marks into a program. `new` collects the edits."""

    def __init__(self, graph: Graph, keeps_whole: bool) -> None:
        self.graph = graph
        self.keeps_whole = keeps_whole
        self.partition = Partition(graph)
        self.new = Rewriter(graph)
        self.readers = users(graph)

    def run(self, gathers_once: bool) -> Graph:
        """The program with marks. With `gathers_once`, parameters are gathered once for all micro-batches."""
        self.partition.check_state()
        num_state = self.graph.num_state
        new_state = self.graph.outputs[:num_state]
        outputs = self.graph.outputs[num_state:]
        returned = [v for v in variables(outputs) if v in self.partition.changing_values]
        combined: dict[Var, Var] = {}
        for v in dict.fromkeys((*self.partition.update_readers, *returned)):
            combined[v] = self.combined(v)
        self.keep_gathered(gathers_once)
        results = substitute(outputs, lambda v: combined.get(v, v))
        return self.new.applied().replace(outputs=(*new_state, *results))

    def combined(self, v: Var) -> Var:
        """`v` over all micro-batches, as the update reads it or the step returns it: a mean, or joined rows.

        Raises: ValueError if `v` can be neither averaged nor joined.
        """
        readers = self.partition.update_readers.get(v, [])
        reader = readers[0] if readers else None
        average = self.partition.averages.get(v)
        is_averaged = average is not None or not v.shape
        is_float = v.dtype.is_floating_point or v.dtype.is_complex
        # Logits and other outputs with dims belong to samples, so the rows of all micro-batches are joined.
        if not is_averaged and not readers:
            return self.joined_rows(v)
        if not (is_averaged and is_float):
            raise self.not_averaged(v, reader)

        if average is None:
            total = self.new.fresh(v, ".sum")
            self.new.insert_before(reader, self.eqn(ACCUMULATE, (v,), total, reader))
        else:
            total = self.summed(v, average, reader)
        mean = self.new.fresh(v, ".mean")
        divide = self.eqn(torch.ops.aten.div.Tensor, (total, self.graph.micro), mean, reader)
        self.new.insert_before(reader, divide)
        self.new.replace_reads(readers, v, mean)
        return mean

    def joined_rows(self, v: Var) -> Var:
        """An output with the rows of all micro-batches, joined along dim 0."""
        rows = v.shape[0] * self.graph.micro
        out = self.new.fresh(v, ".joined", shape=(rows, *v.shape[1:]))
        self.new.insert_before(None, self.eqn(JOIN, (v,), out, None))
        return out

    def summed(self, v: Var, average: Average, reader: Eqn | None) -> Var:
        """The sum of a value over micro-batches, taken before its reduction or after it."""
        start = average.start
        only_update_reads = len(self.readers.get(v, ())) == len(
            self.partition.update_readers.get(v, ())
        )
        if start is not None and self.keeps_whole and only_update_reads:
            self.sum_whole(v, average.term, start, average.is_planned)
            return v
        term = average.term if start is None else v
        total = self.new.fresh(v, ".sum")
        maker = self.partition.makers.get(term)
        add = self.eqn(ACCUMULATE, (term,), total, reader)
        if average.is_planned or maker is None:  # a plan moves the sum after the wait
            self.new.insert_before(reader, add)
        else:
            self.new.insert_after(maker, add.replace(region=maker.region))
        return total

    def sum_whole(self, v: Var, term: Var, start: Eqn, is_planned: bool) -> None:
        """Sum a gradient before its reduction, in the dtype of the result: only the sum is rounded when it is sent."""
        hint: Move | None = "birth" if is_planned else None
        template = start.replace(kwargs={}, provenance=None, hint=hint)
        total = dataclasses.replace(term, name=self.new.fresh_name(f"{v.name}.sum"), dtype=v.dtype)
        self.new.replace_reads([start], term, total)
        if term.dtype != v.dtype:
            wide = self.new.fresh(term, ".wide", dtype=v.dtype)
            cast = template.replace(op=CAST, args=(term,), outs=(wide,), kwargs={"dtype": v.dtype})
            self.new.insert_before(start, cast)
            term = wide
        add = template.replace(op=ACCUMULATE, args=(term,), outs=(total,))
        self.new.insert_before(start, add)

    def keep_gathered(self, gathers_once: bool) -> None:
        """Mark the values that only the first micro-batch computes: extremes of parameters, and gathers if asked."""
        for e, wait in pair(self.graph).waits.items():
            is_of_parameter = (
                role(wait.start) == "param" and e.out not in self.partition.changing_values
            )
            # A parameter is reduced only to its maximum or minimum, for the scale of a cast (`cast_on_shards`).
            is_extreme = not rules(wait.start).moves
            if is_of_parameter and (gathers_once or is_extreme):
                value = self.new.fresh(e.out, ".kept")
                self.new.insert_after(e, e.replace(op=KEEP, args=(e.out,), outs=(value,)))
                self.new.replace_reads(self.readers.get(e.out, ()), e.out, value)

    # ---- new equations

    def eqn(self, op: Any, args: tuple, out: Var, reader: Eqn | None) -> Eqn:
        """An equation of the update, with the line of the equation that reads its result."""
        source = reader.source if reader else self.source(args[0])
        return Eqn(op, args, (out,), region="update", source=source)

    def source(self, v: Var) -> Source | None:
        maker = self.partition.makers.get(v)
        return maker.source if maker else None

    # ---- errors

    def not_averaged(self, v: Var, reader: Eqn | None) -> ValueError:
        reads = "the update reads" if reader else "the step returns"
        if v in self.partition.averages:
            kind = "not a float"
            advice = "Average it as a float, zt.pmean(x.float())."
        elif v.shape:
            kind = "not a gradient"
            advice = "Compute what the update needs from it before the last backward."
        else:
            kind = "a scalar that is not a float"
            advice = (
                "Return a mean, such as an accuracy, as a float; or the values of the samples, to be summed after "
                "the step."
            )
        return ValueError(
            f"accumulate: {reads} {v}, which differs from micro-batch to micro-batch and is {kind}: it has no mean.\n"
            f"  at {where(reader.source if reader else self.source(v), 'the step arguments')}\n"
            f"Gradients, values of zt.pmean and float scalars are averaged, other outputs are joined along dim 0. "
            f"{advice}"
        )
