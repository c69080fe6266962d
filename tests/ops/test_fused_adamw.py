"""The update of AdamW: the reference beside PyTorch's own, and the rounding of `fma`."""

from __future__ import annotations

import importlib
from fractions import Fraction

import numpy as np
import pytest
import torch

fused_adamw = importlib.import_module("ztrans.ops.fused_adamw")
T = torch.ops.ztrans
RATE = torch.tensor(1e-2)
ADAM = {"lr": RATE, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6}
PLAIN = {"amsgrad": False, "maximize": False}


def lists(count: int) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(37,), (4, 5), (), (0,)]
    return [[torch.rand(shape, generator=draw) for shape in shapes] for _ in range(count)]


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.1), ("adamw", 0.0), ("adam", 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_adamw_is_that_of_pytorch(name, decay, dtype):
    """And Adam without a penalty is AdamW. On a CPU to 1e-5: PyTorch has other roundings there than on a GPU."""
    params, grads, exp_avgs, exp_avg_sqs = lists(4)
    halves = [g.to(dtype) for g in grads]
    steps = [torch.tensor(3.0) for _ in params]
    numbers = ADAM | {"weight_decay": decay}
    ours = T.fused_adamw(params, halves, exp_avgs, exp_avg_sqs, steps, **numbers)
    wide = [g.float() for g in halves]
    in_place = getattr(torch, f"_fused_{name}_")
    in_place(params, wide, exp_avgs, exp_avg_sqs, [], steps, **numbers, **PLAIN)
    for result, true in zip(ours, (params, exp_avgs, exp_avg_sqs)):
        torch.testing.assert_close(result, true, rtol=1e-5, atol=1e-7)


def test_a_scale_multiplies_the_gradients():
    params, grads, *moments = lists(4)
    halves = [g.bfloat16() for g in grads]
    steps = [torch.tensor(3.0) for _ in params]
    factor = torch.tensor(0.3)
    scaled = T.fused_adamw(params, halves, *moments, steps, **ADAM, scale=factor)
    products = [h.float() * factor for h in halves]
    for ours, true in zip(scaled, T.fused_adamw(params, products, *moments, steps, **ADAM)):
        assert all(map(torch.equal, ours, true))


def test_results_are_new_tensors_or_written_in_place():
    params, grads, exp_avgs, exp_avg_sqs = lists(4)
    steps = [torch.tensor(1.0) for _ in params]
    before = [p.clone() for p in params]
    new, *_ = T.fused_adamw(params, grads, exp_avgs, exp_avg_sqs, steps, **ADAM)
    assert all(map(torch.equal, params, before)) and not torch.equal(new[0], before[0])
    assert T.fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, steps, **ADAM) is None
    assert all(map(torch.equal, params, new))


def test_halves_are_the_new_parameters():
    """They are new tensors too, or written in place."""
    params, grads, *moments = lists(4)
    halves = [p.bfloat16() for p in params]
    steps = [torch.tensor(1.0) for _ in params]
    new, *_, casts = T.fused_adamw(params, grads, *moments, steps, halves, **ADAM)
    assert all(map(torch.equal, casts, (p.bfloat16() for p in new)))
    assert all(map(torch.equal, halves, (p.bfloat16() for p in params)))
    T.fused_adamw_(params, grads, *moments, steps, halves, **ADAM)
    assert all(map(torch.equal, halves, casts)) and halves[0].dtype == torch.bfloat16


def test_fma_rounds_once():
    """In random numbers and in those where two roundings would differ from one."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3000, generator=draw) for _ in range(2))
    z = -(x * y) * torch.randint(0, 3, (3000,), generator=draw)
    half_a_bit = torch.full((3,), 2.0**-24)
    x = torch.cat([x, torch.tensor([1.0, 1.0, 1.0 + 2**-23])])
    y = torch.cat([y, half_a_bit])
    z = torch.cat([z, torch.tensor([1.0, 1.0 + 2**-23, 1.0])])
    for a, b, c, result in zip(*(v.tolist() for v in (x, y, z, fused_adamw.fma(x, y, z)))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        beside = (
            np.nextafter(np.float32(result), np.float32(limit)) for limit in (-np.inf, np.inf)
        )
        assert all(abs(exact - Fraction(result)) <= abs(exact - Fraction(float(n))) for n in beside)
    special = fused_adamw.fma(
        torch.tensor([torch.inf, torch.nan, 3e38]), torch.tensor(2.0), torch.ones(3)
    )
    assert special[0] == torch.inf and special[1].isnan() and special[2] == torch.inf
