"""`ir.emit`: a function of PyTorch becomes equations, whole and on shards, or an error that says what to write."""

import re

import pytest
import torch

import ztrans as zt
from ztrans import ir
from ztrans.ir import Names, Partial, Split, Var

AXES = {"dp": 2, "host": 2}


def value(name, *shape, dtype=torch.float32, layout=()):
    return Var(name, dtype, shape, layout)


def int8(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round().to(torch.int8), scale


def result(graph_inputs, eqns, outs, *tensors):
    graph = ir.Graph("f", tuple(graph_inputs), tuple(eqns), tuple(outs), 0)
    ir.check(graph)
    return ir.evaluate(graph, *tensors)


def of(fn, *args, **options):
    return ir.emit(fn, *args, **options)


@pytest.mark.parametrize("fn", [
    lambda x, y: (x * 2).masked_fill(x < 0, 0.0) + y,
    lambda x, y: torch.nn.functional.layer_norm(x, (6,), y, None),
    lambda x, y: (x @ x.t()).max(dim=0).values,
    lambda x, y: torch.stack([x, x.detach()]).sum(0).view(-1, 3).mean() + torch.zeros_like(y),
    lambda x, y: torch.vmap(lambda row: row.softmax(0) * y)(x),
    lambda x, y: torch.func.grad(lambda x: (x.sin() * y).sum())(x),
])  # fmt: skip
def test_equations_compute_what_the_function_computes(fn):
    torch.manual_seed(0)
    tensors = torch.randn(4, 6), torch.randn(6)
    x, y = value("x", 4, 6), value("y", 6)
    eqns, out = of(fn, x, y)
    (got,) = result([x, y], eqns, [out], *tensors)
    assert torch.equal(got, fn(*tensors)) and (out.shape, out.dtype) == (got.shape, got.dtype)


def test_trees_constants_names_and_lines():
    x, y = value("x", 4), value("y", 4)
    like = ir.Eqn(torch.ops.aten.neg.default, (x,), (y,), region="backward")
    fn = lambda values, factor: {"sum": values["a"] + values["b"] * factor, "same": values["a"]}
    eqns, out = of(
        fn, {"a": x, "b": y}, 2.5, names=Names(["x", "y", "mul"]), like=like, name="total"
    )
    assert out["same"] is x and out["sum"].name == "total.0"
    assert [ir.equation(e) for e in eqns] == [
        "mul_1: f32[4] = mul(y, 2.5)",
        "total.0: f32[4] = add(x, mul_1)",
    ]
    assert {e.region for e in eqns} == {"backward"}
    assert of(fn, {"a": x, "b": y}, 2.5, like=like, region="update")[0][0].region == "update"


def test_a_cast_under_autocast_is_not_made():
    with torch.autocast("cpu", torch.bfloat16):
        eqns, out = of(torch.mm, value("x", 4, 4), value("y", 4, 4))
    assert len(eqns) == 1 and out.dtype == torch.float32


@pytest.mark.parametrize("layout, types", [
    ((Split("dp"),), ["i8[32@dp,16]", "f32[32@dp,1]"]),
    ((Split("dp", 1),), None),  # the largest element of a row is not on one rank
    ((Split("dp"), Split("host", 1)), None),
    ((), ["i8[32,16]", "f32[32,1]"]),
])  # fmt: skip
def test_a_function_of_rows_runs_on_shards_of_rows(layout, types):
    w = value("w", 32, 16, layout=layout)
    if types is None:
        with pytest.raises(
            ValueError, match=r"emit: int8 cannot become equations(?s:.)*test_emit.py:\d+ in int8"
        ):
            of(int8, w, axes=AXES)
        return
    _, outs = of(int8, w, axes=AXES)
    assert [v.type for v in outs] == types


def test_terms_and_operands_with_other_layouts():
    w = value("w", 8, 4, layout=(Split("dp"),))
    assert of(lambda w: w.abs().max(), w, axes=AXES)[1].layout == (Partial("dp", "max"),)
    assert of(lambda w, s: w * s, w, value("s"), axes=AXES)[1].type == "f32[8@dp,4]"
    assert of(lambda w: w.masked_fill(w < 0, 0.0), w, axes=AXES)[1].type == "f32[8@dp,4]"
    assert of(lambda w: w + torch.rand_like(w), w, axes=AXES)[1].type == "f32[8@dp,4]"
    with pytest.raises(
        ValueError, match=re.escape("mul of f32[8@dp,4], f32[8,4] needs a message. Gather what")
    ):
        of(lambda w, x: w * x, w, value("x", 8, 4), axes=AXES)
    with pytest.raises(ValueError, match=r"exp of .* needs a message"):
        of(torch.exp, value("t", layout=(Partial("dp", "sum"),)), axes=AXES)


@pytest.mark.parametrize("fn, problem", [
    (lambda x: x.add_(1), r"aten.add_.Tensor changes a tensor in place. Use the operation that returns a new one"),
    (lambda x: x * torch.ones(4, device=x.device), "aten.ones.default makes a tensor from no argument"),
    (lambda x: torch.where(x > 0, x, 0.0), "In place of torch.where with a number, use masked_fill"),
    (lambda x: torch.zeros_like(x, device="cpu"), "aten.zeros_like.default names a device. Leave it out"),
    (lambda x: x if x.norm() < 1 else x / x.norm(), "it reads the number in a tensor, as .* Keep it a tensor"),
    (lambda x: x * x.sum().item(), r"reads the number in a tensor(?s:.)*test_emit.py:\d+ in"),
    (lambda x: x * torch.tensor(3.0), "it reads a tensor from outside. Pass it as an argument, or write a number"),
])  # fmt: skip
def test_what_a_function_may_not_do(fn, problem):
    with pytest.raises(ValueError, match=problem):
        of(fn, value("x", 4))


def test_what_a_function_may_not_read():
    future = Var("f'", torch.float32, (4,), future=True)
    with pytest.raises(
        ValueError, match=re.escape("f': f32[4]! is not yet waited for, so no operation reads it")
    ):
        of(torch.neg, future)
    with pytest.raises(
        ValueError, match=re.escape("m: f32<host>[4] is on the host, so no operation reads it")
    ):
        of(torch.neg, Var("m", torch.float32, (4,), memory="host"))


def test_a_reduction_over_ranks_is_a_mark_before_the_program_is_that_of_one_rank():
    eqns, out = of(lambda x: zt.pmax(x.abs(), "dp"), value("x", 4))
    assert [e.op for e in eqns][1] is ir.PMAX and eqns[1].args[1] == "dp" and out is eqns[1].out
    with pytest.raises(
        ValueError,
        match=r"zt\.pmax is for phases 0 and 1\. Reduce in the program of one rank by ir\.red",
    ):
        of(lambda x: zt.pmax(x, "dp"), value("x", 4), axes=AXES)


# ---- in a program


def program():
    x, g0, g, w, w1 = (value(name, 4) for name in ("x", "g0", "g", "w", "w1"))
    make = torch.ops.aten.neg.default, torch.ops.aten.sub.Tensor
    eqns = (
        ir.Eqn(make[0], (x,), (g0,), region="backward"),
        ir.Eqn(ir.GRADIENT, (g0, w), (g,), region="backward"),
        ir.Eqn(make[1], (w, g), (w1,), region="update"),
    )
    return ir.Graph("step", (w, x), eqns, (w1, g), 1, batch=frozenset([x]))


def test_a_rewriter_puts_equations_behind_what_they_read():
    graph = program()
    gradient = graph.eqns[1]
    new = ir.Rewriter(graph)
    w2 = new.emit(lambda w: w * 2, graph.state[0])  # of an input: at the start
    clipped = new.emit(lambda g: g.clamp(-1, 1), gradient.out, name="clipped")
    both = new.emit(torch.add, w2, clipped)  # of values that were inserted
    new.replace_value(gradient.out, clipped)
    new.add_output(new.emit(torch.sum, both, name="total"))
    rewritten = new.applied()
    ir.check(rewritten)
    assert [f"{e.region} {ir.equation(e)}" for e in rewritten.eqns] == [
        "forward mul: f32[4] = mul(w, 2)",
        "backward g0: f32[4] = neg(x)",
        "backward g: f32[4] = gradient(g0, w)",
        "update clipped: f32[4] = clamp(g, -1, 1)",
        "update add: f32[4] = add(mul, clipped)",
        "update total: f32[] = sum(add)",
        "update w1: f32[4] = sub(w, clipped)",
    ]
    assert rewritten.outputs == (graph.outputs[0], clipped, rewritten.eqns[-2].out)
    assert rewritten.added == ("total",)


@pytest.mark.parametrize(
    "made",
    [lambda new, e: new.emit(lambda g: (g, 2 * g), e.out), lambda new, e: e, lambda new, e: 0.0],
)
def test_one_value_takes_the_place_of_another(made):
    graph = program()
    new = ir.Rewriter(graph)
    with pytest.raises(
        TypeError,
        match=r"g is to be replaced by a \w+, and one Var takes its place: unpack what emit",
    ):
        new.replace_value(graph.eqns[1].out, made(new, graph.eqns[1]))


def test_a_reader_moves_behind_a_value_that_is_bound_later():
    """As what one transform has emitted behind a gradient, where the next one scales it by the norm of all."""
    x, g0, g1, new0, new1 = (value(name, 4) for name in ("x", "g0", "g1", "new0", "new1"))
    neg, exp, absolute = (getattr(torch.ops.aten, name).default for name in ("neg", "exp", "abs"))
    eqns = (
        ir.Eqn(neg, (x,), (g0,)),
        ir.Eqn(absolute, (g0,), (new0,)),
        ir.Eqn(exp, (x,), (g1,)),
        ir.Eqn(absolute, (g1,), (new1,)),
    )
    new = ir.Rewriter(ir.Graph("f", (x,), eqns, (new0, new1), 0))
    new.replace_value(g0, new.emit(torch.add, g0, g1))
    rewritten = ir.check(new.applied())
    assert [v.name for e in rewritten.eqns for v in e.outs] == ["g0", "g1", "add", "new0", "new1"]


TRACED = []


def scaled(x, factor):
    TRACED.append(factor)
    return x * factor


def test_a_rewriter_traces_a_function_once_for_equal_types():
    graph = program()
    new = ir.Rewriter(graph)
    values = [new.emit(scaled, v, 2) for v in graph.inputs]
    new.emit(scaled, graph.inputs[0], 2.0)  # another type
    assert TRACED == [2, 2.0] and [v.name for v in values] == ["mul", "mul_1"]


def test_a_rewriter_traces_a_closure_each_time():
    new = ir.Rewriter(program())
    factors = [2, 3]
    closure = lambda x: x * factors.pop(0)
    for _ in range(2):
        new.emit(closure, new.graph.inputs[0])
    assert [e.args[1] for e in new.applied().eqns[:2]] == [2, 3]


def test_the_builders_of_collectives_make_programs_that_check():
    """Each as its docstring says, on two ranks in lock-step."""
    why = {"provenance": ir.Provenance("param", ("w",), "dp")}
    w = value("w", 4, 2, layout=(Split("dp"),))
    x = value("x", 4, 2)
    starts = [
        ir.all_gather([w], ["gathered"], "dp", **why),
        ir.all_reduce([x], ["most"], "dp", "max", **why),
        ir.reduce_scatter([x], ["mean"], "dp", "mean", dim=1, **why),
        ir.to_host(w, "w.host"),
    ]
    waits = [*map(ir.wait, (e.out for e in starts[:3])), ir.wait_for_copy(starts[3].out)]
    back = ir.to_device(waits[3].out, "w.device")
    cut = ir.shard(waits[0].out, "cut", "dp", 1)
    eqns = (*starts, *waits, back, ir.wait_for_copy(back.out), cut)
    outs = [*(e.out for e in waits[:3]), eqns[-2].out, cut.out]
    graph = ir.Graph("f", (w, x), eqns, tuple(outs), 0, batch=frozenset([x]), mesh=(("dp", 2),))
    ir.check(graph)
    whole = torch.arange(8.0).view(4, 2)
    terms = [whole, torch.where(whole > 5, float("nan"), -whole)]
    ranks = ir.lockstep(graph, [[part, term] for part, term in zip(whole.chunk(2), terms)])
    for rank, (gathered, most, mean, device, cut_value) in enumerate(ranks):
        assert torch.equal(gathered, whole) and torch.equal(device, whole.chunk(2)[rank])
        assert torch.equal(most.isnan(), whole > 5) and torch.equal(most[:3], whole[:3])
        assert torch.equal(mean[:3], torch.zeros(3, 1)) and torch.equal(
            cut_value, whole.chunk(2, 1)[rank]
        )
