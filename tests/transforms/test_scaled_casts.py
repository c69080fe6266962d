"""`fuse_cast_gather` of fp8: a parameter is scaled and cast on shards, and its gather brings a byte for each element."""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.fp8 import (
    E4M3,
    SCALES,
    Linear,
    Recipe,
    ScaledLinear,
    batch_of,
    cast,
    divided,
    state_of,
)
from tests.support.fp8 import step_of as make_step
from tests.support.parallel import own
from ztrans.ir.collectives import ALL_GATHER, ALL_REDUCE
from ztrans.ir.interpreter import coordinates, lockstep, split_state

FUSE = zt.fuse_cast_gather()
SCHEDULES = (zt.overlap_grads(), zt.prefetch())


step_of = functools.cache(make_step)  # equal steps are one, and are traced once


def lower(step, *transforms, state=None, mesh=None, **options):
    """A step lowered over `mesh`, by default for two ranks."""
    shard = zt.shard_params(mesh or zt.AbstractMesh(dp=2), **options)
    leaves, tree = pytree.tree_flatten(state or state_of())
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    # Of all transforms, only micro-batches change what is traced.
    micro = tuple(transform for transform in transforms if transform.name == "accumulate")
    chain = zt.chain(shard, *transforms)(step)
    return dataclasses.replace(
        traced(step, tree, kinds, micro), transforms=chain.transforms
    ).lower()


@functools.cache
def traced(step, tree, kinds, micro):
    leaves = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    return zt.chain(*micro)(step).trace(pytree.tree_unflatten(leaves, tree), batch_of())


def bits(tree):
    """The leaves of a tree as integers, which compares fp8 and the sign of zeros."""
    return [x.contiguous().view(-1).view(torch.uint8) for x in pytree.tree_leaves(tree)]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def run(lowered, state, ranks, steps=2):
    """A state and the outputs of all ranks after some steps, each rank with a batch of its own."""
    torch.manual_seed(1)
    outputs = []
    for _ in range(steps):
        state, each = lowered.lockstep(state, [(batch_of(),) for _ in range(ranks)])
        outputs.append(each)
    return state, outputs


def both(step, state, *transforms, ranks=2, **options):
    """A step without and with `fuse_cast_gather`, whose results have the same bits. Returns the second, lowered."""
    options = {"mesh": zt.AbstractMesh(dp=ranks), **options}
    plain, fused = (
        lower(step, *transforms, *more, state=state, **options) for more in ((), (FUSE,))
    )
    zt.ir.check(fused.graph)
    assert equal(run(plain, state, ranks), run(fused, state, ranks))
    return fused


def gathers(lowered):
    """The dtypes in which each leaf is gathered."""
    dtypes = {}
    for e in lowered.graph.eqns:
        if e.op is ALL_GATHER:
            for path, out in zip(e.provenance.paths, e.outs):
                dtypes.setdefault(path.removeprefix("params."), []).append(out.dtype)
    return dtypes


def gathered_dtypes(lowered):
    return set().union(*gathers(lowered).values())


def amaxes(lowered):
    """The all_reduces of maxima and minima, by the number of their members."""
    found = [
        e for e in lowered.graph.eqns if e.op is ALL_REDUCE and e.kwargs["op"] in ("max", "min")
    ]
    return [(e.kwargs["op"], len(e.outs)) for e in found]


def test_the_program_prints(golden):
    assert str(lower(step_of(Recipe()), FUSE)) == golden


def test_the_program_of_all_transforms_prints(golden):
    assert str(lower(step_of(Recipe(saves="fp8")), *SCHEDULES, FUSE)) == golden


@pytest.mark.slow
@pytest.mark.parametrize("saves", ["weight", "fp8"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_bitwise(stage, ranks, saves):
    """On three ranks the parts of both leaves are padded."""
    step = step_of(Recipe(saves=saves))
    for transforms in ((), SCHEDULES):
        fused = both(step, state_of(), *transforms, stage=stage, ranks=ranks)
        assert gathered_dtypes(fused) == {E4M3}
        assert amaxes(fused) == [("max", 2)]


def test_it_has_the_bits_of_the_untouched_step():
    """Both ranks have the same batch, and the mean of two equal gradients is exact."""
    step = step_of(Recipe())
    state = state_of()
    batch = batch_of()
    new, outputs = lower(step, *SCHEDULES, FUSE, state=state).lockstep(state, [(batch,), (batch,)])
    want, value = step(state, batch)
    assert equal(new, want) and all(equal(out, value) for out in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", [cast, divided], ids=["mul", "div"])
@pytest.mark.parametrize("scale", SCALES)
def test_any_scale_of_the_whole_tensor(scale, how, dtype):
    recipe = Recipe(SCALES[scale], how)
    fused = both(step_of(recipe), state_of(dtype=dtype), ranks=3)
    assert gathers(fused) == {"up": [E4M3], "down": [E4M3] * 2}
    expected = {"of_both_signs": [("max", 2), ("min", 2)]}
    assert amaxes(fused) == expected.get(scale, [("max", 2)])


def test_a_quarter_of_the_bytes():
    shard = {"mesh": zt.AbstractMesh(dp=4), "state": state_of(24, 16, 16), "reshard": "always"}
    step = step_of(Recipe())
    plain, fused = (
        zt.chain(zt.shard_params(zt.AbstractMesh(dp=4), reshard="always"), *more)(step)
        .lower(shard["state"], batch_of(4, 16, 16))
        .cost_analysis()
        for more in ((), (FUSE,))
    )
    scales = 2 * 2 * 4 * 3 // 4  # an all_reduce of two numbers in fp32
    assert plain.over("dp", "param") == 4 * (fused.over("dp", "param") - scales) > 0
    assert plain.over("dp", "grad") == fused.over("dp", "grad")


MESHES = {
    "hsdp": (zt.AbstractMesh(host=2, dp=2), {"axis": "dp", "replicate_axis": "host"}),
    "joint": (zt.AbstractMesh(dp=2, cp=2), {"axis": ("dp", "cp")}),
    "columns": (zt.AbstractMesh(dp=4), {"dim": lambda path, leaf: 1}),
    "an axis each": (
        zt.AbstractMesh(dp=2, ep=2),
        {"axis": lambda path, leaf: "dp" if "up" in path else ("dp", "ep")},
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_other_meshes_and_dims(name):
    mesh, options = MESHES[name]
    fused = both(step_of(Recipe()), state_of(), *SCHEDULES, ranks=4, mesh=mesh, **options)
    assert gathered_dtypes(fused) == {E4M3}
    assert amaxes(fused) == ([("max", 1)] * 2 if name == "an axis each" else [("max", 2)])


def over_tp(w):
    """The scale of a weight of which each rank of tp has a part."""
    return 448 / own.wait_tensor(own.all_reduce(w.abs().max(), "max", "tp"))


@pytest.mark.parametrize("transforms", [(), SCHEDULES], ids=["plain", "planned"])
def test_a_scale_over_the_ranks_of_tensor_parallelism_too(transforms):
    """The maximum over dp comes first, and then the step's own over tp, once for forward and backward."""
    mesh = zt.AbstractMesh(dp=2, tp=2)
    states = [pytree.tree_leaves(state_of()) for _ in range(2)]
    batches = [batch_of() for _ in range(2)]
    results = []
    for more in ((), (FUSE,)):
        lowered = lower(step_of(Recipe(over_tp)), *transforms, *more, mesh=mesh, axis="dp")
        places = coordinates(lowered.graph.mesh)
        parts = [split_state(lowered.graph, state) for state in states]
        ranks = [[*parts[at["tp"]][r], *batches[at["dp"]]] for r, at in enumerate(places)]
        results.append(lockstep(zt.ir.check(lowered.graph), ranks))
    assert equal(*results)
    assert gathered_dtypes(lowered) == {E4M3}
    assert (
        sum("all_reduce(" in line and "max, tp" in line for line in str(lowered).splitlines()) == 2
    )


def test_the_transforms_commute():
    step = step_of(Recipe(saves="fp8"))
    texts = {str(lower(step, *order)) for order in itertools.permutations((*SCHEDULES, FUSE))}
    assert len(texts) == 1


@pytest.mark.parametrize("saves", ["weight", "fp8"])
def test_at_stage_3_what_backward_reads_is_gathered_again(saves):
    """Unless it is kept: at stages 1 and 2, and by a plan that has the memory."""
    step = step_of(Recipe(saves=saves))
    again = lambda lowered: sum(
        bool(e.provenance.regather) for e in lowered.graph.eqns if e.op is ALL_GATHER
    )
    assert [again(lower(step, FUSE, stage=stage)) for stage in (1, 2, 3)] == [0, 0, 1]
    assert again(lower(step, *SCHEDULES, FUSE)) == 0
    assert again(lower(step, *SCHEDULES, FUSE, reshard="always")) == 1
    both(step, state_of(), *SCHEDULES, reshard="always")


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["whole", "shard"])
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches(stage, keep):
    fused = both(
        step_of(Recipe()), state_of(), *SCHEDULES, zt.accumulate(4, keep=keep), stage=stage
    )
    programs = zt.ir.micro_batch_programs(fused.graph)
    each = programs.first, programs.middle, programs.last
    maxima = [
        sum(e.op is ALL_REDUCE and e.kwargs["op"] == "max" for e in part.eqns) for part in each
    ]
    assert maxima == [1, 0, 0], "the first micro-batch computes the maxima for all"


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_backward_computes_again(reentrant):
    """The scales are computed once, and fp8 is gathered again."""

    def step(state, batch):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        layer = lambda x, w: Linear.apply(x, w.t(), Recipe())
        x, y = batch
        for w in params.values():
            x = checkpoint(layer, x, w, use_reentrant=reentrant)
        value = (x - y).square().mean()
        value.backward()
        return {
            "params": {k: p - 0.1 * params[k].grad for k, p in state["params"].items()}
        }, value.detach()

    fused = both(step, state_of())
    assert gathers(fused) == {"up": [E4M3], "down": [E4M3] * 2} and amaxes(fused) == [("max", 2)]


def test_a_frozen_leaf():
    fused = both(step_of(Recipe(), frozen=("up",)), state_of(), *SCHEDULES)
    assert gathers(fused)["up"] == [E4M3]


def step_with(use, **others):
    """A step whose loss reads `use` of a leaf, and that trains another leaf."""

    def step(state, batch):
        x, _ = batch
        b = state["b"].detach().requires_grad_()
        value = (x @ use(state["w"], state).float().reshape(8, -1) * b).square().mean()
        (g,) = torch.autograd.grad(value, [b])
        return {**state, "b": state["b"] - 0.1 * g}, value

    state = {
        "w": torch.linspace(0.1, 3, 20)[:, None] * torch.randn(20, 8),
        "b": torch.ones(()),
        **others,
    }
    return step, state


def quantised(w, scale):
    return cast(w, scale(w))


def of_two_uses(w, state):
    """Two layers that share a leaf, and one that reads its transpose."""
    return quantised(w, SCALES["dynamic"]).float() + quantised(w.t(), SCALES["dynamic"]).float().t()


def of_a_kept_scale(w, state):
    """Delayed scaling: the state has the scale."""
    return cast(w, state["scale"])


def of_one_message(w, state):
    """As torchao's `precompute_float8_dynamic_scale_for_fsdp`: the scales of all leaves in one vector."""
    amaxes = torch.stack(torch._foreach_norm([w, state["v"]], ord=float("inf")))
    scales = 448.0 / torch.clamp(amaxes, 1e-12)
    return cast(w, scales[0]).float().sum() + cast(state["v"], scales[1]).float()


def of_integers(w, state):
    return (w * (127 / w.abs().max())).round().clamp(-127, 127).to(torch.int8)


def through_bf16(w, state):
    """Autocast casts the leaf first."""
    return quantised(w.to(torch.bfloat16), SCALES["dynamic"])


def of_a_difference(w, state):
    return quantised(1 - w, SCALES["dynamic"])


def of_finite_values(w, state):
    return quantised(torch.where(torch.isnan(w), 0.0, w), SCALES["dynamic"])


def in_blocks(w, state):
    """The leaf has other dims where it is used."""
    return quantised(w.view(4, 5, 8).permute(2, 0, 1).unsqueeze(0), SCALES["dynamic"]).squeeze(0)


USES = [
    of_two_uses,
    of_a_kept_scale,
    of_one_message,
    of_integers,
    through_bf16,
    of_a_difference,
    of_finite_values,
]
USES += [in_blocks]


@pytest.mark.slow
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("stage", [2, 3])
def test_other_uses(use, stage):
    step, state = step_with(use, scale=torch.tensor(100.0), v=torch.randn(20, 8))
    fused = both(step, state, stage=stage, ranks=3)
    kind = torch.int8 if use is of_integers else E4M3
    used = {"w": [kind], "v": [kind]} if use is of_one_message else {"w": [kind]}
    assert gathers(fused) == used
    assert amaxes(fused) == {of_a_kept_scale: [], of_one_message: [("max", 2)]}.get(
        use, [("max", 1)]
    )


def by_row(w, state):
    return cast(w, 448.0 / w.abs().amax(dim=1, keepdim=True))


def of_the_mean(w, state):
    return cast(w, 1 / w.abs().mean())


def also_wide(w, state):
    return quantised(w, SCALES["dynamic"]).float() + w.sum()


def in_two_dtypes(w, state):
    return (
        quantised(w, SCALES["dynamic"]).float()
        + cast(w, SCALES["dynamic"](w), torch.float8_e5m2).float()
    )


def of_a_function(w, state):
    return w.tanh().to(E4M3)


def in_another_order(w, state):
    """The cast changes the order of the elements in memory."""
    scaled = w * SCALES["dynamic"](w)
    return scaled.view(4, 5, 2, 4).to(E4M3, memory_format=torch.channels_last)


def in_blocks_with_dims(w, state):
    """The scale has more dims than the leaf."""
    blocks = w.view(4, 5, 8)
    return cast(blocks, 448.0 / blocks.abs().amax(dim=(0, 1, 2), keepdim=True))


WIDE = [by_row, of_the_mean, also_wide, of_a_function, in_two_dtypes, in_another_order]
WIDE += [in_blocks_with_dims]


@pytest.mark.parametrize("use", WIDE, ids=lambda use: use.__name__)
def test_other_casts_to_eight_bits_stay_after_the_gather(use):
    step, state = step_with(use)
    fused = both(step, state, ranks=3)
    assert gathers(fused) == {"w": [torch.float32]} and not amaxes(fused)


def test_constants_that_print_alike_are_not_the_same():
    """PyTorch prints four digits of a number, and the ends of a long tensor."""

    def of_constants(w, state):
        numbers = [torch.tensor(x) for x in (1.00001, 1.00004)]
        tables = [torch.arange(2000) * (torch.arange(2000) != k) for k in (700, 900)]
        first, second = (
            (1e6 * (x - 1) + table[900]) / w.abs().max() for x, table in zip(numbers, tables)
        )
        return cast(w, first).float() + cast(state["v"], second).float()

    step, state = step_with(of_constants, v=torch.randn(20, 8))
    both(step, state, ranks=3)


def test_a_rank_without_rows_has_no_maximum():
    """5 rows on 4 ranks: 2, 2, 1 and none."""
    step, state = step_with(lambda w, state: quantised(w[:, :8], SCALES["dynamic"]))
    fused = both(step, {**state, "w": torch.randn(5, 8)}, ranks=4)
    assert gathers(fused) == {"w": [torch.float32]}


def test_a_leaf_that_scales_activations_is_gathered_wide():
    """As the weight of a norm before a layer in fp8: the activations are cast, and not the leaf."""

    def step(state, batch):
        x, _ = batch
        b = state["b"].detach().requires_grad_()
        value = (quantised(x * state["w"], SCALES["dynamic"]).float() * b).square().mean()
        (g,) = torch.autograd.grad(value, [b])
        return {**state, "b": state["b"] - 0.1 * g}, value

    fused = both(step, {"w": torch.randn(8), "b": torch.ones(())})
    assert gathers(fused) == {"w": [torch.float32]}


@pytest.mark.parametrize("kind", ["nan", "inf", "zero"])
def test_values_that_are_no_numbers(kind):
    """The scale is then NaN, zero, or that of the smallest maximum, on every rank."""
    state = state_of()
    if kind == "zero":
        state["params"]["up"].zero_()
    else:
        state["params"]["up"][-1, 0] = float(kind)
    plain, fused = (
        lower(step_of(Recipe()), *more, mesh=zt.AbstractMesh(dp=3)) for more in ((), (FUSE,))
    )
    torch.testing.assert_close(
        run(plain, state, 3), run(fused, state, 3), rtol=0, atol=0, equal_nan=True
    )


def test_a_scaled_product_reads_what_is_gathered():
    """`torch._scaled_mm` wants its second argument by columns, which the transpose of a gathered value is."""

    def scaled(w, state):
        s = SCALES["dynamic"](w)
        x8 = torch.full((16, 16), 0.5).to(E4M3)
        return torch._scaled_mm(x8, cast(w.t(), s), torch.ones(()), 1 / s, out_dtype=torch.float32)

    step, state = step_with(lambda w, state: scaled(w, state)[:8])
    fused = both(step, {**state, "w": torch.randn(32, 16)}, ranks=2)
    assert gathers(fused) == {"w": [E4M3]} and "_scaled_mm" in str(fused)


def scaled_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(ScaledLinear(16, 24), torch.nn.ReLU(), ScaledLinear(24, 16))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_whose_layers_make_fp8_tensors_of_a_class_of_their_own(stage):
    """As torchao's `convert_to_float8_training` does, lifted, against its own loop."""
    batch = torch.randn(8, 16), torch.randn(8, 16)

    def loop_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def loop(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return loop, optimizer

    truth = scaled_model()
    loop, _ = loop_of(truth)
    losses = [loop(*batch) for _ in range(3)]
    model = scaled_model()
    loop, optimizer = loop_of(model)
    step, state = zt.lift(loop, model, optimizer)
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *SCHEDULES, FUSE)(
        step
    ).lower(state, *batch)
    for loss in losses:
        state, outputs = lowered.lockstep(state, [batch, batch])
        assert all(torch.equal(out, loss) for out in outputs)
    assert equal(state["params"], dict(truth.named_parameters()))
    kinds = gathers(lowered)
    assert kinds["0.weight"] == kinds["2.weight"] == [E4M3]


def test_on_one_rank_nothing_changes():
    fused = lower(step_of(Recipe()), FUSE, mesh=zt.AbstractMesh(dp=1))
    assert "all_" not in str(fused)
