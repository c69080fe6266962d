"""Run a step in micro-batches, and average their gradients before the update.

The program is written for one micro-batch. Marks say which values are summed or joined over all micro-batches;
`ir.micro_batches` says how such a program runs. The marks are written into the program as it was traced. A transform
that shards it reduces a gradient at its mark, before or after the sum, as the two marks stand:

    s = accumulate(g0); g = gradient(s, w)        the whole gradient is summed, and then reduced once
    g = gradient(g0, w); s = accumulate(g)        the gradient of each micro-batch is reduced, and its shards are summed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.dependencies import depending, needed
from ..ir.graph import Eqn, Graph, Var, producers, substitute, users, variables
from ..ir.marks import ACCUMULATE, GRADIENT, JOIN, PMEAN
from ..ir.micro_batches import changing
from ..ir.rewriter import Rewriter
from ..ir.source import where
from ..ir.varying import varying
from .base import Transform, check_number, constructor
from .layer_order import in_layer_order
from .reduce_once import reduce_once

# A program has a copy of forward and backward for each micro-batch: Llama-3-8B has 9,000 such equations.
_MOST_IN_LAYERS = 8


@constructor
def accumulate(
    micro: int,
    *,
    keep: Literal["whole", "shard", "auto"] = "auto",
    order: Literal["batches", "layers"] = "batches",
) -> Transform:
    """Run a step in micro-batches: their gradients are averaged, and the update runs once.

    Each leaf of the batch is cut along dim 0 into `micro` equal parts, one for each micro-batch. Every micro-batch gets
    all numbers and scalars. Scalar outputs are averaged; other outputs are joined along dim 0. The step is traced for
    one micro-batch, so the length of the program does not depend on their number. The reductions of the last
    micro-batch overlap with its backward, as without micro-batches. The transform may stand anywhere in a chain.

    A state leaf that depends on the batch itself, such as a running mean of batch norm, changes with every micro-batch.
    A count that does not depend on the batch changes once a step. In the step `len(x)` is the size of one micro-batch.

    Rewrites:
        g = gradient(g0, w)                        s = accumulate(g0); g = gradient(s, w)
        w1 = update(w, g)                    -->   w1 = update(w, div(g, micro))

    Args:
        micro: the number of micro-batches.
        keep: the sum that stays in memory between micro-batches. "whole" sums whole gradients, and reduces them once.
            "shard" reduces the gradients of each micro-batch, and sums their shards. "auto" is "whole" at stages 0
            and 1, and "shard" at stages 2 and 3.
        order: "batches" runs one micro-batch after the other. "layers" runs each layer for all micro-batches before the
            next layer: at stage 3 a parameter is gathered once for forward and once for backward, and a gradient is
            reduced once, whatever `micro` is. What passes from layer to layer is kept for all micro-batches. It needs a
            copy of forward and backward in the program for each of them, so it takes at most 8.

    Raises: ValueError if an option is unknown. When the step is traced, ValueError if a leaf of the batch cannot be
        cut. When it is lowered, ValueError if something other than gradients and scalars of a micro-batch enters the
        update, or parameters are updated before the last backward; in the order of layers also if forward draws random
        numbers.

    Source: PyTorch's `no_sync` and FSDP2's `set_requires_gradient_sync`; optax.MultiSteps. The order of layers:
        Yue et al., GreedySnake, 2025.

    >>> accumulate(4)
    accumulate(micro=4)
    """
    check_number("accumulate: micro", micro, "the number of micro-batches, at least 1", 1)
    if keep not in ("whole", "shard", "auto"):
        raise ValueError(f"accumulate: keep={keep!r}; use 'whole', 'shard' or 'auto'.")
    if order not in ("batches", "layers"):
        raise ValueError(f"accumulate: order={order!r}; use 'batches' or 'layers'.")
    if order == "layers" and micro > _MOST_IN_LAYERS:
        raise ValueError(
            f"accumulate: micro={micro} with order='layers', which writes forward and backward into the program for "
            f"each micro-batch; it takes at most {_MOST_IN_LAYERS}.\nUse larger micro-batches, or order='batches'."
        )
    if order == "layers" and keep == "shard":
        raise ValueError(
            "accumulate: keep='shard' reduces the gradients of each micro-batch, and order='layers' reduces each "
            "gradient once.\nLeave one of them out."
        )
    return _Accumulate(micro, keep, order)


@dataclass(frozen=True)
class _Accumulate(Transform):
    phase: ClassVar[float] = 1

    micro: int
    keep: Literal["whole", "shard", "auto"] = "auto"
    order: Literal["batches", "layers"] = "batches"

    @property
    def micro_batches(self) -> int:
        return self.micro

    def rewrite(self, graph: Graph) -> Graph:
        if self.micro == 1:
            return graph
        stage = graph.zero_stage
        if stage is None or self.order == "layers":
            # Nothing is reduced, or the sum of a layer is complete soon after its first term.
            sums_whole = True
        else:
            sums_whole = self.keep == "whole" or (self.keep == "auto" and stage <= 1)
        if stage is not None and stage <= 1:
            # A step that adds several gradients of a leaf has one sum for all of them.
            graph = reduce_once(graph)
        marked = _with_marks(graph.replace(micro=self.micro), sums_whole)
        return in_layer_order(graph, marked) if self.order == "layers" else marked


def _with_marks(graph: Graph, sums_whole: bool) -> Graph:
    """The program with its sums and joins over micro-batches.

    Args:
        graph: the program as it was traced.
        sums_whole: whether to sum gradients before their marks.

    Raises: ValueError if a value can be neither averaged nor joined, or a parameter is updated in each micro-batch.
    """
    gradients, means = _averaged_values(graph)
    marks = {**gradients, **means}
    once = _once_eqns(graph, gradients, means)
    repeated = tuple(e for e in graph.eqns if e not in once)
    changing_values = changing(graph.replace(eqns=repeated))
    _check_state(graph, gradients, depending(graph.eqns, marks) & changing_values)

    # The values of micro-batches that the update reads or the step returns, each with its readers in the update.
    update_readers: dict[Var, list[Eqn]] = {}
    for e in graph.eqns:
        if e in once:
            for v in dict.fromkeys(e.ins):
                update_readers.setdefault(v, []).append(e)
    for v in variables(graph.results):
        update_readers.setdefault(v, [])

    new = Rewriter(graph)
    combined: dict[Var, Var] = {}
    for v, readers in update_readers.items():
        if v not in changing_values:
            continue
        mark = marks.get(v)
        is_averaged = mark is not None or not v.shape
        if is_averaged and (v.dtype.is_floating_point or v.dtype.is_complex):
            combined[v] = _mean(v, mark, readers, sums_whole, new)
        elif not is_averaged and not readers:
            # Logits and other outputs with dims belong to samples, so the rows of all micro-batches are joined.
            combined[v] = _joined_rows(v, new)
        else:
            raise _not_averaged(v, mark, readers[0] if readers else None, new)
    results = substitute(graph.results, lambda v: combined.get(v, v))
    return new.applied().replace(outputs=(*graph.new_state, *results))


# ---- what runs in each micro-batch


def _averaged_values(graph: Graph) -> tuple[dict[Var, Eqn], dict[Var, Eqn]]:
    """The values that are averaged over micro-batches, each with its mark: gradients, and the means of the user."""
    depends_on_batch = varying(graph, ("batch",))
    gradients = {}
    means = {}
    for e in graph.eqns:
        if e.op is PMEAN:
            means[e.out] = e
        # A gradient for a value that depends on the batch belongs to samples, so it is not averaged.
        elif e.op is GRADIENT and e.args[1] not in depends_on_batch:
            gradients[e.out] = e
    return gradients, means


def _once_eqns(graph: Graph, gradients: Mapping[Var, Eqn], means: Mapping[Var, Eqn]) -> set[Eqn]:
    """The equations that run once a step, with the last micro-batch: the update, as far as no micro-batch needs it.

    Forward and backward run in each micro-batch, with everything that they need, and so does a mean of the user that
    depends on no gradient. The update runs once: equations that reach the state or depend on a gradient. All others,
    such as an accuracy that is computed after backward, run in each micro-batch too.
    """
    makers = producers(graph.eqns)
    # A gradient is complete only after the last micro-batch, so an equation that depends on one runs once.
    after_gradients = depending(graph.eqns, gradients)
    repeated = [mark for mark in means.values() if mark.args[0] not in after_gradients]
    repeated += (e for e in graph.eqns if e.region != "update")
    needed_by_repeated = needed(repeated, makers)
    reaching_state = needed((makers[v] for v in graph.new_state if v in makers), makers)

    once: set[Eqn] = set()
    once_values = set(gradients)
    for e in graph.eqns:
        if e.region != "update" or e in needed_by_repeated:
            continue
        if e in reaching_state or any(v in once_values for v in e.ins):
            once.add(e)
            once_values.update(e.results)
    return once


def _check_state(graph: Graph, gradients: Mapping[Var, Eqn], updated: Set[Var]) -> None:
    """Check that no parameter is updated in the middle of a micro-batch.

    Args:
        graph: the program as it was traced.
        gradients: the marks of gradients.
        updated: the values of micro-batches that depend on an averaged value.

    Raises: ValueError with the name of the leaf.
    """
    trained = {mark.args[1] for mark in gradients.values()}
    makers = producers(graph.eqns)
    for old, new in graph.leaves:
        if old in trained and new in updated:
            maker = makers.get(new)
            raise ValueError(
                f"accumulate: state {old} is updated before the last backward of the step, so every micro-batch "
                f"would update it.\n  at {where(maker.source if maker else None)}\n"
                f"Compute all gradients first, or make each update a step of its own, with its own zt.accumulate."
            )


# ---- sums and joins


def _mean(v: Var, mark: Eqn | None, readers: Sequence[Eqn], sums_whole: bool, new: Rewriter) -> Var:
    """The mean of a value over micro-batches, which its readers in the update then read."""
    reader = readers[0] if readers else None
    origin = reader or new.makers.get(v)
    result = total = new.fresh(v, ".sum")
    add = Eqn(ACCUMULATE, (v,), (total,)).like(origin, "update")
    if mark is None:
        new.insert_before(reader, add)
    else:
        # A term is added as soon as it is computed, so that it takes no memory after that.
        add = add.replace(region=mark.region, hint="birth")
        # If forward or backward reads the value too, each micro-batch needs its own.
        only_update_reads = len(readers) == len(users(new.graph).get(v, ()))
        if sums_whole and only_update_reads:
            term = mark.args[0]
            new.insert_before(mark, add.replace(args=(term,)))
            new.replace_reads([mark], term, total)
            result = v
        else:
            new.insert_after(mark, add)

    mean = new.fresh(v, ".mean")
    args = (result, new.graph.micro)
    divide = Eqn(torch.ops.aten.div.Tensor, args, (mean,))
    new.insert_before(reader, divide.like(origin, "update"))
    new.replace_reads(readers, v, mean)
    return mean


def _joined_rows(v: Var, new: Rewriter) -> Var:
    """An output with the rows of all micro-batches, joined along dim 0."""
    rows = v.shape[0] * new.graph.micro
    out = new.fresh(v, ".joined", shape=(rows, *v.shape[1:]))
    join = Eqn(JOIN, (v,), (out,))
    new.insert_before(None, join.like(new.makers.get(v), "update"))
    return out


def _not_averaged(v: Var, mark: Eqn | None, reader: Eqn | None, new: Rewriter) -> ValueError:
    reads = "the update reads" if reader else "the step returns"
    if mark is not None:
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
    origin = reader or new.makers.get(v)
    return ValueError(
        f"accumulate: {reads} {v}, which differs from micro-batch to micro-batch and is {kind}: it has no mean.\n"
        f"  at {where(origin.source if origin else None, 'the step arguments')}\n"
        f"Gradients, values of zt.pmean and float scalars are averaged, other outputs are joined along dim 0. "
        f"{advice}"
    )
