"""Programs written by hand: collectives are taken out of the program, and a schedule puts them back."""

import dataclasses
from collections import Counter

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    all_gather,
    bucket_key,
    coalesce,
    is_start,
    reduce,
    wait,
)
from ztrans.ir.graph import Eqn, Graph, Provenance, Split, Var
from ztrans.planning.formulate import frame
from ztrans.planning.realise import realise
from ztrans.planning.skeleton import hoist, skeleton
from ztrans.planning.solver.problem import Bucket, Schedule

aten = torch.ops.aten


def why(role: str, regather: str | None = None) -> Provenance:
    return Provenance(role, ("w",), "dp", regather)


def var(name: str, n: int = 8, **how) -> Var:
    return Var(name, torch.float32, (n,), **how)


def names(graph: Graph) -> list[str]:
    return [e.outs[0].name for e in zt.ir.check(graph).eqns]


def forward(layers: int = 3, twice: bool = False) -> Graph:
    """A gather, its wait and a use for each layer. With `twice` the layers are gathered and used a second time."""
    shards = [var(f"s{i}", layout=(Split("dp"),)) for i in range(layers)]
    h = x = var("x")
    eqns = []
    for repeated in (False, True)[: 1 + twice]:
        for i, s in enumerate(shards):
            suffix = ".again" if repeated else ""
            start = all_gather(
                [s], [f"w{i}{suffix}"], "dp", provenance=why("param", "auto" if repeated else None)
            )
            w = wait(start.outs[0])
            out = var(f"h{i}{suffix}")
            eqns += [start.replace(hint="gather"), w, Eqn(aten.add.Tensor, (h, w.out), (out,))]
            h = out
    return Graph("f", (*shards, x), tuple(eqns), (h,), 0, mesh=(("dp", 2),))


def backward(layers: int = 3) -> Graph:
    """Gradients that are computed one after the other, but cast and reduced at the end, as autograd does; then updates."""
    state = [var(f"p{i}", layout=(Split("dp"),)) for i in range(layers)]
    dy = var("dy")
    born, casts, ends, uses = [], [], [], []
    for i, p in enumerate(state):
        g, c, new = var(f"g{i}"), var(f"c{i}"), var(f"n{i}", layout=(Split("dp"),))
        born.append(
            Eqn(aten.add.Tensor, (born[-1].outs[0] if born else dy, dy), (g,), region="backward")
        )
        casts.append(Eqn(aten._to_copy.default, (g,), (c,), region="backward", hint="birth"))
        start = reduce([c], [f"r{i}"], "dp", "mean", Split("dp"), provenance=why("grad"))
        ends += [start.replace(hint="reduce"), wait(start.outs[0])]
        uses.append(Eqn(aten.sub.Tensor, (p, ends[-1].outs[0]), (new,), region="update"))
    eqns = [*born, *casts, *ends, *uses]
    return Graph(
        "f", (*state, dy), tuple(eqns), tuple(e.outs[0] for e in uses), layers, mesh=(("dp", 2),)
    )


def test_without_hints_nothing_moves():
    for graph in (forward(), backward()):
        plain = graph.replace(eqns=tuple(e.replace(hint=None) for e in graph.eqns))
        assert names(hoist(plain)) == names(graph)
        assert skeleton(plain).gathers == skeleton(plain).reductions == ()


def test_hoist_moves_a_gradients_cast_and_reduction_to_its_birth():
    assert names(hoist(backward())) == [
        "g0", "c0", "r0'", "g1", "c1", "r1'", "g2", "c2", "r2'", "r0", "r1", "r2", "n0", "n1", "n2",
    ]  # fmt: skip


def test_a_skeleton_has_the_use_the_birth_and_the_need_of_each_collective():
    s = skeleton(forward())
    assert [e.outs[0].name for e in s.ops] == ["h0", "h1", "h2"] and s.use == (0, 1, 2)
    s = skeleton(backward())
    assert [e.outs[0].name for e in s.ops] == ["g0", "c0", "g1", "c1", "g2", "c2", "n0", "n1", "n2"]
    assert s.born == (1, 3, 5) and s.need == (6, 7, 8)


def test_a_bucket_starts_at_its_place_and_each_member_is_waited_for_at_its_use():
    s = skeleton(forward())
    ordered = realise(s, Schedule((Bucket((0,), 0, 0), Bucket((1, 2), 0, 1)), ()), frame(s, "last"))
    assert names(ordered) == ["w0'", "w1'", "w0", "h0", "w1", "h1", "w2", "h2"]
    (bucket,) = (e for e in ordered.eqns if len(e.outs) == 2)
    assert str(bucket.op) == "all_gather" and [v.name for v in bucket.ins] == ["s1", "s2"]


def test_readers_of_a_dropped_gather_read_the_kept_value():
    s = skeleton(forward(2, twice=True))
    buckets = (Bucket((0,), 0, 0), Bucket((1,), 0, 1), Bucket((3,), 2, 3))
    problem = frame(s, "last")
    (lever,) = [i for i, lever in enumerate(problem.levers) if lever.drops == 2]
    ordered = realise(s, Schedule(buckets, (), frozenset([lever])), problem)
    assert names(ordered) == [
        "w0'",
        "w1'",
        "w0",
        "h0",
        "w1",
        "h1",
        "w1.again'",
        "h0.again",
        "w1.again",
        "h1.again",
    ]
    (reader,) = (e for e in ordered.eqns if e.outs[0].name == "h0.again")
    assert [v.name for v in reader.ins] == ["h1", "w0"]


def test_updates_follow_their_bucket_or_come_last():
    s = skeleton(backward())
    schedule = Schedule((), (Bucket((0, 1), 4, 5), Bucket((2,), 6, 8)))
    assert names(realise(s, schedule, frame(s, "eager"))) == [
        "g0", "c0", "g1", "c1", "r0'", "g2", "r0", "r1", "n0", "n1", "c2", "r2'", "r2", "n2",
    ]  # fmt: skip
    assert names(realise(s, schedule, frame(s, "last"))) == [
        "g0", "c0", "g1", "c1", "r0'", "g2", "r0", "r1", "c2", "r2'", "n0", "n1", "r2", "n2",
    ]  # fmt: skip


def test_an_update_waits_for_the_last_reader_of_its_state():
    """The update may be in place. A later use of the parameter would otherwise cost a copy."""
    graph = backward()
    late = Eqn(
        aten.neg.default,
        (graph.inputs[0],),
        (var("late", layout=(Split("dp"),)),),
        region="backward",
    )
    eqns = list(graph.eqns)
    eqns.insert(3, late)
    graph = graph.replace(eqns=tuple(eqns), outputs=(*graph.outputs, late.outs[0]))
    s = skeleton(graph)
    early = Schedule((), tuple(Bucket((i,), b + 1, b + 1) for i, b in enumerate(s.born)))
    ordered = names(realise(s, early, frame(s, "eager")))
    assert ordered.index("n1") < ordered.index("late") < ordered.index("n0")


def test_a_second_reduction_follows_the_first_in_the_same_bucket():
    """As in HSDP: a reduce_scatter inside a host, then an all_reduce across hosts, in equal buckets."""
    shard = zt.shard_params(zt.AbstractMesh(host=2, dp=2), replicate_axis="host")
    graph = on_ranks(CASES["gpt_adam"], 4, shard, zt.overlap_grads()).graph
    members = {op: Counter() for op in (REDUCE_SCATTER, ALL_REDUCE)}
    for e in graph.eqns:
        if e.op in members and e.provenance.role == "grad":
            members[e.op][e.provenance.paths] += 1
    assert members[REDUCE_SCATTER] == members[ALL_REDUCE] and max(map(len, members[ALL_REDUCE])) > 1


def test_members_of_a_bucket_have_one_key():
    a, b = (
        all_gather([var(n, layout=(Split("dp"),))], [f"{n}.full"], "dp", provenance=why("param"))
        for n in "ab"
    )
    wide = dataclasses.replace(b, kwargs={**b.kwargs, "dtype": torch.bfloat16})
    assert bucket_key(a) == bucket_key(b) != bucket_key(wide)
    both = coalesce([a, b])
    assert both.outs == (*a.outs, *b.outs) and both.args == ([*a.ins, *b.ins],)
    with pytest.raises(
        ValueError,
        match=r"coalesce: a\.full' and b\.full' share a bucket and differ in dtype its own and bf16",
    ):
        coalesce([a, wide])


def under_way(graph: Graph, ops, roles):
    """For each computation, the bytes of the collectives that are under way while it runs."""
    now = {}
    for e in graph.eqns:
        if e.op in ops and e.provenance.role in roles:
            now[e.outs[0]] = sum(
                v.numel * v.dtype.itemsize for v in (e.outs if e.op is ALL_GATHER else e.ins)
            )
        elif e.op is WAIT:
            now.pop(e.args[0], None)
        elif not is_start(e):
            yield list(now.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "sam", "accumulation", "cast_inside", "cast_outside"])
def test_bytes_in_flight_are_bounded_at_every_point(name):
    for stage in (0, 2, 3):
        for bound in (0, 600, 5000):
            schedules = (zt.overlap_grads(max_in_flight=bound), zt.prefetch(max_in_flight=bound))
            transforms = (
                zt.shard_params(zt.AbstractMesh(dp=4), stage=stage),
                *schedules,
                zt.fuse_cast_gather(),
            )
            graph = on_ranks(CASES[name], 4, *transforms).graph
            for ops, roles in (
                ((ALL_GATHER,), ("param",)),
                ((REDUCE_SCATTER, ALL_REDUCE), ("grad", "pmean")),
            ):
                cap = bound
                for e in graph.eqns:
                    if e.op in ops and e.provenance.role in roles:
                        cap = max(cap, *(v.numel * v.dtype.itemsize for v in e.ins))
                for moment in under_way(graph, ops, roles):
                    assert sum(moment) <= cap, (stage, bound)
