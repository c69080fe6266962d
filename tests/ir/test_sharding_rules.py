"""The sharding rules of single equations."""

import pytest
import torch
from torch.distributed.tensor.experimental import register_sharding

import ztrans as zt
from ztrans.ir.graph import Eqn, Partial, Split, Var, substitute
from ztrans.ir.layout import on_axis
from ztrans.ir.patterns import letters_of, parse
from ztrans.ir.registered_rules import NoRule
from ztrans.ir.sharding_rules import rule

aten = torch.ops.aten
CUT = Split("dp")
COLUMNS = Split("dp", 1)
TERMS = Partial("dp", "sum")
MEANS = Partial("dp", "mean")
NORMS = Partial("dp", "norm2.0")
WHOLE = ([None], [None])


def types(op, args, kwargs) -> list[tuple]:
    """The shapes and dtypes of the results of an operation."""
    meta = lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta")
    returned = op(*substitute(args, meta), **substitute(kwargs, meta))
    results = returned if isinstance(returned, tuple | list) else [returned]
    return [(x.dtype, tuple(x.shape)) for x in results]


def ask(op, *args, outs=None, size=4, **kwargs):
    """The placements of the arguments and of the results of an operation on `size` ranks.

    `outs` are the dtypes and shapes of the results, if PyTorch cannot tell them for meta tensors.
    """
    results = outs or types(op, args, kwargs)
    named = tuple(Var(f"o{i}", dtype, shape) for i, (dtype, shape) in enumerate(results))
    eqn = Eqn(op, args, named, kwargs)
    found = rule(eqn, [on_axis(v.layout, "dp") for v in eqn.ins], "dp", size)
    return list(found.ins), list(found.outs)


def var(*shape, placement=None, dtype=torch.float32) -> Var:
    return Var("v", dtype, shape, (placement,) if placement else ())


W = var(12, 6, placement=CUT)
S = var()


# ---- elementwise operations


def test_elementwise_operations_run_on_shards():
    assert ask(aten.add.Tensor, W, W) == ([CUT, CUT], [CUT])
    assert ask(aten.mul.Tensor, W, 2.0) == ([CUT], [CUT])
    assert ask(aten.mul.Tensor, W, S) == ([CUT, None], [CUT])
    assert ask(aten._to_copy.default, W, dtype=torch.bfloat16) == ([CUT], [CUT])
    assert ask(aten.zeros_like.default, W) == ([CUT], [CUT])


def test_a_whole_argument_is_cut_without_a_message():
    assert ask(aten.add.Tensor, W, var(12, 6)) == ([CUT, CUT], [CUT])


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_elementwise_operations_run_on_uneven_and_empty_shards(rows):
    v = var(rows, placement=CUT)
    assert ask(aten.addcdiv.default, v, v, v, value=0.1, size=8) == ([CUT] * 3, [CUT])


def test_an_argument_that_is_broadcast_along_the_cut_dim_is_whole():
    assert ask(aten.mul.Tensor, W, var(6)) == ([CUT, None], [CUT])
    assert ask(aten.mul.Tensor, W, var(6, placement=CUT)) == ([CUT, None], [CUT])
    assert ask(aten.mul.Tensor, W, var(1, 6)) == ([CUT, None], [CUT])
    assert ask(aten.mul.Tensor, W, var(12, 1)) == ([CUT, CUT], [CUT])


def test_arguments_that_are_cut_along_two_dims_are_cut_along_one():
    assert ask(aten.add.Tensor, W, var(12, 6, placement=COLUMNS)) == ([CUT, CUT], [CUT])


def test_a_constant_tensor_is_not_cut():
    assert ask(aten.mul.Tensor, W, torch.ones(12, 6, device="meta")) == WHOLE


@pytest.mark.parametrize("number", [torch.ones((), device="meta"), 2.0])
def test_a_constant_number_is_no_tensor_that_would_be_cut(number):
    assert ask(aten.mul.Tensor, W, number) == ([CUT], [CUT])


def test_operations_on_shards_and_constant_tensors_run_on_whole_values():
    constant = torch.ones(12, 6, device="meta")
    assert ask(aten.stack.default, [W, constant]) == WHOLE
    assert ask(aten.cat.default, [constant, W], 1) == WHOLE
    assert ask(aten.mm.default, torch.ones(4, 12, device="meta"), W) == WHOLE
    assert ask(aten.addmm.default, constant, W, var(6, 6)) == ([None, None], [None])
    assert ask(aten.dot.default, torch.ones(12, device="meta"), var(12, placement=CUT)) == WHOLE


@pytest.mark.parametrize("shape", [(), (3,)])
def test_operations_on_terms_and_constant_tensors_run_on_whole_values(shape):
    terms = var(*shape, placement=TERMS)
    constant = torch.ones(shape, device="meta")
    assert ask(aten.div.Tensor, constant, terms) == WHOLE
    assert ask(aten.stack.default, [terms, constant]) == WHOLE
    assert ask(aten.cat.default, [var(3, placement=TERMS), torch.ones(3, device="meta")]) == WHOLE


def test_terms_beside_shards_are_scattered():
    assert ask(aten.add.Tensor, W, var(12, 6, placement=TERMS)) == ([CUT, CUT], [CUT])


def test_fused_optimizers_run_on_shards():
    how = {"beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    lists = [W], [W], [W], [W], [], [S]
    outs = [(W.dtype, W.shape)] * 4
    found = ask(aten._fused_adamw.default, *lists, outs=outs, lr=0.1, maximize=False, **how)
    assert found == ([CUT, CUT, CUT, CUT, None], [CUT] * 4)


def fused_adagrad(p, g, total):
    how = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    outs = [(W.dtype, W.shape)] * 3
    return ask(aten._fused_adagrad.default, [p], [g], [total], [S], outs=outs, **how)


def test_fused_optimizers_use_one_layout_for_all_their_tensors():
    whole = var(12, 6)
    terms = var(12, 6, placement=TERMS)
    assert fused_adagrad(whole, terms, W) == ([CUT] * 3 + [None], [CUT] * 3)
    assert fused_adagrad(var(12, 6, placement=COLUMNS), W, W)[1] == [COLUMNS] * 3
    assert fused_adagrad(whole, terms, whole) == ([None] * 4, [None] * 3)


# ---- views


def test_a_view_is_cut_where_a_dim_runs_over_the_same_memory():
    blocks = var(2, 12, 3, placement=COLUMNS)
    assert ask(aten.t.default, W) == ([CUT], [COLUMNS])
    assert ask(aten.unsqueeze.default, W, -2) == ([CUT], [CUT])
    assert ask(aten.unsqueeze.default, W, 0) == ([CUT], [COLUMNS])
    assert ask(aten.select.int, blocks, 0, 1) == ([COLUMNS], [CUT])
    assert ask(aten.expand.default, W, [5, 12, 6]) == ([CUT], [COLUMNS])
    assert ask(aten.unbind.int, blocks) == ([COLUMNS], [CUT, CUT])


def test_a_view_along_the_cut_dim_is_of_the_whole_value():
    assert ask(aten.slice.Tensor, W, 0, 0, 6) == WHOLE
    assert ask(aten.unfold.default, var(12, placement=CUT), 0, 3, 1) == WHOLE
    assert ask(aten.unbind.int, var(2, 6, placement=CUT), size=2) == ([None], [None, None])
    blocks = var(2, 4, 3, placement=COLUMNS)
    assert ask(aten._unsafe_view.default, blocks, [8, 3], size=2) == WHOLE


def test_dims_are_joined_and_divided_on_even_shards():
    assert ask(aten.view.default, W, [72]) == ([CUT], [CUT])
    assert ask(aten.view.default, var(72, placement=CUT), [12, 6]) == ([CUT], [CUT])
    assert ask(aten.view.default, var(10, 6, placement=CUT), [60]) == WHOLE


def test_a_complex_value_and_its_pairs_of_real_numbers_are_cut_alike():
    z = var(12, dtype=torch.complex64, placement=CUT)
    assert ask(aten.view_as_real.default, z) == ([CUT], [CUT])
    assert ask(aten.view_as_complex.default, var(12, 2, placement=CUT)) == ([CUT], [CUT])


def test_a_value_without_elements_becomes_whole():
    v = var(0, 6, placement=CUT)
    assert ask(aten.view.default, v, [0]) == WHOLE
    assert ask(aten.tanh.default, v) == ([CUT], [CUT])


# ---- reductions


def test_reductions_along_the_cut_dim_give_terms():
    assert ask(aten.sum.default, W) == ([CUT], [TERMS])
    assert ask(aten.sum.dim_IntList, W, [0]) == ([CUT], [TERMS])
    assert ask(aten.mean.default, W) == ([CUT], [MEANS])
    assert ask(aten.linalg_vector_norm.default, W) == ([CUT], [NORMS])
    assert ask(aten.amax.default, W) == ([CUT], [Partial("dp", "max")])


def test_reductions_along_other_dims_keep_the_cut():
    assert ask(aten.sum.dim_IntList, W, [-1]) == ([CUT], [CUT])
    assert ask(aten.linalg_vector_norm.default, W, 2, [1], True) == ([CUT], [CUT])
    assert ask(aten.mean.dim, var(6, 12, placement=COLUMNS), [0]) == ([COLUMNS], [CUT])
    assert ask(aten.max.dim, W, 1) == ([CUT], [CUT, CUT])


def test_norms_are_combined_by_their_order():
    norm = aten.linalg_vector_norm.default
    assert ask(norm, W, 1)[1] == [Partial("dp", "norm1.0")]
    assert ask(norm, W, float("inf"))[1] == [Partial("dp", "max")]
    assert ask(norm, W, 0) == ask(norm, W, -1) == WHOLE


def test_all_and_any_are_reduced_as_minimum_and_maximum():
    assert ask(aten.all.default, W)[1] == [Partial("dp", "min")]
    assert ask(aten.any.default, W)[1] == [Partial("dp", "max")]


def test_means_of_parts_of_different_sizes_are_not_combined():
    assert ask(aten.mean.default, var(10, 6, placement=CUT)) == WHOLE


def test_an_empty_shard_has_no_maximum():
    assert ask(aten.amax.default, var(3, placement=CUT)) == WHOLE
    assert ask(aten.sum.default, var(3, placement=CUT)) == ([CUT], [TERMS])


def test_the_position_of_a_maximum_is_that_in_the_whole_value():
    assert ask(aten.max.dim, W, 0) == ([None], [None, None])
    assert ask(aten.argmax.default, W, 0) == WHOLE


# ---- products


def test_a_product_keeps_rows_and_columns_that_it_does_not_sum_over():
    other = var(6, 12)
    assert ask(aten.mm.default, W, other) == ([CUT, None], [CUT])
    assert ask(aten.mm.default, other, var(12, 8, placement=COLUMNS)) == (
        [None, COLUMNS],
        [COLUMNS],
    )
    assert ask(aten.mv.default, W, var(6)) == ([CUT, None], [CUT])
    assert ask(aten.addmm.default, var(12), W, other) == ([None, CUT, None], [CUT])
    assert ask(aten.addmm.default, var(12, 12), W, other) == ([CUT, CUT, None], [CUT])
    assert ask(aten.addmm.default, var(), W, other) == ([None, CUT, None], [CUT])
    assert ask(aten.addmm.default, var(1, 12), W, other) == ([None, CUT, None], [CUT])
    batch = var(4, 2, 3, placement=CUT)
    assert ask(aten.bmm.default, batch, var(4, 3, 5)) == ([CUT, CUT], [CUT])


def test_every_other_product_runs_on_whole_values():
    square = var(12, 12)
    assert ask(aten.mm.default, square, W) == ([None, None], [None]), "it sums over the cut dim"
    columns = var(6, 12, placement=COLUMNS)
    assert ask(aten.mm.default, W, columns) == ([None, None], [None]), "both factors are cut"
    bias = var(1, 12, placement=CUT)
    assert ask(aten.addmm.default, bias, W, var(6, 12)) == ([None] * 3, [None])


def test_an_inner_product_is_a_sum():
    v = var(12, placement=CUT)
    assert ask(aten.dot.default, v, v) == ([CUT, CUT], [TERMS])


# ---- lists


def test_a_stack_has_a_new_dim():
    assert ask(aten.stack.default, [W, W], 1) == ([CUT, CUT], [CUT])
    assert ask(aten.stack.default, [W, W], -2) == ([CUT, CUT], [CUT])
    assert ask(aten.stack.default, [W, W], 0) == ([CUT, CUT], [COLUMNS])
    assert ask(aten.stack.default, [W, W], -3) == ([CUT, CUT], [COLUMNS])


def test_values_are_joined_on_shards_along_another_dim():
    assert ask(aten.cat.default, [W, var(12, 2)], 1) == ([CUT, CUT], [CUT])
    assert ask(aten.cat.default, [W, W], 0) == ([None, None], [None])


# ---- terms


def test_linear_operations_run_on_terms():
    terms = var(placement=TERMS)
    assert ask(aten.add.Tensor, terms, terms) == ([TERMS, TERMS], [TERMS])
    assert ask(aten.div.Tensor, terms, S) == ([TERMS, None], [TERMS])
    assert ask(aten.mul.Tensor, terms, 2.0) == ([TERMS], [TERMS])
    assert ask(aten._to_copy.default, terms, dtype=torch.float64) == ([TERMS], [TERMS])
    assert ask(aten.sum.default, var(3, placement=TERMS)) == ([TERMS], [TERMS])


def test_terms_are_reduced_before_any_other_operation():
    terms = var(placement=TERMS)
    assert ask(aten.mul.Tensor, terms, terms) == ([None, None], [None])
    assert ask(aten.sqrt.default, terms) == WHOLE
    assert ask(aten.add.Tensor, terms, 1) == WHOLE
    assert ask(aten.add.Tensor, terms, S) == ([None, None], [None])
    assert ask(aten._to_copy.default, terms, dtype=torch.int64) == WHOLE


def test_norms_of_parts_are_stacked_but_not_computed_with():
    norm = var(placement=NORMS)
    assert ask(aten.stack.default, [norm, norm]) == ([NORMS, NORMS], [NORMS])
    assert ask(aten.stack.default, [norm, S]) == ([None, None], [None])
    assert ask(aten.mul.Tensor, norm, 2.0) == WHOLE
    assert ask(aten.linalg_vector_norm.default, var(3, placement=NORMS)) == WHOLE


def test_adding_zero_keeps_terms():
    """Python's `sum` starts from zero."""
    assert ask(aten.add.Tensor, var(placement=TERMS), 0) == ([TERMS], [TERMS])
    assert ask(aten.add.Tensor, var(placement=NORMS), 0.0) == ([NORMS], [NORMS])


def test_terms_of_a_sum_are_not_terms_of_a_mean():
    sums = var(3, placement=TERMS)
    means = var(3, placement=MEANS)
    assert ask(aten.cat.default, [sums, means]) == ([None, None], [None])
    assert ask(aten.cat.default, [sums, sums]) == ([TERMS, TERMS], [TERMS])


# ---- everything else


def test_an_operation_that_the_table_does_not_know_runs_on_whole_values():
    assert ask(aten.renorm.default, W, 2, 0, 1.0) == WHOLE
    assert ask(aten.cumprod.default, W, 1) == WHOLE
    assert ask(aten.prod.default, W) == WHOLE
    counts = [(torch.int64, (3,))]
    assert ask(aten.bincount.default, var(12, placement=CUT), outs=counts) == WHOLE


@torch.library.custom_op("letters::product", mutates_args=())
def product(x: torch.Tensor, scale: float, factors: list[torch.Tensor]) -> torch.Tensor:
    return scale * (x @ factors[0]).mv(factors[1])


product.register_fake(lambda x, scale, factors: x.new_empty(len(x)))
register_sharding(torch.ops.letters.product.default)(zt.sharding_rule("m k, k _, _ -> m"))


def test_a_pattern_is_the_rule_of_an_operator():
    def placements(x, factor):
        outs = [(torch.float32, (12,))]
        ins = x, 2.0, [factor, var(8)]
        return ask(torch.ops.letters.product.default, *ins, outs=outs)

    assert placements(W, var(6, 8)) == ([CUT, None, None], [CUT])
    inner = var(8, 12, placement=COLUMNS), var(12, 8, placement=CUT)
    assert placements(*inner) == ([COLUMNS, CUT, None], [TERMS])
    assert placements(var(12, 6), var(6, 8, placement=COLUMNS)) == ([None] * 3, [None])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a b", "one arrow, .* got 'a b'"),
        ("a, b -> a", "shows 2 arguments of an operation that has 3"),
        ("a -> a, a", "shows 2 results of an operation that has 3"),
    ],
)
def test_a_pattern_that_shows_another_operation_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        letters_of(parse(pattern), ((5,), (5,), (5,)), 3)


def test_an_operator_without_a_registered_rule_is_refused():
    with pytest.raises(NoRule):
        ask(
            torch.ops._c10d_functional.all_reduce.default,
            W,
            "sum",
            "group",
            outs=[(W.dtype, W.shape)],
        )
