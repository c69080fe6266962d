"""`offload`: state that only the update reads is on the host; no bit changes, and the device holds less."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import Net, batch, loop_of
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, distance, on_ranks, slices
from ztrans.calling.host_memory import let_copies_end
from ztrans.calling.inputs import check_memory
from ztrans.calling.meta_leaves import ValuesOfMeta
from ztrans.ir.copies import TO_HOST, is_copy
from ztrans.ir.donation import donation
from ztrans.planning.cost import memory

STEPS = 20
# A pattern of the moments in the states of `tests.support.programs`.
MOMENTS = zt.offload(where="[mv].*", at_least=0)


def same(a, b) -> bool:
    pairs = zip(*map(pytree.tree_leaves, (a, b)), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def trained(case, transforms, steps=STEPS, step=None):
    step = zt.chain(*transforms)(case.step) if step is None else step
    state = step.shard(case.state()) if isinstance(step, zt.Step) else case.state()
    outputs = []
    for each in batches(case, steps):
        state, output = step(state, *each)
        outputs.append(pytree.tree_map(torch.clone, output))
    return state, outputs


def test_the_moments_of_a_meta_state_are_zeros_on_the_host():
    step = zt.offload(where="m", at_least=0)(lambda state, x: (state, x))
    with ValuesOfMeta():
        state = {"m": torch.zeros(4, device="meta")}
    assert step.shard(state)["m"].tolist() == [0.0] * 4


def test_the_difference_prints(golden):
    case = CASES["mlp_momentum"]
    plain, moved = (
        zt.chain(*transforms)(case.step).lower(case.state(), *batches(case, 1)[0])
        for transforms in ((), (zt.offload(where="m.0.*", at_least=0),))
    )
    assert zt.ir.diff(plain, moved) == golden


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "gpt_adam" else ())
        for name in (
            "mlp_momentum", "gpt_adam", "clipped", "adamw_fused", "adamw_foreach", "adamw_single",
        )
    ],
)  # fmt: skip
def test_twenty_steps_have_the_same_bits(name):
    case = CASES[name]
    assert same(trained(case, (MOMENTS,)), trained(case, (zt.chain(),)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_momentum", "clipped"])
@pytest.mark.parametrize("micro", [2, 3])
def test_micro_batches_have_the_same_bits_and_move_moments_once(name, micro):
    case = CASES[name]
    accumulate = zt.accumulate(micro)
    assert same(trained(case, (accumulate, MOMENTS)), trained(case, (accumulate,)))
    low = zt.chain(accumulate, MOMENTS)(case.step).lower(case.state(), *batches(case, 1)[0])
    parts = zt.ir.micro_batch_programs(low.graph)
    assert not any(map(is_copy, parts.first.eqns)) and not any(map(is_copy, parts.middle.eqns))
    assert any(map(is_copy, parts.last.eqns))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "schedules"),
    [("clipped", ()), ("clipped", ALL), ("adamw_fused", ALL), ("muon", ALL)],
    ids=["as_written", "clipped", "adamw_fused", "muon"],
)
def test_ranks_have_the_same_bits(name, schedules, stage):
    case = CASES[name]
    where = zt.offload(where="m*.*" if name == "muon" else "[mv].*", at_least=0)
    results = []
    for transforms in (schedules, (where, *schedules)):
        low = on_ranks(case, 2, zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *transforms)
        state = case.state()
        for each in batches(case, 3):
            state, outputs = low.lockstep(state, slices(each, 2))
        results.append((state, outputs))
    assert same(*results)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ["clipped", "adamw_fused"])
def test_inductor_compiles_it(name):
    case = CASES[name]
    low = MOMENTS(case.step).lower(case.state(), *batches(case, 1)[0])
    compiled = low.compile(backend="inductor")
    state = MOMENTS(case.step).shard(case.state())
    for each in batches(case, 3):
        state, _ = compiled(state, *each)
    assert distance(state, trained(case, (), 3)[0]) < 1e-5


def test_schedules_commute_with_it():
    case = CASES["clipped"]
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    texts = set()
    for transforms in ((MOMENTS, *ALL), (*ALL, MOMENTS), (ALL[0], MOMENTS, *ALL[1:])):
        text = str(on_ranks(case, 2, shard, *transforms))
        texts.add(text.split("\n", 1)[1])
    assert len(texts) == 1


def test_updates_still_run_during_backward():
    case = CASES["mlp_momentum"]
    low = on_ranks(case, 2, zt.shard_params(zt.AbstractMesh(dp=2)), MOMENTS, *ALL)
    regions = [e.region for e in low.graph.eqns if is_copy(e) or e.region == "backward"]
    assert "update" in regions[: len(regions) - regions[::-1].index("backward")]


@pytest.mark.slow
def test_the_peak_of_the_device_falls_by_the_bytes_moved():
    case = CASES["gpt_adam"]
    plain, moved = (
        zt.chain(*transforms)(case.step).lower(case.state(), *batches(case, 1)[0])
        for transforms in ((zt.chain(),), (MOMENTS,))
    )
    before, after = memory(plain.graph), memory(moved.graph)
    bytes_moved = before.state - after.state
    assert (
        bytes_moved
        == after.host_peak
        == 2 * sum(x.nbytes for x in pytree.tree_leaves(case.state()["params"]))
    )
    # While it is updated, a leaf is on the device.
    assert before.peak - after.peak >= 0.9 * bytes_moved


# A lifted loop, with all that a loop does between its steps.


def lifted(where: str | None):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    if where is not None:
        step = zt.offload(where=where, at_least=0)(step)
    return model, optimizer, step, step.shard(state) if isinstance(step, zt.Step) else state


@pytest.mark.slow
@pytest.mark.parametrize("where", ["optimizer.*.exp_avg*", lambda path, leaf: "exp_avg" in path])
def test_a_lifted_loop_with_a_scheduler_has_the_same_bits(where):
    results = []
    for each in (None, where):
        model, optimizer, step, state = lifted(each)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        for k in range(STEPS):
            state, _ = step(state, batch(k))
            scheduler.step()
        zt.write_back(model, optimizer, state)
        results.append((state, [*model.state_dict().values()], optimizer.state_dict()["state"]))
    assert same(*results)


def test_a_checkpoint_in_between_changes_no_bit(tmp_path):
    _, _, step, state = lifted("optimizer.*.exp_avg*")
    for k in range(3):
        state, _ = step(state, batch(k))
    zt.save(tmp_path / "checkpoint", state).result()
    loaded = zt.load(tmp_path / "checkpoint", state, step)
    for k in range(3, 6):
        state, _ = step(state, batch(k))
        loaded, _ = step(loaded, batch(k))
    assert same(state, loaded)


def test_a_checkpoint_without_it_loads_with_it(tmp_path):
    _, _, plain, state = lifted(None)
    state, _ = plain(state, batch(0))
    zt.save(tmp_path / "checkpoint", state).result()
    _, _, step, like = lifted("optimizer.*.exp_avg*")
    loaded = zt.load(tmp_path / "checkpoint", like, step)
    assert same(plain(state, batch(1)), step(loaded, batch(1)))


def failing(where: zt.Transform):
    """A step that fails on demand, before it writes its state: a batch holds the index of a row that does not exist."""

    def step(state, x, index):
        w = state["w"].detach().requires_grad_()
        y = (x @ w)[index].square().mean()
        (g,) = torch.autograd.grad(y, [w])
        m = 0.9 * state["m"] + g
        return {"w": state["w"] - 0.1 * m, "m": m}, y

    return zt.chain(where)(step)


@pytest.mark.parametrize("where", [zt.chain(), zt.offload(where="m", at_least=0)])
def test_after_a_failed_step_the_state_is_the_old_one_and_steps_go_on(where):
    step = failing(where)
    state = step.shard({"w": torch.ones(4, 4), "m": torch.zeros(4, 4)})
    x = torch.arange(8.0).view(2, 4)
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 7])
    state, _ = step(state, x, good)
    before = pytree.tree_map(torch.clone, state)
    with pytest.raises(Exception, match="index"):
        step(state, x, bad)
    assert same(state, before)
    reference = failing(zt.chain())
    expected = reference.shard(before)
    assert same(step(state, x, good), reference(expected, x, good))


def test_steps_update_the_state_in_place():
    case = CASES["mlp_momentum"]
    step = MOMENTS(case.step)
    state = step.shard(case.state())
    places = [x.data_ptr() for x in state["m"].values()]
    for each in batches(case, 3):
        state, _ = step(state, *each)
    assert [x.data_ptr() for x in state["m"].values()] == places


# Leaves that are returned in other places, and leaves that no step changes.


def test_a_leaf_that_never_changes_is_not_copied():
    def step(state, x):
        return {"w": state["w"] + x, "frozen": state["frozen"]}, x.sum()

    moved = zt.offload(where="frozen", at_least=0)(step)
    state = moved.shard({"w": torch.ones(4), "frozen": torch.ones(4)})
    low = moved.lower(state, torch.ones(4))
    assert not any(map(is_copy, low.graph.eqns))
    assert same(moved(state, torch.ones(4))[0], {"w": 2 * torch.ones(4), "frozen": torch.ones(4)})


def test_leaves_that_change_places_keep_their_values():
    def step(state, x):
        return {"a": state["b"], "b": state["a"], "c": state["a"] + x}, x.sum()

    moved = zt.offload(where="[ab]", at_least=0)(step)
    state = {"a": torch.ones(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    x = torch.ones(4)
    assert same(moved(moved.shard(state), x), zt.Step(step)(zt.Step(step).shard(state), x))


def test_a_leaf_that_is_replaced_without_being_read_is_not_copied_in():
    def step(state, x):
        return {"last": x * 2.0}, x.sum()

    moved = zt.offload(where="last", at_least=0)(step)
    low = moved.lower({"last": torch.zeros(4)}, torch.ones(4))
    assert [e.op.name for e in low.graph.eqns if is_copy(e)] == ["to_host"]
    assert same(
        moved(moved.shard({"last": torch.zeros(4)}), torch.ones(4))[0], {"last": 2 * torch.ones(4)}
    )


# Mistakes.


def lower(where, state, step):
    return zt.offload(where=where, at_least=0)(step).lower(state, torch.ones(4, 4))


def momentum(state, x):
    w = state["w"].detach().requires_grad_()
    y = (x @ w).square().mean()
    (g,) = torch.autograd.grad(y, [w])
    m = 0.9 * state["m"] + g
    return {"w": state["w"] - m, "m": m, "lr": state["lr"]}, y


STATE = {"w": torch.ones(4, 4), "m": torch.zeros(4, 4), "lr": torch.tensor(0.1)}


@pytest.mark.parametrize("where", ["moments.*", "lr", lambda path, leaf: False])
def test_a_where_that_matches_no_leaf_is_an_error(where):
    with pytest.raises(
        ValueError, match=r"matches no leaf .* that has dims and at least 0 B.\nThese are w, m."
    ):
        lower(where, STATE, momentum)


def test_a_leaf_that_is_too_small_stays_on_the_device():
    state = {"w": torch.ones(4, 4), "m": torch.zeros(4, 4), "lr": torch.tensor(0.1)}
    moved = zt.offload(where="*", at_least=65)(momentum)
    with pytest.raises(ValueError, match=r"at least 65 B.\nThere are none. .*at_least=0"):
        moved.lower(state, torch.ones(4, 4))
    wide = {"w": torch.ones(4, 5), "m": torch.zeros(4, 5), "lr": torch.tensor(0.1)}
    low = moved.lower(wide, torch.ones(4, 4))
    assert [v.memory for v in low.graph.state] == ["host", "host", "device"]


def test_where_is_a_pattern_or_a_function():
    with pytest.raises(TypeError, match=r"where=\['m'\]; it is a pattern of paths"):
        zt.offload(where=["m"])


def test_a_cuda_graph_is_refused():
    low = lower("m", STATE, momentum)
    with pytest.raises(ValueError, match=r"and zt\.offload copies m between them in this step"):
        low.compile(cuda_graph=True)


def test_a_state_in_ordinary_memory_of_the_host_is_refused_on_a_gpu():
    """Copies from memory that is not pinned would block the host."""
    graph = lower("m", STATE, momentum).graph
    with FakeTensorMode():
        on_gpu = torch.empty(4, 4, device="cuda")

    def check(m):
        check_memory(graph, [m if v.name == "m" else on_gpu for v in graph.inputs])

    with pytest.raises(TypeError, match=r"m is in memory that is not pinned.*\n.*step.shard"):
        check(torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"m is on cuda:0.*\n.*step.shard"):
        check(on_gpu)
    check(torch.ones(0, 4))  # there is no memory to pin


def test_on_a_cpu_a_leaf_needs_no_pinned_memory_beside_a_gpu(monkeypatch):
    step = zt.offload(where="m", at_least=0)(momentum)
    state = step.shard(STATE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    step(state, torch.ones(4, 4))


def test_moments_that_collectives_read_are_written_in_place_at_the_end():
    """Muon orthogonalises its moments across ranks, and nothing of the state may be written before that."""
    low = on_ranks(
        CASES["muon"],
        2,
        zt.shard_params(zt.AbstractMesh(dp=2)),
        zt.offload(where="m*.*", at_least=0),
        zt.overlap_grads(update="last"),
    )
    copies = [e for e in low.graph.eqns if e.op is TO_HOST]
    assert len(copies) == 6
    assert all(e in donation(low.graph).in_place_ops for e in copies)


def test_the_copies_on_all_devices_of_a_process_end(monkeypatch):
    """A device that the process does not use gets no context."""
    ended = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: [1, 0, 1][device])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: ended.append(device))
    let_copies_end()
    assert ended == [0, 2]


def test_two_offloads_are_refused():
    with pytest.raises(ValueError, match="offload: applied twice with different options"):
        zt.chain(zt.offload(where="a", at_least=0), zt.offload(where="b", at_least=0))(momentum)


def test_modules_of_several_layers_by_pattern():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    moved = zt.offload(where="optimizer.0.*.exp_avg", at_least=0)(step)
    low = moved.lower(state, torch.ones(2, 4))
    on_host = [v.name for v in low.graph.inputs if v.memory == "host"]
    assert on_host == ["optimizer.0.weight.exp_avg", "optimizer.0.bias.exp_avg"]


# An optimizer that computes all first moments, then all second ones, as those of torch.optim without fused=True do.


def adam_by_rows(state, x):
    weights = {k: w.detach().requires_grad_() for k, w in state["w"].items()}
    y = x
    for w in weights.values():
        y = torch.tanh(y @ w)
    grads = dict(zip(weights, torch.autograd.grad(y.square().mean(), list(weights.values()))))
    scale = sum(g.square().sum() for g in grads.values()).rsqrt()
    step = state["step"] + 1
    m = {k: 0.9 * m + 0.1 * scale * grads[k] for k, m in state["m"].items()}
    v = {k: 0.99 * v + 0.01 * grads[k] ** 2 for k, v in state["v"].items()}
    fixed = {k: v[k] / (1 - 0.99**step) for k in v}
    new = {k: w - 1e-3 * m[k] / (fixed[k].sqrt() + 1e-6) for k, w in state["w"].items()}
    return {"w": new, "m": m, "v": v, "step": step}, y.mean()


def adam_state(layers=8, width=64):
    torch.manual_seed(0)
    w = {f"w{k}": torch.randn(width, width) / width**0.5 for k in range(layers)}
    m, v = ({k: torch.zeros_like(x) for k, x in w.items()} for _ in "mv")
    return {"w": w, "m": m, "v": v, "step": torch.tensor(0.0)}


def test_few_leaves_are_on_the_device_at_once():
    low = zt.offload(where="[mv].*", at_least=0)(adam_by_rows).lower(
        adam_state(), torch.ones(2, 64)
    )
    leaf = 64 * 64 * 4
    weights_and_gradients = 2 * 8 * leaf
    assert memory(low.graph).peak < weights_and_gradients + 6 * leaf
    names = [v.name for e in low.graph.eqns for v in e.results if ".device" in v.name]
    arrived = [name.split(".")[1] for name in names if not name.endswith("'")]
    assert arrived == [f"w{k}" for k in range(8) for _ in "mv"], "leaf by leaf"


@pytest.mark.slow
def test_leaf_by_leaf_has_the_same_bits():
    x = torch.randn(4, 64)
    results = []
    for transform in (zt.chain(), MOMENTS):
        step = zt.chain(transform)(adam_by_rows)
        state = step.shard(adam_state())
        for _ in range(STEPS):
            state, output = step(state, x)
        results.append((state, output))
    assert same(*results)
