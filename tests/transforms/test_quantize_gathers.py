"""`quantize_gathers`: every rank computes with what arrives of codes of 8 or 4 bits."""

import itertools

import pytest
import torch
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.fp8 import Recipe, batch_of, state_of, step_of
from tests.support.net import lower
from tests.support.quantized import (
    ROW,
    batch,
    loss_fn,
    new_state,
    rounded,
    step,
    trained,
    updated,
)
from ztrans.ir.collectives import ALL_GATHER


def formats(lowered):
    """The wire format of the gathers of each leaf."""
    found = {}
    for e in lowered.graph.eqns:
        if e.op is ALL_GATHER:
            found.update(dict.fromkeys(e.provenance.paths, str(e.kwargs["dtype"])))
    return found


def same_bits(a, b):
    return all(map(torch.equal, pytree.tree_leaves(a), pytree.tree_leaves(b)))


def test_the_program_prints(golden):
    assert str(lower(zt.quantize_gathers(block=16), zt.fuse_cast_gather())) == golden


@pytest.mark.parametrize("bits, ranks", [(8, 2), (4, 3)])
def test_forward_and_backward_read_rounded_parameters_and_the_update_exact_ones(bits, ranks):
    def reference(state, x, y):
        params = {k: rounded(w, bits) for k, w in state["params"].items()}
        grads, loss = grad_and_value(loss_fn)(params, x, y)
        return updated(state, grads), loss

    zt.testing.check_laws(
        zt.quantize_gathers(bits, ROW), step, new_state(), batch(), reference=reference, worlds=(ranks,),
        stages=(1, 2, 3), unsharded=False,
    )  # fmt: skip


def test_an_element_errs_by_at_most_half_a_scale():
    def rest(state, x):  # the value that arrives is the output
        return state, state["w"] * x.mean().sign().square()

    w = torch.randn(30, 20) * torch.logspace(-6, 6, 20)
    for bits, part in ((8, 254), (4, 14)):
        sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.quantize_gathers(bits, 50))
        lowered = sharded(rest).lower({"w": w}, torch.ones(2))
        _, (arrived, _) = lowered.lockstep({"w": w}, [(torch.ones(2),)] * 2)
        blocks, exact = arrived.view(-1, 50), w.view(-1, 50)
        largest = exact.abs().amax(1, keepdim=True)
        assert ((blocks - exact).abs() <= largest * (1 + 1e-6) / part).all()
        assert not torch.equal(arrived, w)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_order_of_a_chain_has_no_effect(stage):
    transforms = (
        zt.quantize_gathers(block=ROW),
        zt.fuse_cast_gather(),
        zt.prefetch(),
        zt.quantize_grads(block=ROW),
        zt.overlap_grads(),
    )
    orders = (transforms, transforms[::-1], (*transforms[2:], *transforms[:2]))
    assert len({str(lower(*order, stage=stage)) for order in orders}) == 1


SCHEDULES = {
    "prefetch": ([zt.prefetch()], {}),
    "overlap": ([zt.overlap_grads(), zt.prefetch()], {}),
    "no buckets": ([zt.overlap_grads(bucket=0), zt.prefetch()], {}),
    "cast": ([zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch()], {}),
    "always": ([zt.prefetch()], {"reshard": "always"}),
    "neighbours": ([zt.prefetch()], {"reshard": 2}),
    "across steps": ([zt.prefetch(across_steps=True)], {}),
    "stage 2": ([], {"stage": 2}),
    "stage 1": ([zt.prefetch(), zt.overlap_grads()], {"stage": 1}),
    "remat": ([zt.remat()], {}),
    "offload": ([zt.offload(where="*", at_least=0)], {}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_only_moves_data_changes_no_bit(name):
    transforms, options = SCHEDULES[name]
    quantized = (zt.quantize_gathers(4, ROW), zt.quantize_grads(8, ROW))
    *expected, _ = trained(*quantized, ranks=4)
    *found, _ = trained(*quantized, *transforms, ranks=4, **options)
    assert same_bits(found, expected)


def test_one_rank_has_the_bits_of_the_plain_step():
    state, losses, lowered = trained(zt.quantize_gathers(4, ROW), zt.quantize_grads(4), ranks=1)
    plain = new_state()
    for i in range(2):
        plain, loss = step(plain, *batch(seed=i))
        assert torch.equal(loss, losses[i])
    assert same_bits(state, plain) and not formats(lowered)


def test_micro_batches_gather_the_same_codes():
    quantized = zt.quantize_gathers(4, ROW)
    whole, _, _ = trained(quantized, steps=1)
    split, _, lowered = trained(quantized, zt.accumulate(2), steps=1)
    for k, m in whole["m"].items():  # the products of a micro-batch round to bf16
        assert (split["m"][k] - m).norm() < 0.01 * m.norm()
    assert formats(lowered)["params.up"] == "i4/16"


DIFFERENCES = zt.quantize_gathers(4, ROW, of="differences")


def test_forward_reads_a_reference_that_differences_bring_up_to_date():
    (state, kept), losses, lowered = trained(DIFFERENCES, stage=2, steps=4)

    expected = new_state()
    references = {k: w.clone() for k, w in expected["params"].items()}
    for i, loss in enumerate(losses):
        for k, w in expected["params"].items():
            references[k] = references[k] + rounded(w - references[k], 4) if w.ndim > 1 else w
        parts = zip(*(x.chunk(2) for x in batch(seed=i)))
        grads, values = zip(*(grad_and_value(loss_fn)(references, *part) for part in parts))
        torch.testing.assert_close(loss, torch.stack(values).mean())
        expected = updated(expected, {k: (grads[0][k] + grads[1][k]) / 2 for k in references})
    torch.testing.assert_close(state, expected)
    assert [*kept["quantize_gathers"]] == ["params.up", "params.down"]
    for path, reference in kept["quantize_gathers"].items():
        torch.testing.assert_close(reference, references[path.removeprefix("params.")])
    assert formats(lowered)["params.up"] == "i4/16"


def test_errors_of_references_do_not_add_up():
    """After ten steps a reference is nearer to the parameter that it follows than one with a new error in each step."""
    (_, kept), _, _ = trained(DIFFERENCES, stage=2, steps=10)
    (state, _), _, _ = trained(DIFFERENCES, stage=2, steps=9)
    for path, reference in kept["quantize_gathers"].items():
        w = state["params"][path.removeprefix("params.")]
        assert (reference - w).norm() < 0.2 * (rounded(w, 4) - w).norm()


SAME_DIFFERENCES = {
    "stage 1": ([], {"stage": 1}),
    "cast": ([zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch()], {}),
    "across steps": ([zt.prefetch(across_steps=True)], {}),
    "offload": ([zt.offload(where="*", at_least=0)], {}),
}


@pytest.mark.parametrize("name", SAME_DIFFERENCES)
def test_what_only_moves_data_changes_no_bit_of_differences(name):
    transforms, options = SAME_DIFFERENCES[name]
    *expected, _ = trained(DIFFERENCES, stage=2)
    *found, _ = trained(DIFFERENCES, *transforms, **{"stage": 2, **options})
    assert same_bits(found, expected)


def test_layers_in_order_have_the_bits_of_micro_batches():
    kept = DIFFERENCES, zt.quantize_grads(4, ROW, rotate=4, error_feedback=True)
    *layers, _ = trained(*kept, zt.accumulate(2, order="layers"), stage=2)
    *batches, _ = trained(
        *kept, zt.accumulate(2, keep="whole"), zt.overlap_grads(update="last"), stage=2
    )
    assert same_bits(layers, batches)


def test_micro_batches_read_one_reference():
    (whole, kept), _, _ = trained(DIFFERENCES, stage=2)
    (split, kept_split), _, _ = trained(DIFFERENCES, zt.accumulate(2), stage=2)
    for path, reference in kept["quantize_gathers"].items():
        k = path.removeprefix("params.")  # the products of a micro-batch round to bf16
        assert (split["params"][k] - whole["params"][k]).norm() < 0.01 * whole["params"][k].norm()
        torch.testing.assert_close(
            kept_split["quantize_gathers"][path], reference, rtol=0.1, atol=0.01
        )


IN_PARTS = zt.quantize_gathers(4, ROW, of="differences", inside="dp")


def on_hosts(*transforms, hosts=2, local=2, **options):
    """Two steps at stage 3, with references in parts on the ranks of each host."""
    mesh = zt.AbstractMesh(host=hosts, dp=local)
    options = {"mesh": mesh, "axis": ("host", "dp"), "ranks": hosts * local, **options}
    return trained(IN_PARTS, *transforms, **options)


def assert_as_whole_references(found, expected):
    """The same bits, also of what each rank keeps beside a reference: a part of it."""
    (state, kept), losses, _ = found
    (whole_state, whole), whole_losses, _ = expected
    assert same_bits((state, losses), (whole_state, whole_losses))
    references = whole["quantize_gathers"]
    assert {*kept["quantize_gathers"]} == {*references, *(f"own.{path}" for path in references)}
    for path, part in kept["quantize_gathers"].items():
        assert torch.equal(part, references[path.removeprefix("own.")])


@pytest.fixture(scope="module")
def whole_references():
    return trained(DIFFERENCES, ranks=4, stage=2)


SAME_PARTS = {
    "as written": ([], {}),
    "prefetch": ([zt.prefetch()], {}),
    "no buckets": ([zt.overlap_grads(bucket=0), zt.prefetch()], {}),
    "cast": ([zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch()], {}),
    "always": ([], {"reshard": "always"}),
    "neighbours": ([zt.prefetch()], {"reshard": 2}),
    "across steps": ([zt.prefetch(across_steps=True)], {}),
    "remat": ([zt.remat()], {}),
    "offload": ([zt.offload(where="*", at_least=0)], {}),
    "stage 2": ([], {"stage": 2}),
}


@pytest.mark.parametrize("name", SAME_PARTS)
def test_references_in_parts_on_the_ranks_of_a_host_change_no_bit(name, whole_references):
    transforms, options = SAME_PARTS[name]
    assert_as_whole_references(on_hosts(*transforms, **options), whole_references)


@pytest.mark.parametrize("hosts, local", [(3, 2), (2, 1), (1, 2), (1, 1)])
def test_references_in_parts_on_any_number_of_hosts(hosts, local):
    whole = trained(DIFFERENCES, ranks=hosts * local, stage=2)
    found = on_hosts(zt.fuse_cast_gather(), hosts=hosts, local=local)
    assert_as_whole_references(found, whole)


def test_micro_batches_with_references_in_parts():
    whole = trained(DIFFERENCES, zt.accumulate(2), ranks=4, stage=2)
    assert_as_whole_references(on_hosts(zt.accumulate(2)), whole)
    *layers, _ = on_hosts(zt.accumulate(2, order="layers"))
    *batches, _ = on_hosts(zt.accumulate(2, keep="whole"), zt.overlap_grads(update="last"))
    assert same_bits(layers, batches)


def test_a_rank_keeps_parts_of_a_reference_and_hosts_send_codes():
    _, _, lowered = on_hosts()
    leaves = [v.type for v in lowered.graph.state if v.name.endswith("params.down")]
    assert leaves[1:] == ["f32[6@dp,16]", "f32[6@host*dp,16]"]
    gathers = [e for e in lowered.graph.eqns if e.op is ALL_GATHER and "down" in e.out.name]
    assert [(e.region, str(e.kwargs["dtype"]), e.kwargs["axis"]) for e in gathers] == [
        ("forward", "i4/16", "host*dp"), ("forward", "None", "dp"), ("backward", "None", "dp"),
    ]  # fmt: skip
    # A rank receives three of four parts in codes, 12 bytes a row, and one of two parts inside the host: `up`, which
    # backward does not read, and `down` twice. Four ranks have 8 rows of `down` with padding.
    bias, rows = 16 * 4, 16 + 8
    cost = lowered.cost_analysis()
    assert cost.over("host*dp", "param") == (rows * 12 + bias) * 3 / 4
    assert cost.over("dp", "param") == (16 + 6 + 6) * ROW * 4 / 2


def test_moments_have_no_references():
    everywhere = zt.quantize_gathers(4, ROW, of="differences", where="*")
    (_, kept), _, _ = trained(everywhere, stage=2, steps=1)
    assert [*kept["quantize_gathers"]] == ["params.up", "params.bias", "params.down"]


def test_references_and_errors_with_replicas_on_two_hosts():
    """What is reduced over hosts is rounded once more; parameters are those of one host to that rounding."""
    kept = DIFFERENCES, zt.quantize_grads(8, ROW, error_feedback=True)
    replicas = {"mesh": zt.AbstractMesh(host=2, dp=2), "axis": "dp", "replicate_axis": "host"}
    (state, leaves), _, lowered = trained(*kept, ranks=4, stage=2, **replicas)
    (one_host, _), _, _ = trained(*kept, ranks=4, stage=2)
    for k, w in one_host["params"].items():
        assert (state["params"][k] - w).norm() < 0.01 * w.norm()
    assert leaves["quantize_grads"]["params.up"].shape == (4, 16, ROW)
    assert "i8/16, axis=host" in str(lowered)


def test_parameters_that_are_stored_in_bf16_have_references_in_fp32():
    (state, kept), _, lowered = trained(DIFFERENCES, zt.store(torch.bfloat16), stage=2)
    assert state["params"]["up"].dtype == torch.bfloat16
    assert kept["quantize_gathers"]["params.up"].dtype == torch.float32
    assert formats(lowered)["params.up"] == "i4/16"


def test_differences_on_one_rank_have_the_bits_of_the_plain_step():
    (state, _), _, _ = trained(DIFFERENCES, ranks=1, stage=2, steps=1)
    assert same_bits(state, step(new_state(), *batch(seed=0))[0])


def test_differences_at_stage_3_are_refused():
    with pytest.raises(ValueError) as error:
        trained(DIFFERENCES)
    assert str(error.value) == (
        "quantize_gathers: of='differences' keeps a whole reference of each parameter on every rank, and at stage 3 a "
        "rank need not have room for all parameters.\n"
        "1. Let the ranks of a host keep it in parts: zt.make_mesh(device, host=-1, dp=8), "
        "shard_params(mesh, axis=('host', 'dp')), and quantize_gathers(..., of='differences', inside='dp').\n"
        "2. Use shard_params(stage=2).\n"
        "3. Gather codes of the parameters, without of='differences'."
    )
    with pytest.raises(ValueError) as error:
        trained(IN_PARTS)
    assert str(error.value) == (
        "quantize_gathers: quantize_gathers.params.up cannot be cut over 'dp' alone, because params.up is cut over "
        "'dp'.\nGive the hosts an axis of their own, and cut parameters over both: zt.make_mesh(device, host=-1, dp=8) "
        "and shard_params(mesh, axis=('host', 'dp')); then name 'dp'."
    )
    with pytest.raises(ValueError, match=r"inside='dp' says where .*\nAdd of='differences', or"):
        zt.quantize_gathers(inside="dp")
    with pytest.raises(ValueError, match=r"takes 8 or 4 bits, not 'auto'"):
        zt.quantize_gathers("auto", of="differences")
    with pytest.raises(ValueError, match=r"of='moments'; use 'weights' or 'differences'"):
        zt.quantize_gathers(of="moments")
    nowhere = zt.quantize_gathers(of="differences", where="weights.*")
    with pytest.raises(
        ValueError, match=r"no leaves where 'weights.\*'. It has params.up, .*\nName the parameters"
    ):
        trained(nowhere, stage=2)


def test_leaves_are_chosen_by_dims_pattern_or_function():
    assert formats(lower(zt.quantize_gathers(block=16))) == {
        "params.up": "i8/16",
        "params.down": "i8/16",
    }
    some = (
        zt.quantize_gathers(4, 16, where="*.up"),
        zt.quantize_gathers(4, 16, where=lambda p, w: w.shape[:1] == (16,)),
    )
    for transform in some:
        assert formats(lower(transform)) == {"params.up": "i4/16", "params.down": "None"}
    fp8 = lower(zt.quantize_gathers(block=16, format="fp8"))
    assert formats(fp8) == {"params.up": "e4m3/16", "params.down": "e4m3/16"}


def test_a_gather_that_codes_would_not_make_shorter_stays():
    """A block of 256 and its scale take 260 bytes. A rank has 48 elements of `down`, 192 bytes; 64 of `up`, 256."""
    assert formats(lower(zt.quantize_gathers())) == {"params.up": "None", "params.down": "None"}
    fused = lower(zt.quantize_gathers(block=64), zt.fuse_cast_gather())
    assert formats(fused) == {"params.up": "i8/64", "params.down": "i8/64"}
    short = lower(zt.quantize_gathers(block=128), zt.fuse_cast_gather())
    assert formats(short) == {"params.up": "torch.bfloat16", "params.down": "torch.bfloat16"}


def test_gathers_of_fp8_stay():
    both = (zt.fuse_cast_gather(), zt.quantize_gathers(block=2))
    for order in itertools.permutations(both):
        sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *order)(step_of(Recipe()))
        found = formats(sharded.lower(state_of(), batch_of()))
        assert "None" in found.values() and not any("i8" in f for f in found.values()), found


def test_options_that_do_not_exist_are_errors():
    for options, text in {
        (("bits", 6),): "quantize_gathers: bits=6; codes have 8 or 4 bits.",
        (
            ("block", 3),
        ): "quantize_gathers: block=3; it is an even number of elements, such as 256.",
        (("format", "fp4"),): "quantize_gathers: format='fp4'; use 'int' or 'fp8'.",
        (
            ("bits", 4),
            ("format", "fp8"),
        ): "format='fp8' has 8 bits, not 4. Leave out one of the two.",
    }.items():
        with pytest.raises(ValueError) as e:
            zt.quantize_gathers(**dict(options))
        assert text in str(e.value)
    with pytest.raises(TypeError, match=r"quantize_gathers: where=3; it is a pattern of paths"):
        zt.quantize_gathers(where=3)
    with pytest.raises(
        ValueError, match=r"where='\*.left' matches no leaf of the state.\nThese are params.up, "
    ):
        lower(zt.quantize_gathers(where="*.left"))
    with pytest.raises(
        ValueError,
        match=r"quantize_gathers: the program is not sharded.*\nApply shard_params first",
    ):
        zt.quantize_gathers()(step).lower(new_state(), *batch())
