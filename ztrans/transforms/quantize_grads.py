"""Send gradients as short codes.

A reduction sends its terms in a format, so a program has equations only for what is computed around the message: a
Hadamard turn, and the error that rounding leaves for the next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import row, rows, rules, sent_in
from ..ir.graph import Eqn, Graph, Kept, Split, Var
from ..ir.op_facts import CAST
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter
from ..ir.rules import Sizes
from ..ir.wire_format import ARRIVED, Coded
from ..ops import HALF
from .base import Transform, Where, check_where, constructor
from .quantize_gathers import (
    Bits,
    check_format,
    chosen_bits,
    kept_parameters,
    quantized_paths,
    serves,
)

aten = torch.ops.aten
HADAMARD = torch.ops.ztrans.hadamard.default
_WIDEN = torch.ops.ztrans.widened.default
_NARROW = torch.ops.ztrans.narrowed.default
# 4 bits in blocks of 256 send 9% less than in blocks of 64, and lose three times as much.
_BLOCKS = {8: 256, 4: 64}


@constructor
def quantize_grads(
    bits: Literal[8, 4, "auto"] = 8,
    block: int | None = None,
    *,
    between: Literal[8, 4] | None = None,
    rotate: int | None = None,
    error_feedback: bool | Literal["8bit"] = False,
    where: Where | None = None,
) -> Transform:
    """Reduce gradients as codes of 8 or 4 bits: about half or a quarter of the bytes of bf16. This changes results.

    Each rank sends the part of its term that belongs to another rank in blocks of `block` elements, which share one
    fp32 scale. The receiver decodes the terms and adds them up in fp32, in rank order. An element of a term errs by at
    most 1/254 (8 bits) or 1/14 (4 bits) of the largest magnitude in its block, and so does their mean. A block with a
    NaN or an infinity arrives as NaN.

    Rewrites:
        f = reduce_scatter([g], mean, axis=dp)     -->     f = reduce_scatter([g], mean, i8/256, axis=dp)

    An all_reduce, as at stage 0 and between the replicas of `replicate_axis`, also sends the parts of the mean as
    codes. A gradient that is reduced in every micro-batch is rounded in each. A reduction stays as it is if it sends
    8 bits or fewer for each element already, or if codes in whole blocks would not make its message shorter. What the
    step itself reduces, as in tensor parallelism, stays too.

    With `rotate`, terms are sent turned: a large element no longer decides alone how its block is rounded.

    Rewrites:
        f = reduce_scatter([g], mean)              -->     f = reduce_scatter([hadamard(g, 1, 64)], mean, i4/64)
        g1 = wait(f)                                       g1 = hadamard(wait(f), 1, 64)

    With `error_feedback` each rank adds to its next term what rounding has taken from this one. It keeps that in the
    state (`step.init`), a whole row for each parameter and rank: in fp32, or with "8bit" in a quarter of that memory.

    Rewrites:
        f = reduce_scatter([g], mean)              -->     t = add(g, row(e)); f = reduce_scatter([t], mean, i4/64)
                                                           e1 = rows(sub(t, arrived(t)))     # e1 is the next e

    Args:
        bits: the bits of a code: 8 or 4. With "auto", a plan chooses the first of these that takes at most 1% longer
            than the fastest: no codes, codes over the `replicate_axis` of `shard_params` alone, or codes of 8 bits in
            all messages. It does not choose by leaf: codes for half of the leaves saved at most 1.1%.
        block: the number of elements that share a scale; even. By default 256, and with 4 bits 64.
        between: the bits of what hosts send each other: the sum of the terms of a host, which its ranks decode and add
            up first, and gradients that are reduced over the `replicate_axis` of `shard_params`. By default `bits`.
        rotate: a power of 2, such as 64: turn that many neighbours along a dim by a Hadamard matrix before they are
            sent, and back after. The dim is the last one that is not cut and is a multiple of `rotate`; gradients that
            have none are sent as they are.
        error_feedback: send the error of a step in the next one, at stages 0 to 2. It is for SGD and momentum: with
            AdamW it gained nothing where it was measured, and codes of 8 bits need none. With "8bit" the error is kept
            as int8, which are floats with 2 bits of mantissa for magnitudes from 1.5e-8 to 40, so a ninth of it or
            less is lost, and what is above 40. Terms that are sums over a host, or over the axis of a first
            reduction, are not corrected.
        where: the leaves whose gradients to quantize, as a pattern for `fnmatch` of their paths, or as a function
            `where(path, leaf)` of the path and a meta tensor. By default, those with at least two dims; with
            `error_feedback`, only those at "params", as a lifted state has them.

    Raises: ValueError if there is no such format, or if `rotate` is not a power of 2; TypeError if `where` is neither
        of these. When the step is lowered, ValueError if it is not sharded, if `where` matches no leaf, or for
        `error_feedback` at stage 3.

    Source: Wang et al., ZeRO++, 2023 (qgZ); the turn, Jia et al., SDP4Bit, 2024; feedback, Seide et al., 2014;
    errors kept in 8 bits, LoCo, arXiv 2407.04480.

    >>> quantize_grads(4, rotate=64)
    quantize_grads(bits=4, rotate=64)
    """
    own = 8 if bits == "auto" else bits
    for option, value in (("bits", own), ("between", own if between is None else between)):
        check_format("quantize_grads", option, value, 2 if block is None else block, "int")
    if rotate is not None and not _is_power_of_2(rotate):
        raise ValueError(f"quantize_grads: rotate={rotate!r}; it is a power of 2, such as 64.")
    if error_feedback == "between":
        raise ValueError(
            "quantize_grads: error_feedback='between'; the sum of a host is computed and sent in one collective, so no "
            "equation can keep its error.\nWrite error_feedback='8bit', or send more bits there: between=8."
        )
    if not isinstance(error_feedback, bool) and error_feedback != "8bit":
        raise TypeError(
            f"quantize_grads: error_feedback={error_feedback!r}; it is True, False or '8bit'."
        )
    if error_feedback and bits == "auto":
        raise ValueError(
            f"quantize_grads: error_feedback={error_feedback!r} takes 8 or 4 bits, not 'auto'."
        )
    if where is not None:
        check_where("quantize_grads", where, "params.*.weight")
    return _QuantizeGrads(bits, block, between, rotate, error_feedback, where)


@dataclass(frozen=True)
class _QuantizeGrads(Transform):
    bits: Bits = 8
    block: int | None = None
    between: int | None = None
    rotate: int | None = None
    error_feedback: bool | Literal["8bit"] = False
    where: Where | None = None

    # After the transforms that decide what is reduced, and when, and before leaves move to the host.
    phase: ClassVar[float] = 2.5
    variants_change_bits: ClassVar[bool] = True

    @property
    def variants(self) -> tuple[Transform, ...]:
        if self.bits != "auto":
            return (self,)
        wide = dataclasses.replace(self, bits=None, between=None)
        over_replicas = dataclasses.replace(wide, between=self.between or 8)
        return (wide, over_replicas, dataclasses.replace(self, bits=8))

    def keeps(self, leaves: Mapping[str, torch.Tensor]) -> Sequence[Kept]:
        if not self.error_feedback:
            return ()
        paths = kept_parameters(self, leaves, self.where)
        dtype = torch.int8 if self.error_feedback == "8bit" else torch.float32
        return [Kept(path, like=path, layout="rows", dtype=dtype) for path in paths]

    def rewrite(self, graph: Graph) -> Graph:
        bits = chosen_bits(self, self.bits)
        if bits is None and self.between is None:
            return graph
        paths = quantized_paths(self, graph, self.where)
        errors = graph.kept_by(self.name)
        if errors and graph.zero_stage == 3:
            raise ValueError(
                f"quantize_grads: error_feedback={self.error_feedback!r} keeps the error of each whole gradient on "
                "every rank, and at stage 3 a rank need not have room for all of them.\n"
                "Use shard_params(stage=2), or leave out error_feedback: with rotate=64 a step errs less."
            )
        new = Rewriter(graph)
        for start, started in pair(graph).starts.items():
            if rules(start).moves or not serves(start, "grad", paths):
                continue
            coded = self._coded(start, graph, bits)
            if coded is start:
                continue
            sent = start.ins[0]
            before: list[Eqn] = []
            dim = _turned_dim(start, self.rotate)
            if dim is None:
                sent = _before_cast(sent, new.makers)
            else:
                turned = new.fresh(sent, ".turned")
                before.append(Eqn(HADAMARD, (sent, dim, self.rotate), (turned,)))
                sent = turned
                wait = graph.eqns[started.first_wait]
                back = new.fresh(wait.out, ".back")
                turn_back = Eqn(HADAMARD, (wait.out, dim, self.rotate), (back,))
                new.insert_after(wait, turn_back.like(wait))
                new.replace_value(wait.out, back)
            # The second reduction of a gradient, over the axis of replicas, adds up parts, and errors are whole.
            path = sent.name if start.provenance is None else start.provenance.paths[0]
            if path in errors and not sent.layout:
                error = errors[path]
                sent, eqns, errors[path] = _with_error(new, sent, error, coded, graph.axes)
                before += eqns
                new.set_leaf(graph.kept_by(self.name)[path], errors[path])
            hint = "birth" if start.hint else None
            new.insert_before(start, *(e.like(start).replace(hint=hint) for e in before))
            new.replace(start, coded.replace(args=([sent],)))
        return new.applied()

    def _coded(self, start: Eqn, graph: Graph, bits: int | None) -> Eqn:
        """A reduction that sends codes, or the reduction itself if they are not shorter or it is to stay wide."""
        is_between_replicas = any(isinstance(p, Split) for p in start.ins[0].layout)
        own = (self.between or bits) if is_between_replicas else bits
        if own is None:
            return start
        coded = sent_in(self._format(own), start, graph.axes)
        if self.between is None or coded is start:
            return coded
        return coded.replace(kwargs={**coded.kwargs, "between": self._format(self.between)})

    def _format(self, bits: int) -> Coded:
        return Coded(bits, self.block or _BLOCKS[bits])


def _before_cast(term: Var, makers: Mapping[Var, Eqn]) -> Var:
    """A half-precision gradient whose cast to fp32 is sent: its codes are the same, and it takes half the memory."""
    cast = makers.get(term)
    if cast is None or cast.op is not CAST or term.dtype != torch.float32:
        return term
    return cast.args[0] if cast.args[0].dtype in HALF else term


def _with_error(
    new: Rewriter, term: Var, error: Var, coded: Eqn, axes: Sizes
) -> tuple[Var, list[Eqn], Var]:
    """Add the error of earlier steps to a term before it is sent.

    Returns: The sum, the equations that compute it and the error that it leaves, and that error, as rows of all ranks.
    """
    total = new.fresh(term, ".corrected", dtype=torch.float32)
    arrived, left = (new.fresh(total, suffix) for suffix in (".arrived", ".error"))
    (split,) = error.layout
    own = row(error, new.fresh_name(f"{error.name}.own"), split.axis)
    before, after = [own], []
    added, kept = own.out, left
    if error.dtype != torch.float32:
        added, kept = (
            new.fresh(own.out, ".f32", dtype=torch.float32),
            new.fresh(left, dtype=error.dtype),
        )
        before.append(Eqn(_WIDEN, (own.out,), (added,)))
        after.append(Eqn(_NARROW, (left, error.dtype), (kept,)))
    rows_left = rows(kept, new.fresh_name(f"{error.name}.new"), split.axis, axes[split.axis])
    # An all_reduce cuts a term into parts in the order of its elements.
    cut = coded.out.split
    dim = cut.dim if isinstance(cut, Split) else -1
    wire = coded.kwargs["dtype"]
    parts = axes[coded.kwargs["axis"]]
    arguments = (total, parts, dim, wire.bits, wire.block, wire.kind)
    eqns = [
        *before,
        Eqn(aten.add.Tensor, (term, added), (total,)),
        Eqn(ARRIVED, arguments, (arrived,)),
        Eqn(aten.sub.Tensor, (total, arrived), (left,)),
        *after,
        rows_left,
    ]
    return total, eqns, rows_left.out


def _is_power_of_2(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 1 and not n & (n - 1)


def _turned_dim(start: Eqn, n: int | None) -> int | None:
    """The last dim of a member whose neighbours can be turned by n, because no rank cuts it; None if there is none."""
    if n is None:
        return None
    placements = (*start.ins[0].layout, *start.out.layout)
    cut = {p.dim for p in placements if isinstance(p, Split)}
    for dim in reversed(range(len(start.out.shape))):
        if dim not in cut and start.out.shape[dim] % n == 0:
            return dim
    return None
