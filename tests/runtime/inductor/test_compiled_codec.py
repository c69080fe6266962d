"""The compiled codec has the bits of plain PyTorch, for values that break codecs and for any number of blocks."""

from __future__ import annotations

import pytest
import torch

from tests.ops.hard_values import hard_values
from ztrans import ops
from ztrans.ir.wire_format import Coded
from ztrans.runtime.inductor import codec

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch"
    ),  # Inductor's own modules use torch.jit
]


@pytest.mark.parametrize(
    ("form", "encoded", "decoded"),
    [
        (Coded(8, 256), torch.float32, torch.bfloat16),
        (Coded(4, 64), torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_the_bits_are_those_of_plain_torch(form, encoded, decoded, monkeypatch):
    arguments = form.bits, form.block, form.kind
    values = hard_values(form.block, encoded).view(1, -1)
    inputs = [values, values[:, : form.block - 3]]

    def results():
        found = []
        for x in inputs:
            codes = ops.encode(x, *arguments)
            found += [codes, ops.decode(codes, x.numel(), decoded, *arguments)]
            total = torch.empty(x.numel())
            ops.sum_coded([codes[0], codes[0]], [total], [x.numel()], "mean", 3, *arguments)
            found.append(total)
        # One block of each rank, whose rows are not next to each other.
        rows = torch.arange(3.0 * form.block).to(encoded).view(3, -1)[:, : form.block - 4]
        found.append(torch.zeros(3, form.nbytes(form.block) + 8, dtype=torch.uint8))
        inside = found[-1][:, 4:-4]
        ops.encode(rows, *arguments, out=inside)
        found.append(ops.decode(inside, form.block, decoded, *arguments))
        return found

    for kernels in (codec.encoders, codec.decoders):
        for key in [key for key in kernels if key[:3] == (form.bits, form.kind, form.block)]:
            monkeypatch.delitem(kernels, key)
    plain = results()
    codec.compile_encode(form, encoded)
    codec.compile_decode(form, decoded)
    codec.compile_decode(form, torch.float32)
    codec.compile_decode(form, torch.float32, add=True)
    ran = []
    for kernels in (codec.encoders, codec.decoders):
        for key, kernel in kernels.items():
            monkeypatch.setitem(
                kernels, key, lambda *x, kernel=kernel, key=key: (ran.append(key), kernel(*x))[1]
            )
    for ours, true in zip(results(), plain, strict=True):
        assert torch.equal(ours.view(torch.uint8), true.view(torch.uint8))
    assert len({*ran}) == 4 - (decoded == torch.float32)
