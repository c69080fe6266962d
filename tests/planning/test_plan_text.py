"""The text of a plan starts with a summary, and long lists fold. Printing does not affect the fingerprint."""

import torch

import ztrans as zt
from ztrans.ir.collectives import all_gather, wait
from ztrans.ir.differences import Traffic
from ztrans.ir.graph import Graph, Provenance, Split, Var
from ztrans.ir.printer import WIDTH
from ztrans.planning.fingerprint import fingerprint

NAMES = tuple(
    f"params.model.layers.{i}.self_attention.query_key_value.weight.grad'" for i in range(27)
)
LONG = zt.Plan(
    "0123456789abcdef",
    gathers=tuple(((f"w{i}.full'",), f"mm_{i}") for i in range(40)),
    reductions=((NAMES, ""), (("b.grad'", "c.grad'"), "add_3")),
    dropped=tuple(f"w{i}.full_1'" for i in range(40)),
    notes=("the peak is 3.00 MiB",),
    traffic=((("dp", "param"), Traffic(40, 40, 40 << 20)), (("dp", "grad"), Traffic(1, 1, 512))),
)


def test_a_plan_begins_with_a_summary():
    lines = str(LONG).splitlines()
    assert lines[:4] == [
        f"plan {LONG.digest} for program 0123456789abcdef, update eager",
        "  40 gathers in 40 buckets, 29 reductions in 2 buckets, 40 gathers dropped",
        "  dp param: 40 collectives of 40 values, 40.00 MiB",
        "  dp grad: 1 collective of 1 value, 512 B",
    ]
    assert str(zt.Plan("0")).splitlines()[1:] == [], "an empty plan has no counts"


def test_a_long_plan_folds():
    lines = str(LONG).splitlines()
    assert lines[4:] == [
        *(f"  gather [w{i}.full]  starts before mm_{i}" for i in range(6)),
        "  ... 34 more, by as_text(full=True)",
        f"  reduce [{NAMES[0][:-1]}, ... 26 more]  waited for before the end",
        "  reduce [b.grad, c.grad]  waited for before add_3",
        "  kept from forward, not gathered again: w0.full_1, ... 39 more",
        "  note: the peak is 3.00 MiB",
    ]
    assert max(map(len, lines)) <= WIDTH


def test_the_full_text_of_a_plan_names_every_member():
    text = LONG.as_text(full=True)
    assert max(map(len, text.splitlines())) <= WIDTH and "..." not in text
    names = {name for members, _ in (*LONG.gathers, *LONG.reductions) for name in members} | set(
        LONG.dropped
    )
    assert all(text.count(f"{name.removesuffix(chr(39))}") for name in names)
    assert f"      {NAMES[26][:-1]},\n  ]  waited for before the end" in text


def test_the_traffic_of_a_plan_is_not_saved(tmp_path):
    """It is computed from the program when the plan is applied."""
    LONG.save(tmp_path / "plan")
    assert "traffic" not in (tmp_path / "plan").read_text()
    loaded = zt.Plan.load(tmp_path / "plan")
    assert loaded == LONG and loaded.digest == LONG.digest and not loaded.traffic


def test_printing_does_not_change_the_fingerprint():
    """A saved plan must stay valid if the printer changes. Every member of a bucket counts, also folded ones."""
    members = [
        Var(f"params.blocks.{i}.weight", torch.float32, (16, 16), (Split("dp"),)) for i in range(27)
    ]
    why = Provenance("param", ("w",), "dp")
    start = all_gather(members, [f"{v.name}.full" for v in members], "dp", provenance=why)
    waits = [wait(future) for future in start.outs]
    outputs = (*members, waits[0].outs[0])
    mesh, history = (("dp", 2),), ("shard_params()",)
    graph = Graph("step", tuple(members), (start, *waits), outputs, 27, mesh=mesh, history=history)
    assert "... 26 more" in str(graph) and fingerprint(graph) == "29a43af2e1e2fd81"
    last = Var("params.other", torch.float32, (16, 16), (Split("dp"),))
    changed = start.replace(args=([*members[:-1], last],))
    moved = graph.replace(eqns=(changed, *waits), inputs=(*members[:-1], last))
    assert fingerprint(moved) != fingerprint(graph)


def test_a_long_note_wraps():
    plan = zt.Plan("program", notes=("word " * 60,))
    lines = str(plan).splitlines()
    assert (
        lines[1].startswith("  note: word")
        and all(len(line) <= WIDTH for line in lines)
        and len(lines) == 4
    )
