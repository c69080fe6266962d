"""`store`: the bits of rounding by hand, on every number of ranks and beside every transform; and fewer bytes."""

from __future__ import annotations

import re
import zlib

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.live_bytes import LiveBytes
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, of_a_rank, plain, slices
from tests.test_local_steps import HOSTS, first_state, momentum_step
from ztrans import ops
from ztrans.ir.collectives import is_start, role
from ztrans.ir.copies import is_copy
from ztrans.ir.op_facts import CAST
from ztrans.planning.cost import memory
from ztrans.running_order import fused_within_peak

STORE = zt.store(torch.bfloat16)
IN_8_BITS = zt.store(torch.bfloat16, first_moments="m.*", second_moments="v.*")
IN_BF16 = dict.fromkeys(["params", "m", "v"], torch.bfloat16)
DTYPES = {"params": torch.bfloat16, "m": torch.int8, "v": torch.uint8}
ROUND = torch.ops.ztrans.stochastic_round.default
# All samples are equal and small integers. So gradients of a linear loss are exact on any number of ranks.
X = torch.tensor([[1.0, -2.0, 3.0, 0.0, 5.0, -1.0, 2.0]]).repeat(12, 1)


def state() -> dict:
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 5, generator=draw), "b": torch.randn(5, generator=draw)}
    moments = {k: {name: torch.zeros_like(p) for name, p in params.items()} for k in "mv"}
    return {
        "params": params,
        **moments,
        "steps": torch.tensor(0.0),
        "buffers": {"r": torch.ones(3)},
    }


def adam(state: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
    def loss_of(params):
        return (x @ params["w"] + params["b"]).mean()

    grads, loss = torch.func.grad_and_value(loss_of)(state["params"])
    steps = state["steps"] + 1
    new = {"params": {}, "m": {}, "v": {}}
    for name, p in state["params"].items():
        g = grads[name]
        m = new["m"][name] = 0.9 * state["m"][name] + 0.1 * g
        v = new["v"][name] = 0.99 * state["v"][name] + 0.01 * g * g
        denominator = (v / (1 - 0.99**steps)).sqrt() + 1e-8
        new["params"][name] = p - 1e-3 * (m / (1 - 0.9**steps)) / denominator
    return {**new, "steps": steps, "buffers": state["buffers"]}, loss


def by_hand(steps: int, seed: int = 0, dtypes: dict = IN_BF16) -> dict:
    """Plain steps on fp32, whose results are rounded one by one, to these dtypes."""
    stored = pytree.tree_map(lambda x: x.bfloat16() if x.ndim else x, state())
    for step in range(steps):
        wide = pytree.tree_map(
            lambda x: ops.widened(x) if x.dtype in (torch.int8, torch.uint8) else x.float(), stored
        )
        new, _ = adam(wide, X)
        for part in ("params", "m", "v"):
            for name, x in new[part].items():
                name_hash = zlib.crc32(f"{seed} {part}.{name}".encode())
                (key,) = ops.leaf_keys(torch.tensor(step), [name_hash])
                stored[part][name] = ops.stochastic_round(x, key, dtype=dtypes[part])
        stored["steps"] = new["steps"]
    return stored


def on_ranks(ranks: int, *transforms, mesh=None, steps=3, store=STORE, **options):
    """The state after some steps in lock-step, and the program."""
    shard = zt.shard_params(mesh or zt.AbstractMesh(dp=ranks), **options)
    step = zt.chain(shard, *transforms, store)(adam)
    whole = step.init(state())
    rows = X.chunk(ranks)
    lowered = step.lower(whole, rows[0])
    for _ in range(steps):
        whole, _ = lowered.lockstep(whole, [(x,) for x in rows])
    return whole, lowered


def trained(step: zt.Step, start=None, steps: int = 3):
    whole = step.shard(state()) if start is None else start
    for _ in range(steps):
        whole, _ = step(whole, X)
    return whole


def same(a, b) -> bool:
    """Whether trees have equal bits, but for buffers, which are not stored."""
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if x.shape != (3,) and (x.dtype != y.dtype or not torch.equal(x, y)):
            return False
    return True


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_two_and_three_ranks_have_the_bits_of_rounding_by_hand(stage):
    """With uneven parts: 7 rows on 2 ranks, and 5 on 3."""
    true = by_hand(3)
    for ranks in (1, 2, 3):
        (own, kept), _ = on_ranks(ranks, stage=stage)
        assert same(own, true) and kept == {"store": {"step": 3}}
    assert same(trained(STORE(adam))[0], true)


def test_another_dim_and_replicas_and_empty_parts_change_no_bit():
    true = by_hand(3)
    by_columns, _ = on_ranks(3, dim=lambda path, leaf: leaf.ndim - 1)
    replicated, _ = on_ranks(4, mesh=zt.AbstractMesh(host=2, dp=2), replicate_axis="host")
    assert same(by_columns[0], true) and same(replicated[0], true)
    (with_empty_part, _), _ = on_ranks(6)  # 5 rows, in parts of one
    assert same(with_empty_part, true)


COMBINED = {
    "schedules": ALL,
    "remat": (zt.remat(), *ALL),
    "accumulate": (zt.accumulate(2), *ALL),
    "offload": (zt.offload(where="*", at_least=0), *ALL),
    "across_steps": (zt.overlap_grads(), zt.prefetch(across_steps=True)),
    "owned_updates": (zt.owned_updates(),),
}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", COMBINED)
def test_it_commutes_and_other_transforms_change_no_bit(name, stage):
    transforms = COMBINED[name]
    (own, _), lowered = on_ranks(2, *transforms, stage=stage, store=STORE)
    assert same(own, by_hand(3))
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    step = zt.chain(shard, STORE, *transforms)(adam)
    assert str(step.lower(step.init(state()), X[:6])) == str(lowered)


@pytest.mark.parametrize(
    "name",
    [
        *("autocast", "clipped", "lora", "muon"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sam", "uneven", "gpt_adam")),
    ],
)
def test_known_steps_compute_what_they_compute_to_the_precision_of_bf16(name):
    case = CASES[name]
    rank = of_a_rank(case, 2)
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    step = zt.chain(shard, zt.store(torch.bfloat16, where="*"), *ALL)(rank.step)
    whole = step.init(case.state())
    lowered = step.lower(whole, *batches(rank, 1)[0])
    for batch in batches(case, 2):
        whole, _ = lowered.lockstep(whole, slices(batch, 2))
    for x, y in zip(pytree.tree_leaves(whole[0]), pytree.tree_leaves(plain(case, 2)[0])):
        if x.numel():
            assert (x.float() - y).abs().max() <= 2**-6 * y.abs().max() + 1e-3


def test_gathers_send_half_of_the_bytes_and_casts_to_bf16_and_back_vanish():
    def gathered(name, *transforms):
        rank = of_a_rank(CASES[name], 2)
        step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *transforms)(rank.step)
        graph = step.lower(step.init(rank.state()), *batches(rank, 1)[0]).graph
        starts = [e for e in graph.eqns if is_start(e) and role(e) == "param"]
        return graph, sum(v.nbytes for e in starts for v in e.results)

    _, wide = gathered("clipped")
    _, narrow = gathered("clipped", STORE)
    assert narrow * 2 == wide
    _, fused = gathered("cast_inside", zt.fuse_cast_gather())
    stored, narrow = gathered("cast_inside", STORE, zt.fuse_cast_gather())
    assert narrow <= fused

    def casts_of_parameters(graph):
        whole = {v for e in graph.eqns if role(e) == "param" for v in e.results}
        return [e for e in graph.eqns if e.op is CAST and e.ins[0] in whole]

    assert not casts_of_parameters(stored)


def test_casts_of_constants_stay():
    def step(state, x):
        constant = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        return {"w": state["w"] + constant.to(torch.float32) * x}, x.sum()

    step = zt.store(torch.bfloat16, rounding="nearest")(step)
    new, _ = step(step.shard({"w": torch.zeros(5)}), torch.ones(()))
    assert new["w"].tolist() == [0, 1, 2, 3, 4]


def test_leaves_on_the_host_are_in_bf16_so_copies_move_half_of_the_bytes():
    offload = zt.offload(where="[mv].*", at_least=0)
    _, wide = on_ranks(2, offload, steps=0, store=zt.chain())
    _, narrow = on_ranks(2, offload, steps=0)
    copied = [
        sum(v.nbytes for e in low.graph.eqns if is_copy(e) for v in e.results)
        for low in (wide, narrow)
    ]
    assert copied[0] == 2 * copied[1] > 0


def test_a_restart_goes_on_with_the_same_bits(tmp_path):
    step = STORE(adam)
    zt.save(tmp_path / "a", trained(step, steps=2)).result()
    loaded = zt.load(tmp_path / "a", step.init(state()), step)
    assert loaded[0]["params"]["w"].dtype == torch.bfloat16 and loaded[1]["store"]["step"] == 2
    assert same(trained(step, loaded, 1)[0], by_hand(3))


def test_checkpoints_of_fp32_load_into_bf16_and_back(tmp_path):
    """Rounded to nearest, and exactly."""
    step = zt.store(torch.bfloat16, rounding="nearest")(adam)
    zt.save(tmp_path / "wide", state()).result()
    loaded = zt.load(tmp_path / "wide", state(), step)
    assert same(loaded, step.shard(state()))
    zt.save(tmp_path / "narrow", loaded).result()
    wide = zt.load(tmp_path / "narrow", state(), zt.Step.of(adam))
    assert wide["params"]["w"].dtype == torch.float32
    assert torch.equal(wide["params"]["w"], state()["params"]["w"].bfloat16().float())


def test_nearest_rounds_to_nearest_and_keeps_no_counter():
    """And `zt.eager` rounds so, whatever the step does."""
    step = zt.store(torch.bfloat16, rounding="nearest")(adam)
    stored = step.shard(state())
    wide = pytree.tree_map(torch.Tensor.float, stored)
    expected = pytree.tree_map_with_path(
        lambda path, x: x.bfloat16() if x.ndim and path[0].key != "buffers" else x, adam(wide, X)[0]
    )
    with zt.eager():
        in_python, _ = step(step.shard(state()), X)
    new, _ = step(stored, X)
    assert same(new, expected) and same(in_python, expected)


def test_another_seed_draws_other_bits():
    a, b = (trained(zt.store(torch.bfloat16, seed=seed)(adam), steps=1)[0] for seed in (0, 1))
    assert same(b, by_hand(1, seed=1)) and not same(a, b)


def test_buffers_scalars_and_integers_stay():
    types = {v.name: v.type for v in on_ranks(1, steps=0)[1].graph.state}
    assert types["params.w"] == types["m.w"] == types["v.w"] == "bf16[7,5]"
    assert types["buffers.r"] == "f32[3]" and types["steps"] == "f32[]"
    assert types["store.step"] == "i64[]"
    only_moments = zt.store(torch.bfloat16, where="[mv].*")
    types = {v.name: v.type for v in on_ranks(1, steps=0, store=only_moments)[1].graph.state}
    assert types["params.w"] == "f32[7,5]" and types["m.w"] == "bf16[7,5]"


def test_leaves_that_the_step_does_not_update_are_chosen_by_name():
    case = CASES["lora"]
    step = STORE(case.step)
    with pytest.raises(
        ValueError, match=r"store: .* does not update base\..*less precise\.\nChoose"
    ):
        step.lower(step.init(case.state()), *batches(case, 1)[0])
    with pytest.raises(
        ValueError, match=r"store: where='x\.\*' chooses no leaf of adam that is fp32"
    ):
        on_ranks(1, store=zt.store(torch.bfloat16, where="x.*"))


def test_a_state_in_fp32_is_refused():
    step = STORE(adam)
    with pytest.raises(
        TypeError,
        match=r"adam keeps leaves of its state in fewer bits between steps, and was called with "
        r"state\.params\.w \(torch\.float32\), .*\nCall `state = step\.shard\(state\)` once",
    ):
        step(step.init(state()), X)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dtype": torch.float16}, TypeError, "leaves are stored in torch.bfloat16, which has the"),
        ({"rounding": "up"}, ValueError, "rounding='up'; it is 'stochastic' or 'nearest'."),
        ({"seed": 0.5}, ValueError, "seed=0.5; it is a whole number."),
        ({"where": 3}, TypeError, "where=3; it is a pattern of paths, such as 'params.*'"),
    ],
)
def test_wrong_options(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        zt.store(**{"dtype": torch.bfloat16, **arguments})


def test_an_average_of_parameters_stays_in_fp32():
    step = zt.chain(STORE, zt.ema(0.99))(adam)
    whole = trained(step)
    average = whole[1]["ema"]["params.w"]
    assert average.dtype == torch.float32 and whole[0]["params"]["w"].dtype == torch.bfloat16
    first = state()["params"]["w"].bfloat16().float()
    assert 0 < (average - first).abs().max() < 1e-3


def test_replicas_that_train_apart_are_averaged():
    shard = zt.shard_params(HOSTS, independent_axis="host")
    store = zt.store(torch.bfloat16, where="state.*")
    local = zt.local_steps(zt.chain(shard, *ALL, store)(momentum_step), 2, zt.nesterov(0.7, 0.9))
    whole = local.inner.init(local.init(first_state()))
    x = [torch.randn(4, 6) for _ in range(4)]
    programs = {step: step.lower(whole, x[0]) for step in (local.at(0), local.at(1))}
    for step in programs:
        whole, _ = programs[step].lockstep(whole, [(part,) for part in x])
    up = whole[0]["state"]["params"]["up"]
    assert up.dtype == torch.bfloat16 and torch.equal(up[0], up[1])
    assert whole[0]["outer"]["up"].dtype == torch.float32


# ---- moments in 8 bits


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_moments_in_8_bits_have_the_bits_of_rounding_by_hand(stage):
    """On 1, 2 and 3 ranks with uneven parts; by columns, with replicas and with empty parts."""
    true = by_hand(3, dtypes=DTYPES)
    assert same(trained(IN_8_BITS(adam))[0], true)
    worlds: list[dict] = [{"ranks": 2}, {"ranks": 3}]
    if stage == 3:
        worlds += [{"ranks": 6}, {"ranks": 3, "dim": lambda path, leaf: leaf.ndim - 1}]
        replicated = {"mesh": zt.AbstractMesh(host=2, dp=2), "replicate_axis": "host"}
        worlds += [{"ranks": 4, **replicated}]
    for world in worlds:
        (own, _), lowered = on_ranks(stage=stage, store=IN_8_BITS, **world)
        assert same(own, true)
    types = {v.name: v.dtype for v in lowered.graph.state}
    for part, dtype in DTYPES.items():
        assert types[f"{part}.w"] == types[f"{part}.b"] == dtype


@pytest.mark.parametrize("name", ["schedules", "accumulate", "offload"])
def test_other_transforms_change_no_bit_of_moments_in_8_bits(name):
    (own, _), _ = on_ranks(2, *COMBINED[name], store=IN_8_BITS)
    assert same(own, by_hand(3, dtypes=DTYPES))


def test_moments_in_8_bits_start_again_from_a_checkpoint_and_from_fp32(tmp_path):
    """Also on a mesh. `unshard` gives fp32, which has the same codes again."""
    mesh = zt.make_mesh("cpu", dp=-1)
    for step in (IN_8_BITS(adam), zt.chain(zt.shard_params(mesh), IN_8_BITS)(adam)):
        folder = tmp_path / str(len(step.transforms))
        zt.save(folder, trained(step, steps=2)).result()
        loaded = zt.load(folder, step.init(state()), step)
        whole = step.unshard(loaded)
        assert {x.dtype for x in pytree.tree_leaves([whole[0][k] for k in "mv"])} == {torch.float32}
        again = step.shard(whole)
        wide, _ = step.unshard(trained(step, loaded, 1))
        wide_again, _ = step.unshard(trained(step, again, 1))
        true = by_hand(3, dtypes=DTYPES)
        for part in "mv":
            true[part] = pytree.tree_map(ops.widened, true[part])
        assert same(wide, true) and same(wide_again, true)


def test_checkpoints_of_8_bits_and_of_fp32_are_not_taken_for_each_other(tmp_path):
    step = IN_8_BITS(adam)
    zt.save(tmp_path / "narrow", trained(step, steps=1)[0]).result()
    with pytest.raises(
        ValueError, match=r"load: m\.w is torch.int8 in .*torch.float32 between steps: one of"
    ):
        zt.load(tmp_path / "narrow", state(), zt.Step.of(adam))
    zt.save(tmp_path / "wide", step.init(state())).result()
    with pytest.raises(
        ValueError, match=r"m\.w is torch.float32 in .*torch.int8 between steps: one"
    ):
        zt.load(tmp_path / "wide", step.init(state()), step)


def test_wrong_options_of_moments_in_8_bits():
    with pytest.raises(
        ValueError, match=r"rounding='nearest' with moments in 8 bits\. Their changes"
    ):
        zt.store(torch.bfloat16, first_moments="m.*", rounding="nearest")
    with pytest.raises(
        ValueError, match=r"store: second_moments='x' chooses no leaf of adam that is fp32"
    ):
        on_ranks(1, store=zt.store(torch.bfloat16, first_moments="m.*", second_moments="x"))
    step = zt.chain(zt.ema(0.9, where="m.w"), IN_8_BITS)(adam)
    with pytest.raises(
        ValueError, match=r"adam: ema\.m\.w starts as a copy of m\.w, which store keeps"
    ):
        step.init(state())


def test_integers_of_the_step_stay():
    """They have the dtypes of codes."""

    def step(state, x):
        return {**state, "m": state["m"] + x * state["u"].sum()}, x.sum()

    u = torch.tensor([3, 5], dtype=torch.uint8)
    first = zt.store(torch.bfloat16, first_moments="m")(step)
    whole = first.init({"m": torch.zeros(2), "u": u})
    new, _ = first.lower(whole, torch.ones(2)).lockstep(whole, [(torch.ones(2),)])
    assert new[0]["u"].tolist() == [3, 5] and ops.widened(new[0]["m"]).tolist() == [8, 8]


def test_a_negative_second_moment_is_nan_after_the_step():
    """So a wrong choice of leaves shows at once."""
    step = zt.store(torch.bfloat16, second_moments="w")(lambda s, x: ({"w": s["w"] - x}, x.sum()))
    whole, _ = step(step.shard({"w": torch.zeros(3)}), torch.tensor([1.0, 0.0, -1.0]))
    assert step.unshard(whole)[0]["w"].isnan().tolist() == [True, False, False]


# ---- lifted loops, memory, compiled kernels


def lifted(width: int, layers: int, *transforms: zt.Transform, **options):
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def body(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, first = zt.lift(body, model, optimizer)
    step = zt.chain(*transforms)(step)
    return model, optimizer, step, step.shard(first)


OPTIMIZER_IN_8_BITS = zt.store(
    torch.bfloat16, first_moments="*.exp_avg", second_moments="*.exp_avg_sq"
)


def test_a_lifted_loop_gives_the_optimizer_its_moments_back():
    model, optimizer, step, whole = lifted(8, 2, OPTIMIZER_IN_8_BITS)
    for _ in range(2):
        whole, _ = step(whole, torch.ones(4, 8))
    entries = whole["optimizer"]["0.weight"]
    assert (entries["exp_avg"].dtype, entries["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    zt.write_back(model, optimizer, step.unshard(whole))
    written = optimizer.state[model[0].weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(written[name], ops.widened(entries[name])) and written[name].any()


def test_a_lifted_loop_reads_bf16_and_gives_the_module_its_dtype_back():
    model, optimizer, step, whole = lifted(8, 2, STORE)
    for _ in range(2):
        whole, _ = step(whole, torch.ones(4, 8))
    assert {x.dtype for x in zt.state_dict(model, whole).values()} == {torch.bfloat16}
    assert step.eval(lambda x: model(x))(whole, torch.ones(4, 8)).dtype == torch.float32
    assert {x.dtype for x in pytree.tree_leaves(step.unshard(whole)["params"])} == {torch.bfloat16}
    zt.write_back(model, optimizer, step.unshard(whole))
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, whole["params"]["0.weight"].float())


def test_planned_and_real_memory_fall_by_half_of_the_state_and_with_8_bits_by_two_thirds():
    """Fresh values in fp32 are those of one leaf, of 8."""
    planned, real, leaf = {}, {}, 64 * 64 * 4
    for transforms in ((), (STORE,), (OPTIMIZER_IN_8_BITS,)):
        _, _, step, whole = lifted(64, 8, *transforms, fused=True)
        x = torch.ones(4, 64)
        planned[transforms] = memory(step.lower(whole, x).graph).peak
        whole, _ = step(whole, x)
        with LiveBytes() as counted:
            step(whole, x)
        real[transforms] = counted.peak
    of_state = 3 * 8 * leaf
    for peaks in (planned, real):
        assert peaks[()] - peaks[STORE,] > of_state / 2 - 3 * leaf
        assert peaks[()] - peaks[OPTIMIZER_IN_8_BITS,] > of_state * 2 / 3 - 3 * leaf


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("store", "dtypes"), [(STORE, IN_BF16), (IN_8_BITS, DTYPES)])
def test_inductor_rounds_in_the_kernel_of_the_update(store, dtypes):
    step = store(adam)
    lowered = step.lower(step.shard(state()), X)
    _, groups = fused_within_peak(lowered.graph)
    rounded = [e for group in groups for e in group.eqns if e.op is ROUND]
    assert len(rounded) == len([e for e in lowered.graph.eqns if e.op is ROUND]) == 6
    compiled = lowered.compile(backend="inductor")
    whole = step.shard(state())
    for _ in range(3):
        whole, _ = compiled(whole, X)
    assert same(whole[0], by_hand(3, dtypes=dtypes))
