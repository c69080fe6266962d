"""`quantize_grads`: the terms of a gradient are sent as codes of 8 or 4 bits, and added up in fp32."""

import pytest
import torch
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.net import lower
from tests.support.quantized import ROW, batch, loss_fn, new_state, rounded, step, trained, updated
from ztrans.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from ztrans.ops.hadamard import hadamard
from ztrans.ops.moments import narrowed, widened
from ztrans.runtime.state import equal_rows


def formats(lowered):
    """The wire formats of the reductions of gradients, in order."""
    found = []
    for e in lowered.graph.eqns:
        if e.op in (REDUCE_SCATTER, ALL_REDUCE) and e.provenance.role == "grad":
            found.append((e.op.name, str(e.kwargs["dtype"]), str(e.kwargs.get("between"))))
    return found


def test_the_program_prints(golden):
    assert str(lower(zt.quantize_grads(4, 8, rotate=8), zt.overlap_grads())) == golden


@pytest.mark.parametrize("bits, ranks", [(8, 2), (4, 3)])
def test_gradients_are_the_mean_of_rounded_terms(bits, ranks):
    def reference(state, x, y):
        params = {k: zt.pvary(w, x) for k, w in state["params"].items()}
        own, loss = grad_and_value(loss_fn)(params, x, y)
        return updated(state, {k: zt.pmean(rounded(g, bits)) for k, g in own.items()}), loss

    zt.testing.check_laws(
        zt.quantize_grads(bits, ROW), step, new_state(), batch(), reference=reference, worlds=(ranks,),
        stages=(1, 2, 3), unsharded=False, tolerance=1e-6,
    )  # fmt: skip


def test_a_mean_on_every_rank_is_rounded_once_more():
    """At stage 0 each rank adds up a part of the terms, and sends it in the same format."""
    state, losses, lowered = trained(zt.quantize_grads(8, ROW), stage=0, steps=1)
    exact, exact_losses, _ = trained(stage=0, steps=1)
    assert ("all_reduce", "i8/16", "None") in formats(lowered)
    assert torch.equal(losses, exact_losses)  # of the parameters before the step
    for k, m in exact["m"].items():
        largest = m.abs().max()
        assert (state["m"][k] - m).abs().max() <= 4 * largest / 254


def test_a_turn_spreads_an_outlier():
    """One element of 100 in a block of 4 bits makes all others 0, unless the block is turned."""
    g = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    g[:, 3] = 100.0

    def move(state, x):
        grad, value = grad_and_value(lambda w: (w * x).sum())(state["w"])
        return {"w": state["w"] - grad}, value

    errors = {}
    for rotate in (None, 64):
        chain = zt.chain(
            zt.shard_params(zt.AbstractMesh(dp=2)), zt.quantize_grads(4, rotate=rotate)
        )
        state = {"w": torch.zeros(8, 64)}
        new, _ = chain(move).lower(state, g).lockstep(state, [(g,), (g,)])
        errors[rotate] = (-new["w"] - g)[:, 4:].norm() / g[:, 4:].norm()
    assert errors[None] == 1.0 and errors[64] > 0.5, errors


def test_a_half_precision_gradient_is_sent_before_its_cast():
    def members(*transforms):
        eqns = lower(*transforms, zt.overlap_grads()).graph.eqns
        return {v.dtype for e in eqns if e.op is REDUCE_SCATTER for v in e.ins}

    assert members() == members(zt.quantize_grads(4, 8, rotate=8)) == {torch.float32}
    assert members(zt.quantize_grads(4, 8)) == {torch.bfloat16}


def test_a_gradient_without_a_dim_to_turn_is_sent_as_it_is():
    assert "hadamard" not in str(lower(zt.quantize_grads(4, 8, rotate=64)))
    along_columns = lower(zt.quantize_grads(4, 8, rotate=8), dim=lambda path, leaf: 1)
    assert (
        str(along_columns).count("hadamard") == 2
    )  # `up`, f32[16,8@dp], along its rows; `down` has 6 of them


def test_hosts_send_each_other_another_format():
    lowered = lower(
        zt.quantize_grads(8, 8, between=4),
        replicate_axis="host",
        mesh=zt.AbstractMesh(host=2, dp=2),
    )
    assert (
        formats(lowered)
        == [
            ("reduce_scatter", "i8/8", "i4/8"),
            ("all_reduce", "i4/8", "i4/8"),
        ]
        * 2
    )


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("feedback", [True, "8bit"])
def test_the_error_of_a_step_is_sent_in_the_next(stage, feedback):
    (state, kept), _, _ = trained(
        zt.quantize_grads(4, ROW, error_feedback=feedback), stage=stage, steps=3
    )

    def stored(error):
        """To nearest, with 2 bits of mantissa."""
        mantissa, exponent = torch.frexp(error)
        if feedback is True:
            return error
        nearest = (mantissa.abs() * 8 + 0.5).floor().copysign(mantissa)
        return torch.ldexp(nearest / 8, exponent)

    expected = new_state()
    errors = [{k: torch.zeros_like(w) for k, w in expected["params"].items()} for _ in range(2)]
    for i in range(3):
        sent = []
        for rank, part in enumerate(zip(*(x.chunk(2) for x in batch(seed=i)))):
            grads, _ = grad_and_value(loss_fn)(expected["params"], *part)
            total = {k: g + errors[rank][k] for k, g in grads.items()}
            sent.append({k: rounded(t, 4) for k, t in total.items()})
            errors[rank] = {k: stored(t - sent[rank][k]) for k, t in total.items()}
        expected = updated(expected, {k: (g + sent[1][k]) / 2 for k, g in sent[0].items()})
    torch.testing.assert_close(state, expected)
    rows = kept["quantize_grads"]
    assert [*rows] == ["params.up", "params.down"]
    for path, leaf in rows.items():
        own = torch.stack([error[path.removeprefix("params.")] for error in errors])
        assert leaf.nbytes == own.nbytes // (1 if feedback is True else 4)
        values = leaf if feedback is True else widened(leaf)
        torch.testing.assert_close(values, own, atol=1e-6, rtol=1e-5)


def test_errors_in_8_bits_have_the_same_bits_in_any_schedule_and_after_a_restart():
    codes = zt.quantize_grads(4, ROW, rotate=4, error_feedback="8bit")
    plain, _, lowered = trained(codes, stage=2, steps=3)
    for schedule in (zt.overlap_grads(), zt.prefetch()):
        other, _, _ = trained(codes, schedule, stage=2, steps=3)
        torch.testing.assert_close(other, plain, rtol=0, atol=0)
    state, _, _ = trained(codes, stage=2, steps=2)
    state = pytree.tree_map(torch.clone, state)  # as saved and loaded on as many ranks
    parts = list(zip(*(x.chunk(2) for x in batch(seed=2))))
    state, _ = lowered.lockstep(state, parts)
    torch.testing.assert_close(state, plain, rtol=0, atol=0)


def test_errors_in_8_bits_keep_their_sum_on_other_ranks():
    values = torch.tensor([[1.0, -3.0, 0.0], [0.25, -1.0, 0.0]])
    rows = equal_rows(narrowed(values, torch.int8), 4)
    assert rows.dtype == torch.int8
    # 1.25 and -4 have 2 bits of mantissa, so parts of a quarter are exact.
    assert torch.equal(widened(rows).sum(0), values.sum(0))


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("rotate", [None, 4])
def test_what_is_sent_and_what_is_kept_add_up(cut, rotate):
    """After one step, to the exact mean. Turned gradients keep turned errors."""
    options = {"stage": 1, "dim": lambda path, leaf: min(cut, leaf.ndim - 1)}
    exact, _, _ = trained(steps=1, **options)
    codes = zt.quantize_grads(4, ROW, rotate=rotate, error_feedback=True)
    (state, kept), _, _ = trained(codes, zt.overlap_grads(), steps=1, **options)
    for k in ("up", "down"):
        left = kept["quantize_grads"][f"params.{k}"].mean(0)
        if rotate and left.shape[1 - cut] % rotate == 0:
            left = hadamard(left, 1 - cut, rotate)
        assert left.norm() > 0.01 * exact["m"][k].norm()
        torch.testing.assert_close(state["m"][k] + left, exact["m"][k], rtol=1e-4, atol=1e-5)


def test_feedback_in_micro_batches_and_on_one_rank():
    codes = zt.quantize_grads(4, ROW, error_feedback=True)
    (state, kept), _, _ = trained(codes, zt.accumulate(2), stage=2, steps=1)
    exact, _, _ = trained(zt.accumulate(2), stage=2, steps=1)
    left = (
        kept["quantize_grads"]["params.up"].mean(0) / 2
    )  # the mean over micro-batches has half of the last error
    assert (state["m"]["up"] + left - exact["m"]["up"]).norm() < 1e-4 * exact["m"]["up"].norm()
    (alone, kept), _, _ = trained(codes, ranks=1, stage=2, steps=1)
    assert torch.equal(alone["params"]["up"], step(new_state(), *batch(seed=0))[0]["params"]["up"])
    assert not kept["quantize_grads"]["params.up"].any()


def test_feedback_at_stage_3_is_refused():
    with pytest.raises(
        ValueError, match=r"error of each whole gradient .* stage 3 .*\nUse shard_params\(stage=2\)"
    ):
        trained(zt.quantize_grads(4, error_feedback=True))
    with pytest.raises(TypeError, match="error_feedback=1; it is True, False or '8bit'"):
        zt.quantize_grads(4, error_feedback=1)
    with pytest.raises(ValueError, match="error_feedback=True takes 8 or 4 bits, not 'auto'"):
        zt.quantize_grads("auto", error_feedback=True)
    with pytest.raises(ValueError, match=r"error .* stage 3"):
        trained(zt.quantize_grads(4, error_feedback="8bit"))
    with pytest.raises(ValueError, match=r"no equation can keep its error.\nWrite .*'8bit'"):
        zt.quantize_grads(4, between=4, error_feedback="between")


def test_gradients_are_chosen_by_dims_pattern_or_function():
    assert {dtype for _, dtype, _ in formats(lower(zt.quantize_grads(block=16)))} == {"i8/16"}
    only_up = [("reduce_scatter", "None", "None"), ("reduce_scatter", "i4/16", "None")]
    assert sorted(formats(lower(zt.quantize_grads(4, 16, where="*.up")))) == only_up
    assert (
        sorted(formats(lower(zt.quantize_grads(4, 16, where=lambda p, w: w.shape[:1] == (16,)))))
        == only_up
    )


def test_options_that_do_not_exist_are_errors():
    for options, text in {
        ("bits", 3): "quantize_grads: bits=3; codes have 8 or 4 bits.",
        ("between", 16): "quantize_grads: between=16; codes have 8 or 4 bits.",
        ("block", 0): "quantize_grads: block=0; it is an even number of elements, such as 256.",
        ("rotate", 48): "quantize_grads: rotate=48; it is a power of 2, such as 64.",
    }.items():
        with pytest.raises(ValueError) as e:
            zt.quantize_grads(**dict([options]))
        assert str(e.value) == text
    with pytest.raises(ValueError, match=r"quantize_grads: the program is not sharded"):
        zt.quantize_grads()(step).lower(new_state(), *batch())
