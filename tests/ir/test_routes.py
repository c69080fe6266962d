"""Which way a collective takes between hosts, why, and the bytes that it sends inside and between them."""

import dataclasses

import pytest
import torch

import ztrans as zt
from ztrans.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    all_gather,
    reduce,
    wire_format,
)
from ztrans.ir.graph import Partial, Provenance, Split, Var
from ztrans.ir.routes import EXCHANGE, HIERARCHICAL, RING, Hosts, Route, common, hosts_of, route_of

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
ROWS = 64 * 15  # which all numbers of ranks divide


def route(kind, op, wire, partial, hosts, gloo) -> Route:
    """The route of a value of `ROWS` elements. If `partial` is half precision, the user has asked for it."""
    site = {"provenance": Provenance("grad", ("w",), "dp")}
    if kind is ALL_GATHER:
        eqn = all_gather([Var("w", wire, (ROWS,), (Split("dp"),))], ["f"], "dp", **site)
    else:
        term = Var("g", F32 if partial is BF16 else wire, (ROWS,), (Partial("dp", "sum"),))
        split = Split("dp") if kind is REDUCE_SCATTER else None
        eqn = reduce([term], ["f"], "dp", op, split, BF16 if partial is BF16 else None, **site)
    by = route_of(eqn, {"dp": hosts.ranks}, hosts, gloo)
    return dataclasses.replace(
        by, inside=by.inside / ROWS / wire.itemsize, between=by.between / ROWS / wire.itemsize
    )


@pytest.mark.parametrize(("kind", "op", "wire", "partial", "hosts", "gloo", "way", "reason"), [
    (REDUCE_SCATTER, "mean", F32, F32, Hosts(4), True, EXCHANGE, "one host"),
    (REDUCE_SCATTER, "mean", F32, F32, Hosts(4, 4), True, EXCHANGE, "one rank on each host"),
    (REDUCE_SCATTER, "mean", F32, F32, Hosts(4, 2), True, HIERARCHICAL,
     "sums inside each of 2 hosts first: 25% of the bytes come from other hosts, not 50%"),
    (REDUCE_SCATTER, "max", I64, I64, Hosts(16, 4), True, HIERARCHICAL,
     "sums inside each of 4 hosts first: 19% of the bytes come from other hosts, not 75%"),
    (REDUCE_SCATTER, "mean", F32, F32, Hosts(5, 2, False), True, EXCHANGE,
     "the ranks of 2 hosts are not equally many, and neighbours, in every group of the axis"),
    (REDUCE_SCATTER, "mean", F32, F32, Hosts(64, 8), False, RING, "NCCL reduces f32 on the way"),
    (REDUCE_SCATTER, "mean", BF16, F32, Hosts(8), False, EXCHANGE, "one host"),
    (REDUCE_SCATTER, "mean", BF16, F32, Hosts(64, 8), False, HIERARCHICAL,
     "sums inside each of 8 hosts first, sent in f32: 22% of the bytes come from other hosts, not 88%"),
    (REDUCE_SCATTER, "mean", BF16, BF16, Hosts(64, 8), False, HIERARCHICAL,
     "sums inside each of 8 hosts first: 11% of the bytes come from other hosts, not 88%"),
    (REDUCE_SCATTER, "sum", BF16, F32, Hosts(4, 2), False, EXCHANGE,
     "the sum of a host in f32 has as many bytes as its 2 terms in bf16"),
    (REDUCE_SCATTER, "max", BF16, F32, Hosts(64, 8), False, HIERARCHICAL,
     "sums inside each of 8 hosts first: 11% of the bytes come from other hosts, not 88%"),
    (REDUCE_SCATTER, "max", F32, F32, Hosts(8), False, EXCHANGE, "one host"),
    (REDUCE_SCATTER, "max", I64, I64, Hosts(64, 8), False, RING, "NCCL reduces i64 on the way"),
    (ALL_GATHER, None, F32, F32, Hosts(4), True, EXCHANGE, "one host"),
    (ALL_GATHER, None, F32, F32, Hosts(4, 2), True, HIERARCHICAL,
     "parts go to one rank of each of 2 hosts first: 25% of the bytes come from other hosts, not 50%"),
    (ALL_GATHER, None, BF16, F32, Hosts(8, 2), True, HIERARCHICAL,
     "parts go to one rank of each of 2 hosts first: 12% of the bytes come from other hosts, not 50%"),
    (ALL_GATHER, None, F32, F32, Hosts(5, 2, False), True, EXCHANGE,
     "the ranks of 2 hosts are not equally many, and neighbours, in every group of the axis"),
    (ALL_GATHER, None, F32, F32, Hosts(16, 2), True, RING, "gloo gathers"),
    (ALL_GATHER, None, BF16, F32, Hosts(16, 2), False, RING, "NCCL gathers"),
    (ALL_REDUCE, "mean", F32, F32, Hosts(16, 2), False, RING, "NCCL reduces f32 on the way"),
    (ALL_REDUCE, "mean", F32, F32, Hosts(16, 2), True, RING, "gloo reduces f32 on the way"),
    (ALL_REDUCE, "max", F32, F32, Hosts(16, 2), False, HIERARCHICAL,
     "sums inside each of 2 hosts first: 6% of the bytes come from other hosts, not 50%"),
    (ALL_REDUCE, "mean", BF16, F32, Hosts(16), True, EXCHANGE, "one host"),
    (ALL_REDUCE, "mean", BF16, F32, Hosts(16, 2), True, HIERARCHICAL,
     "sums inside each of 2 hosts first, sent in f32: 12% of the bytes come from other hosts, not 50%"),
])  # fmt: skip
def test_the_route_and_its_reason(kind, op, wire, partial, hosts, gloo, way, reason):
    by = route(kind, op, wire, partial, hosts, gloo)
    assert (by.way, by.reason) == (way, reason)
    assert str(by) == f"{way} ({reason})"


def of_a_host(kind, wire, partial, hosts, gloo) -> tuple[float, float]:
    """The bytes that all ranks of a host receive from their host and from others, as shares of the whole value."""
    by = route(kind, None if kind is ALL_GATHER else "sum", wire, partial, hosts, gloo)
    return by.inside * hosts.local, by.between * hosts.local


def test_bytes_between_hosts_against_arithmetic():
    """On eight hosts of eight GPUs: an exchange sends each host's half of the terms eight times as often as a ring."""
    hosts = Hosts(64, 8)
    ring = of_a_host(REDUCE_SCATTER, F32, F32, hosts, gloo=False)[1]
    assert ring == pytest.approx(63 / 64), "one rank of a host receives from another host"
    assert of_a_host(ALL_GATHER, F32, F32, hosts, gloo=False)[1] == pytest.approx(ring)
    assert of_a_host(ALL_REDUCE, F32, F32, hosts, gloo=False)[1] == pytest.approx(2 * ring)
    uneven = of_a_host(REDUCE_SCATTER, BF16, F32, Hosts(64, 8, even=False), gloo=False)
    assert uneven == (0, pytest.approx(8 * ring)), (
        "without an even placement each rank counts as a host of its own"
    )
    assert of_a_host(REDUCE_SCATTER, BF16, BF16, hosts, gloo=False) == (
        pytest.approx(7.0),
        pytest.approx(7 / 8),
    )
    assert of_a_host(REDUCE_SCATTER, BF16, F32, hosts, gloo=False)[1] == pytest.approx(2 * 7 / 8), (
        "fp32 sums"
    )


@pytest.mark.parametrize("hosts", [Hosts(4, 2), Hosts(8, 2), Hosts(6, 3), Hosts(4), Hosts(4, 4)])
@pytest.mark.parametrize("gloo", [True, False])
@pytest.mark.parametrize("kind", [ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE])
def test_every_rank_receives_what_it_lacks(kind, gloo, hosts):
    """With sums in the dtype of the terms, all routes move the same bytes in total."""
    by = route(kind, "sum", F32, F32, hosts, gloo)
    times = 2 if kind is ALL_REDUCE else 1
    assert by.inside + by.between == pytest.approx(times * (hosts.ranks - 1) / hosts.ranks)
    assert by.between == 0 or hosts.count > 1
    assert by.inside == 0 or hosts.local > 1


def test_hosts_are_even_if_their_ranks_are_neighbours_and_equally_many():
    assert hosts_of("aabb") == Hosts(4, 2)
    assert hosts_of("aaaa") == Hosts(4)
    assert hosts_of("abc") == Hosts(3, 3)
    assert common([hosts_of("aabb"), hosts_of("ccdd")]) == Hosts(4, 2)
    assert (
        not common([hosts_of("aabb"), hosts_of("abab")]).even
        and not common([hosts_of("aa"), hosts_of("ab")]).even
    )
    assert not hosts_of("abab").even and not hosts_of("aab").even and not hosts_of("aabbaa").even


@pytest.mark.parametrize(("dtype", "wire"), [
    (torch.int16, torch.int32), (torch.uint16, torch.int32), (torch.uint32, torch.int64),
])  # fmt: skip
def test_whole_numbers_that_no_backend_reduces_are_sent_in_a_wider_dtype(dtype, wire):
    def step(state, x, n):
        return {"w": state["w"] - zt.psum(x.mean(), "dp")}, zt.psum(n, "dp")

    state, x = {"w": torch.ones(4)}, torch.ones(2)
    terms = [torch.tensor([2**14, rank, 7]).to(dtype) for rank in range(2)]
    lowered = zt.shard_params(zt.AbstractMesh(dp=2))(step).lower(state, x, terms[0])
    (of_numbers,) = (
        e for e in lowered.graph.eqns if e.op is ALL_REDUCE and e.outs[0].dtype == dtype
    )
    assert wire_format(of_numbers, of_numbers.ins[0]).carrier == wire
    _, outputs = lowered.lockstep(state, [(x, term) for term in terms])
    for total in outputs:
        assert total.dtype == dtype and total.tolist() == [
            -(2**15) if dtype == torch.int16 else 2**15,
            1,
            14,
        ]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fnuz])
def test_a_dtype_without_a_short_name_is_reduced_too(dtype):
    def step(state, x, n):
        return {"w": state["w"] - zt.psum(x.mean(), "dp")}, zt.psum(n, "dp")

    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    batch = torch.ones(2), torch.ones(3).to(dtype)
    lowered = shard(step).lower({"w": torch.ones(4)}, *batch)
    assert "all_reduce" in lowered.to_fx().code
