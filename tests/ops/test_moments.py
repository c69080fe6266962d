"""Moments in 8 bits: their values by Python's floats, odds, and the values that break codes."""

from __future__ import annotations

import math

import pytest
import torch

from ztrans import ops

ELEMENTS = 1 << 16
KEY = ops.leaf_keys(torch.tensor(1), [2])[0]


def value(code: int, dtype: torch.dtype) -> float:
    """What a code stands for: floats with 2 or 3 bits of mantissa, the second to the power of 4."""
    if abs(code) == (127 if dtype == torch.int8 else 255):
        return math.nan
    if code == 0:
        return 0.0
    steps, least, power = (4, -26, 1) if dtype == torch.int8 else (8, -16, 4)
    exponent, mantissa = divmod(abs(code) - 1, steps)
    return math.copysign(((1 + mantissa / steps) * 2.0 ** (least + exponent)) ** power, code)


CODES = {torch.int8: range(-127, 128), torch.uint8: range(256)}


def values_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.tensor([*CODES[dtype]], dtype=dtype)
    return codes, torch.tensor([value(c, dtype) for c in CODES[dtype]])


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return ops.widened(ops.stochastic_round(x, KEY, dtype=dtype))


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_stand_for_floats_and_these_keep_their_codes(dtype):
    codes, expected = values_of(dtype)
    wide = ops.widened(codes)
    assert torch.equal(wide.nan_to_num(-7), expected.nan_to_num(-7))
    unsigned_nan = codes != -127
    assert torch.equal(ops.narrowed(wide, dtype)[unsigned_nan], codes[unsigned_nan])
    assert torch.equal(
        ops.stochastic_round(wide, KEY, dtype=dtype)[unsigned_nan], codes[unsigned_nan]
    )


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_values_become_one_of_their_neighbours_with_odds_that_keep_the_mean(dtype):
    """They keep the mean of a first moment, and that of the fourth root of a second."""
    _, values = values_of(dtype)
    values = values[values.isfinite()]
    power = 1.0 if dtype == torch.int8 else 0.25
    for x in (0.3, 1.7e-3, 2.0**-20 * 1.49, 4e-9, 30.0):
        drawn = rounded(torch.full((ELEMENTS,), x), dtype)
        below, above = values[values <= x].max(), values[values > x].min()
        assert set(drawn.unique().tolist()) == {below.item(), above.item()}
        ends = below.double() ** power, above.double() ** power
        deviation = (ends[1] - ends[0]) / 2 / ELEMENTS**0.5
        assert ((drawn.double() ** power).mean() - x**power).abs() < 4 * deviation
    if dtype == torch.int8:
        x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
        assert torch.equal(rounded(-x, dtype), -rounded(x, dtype))


def test_values_without_a_code():
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 1e6, 1e38, inf, -inf, nan, -1e-6])
    first = rounded(x, torch.int8)
    assert first[:6].tolist() == [0, 0, 0, 0, 40, 40] and first[6:9].isnan().all()
    assert -2e-6 < first[9] < -5e-7
    second = rounded(x, torch.uint8)
    largest = (1.625 * 2.0**15) ** 4
    assert second[:6].tolist()[:5] == [0, 0, 2.0**-64, 2.0**-64, second[4].item()]
    assert 5e5 < second[4] < 2e6 and second[5] == largest
    assert second[6:].isnan().all()


def test_tiny_first_moments_become_zero_and_no_second_moment_does():
    """So no update divides by eps what is not 0, and one that has no gradient any more ends."""
    tiny = torch.full((ELEMENTS,), 1e-20)
    assert not rounded(tiny, torch.int8).any() and rounded(tiny**2, torch.uint8).all()


def test_an_outlier_changes_no_neighbour():
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(512, generator=draw) * 1e-3
    other = x.clone()
    other[7] = 1e4
    for dtype in CODES:
        a, b = rounded(x, dtype), rounded(other, dtype)
        assert torch.equal(a[:7], b[:7]) and torch.equal(a[8:], b[8:]) and b[7] >= 40


def test_decaying_moments_follow_their_decay():
    """A second moment without gradients falls as fast as in fp32, which rounding up or to nearest would prevent."""
    x = torch.ones(1 << 12)
    stored = ops.narrowed(x, torch.uint8)
    for step in range(1000):
        key = ops.leaf_keys(torch.tensor(step), [0])[0]
        stored = ops.stochastic_round(ops.widened(stored) * 0.999, key, dtype=torch.uint8)
    root = ops.widened(stored).double().pow(0.25).mean()
    assert abs(root / 0.999**250 - 1) < 0.01
    x = torch.ones(1 << 12)
    assert torch.equal(
        ops.narrowed(ops.widened(ops.narrowed(x, torch.uint8)) * 0.999, torch.uint8),
        ops.narrowed(x, torch.uint8),
    )


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"widened: a moment is int8 or uint8, got torch.float32"):
        ops.widened(torch.ones(2))
    with pytest.raises(TypeError, match=r"narrowed: fp32 becomes int8 or uint8, got torch.float64"):
        torch.ops.ztrans.narrowed(torch.ones(2).double(), torch.int8)
