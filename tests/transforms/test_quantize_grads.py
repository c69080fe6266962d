"""`quantize_grads`: the terms of a gradient are sent as codes of 8 or 4 bits, and added up in fp32."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.net import lower
from tests.support.quantized import ROW, batch, loss_fn, new_state, rounded, step, trained, updated
from ztrans.ir.collectives import ALL_REDUCE, REDUCE_SCATTER


def formats(lowered):
    """The wire formats of the reductions of gradients, in order."""
    found = []
    for e in lowered.graph.eqns:
        if e.op in (REDUCE_SCATTER, ALL_REDUCE) and e.provenance.role == "grad":
            found.append((e.op.name, str(e.kwargs["dtype"]), str(e.kwargs.get("between"))))
    return found


def test_the_program_prints(golden):
    assert str(lower(zt.quantize_grads(4, 8, rotate=8), zt.overlap_grads())) == golden


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_are_the_mean_of_rounded_terms(bits):
    def reference(state, x, y):
        params = {k: zt.pvary(w, x) for k, w in state["params"].items()}
        own, loss = grad_and_value(loss_fn)(params, x, y)
        return updated(state, {k: zt.pmean(rounded(g, bits)) for k, g in own.items()}), loss

    zt.testing.check_laws(
        zt.quantize_grads(bits, ROW), step, new_state(), batch(), reference=reference, worlds=(2, 3),
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
