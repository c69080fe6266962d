"""Hierarchical messages, between ranks that are objects of one process: bits, bytes, order and errors."""

import dataclasses

import pytest
import torch

from tests.support.mailbox import channels
from tests.support.races import Races
from ztrans import ops
from ztrans.ir.collectives import LARGE_MEMBER, all_gather, reduce, rules
from ztrans.ir.graph import Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import HIERARCHICAL, Hosts, route_of
from ztrans.runtime.channels import LostRank
from ztrans.runtime.collectives import Start, wait
from ztrans.runtime.hierarchical import HierarchicalMessage

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
LARGE = 6 * 2**15  # rows that are sent in a message of their own


def scatter(shapes, op, dtype, wire=None, dim=0):
    """A reduce_scatter of members of these shapes; `wire` is the `reduce_dtype` of the user."""
    terms = [Var(f"g{k}", dtype, shape, (Partial("dp", "sum"),)) for k, shape in enumerate(shapes)]
    names = [f"f{k}" for k in range(len(shapes))]
    return reduce(
        terms,
        names,
        "dp",
        op,
        Split("dp", dim),
        wire,
        dtype,
        provenance=Provenance("grad", ("w",), "dp"),
    )


def values_of(eqn, hosts, terms):
    """The result of each member on each rank, and the bytes that were sent inside hosts and between them."""
    mail, groups, opened = channels(hosts)
    starts = [
        Start(eqn, {"dp": hosts.ranks}, {"dp": rank}, channel)
        for rank, channel in enumerate(opened)
    ]
    started = [start(*term) for start, term in zip(starts, terms)]
    for channel in opened:
        channel.advance()
    values = [[wait(member) for member in members] for members in started]
    assert not mail.sent, "everything that was sent was received"
    del groups
    return starts, values, mail.inside_and_between(hosts)


def random_terms(eqn, ranks):
    generator = torch.Generator().manual_seed(0)
    make = lambda v: torch.randn(v.shape, generator=generator, dtype=F64).mul(100).to(v.dtype)
    return [[make(v) for v in eqn.ins] for _ in range(ranks)]


def by_hosts(whole, op, hosts, wire, partial, dtype):
    """The sums of hosts, summed in the order of hosts."""
    kind = "sum" if op == "mean" else op
    groups = [whole[h * hosts.local : (h + 1) * hosts.local] for h in range(hosts.count)]
    sums = [ops.reduce([t.to(wire) for t in group], kind, partial) for group in groups]
    total = ops.reduce(sums, kind, F32 if wire is BF16 else wire)
    return (ops.mean(total, hosts.ranks) if op == "mean" else total).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [Hosts(4, 2), Hosts(6, 2), Hosts(6, 3), Hosts(16, 4)])
@pytest.mark.parametrize(("op", "dtype", "wire", "partial"), [
    ("mean", F32, None, F32), ("sum", F64, None, F64), ("max", F32, None, F32), ("mean", I64, None, I64),
    ("mean", BF16, None, F32), ("mean", F32, BF16, BF16),
])  # fmt: skip
def test_the_bits_are_those_of_sums_by_host(hosts, op, dtype, wire, partial):
    """Members of their own message and packed ones, uneven rows, and rows that fewer ranks have."""
    eqn = scatter([(LARGE,), (7, 3), (hosts.ranks,), (hosts.ranks + 1, 2)], op, dtype, wire)
    terms = random_terms(eqn, hosts.ranks)
    starts, values, _ = values_of(eqn, hosts, terms)
    if starts[0].way != HIERARCHICAL:
        assert dtype is BF16 and hosts.local == 2, (
            "fp32 sums of two ranks in half precision are no smaller"
        )
        return
    for k in range(len(eqn.outs)):
        whole = by_hosts([term[k] for term in terms], op, hosts, wire or dtype, partial, dtype)
        got = torch.cat([each[k] for each in values])
        assert torch.equal(got, whole)
        near = rules(eqn).total(eqn, k, [t[k].to(wire or dtype) for t in terms])
        rounding = max(
            (torch.finfo(d).eps for d in (partial, dtype) if d.is_floating_point), default=0
        )
        largest = max(t[k].abs().max().item() for t in terms) * (1 if op == "mean" else hosts.ranks)
        assert (got.double() - near.double()).abs().max() <= rounding * largest, (
            "the interpreter's, up to rounding"
        )


def test_a_member_that_is_split_along_another_dim():
    hosts, eqn = Hosts(4, 2), scatter([(3, 8)], "sum", F64, dim=1)
    terms = random_terms(eqn, 4)
    _, values, _ = values_of(eqn, hosts, terms)
    assert torch.equal(
        torch.cat([each[0] for each in values], 1),
        by_hosts([t[0] for t in terms], "sum", hosts, F64, F64, F64),
    )


def test_the_callers_gradients_are_not_overwritten():
    hosts, eqn = Hosts(4, 2), scatter([(LARGE,)], "sum", F32)
    terms = random_terms(eqn, 4)
    before = [t[0].clone() for t in terms]
    values_of(eqn, hosts, terms)
    assert all(torch.equal(a, t[0]) for a, t in zip(before, terms))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [Hosts(4, 2), Hosts(6, 2), Hosts(16, 4), Hosts(4), Hosts(4, 4)])
@pytest.mark.parametrize(("dtype", "wire"), [(F32, None), (BF16, None), (F32, BF16)])
def test_bytes_on_each_link_are_those_of_the_route(hosts, dtype, wire):
    eqn = scatter([(LARGE,), (hosts.ranks * 4,)], "mean", dtype, wire)
    by = route_of(eqn, {"dp": hosts.ranks}, hosts, gloo=True)
    _, _, (inside, between) = values_of(eqn, hosts, random_terms(eqn, hosts.ranks))
    assert (inside, between) == (
        pytest.approx(by.inside * hosts.ranks),
        pytest.approx(by.between * hosts.ranks),
    )


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [Hosts(8, 2), Hosts(12, 3), Hosts(16, 2)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_terms_of_a_sum_are_released_once_it_is_there(hosts, dtype):
    """So a message takes the terms that it receives, and one sum of a host more where that is in fp32."""
    ranks = hosts.ranks
    eqn = scatter([(ranks * LARGE_MEMBER,)], "sum", dtype)
    _, groups, opened = channels(hosts)
    starts = [Start(eqn, {"dp": ranks}, {"dp": k}, channel) for k, channel in enumerate(opened)]
    terms = random_terms(eqn, ranks)
    members = {}
    with Races() as cuda:
        members[1] = starts[1](*terms[1])
    for rank in (k for k in range(ranks) if k != 1):
        members[rank] = starts[rank](*terms[rank])
    with cuda:
        opened[1].advance()
    rows = hosts.count * (hosts.local - 1) + (2 if dtype is BF16 else 0)
    assert cuda.peak == rows * LARGE_MEMBER * dtype.itemsize
    del groups


def test_two_hosts_of_two_ranks_send_half_the_bytes_of_an_exchange_and_less_than_a_ring():
    whole = LARGE * 4
    _, _, (_, between) = values_of(
        scatter([(LARGE,)], "mean", F32),
        Hosts(4, 2),
        random_terms(scatter([(LARGE,)], "mean", F32), 4),
    )
    assert between == 2 * whole / 2, "both directions; an exchange sends 2, and a ring 2 * 3/4"


def test_the_second_level_begins_with_the_next_start():
    """Without a wait. A thread that records a step may also wait for the first message meanwhile."""
    hosts, eqn = Hosts(4, 2), scatter([(LARGE,)], "sum", F32)
    mail, groups, opened = channels(hosts)
    starts = [Start(eqn, {"dp": 4}, {"dp": rank}, channel) for rank, channel in enumerate(opened)]
    terms = random_terms(eqn, 4)
    first = [start(*term) for start, term in zip(starts, terms)]
    assert mail.inside_and_between(hosts)[1] == 0
    second = [start(*term) for start, term in zip(starts, terms)]
    assert mail.inside_and_between(hosts)[1] == 4 * LARGE * 4 // 4
    for channel in opened:
        channel.advance()
    assert all(torch.equal(wait(a), wait(b)) for (a,), (b,) in zip(first, second))
    del groups


def test_the_program_says_which_way_and_why():
    hosts = Hosts(4, 2)
    _, groups, opened = channels(hosts)
    start = Start(scatter([(8,)], "mean", F32), {"dp": 4}, {"dp": 0}, opened[0])
    why = "sums inside each of 2 hosts first: 25% of the bytes come from other hosts, not 50%"
    assert (
        start.extra_repr()
        == f"reduce_scatter, ranks=4, members=1, wire=f32, by=hierarchical exchange ({why})"
    )
    _, groups, opened = channels(Hosts(4))
    start = Start(scatter([(8,)], "mean", F32), {"dp": 4}, {"dp": 0}, opened[0])
    assert start.extra_repr() == "reduce_scatter, ranks=4, members=1, wire=f32"
    del groups


def test_a_first_level_that_failed_fails_at_every_wait():
    """A thread that records a step may have waited before."""

    def begin():
        raise LostRank("rank 1 has ended")

    _, groups, opened = channels(Hosts(4, 2))
    message = HierarchicalMessage(opened[0], [], begin)
    for wait_for in (message.advance, message.wait):
        with pytest.raises(LostRank):
            wait_for()
    del groups


def test_a_closed_channel_drops_its_messages():
    hosts, eqn = Hosts(4, 2), scatter([(LARGE,)], "sum", F32)
    _, groups, opened = channels(hosts)
    start = Start(eqn, {"dp": 4}, {"dp": 0}, opened[0])
    (member,) = start(*random_terms(eqn, 1)[0])
    opened[0].close()
    assert opened[0].first_levels == []
    with pytest.raises(RuntimeError, match="this collective was dropped"):
        wait(member)
    del groups


def test_a_sum_for_which_this_rank_has_no_memory_is_no_lost_rank(monkeypatch):
    """It is computed between the two levels of a message."""
    hosts, eqn = Hosts(4, 2), scatter([(LARGE,)], "sum", F32)
    _, groups, opened = channels(hosts)
    for rank, channel in enumerate(opened):
        Start(eqn, {"dp": 4}, {"dp": rank}, channel)(*random_terms(eqn, 4)[rank])

    def without_memory(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(ops, "reduce", without_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        opened[0].advance()
    assert not isinstance(error.value, LostRank)
    del groups


def gather(shapes, dtype, wire=None, dim=0):
    """A gather of members of these shapes, which are sent in the dtype `wire`."""
    members = [Var(f"w{k}", dtype, shape, (Split("dp", dim),)) for k, shape in enumerate(shapes)]
    names = [f"f{k}" for k in range(len(shapes))]
    eqn = all_gather(members, names, "dp", provenance=Provenance("param", ("w",), "dp"))
    if wire is None:
        return eqn
    outs = tuple(dataclasses.replace(out, dtype=wire) for out in eqn.outs)
    return eqn.replace(outs=outs, kwargs={**eqn.kwargs, "dtype": wire})


def gathered(eqn, hosts, wholes):
    """The values on each rank, and the bytes inside hosts and between them, before and after the waits begin."""
    mail, groups, opened = channels(hosts)
    started = []
    for rank, channel in enumerate(opened):
        start = Start(eqn, {"dp": hosts.ranks}, {"dp": rank}, channel)
        parts = [
            cut(whole, v.split, hosts.ranks, rank).clone() for v, whole in zip(eqn.ins, wholes)
        ]
        started.append(start(*parts))
    before = mail.inside_and_between(hosts)
    for (member, *_), channel in zip(started, opened):
        channel.advance()
        for message in member.future.work.works:
            if isinstance(message, HierarchicalMessage):
                message.advance()
    values = [[wait(member) for member in members] for members in started]
    assert not mail.sent, "everything that was sent was received"
    del groups
    return values, before, mail.inside_and_between(hosts)


@pytest.mark.parametrize("hosts", [Hosts(4, 2), Hosts(6, 2), Hosts(6, 3), Hosts(8, 2)])
@pytest.mark.parametrize(("dtype", "wire"), [(F32, None), (BF16, None), (F32, BF16)])
def test_a_gather_brings_every_part_and_sends_each_once_between_hosts(hosts, dtype, wire):
    """Between hosts at its start, and inside of hosts once it is waited for: no rank waits before that."""
    eqn = gather([(LARGE,), (7, 3), (hosts.ranks,), (hosts.ranks + 1, 2)], dtype, wire)
    (wholes,) = random_terms(eqn, 1)
    by = route_of(eqn, {"dp": hosts.ranks}, hosts, gloo=True)
    values, before, after = gathered(eqn, hosts, wholes)
    for of_rank in values:
        assert all(torch.equal(x, whole.to(x.dtype)) for x, whole in zip(of_rank, wholes))
    between = pytest.approx(by.between * hosts.ranks)
    assert before == (0, between)
    assert after == (pytest.approx(by.inside * hosts.ranks), between)


def test_a_gather_along_another_dim():
    eqn = gather([(3, 8)], F64, dim=1)
    (wholes,) = random_terms(eqn, 1)
    values, _, _ = gathered(eqn, Hosts(4, 2), wholes)
    assert all(torch.equal(x, wholes[0]) for (x,) in values)


def test_two_hosts_of_two_ranks_send_half_the_bytes_of_an_exchange_in_a_gather():
    eqn = gather([(LARGE,)], F32)
    _, _, (_, between) = gathered(eqn, Hosts(4, 2), random_terms(eqn, 1)[0])
    assert between == LARGE * 4, "both directions; an exchange sends twice as much"
