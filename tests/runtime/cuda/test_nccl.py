"""The values of reductions over NCCL, on a double of its process group that computes what NCCL does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
    (member,) = _start(_reduction(dtype, op, to), Nccl(0, [other]), 2)(mine)
    assert torch.equal(wait(member), want if to is None else want[:2])


def _reduction(dtype: torch.dtype, op: str, to: Split | None) -> Eqn:
    return reduce([Var("x", dtype, (4,))], ["x"], "dp", op, to)


def _start(eqn: Eqn, group: Nccl, ranks: int) -> StreamedStart:
    carrier = transport(eqn.op, eqn.kwargs["op"], wire_dtype(eqn, eqn.ins[0]), lambda: "one host")
    where = {"dp": ranks}, {"dp": group.rank}
    return StreamedStart(eqn, *where, group, Streams(FakeCuda()), carrier)


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


RANKS = 8
# A member with a message of its own, and two that share one; the last rank has a part of the third, or nothing of it.
SHAPES = ((1 << 18,), (24, 3), (RANKS + 3, 5))


@pytest.mark.parametrize("rank", [0, 1, RANKS - 1])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_half_precision_is_summed_in_rank_order(monkeypatch, rank, op, result, dim):
    """Members that are transposed, and results of other dtypes, have the same bits."""
    shapes = SHAPES if dim == 0 else [(4, 40), (3, 3, 2)]
    eqn = _half(shapes, op, result, Split("dp", dim))
    by_rank = _terms(eqn)
    members = _exchanging(monkeypatch, eqn, by_rank, rank)(*by_rank[rank])
    for k, value in enumerate(map(wait, members)):
        want = rules(eqn).member(eqn, k, [terms[k] for terms in by_rank])[rank]
        assert torch.equal(value, want) and value.is_contiguous()


def test_a_sum_of_half_precision_moves_20_bytes_an_element(monkeypatch):
    """For 8 ranks: 16 are read, and 4 written, in one launch. A launch for each term would move 92."""
    eqn = _half([(RANKS * 4096,)], "mean", torch.float32, Split("dp"))
    by_rank = _terms(eqn)
    start = _exchanging(monkeypatch, eqn, by_rank, 3)
    with Traffic() as traffic:
        start(*by_rank[3])
    assert traffic.moved.pop("sum_terms") == 20 * 4096
    assert traffic.moved == {"copy_": 2 * 2 * RANKS * 4096}, "the double of the exchange"
    terms = torch.cat([t.view(RANKS, -1)[3:4] for (t,) in by_rank])
    with Traffic() as traffic:
        total = ops.reduce(list(terms), "mean", torch.float32)
        torch.ops.ztrans.unpack(total, [4096], 1, [torch.empty(4096)])
    assert traffic.launches == 11 and sum(traffic.moved.values()) // 4096 == 92


def test_a_mean_of_packed_floats_is_scaled_while_it_is_delivered():
    eqn = reduce(
        [Var(name, torch.float32, (8, 4)) for name in "ab"], ["a", "b"], "dp", "mean", Split("dp")
    )
    members = [torch.randn(8, 4) for _ in eqn.ins]
    with Traffic() as traffic:
        _start(eqn, Nccl(0, ()), 2)(*members)
    assert "div_" not in traffic.moved and traffic.moved["sum_terms"] == 8 * 32


class Traffic(TorchDispatchMode):
    """Counts the launches, and the bytes that they read and write."""

    WRITE_ONLY = ("copy_", "sum_terms", "unpack", "cast_pack", "_to_copy", "full")

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.moved: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            arguments = zip(func._schema.arguments, args)
            written = [x for a, x in arguments if a.alias_info is not None]
            only_written = pytree.tree_leaves(written) if name in self.WRITE_ONLY else []
            read = [x for x in pytree.tree_leaves(args) if not any(x is y for y in only_written)]
            writes = pytree.tree_leaves(written) or pytree.tree_leaves(result)
            self.launches += 1
            nbytes = sum(x.nbytes for x in (*read, *writes) if isinstance(x, torch.Tensor))
            self.moved[name] = self.moved.get(name, 0) + nbytes
        return result


def _half(shapes, op: str, result: torch.dtype, to: Split) -> Eqn:
    terms = [Var(f"g{k}", torch.bfloat16, shape) for k, shape in enumerate(shapes)]
    return reduce(terms, [v.name for v in terms], "dp", op, to, result=result)


def _terms(eqn: Eqn) -> list[list[torch.Tensor]]:
    """The members of each rank."""
    draw = torch.Generator().manual_seed(0)
    make = lambda v: torch.randn(v.shape, generator=draw).to(v.dtype)
    return [[make(v) for v in eqn.ins] for _ in range(RANKS)]


def _exchanging(monkeypatch, eqn: Eqn, by_rank, rank: int) -> StreamedStart:
    """The start of a rank to which an all-to-all brings what the other ranks have packed for it."""
    start = _start(eqn, Nccl(rank, ()), RANKS)
    arriving = []
    for ks in start.groups:
        sizes = [start.parts[k] for k in ks]
        rows = []
        for members in by_rank:
            parts = [members[k].movedim(start.dim, 0) for k in ks]
            rows.append(ops.cast_pack(parts, sizes, start.wire, ranks=RANKS).view(RANKS, -1)[rank])
        arriving.append(torch.cat(rows).view(torch.uint8))

    def all_to_all(incoming, outgoing, *splits, group) -> None:
        incoming.copy_(arriving.pop(0))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return start
