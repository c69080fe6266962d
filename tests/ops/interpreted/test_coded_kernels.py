"""The kernels of encode, decode and sum_coded have the bits of their references, for all bit patterns."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from tests.ops.hard_values import hard_values
from tests.ops.interpreted.patterns import bits, room, same
from tests.support.cover import parameters_of
from ztrans.ir.wire_format import Coded

encode = importlib.import_module("ztrans.ops.encode")
decode = importlib.import_module("ztrans.ops.decode")
sum_coded = importlib.import_module("ztrans.ops.sum_coded")

# Whole programs and a bit, less than a block, nothing, one program, and a value that ends in the part of rank 1.
NUMELS = (4096 * 3 + 5, 3, 0, 4096, 700)
I8, I4, E4M3, ODD = Coded(8, 256), Coded(4, 64), Coded(8, 64, "fp8"), Coded(4, 24)
FORMATS = [I8, I4, E4M3, ODD, Coded(8, 4096 * 2)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def arguments(form):
    return form.bits, form.block, form.kind


def sizes_of(ranks):
    return [-(-n // ranks) + more for n, more in zip(NUMELS, (0, 5, 2, 0, 300))]


def encoded(parts, form, ranks, run, skew=0):
    """What a kernel or its reference encodes, in rows inside a larger buffer."""
    sizes = sizes_of(ranks)
    nbytes = sum(map(form.nbytes, sizes))
    buffer = room(ranks * (nbytes + 20) + skew, torch.uint8)[skew:].view(ranks, -1)
    run(parts, sizes, ranks, *arguments(form), buffer[:, 4 : 4 + nbytes])
    return buffer, buffer[:, 4 : 4 + nbytes]


@pytest.mark.parametrize(
    ("form", "ranks", "dtype", "skew"),
    parameters_of(
        [*itertools.product(FORMATS, (1, 3), FLOATS, (0, 1))],
        [
            *((I8, 1, torch.float32, 0), (I8, 3, torch.bfloat16, 1), (E4M3, 3, torch.float32, 0)),
            *((I4, 3, torch.float32, 0), (I4, 1, torch.bfloat16, 1), (ODD, 1, torch.float16, 1)),
        ],
    ),
    ids=str,
)
def test_encode_and_decode(form, ranks, dtype, skew):
    """NaN, infinities and subnormal numbers are among the elements; bytes around the rows stay as they were."""
    parts = [bits(n, dtype, seed, skew) for seed, n in enumerate(NUMELS)]
    if ranks == 1:  # almost all blocks of random bits have a NaN
        parts = [torch.where(x.abs() < 1e4, x, 1).contiguous() for x in parts]
    ours, rows = encoded(parts, form, ranks, encode.launch, 4 * skew)
    true, _ = encoded(parts, form, ranks, encode.reference, 4 * skew)
    assert torch.equal(ours, true)

    values = [[room(n, dtype, skew) for n in NUMELS] for _ in range(2)]
    decode.launch(rows, sizes_of(ranks), *arguments(form), values[0])
    decode.reference(rows, sizes_of(ranks), *arguments(form), values[1])
    assert all(map(same, *values))


@pytest.mark.parametrize(
    ("form", "dtype"),
    parameters_of(
        [*itertools.product(FORMATS, FLOATS)],
        [(form, torch.float32) for form in FORMATS[:-1]] + [(I4, torch.bfloat16)],
    ),
    ids=str,
)
def test_hard_values(form, dtype):
    x = hard_values(form.block, dtype)
    codes = [room(form.nbytes(x.numel()), torch.uint8).view(1, -1) for _ in range(2)]
    encode.launch([x], [x.numel()], 1, *arguments(form), codes[0])
    encode.reference([x], [x.numel()], 1, *arguments(form), codes[1])
    assert torch.equal(*codes)
    values = [torch.empty_like(x) for _ in range(2)]
    decode.launch(codes[0], [x.numel()], *arguments(form), [values[0]])
    decode.reference(codes[0], [x.numel()], *arguments(form), [values[1]])
    assert same(*values)


@pytest.mark.parametrize(
    ("form", "ranks", "op", "out"),
    parameters_of(
        [*itertools.product(FORMATS, (1, 2, 3, 8), ("sum", "mean"), FLOATS[:2])],
        [
            *((I8, 3, "mean", torch.float32), (I4, 8, "mean", torch.bfloat16)),
            *((ODD, 2, "sum", torch.float32), (E4M3, 2, "mean", torch.float32)),
        ],
    ),
    ids=str,
)
def test_sums(form, ranks, op, out):
    terms = []
    for rank in range(ranks):
        parts = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for n in NUMELS]
        terms.append(encoded(parts, form, 1, encode.reference)[1][0])
    ours, true = ([room(n, out) for n in NUMELS] for _ in range(2))
    sum_coded.launch(terms, ours, sizes_of(1), op, ranks, *arguments(form))
    sum_coded.reference(terms, true, sizes_of(1), op, ranks, *arguments(form))
    assert all(map(same, ours, true))


def test_parts_of_several_dtypes_and_strides():
    form = Coded(8, 64)
    grid = torch.randn(64, 130)
    parts = [grid[:, 1:129], torch.randn(700).bfloat16(), grid.t(), torch.randn(9)]
    sizes = [-(-x.numel() // 2) + 3 for x in parts]
    ours, true = (room(2 * sum(map(form.nbytes, sizes)), torch.uint8).view(2, -1) for _ in range(2))
    encode.launch(parts, sizes, 2, *arguments(form), ours)
    encode.reference(parts, sizes, 2, *arguments(form), true)
    assert torch.equal(ours, true)


def test_blocks_whose_scales_are_not_aligned_are_encoded_by_torch():
    buffer = torch.zeros(2, 64, dtype=torch.uint8)
    assert encode.has_kernel(8, 4, "int", buffer)
    assert not encode.has_kernel(8, 6, "int", buffer)
    assert not encode.has_kernel(8, 4, "int", buffer[:, 2:])
    assert not encode.has_kernel(8, 1 << 14, "int", buffer)
