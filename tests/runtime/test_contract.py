"""What ranks compare before they run a program."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from ztrans.runtime import contract
from ztrans.runtime.contract import Contract, first_difference, message_lines, update_hash


def of_matrices(state, x):
    """An update by products of matrices. With a batch of one row, backward transposes once more."""
    grads, loss = grad_and_value(lambda p: (x @ p["a"] @ p["b"]).square().mean())(state)
    return {k: state[k] - g @ g.t() @ g / g.norm() for k, g in grads.items()}, loss


@pytest.mark.parametrize("stage", [1, 3])
def test_programs_for_two_sizes_of_a_batch_have_the_same_contract(stage):
    """They number temporary values in other ways."""
    state = {"a": torch.ones(4, 1), "b": torch.ones(1, 5)}
    step = zt.shard_params(zt.AbstractMesh(dp=3), stage=stage)(of_matrices)
    first = step.lower(state, torch.ones(4, 4))
    other = step.trace(state, torch.ones(1, 4)).lower(plan=first.plan, follow=True)
    lines, others = (Contract(x.graph, update_hash(x.unordered)).lines for x in (first, other))
    assert lines == others and len(lines) > 3


@pytest.mark.parametrize("stage", [1, 3])
def test_programs_for_two_sizes_of_a_batch_wait_in_the_same_order(monkeypatch, stage):
    """Between hosts their contract has these waits."""
    monkeypatch.setattr(
        contract, "has_second_level_at_wait", lambda mesh, eqn, sizes: "op" not in eqn.kwargs
    )
    state = {"a": torch.ones(4, 1), "b": torch.ones(1, 5)}
    transforms = zt.shard_params(zt.AbstractMesh(dp=3), stage=stage), zt.prefetch()
    step = zt.chain(*transforms)(of_matrices)
    first = step.lower(state, torch.ones(4, 4))
    other = step.trace(state, torch.ones(1, 4)).lower(plan=first.plan, follow=True)
    lines, others = (Contract(x.graph, "", "a mesh").lines for x in (first, other))
    assert lines == others
    assert any("the second level of all_gather of a.full" in line for line in lines), lines


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_no_rank_reduces_must_be_the_same_on_all(stage):
    """It does not depend on the batch, so a constant of the rank reaches the state. Behind a reduction it may differ."""

    def update(factor, alone):
        def step(state, x):
            penalty = lambda w: factor * w.square().sum()
            grad, _ = grad_and_value(lambda w: (x @ w).sum() + (0 if alone else penalty(w)))(state)
            return state - grad - (grad_and_value(penalty)(state)[0] if alone else 0), x.sum()

        shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
        return update_hash(shard(step).lower(torch.ones(4, 2), torch.ones(3, 4)).unordered)

    assert update(1.0, alone=False) == update(2.0, alone=False)
    assert update(1.0, alone=True) != update(2.0, alone=True)


def test_ranks_compare_the_number_of_micro_batches():
    state = {"a": torch.ones(4, 1), "b": torch.ones(1, 5)}
    shard = zt.shard_params(zt.AbstractMesh(dp=3))
    lines = []
    for micro in (1, 2, 3):
        step = zt.chain(shard, zt.accumulate(micro))(of_matrices)
        graph = step.lower(state, torch.ones(6, 4)).graph
        lines.append(message_lines(graph, {}))
    assert [each[0] for each in lines[1:]] == ["2 micro-batches", "3 micro-batches"]
    assert not any("micro-batches" in line for line in lines[0])


def test_a_line_that_only_one_rank_has_is_a_difference():
    """As a number of the step that lies on the GPU of another rank, where it is not compared."""
    text = first_difference([0, 4], [["a", "lr = 0.1"], ["a"]])
    assert "on rank 0: lr = 0.1\n    on rank 4: nothing\n" in text


def with_rate(state, x):
    """An update with a rate in the state, which it returns as it is, and a count, which it changes."""
    grads, loss = grad_and_value(lambda w: (x @ w).square().mean())(state["w"])
    w = state["w"] - state["rate"] * grads * state["count"]
    return {"w": w, "rate": state["rate"], "count": state["count"] + 1}, loss


def rates_differ(axes: tuple[str, ...], shape: tuple[int, ...], numbers=()) -> str:
    """What the error says about ranks with other rates and counts; `axes` are those of the leaves of the state."""
    state = {"w": torch.ones(4, 4), "rate": 0.1, "count": 1.0}
    names = ("host", "dp")[-len(shape) :]
    apart = "host" if len(shape) > 1 else None
    mesh = zt.AbstractMesh(**dict(zip(names, shape)))
    step = zt.shard_params(mesh, axis="dp", independent_axis=apart)(with_rate)
    graph = step.lower(state, torch.ones(2, 4)).graph
    contract = Contract(graph, "", axes=[axes] * 3)
    order = [v.name for v in graph.inputs[:3]]
    terms = {}
    for rank, (rate, count) in enumerate([(0.1, 1.0), (0.1, 1.0), (0.05, 1.0), (0.05, 2.0)]):
        if rank < torch.Size(shape).numel():
            by_name = {
                "w": torch.ones(4, 4),
                "rate": torch.tensor(rate),
                "count": torch.tensor(count),
            }
            inputs = [by_name[name] for name in order]
            terms[rank] = contract.terms(inputs, 3, set_by_caller=[order.index(n) for n in numbers])
    assert len({repr(x) for x in terms.values()}) > 1, "the digests differ, so the ranks ask"
    ranks = SimpleNamespace(mesh=torch.arange(len(terms)).view(shape), mesh_dim_names=names)
    return contract.explain(ranks, terms)


def test_a_number_of_the_state_that_differs_between_ranks_is_an_error():
    """Ranks would train at two rates, and nothing would show it."""
    text = rates_differ(("dp",), (4,))
    assert "    on rank 0: rate = 0.1" in text and "    on rank 2: rate = 0.05" in text
    assert "Set a number of the state to the same value on all ranks" in text


def test_hosts_that_train_apart_may_have_numbers_of_their_own():
    assert rates_differ(("dp",), (2, 2)) == ""
    assert "    on rank 2: rate = 0.05" in rates_differ(("host", "dp"), (2, 2))


def test_a_number_that_the_step_changes_is_compared_if_the_caller_has_set_it():
    """Otherwise it is a counter, of which an optimizer has one for each parameter."""
    text = rates_differ(("dp",), (2, 2), numbers=["count"])
    assert "    on rank 2: count = 1.0" in text and "    on rank 3: count = 2.0" in text
