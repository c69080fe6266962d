"""An all_to_all: shards along one dim become shards along another, over gloo, over NCCL, and in the interpreter."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.fabric import on_all_ranks
from tests.support.gloo_threads import gloo_channels, on_threads
from tests.support.worlds import ALL, distance, slices
from ztrans.ir.collectives import LARGE_MEMBER, all_to_all, coalesce, row, rows, rules, wait
from ztrans.ir.graph import Eqn, Graph, Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import Hosts, route_of
from ztrans.ir.source import Source
from ztrans.ir.varying import varying
from ztrans.ir.verifier import ProgramError, check
from ztrans.planning.cluster import by_host, cluster
from ztrans.planning.simulate import simulate
from ztrans.rewrites.redistribute import Site, redistribute
from ztrans.runtime.collectives import Start
from ztrans.runtime.collectives import wait as wait_for

F32, BF16 = torch.float32, torch.bfloat16
FOR = Provenance("update", ("w",), "dp")


def var(name, *shape, dim=0, dtype=F32):
    return Var(name, dtype, shape, (Split("dp", dim),))


def exchange(start, end, *shapes, dtype=F32):
    """The exchange of values of these shapes, split along dim `start`, to values that are split along dim `end`."""
    return coalesce(
        [
            all_to_all([var(f"x{k}", *s, dim=start, dtype=dtype)], [f"y{k}"], "dp", end, provenance=FOR)
            for k, s in enumerate(shapes)
        ]
    )  # fmt: skip


def members(eqn, ranks):
    """Random members of each rank, and the values that each rank gets."""
    torch.manual_seed(0)
    wholes = [torch.randn(v.shape).to(v.dtype) for v in eqn.ins]
    of_rank = lambda vs, rank: [cut(x, v.split, ranks, rank) for x, v in zip(wholes, vs)]
    sent = [of_rank(eqn.ins, rank) for rank in range(ranks)]
    return sent, [of_rank(eqn.results, rank) for rank in range(ranks)]


BIG = LARGE_MEMBER // 4
CASES = {
    "stack": (1, 0, (4, 12, 6)), "back": (0, 1, (4, 12, 6)), "inner": (0, 2, (8, 3, 4)), "uneven": (1, 0, (3, 7, 5)),
    "uneven back": (0, 1, (3, 7, 5)), "empty parts": (0, 1, (2, 9)), "large": (1, 0, (4, BIG, 4)),
    "large back": (0, 1, (4, BIG, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, "bucket"])
@pytest.mark.parametrize("carrier", ["gloo", "nccl", "interpreter"])
def test_blocks_arrive_where_they_belong(name, carrier):
    ranks = 4
    if name == "bucket":
        eqn = exchange(1, 0, (4, 8, 2), (5, 7), (4, BIG, 4), dtype=BF16)
    else:
        start, end, shape = CASES[name]
        eqn = exchange(start, end, shape)
    sent, wanted = members(eqn, ranks)
    if carrier == "nccl":
        got = on_all_ranks(eqn, Hosts(ranks), sent)
    elif carrier == "gloo":
        with gloo_channels(Hosts(ranks)) as opened:

            def run(rank):
                start = Start(eqn, {"dp": ranks}, {"dp": rank}, opened[rank])
                return [wait_for(member) for member in start(*sent[rank])]

            got = on_threads(ranks, run)
    else:
        got = rules(eqn).meaning([eqn] * ranks, [dict(zip(eqn.ins, s)) for s in sent])
    for mine, values in zip(got, wanted):
        for x, y in zip(mine, values):
            assert torch.equal(x, y) and x.is_contiguous()


def test_a_rank_receives_a_part_of_what_a_gather_brings():
    sizes = {"dp": 8}
    eqn = exchange(1, 0, (8, 64, 32))
    bytes_of_value = 4 * 8 * 64 * 32
    assert rules(eqn).wire_bytes(eqn, sizes) == bytes_of_value // 8 * 7 // 8
    assert rules(eqn).received_bytes(eqn, 0, sizes) == bytes_of_value // 8
    between = route_of(eqn, sizes, Hosts(8, 2), gloo=False)
    assert between.between == bytes_of_value // 8 / 2 and between.way == "exchange"
    assert "each rank needs other elements" in between.reason


def graph(*eqns, ranks=4):
    return Graph("f", eqns[0].ins, eqns, (eqns[-1].out,), 0, mesh=(("dp", ranks),))


def test_the_verifier_knows_its_types():
    x = var("x", 4, 8)
    start = all_to_all([x], ["y"], "dp", 1, provenance=FOR)
    assert check(graph(start, wait(start.out)))
    same = all_to_all([x], ["y"], "dp", 0, provenance=FOR)
    terms = all_to_all([Var("t", F32, (4, 8), (Partial("dp", "sum"),))], ["y"], "dp", 1, provenance=FOR)  # fmt: skip
    for wrong in (same, terms):
        with pytest.raises(ProgramError, match=r"cuts .* along another dim"):
            check(graph(wrong, wait(wrong.out)))


def test_a_row_on_each_rank_is_a_value_with_one_row_for_each():
    x = Var("x", F32, (4, 3), (Split("dp"),))
    own = row(x, "own", "dp")
    twice = Eqn(torch.ops.aten.mul.Tensor, (own.out, 2), (Var("twice", F32, (3,)),))
    program = check(graph(own, twice, rows(twice.out, "y", "dp", 4)))
    whole = torch.randn(4, 3)
    results = zt.ir.lockstep(program, [[whole[k : k + 1]] for k in range(4)])
    assert torch.equal(torch.cat([y for (y,) in results]), 2 * whole)
    differs = varying(program, ("dp",))
    assert [differs.get(e.out) for e in program.eqns] == [{"dp"}, {"dp"}, None], (
        "the new state may not be a row of a rank"
    )
    with pytest.raises(ProgramError, match="one row for each rank of dp"):
        check(graph(row(var("x", 5, 3), "own", "dp")))
    with pytest.raises(ProgramError, match="not whole on each rank"):
        check(graph(rows(x, "y", "dp", 4)))


def test_another_split_is_one_exchange():
    site = Site("update", Source("f.py", 1, "f"), lambda name: name, FOR)
    x = var("x", 4, 8)
    eqns, out = redistribute(x, Split("dp", 1), site, "x.columns")
    assert [e.op.name for e in eqns] == ["all_to_all", "wait"] and out.split == Split("dp", 1)
    whole = torch.randn(4, 8)
    results = zt.ir.lockstep(graph(*eqns), [[whole[k : k + 1]] for k in range(4)])
    assert torch.equal(torch.cat([y for (y,) in results], 1), whole)


def test_its_seconds_are_those_of_its_bytes():
    start = all_to_all([var("x", 64, 1 << 20)], ["y"], "dp", 1, provenance=FOR)
    program = graph(start, wait(start.out), ranks=64)
    fast = cluster("h100", dp="infiniband")
    slow = cluster("h100", dp=by_host(8, "nvlink4", "infiniband"))
    for machines in (fast, slow):
        (bar,) = [event for event in simulate(program, machines).events if event.lane == "dp reduce"]  # fmt: skip
        assert bar.bytes == (1 << 20) * 4 * 63 // 64


def test_leaves_that_are_cut_along_two_dims_meet_by_an_exchange():
    """Also with the transforms that ask for gathers of leaves: an exchange is none."""

    def step(state, x):
        loss = lambda p: (x @ p).square().mean()
        grads, value = grad_and_value(loss)(state["p"])
        m = state["m"] + grads
        return {"p": state["p"] - 0.1 * m, "m": m}, value

    torch.manual_seed(0)
    state = {"p": torch.randn(8, 6), "m": torch.randn(8, 6)}
    x = torch.randn(4, 8)
    cut = zt.shard_params(zt.AbstractMesh(dp=2), reshard=2, dim=lambda path, leaf: int(path == "m"))
    chain = zt.chain(cut, *ALL)
    lowered = chain(step).trace(state, x[:2]).lower()
    moved = [e for e in lowered.graph.eqns if e.op is zt.ir.ALL_TO_ALL]
    assert [e.provenance.role for e in moved] == ["update"] * 2, "of the momentum, and back"
    got, _ = lowered.lockstep(state, slices((x,), 2))
    wanted, _ = step(state, x)
    assert distance(got, wanted) < 1e-6
