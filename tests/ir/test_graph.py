"""The graph: which programs `check` refuses, which equations `dce` keeps, names, types and printed text."""

import pytest
import torch

import ztrans as zt
from ztrans.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SHARD,
    WAIT,
    all_gather,
    reduce,
    wait,
)
from ztrans.ir.graph import (
    Names,
    Partial,
    Provenance,
    Split,
    dce,
    producers,
    rename,
    substitute,
    users,
    variables,
)
from ztrans.ir.marks import GRADIENT
from ztrans.ir.op_facts import is_random, is_view, is_view_or_cast
from ztrans.ir.printer import equation, lines, op_name
from ztrans.ir.source import Source, user_source
from ztrans.ir.verifier import ProgramError

aten = torch.ops.aten
F32 = torch.float32
DP = (Split("dp"),)
WHY = Provenance("param", ("w",), "dp")


def var(name, *shape, dtype=F32, layout=(), future=False):
    return zt.ir.Var(name, dtype, shape, layout, future)


def graph(inputs, eqns, outputs, num_state=0, mesh=(("dp", 2),), **rest):
    return zt.ir.Graph(
        "f", tuple(inputs), tuple(eqns), tuple(outputs), num_state, mesh=mesh, **rest
    )


def add(x, y, out):
    return zt.ir.Eqn(aten.add.Tensor, (x, y), (out,))


W, X = var("w", 4, 2, layout=DP), var("x", 4, 2)
START = all_gather([W], ["w.full"], "dp", provenance=WHY)
FUTURE = START.outs[0]
END = wait(FUTURE)
FULL = END.outs[0]
OUT = var("out", 4, 2)
USE = add(FULL, X, OUT)


def test_check_returns_a_well_formed_program():
    good = graph([W, X], [START, END, USE], [W, OUT], num_state=1)
    assert zt.ir.check(good) is good
    assert (FUTURE.name, FULL.name) == ("w.full'", "w.full")


WRONG_WAIT = zt.ir.Eqn(WAIT, (FUTURE,), (var("w.full", 4, 2, dtype=torch.bfloat16),))
BUCKET = all_gather([W, var("v", 6, layout=DP)], ["a", "b"], "dp", provenance=WHY)
ENDS = tuple(wait(future).out for future in BUCKET.outs)
MALFORMED = {
    "out: f32.4,2. is bound twice": graph([W, X], [add(X, X, OUT), add(X, OUT, OUT)], [OUT]),
    "x: f32.4,2. is bound twice, at the inputs": graph([X, var("x", 4, 2)], [], [X]),
    "out: .* is bound twice, at out": graph([X], [add(X, X, OUT), add(X, X, var("out", 4, 2))], []),
    "out: .* is read before it is bound": graph(
        [X], [add(OUT, X, var("y", 4, 2)), add(X, X, OUT)], [X]
    ),
    "is never waited for": graph([W, X], [START], [X]),
    "is waited for twice": graph([W], [START, END, wait(FUTURE).replace(outs=(OUT,))], [FULL]),
    "is a future and is read before its wait": graph(
        [W, X], [START, add(FUTURE, X, OUT), END], [OUT]
    ),
    "is waited for but is not a future": graph([X], [zt.ir.Eqn(WAIT, (X,), (OUT,))], [OUT]),
    "wait changes the type of": graph([W], [START, WRONG_WAIT], [WRONG_WAIT.outs[0]]),
    "a wait is for one future": graph(
        BUCKET.ins, [BUCKET, zt.ir.Eqn(WAIT, (list(BUCKET.outs),), ENDS)], ENDS
    ),
    "has no provenance": graph([W], [START.replace(provenance=None), END], [FULL]),
    "no such mesh axis": graph([W], [START, END], [FULL], mesh=(("tp", 2),)),
    "members and futures differ in number": graph(
        [W, BUCKET.ins[1]], [BUCKET.replace(outs=BUCKET.outs[:1]), wait(BUCKET.outs[0])], [W]
    ),
    "shapes differ": graph([W], [START.replace(outs=(var("f'", 4, 3, future=True),))], []),
    "output y: .* is not bound": graph([X], [], [var("y", 2)]),
    "output w.full': .* is still a future": graph([W], [START], [FUTURE]),
    "state w: .* comes back as out": graph([W, X], [add(X, X, OUT)], [OUT], num_state=1),
    "state x: .* comes back as y": graph(
        [X],
        [zt.ir.Eqn(torch.ops.aten.slice.Tensor, (X, 1, 0, 1), (var("y", 4, 1),))],
        [var("y", 4, 1)],
        num_state=1,
    ),
    "state x: .* comes back as 3": graph([X], [], [3], num_state=1),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_the_error_of_check_names_the_defect(message):
    broken = MALFORMED[message]
    if message.startswith("state x: .* comes back as y"):  # outputs are compared by identity
        y = broken.eqns[0].outs[0]
        broken = broken.replace(outputs=(y,))
    with pytest.raises(ProgramError, match=message):
        zt.ir.check(broken)


def test_the_error_of_check_names_the_equation_and_its_line():
    at = Source("/home/me/train.py", 7, "step")
    with pytest.raises(ProgramError, match=r"at y: f32\[2\] = aten.add.Tensor \[train.py:7 step\]"):
        zt.ir.check(graph([], [add(X, X, var("y", 2)).replace(source=at)], []))


def test_dce_drops_equations_whose_results_are_not_read():
    unused = add(X, X, var("unused", 4, 2))
    chained = add(unused.outs[0], X, var("chained", 4, 2))
    left = dce(graph([W, X], [unused, chained, START, END, USE], [OUT]))
    assert left.eqns == (START, END, USE)
    assert dce(graph([W, X], [START, END, USE], [X])).eqns == (), (
        "dead collectives go with their waits"
    )


def test_dce_keeps_a_bucket_if_one_member_is_read():
    v = BUCKET.ins[1]
    ends = [wait(f) for f in BUCKET.outs]
    left = dce(graph([W, v], [BUCKET, *ends], [ends[1].outs[0]]))
    assert left.eqns == (BUCKET, ends[1])


def test_dce_keeps_random_draws_in_order():
    rand = [
        zt.ir.Eqn(aten.rand.default, ([2],), (var("a", 2),)),
        zt.ir.Eqn(aten.bernoulli.p, (X, 0.5), (var("b", 4, 2),)),
    ]
    shape = add(X, X, X2 := var("x2", 4, 2))
    third = zt.ir.Eqn(aten.bernoulli.p, (X2, 0.5), (var("c", 4, 2),))
    assert dce(graph([X], [*rand, shape, third], [X])).eqns == (*rand, shape, third)


def test_dce_keeps_an_equation_if_only_its_second_result_is_read():
    pair = zt.ir.Eqn(aten.var_mean.correction, (X,), (None, mean := var("mean")))
    assert dce(graph([X], [pair], [mean])).eqns == (pair,)


def test_dce_follows_arguments_in_lists_and_keywords():
    eqns = [add(X, X, a := var("a", 4, 2)), add(X, X, b := var("b", 4, 2))]
    cat = zt.ir.Eqn(aten.cat.default, ([a, X],), (var("c", 8, 2),))
    where = zt.ir.Eqn(aten.clamp.Tensor, (X,), (d := var("d", 4, 2),), {"min": b})
    kept = [*eqns, cat, where]
    assert dce(graph([X], kept, [cat.outs[0], d])).eqns == tuple(kept)
    assert cat.ins == (a, X) and where.ins == (X, b)


def test_substitute_and_variables_visit_every_argument():
    x, y = var("x"), var("y")
    tree = [x, (2, x), {"k": [y, None, 1.5]}, torch.float32, "x"]
    assert list(variables(tree)) == [x, x, y]
    names = substitute(tree, lambda v: v.name.upper())
    assert names == ["X", (2, "X"), {"k": ["Y", None, 1.5]}, torch.float32, "x"]


def test_an_equation_that_reads_the_same_values_stays_itself():
    x, y = var("x", 4, 2), var("y", 4, 2)
    clamp = zt.ir.Eqn(aten.clamp.Tensor, ([x], 2), (OUT,), {"min": y, "max": None})
    assert clamp.with_inputs(lambda v: v) is clamp
    assert clamp.with_inputs(lambda v: x).ins == (x, x)
    assert clamp.with_inputs(lambda v: v, region="backward").region == "backward"


def test_rename_follows_chains_in_arguments_keywords_and_outputs():
    a, b, c = (var(n, 4, 2) for n in "abc")
    clamp = zt.ir.Eqn(aten.clamp.Tensor, ([a],), (OUT,), {"min": b})
    renamed = rename(graph([c], [clamp], [a, 1]), {a: b, b: c})
    assert renamed.eqns[0].ins == (c, c)
    assert renamed.outputs == (c, 1)


def test_fresh_names_are_unique():
    names = Names(["mm", "mm_1"])
    assert [names.fresh(n) for n in ("mm", "mm", "add", "add", "mm_1", "add")] == [
        "mm_2", "mm_3", "add", "add_1", "mm_1_1", "add_2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "v, text",
    [
        (var("x"), "f32[]"),
        (var("x", 0, 3, dtype=torch.int64), "i64[0,3]"),
        (var("x", 32, 16, layout=DP), "f32[32@dp,16]"),
        (
            var("x", 32, 16, layout=(Split("tp", 1), Split("dp", 0)), dtype=torch.bfloat16),
            "bf16[32@dp,16@tp]",
        ),
        (var("x", layout=(Partial("dp", "sum"),)), "f32[]{sum@dp}"),
        (var("x", 8, layout=(Split("dp"), Partial("host", "norm2.0"))), "f32[8@dp]{norm2.0@host}"),
        (var("x", 4, 16, future=True), "f32[4,16]!"),
        (var("x", 2, dtype=torch.bool), "bool[2]"),
        (var("x", 2, dtype=torch.float8_e5m2), "f8e5m2[2]"),
        (var("x", 2, dtype=torch.uint16), "torch.uint16[2]"),
    ],
)
def test_a_type_prints(v, text):
    assert v.type == text
    assert repr(v) == f"x: {text}"


def test_views_casts_and_random_draws_are_recognised():
    view = zt.ir.Eqn(aten.t.default, (X,), (OUT,))
    cast = zt.ir.Eqn(aten._to_copy.default, (X,), (OUT,), {"dtype": torch.bfloat16})
    assert is_view(view) and not is_view(cast) and is_view_or_cast(cast) and is_view_or_cast(view)
    assert not is_view(zt.ir.Eqn(aten.add_.Tensor, (X, X), (OUT,))) and not is_view_or_cast(USE)
    assert not is_view(START) and not is_random(USE)
    assert is_random(zt.ir.Eqn(aten.bernoulli.p, (X, 0.5), (OUT,)))


FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "is_draw"),
    [
        (FLASH, (X, X, X), {}, False),
        (FLASH, (X, X, X, 0.0, True), {}, False),
        (FLASH, (X, X, X, 0.1), {}, True),
        (EFFICIENT, (X, X, X, None, True), {}, False),
        (EFFICIENT, (X, X, X, None, True), {"dropout_p": 0.5}, True),
        (EFFICIENT, (X, X, X, None, True, X), {}, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (X, X, X), {}, False),
        (aten._scaled_dot_product_cudnn_attention.default, (X, X, X, None, True), {}, False),
        (aten._flash_attention_forward.default, (X, X, X, X, X, 8, 8, 0.0), {}, False),
        (aten.native_dropout.default, (X, 0.0, True), {}, True),
    ],
)
def test_attention_draws_only_with_dropout(op, args, kwargs, is_draw):
    """A probability that is not a literal zero counts as dropout."""
    assert is_random(zt.ir.Eqn(op, args, (OUT,), kwargs)) == is_draw


def test_two_limits_of_one_step_are_refused():
    """Transforms that ask for memory mean the same limit."""
    program = graph([X], [add(X, X, OUT)], [OUT]).with_memory_limit(100, "prefetch")
    same = program.with_memory_limit(100, "remat")
    assert (same.hints.memory_limit, same.hints.limit_option) == (100, "prefetch(memory=100)")
    with pytest.raises(ValueError) as caught:
        program.with_memory_limit(200, "remat")
    assert str(caught.value) == (
        "remat: remat(memory=200) and prefetch(memory=100) are two limits of one step.\n"
        "Give both the same limit, or leave one of them out."
    )


def test_users_and_producers_of_a_variable():
    assert users(graph([X], [twice := add(X, X, OUT)], [OUT])) == {X: [twice]}
    assert (
        producers([twice, zt.ir.Eqn(aten.var_mean.correction, (X,), (None, OUT))])[OUT].outs[0]
        is None
    )


def test_the_text_of_a_program():
    scatter = reduce(
        [FULL], ["g"], "dp", "mean", Split("dp"), torch.bfloat16, provenance=WHY, region="backward"
    )
    norm = zt.ir.Eqn(aten.linalg_vector_norm.default, (X,), (n := var("n"),), region="update")
    sums = reduce([n], ["s"], "dp", "sum", None, provenance=WHY, region="update")
    eqns = [
        START,
        END,
        scatter,
        g := wait(scatter.outs[0], region="backward"),
        norm,
        sums,
        s := wait(sums.outs[0]),
    ]
    text = str(
        graph(
            [W, X], eqns, [g.outs[0], s.outs[0], 3], 1, transforms=("prefetch()", "shard_params()")
        )
    )
    assert text.splitlines() == [
        "# f   mesh: dp=2   shard_params() > prefetch()",
        "def f(",
        "    w: f32[4@dp,2],",
        "    x: f32[4,2],",
        "):",
        "  # forward",
        "  w.full': f32[4,2]! = all_gather([w], axis=dp)",
        "  w.full: f32[4,2] = wait(w.full')",
        "  g': f32[4@dp,2]! = reduce_scatter([w.full], mean, bf16, axis=dp)",
        "  g: f32[4@dp,2] = wait(g')",
        "  # update",
        "  n: f32[] = norm(x)",
        "  s': f32[]! = all_reduce([n], sum, axis=dp)",
        "  s: f32[] = wait(s')",
        "  return g, s, 3",
    ]


def test_the_text_of_an_equation():
    line = Source("/home/me/train.py", 12, "loss")
    cast = zt.ir.Eqn(
        aten._to_copy.default,
        (X,),
        (var("y", 4, 2, dtype=torch.bfloat16),),
        {"dtype": torch.bfloat16},
    )
    assert equation(cast) == "y: bf16[4,2] = cast(x, bf16)"
    (shown,) = lines(cast.replace(source=line))
    assert shown == f"{'  y: bf16[4,2] = cast(x, bf16)':<90}# train.py:12 loss"
    mixed = zt.ir.Eqn(
        aten.full.default,
        ([2], torch.tensor([1.0, 2.0])),
        (None, OUT),
        {"device": "cpu", "pin": None},
    )
    assert equation(mixed) == "_, out: f32[4,2] = full([2], tensor([1.0, 2.0]))"
    assert (
        equation(zt.ir.Eqn(SHARD, (X, 0), (OUT,), {"axis": "dp"}))
        == "out: f32[4,2] = shard(x, 0, axis=dp)"
    )
    assert [op_name(op) for op in (aten.linalg_vector_norm.default, GRADIENT, ALL_REDUCE)] == [
        "norm", "gradient", "all_reduce",
    ]  # fmt: skip
    assert (ALL_GATHER.name, repr(REDUCE_SCATTER)) == ("all_gather", "reduce_scatter")


def test_diff_shows_what_changed():
    before, after = graph([W, X], [START, END, USE], [OUT]), graph([W, X], [START, END], [FULL])
    assert zt.ir.diff(before, after).splitlines() == [
        "# equations: 1 removed",
        "#   dp param: 1 collective of 1 value, 16 B",
        "@@ -8,3 +8,2 @@",
        "   w.full: f32[4,2] = wait(w.full')",
        "-  out: f32[4,2] = add(w.full, x)",
        "-  return out",
        "+  return w.full",
    ]
    assert zt.ir.diff(before, before) == ""


def test_user_source_is_this_line():
    here = user_source()
    assert (here.function, str(here).split(":")[0]) == (
        "test_user_source_is_this_line",
        "test_graph.py",
    )
    assert (lambda: user_source())().function == "test_user_source_is_this_line"
