"""Fusion: which equations form a group that runs as one kernel, and an order in which each group is contiguous."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.fusion import fused_anywhere
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, clone, on_ranks, slices
from ztrans.ir.collectives import WAIT, is_start
from ztrans.ir.graph import Eqn, Graph, Var, producers
from ztrans.ir.interpreter import lockstep, split_state
from ztrans.ir.op_facts import is_random
from ztrans.rewrites.update_groups import is_fused_update
from ztrans.runtime.codegen import to_fx

aten = torch.ops.aten


def kept_in_order(graph: Graph) -> list:
    """The equations whose order must not change: starts of collectives, first waits for them, and random draws."""
    producer, seen, keys = producers(graph.eqns), set(), []
    for e in graph.eqns:
        key = ("wait", producer[e.args[0]]) if e.op is WAIT else ("start", e)
        if (is_start(e) or e.op is WAIT or is_random(e)) and key not in seen:
            seen.add(key)
            keys.append(key)
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", parameters_of(CASES))
def test_fusion_only_reorders_the_program(name, stage):
    case = CASES[name]
    graph = on_ranks(case, 2, zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ALL).graph
    state, (batch,) = case.state(), batches(case, 1)
    fused, groups = fused_anywhere(graph)
    zt.ir.check(fused)
    assert set(fused.eqns) == set(graph.eqns) and len(fused.eqns) == len(graph.eqns)
    assert kept_in_order(fused) == kept_in_order(graph)
    place = {e: i for i, e in enumerate(fused.eqns)}
    for group in groups:
        first = place[group.eqns[0]]
        assert [place[e] for e in group.eqns] == [*range(first, first + len(group.eqns))], (
            "a group is contiguous"
        )
    flat = [torch.as_tensor(x) for x in pytree.tree_leaves(clone(state))]
    rest = [[torch.as_tensor(x) for x in pytree.tree_leaves(part)] for part in slices(batch, 2)]
    ranks = [mine + part for mine, part in zip(split_state(graph, flat), rest)]
    if len(graph.inputs) == len(ranks[0]):
        outs = []
        for program in (graph, fused):
            torch.manual_seed(0)
            outs.append(lockstep(program, ranks))
        pairs = zip(*map(pytree.tree_leaves, outs), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def program(*eqns: tuple, outputs: str) -> Graph:
    """A program of equations `(name, op, *args)` over x: f32[4,4] and s: f32[].

    A result whose name starts with s is a scalar, any other is f32[4,4].
    """
    env = {"x": Var("x", torch.float32, (4, 4)), "s": Var("s", torch.float32, ())}
    equations = []
    for name, op, *args in eqns:
        args = tuple(env.get(a, a) if isinstance(a, str) else a for a in args)
        env[name] = Var(name, torch.float32, () if name[0] == "s" else (4, 4))
        equations.append(Eqn(op, args, (env[name],)))
    return Graph(
        "f", (env["x"], env["s"]), tuple(equations), tuple(env[o] for o in outputs.split()), 0
    )


def names(graph: Graph) -> list[str]:
    return [" ".join(e.outs[0].name for e in group.eqns) for group in fused_anywhere(graph)[1]]


def test_fused_optimizer_updates_are_grouped_by_dtype():
    """As `torch.optim` groups them. On a GPU a call with several dtypes would fail."""
    model = torch.nn.ModuleList(
        torch.nn.Linear(2, 2, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loop_step(x):
        optimizer.zero_grad()
        sum(m(x.to(m.weight.dtype)).float().sum() for m in model).backward()
        optimizer.step()

    step, state = zt.lift(loop_step, model, optimizer)
    _, groups = fused_anywhere(zt.Step.of(step).lower(state, torch.ones(3, 2)).graph)
    dtypes_by_group = [
        [e.args[0][0].dtype for e in g.eqns] for g in groups if is_fused_update(g.eqns[0])
    ]
    assert sorted(map(len, dtypes_by_group)) == [2, 4] and all(
        len(set(dtypes)) == 1 for dtypes in dtypes_by_group
    )


def test_equal_counters_are_grouped_and_those_that_follow_one_another_are_not():
    counts = [Var(name, torch.float32, ()) for name in "abc"]
    add = lambda v, n, name: Eqn(
        aten.add.Scalar, (v, n), (Var(name, torch.float32, ()),), region="update"
    )
    a, b, c = (add(v, 1, f"{v.name}1") for v in counts)
    again, other = add(c.outs[0], 1, "c2"), add(counts[0], 2, "a2")
    outputs = tuple(e.outs[0] for e in (a, b, again, other))
    _, groups = fused_anywhere(Graph("f", tuple(counts), (a, b, c, again, other), outputs, 0))
    assert [[v.name for v in g.outs] for g in groups if g.is_update] == [["a1", "b1", "c1"]]


@pytest.mark.slow
def test_the_counters_of_a_fused_optimizer_are_one_call():
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(35))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loop_step(x):
        optimizer.zero_grad()
        sum(m(x).sum() for m in model).backward()
        optimizer.step()

    step, state = zt.lift(loop_step, model, optimizer)
    graph, groups = fused_anywhere(zt.Step.of(step).lower(state, torch.ones(3, 2)).graph)
    updates = [group.eqns for group in groups if group.is_update]
    assert [len(eqns) for eqns in updates] == [70, 70]
    code = to_fx(graph, None, True, updates).code
    assert code.count("._foreach_add_") == 1 and code.count("._fused_adamw_") == 1


def test_a_reader_of_a_group_joins_it_across_a_product():
    graph = program(
        ("a", aten.relu.default, "x"),
        ("b", aten.mm.default, "a", "x"),
        ("c", aten.exp.default, "a"),
        ("d", aten.mul.Tensor, "c", "b"),
        ("e", aten.neg.default, "d"),
        outputs="e c",
    )
    assert names(graph) == ["a c", "d e"]
    assert [e.outs[0].name for e in fused_anywhere(graph)[0].eqns] == ["a", "c", "b", "d", "e"]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=["batch", "group"])
def test_a_norm_is_fused_with_its_activation(norm):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step, state = zt.lift(loop_step, model, optimizer)
    _, groups = fused_anywhere(zt.Step.of(step).lower(state, torch.randn(2, 4, 3, 3)).graph)
    together = [{str(e.op).split(".")[1] for e in group.eqns} for group in groups]
    assert any("relu" in names and any("norm" in name for name in names) for names in together)
    assert any(
        "threshold_backward" in names and any("norm_backward" in name for name in names)
        for names in together
    )


def test_random_draws_and_scatters_are_not_fused():
    graph = program(
        ("a", aten.relu.default, "x"),
        ("b", aten.bernoulli.p, "a", 0.5),
        ("c", aten.scatter_add.default, "b", 0, "x", "x"),
        outputs="c",
    )
    assert names(graph) == []


def test_updates_that_share_a_scalar_are_not_one_group():
    """Every update reads the clip coefficient. Otherwise all updates would be one kernel as long as the model."""
    graph = program(
        ("s1", aten.add.Tensor, "s", 1),
        ("s2", aten.sqrt.default, "s1"),
        ("a", aten.mul.Tensor, "x", "s2"),
        ("b", aten.exp.default, "a"),
        ("c", aten.div.Tensor, "x", "s2"),
        ("d", aten.exp.default, "c"),
        outputs="b d",
    )
    assert names(graph) == ["s1 s2", "a b", "c d"]


def test_views_stay_out_unless_they_are_read_inside():
    graph = program(
        ("a", aten.relu.default, "x"),
        ("b", aten.exp.default, "a"),
        ("v", aten.t.default, "b"),
        ("m", aten.mm.default, "v", "x"),
        ("w", aten.t.default, "a"),
        ("c", aten.neg.default, "w"),
        outputs="m c",
    )
    assert names(graph) == ["a b w c"]


def test_an_equation_that_only_a_later_group_reads_joins_that_group():
    """As in AdamW, where the decay of the second moment comes before the square of the gradient."""
    graph = program(
        ("a", aten.mul.Tensor, "x", 0.9),
        ("g", aten.mm.default, "x", "x"),
        ("b", aten.mul.Tensor, "g", "g"),
        ("c", aten.add.Tensor, "a", "b"),
        outputs="c",
    )
    assert names(graph) == ["a b c"]


def test_a_constant_is_computed_just_before_its_first_reader():
    make = [("o", aten.full.default, [4, 4], 1.0), ("v", aten.t.default, "o")]
    used = program(
        *make, ("m", aten.mm.default, "x", "x"), ("a", aten.add.Tensor, "m", "v"), outputs="a"
    )
    assert names(used) == []
    assert [e.outs[0].name for e in fused_anywhere(used)[0].eqns] == ["m", "o", "v", "a"]
    unused = program(*make, ("m", aten.mm.default, "x", "x"), outputs="m o v")
    assert [e.outs[0].name for e in fused_anywhere(unused)[0].eqns] == ["m", "o", "v"]
