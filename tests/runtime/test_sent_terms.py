"""Collectives over gloo, between ranks that are objects of one process."""

import pytest
import torch

from tests.support.mailbox import channels
from ztrans import ops
from ztrans.ir.collectives import reduce, rules
from ztrans.ir.graph import Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import Hosts
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
