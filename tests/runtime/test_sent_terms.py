"""Collectives over gloo, between ranks that are objects of one process."""

import pytest
import torch

import ztrans as zt
from tests.support.fabric import on_all_ranks
from tests.support.mailbox import channels
from ztrans import ops
from ztrans.ir.collectives import all_gather, coalesce, reduce, rules
from ztrans.ir.collectives import wait as wait_for
from ztrans.ir.graph import Eqn, Graph, Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import Hosts
from ztrans.planning.make_plan import make_plan
from ztrans.runtime.collectives import Start, wait


def reduction(shape, cut_dim=None):
    """An all_reduce of one fp32 member, or a reduce_scatter if it is cut along a dim."""
    term = Var("g", torch.float32, shape, (Partial("dp", "sum"),))
    to = None if cut_dim is None else Split("dp", cut_dim)
    return reduce([term], ["f"], "dp", "sum", to, provenance=Provenance("grad", ("w",), "dp"))


@pytest.mark.parametrize(("hosts", "eqn"), [
    (Hosts(2), reduction((64,))), (Hosts(4), reduction((64,))), (Hosts(2), reduction((64,), 0)),
    (Hosts(2), reduction((1, 64), 1)), (Hosts(2), reduction((3, 64), 1)), (Hosts(4, 2), reduction((1, 64), 1)),
    (Hosts(9), reduction((63,), 0)),
])  # fmt: skip
def test_a_program_may_overwrite_a_term_that_it_does_not_keep_until_the_wait(hosts, eqn):
    """Gloo reads what it sends when the other rank receives it, which may be later."""
    _, groups, opened = channels(hosts)
    terms = [torch.full(eqn.ins[0].shape, 2.0**rank) for rank in range(hosts.ranks)]
    total = ops.reduce([term.clone() for term in terms], "sum", torch.float32)
    started = []
    for rank, channel in enumerate(opened):
        start = Start(eqn, {"dp": hosts.ranks}, {"dp": rank}, channel)
        started += start(terms[rank])
        if not rules(eqn).sends_without_copy(eqn, 0, {"dp": hosts.ranks}):
            terms[rank].fill_(-1)
    for channel in opened:
        channel.advance()
    split = eqn.results[0].split
    for rank, member in enumerate(started):
        whole = total if split is None else cut(total, split, hosts.ranks, rank)
        assert torch.equal(wait(member), whole)
    del groups


def gather_of_codes_and_scales(rows, dim):
    """One bucket with int8 codes and fp32 scales."""
    codes = Var("codes", torch.int8, (rows, rows), (Split("dp", dim),))
    scales = Var("scales", torch.float32, (rows, rows), (Split("dp", dim),))
    why = Provenance("param", ("w",), "dp")
    starts = [all_gather([v], [f"{v.name}.full"], "dp", provenance=why) for v in (codes, scales)]
    return coalesce(starts)


@pytest.mark.parametrize("hosts", [Hosts(2), Hosts(4), Hosts(4, 2)], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(8, 0), (7, 0), (8, 1), (7, 1)])
def test_members_of_several_dtypes_share_a_message(hosts, rows, dim):
    eqn = gather_of_codes_and_scales(rows, dim)
    wholes = [
        torch.randint(-128, 128, (rows, rows), dtype=torch.int8),
        torch.randn(rows, rows),
    ]
    split = Split("dp", dim)
    shards = [[cut(x, split, hosts.ranks, rank) for x in wholes] for rank in range(hosts.ranks)]

    def is_whole(values):
        return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(values, wholes))

    mail, groups, opened = channels(hosts)
    started = []
    for rank, channel in enumerate(opened):
        started.append(Start(eqn, {"dp": hosts.ranks}, {"dp": rank}, channel)(*shards[rank]))
    if hosts.count == 1:
        assert len(mail.sent) == hosts.ranks * (hosts.ranks - 1), "one message between two ranks"
        assert all(is_whole(map(wait, members)) for members in started)
    assert all(is_whole(values) for values in on_all_ranks(eqn, hosts, shards))
    del groups


def test_a_plan_gathers_codes_and_scales_together():
    codes = Var("codes", torch.int8, (4, 8), (Split("dp"),))
    scales = Var("scales", torch.float32, (4, 1), (Split("dp"),))
    why = Provenance("param", ("w",), "dp")
    starts = [all_gather([v], [f"{v.name}.full"], "dp", provenance=why) for v in (codes, scales)]
    waits = [wait_for(start.out) for start in starts]
    w = Var("w", torch.float32, (4, 8))
    product = Eqn(torch.ops.aten.mul.Tensor, tuple(end.out for end in waits), (w,))
    eqns = (starts[0], waits[0], starts[1], waits[1], product)
    graph = Graph("f", (codes, scales), eqns, (codes, scales, w), 2, mesh=(("dp", 2),))
    plan, planned = make_plan(zt.prefetch().rewrite(graph), zt.cluster("cpu", dp="ethernet-1g"))
    assert [members for members, _ in plan.gathers] == [("codes.full", "scales.full")]
    wholes = torch.randint(-128, 128, (4, 8), dtype=torch.int8), torch.randn(4, 1)
    inputs = list(zip(*(whole.chunk(2) for whole in wholes)))
    for *_, result in zt.ir.lockstep(planned, inputs):
        assert torch.equal(result, wholes[0] * wholes[1])
