"""Values that break codecs, with their bounds, and the buffers of many parts."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ztrans import ops
from ztrans.ir.wire_format import Coded
from ztrans.ops.encode import GREATEST, LEAST

FORMATS = [
    Coded(8, 256),
    Coded(4, 64),
    Coded(4, 256),
    Coded(8, 256, "fp8"),
    Coded(8, 6),
    Coded(4, 6),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
formats = pytest.mark.parametrize("form", FORMATS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(form):
    return form.bits, form.block, form.kind


def encode(x, form):
    return ops.encode(x.view(1, -1), *arguments(form))


def arrived(x, form, dtype=None):
    """What a receiver gets of `x`."""
    y = ops.decode(encode(x, form), x.numel(), dtype or x.dtype, *arguments(form))
    return y.view(x.shape)


def bound(x, form):
    """The largest error of each element, in fp64: half a scale, and two roundings in fp32."""
    x = x.double()
    padded = torch.nn.functional.pad(x, (0, -x.numel() % form.block)).view(-1, form.block)
    scale = padded.abs().amax(1, keepdim=True) / GREATEST[form.kind, form.bits]
    error = scale.expand_as(padded) / 2
    if form.kind == "fp8":
        error = torch.maximum(padded.abs() / 16, scale * 2.0**-10)
    return error.reshape(-1)[: x.numel()] * (1 + 1e-4)


def check_bound(x, form):
    assert ((arrived(x, form, torch.float32).double() - x.double()).abs() <= bound(x, form)).all()


def is_zero(codes, form):
    """Whether bytes are zero; floats of 8 bits may be negative zeros."""
    return not (codes & 0x7F if form.kind == "fp8" else codes).any()


def normal(n, dtype=torch.float32, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@formats
@dtypes
def test_an_element_errs_by_half_a_scale_at_most(form, dtype):
    check_bound(normal(3000, dtype), form)
    check_bound(normal(3000, dtype) * torch.logspace(-3, 3, 3000).to(dtype), form)


@formats
@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_nan_or_infinity_arrives_as_nan(form, dtype, bad):
    x = normal(4 * form.block, dtype)
    for place in (form.block, 2 * form.block - 1):  # the first and the last of block 1
        y = x.clone()
        y[place] = bad
        blocks = arrived(y, form).view(4, -1)
        assert blocks[1].isnan().all()
        assert torch.equal(blocks[[0, 2, 3]], arrived(x, form).view(4, -1)[[0, 2, 3]])
        codes = encode(y, form).view(-1)
        block_bytes = form.block * form.bits // 8
        assert is_zero(codes[block_bytes : 2 * block_bytes], form)


@formats
@dtypes
def test_blocks_of_zeros_and_of_subnormal_numbers_arrive_as_zeros(form, dtype):
    zeros = torch.zeros(2 * form.block, dtype=dtype)
    zeros[1] = -0.0
    assert is_zero(encode(zeros, form), form) and not arrived(zeros, form).any()
    if dtype == torch.float16:
        return  # all its numbers are above 2**-100
    for least in (1e-45, 1e-40, LEAST * 0.99, LEAST):
        tiny = torch.full_like(zeros, least)
        assert is_zero(encode(tiny, form), form)
    check_bound(torch.full_like(zeros, LEAST * 1.01), form)
    assert arrived(torch.full_like(zeros, LEAST * 1.01), form).all()


@formats
@dtypes
def test_equal_elements_arrive_to_one_rounding(form, dtype):
    x = torch.full((form.block,), 0.3, dtype=dtype)
    y = arrived(x, form)
    assert y.unique().numel() == 1
    assert torch.allclose(y, x, rtol=torch.finfo(dtype).eps, atol=0)


@formats
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_huge_blocks_are_finite(form, dtype):
    largest = min(3.3e38, torch.finfo(dtype).max)
    x = normal(form.block, dtype).clamp(-1, 1) * largest
    x[0] = largest
    x[1] = -largest
    assert arrived(x, form).isfinite().all()
    check_bound(x, form)
    top = torch.full_like(x, torch.finfo(dtype).max)
    assert arrived(top, form).isfinite().all()


@formats
def test_beside_an_outlier_small_elements_are_within_the_bound(form):
    x = normal(form.block)
    x[5] = 1e4
    y = arrived(x, form)
    assert abs(y[5] - 1e4) <= 1e4 * 2e-7
    check_bound(x, form)
    if form.kind == "int":
        y[5] = 0
        assert not y.any()


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_idempotent(form, dtype):
    """Of numbers of all magnitudes: what arrives has the same codes and scales, to the last bit."""
    n = form.block * 2000
    x = normal(n) * torch.logspace(-3, 3, n)
    if dtype != torch.float16:
        x = (
            x
            * torch.logspace(-20, 20, n)[
                torch.randperm(n, generator=torch.Generator().manual_seed(1))
            ]
        )
    codes = encode(x.to(dtype), form)
    y = ops.decode(codes, n, dtype, *arguments(form))
    assert torch.equal(encode(y, form), codes)


@formats
def test_the_code_below_all_others_is_unused(form):
    if form.kind == "fp8":
        return
    codes = encode(torch.full((form.block,), -1.0), form)[0, : form.block * form.bits // 8]
    assert codes.view(torch.int8).unique().item() == {8: -127, 4: -7 - 16 * 7}[form.bits]


@formats
@dtypes
@pytest.mark.parametrize("elements", [0, 1, 5, 63, 300, 2000])
def test_padding_has_no_effect_and_every_part_has_blocks_of_its_own(form, dtype, elements):
    rows = normal(3 * elements, dtype).view(3, elements)
    codes = ops.encode(rows, *arguments(form))
    assert codes.shape == (3, form.nbytes(elements))
    for row, alone in zip(codes, rows):
        assert torch.equal(row, encode(alone, form)[0])
    padded = torch.nn.functional.pad(rows, (0, -elements % form.block))
    assert torch.equal(ops.encode(padded, *arguments(form)), codes)
    values = ops.decode(codes, elements, dtype, *arguments(form))
    assert torch.equal(
        values, ops.decode(codes, padded.shape[1], dtype, *arguments(form))[:, :elements]
    )


@formats
def test_a_buffer_of_uneven_parts_is_their_codes_side_by_side(form):
    """Rank 2 of 3 has nothing of the first part, and less than others of the second."""
    parts = [normal(2 * 70, seed=1).view(2, 70), normal(1000, torch.bfloat16, seed=2), normal(0)]
    sizes = [70, 334, 0]
    buffer = ops.encode_pack(parts, sizes, *arguments(form), ranks=3)
    whole = [
        torch.nn.functional.pad(x.reshape(-1), (0, 3 * n - x.numel())) for x, n in zip(parts, sizes)
    ]
    codes = [ops.encode(x.view(3, n), *arguments(form)) for x, n in zip(whole, sizes)]
    assert torch.equal(buffer, torch.cat(codes, 1))

    shapes = [x.shape for x in parts]
    values = ops.decode_unpack(buffer, sizes, shapes, torch.float32, *arguments(form))
    for value, x, n, code in zip(values, parts, sizes, codes):
        expected = ops.decode(code, n, torch.float32, *arguments(form)).view(-1)[: x.numel()]
        assert torch.equal(value, expected.view(x.shape))


@formats
def test_out_may_be_rows_inside_a_larger_buffer(form):
    rows = normal(2 * 100).view(2, 100)
    nbytes = form.nbytes(100)
    buffer = torch.full((2, nbytes + 7), 9, dtype=torch.uint8)
    ops.encode(rows, *arguments(form), out=buffer[:, 3 : 3 + nbytes])
    assert torch.equal(buffer[:, 3 : 3 + nbytes], ops.encode(rows, *arguments(form)))
    assert buffer[:, :3].eq(9).all() and buffer[:, 3 + nbytes :].eq(9).all()
    values = torch.empty(2, 100)
    ops.decode(buffer[:, 3 : 3 + nbytes], 100, torch.float32, *arguments(form), out=values)
    assert torch.equal(
        values, ops.decode(ops.encode(rows, *arguments(form)), 100, torch.float32, *arguments(form))
    )


@formats
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_sum_is_that_of_the_decoded_terms_in_rank_order(form, op):
    sizes, ranks = [70, 334], 3
    rows = [
        ops.encode_pack([normal(n, seed=r) for n in sizes], sizes, *arguments(form))[0]
        for r in range(ranks)
    ]
    outs = [torch.empty(2, 33), torch.empty(334)]
    ops.sum_coded(rows, outs, sizes, op, ranks, *arguments(form))
    shapes = [(2, 33), (334,)]
    for k, out in enumerate(outs):
        terms = []
        for row in rows:
            decoded = ops.decode_unpack(
                row.view(1, -1), sizes, shapes, torch.float32, *arguments(form)
            )
            terms.append(decoded[k])
        assert torch.equal(out, ops.reduce(terms, op, torch.float32))


def test_many_runs_of_blocks_have_the_codes_of_one(monkeypatch):
    form, x = Coded(8, 256), normal(256 * 40 + 3)
    codes, values = encode(x, form), arrived(x, form)
    monkeypatch.setattr(importlib.import_module("ztrans.ops.encode"), "RUN", 256 * 3)
    assert torch.equal(encode(x, form), codes) and torch.equal(arrived(x, form), values)


def test_plain_torch_divides_on_a_gpu():
    """If the divisor were a number on the host, PyTorch would multiply by its reciprocal, which rounds twice."""
    blocks = importlib.import_module("ztrans.ops.encode").encode_blocks
    with FakeTensorMode():
        graph = make_fx(lambda x: blocks(x, 8, "fp8"))(torch.empty(4, 64, device="cuda")).graph
    (division,) = [n for n in graph.nodes if "div" in str(n.target)]
    assert division.args[1].meta["val"].device.type == "cuda"
