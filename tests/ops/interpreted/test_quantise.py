"""quantise and dequantise: kernel and reference agree bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.interpreted.patterns import bits, room, same

quantise = importlib.import_module("ztrans.ops.quantise")
dequantise = importlib.import_module("ztrans.ops.dequantise")

NUMELS = (2048 * 2 + 5, 3, 0, 128, 127, 129)
SIZES = [n + pad for n, pad in zip(NUMELS, (11, 0, 2, 0, 1, 2100))]


def both(parts, kind):
    ours, true = (room(quantise.row_bytes(SIZES), torch.uint8) for _ in range(2))
    quantise.launch(parts, SIZES, kind, ours)
    quantise.reference(parts, SIZES, kind, true)
    return ours, true


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantise(dtype, kind, skew):
    def nothing(n):  # zeros of both signs, and what is too small to have a scale
        return (torch.randn(n + skew).sign() * torch.tensor([0.0, 1e-38]).repeat(n)[: n + skew]).to(dtype)[skew:]

    for make in (lambda n: (torch.randn(n + skew) * 3).to(dtype)[skew:], lambda n: bits(n, dtype, n, skew), nothing):
        ours, true = both([make(n) for n in NUMELS], kind)
        end = -(-sum(SIZES) // 16) * 16
        assert torch.equal(ours[:end], true[:end])
        assert same(ours[end:].view(torch.float32), true[end:].view(torch.float32))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_dequantise(dtype, kind, ranks):
    rows = [both([torch.randn(n) for n in NUMELS], kind)[1] for _ in range(ranks)]
    numels = [ranks * size - 1 if size else 0 for size in SIZES]
    ours, true = ([room(n, dtype) for n in numels] for _ in range(2))
    dequantise.launch(torch.cat(rows), SIZES, ranks, kind, ours)
    dequantise.reference(torch.cat(rows), SIZES, ranks, kind, true)
    assert all(same(a, b) for a, b in zip(ours, true))


def test_a_buffer_may_lie_anywhere():
    buffer = both([torch.randn(n) for n in NUMELS], "int8")[1]
    skewed = torch.empty(len(buffer) + 2, dtype=torch.uint8)[2:].copy_(buffer)
    assert skewed.data_ptr() % 16 == 2
    ours, true = ([room(n, torch.float32) for n in NUMELS] for _ in range(2))
    dequantise.launch(skewed, SIZES, 1, "int8", ours)
    dequantise.reference(buffer, SIZES, 1, "int8", true)
    assert all(same(a, b) for a, b in zip(ours, true))
