"""The values of reductions over NCCL, on a double of its process group that computes what NCCL does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_cuda import FakeCuda
from ztrans import ops
from ztrans.ir.collectives import reduce, rules, wire_dtype
from ztrans.ir.graph import Eqn, Split, Var
from ztrans.ir.routes import Hosts
from ztrans.runtime.collectives import Start, wait
from ztrans.runtime.cuda.nccl import StreamedStart
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import transport
from ztrans.runtime.process_groups import Channel

COMBINE = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


class Nccl:
    """The NCCL group of one rank. The terms of the other ranks are known to it."""

    def __init__(self, rank: int, others: Sequence[torch.Tensor]) -> None:
        self.rank = rank
        self.others = others
        self.hosts = Hosts(1)
        self.is_direct = False
        self.group = self

    def allreduce_coalesced(self, tensors, options) -> None:
        for tensor in tensors:
            self._total(tensor, tensor.clone(), options)

    def reduce_scatter_tensor_coalesced(self, received, sent, options) -> None:
        for into, terms in zip(received, sent):
            rows = terms.view(-1, into.numel())
            self._total(into, rows[self.rank], options, self.rank)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _total(self, into, own, options, row: int | None = None) -> None:
        into.copy_(own)
        for other in self.others:
            term = torch.view_as_real(other) if other.is_complex() else other
            term = term.reshape(-1)
            if row is not None:
                term = term.view(-1, into.numel())[row]
            COMBINE[options.reduceOp.op](into, term, out=into)


def term(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values).to(dtype)


@pytest.mark.parametrize("to", [None, Split("dp")], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
        torch.float32, torch.float64, torch.complex64,
    ],
    ids=str,
)  # fmt: skip
def test_a_reduction_over_nccl_has_the_values_of_the_program(dtype, op, to):
    """The mean of integers too: it is a sum that is divided after it has arrived."""
    mine, other = term([5, 7, 0, 1], dtype), term([2, 4, 0, 6], dtype)
    want = rules(_reduction(dtype, op, to)).total(_reduction(dtype, op, to), 0, [mine, other])
    (value,) = _reduced(_reduction(dtype, op, to), [mine], Nccl(0, [other]))
    assert torch.equal(value, want if to is None else want[:2])


def _reduction(dtype: torch.dtype, op: str, to: Split | None) -> Eqn:
    return reduce([Var("x", dtype, (4,))], ["x"], "dp", op, to)


def _reduced(eqn: Eqn, members: list[torch.Tensor], group: Nccl) -> list[torch.Tensor]:
    """The values that a rank of two gets."""
    carrier = transport(eqn.op, eqn.kwargs["op"], wire_dtype(eqn, eqn.ins[0]), lambda: "one host")
    where = {"dp": 2}, {"dp": group.rank}
    start = StreamedStart(eqn, *where, group, Streams(FakeCuda()), carrier)
    return [wait(member) for member in start(*members)]


def test_the_mean_of_integers_is_exact_and_cut_off():
    """A quotient in fp32 would round an integer of more than 24 bits."""
    terms = [torch.tensor([2**24 + 1, -7]), torch.tensor([2**24 + 1, 0])]
    assert ops.reduce(terms, "mean", torch.int64).tolist() == [2**24 + 1, -3]


def test_gloo_does_not_add_the_bytes_of_bools(monkeypatch):
    """A bool that holds 2 is neither true nor false to torch."""

    def as_gloo(tensor, op, group, async_op):
        theirs = torch.tensor([True, True, False, False]).view(torch.uint8)
        COMBINE[op](tensor.view(torch.uint8), theirs, out=tensor.view(torch.uint8))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", as_gloo)
    channel = Channel("dp", "reductions")
    monkeypatch.setattr(Channel, "group", None)
    monkeypatch.setattr(Channel, "is_direct", False)
    start = Start(_reduction(torch.bool, "sum", None), {"dp": 9}, {"dp": 0}, channel)
    (member,) = start(torch.tensor([True, False, True, False]))
    assert wait(member).view(torch.uint8).tolist() == [1, 1, 1, 0]
