"""`zt.ema`: the averages of a hand-written loop around PyTorch's own function, bit for bit."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, clone, distance, slices


def lifted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def loop_step(x):
        adam.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        adam.step()
        return loss

    return model, adam, loop_step


BATCHES = [torch.linspace(-1, k, 12).view(4, 3) for k in range(3)]


def test_a_lifted_loop_has_the_bits_of_pytorchs_function():
    model, _, loop_step = lifted()
    averages = [p.detach().clone() for p in model.parameters()]
    update = get_ema_multi_avg_fn(0.9)
    for x in BATCHES:
        loop_step(x)
        update(averages, [p.detach() for p in model.parameters()], None)

    model, adam, loop_step = lifted()
    step, state = zt.lift(loop_step, model, adam)
    step = zt.ema(0.9)(step)
    for x in BATCHES:
        state, _ = step(state, x)
    assert all(map(torch.equal, state["ema"].values(), averages))
    # In an evaluation the averages stay as they are, and stand where the parameters were.
    evaluate = step.eval(lambda: torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(evaluate(step.ema(state)), torch.cat([a.flatten() for a in averages]))
    assert all(map(torch.equal, state["ema"].values(), averages))
    again = step.ema(step.ema(state))
    assert again["params"]["0.weight"] is state["params"]["0.weight"]
    zt.write_back(model, adam, step.ema(state))
    assert all(map(torch.equal, model.parameters(), averages))


@pytest.mark.parametrize(
    "extra", [(), ALL, (zt.accumulate(2), *ALL)], ids=["alone", "all", "micro"]
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_averages_are_updated_on_shards(stage, extra):
    case = CASES["mlp_momentum"]
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    with_averages = zt.chain(shard, zt.ema(0.7), *extra)(case.step)
    state = with_averages.init(case.state())
    rows = [slices(batch, 2) for batch in batches(case, 3)]
    lowered = with_averages.lower(state, *rows[0][0])
    without = zt.chain(shard, *extra)(case.step).lower(case.state(), *rows[0][0])
    expected = case.state()
    averages = [p.clone() for p in expected["params"].values()]
    update = get_ema_multi_avg_fn(0.7)
    for each in rows:
        state, _ = lowered.lockstep(state, each)
        expected, _ = without.lockstep(expected, each)
        update(averages, [*expected["params"].values()], None)
    assert distance(state.state, expected) == 0
    assert distance([*state.kept["ema"].values()], averages) == 0
    # Nothing is sent for them, and each lies as its parameter does.
    assert lowered.cost_analysis().wire == without.cost_analysis().wire
    leaves = {v.name: v for v in lowered.graph.state}
    averaged = [v for name, v in leaves.items() if name.startswith("ema.")]
    assert averaged and all(v.is_like(leaves[v.name.removeprefix("ema.")]) for v in averaged)


def test_one_call_updates_all_averages():
    model, adam, loop_step = lifted()
    step, state = zt.lift(loop_step, model, adam)
    plain = zt.Step.of(step).lower(state, BATCHES[0]).cost_analysis()
    averaging = zt.ema(0.9)(step).lower(state, BATCHES[0]).cost_analysis()
    assert (averaging.calls, averaging.launches) == (plain.calls + 1, plain.launches + 1)


def test_it_obeys_the_laws():
    case = CASES["mlp_momentum"]
    batch = batches(case, 1)[0]
    zt.testing.check_laws(zt.ema(0.9), case.step, case.state(), batch, worlds=(1, 2), stages=(0, 3))


def test_where_chooses_leaves_and_those_without_floats_are_left_out():
    case = CASES["mlp_momentum"]
    state = case.state()
    kept = zt.ema(0.9, where="params.*.weight")(case.step).init(state).kept["ema"]
    assert [*kept] == [f"params.{name}" for name in state["params"] if name.endswith("weight")]
    kept = zt.ema(0.9, where=lambda path, leaf: leaf.ndim == 1)(case.step).init(state).kept["ema"]
    assert all(path.endswith("bias") for path in kept)
    # A number in Python is a leaf too.
    counted = {"params": torch.ones(2), "steps": 0, "codes": torch.ones(2).to(torch.float8_e4m3fn)}
    assert [*zt.ema(0.9, where="*")(lambda state, x: (state, x)).init(counted).kept["ema"]] == [
        "params"
    ]


def test_mistakes():
    with pytest.raises(
        ValueError, match=r"ema: decay=1.5; it is a number from 0 to 1, such as 0.999"
    ):
        zt.ema(1.5)
    with pytest.raises(
        TypeError, match=r"ema: where=3; it is a pattern of paths, such as 'params.\*'"
    ):
        zt.ema(0.9, where=3)
    step = zt.ema(0.9)(lambda state, x: (state, x))
    with pytest.raises(
        ValueError, match=r"(?s)ema: the state has no floats at 'params'. It has w, m.*where='w.\*'"
    ):
        step.init({"w": torch.ones(2), "m": torch.ones(2)})
    with pytest.raises(ValueError, match="step: it has no ema among its transforms"):
        zt.Step.of(CASES["mlp_momentum"].step).ema(CASES["mlp_momentum"].state())
    with pytest.raises(TypeError, match=r"lacks ema\.params"):
        step.ema({"params": torch.ones(2)})


def test_averages_on_the_host():
    case = CASES["mlp_momentum"]
    chain = zt.chain(zt.ema(0.9), zt.offload(where="ema.*", at_least=0))
    step, plain = chain(case.step), zt.ema(0.9)(case.step)
    state, expected = step.init(clone(case.state())), plain.init(clone(case.state()))
    (batch,) = batches(case, 1)
    lowered = step.lower(state, *batch)
    assert {v.memory for v in lowered.graph.state if v.name.startswith("ema.")} == {"host"}
    state, expected = step(state, *batch)[0], plain(expected, *batch)[0]
    assert distance(state, expected) == 0
    evaluate = step.eval(lambda state, batch: sum(p.sum() for p in state["params"].values()))
    assert evaluate(step.ema(state), *batch) == sum(a.sum() for a in expected.kept["ema"].values())
