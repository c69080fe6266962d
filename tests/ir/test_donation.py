"""What writes over its arguments: the same bits, in their place, and never where somebody still reads."""

from __future__ import annotations

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.donation import donation, onto

aten = torch.ops.aten


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]), dtype=dtype)


CALLS = {
    "softmax": (aten._softmax.default, lambda x, dim: (x, dim, False), (0,)),
    "log_softmax": (aten._log_softmax.default, lambda x, dim: (x, dim, False), (0,)),
    "softmax_backward": (
        aten._softmax_backward_data.default,
        lambda x, dim: (x, x.softmax(dim).flip(1), dim, x.dtype),
        (0, 1),
    ),
    "log_softmax_backward": (
        aten._log_softmax_backward_data.default,
        lambda x, dim: (x, x.log_softmax(dim).flip(1), dim, x.dtype),
        (0, 1),
    ),
    "gelu": (aten.gelu.default, lambda x, dim: (x,), (0,)),
    "gelu_backward": (aten.gelu_backward.default, lambda x, dim: (x, x.flip(1)), (0, 1)),
    "tanh_backward": (aten.tanh_backward.default, lambda x, dim: (x, x.flip(1).tanh()), (0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 1), ((33, 1030), 1), ((33, 1030), 0), ((130, 9, 17), 1)])
def test_a_result_takes_the_place_of_what_it_was_made_of(name, dtype, shape, dim):
    op, arguments, places = CALLS[name]
    for place in places:
        args = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments(rows(*shape, dtype=dtype), dim))
        wanted, target = op(*args), args[place]
        made = onto(op, place)(*args)
        assert made.data_ptr() == target.data_ptr()
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_lie_in_order_is_left_alone(name):
    op, arguments, places = CALLS[name]
    for place in places:
        args = list(arguments(rows(12, 6), 1))
        args[place] = args[place].t().contiguous().t()  # the same values, transposed in memory
        wanted, before = op(*args), args[place].clone()
        made = onto(op, place)(*args)
        assert torch.equal(made, wanted) and torch.equal(args[place], before)


def test_a_scalar_is_written_over_another_only_where_it_is_alone():
    """One of two may lie on a CPU, as a learning rate does, and the result on a GPU."""

    def step(state, x):
        rate = state["lr"] * 0.5 + 1
        return {"lr": state["lr"]}, rate * x.sum()

    graph = zt.Step.of(step).lower({"lr": torch.ones(())}, torch.ones(3)).graph
    twins = donation(graph).twins
    assert [e for e in graph.eqns if e.op == aten.add.Tensor and e in twins]
    (product,) = [e for e in graph.eqns if e.op == aten.mul.Tensor and len(e.ins) == 2]
    assert product not in twins


def test_programs_do_so():
    over = set()
    for name in ("accumulation", "autocast"):
        over |= {getattr(twin, "__name__", str(twin)) for twin in donation(on_ranks(CASES[name], 2).graph).twins.values()}
    assert {"tanh_backward_over", "_log_softmax_over", "_log_softmax_backward_data_over"} <= over
