"""Send gradients as short codes.

A reduction sends its terms in a format, so a program has equations only for what is computed around the message: a
Hadamard turn.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import rules, sent_in
from ..ir.graph import Eqn, Graph, Split
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter
from ..ir.wire_format import Coded
from .base import Transform, Where, check_where, constructor
from .quantize_gathers import (
    Bits,
    bits_to_plan,
    check_format,
    chosen_bits,
    quantized_paths,
    serves,
)

HADAMARD = torch.ops.ztrans.hadamard.default
_BLOCKS = {
    8: 256,
    4: 64,
}  # 4 bits in blocks of 256 cost three times the loss of blocks of 64, and save 9% of the bytes


@constructor
def quantize_grads(
    bits: Literal[8, 4, "auto"] = 8,
    block: int | None = None,
    *,
    between: Literal[8, 4] | None = None,
    rotate: int | None = None,
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

    Args:
        bits: the bits of a code: 8 or 4. With "auto", a plan sends codes of 8 bits if they make the step more than 1%
            faster, and else what is sent without this transform.
        block: the number of elements that share a scale; even. By default 256, and with 4 bits 64.
        between: the bits of what hosts send each other: the sum of the terms of a host, which its ranks decode and add
            up first, and gradients that are reduced over the `replicate_axis` of `shard_params`. By default `bits`.
        rotate: a power of 2, such as 64: turn that many neighbours along a dim by a Hadamard matrix before they are
            sent, and back after. The dim is the last one that is not cut and is a multiple of `rotate`; gradients that
            have none are sent as they are.
        where: the leaves whose gradients to quantize, as a pattern for `fnmatch` of their paths, or as a function
            `where(path, leaf)` of the path and a meta tensor. By default, those with at least two dims.

    Raises: ValueError if there is no such format, or if `rotate` is not a power of 2; TypeError if `where` is neither
        of these. When the step is lowered, ValueError if it is not sharded, or if `where` matches no leaf.

    Source: Wang et al., ZeRO++, 2023 (qgZ); the turn, Jia et al., SDP4Bit, 2024.

    >>> quantize_grads(4, rotate=64)
    quantize_grads(bits=4, rotate=64)
    """
    own = 8 if bits == "auto" else bits
    for option, value in (("bits", own), ("between", own if between is None else between)):
        check_format("quantize_grads", option, value, 2 if block is None else block, "int")
    if rotate is not None and not _is_power_of_2(rotate):
        raise ValueError(f"quantize_grads: rotate={rotate!r}; it is a power of 2, such as 64.")
    if where is not None:
        check_where("quantize_grads", where, "params.*.weight")
    return _QuantizeGrads(bits, block, between, rotate, where)


@dataclass(frozen=True)
class _QuantizeGrads(Transform):
    bits: Bits = 8
    block: int | None = None
    between: int | None = None
    rotate: int | None = None
    where: Where | None = None

    # After the transforms that decide what is reduced, and when.
    phase: ClassVar[float] = 3
    variants_change_bits: ClassVar[bool] = True

    @property
    def variants(self) -> tuple[Transform, ...]:
        return tuple(dataclasses.replace(self, bits=bits) for bits in bits_to_plan(self.bits))

    def rewrite(self, graph: Graph) -> Graph:
        paths = quantized_paths(self, graph, self.where)
        bits = chosen_bits(self, self.bits)
        if bits is None:
            return graph
        new = Rewriter(graph)
        for start, started in pair(graph).starts.items():
            if rules(start).moves or not serves(start, "grad", paths):
                continue
            coded = self._coded(start, graph, bits)
            if coded is start:
                continue
            (term,) = start.ins
            dim = _turned_dim(start, self.rotate)
            if dim is not None:
                turned = new.fresh(term, ".turned")
                turn = Eqn(
                    HADAMARD, (term, dim, self.rotate), (turned,), hint=start.hint and "birth"
                )
                new.insert_before(start, turn.like(start))
                coded = coded.replace(args=([turned],))
                wait = graph.eqns[started.first_wait]
                back = new.fresh(wait.out, ".back")
                turn = Eqn(HADAMARD, (wait.out, dim, self.rotate), (back,))
                new.insert_after(wait, turn.like(wait))
                new.replace_value(wait.out, back)
            new.replace(start, coded)
        return new.applied()

    def _coded(self, start: Eqn, graph: Graph, bits: int) -> Eqn:
        """A reduction that sends codes, or the reduction itself if they are not shorter."""
        own, between = map(self._format, (bits, self.between or bits))
        is_between_replicas = any(isinstance(p, Split) for p in start.ins[0].layout)
        coded = sent_in(between if is_between_replicas else own, start, graph.axes)
        if self.between is None or coded is start:
            return coded
        return coded.replace(kwargs={**coded.kwargs, "between": between})

    def _format(self, bits: int) -> Coded:
        return Coded(bits, self.block or _BLOCKS[bits])


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
