"""The printer: lines fit a screen, and buckets and long differences fold."""

import re
import sys

import pytest
import torch

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import all_gather
from ztrans.ir.graph import Eqn, Graph, Provenance, Split, Var
from ztrans.ir.printer import WIDTH, equation, fold, lines, program
from ztrans.ir.source import Source
from ztrans.ir.wire_traffic import wire_traffic

aten = torch.ops.aten
LONG = "params.model.layers.17.self_attention.query_key_value_projection.weight"
SOURCE = Source(
    "/home/me/modeling_something_with_a_long_name.py",
    1252,
    "Attention.forward.scaled_dot_product.inner",
)


def gathers(count: int, prefix: str = "params.blocks.0.w", source: Source | None = SOURCE) -> Eqn:
    """One bucket of `count` parameters of 1 KiB each."""
    members = [Var(f"{prefix}{i}", torch.float32, (16, 16), (Split("dp"),)) for i in range(count)]
    names = [f"{v.name}.full" for v in members]
    return all_gather(
        members, names, "dp", provenance=Provenance("param", tuple(names), "dp"), source=source
    )


def of(*eqns: Eqn, **fields) -> Graph:
    inputs = tuple(dict.fromkeys(v for e in eqns for v in e.ins if not v.future))
    return Graph("f", inputs, eqns, (*inputs, inputs[0]), len(inputs), mesh=(("dp", 2),), **fields)


def odd_equations() -> list[Eqn]:
    """Equations that are hard to print: long names, many results, arguments and dims, and no spaces to break at."""
    x, y = (
        Var(LONG, torch.bfloat16, (4096, 11008)),
        Var("w" * 300, torch.float32, tuple(range(1000, 1040))),
    )
    parts = tuple(Var(f"split.{i}", torch.float32, (4,)) for i in range(64))
    return [
        gathers(27),
        gathers(2, LONG),
        gathers(40, source=None),
        gathers(3, "v" * 200),
        Eqn(aten.relu.default, (x,), (y,), source=SOURCE),
        Eqn(aten.relu.default, (y,), (y,)),
        Eqn(aten.split_with_sizes.default, (x, [4] * 64), parts, source=SOURCE),
        Eqn(aten.cat.default, (list(parts),), (x,), source=SOURCE),
        Eqn(
            aten.add.Tensor,
            (x, torch.full((8,), 1 / 3)),
            (Var(f"{LONG}.again", torch.bfloat16, x.shape),),
            source=SOURCE,
        ),
        Eqn(
            aten.native_layer_norm.default,
            (x, [16], x, x, 1e-05),
            (Var(f"{LONG}.0", x.dtype, x.shape), None, None),
            source=SOURCE,
        ),
    ]


@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
@pytest.mark.parametrize("eqn", odd_equations(), ids=lambda e: f"{e.op}-{len(e.outs)}")
def test_every_line_fits(eqn, full):
    shown = lines(eqn, full)
    assert max(map(len, shown)) <= WIDTH < 120
    assert shown[0].startswith("  ") and not any(line.endswith(" ") for line in shown)
    if eqn.source:
        assert re.search(r"  # modeling_something\S*:?.*inner$", shown[0]), (
            "the first line ends with the user's line"
        )


@pytest.mark.parametrize("eqn", odd_equations(), ids=lambda e: f"{e.op}-{len(e.outs)}")
def test_the_full_form_leaves_nothing_out(eqn):
    """Apart from line breaks and trailing commas, the full form is the canonical text."""
    squeeze = lambda text: re.sub(r"\s|,(?=\s*\])", "", text)
    first, *rest = lines(eqn, full=True)
    assert squeeze(
        "".join([first.rpartition("  # ")[0] or first if eqn.source else first, *rest])
    ) == squeeze(equation(eqn))


def test_a_bucket_folds():
    assert lines(gathers(27, source=Source("net.py", 11, "loss"))) == [
        f"{chr(32)} params.blocks.0.w0.full': f32[16,16]!, ... 26 more".ljust(90)
        + "# net.py:11 loss",
        "    = all_gather([params.blocks.0.w0, ... 26 more: 27.00 KiB], axis=dp)",
    ]
    assert lines(gathers(2, "w", source=None)) == [
        "  w0.full': f32[16,16]!, w1.full': f32[16,16]! = all_gather([w0, w1], axis=dp)"
    ], "a bucket that fits does not fold"
    half = gathers(27, source=None)
    half = half.replace(kwargs={**half.kwargs, "dtype": torch.bfloat16})
    assert "... 26 more: 13.50 KiB], bf16, axis=dp)" in lines(half)[-1], (
        "the bytes are those on the wire"
    )
    assert fold(["a"]) == "a"


def test_the_full_form_of_a_bucket_has_a_line_for_each_member():
    shown = lines(gathers(27), full=True)
    assert len(shown) == 27 + 1 + 27 + 1
    assert (
        shown[1] == "  params.blocks.0.w1.full': f32[16,16]!,"
        and shown[26] == "  params.blocks.0.w26.full': f32[16,16]!"
    )
    assert (
        shown[27:29] == ["    = all_gather([", "        params.blocks.0.w0,"]
        and shown[-1] == "    ], axis=dp)"
    )


@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
def test_every_line_of_a_program_fits(full):
    transforms = tuple(f"shard_params(axis='dp', stage={n})" for n in range(9))
    text = program(of(*odd_equations(), transforms=transforms), full)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(line.startswith("#") for line in text.partition("def f(")[0].splitlines())
    assert ("return (" in text) == full


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "clipped", "accumulation", "sam"])
def test_real_programs_fit(name):
    lowered = on_ranks(CASES[name], 4, zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)
    graphs = [graph for _, graph in lowered.history[1:]]
    for text in [*map(str, graphs), *(program(graph, full=True) for graph in graphs)]:
        assert max(map(len, text.splitlines())) <= WIDTH
    members = {v.name for e in lowered.graph.eqns for v in e.ins}
    assert members <= set(re.findall(r"[\w.']+", lowered.as_text(full=True)))
    assert (
        lowered.as_text() == str(lowered)
        and max(map(len, lowered.plan.as_text().splitlines()[:-1])) <= 120
    )


def numbered(count: int, op=aten.relu.default) -> list[Eqn]:
    x = Var("x", torch.float32, (4,))
    return [Eqn(op, (x,), (Var(f"y{i}", torch.float32, (4,)),)) for i in range(count)]


def test_a_difference_starts_with_a_summary():
    eqns = numbered(6)
    negated = eqns[3].replace(op=aten.neg.default)
    text = zt.ir.diff(
        of(*eqns[:4], gathers(2)), of(eqns[2], eqns[0], eqns[1], negated, eqns[4], gathers(1))
    )
    assert text.splitlines()[:2] == [
        "# equations: 1 moved, 1 rewritten, 2 added, 1 removed",
        "#   dp param: 1 collective of 2 values, 1.00 KiB -> 1 collective of 1 value, 512 B",
    ]


def test_long_differences_fold():
    before, after = of(*numbered(100)), of(*numbered(100, aten.neg.default))
    short, full = (
        zt.ir.diff(before, after).splitlines(),
        zt.ir.diff(before, after, full=True).splitlines(),
    )
    assert len([line for line in full if line.startswith("-")]) == 100 and len(short) < 30
    assert "-  ... 92 more" in short and "+  ... 92 more" in short
    every = of(
        *(e.replace(op=aten.neg.default) if i % 4 == 0 else e for i, e in enumerate(numbered(200)))
    )
    short, full = (
        zt.ir.diff(of(*numbered(200)), every, full=full).splitlines() for full in (False, True)
    )
    assert (
        short[-1] == "... 26 more places, with full=True"
        and sum(line.startswith("@@") for line in full) == 50
    )


def test_buckets_that_fold_to_one_text_differ_in_a_difference():
    """The first member and the number of members are equal; the last member differs."""
    first = gathers(9)
    last = Var("params.other", torch.float32, (16, 16), (Split("dp"),))
    second = first.replace(args=([*first.args[0][:-1], last],))
    assert lines(first) == lines(second) and equation(first) != equation(second)
    text = zt.ir.diff(of(first), of(second))
    assert "-        params.blocks.0.w8," in text and "+        params.other," in text


def test_equal_programs_have_no_difference():
    lowered = lower(zt.overlap_grads())
    assert zt.ir.diff(lowered, lowered.graph) == "" == zt.ir.diff(lowered, lowered, full=True)


def test_diff_refuses_arguments_that_are_no_programs():
    graph = of(*numbered(1))
    for wrong in ("a program", zt.Plan("0"), 3):
        with pytest.raises(
            TypeError,
            match=f"diff: got a {type(wrong).__name__}; it compares programs: Graph, Traced",
        ):
            zt.ir.diff(graph, wrong)


def test_traffic_and_cost_analysis_count_the_same_bytes():
    lowered = lower(zt.overlap_grads(), zt.prefetch())
    sent = wire_traffic(lowered.graph)
    assert {key: total.bytes for key, total in sent.items()} == dict(lowered.cost_analysis().wire)
    gathers = str(sent["dp", "param"])
    assert gathers in str(lowered.plan) and gathers.startswith("1 collective of 2 values")


@pytest.mark.slow
def test_a_notebook_needs_no_optional_package():
    """Timelines are drawn in a notebook with the standard library alone."""
    import subprocess

    script = (
        "import sys; blocked = {'IPython', 'matplotlib', 'rich', 'plotly', 'jinja2'}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from tests.support.net import lower\n"
        "lowered = lower()\n"
        "assert '<iframe' in lowered.timeline()._repr_html_()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_short_reprs_are_one_short_line():
    lowered = on_ranks(CASES["gpt_adam"], 4, zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)
    traced = zt.chain(zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)(CASES["gpt_adam"].step)
    args = CASES["gpt_adam"].state(), *CASES["gpt_adam"].batch(4)
    stages = [
        lowered,
        lowered.graph,
        lowered.plan,
        lowered.memory_analysis(),
        lowered.cost_analysis(),
        lowered.timeline(),
        traced,
        traced.trace(*args),
        zt.Step.of(CASES["gpt_adam"].step).lower(*args).compile(),
    ]
    for stage in stages:
        assert len(repr(stage).splitlines()) == 1 and len(repr(stage)) < 200, repr(stage)
        assert repr(stage).startswith(f"{type(stage).__name__}("), repr(stage)
    assert re.fullmatch(
        r"Memory\(peak [\d.]+ KiB, state [\d.]+ KiB, \d+ equations\)", repr(stages[3])
    )
    assert re.fullmatch(
        r"Plan\(\w{16}, \d+ gather buckets, \d+ reduction buckets(, \d+ kept)?, update='\w+'\)",
        repr(stages[2]),
    )


def test_long_literals_with_other_elements_print_differently():
    def step(values):
        return lambda state, x: (state, x * torch.tensor(values))

    state, x = {"w": torch.ones(1)}, torch.ones(9)
    first, second, third = (
        zt.Step.of(step(v)).lower(state, x).graph for v in ([1.0] * 9, [1.0] * 8 + [2.0], [1.0] * 9)
    )
    assert str(first) == str(third) != str(second)
    assert "tensor(<(9,)>, " in str(first)
