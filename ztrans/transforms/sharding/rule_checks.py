"""Checks of sharding rules: where DTensor's answer for an equation would give wrong results on shards.

DTensor's rules are right for most operations on most layouts. For the others an equation runs on whole values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...ir.graph import Eqn, Layout, Partial, Split, Var, substitute
from ...ir.layout import local_shape, localize, part
from ...ir.op_facts import CAST, is_random, op_facts
from ...ir.operations import called
from ...ir.relations import instances

aten = torch.ops.aten
# Operations that run on a part without elements: casts, copies, constructors, sums and matrix products.
_ON_NOTHING = {
    *(
        aten._to_copy,
        aten.copy,
        aten.fill,
        aten.full_like,
        aten.zeros_like,
        aten.ones_like,
        aten.empty_like,
    ),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    *(
        aten.sum,
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
    ),
}
# Their results have positions along a dim. DTensor of torch 2.11 combines those of parts as if they were values.
_POSITIONS = (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
# Operations that may read terms of a sum, a mean, a maximum or a minimum, if DTensor says so.
_READ_TERMS = {
    *(aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.maximum, aten.minimum),
    *(aten.max, aten.amax, aten.min, aten.amin),
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot),
}
_INDEXED = (aten.gather, aten.scatter, aten.scatter_add, aten.scatter_reduce)


def reads_terms(eqn: Eqn, layout: Layout) -> bool:
    """Whether an equation may read a value in this layout. If not, its terms are reduced before.

    DTensor takes terms of norms for terms of a sum, and lets `any`, norms, Fourier transforms and views of bytes read
    terms. It derives the rules of operations that it decomposes from sets, whose order differs from process to process.
    """
    terms = [p.op for p in layout if isinstance(p, Partial)]
    if not terms:
        return True
    op: Any = eqn.op
    packet = op.overloadpacket
    if op is aten.view.dtype:
        return False
    if op_facts(op).view or packet in (aten.stack, aten.cat, aten.clone):
        return True
    if terms[0].startswith("norm"):  # a norm of norms, both of one order
        order = eqn.args[1] if len(eqn.args) > 1 else 2
        return packet is aten.linalg_vector_norm and float(order) == float(
            terms[0].removeprefix("norm")
        )
    if op is CAST or packet in (aten.sum, aten.mean):
        old, new = eqn.ins[0].dtype, eqn.kwargs.get("dtype") or eqn.ins[0].dtype
        return old == new or (old.is_floating_point and new.is_floating_point)
    return packet in _READ_TERMS


def is_right(eqn: Eqn, wanted: list[Layout], given: list[Layout], axis: str, size: int) -> bool:
    """Whether an equation on inputs in the layouts `wanted` has results in the layouts `given`."""
    if (
        _has_no_reduction(eqn, given)
        or _fails_on_parts(eqn, wanted, size)
        or _misplaces(eqn, wanted)
    ):
        return False
    return not _weighs_parts(eqn, wanted, given, size) and _gives_parts(
        eqn, wanted, given, axis, size
    )


def extreme(eqn: Eqn, p: Split | Partial, v: Var | None) -> Split | Partial:
    """The placement of a result. The product of truth values over ranks is their `min`, and the sum is their `max`.

    `any` of bytes returns bytes.
    """
    op: Any = eqn.op
    if (
        isinstance(p, Partial)
        and v is not None
        and (v.dtype == torch.bool or op.overloadpacket is aten.any)
    ):
        return Partial(p.axis, {"product": "min", "sum": "max"}.get(p.op, p.op))
    return p


def _has_no_reduction(eqn: Eqn, given: list[Layout]) -> bool:
    """Whether a result is in terms that no collective combines: factors, or positions in the parts of the ranks."""
    terms = [p for layout in given for p in layout if isinstance(p, Partial)]
    return any(p.op == "product" for p in terms) or (bool(terms) and eqn.op in _POSITIONS)


def _fails_on_parts(eqn: Eqn, wanted: list[Layout], size: int) -> bool:
    """Whether an equation would fail on a rank whose part of an input has no elements."""
    return any(
        _has_empty_part(v, layout, size) for v, layout in zip(eqn.ins, wanted)
    ) and not _runs_on_nothing(eqn)


def _runs_on_nothing(eqn: Eqn) -> bool:
    """Whether an equation runs on a part without elements. Elementwise operations, views and sums do.

    Others, such as a norm of negative order or a Fourier transform, fail, but only on the rank with such a part.
    """
    op: Any = eqn.op
    if op.overloadpacket is aten.linalg_vector_norm:
        return 0 < (eqn.args[1] if len(eqn.args) > 1 else 2) < float("inf")
    known = torch.Tag.pointwise in op.tags or op.overloadpacket in _ON_NOTHING
    return known or op_facts(op).view or is_random(op)


def _weighs_parts(eqn: Eqn, wanted: list[Layout], given: list[Layout], size: int) -> bool:
    """Whether a result is a mean of means of parts that are not all of the same size."""
    means = any(isinstance(p, Partial) and p.op == "mean" for layout in given for p in layout)
    cut_sizes = (
        v.shape[p.dim] for v, layout in zip(eqn.ins, wanted) for p in layout if isinstance(p, Split)
    )
    return means and any(n % size for n in cut_sizes)


def _misplaces(eqn: Eqn, wanted: list[Layout]) -> bool:
    """Whether an index is cut along a dim in which it has other rows than the value that it indexes."""
    op: Any = eqn.op
    if op.overloadpacket not in _INDEXED:
        return False
    cut = {p.dim for layout in wanted for p in layout if isinstance(p, Split)}
    return any(len({v.shape[dim] for v in eqn.ins if len(v.shape) > dim}) > 1 for dim in cut)


def _gives_parts(eqn: Eqn, wanted: list[Layout], given: list[Layout], axis: str, size: int) -> bool:
    """Whether the results on the first and on the last rank have the shapes of parts of the whole results.

    Elementwise operations always do. Others run on meta tensors, which have no elements.
    """
    op: Any = eqn.op
    cut = any(isinstance(p, Split) for layout in (*wanted, *given) for p in layout)
    if not cut or torch.Tag.pointwise in op.tags or is_random(op):
        return True
    outs = tuple(
        out and dataclasses.replace(out, layout=layout) for out, layout in zip(eqn.outs, given)
    )
    if any(
        isinstance(p, Split) and p.dim >= len(out.shape)
        for out in outs
        if out is not None
        for p in out.layout
    ):
        return False
    return all(
        _has_shapes(eqn.replace(outs=outs), wanted, {axis: size}, {axis: rank})
        for rank in (0, size - 1)
    )


def _has_shapes(
    eqn: Eqn, wanted: Sequence[Layout], sizes: dict[str, int], at: dict[str, int]
) -> bool:
    """Whether the results of an equation on the rank at these coordinates have the shapes of its parts."""
    layouts = iter(wanted)

    def local(v: Var) -> torch.Tensor:
        shape = local_shape(dataclasses.replace(v, layout=next(layouts)), sizes, at)
        return torch.empty(shape, dtype=v.dtype, device="meta")

    here = localize(eqn, sizes, at)
    try:
        returned = called(here.op)(*substitute(here.args, local), **substitute(here.kwargs, local))
    except NotImplementedError:  # without a rule for meta tensors
        return True
    except Exception:  # whatever an operation raises for parts that it cannot compute
        return False
    results = zip(instances([returned], torch.Tensor), (out for out in eqn.outs if out is not None))
    return all(tuple(x.shape) == local_shape(out, sizes, at) for x, out in results)


def _has_empty_part(v: Var, layout: Layout, size: int) -> bool:
    return any(
        isinstance(p, Split) and part(v.shape[p.dim], size, size - 1)[1] == 0 for p in layout
    )
