"""adamw_pack: the kernel, its reference and `torch.optim.AdamW`."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.interpreted.patterns import room, same

adamw_pack = importlib.import_module("ztrans.ops.adamw_pack")
stochastic_round = importlib.import_module("ztrans.ops.stochastic_round")

NUMELS = (2500, 3, 0, 1024, 1)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def run(implementation, params, grads, ms, vs, step, scale=None, sizes=None, out=None, seed=None, lr=3e-3):
    one = lambda x: torch.full((), x, dtype=torch.float32)
    implementation(
        params, grads, ms, vs, one(step), one(lr), scale, 0.9, 0.999, 1e-8, 0.1, sizes or [len(p) for p in params], out, seed
    )


def state(skew: int = 0):
    make = lambda: [torch.randn(n + skew)[skew:] for n in NUMELS]
    return make(), make(), [m * 0.1 for m in make()], [v.square() for v in make()]


@pytest.mark.parametrize("implementation", [adamw_pack.launch, adamw_pack.reference], ids=["kernel", "reference"])
def test_a_hundred_steps_are_those_of_torch(implementation):
    params = [torch.randn(n) for n in (1100, 3)]  # a whole block, and what is left over
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(twins, **OPTIONS)
    ms, vs = ([torch.zeros_like(p) for p in params] for _ in range(2))
    out, scale = torch.empty(1103, dtype=torch.bfloat16), torch.tensor(0.37)
    for step in range(1, 101):
        grads = [torch.randn_like(p) for p in params]
        for twin, grad in zip(twins, grads):
            twin.grad = grad * scale
        optimizer.step()
        run(implementation, params, grads, ms, vs, step, scale, out=out)
    for p, twin in zip(params, twins):
        torch.testing.assert_close(p, twin.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(out, torch.cat(params).bfloat16())


@pytest.mark.parametrize("step", [1, 2, 10, 690, 100_000])
def test_bias_corrections_keep_their_precision(step):
    """1 - beta ** step, where beta is near 1 and step is small, has few digits left in fp32."""
    (p,), (g,), (m,), (v,) = ([x[0]] for x in state())
    twins = [x.clone() for x in (p, m, v)]
    for x in (p, m, v, *twins):  # the update alone
        x.zero_()
    run(adamw_pack.launch, [p], [g], [m], [v], step)
    run(adamw_pack.reference, twins[:1], [g], twins[1:2], twins[2:], step)
    torch.testing.assert_close(p, twins[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16], ids=str)
def test_kernel_and_reference(grad, out, skew):
    params, grads, ms, vs = state(skew)
    grads = [g.to(grad) for g in grads]
    twins = [[x.clone() for x in xs] for xs in (params, ms, vs)]
    sizes = [n + pad for n, pad in zip(NUMELS, (60, 5, 3, 0, 1200))]
    ours, true = (None if out is None else room(sum(sizes), out, skew) for _ in range(2))
    run(adamw_pack.launch, params, grads, ms, vs, 7, None, sizes, ours)
    run(adamw_pack.reference, twins[0], grads, twins[1], twins[2], 7, None, sizes, true)
    for a, b in zip((*params, *ms, *vs), (x for xs in twins for x in xs)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    if out is not None:
        offset = 0
        for p, n, size in zip(params, NUMELS, sizes):
            assert same(ours[offset : offset + n], p.to(out))
            assert not ours[offset + n : offset + size].any()
            offset += size


def test_gradients_of_mixed_dtypes_and_strides():
    params, grads, ms, vs = state()
    grads = [g.bfloat16() if k % 2 else g for k, g in enumerate(grads)]
    grads[0] = torch.randn(len(grads[0]), 2)[:, 0]
    twins = [[x.clone() for x in xs] for xs in (params, ms, vs)]
    run(adamw_pack.launch, params, grads, ms, vs, 3)
    run(adamw_pack.reference, twins[0], grads, twins[1], twins[2], 3)
    for a, b in zip((*params, *ms, *vs), (x for xs in twins for x in xs)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_written_out_at_random():
    params, grads, ms, vs = state()
    out, seed = room(sum(NUMELS), torch.bfloat16), torch.tensor(5)
    run(adamw_pack.launch, params, grads, ms, vs, 7, out=out, seed=seed)
    exact = torch.cat(params)
    assert same(out, stochastic_round.reference(exact, stochastic_round.draws(0, len(exact), seed)))
