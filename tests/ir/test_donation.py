"""Donation: an operation may overwrite an argument that is not read later. The result has the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.donation import batch_norm_over, donation, onto

aten = torch.ops.aten


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]), dtype=dtype
    )


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
@pytest.mark.parametrize(
    ("shape", "dim"), [((5, 3), 1), ((33, 1030), 1), ((33, 1030), 0), ((130, 9, 17), 1)]
)
def test_a_result_overwrites_a_contiguous_argument(name, dtype, shape, dim):
    op, arguments, places = CALLS[name]
    for place in places:
        args = tuple(
            a.contiguous() if isinstance(a, torch.Tensor) else a
            for a in arguments(rows(*shape, dtype=dtype), dim)
        )
        wanted, target = op(*args), args[place]
        result = onto(op, place)(*args)
        assert result.data_ptr() == target.data_ptr()
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_not_contiguous_is_not_overwritten(name):
    op, arguments, places = CALLS[name]
    for place in places:
        args = list(arguments(rows(12, 6), 1))
        args[place] = args[place].t().contiguous().t()  # the same values, transposed in memory
        wanted, before = op(*args), args[place].clone()
        result = onto(op, place)(*args)
        assert torch.equal(result, wanted) and torch.equal(args[place], before)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_arithmetic_overwrites_an_argument_that_lies_in_memory_as_the_result_does(
    op, place, is_transposed
):
    args = [torch.randn(12, 6).t().contiguous().t() for _ in range(2)]
    if not is_transposed:
        args[1 - place] = args[1 - place].contiguous()
    wanted = op(*args)
    result = onto(op, place)(*args)
    assert torch.equal(result, wanted) and result.stride() == wanted.stride()
    assert (result.data_ptr() == args[place].data_ptr()) is is_transposed


def test_arithmetic_with_a_scalar_overwrites_a_transposed_argument():
    x = torch.randn(12, 6).t()
    assert onto(aten.mul.Tensor, 1)(torch.tensor(2.0), x) is x


def test_a_scalar_is_overwritten_only_if_it_is_the_only_tensor_argument():
    """A scalar may be on the CPU, as a learning rate is, while the result of the operation is on the GPU."""

    def step(state, x):
        rate = state["lr"] * 0.5 + 1
        return {"lr": state["lr"]}, rate * x.sum()

    graph = zt.Step.of(step).lower({"lr": torch.ones(())}, torch.ones(3)).graph
    twins = donation(graph).in_place_ops
    assert [e for e in graph.eqns if e.op == aten.add.Tensor and e in twins]
    (product,) = [e for e in graph.eqns if e.op == aten.mul.Tensor and len(e.ins) == 2]
    assert product not in twins


@pytest.mark.slow
def test_programs_overwrite_arguments_of_softmax_and_tanh_in_backward():
    over = set()
    for name in ("accumulation", "autocast"):
        over |= {
            getattr(twin, "__name__", str(twin))
            for twin in donation(on_ranks(CASES[name], 2).graph).in_place_ops.values()
        }
    assert {"tanh_backward_over", "_log_softmax_over", "_log_softmax_backward_data_over"} <= over


def test_a_batch_norm_writes_its_statistics_in_place():
    def step(state, x):
        mean, variance = state["mean"].clone(), state["variance"].clone()
        y = torch.nn.functional.batch_norm(x, mean, variance, training=True)
        return {"mean": mean, "variance": variance}, y

    state, x = {"mean": torch.zeros(3), "variance": torch.ones(3)}, torch.randn(4, 3)
    graph = zt.Step.of(step).trace(state, x).graph
    (norm,) = (e for e in graph.eqns if "batch_norm" in str(e.op))
    assert donation(graph).in_place_ops[norm] is batch_norm_over
    expected, y = step(state, x)
    addresses = [v.data_ptr() for v in state.values()]
    new, output = zt.Step.of(step)(state, x)
    assert [v.data_ptr() for v in new.values()] == addresses
    assert torch.equal(output, y) and all(torch.equal(new[k], expected[k]) for k in expected)


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}


def in_place_adam(lists, gradients, **options):
    copies = [[x.clone() for x in each] for each in lists]
    before = sum(gradients)
    torch._fused_adam_(copies[0], gradients, *copies[1:3], [], copies[3], **options)
    return copies, before, sum(gradients)


def functional_adam(lists, gradients, **options):
    new = aten._fused_adam.default(lists[0], gradients, *lists[1:3], [], lists[3], **options)
    return [new[0], new[2], new[3], lists[3]], sum(gradients), sum(new[1])


@pytest.mark.parametrize("adam", [in_place_adam, functional_adam])
def test_a_fused_optimizer_that_unscales_gradients_writes_over_none_that_is_read_later(adam):
    """With `grad_scale` the twin that writes in place writes the gradients too."""

    def step(state, x):
        options = dict(**ADAM, amsgrad=False, maximize=False, found_inf=state["inf"])
        lists, before, after = adam(
            state["lists"], [x * 4, x * 8], grad_scale=state["scale"], **options
        )
        return {**state, "lists": lists}, (before, after)

    def make_state():
        matrices = [[torch.full((3,), value) for _ in range(2)] for value in (1.0, 0.0, 0.0)]
        counts = [torch.ones(()) for _ in range(2)]
        return {
            "lists": [*matrices, counts],
            "scale": torch.tensor(4.0),
            "inf": torch.zeros(()),
        }

    x = torch.arange(1.0, 4.0)
    (expected, outputs), (new, found) = step(make_state(), x), zt.Step.of(step)(make_state(), x)
    assert torch.equal(outputs[0], 12 * x) and torch.equal(outputs[1], 3 * x)
    assert torch.equal(found[0], outputs[0]) and torch.equal(found[1], outputs[1])
    for mine, theirs in zip(tree_leaves(new["lists"]), tree_leaves(expected["lists"])):
        assert torch.equal(mine, theirs)


def test_an_update_by_gradients_in_half_precision_writes_over_its_moments():
    """Unlike PyTorch's, this one declares that it reads its gradients alone."""
    names = ("w", "m", "v")
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}

    def step(state, x):
        lists = [[state["w"]], [x.half()], [state["m"]], [state["v"]]]
        new = torch.ops.ztrans.fused_adamw(*lists, [state["count"]], lr=state["lr"], **numbers)
        return {**state, **{name: values[0] for name, values in zip(names, new)}}, ()

    state = {name: torch.ones(3) for name in names}
    state.update(count=torch.tensor(1.0), lr=torch.tensor(0.1, dtype=torch.float64))
    graph = zt.Step.of(step).trace(state, torch.ones(3)).graph
    owner = donation(graph).owner
    assert [owner[v].name for v in graph.outputs] == [*names, "count", "lr"]


def test_a_view_that_the_schema_does_not_declare_is_not_overwritten_before_its_argument_is_read():
    def step(state, x):
        wave = x.sin()
        flat = torch.ops.aten._unsafe_view(wave, [6])
        return {"total": state["total"] + flat.exp().sum() + wave.sum()}, 0.0

    state, x = {"total": torch.zeros(())}, torch.ones(2, 3)
    wanted = step(state, x)[0]["total"]
    assert torch.equal(zt.Step.of(step)(state, x)[0]["total"], wanted)
