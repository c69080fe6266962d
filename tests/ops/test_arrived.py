"""`arrived` and `hadamard`: what a receiver gets of codes, and the turn before them."""

import pytest
import torch

from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.wire_format import ARRIVED
from ztrans.ops import decode, encode
from ztrans.ops.arrived import arrived
from ztrans.ops.hadamard import hadamard
from ztrans.planning.cost import launches, memory_traffic
from ztrans.planning.devices import CPU
from ztrans.planning.roofline import roofline_seconds

FORMATS = [(8, 256, "int"), (4, 64, "int"), (8, 32, "fp8")]


@pytest.mark.parametrize("bits, block, kind", FORMATS)
def test_each_part_has_blocks_of_its_own(bits, block, kind):
    x = torch.randn(10, 40) * torch.logspace(-5, 5, 40)
    for dim, parts in ((0, x.chunk(3)), (1, [p.t() for p in x.chunk(3, 1)])):
        pieces = []
        for part in parts:
            row = part.reshape(1, -1)
            codes = encode(row, bits, block, kind)
            pieces.append(decode(codes, row.numel(), x.dtype, bits, block, kind).view(part.shape))
        whole = torch.cat(pieces)
        assert torch.equal(arrived(x, 3, dim, bits, block, kind), whole.t() if dim else whole)
    flat = arrived(x.view(-1), 3, 0, bits, block, kind)
    assert torch.equal(arrived(x, 3, -1, bits, block, kind), flat.view(10, 40))


@pytest.mark.parametrize("bits, block, kind", FORMATS)
def test_what_has_arrived_arrives_unchanged(bits, block, kind):
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    once = arrived(x, 3, 0, bits, block, kind)
    assert torch.equal(arrived(once, 3, 0, bits, block, kind), once) and not torch.equal(once, x)


def test_a_value_without_elements_arrives():
    assert arrived(torch.empty(0, 3), 2, 0, 8, 256).shape == (0, 3)


def test_a_turn_is_linear_and_its_own_inverse():
    x, y = torch.randn(2, 6, 128, 3)
    for dim, n in ((1, 64), (1, 2), (0, 2)):
        turned = hadamard(x, dim, n)
        torch.testing.assert_close(hadamard(turned, dim, n), x)
        torch.testing.assert_close(turned.norm(), x.norm())
        torch.testing.assert_close(hadamard(x + y, dim, n), turned + hadamard(y, dim, n))
    assert hadamard(x.bfloat16(), 1, 64).dtype == torch.bfloat16


def test_a_turn_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    by_hand = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2 @ x
    assert torch.equal(hadamard(x, 0, 4), by_hand)


@pytest.mark.parametrize("n", [1, 48, 256])
def test_a_turn_that_does_not_fit_is_an_error(n):
    with pytest.raises(
        ValueError, match=f"hadamard: 128 elements are not turned by {n}, a power of 2"
    ):
        hadamard(torch.ones(128), 0, n)


def test_a_plan_counts_its_codes():
    """It reads and writes the value and the codes, in two launches, as slowly as messages of codes are coded."""
    x, y = (Var(name, torch.float32, (1 << 20,)) for name in "xy")
    eqn = Eqn(ARRIVED, (x, 4, -1, 8, 256, "int"), (y,))
    graph = Graph("f", (x,), (eqn,), (y,), 0)
    nbytes = 2 * x.nbytes + 2 * (1 << 20) * 260 // 256
    assert memory_traffic(eqn, graph) == nbytes
    assert launches(graph)[eqn] == (1, 2)
    assert roofline_seconds(eqn, graph, CPU) == CPU.coding * nbytes / CPU.bandwidth
