"""A collective owns its rules. A new one is a class like the one below, and its call over gloo and over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ztrans as zt
from tests.support.mailbox import channels
from ztrans.ir import collectives
from ztrans.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    LARGE_MEMBER,
    REDUCE_SCATTER,
    ROW,
    ROWS,
    SHARD,
    WAIT,
    bucket_key,
    coalesce,
    is_sent_alone,
    is_start,
    lane,
    rules,
    wait,
)
from ztrans.ir.copies import COPY_WAIT, TO_DEVICE, TO_HOST
from ztrans.ir.donation import donation, first_write
from ztrans.ir.graph import Eqn, Graph, Partial, Primitive, Provenance, Split, Var
from ztrans.ir.liveness import liveness
from ztrans.ir.marks import ACCUMULATE, GRADIENT, JOIN, KEEP, PMEAN, PSUM, PVARY
from ztrans.ir.pairing import pair
from ztrans.ir.routes import Hosts
from ztrans.ir.rules import Kind
from ztrans.ir.verifier import ProgramError, check
from ztrans.planning.cluster import cluster
from ztrans.planning.cost import cost, memory
from ztrans.planning.make_plan import make_plan
from ztrans.planning.simulate import simulate
from ztrans.rewrites.erase import erase_trivial
from ztrans.rewrites.writes_last import writes_last
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.collectives import CALLS, Start
from ztrans.runtime.collectives import wait as wait_for

aten = torch.ops.aten
RANKS = 4

STARTS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL)
MARKS = (GRADIENT, PMEAN, PSUM, PVARY, ACCUMULATE, JOIN, KEEP)
PRIMITIVES = (*STARTS, WAIT, SHARD, ROW, ROWS, *MARKS, TO_HOST, TO_DEVICE, COPY_WAIT)


class Broadcast(collectives.Start):
    """The rules of a new collective, which sends the value of the first rank of an axis to every rank."""

    kind = Kind("broadcast")
    moves = True
    lane = "gather"

    def member(self, eqn, index, terms):
        return [terms[0] for _ in terms]

    def sends_without_copy(self, eqn, index, sizes):
        return True

    def wire_bytes(self, eqn, sizes):
        return sum(self.received_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))


BROADCAST = Primitive("broadcast", Broadcast())


def broadcast(values, names, axis, **eqn):
    futures = tuple(
        Var(f"{name}'", v.dtype, v.shape, v.layout, True) for v, name in zip(values, names)
    )
    return Eqn(BROADCAST, (list(values),), futures, {"dtype": None, "axis": axis}, **eqn)


def over_gloo(start, ks, values):
    """Every rank sends its value to all others, and takes the first rank's."""
    (value,) = values
    received = [value if r == start.rank else torch.empty_like(value) for r in range(start.size)]
    return start.channel.exchange([value] * start.size, received), lambda: [received[0]]


def var(name, *shape, dtype=torch.float32):
    return Var(name, dtype, shape)


def program(ranks=RANKS):
    """y = x * 2 + b + bf16(first), where `first` is the value of `x * 2` on the first rank."""
    x, b = var("x", 8, 4), var("b", 8, 4)
    twice = Eqn(aten.mul.Tensor, (x, 2), (var("twice", 8, 4),))
    start = broadcast(twice.outs, ["first"], "dp", provenance=Provenance("param", ("x",), "dp"))
    between = Eqn(aten.add.Tensor, (twice.outs[0], b), (var("between", 8, 4),), region="update")
    end = wait(start.outs[0], region="update")
    cast = Eqn(
        aten._to_copy.default,
        end.outs,
        (var("half", 8, 4, dtype=torch.bfloat16),),
        {"dtype": torch.bfloat16},
        "update",
    )
    y = Eqn(aten.add.Tensor, (between.outs[0], cast.outs[0]), (var("y", 8, 4),), region="update")
    eqns = (twice, start, between, end, cast, y)
    return Graph("f", (x, b), eqns, (x, y.outs[0]), 1, batch=frozenset([b]), mesh=(("dp", ranks),))


def inputs(ranks=RANKS):
    return [(torch.full((8, 4), float(rank) + 0.1), torch.ones(8, 4)) for rank in range(ranks)]


START = program().eqns[1]
AXES = {"dp": RANKS}


def test_a_new_collective_is_verified_and_printed():
    graph = check(program())
    assert "  first': f32[8,4]! = broadcast([twice], axis=dp)" in str(graph)
    nameless = graph.replace(eqns=tuple(e.replace(provenance=None) for e in graph.eqns))
    with pytest.raises(ProgramError, match="a collective has no provenance, at first'"):
        check(nameless)


def test_the_interpreter_runs_a_new_collective_by_its_rules():
    for rank, (_, y) in enumerate(zt.ir.lockstep(program(), inputs())):
        first = torch.full((8, 4), 0.1) * 2
        assert torch.equal(y, (torch.full((8, 4), rank + 0.1) * 2 + 1) + first.bfloat16())


def test_the_value_that_a_new_collective_sends_lives_until_its_wait():
    graph = program()
    pairs = pair(graph)
    (started,), (waited,) = pairs.starts.values(), pairs.waits.values()
    assert (started.index, started.waits, started.first_wait) == (1, (3,), 3)
    assert waited.started is started and waited.member == 0
    sent = graph.eqns[0].outs[0]
    assert liveness(graph).last[sent] == started.first_wait
    assert graph.eqns[2] not in donation(graph).in_place_ops, (
        "it may not overwrite `twice`, which is still being sent"
    )
    assert [
        e.op.name if isinstance(e.op, Primitive) else "" for e in writes_last(graph).eqns[:3]
    ] == ["", "broadcast", "wait"]
    assert first_write(writes_last(graph)) == 3


def test_a_new_collective_has_bytes_and_a_lane_and_joins_buckets():
    rule = rules(START)
    assert (rule.wire_bytes(START, AXES), rule.received_bytes(START, 0, AXES), lane(START)) == (
        128,
        128,
        "dp gather",
    )
    assert is_start(START) and rule.sends_without_copy(START, 0, AXES)
    second = broadcast(
        [var("z", 3)], ["z.first"], "dp", provenance=Provenance("param", ("z",), "dp")
    )
    assert bucket_key(second) == bucket_key(START)
    both = coalesce([START, second])
    assert (
        both.op is BROADCAST
        and both.outs == (*START.outs, *second.outs)
        and both.provenance.paths == ("x", "z")
    )


def test_on_an_axis_of_one_rank_a_new_collective_vanishes():
    alone = erase_trivial(program(ranks=1))
    assert not pair(alone).starts
    assert torch.equal(
        zt.ir.lockstep(alone, inputs(1))[0][1], zt.ir.lockstep(program(ranks=1), inputs(1))[0][1]
    )


def test_fuse_cast_gather_applies_to_a_new_collective():
    graph = program()
    fused = zt.fuse_cast_gather().rewrite(graph)
    (start,) = pair(check(fused)).starts
    assert start.kwargs["dtype"] is torch.bfloat16 and rules(start).wire_bytes(start, AXES) == 64
    for before, after in zip(zt.ir.lockstep(graph, inputs()), zt.ir.lockstep(fused, inputs())):
        assert torch.equal(before[1], after[1])


def test_planning_places_and_costs_a_new_collective():
    machines = cluster("cpu", dp="ethernet-1g")
    graph = program()
    assert cost(graph).over("dp", "param") == 128
    assert memory(graph).peak > memory(graph).state
    bars = [event for event in simulate(graph, machines).events if event.lane == "dp gather"]
    assert [(bar.eqn.op, bar.bytes) for bar in bars] == [(BROADCAST, 128)]
    plan, planned = make_plan(zt.prefetch().rewrite(graph), machines)
    assert [members for members, _ in plan.gathers] == [("first",)]
    assert torch.equal(
        zt.ir.lockstep(planned, inputs())[1][1], zt.ir.lockstep(graph, inputs())[1][1]
    )


def test_a_new_collective_is_sent_by_its_call(monkeypatch):
    graph = program()
    with pytest.raises(KeyError, match="broadcast"):
        to_fx(graph)
    monkeypatch.setitem(CALLS, BROADCAST, over_gloo)
    assert str(to_fx(graph).broadcast_1) == "Start(broadcast, ranks=4, members=1, wire=f32)"
    _, groups, opened = channels(Hosts(RANKS))
    terms = [torch.full((8, 4), float(rank)) for rank in range(RANKS)]
    members = []
    for rank, term in enumerate(terms):
        members += Start(START, AXES, {"dp": rank}, opened[rank])(term)
    assert all(torch.equal(wait_for(member), terms[0]) for member in members)
    del groups


def test_every_collective_has_its_calls():
    assert set(CALLS) == set(STARTS) and set(COLLECTIVES) == {p.name for p in STARTS}
    for kind, rule in COLLECTIVES.items():
        example = rule.example("dp", 8)
        assert example.op.name == kind == rules(example).kind.name
    assert all(is_start(Eqn(p, (), ())) == (p in STARTS) for p in PRIMITIVES)
    assert len({p.name for p in PRIMITIVES}) == len(PRIMITIVES)


def test_starts_are_paired_with_their_waits():
    """Also those of buckets, and of the collectives that the step itself contains."""
    a, b, c = var("a", 4), var("b", 4), var("c", 4)
    start = coalesce(
        [
            broadcast(
                [v], [f"{v.name}.first"], "dp", provenance=Provenance("param", (v.name,), "dp")
            )
            for v in (a, b)
        ]
    )
    late, early = wait(start.outs[0]), wait(start.outs[1])
    c10d = torch.ops._c10d_functional
    own = Eqn(c10d.all_reduce.default, (c, "sum", "tp"), (var("s", 4),))
    own_wait = Eqn(c10d.wait_tensor.default, own.outs, (var("t", 4),))
    graph = Graph(
        "f", (a, b, c), (start, own, early, own_wait, late), (), 0, mesh=(("dp", 2), ("tp", 2))
    )
    ours, every = pair(graph), pair(graph, include_user=True)
    assert list(ours.starts) == [start] and list(every.starts) == [start, own]
    assert (ours.starts[start].waits, ours.starts[start].first_wait) == ((4, 2), 2)
    assert [(w.start, w.member) for w in ours.waits.values()] == [(start, 1), (start, 0)]
    assert every.waits[own_wait].start is own and every.starts[own].first_wait == 3
    unread = replace(graph, eqns=(start, own, early, late))
    assert pair(unread, include_user=True).starts[own].first_wait == 4, "nothing waits for it"
    assert (lane(own), rules(own).axis(own), rules(own).remote, is_start(own)) == (
        "tp (step)",
        "tp",
        True,
        False,
    )


def gather_of(*rows: int) -> Eqn:
    members = [Var(f"v{k}", torch.float32, (n,)) for k, n in enumerate(rows)]
    return Eqn(
        ALL_GATHER, (members,), tuple(replace(v, future=True) for v in members), {"axis": "dp"}
    )


@pytest.mark.parametrize("rows, alone", [
    ((8, LARGE_MEMBER), [True, True]), ((8, 8, LARGE_MEMBER), [False, False, True]), ((LARGE_MEMBER, LARGE_MEMBER), [True, True]), ((8,), [True]),
])  # fmt: skip
def test_small_members_are_packed_if_there_are_several(rows, alone):
    assert [is_sent_alone(gather_of(*rows), k, {"dp": 2}) for k in range(len(rows))] == alone


def test_asking_every_member_whether_it_is_packed_takes_linear_time(monkeypatch):
    gather, calls, counted = gather_of(*[8] * 100), [], collectives.buffer_bytes
    monkeypatch.setattr(
        collectives, "buffer_bytes", lambda *given: calls.append(given) or counted(*given)
    )
    assert not any(is_sent_alone(gather, k, {"dp": 2}) for k in range(100)) and len(calls) <= 300


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_is_this_ranks_part_along_its_dim(dim):
    whole = Var("w", torch.float32, (5, 3))
    part = Var("w.part", torch.float32, (5, 3), (Split("dp", dim),))
    eqn = Eqn(SHARD, (whole, dim), (part,), {"axis": "dp"})
    x = torch.arange(15.0).view(5, 3)
    parts = rules(eqn).member(eqn, 0, [x, x])
    assert [len(each.movedim(dim, 0)) for each in parts] == [[3, 2], [2, 1]][dim]
    assert torch.equal(torch.cat(parts, dim), x)


def test_a_gradient_is_sent_from_its_storage_if_its_rows_for_each_rank_are_there():
    def is_sent_as_it_is(shape, dim=0, **options):
        term = Var("g", torch.float32, shape, (Partial("dp", "mean"),))
        eqn = collectives.reduce([term], ["f"], "dp", "mean", Split("dp", dim), **options)
        return rules(eqn).sends_without_copy(eqn, 0, {"dp": 4})

    rows = LARGE_MEMBER // 4
    assert is_sent_as_it_is((rows, 4))
    assert not is_sent_as_it_is((rows + 1, 4)), "padding"
    assert not is_sent_as_it_is((4, rows), dim=1), "the rows for a rank lie apart"
    assert not is_sent_as_it_is((rows, 4), dtype=torch.bfloat16), "a cast"
