"""cast_pack and unpack: kernel and reference agree bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.interpreted.patterns import as_bytes, bits, room, same

cast_pack = importlib.import_module("ztrans.ops.cast_pack")
unpack = importlib.import_module("ztrans.ops.unpack")

NUMELS = (4096 * 2 + 5, 3, 0, 4096, 1, 4095, 4097)
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.int64, torch.int64),
    (torch.uint8, torch.uint8),
    (torch.float64, torch.bfloat16),
    (torch.int32, torch.float32),
    (torch.complex64, torch.complex64),
]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
def test_cast_pack(src, dst, ranks, skew):
    parts = [bits(n, src, seed, skew) for seed, n in enumerate(NUMELS)]
    sizes = [-(-n // ranks) + pad for n, pad in zip(NUMELS, (0, 5, 2, 0, 0, 1, 8191))]
    ours, true = (room(ranks * sum(sizes), dst, skew) for _ in range(2))
    cast_pack.launch(parts, sizes, ranks, ours)
    cast_pack.reference(parts, sizes, ranks, true)
    assert same(as_bytes(ours), as_bytes(true))


def test_cast_pack_of_mixed_dtypes_and_strides():
    grid = torch.randn(64, 130)
    parts = [
        grid[:, 1:129],
        torch.randn(700).bfloat16(),
        grid.t(),
        torch.randn(5, dtype=torch.float64),
        torch.arange(9),
    ]
    for ranks in (1, 2):
        sizes = [-(-p.numel() // ranks) + 3 for p in parts]
        ours, true = (room(ranks * sum(sizes), torch.bfloat16) for _ in range(2))
        cast_pack.launch(parts, sizes, ranks, ours)
        cast_pack.reference(parts, sizes, ranks, true)
        assert same(ours, true)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.complex128], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_unpack(dtype, ranks, skew):
    sizes = [-(-n // ranks) + pad for n, pad in zip(NUMELS, (0, 5, 2, 0, 0, 1, 4096))]
    buffer = bits(ranks * sum(sizes), dtype, 7, skew)
    ours, true = ([room(n, dtype, skew) for n in NUMELS] for _ in range(2))
    unpack.launch(buffer, sizes, ranks, ours)
    unpack.reference(buffer, sizes, ranks, true)
    assert all(same(as_bytes(a), as_bytes(b)) for a, b in zip(ours, true))


def test_unpack_undoes_cast_pack():
    parts = [torch.randn(n) for n in NUMELS]
    sizes = [-(-n // 4) for n in NUMELS]
    buffer = room(4 * sum(sizes), torch.bfloat16)
    cast_pack.launch(parts, sizes, 4, buffer)
    back = [room(n, torch.bfloat16) for n in NUMELS]
    unpack.launch(buffer, sizes, 4, back)
    assert all(torch.equal(b, p.bfloat16()) for b, p in zip(back, parts))
