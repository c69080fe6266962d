"""Sharding rules are right: an operation on shards, with its results joined, equals the operation on whole values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ztrans.ir.graph import Eqn, Partial, Split, Var, substitute
from ztrans.ir.layout import localize, part
from ztrans.ir.sharding_rules import rule

aten = torch.ops.aten
RANKS = 3
SHAPES = [(5,), (3,), (6, 4), (4, 3), (4, 3, 5)]

# For operations along a dim: their arguments for a tensor and a dim, which may be negative.
ALONG = {
    **dict.fromkeys(
        [aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
         aten.sort.default, aten.argsort.default, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
         aten.median.dim, aten.mode.default, aten.any.dim, aten.all.dim, aten.prod.dim_int, aten.unsqueeze.default,
         aten.squeeze.dim, aten.unbind.int],
        lambda x, d: (x, d),
    ),
    **dict.fromkeys(
        [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction,
         aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, aten.logsumexp.default,
         aten.flip.default, aten.nansum.default, aten.count_nonzero.dim_IntList, aten.squeeze.dims],
        lambda x, d: (x, [d]),
    ),
    **dict.fromkeys([aten._softmax.default, aten._log_softmax.default], lambda x, d: (x, d, False)),
    **dict.fromkeys([aten.topk.default, aten.kthvalue.default], lambda x, d: (x, 2, d)),
    **dict.fromkeys([aten.cat.default, aten.stack.default], lambda x, d: ([x, x], d)),
    aten.linalg_vector_norm.default: lambda x, d: (x, 3, [d]),
    aten.roll.default: lambda x, d: (x, [1], [d]),
    aten.select.int: lambda x, d: (x, d, 1),
    aten.slice.Tensor: lambda x, d: (x, d, 1, 3),
    aten.narrow.default: lambda x, d: (x, d, 1, 2),
    aten.split.Tensor: lambda x, d: (x, 2, d),
    aten.diff.default: lambda x, d: (x, 1, d),
    aten.unfold.default: lambda x, d: (x, d, 2, 1),
    aten.index_select.default: lambda x, d: (x, d, torch.tensor([1, 0])),
    aten.index_fill.int_Scalar: lambda x, d: (x, d, torch.tensor([1, 0]), 3.0),
    aten.index_add.default: lambda x, d: (x, d, torch.tensor([1, 0]), x.narrow(d, 0, 2)),
    aten.gather.default: lambda x, d: (x, d, torch.ones_like(x, dtype=torch.int64)),
    aten.scatter_add.default: lambda x, d: (x, d, torch.ones_like(x, dtype=torch.int64), x),
    **dict.fromkeys(
        [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default],
        lambda x, d: (x, x, d, x.dtype),
    ),
    aten.slice_backward.default: lambda x, d: (x, sizes(x, d, x.shape[d] + 2), d, 1, x.shape[d] + 1, 1),
    aten.select_backward.default: lambda x, d: (x.select(d, 0), sizes(x, d, 3), d, 1),
    aten.select_scatter.default: lambda x, d: (x, x.select(d, 0), d, 1),
    aten.slice_scatter.default: lambda x, d: (x, x.narrow(d, 0, 2), d, 1, 3),
}  # fmt: skip


def sizes(x: torch.Tensor, dim: int, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    return shape


def labels(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).long() % 2


def weights(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.flatten(0, -2)[0] if x.ndim > 1 else x, torch.ones(x.shape[-1], dtype=x.dtype)


def layer_norm_backward(x: torch.Tensor) -> tuple:
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)
    return x, x * 2, [x.shape[-1]], mean, rstd, *weights(x), [True] * 3


# For all other operations: their arguments for a tensor.
WHOLE = {
    **dict.fromkeys(
        [aten.squeeze.default, aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.std.default,
         aten.median.default, aten.argmax.default, aten.linalg_vector_norm.default, aten.exp.default, aten.neg.default],
        lambda x: (x,),
    ),
    aten.view.default: lambda x: (x, [-1]),
    aten._unsafe_view.default: lambda x: (x, [x.numel(), 1]),
    aten.expand.default: lambda x: (x, [2, *x.shape]),
    aten.repeat.default: lambda x: (x, [2] * x.ndim),
    aten.permute.default: lambda x: (x, list(reversed(range(x.ndim)))),
    aten.transpose.int: lambda x: (x, 0, -1),
    aten.add.Tensor: lambda x: (x, x),
    aten.mul.Tensor: lambda x: (x, x[0]),
    aten.where.self: lambda x: (x > 0.5, x, x),
    aten.clamp.default: lambda x: (x, 0.2, 0.8),
    aten.lerp.Scalar: lambda x: (x, x * 2, 0.3),
    aten.addcmul.default: lambda x: (x, x, x),
    aten.dot.default: lambda x: (x, x) if x.ndim == 1 else None,
    aten.mm.default: lambda x: (x, x.t().contiguous()) if x.ndim == 2 else None,
    aten.addmm.default: lambda x: (x[0], x.t().contiguous(), x) if x.ndim == 2 else None,
    aten.mv.default: lambda x: (x, x[0]) if x.ndim == 2 else None,
    aten.bmm.default: lambda x: (x, x.mT.contiguous()) if x.ndim == 3 else None,
    aten.embedding.default: lambda x: (torch.rand(5, 4), labels(x)),
    aten.embedding_dense_backward.default: lambda x: (torch.stack([x] * 4, -1), labels(x), 5, -1, False),
    aten.native_layer_norm.default: lambda x: (x, [x.shape[-1]], *weights(x), 1e-5) if x.ndim else None,
    aten.native_layer_norm_backward.default: lambda x: layer_norm_backward(x) if x.ndim else None,
    aten.nll_loss_forward.default: lambda x: (x, labels(x[:, 0]), None, 2, -100) if x.ndim == 2 else None,
    aten.nll_loss_backward.default:
        lambda x: (x.sum(), x, labels(x[:, 0]), None, 2, -100, x.sum()) if x.ndim == 2 else None,
    aten.tril.default: lambda x: (x,) if x.ndim > 1 else None,
    aten.diagonal.default: lambda x: (x, 0, -1, -2) if x.ndim > 1 else None,
}  # fmt: skip


# The operations that are not in the table, so they run on whole values.
WHOLE_VALUES = {
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.argsort.default,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.default,
    aten.median.dim,
    aten.mode.default,
    aten.prod.dim_int,
    aten.nansum.default,
    aten.count_nonzero.dim_IntList,
    aten.var.correction,
    aten.std.correction,
    aten.std.default,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.diff.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.tril.default,
    aten.index_select.default,
    aten.index_fill.int_Scalar,
    aten.index_add.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}


def arguments(op: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple]:
    """Arguments of an operation for tensors of several shapes, and for each of their dims."""
    for shape in shapes:
        x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
        dims = range(-x.ndim, x.ndim) if op in ALONG else [None]
        for dim in dims:
            args = ALONG[op](x, dim) if op in ALONG else WHOLE[op](x)
            if args is not None:
                yield args


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def replaced(tree: Any, values: Iterator) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda _: next(values), tree)


def cut(x: torch.Tensor, placement: Split | None, rank: int) -> torch.Tensor:
    if placement is None:
        return x
    return x.narrow(placement.dim, *part(x.shape[placement.dim], RANKS, rank))


def on_rank(eqn: Eqn, inputs: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """The results of an equation on the shards of one rank."""
    local = localize(eqn, {"dp": RANKS}, {"dp": rank})
    values = dict(zip(eqn.ins, inputs))
    return tensors(local.op(*substitute(local.args, values.__getitem__)))


def joined(parts: list[torch.Tensor], how: Split | Partial | None) -> torch.Tensor:
    if how is None:
        assert all(torch.allclose(x, parts[0], rtol=0, atol=0, equal_nan=True) for x in parts)
        return parts[0]
    if isinstance(how, Split):
        return torch.cat(parts, how.dim)
    terms = torch.stack([x.double() for x in parts])
    if how.op.startswith("norm"):
        return torch.linalg.vector_norm(terms, float(how.op.removeprefix("norm")), dim=0)
    return {"sum": terms.sum, "mean": terms.mean, "max": terms.amax, "min": terms.amin}[how.op](0)


def count_sharded(op: Any, args: tuple) -> int:
    """Compare the results of an operation on shards with that on whole values, for all ways to cut its arguments.

    Returns: how many of these ways do not run on whole values alone.
    """
    sharded = 0
    inputs = tensors(args)
    results = tensors(op(*args))
    for dims in product(*([None, *range(x.ndim)] for x in inputs)):
        placements = [None if dim is None else Split("dp", dim) for dim in dims]
        values = [Var(f"v{k}", x.dtype, tuple(x.shape)) for k, x in enumerate(inputs)]
        outs = [Var(f"o{k}", x.dtype, tuple(x.shape)) for k, x in enumerate(results)]
        eqn = Eqn(op, replaced(args, iter(values)), tuple(outs))
        ins, out_placements = rule(eqn, placements, "dp", RANKS, contracts=True)
        assert not any(isinstance(how, Partial) for how in ins)
        eqn = eqn.replace(
            outs=tuple(
                replace(v, layout=(how,) if how else ()) for v, how in zip(outs, out_placements)
            )
        )
        by_rank = [
            on_rank(eqn, [cut(x, how, rank) for x, how in zip(inputs, ins)], rank)
            for rank in range(RANKS)
        ]
        for whole, how, parts in zip(results, out_placements, zip(*by_rank), strict=True):
            joined_parts = joined(list(parts), how).to(whole.dtype)
            torch.testing.assert_close(joined_parts, whole, equal_nan=True)
        sharded += any(how is not None for how in (*ins, *out_placements))
    return sharded


@pytest.mark.slow
@pytest.mark.parametrize("op", [*ALONG, *WHOLE], ids=str)
def test_joined_results_of_shards_equal_the_result_of_the_whole(op):
    sharded = sum(count_sharded(op, args) for args in arguments(op, SHAPES))
    assert bool(sharded) == (op not in WHOLE_VALUES)


def accepted(op: Any, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple]:
    """Arguments for each of the shapes, and for each dim, that the operation has results for."""
    for shape in shapes:
        each = arguments(op, [shape])
        while True:
            try:
                args = next(each, None)
                if args is None:
                    break
                if tensors(op(*args)):
                    yield args
            except (IndexError, RuntimeError):
                continue


@pytest.mark.parametrize("op", [op for op in {**ALONG, **WHOLE} if op not in WHOLE_VALUES], ids=str)
def test_values_without_elements_have_rules_that_are_right(op):
    for args in accepted(op, [(0,), (0, 4), (4, 0)]):
        count_sharded(op, args)
