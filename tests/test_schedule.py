"""Hints on graphs by hand: where each one puts an equation, and that nothing else moves."""

import dataclasses

import pytest
import torch
from programs import CASES
from worlds import batches, slices

import ztrans as zt
from ztrans.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, all_gather, reduce, wait
from ztrans.graph import Eqn, Graph, Order, Provenance, Split, Var
from ztrans.schedule import schedule

aten = torch.ops.aten


def why(role: str) -> Provenance:
    return Provenance(role, ("w",), "dp")


def var(name: str, n: int = 8, **how) -> Var:
    return Var(name, torch.float32, (n,), **how)


def program(early: Order | None = None, layers: int = 4):
    """A gather, its wait and a use, for each layer; all inputs are there from the start."""
    shards = [var(f"s{i}", layout=(Split("dp"),)) for i in range(layers)]
    x, eqns = var("x"), []
    h = x
    for i, s in enumerate(shards):
        start = dataclasses.replace(all_gather([s], [f"w{i}"], "dp", provenance=why("param")), order=early)
        w = wait(start.outs[0])
        out = var(f"h{i}")
        eqns += [start, w, Eqn(aten.add.Tensor, (h, w.outs[0]), (out,))]
        h = out
    return Graph("f", (*shards, x), tuple(eqns), (h,), 0, mesh=(("dp", 2),))


def order(graph: Graph) -> list[str]:
    return [e.outs[0].name for e in schedule(graph).check().eqns]


def test_without_hints_nothing_moves():
    for graph in (program(), backward(3, None)):
        assert order(graph) == [e.outs[0].name for e in graph.eqns]


def test_early_keeps_at_least_one_ahead():
    assert order(program(Order("early", 0))) == [
        "w0'", "w1'", "w0", "w2'", "h0", "w1", "w3'", "h1", "w2", "h2", "w3", "h3",
    ]  # fmt: skip


def test_early_uses_the_bytes_it_is_given():
    assert order(program(Order("early", 3 * 32)))[:3] == ["w0'", "w1'", "w2'"]
    assert order(program(Order("early", 1000)))[:4] == ["w0'", "w1'", "w2'", "w3'"]


def test_early_does_not_precede_what_is_gathered():
    """The second gather is of a value that the first one's use makes."""
    s, x = var("s", layout=(Split("dp"),)), var("x")
    first = all_gather([s], ["w"], "dp", provenance=why("param"), order=Order("early", 1000))
    half = var("half", layout=(Split("dp"),))
    second = all_gather([half], ["v"], "dp", provenance=why("param"), order=Order("early", 1000))
    eqns = (first, wait(first.outs[0]), Eqn(aten.neg.default, (s,), (half,)), second, wait(second.outs[0]))
    graph = Graph("f", (s, x), eqns, (), 0, mesh=(("dp", 2),))
    assert order(graph) == ["w'", "w", "half", "v'", "v"]


def backward(layers: int, late: Order | None, birth: Order | None = None) -> Graph:
    """Gradients born one after the other, cast and reduced at the very end, as autograd does it."""
    dy = var("dy")
    born, casts, starts, waits, uses = [], [], [], [], []
    for i in range(layers):
        g, c, new = var(f"g{i}"), var(f"c{i}"), var(f"n{i}", layout=(Split("dp"),))
        born.append(Eqn(aten.add.Tensor, (born[-1].outs[0] if born else dy, dy), (g,)))
        casts.append(Eqn(aten._to_copy.default, (g,), (c,), order=birth))
        start = reduce([c], [f"r{i}"], "dp", "mean", Split("dp"), provenance=why("grad"))
        starts.append(dataclasses.replace(start, order=birth))
        waits.append(dataclasses.replace(wait(start.outs[0]), order=late))
        uses.append(Eqn(aten.neg.default, (waits[-1].outs[0],), (new,)))
    eqns = [*born, *casts, *(e for pair in zip(starts, waits) for e in pair), *uses]
    return Graph("f", (dy,), tuple(eqns), tuple(e.outs[0] for e in uses), 0, mesh=(("dp", 2),))


def test_birth_brings_the_chain_with_it():
    found = order(backward(3, Order("use", 1000), Order("birth")))
    assert found == ["g0", "c0", "r0'", "g1", "c1", "r1'", "g2", "c2", "r2'", "r0", "n0", "r1", "n1", "r2", "n2"]


def test_use_is_bounded_by_what_is_under_way():
    """With no bytes allowed two reductions are under way, and the third makes the first be waited for."""
    found = order(backward(4, Order("use", 0), Order("birth")))
    assert found.index("r0") == found.index("r2'") + 1
    assert found.index("r1") == found.index("r3'") + 1
    assert found.index("r3") == found.index("n3") - 1


def test_the_update_of_a_bounded_reduction_follows_its_wait():
    """Waits that come early by the bound do not pull their readers with them; all data flow is kept."""
    found = order(backward(5, Order("use", 64), Order("birth")))
    assert found.index("r0") < found.index("g3") < found.index("n0")
    assert [x for x in found if x.startswith("n")] == ["n0", "n1", "n2", "n3", "n4"]


def test_hints_of_one_kind_leave_the_others_in_place():
    hinted, plain = order(backward(4, None, Order("birth"))), order(backward(4, None))
    kept = [name for name in plain if name[0] in "gn" or name in ("r0", "r1", "r2", "r3")]
    assert [name for name in hinted if name in kept] == kept


def test_chains_of_births():
    """A hint follows hints: the cast of a cast is born where the first one's input is."""
    dy, late = var("dy"), Eqn(aten.neg.default, (var("dy2"),), (var("z"),))
    g, a, b = (var(n) for n in "gab")
    eqns = [
        Eqn(aten.neg.default, (dy,), (g,)),
        late,
        Eqn(aten._to_copy.default, (g,), (a,), order=Order("birth")),
        Eqn(aten._to_copy.default, (a,), (b,), order=Order("birth")),
        Eqn(aten._to_copy.default, (dy,), (var("c"),), order=Order("birth")),
    ]
    graph = Graph("f", (dy, late.args[0]), tuple(eqns), (b,), 0)
    assert order(graph) == ["c", "g", "a", "b", "z"]


def test_a_bucket_is_early_for_its_first_member():
    shards, x, y = [var(f"s{i}", layout=(Split("dp"),)) for i in range(3)], var("x"), var("y")
    first = all_gather(shards[:1], ["a"], "dp", provenance=why("param"))
    bucket = all_gather(shards[1:], ["b", "c"], "dp", provenance=why("param"), order=Order("early", 1000))
    waits = [wait(f) for f in (*first.outs, *bucket.outs)]
    work = Eqn(aten.neg.default, (x,), (y,))
    graph = Graph("f", (*shards, x), (first, waits[0], work, bucket, *waits[1:]), (y,), 0, mesh=(("dp", 2),))
    assert order(graph) == ["b'", "a'", "a", "y", "b", "c"]


def under_way(graph: Graph, ops, roles):
    """While each computation runs: the collectives under way, by bytes. And the largest."""
    largest, now = 0, {}
    moments = []
    for e in graph.eqns:
        if e.op in ops and e.provenance.role in roles:
            whole = e.outs if e.op is ALL_GATHER else e.ins
            now[e.outs[0]] = sum(v.numel * v.dtype.itemsize for v in whole)
            largest = max(largest, now[e.outs[0]])
        elif e.op is WAIT:
            now.pop(e.args[0], None)
        else:
            moments.append(list(now.values()))
    return largest, moments


@pytest.mark.parametrize("name", ["gpt_adam", "sam", "accumulation", "cast_inside", "cast_outside"])
def test_bytes_in_flight_are_bounded_at_every_point(name):
    case = CASES[name]
    traced = zt.Step.of(case.step).trace(case.state(), *slices(batches(case, 1)[0], 4)[0])
    for stage in (0, 2, 3):
        for bound in (None, 0, 600, 5000):
            schedules = (zt.overlap_grads(max_in_flight=bound), zt.prefetch(max_in_flight=bound))
            transforms = (zt.shard_params(zt.AbstractMesh(dp=4), stage=stage), *schedules, zt.fuse_cast_gather())
            graph = dataclasses.replace(traced, transforms=transforms).lower().graph.check()
            for ops, roles in (((ALL_GATHER,), ("param",)), ((REDUCE_SCATTER, ALL_REDUCE), ("grad", "pmean"))):
                largest, moments = under_way(graph, ops, roles)
                cap = 2 * largest if bound is None else bound
                assert all(sum(sizes) <= cap or len(sizes) <= 2 for sizes in moments)
                assert (stage == 0 and ALL_GATHER in ops) or max(map(len, moments)) >= 2, "nothing runs ahead"
