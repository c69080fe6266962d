"""Stochastic rounding to bf16: neighbours, odds, bits on parts, and the values that break rounding."""

from __future__ import annotations

import importlib

import pytest
import torch

from ztrans import ops

module = importlib.import_module("ztrans.ops.stochastic_round")
LARGEST = torch.finfo(torch.bfloat16).max
ELEMENTS = 1 << 16


def key(step: float = 0, leaf: int = 1) -> torch.Tensor:
    return ops.leaf_keys(torch.tensor(step), [leaf])[0]


def as_float(*bits: int) -> torch.Tensor:
    signed = [b - (1 << 32) if b >> 31 else b for b in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal, those of zeros and NaN too."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def integer_rounding(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The rounding in Python's integers, which cannot overflow."""
    out = []
    for bits, draw in zip(x.view(torch.int32).tolist(), noise.tolist()):
        magnitude = bits & 0x7FFFFFFF
        assert magnitude < 0x7F7F0000
        up = ((magnitude + (draw & 0xFFFF)) >> 16) | (0x8000 if bits < 0 else 0)
        out.append(up - (1 << 16) if up >> 15 else up)
    return torch.tensor(out, dtype=torch.int16).view(torch.bfloat16)


def lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_the_noise_is_lowbias32_of_element_leaf_and_step():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=draw)
    step, leaf = 3, 0x9E3779B9
    of_leaf = lowbias32(lowbias32(step) ^ leaf)
    assert key(step, leaf).item() & 0xFFFFFFFF == of_leaf
    noise = torch.tensor([lowbias32(i ^ of_leaf) for i in range(35)])
    expected = integer_rounding(x.view(-1), noise).view(5, 7)
    assert same(ops.stochastic_round(x, key(step, leaf)), expected)
    assert same(ops.stochastic_round(x, key(float(step), leaf)), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_parts_have_the_bits_of_the_whole(dim, ranks):
    """Uneven and empty parts along any dim."""
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    whole = ops.stochastic_round(x, key())
    start, parts = 0, []
    for part in x.split(-(-x.shape[dim] // ranks), dim):
        offsets = [start if k == dim else 0 for k in range(3)]
        parts.append(ops.stochastic_round(part, key(), x.shape, offsets))
        start += part.shape[dim]
    assert same(torch.cat(parts, dim), whole)
    offsets = [start if k == dim else 0 for k in range(3)]
    empty = x.narrow(dim, 0, 0)
    assert ops.stochastic_round(empty, key(), x.shape, offsets).shape == empty.shape


def test_blocks_and_strides_change_no_bit():
    x = torch.randn(1 << 9, 300, generator=torch.Generator().manual_seed(0))
    whole = ops.rounded(x, x, key(), x.shape, [0, 0])
    assert same(ops.stochastic_round(x, key()), whole)
    assert same(ops.stochastic_round(x.t().contiguous().t(), key()), whole)


def test_values_that_break_rounding():
    """NaN stays NaN, whatever its mantissa, and infinity infinity. No finite value becomes infinite unless to nearest."""
    nan = as_float(0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000).repeat(1000)
    assert ops.stochastic_round(nan, key()).isnan().all()
    inf = torch.tensor([torch.inf, -torch.inf]).repeat(1000)
    assert same(ops.stochastic_round(inf, key()), inf.bfloat16())
    below_half = as_float(0x7F7F0001, 0x7F7F7FFF, 0xFF7F7FFF).repeat(1000)
    assert same(ops.stochastic_round(below_half, key()), below_half.bfloat16())
    assert below_half.bfloat16().isfinite().all()
    greatest = as_float(0x7F7FFFFF).repeat(1000)
    assert same(ops.stochastic_round(greatest, key()), greatest.bfloat16())
    last = as_float(0x7F7E8000).repeat(ELEMENTS)
    assert set(ops.stochastic_round(last, key()).tolist()) == {LARGEST, as_float(0x7F7E0000).item()}
    tiny = as_float(1, 0x80000001, 0x00008000, 0x80008000)
    smallest = as_float(0x00010000).item()
    for value in tiny:
        rounded = ops.stochastic_round(value.repeat(ELEMENTS), key())
        assert set(rounded.abs().tolist()) <= {0.0, smallest}
        assert (rounded.signbit() == value.signbit()).all()


def test_values_of_bf16_stay():
    """All 65,536 of them, in several draws."""
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
    every = every[~every.isnan()]
    for step in range(4):
        assert same(ops.stochastic_round(every.float(), key(step)), every)


def test_the_mean_is_kept():
    """64 steps of 65,536 draws of values between two neighbours: z scores of mean 0 and deviation 1.

    The mean of 64 such scores has deviation 1/8, so 0.5 is 4 deviations; that of their deviation is 0.09.
    """
    low, step = 1.0, 2.0**-7
    scores = []
    for draw in range(64):
        odds = (draw + 0.5) / 64
        x = torch.full((ELEMENTS,), low + odds * step)
        ups = (ops.stochastic_round(x, key(draw)) > low).sum().item()
        scores.append((ups - ELEMENTS * odds) / (ELEMENTS * odds * (1 - odds)) ** 0.5)
    scores = torch.tensor(scores)
    assert scores.mean().abs() < 0.5 and 0.6 < scores.std() < 1.4


@pytest.mark.parametrize("others", [[(1, 1)], [(0, 2)], [(1, 1), (0, 2)]], ids=str)
def test_draws_of_steps_and_leaves_are_not_correlated(others):
    """Whether the same elements of two steps, or of two leaves, go up: a correlation of 65,536 draws, below 4.5
    deviations. Neighbours in one leaf too.
    """
    x = torch.full((ELEMENTS,), 1.0 + 2.0**-8)

    def ups(step: int, leaf: int) -> torch.Tensor:
        return (ops.stochastic_round(x, key(step, leaf)) > 1).double() * 2 - 1

    first = ups(0, 1)
    for step, leaf in others:
        assert (first * ups(step, leaf)).sum().abs() / ELEMENTS**0.5 < 4.5
    for lag in (1, 2, 256):
        assert (first[lag:] * first[:-lag]).sum().abs() / ELEMENTS**0.5 < 4.5


def test_wrong_arguments():
    x, scalar = torch.ones(4, 2), key()
    with pytest.raises(TypeError, match=r"stochastic_round: x must be fp32, got torch.float64\."):
        ops.stochastic_round(x.double(), scalar)
    with pytest.raises(TypeError, match=r"key must be an int32 scalar on cpu, got torch.int64\[\]"):
        ops.stochastic_round(x, scalar.long())
    for whole, offsets in (([4], [0]), ([5, 3], [0, 0]), ([5, 2], [2, 0]), ([5, 2], [-1, 0])):
        with pytest.raises(ValueError, match=r"\[4, 2\] at .* is no part of .* along one dim"):
            ops.stochastic_round(x, scalar, whole, offsets)
    old = torch.ones(4, 2, dtype=torch.bfloat16)
    rounded_over = torch.ops.ztrans.stochastic_round_.default
    with pytest.raises(
        ValueError, match=r"must be bf16, int8 or uint8\[4, 2\] on cpu, got torch.float32"
    ):
        rounded_over(x, x, scalar, [4, 2], [0, 0])
    with pytest.raises(ValueError, match=r"stochastic_round_: the old value must be contiguous"):
        rounded_over(old.view(2, 4).t(), x, scalar, [4, 2], [0, 0])
    with pytest.raises(ValueError, match=r"\[4, 2\] on cpu, got torch.bfloat16\[4, 1\]"):
        rounded_over(old[:, :1].contiguous(), x, scalar, [4, 2], [0, 0])
    with pytest.raises(TypeError, match=r"step must be a scalar of int32, int64 or fp32"):
        ops.leaf_keys(torch.ones(2), [1])
    with pytest.raises(ValueError, match="integers of 32 bits"):
        ops.leaf_keys(torch.ones(()), [1 << 32])
