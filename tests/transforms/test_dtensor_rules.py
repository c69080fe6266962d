"""DTensor's sharding rules for single equations, without a process group."""

import pytest
import torch

from tests.support.versions import OLD
from ztrans.ir.graph import Eqn, Partial, Split, Var, substitute
from ztrans.transforms.sharding.dtensor_rules import NoRule, rule

aten = torch.ops.aten
CUT, TERMS = (Split("dp"),), (Partial("dp", "sum"),)


def shapes(op, args, kwargs) -> list[tuple[int, ...]] | None:
    """The shapes of the results of an operation; None where PyTorch cannot tell them."""
    meta = lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta")
    try:
        returned = op(*substitute(args, meta), **substitute(kwargs, meta))
    except (NotImplementedError, RuntimeError):
        return None
    results = returned if isinstance(returned, tuple | list) else [returned]
    return (
        [tuple(x.shape) for x in results]
        if all(isinstance(x, torch.Tensor) for x in results)
        else None
    )


def ask(op, *args, outs: int = 1, size: int = 4, **kwargs):
    results = tuple(
        Var(f"o{i}", torch.float32, shape)
        for i, shape in enumerate(shapes(op, args, kwargs) or [()] * outs)
    )
    assert len(results) == outs
    wanted, given = rule(Eqn(op, args, results, kwargs), lambda v: v.layout, "dp", size)
    return list(wanted), list(given)


def var(*shape: int, layout=()) -> Var:
    return Var("v", torch.float32, shape, layout)


W, S = var(12, 6, layout=CUT), var()


def test_elementwise_operations_run_on_shards():
    assert ask(aten.add.Tensor, W, W) == ([CUT, CUT], [CUT])
    assert ask(aten.mul.Tensor, W, 2.0) == ([CUT], [CUT])
    assert ask(aten.mul.Tensor, W, S) == ([CUT, ()], [CUT])
    assert ask(aten.add.Tensor, W, var(12, 6)) == (
        [CUT, CUT],
        [CUT],
    )  # a whole value is cut without a message
    assert ask(aten._to_copy.default, W, dtype=torch.bfloat16) == ([CUT], [CUT])


def test_elementwise_operations_run_on_uneven_and_empty_shards():
    for rows in (1, 3, 7):
        v = var(rows, layout=CUT)
        assert ask(aten.addcdiv.default, v, v, v, value=0.1, size=8) == ([CUT] * 3, [CUT])


@pytest.mark.parametrize(
    "op", [aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default]
)
def test_dims_may_be_counted_from_the_end(op):
    vector = var(12, layout=CUT)
    assert ask(op, vector, 0) == ask(op, vector, -1) == ([()], [()])
    no_rule = OLD and op is not aten.cumsum.default  # on torch 2.11, whose DTensor has few rules
    assert ask(op, W, 1) == ask(op, W, -1) == (([()], [()]) if no_rule else ([CUT], [CUT]))
    assert ask(op, W, 0) == ask(op, W, -2) == ([()], [()])


def test_dims_of_a_result_with_one_dim_more_may_be_counted_from_the_end():
    assert (
        ask(aten.stack.default, [W, W], 1)
        == ask(aten.stack.default, [W, W], -2)
        == ([CUT, CUT], [CUT])
    )
    assert (
        ask(aten.stack.default, [W, W], 0)[1]
        == ask(aten.stack.default, [W, W], -3)[1]
        == [(Split("dp", 1),)]
    )
    assert ask(aten.unsqueeze.default, W, 1) == ask(aten.unsqueeze.default, W, -2) == ([CUT], [CUT])


@pytest.mark.parametrize(
    "op", [aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim]
)
def test_positions_along_the_cut_dim_are_found_in_the_whole_value(op):
    outs = 2 if op in (aten.max.dim, aten.min.dim) else 1
    assert ask(op, W, 0, outs=outs) == ([()], [()] * outs)
    assert ask(op, W, 1, outs=outs) == ([CUT], [CUT] * outs)


def test_views_that_dtensor_does_not_know_run_on_whole_values():
    assert ask(aten.unfold.default, var(12, layout=CUT), 0, 3, 1) == ([()], [()])


def test_a_matmul_of_shards_gathers_one_operand():
    wanted, given = ask(aten.mm.default, W, var(6, 12, layout=(Split("dp", 1),)))
    assert given == [CUT] and wanted[0] == CUT and wanted[1] == ()
    assert ask(aten.t.default, W) == ([CUT], [(Split("dp", 1),)])


def test_sums_and_norms_of_shards_are_terms():
    assert ask(aten.sum.default, W) == ([CUT], [TERMS])
    assert ask(aten.linalg_vector_norm.default, W) == ([CUT], [(Partial("dp", "norm2.0"),)])
    assert ask(aten.add.Tensor, var(layout=TERMS), var(layout=TERMS)) == ([TERMS, TERMS], [TERMS])


def test_norms_of_shards_are_combined_only_by_their_kind():
    norm, of = aten.linalg_vector_norm.default, lambda op: [(Partial("dp", op),)]
    assert ask(norm, W, float("inf"))[1] == of("max") and ask(norm, W, 1)[1] == of("norm1.0")
    assert ask(norm, W, 2, [1], True) == ([CUT], [CUT]) and ask(norm, W, 2, [0], True)[1] == of(
        "norm2.0"
    )
    terms = var(layout=(Partial("dp", "norm2.0"),))
    assert ask(aten.stack.default, [terms, terms])[1] == of("norm2.0"), (
        "clip_grad_norm_ stacks all norms"
    )
    for op, *args in (
        (aten.stack.default, [terms, S]),
        (norm, var(3, layout=terms.layout)),
        (aten.mul.Tensor, terms, 2.0),
    ):
        wanted, given = ask(op, *args)
        assert not any(wanted) and given == [()], (
            "a term of a norm must be reduced before any other use"
        )


def test_reductions_along_a_dim_are_terms_only_along_the_cut_dim():
    assert ask(aten.sum.dim_IntList, W, [1]) == ([CUT], [CUT])
    assert ask(aten.sum.dim_IntList, W, [0]) == ([CUT], [TERMS])
    assert ask(aten.mean.default, W)[1] == [(Partial("dp", "mean"),)]
    assert ask(aten._softmax.default, W, -1, False) == ([CUT], [CUT])
    assert ask(aten._softmax.default, W, 0, False) == ([()], [()])
    assert ask(aten.mm.default, var(6, 12, layout=(Split("dp", 1),)), W)[1] == [TERMS]


def test_only_linear_operations_read_terms():
    terms = var(layout=TERMS)
    assert ask(aten.div.Tensor, terms, S) == ([TERMS, ()], [TERMS])
    assert ask(aten.mul.Tensor, terms, terms) == ([TERMS, ()], [TERMS]), "one factor is reduced"
    assert ask(aten.sqrt.default, terms) == ([()], [()])
    assert ask(aten.add.Tensor, terms, 1) == ([()], [()])


def test_a_broadcast_operand_becomes_whole_and_mixed_cuts_become_one():
    assert ask(aten.mul.Tensor, W, var(6)) == ([CUT, ()], [CUT])
    assert ask(aten.mul.Tensor, W, var(6, layout=CUT)) == ([CUT, ()], [CUT])
    assert ask(aten.add.Tensor, W, var(12, 6, layout=(Split("dp", 1),))) == ([CUT, CUT], [CUT])


def test_an_operation_on_whole_values_needs_no_rule():
    assert ask(aten.renorm.default, var(3, 4), 2, 0, 1.0) == ([()], [()])


def test_adding_zero_to_terms_keeps_terms():
    """Python's `sum` starts from zero."""
    assert ask(aten.add.Tensor, var(layout=TERMS), 0) == ([TERMS], [TERMS])
    assert ask(aten.add.Tensor, var(layout=TERMS), 0.0) == ([TERMS], [TERMS])
    assert ask(aten.add.Tensor, var(layout=(Partial("dp", "norm2.0"),)), 0)[1] == [
        (Partial("dp", "norm2.0"),)
    ]


def test_whole_values_do_not_become_terms():
    wanted, given = ask(aten.add.Tensor, var(layout=TERMS), S)
    assert not any(isinstance(p, Partial) for p in wanted[1])
    assert given == [()] and wanted == [(), ()]
    square = var(12, 12)
    assert ask(aten.addmm.default, square, square, var(12, 12, layout=CUT)) == ([()] * 3, [()])
    assert ask(aten.mm.default, square, var(12, 12, layout=CUT)) == (
        [(Split("dp", 1),), CUT],
        [TERMS],
    )


def test_terms_of_a_sum_are_not_terms_of_a_mean():
    sums, means = var(3, layout=TERMS), var(3, layout=(Partial("dp", "mean"),))
    for pair in ([sums, means], [means, sums]):
        assert ask(aten.cat.default, pair) == ([(), ()], [()])
    assert ask(aten.cat.default, [sums, sums]) == ([TERMS] * 2, [TERMS])


def test_the_maximum_of_a_value_with_empty_shards_runs_on_the_whole_value():
    """An empty shard has no maximum."""
    assert ask(aten.amax.default, W)[1] == [(Partial("dp", "max"),)]
    assert ask(aten.amax.default, var(3, layout=CUT)) == ([()], [()])


def test_fused_optimizers_run_on_shards():
    wanted, given = ask(
        aten._fused_adamw.default, [W], [W], [W], [W], [], [S], outs=4,
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert wanted == [CUT, CUT, CUT, CUT, ()] and given == [CUT] * 4
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}
    how = {"weight_decay": 0.0, "maximize": False}
    assert ask(aten._fused_sgd.tensor_lr, [W], [W], [W], outs=3, lr=S, **momentum, **how) == (
        [CUT] * 3 + [()],
        [CUT] * 3,
    )
    assert ask(aten._fused_sgd.default, [W], [W], [], outs=2, lr=0.1, **momentum, **how) == (
        [CUT] * 2,
        [CUT] * 2,
    )
    adagrad = ask(
        aten._fused_adagrad.default,
        [W],
        [W],
        [W],
        [S],
        outs=3,
        lr=0.1,
        lr_decay=0.0,
        eps=1e-8,
        **how,
    )
    assert adagrad == ([CUT] * 3 + [()], [CUT] * 3)


def test_fused_optimizers_use_one_layout_for_all_their_tensors():
    whole, columns = var(12, 6), var(12, 6, layout=(Split("dp", 1),))
    terms = var(12, 6, layout=TERMS)
    how = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    assert ask(aten._fused_adagrad.default, [whole], [terms], [W], [S], outs=3, **how) == (
        [CUT] * 3 + [()],
        [CUT] * 3,
    )
    assert (
        ask(aten._fused_adagrad.default, [columns], [W], [W], [S], outs=3, **how)[1]
        == [(Split("dp", 1),)] * 3
    )
    assert (
        ask(aten._fused_adagrad.default, [whole], [terms], [whole], [S], outs=3, **how)[0]
        == [()] * 4
    )


def test_flattening_uneven_shards_runs_on_the_whole_value():
    assert ask(aten.view.default, W, [72]) == ([CUT], [CUT])
    assert ask(aten.view.default, var(10, 6, layout=CUT), [60]) == ([()], [()])


def test_layouts_that_ztrans_does_not_have_become_whole():
    """DTensor does not unbind a cut dim, and would give each rank a part of every block when dims are merged."""
    assert ask(aten.unbind.int, var(2, 6, layout=CUT), outs=2, size=2) == ([()], [(), ()])
    blocks = var(2, 4, 3, layout=(Split("dp", 1),))
    assert ask(aten._unsafe_view.default, blocks, [8, 3], size=2) == ([()], [()])


def test_operations_that_fail_on_an_empty_shard_run_on_whole_values():
    v, none = var(4, 6, layout=CUT), var(0, 6, layout=CUT)
    whole, kept = ([()], [()]), ([CUT], [CUT])
    assert ask(aten._fft_r2c.default, v, [1], 0, True, size=3) == whole
    assert ask(aten.linalg_vector_norm.default, v, -1, [1], size=3) == whole
    assert ask(aten.linalg_vector_norm.default, v, -1, [1], size=2) == kept
    assert (
        ask(aten.tanh.default, v, size=3) == kept
        and ask(aten.view.default, v, [4, 2, 3], size=3) == kept
    )
    assert (
        ask(aten.sum.dim_IntList, v, [1], size=3) == kept
        and ask(aten._to_copy.default, v, size=3) == kept
    )
    assert ask(aten.view.default, none, [0]) == whole and ask(aten.tanh.default, none) == kept


def test_an_operation_of_pytorch_without_a_rule_runs_on_whole_values():
    assert (
        ask(aten.renorm.default, W, 2, 0, 1.0)
        == ask(aten.linalg_matrix_exp.default, W)
        == ([()], [()])
    )
    assert ask(aten.bincount.default, var(12, layout=CUT)) == ([()], [()])


def test_random_operations_and_collectives_without_a_rule_raise():
    """A random operation on whole values would draw other numbers on each rank."""
    with pytest.raises(NoRule):
        ask(aten._standard_gamma.default, W)
    with pytest.raises(NoRule):
        ask(torch.ops._c10d_functional.all_reduce.default, W, "sum", "group")


def test_all_and_any_are_reduced_as_minimum_and_maximum():
    """Or they run on whole values, as DTensor wants in torch 2.14. A product always runs on whole values."""

    def truth(op):
        return rule(Eqn(op, (W,), (Var("o", torch.bool, ()),)), lambda v: v.layout, "dp", 4)

    whole = ([()], [()])
    assert truth(aten.all.default) in (whole, ([CUT], [(Partial("dp", "min"),)]))
    assert truth(aten.any.default) in (whole, ([CUT], [(Partial("dp", "max"),)]))
    assert ask(aten.prod.default, W) == ([()], [()])
