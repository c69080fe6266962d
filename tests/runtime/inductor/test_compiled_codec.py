"""The compiled codec has the bits of plain PyTorch, for values that break codecs and for any number of blocks."""

from __future__ import annotations

import pytest
import torch

from tests.ops.hard_values import hard_values
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.wire_format import ARRIVED, Coded, Shaped
from ztrans.runtime.inductor import codec
from ztrans.runtime.inductor.backend import executable

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
def test_the_bits_are_those_of_plain_torch(form, encoded, decoded):
    compiled = codec.CompiledCoded(form.bits, form.block, form.kind)
    values = hard_values(form.block, encoded).view(1, -1)
    inputs = [values, values[:, : form.block - 3]]

    def results(form):
        found = []
        for x in inputs:
            size = x.numel()
            codes = torch.empty(1, form.nbytes(size), dtype=torch.uint8)
            found.append(form.pack([x], [size], 1, codes))
            found += form.unpack(codes, [size], [Shaped((size,), decoded)])
            total = Shaped((size,), torch.float32)
            found += form.totals([codes[0], codes[0]], [size], [total], "mean", 3)
        # One block of each rank, whose rows are not next to each other.
        rows = torch.arange(3.0 * form.block).to(encoded).view(3, -1)[:, : form.block - 4]
        found.append(torch.zeros(3, form.nbytes(form.block) + 8, dtype=torch.uint8))
        inside = found[-1][:, 4:-4]
        form.pack([rows], [form.block - 4], 3, inside)
        found += form.unpack(inside, [form.block], [Shaped((3, form.block), decoded)])
        return found

    for ours, true in zip(results(compiled), results(form), strict=True):
        assert torch.equal(ours.view(torch.uint8), true.view(torch.uint8))
    assert codec.encoder.cache_info().hits and codec.decoder.cache_info().hits


def test_what_arrives_of_a_value_is_computed_by_the_same_kernels():
    """A step that keeps the errors of its codes encodes each term twice: to send it, and for the error."""
    x, y = (Var(name, torch.float32, (5, 300)) for name in "xy")
    eqn = Eqn(ARRIVED, (x, 2, 0, 8, 256, "int"), (y,))
    program = Graph("f", (x,), (eqn,), (y,), 0)
    value = torch.arange(1500.0).view(5, 300).sin()
    before = codec.encoder.cache_info().hits
    run = executable(program, [], None, [value])
    (result,) = run([value])
    assert torch.equal(result, torch.ops.ztrans.arrived(value, 2, 0, 8, 256, "int"))
    assert codec.encoder.cache_info().hits == before + 2  # to compile it, and to run
    assert "arrival" in run.program.code
