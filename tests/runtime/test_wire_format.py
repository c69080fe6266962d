"""Collectives that send codes, over gloo between ranks that are objects of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support.mailbox import channels
from ztrans.ir.collectives import all_gather, coalesce, reduce, rules
from ztrans.ir.graph import Eqn, Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import Hosts
from ztrans.ir.wire_format import Coded
from ztrans.runtime.collectives import Start, wait

I8, I4, E4M3 = Coded(8, 256), Coded(4, 64), Coded(8, 16, "fp8")
F32, BF16 = torch.float32, torch.bfloat16
WHY = Provenance("param", ("w",), "dp")


def gather(shapes, sent, dtype=F32, result=None, dim=0) -> Eqn:
    """A gather of one bucket."""
    starts = []
    for k, shape in enumerate(shapes):
        shard = Var(f"w{k}", dtype, shape, (Split("dp", dim),))
        start = all_gather([shard], [f"w{k}.full"], "dp", provenance=WHY)
        future = Var(f"w{k}.full'", result or dtype, shape, future=True)
        kwargs = {"dtype": sent, "axis": "dp"}
        starts.append(start.replace(outs=(future,), kwargs=kwargs))
    return coalesce(starts)


def reduction(shapes, sent, dtype=F32, to=None, op="mean", between=None) -> Eqn:
    """A reduction of one bucket: a reduce_scatter along the dim `to`, or an all_reduce."""
    terms = [Var(f"g{k}", dtype, shape, (Partial("dp", "sum"),)) for k, shape in enumerate(shapes)]
    split = None if to is None else Split("dp", to)
    names = [f"f{k}" for k in range(len(shapes))]
    start = reduce(terms, names, "dp", op, split, dtype=sent, provenance=WHY)
    return start.replace(kwargs={**start.kwargs, "between": between}) if between else start


def inputs_of(eqn: Eqn, ranks: int) -> list[list[torch.Tensor]]:
    """The members of each rank, of very different sizes."""
    torch.manual_seed(0)
    members: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for v in eqn.ins:
        whole = torch.randn(v.shape, dtype=v.dtype)
        for rank in range(ranks):
            if v.split is None:
                members[rank].append(torch.randn(v.shape).mul(10.0 ** (rank % 3)).to(v.dtype))
            else:
                members[rank].append(cut(whole, v.split, ranks, rank).clone())
    return members


def run(eqn: Eqn, hosts: Hosts, members) -> tuple[list[list[torch.Tensor]], int]:
    """The values on each rank, and the bytes that were sent between all ranks."""
    assert rules(eqn).problem(eqn, {"dp": hosts.ranks}) is None
    mail, groups, opened = channels(hosts)
    sizes = {"dp": hosts.ranks}
    started = []
    for rank, channel in enumerate(opened):
        started.append(Start(eqn, sizes, {"dp": rank}, channel)(*members[rank]))
    for _ in range(3):  # the levels of a message
        for channel in opened:
            channel.advance()
        for futures in started:
            for work in futures[0].future.work.works:
                getattr(work, "advance", lambda: None)()
    values = [list(map(wait, futures)) for futures in started]
    del groups
    return values, mail.nbytes.total()


def lockstep(eqn: Eqn, members) -> list[list[torch.Tensor]]:
    environments = [dict(zip(eqn.ins, given)) for given in members]
    return [list(x) for x in rules(eqn).meaning([eqn] * len(members), environments)]


# Rank 2 of 3 has no row of two; rank 3 of 4 none of three.
SHAPES = [(64, 40), (2, 3), (7,), (3, 300)]
CASES = {
    "gather": gather(SHAPES, I8),
    "gather 4 bits, to bf16": gather(SHAPES, I4, result=BF16),
    "gather fp8 of bf16": gather(SHAPES, E4M3, BF16),
    "gather along dim 1": gather([(3, 7), (300, 2)], I4, dim=1),
    "gather one": gather([(5, 100)], I8),
    "scatter": reduction(SHAPES, I8, to=0),
    "scatter 4 bits of bf16": reduction(SHAPES, I4, BF16, to=0, op="sum"),
    "scatter along dim 1": reduction([(3, 7), (300, 2)], I8, to=1),
    "all_reduce": reduction([*SHAPES, ()], I8),
    "all_reduce 4 bits of bf16": reduction(SHAPES, I4, BF16),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_codes_over_gloo_have_the_bits_of_lockstep(name, ranks):
    """Blocks belong to the part of one rank, so buckets, padding and empty parts change no bit."""
    eqn = CASES[name]
    members = inputs_of(eqn, ranks)
    values, _ = run(eqn, Hosts(ranks), members)
    for here, expected in zip(values, lockstep(eqn, members)):
        for x, y in zip(here, expected):
            assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_a_bucket_has_the_bits_of_its_members_alone(name):
    eqn = CASES[name]
    members = inputs_of(eqn, 3)
    values, _ = run(eqn, Hosts(3), members)
    for k, (v, out) in enumerate(zip(eqn.ins, eqn.outs)):
        alone, _ = run(eqn.replace(args=([v],), outs=(out,)), Hosts(3), [[x[k]] for x in members])
        assert all(torch.equal(x[k], y) for x, (y,) in zip(values, alone))
