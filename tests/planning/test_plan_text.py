"""The text of a plan starts with a summary, and long lists fold."""

import ztrans as zt
from ztrans.ir.printer import WIDTH
from ztrans.ir.wire_traffic import WireTraffic

NAMES = tuple(
    f"params.model.layers.{i}.self_attention.query_key_value.weight.grad" for i in range(27)
)
LONG = zt.Plan(
    "0123456789abcdef",
    gathers=tuple(((f"w{i}.full",), f"matmul {i}") for i in range(40)),
    reductions=((NAMES, "the end"), (("b.grad", "c.grad"), "gradient 3 + 2")),
    dropped=tuple(f"w{i}.full_1" for i in range(40)),
    notes=("the peak is 3.00 MiB",),
    traffic=(
        (("dp", "param"), WireTraffic(40, 40, 40 << 20)),
        (("dp", "grad"), WireTraffic(1, 1, 512)),
    ),
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
        *(f"  gather [w{i}.full]  starts at matmul {i}" for i in range(6)),
        "  ... 34 more, by as_text(full=True)",
        f"  reduce [{NAMES[0]}, ... 26 more]  waited for at the end",
        "  reduce [b.grad, c.grad]  waited for at gradient 3 + 2",
        "  kept from forward, not gathered again: w0.full_1, ... 39 more",
        "  note: the peak is 3.00 MiB",
    ]
    assert max(map(len, lines)) <= WIDTH


def test_the_full_text_of_a_plan_names_every_member():
    text = LONG.as_text(full=True)
    assert max(map(len, text.splitlines())) <= WIDTH and "..." not in text
    names = set(LONG.dropped)
    for members, _ in (*LONG.gathers, *LONG.reductions):
        names.update(members)
    assert all(name in text for name in names)
    assert f"      {NAMES[26]},\n  ]  waited for at the end" in text


def test_the_differences_of_two_plans_are_buckets_places_and_values():
    """Of many, the first ones are listed. Equal plans have none."""
    before = zt.Plan(
        "p", ((("a", "b"), "the start"), (("c",), "the start")), ((("g",), "the end"),)
    )
    after = zt.Plan(
        "p",
        ((("a", "b"), "matmul 1"),),
        ((("g",), "the end"),),
        ("c",),
        update="last",
        on_host=("h",),
    )
    assert before.diff(after).splitlines() == [
        "  gather [a, ... 1 more]  starts at matmul 1, not at the start",
        "- gather [c]  starts at the start",
        "+ kept from forward, not gathered again: c",
        "+ on the host until backward: h",
        "  update last, not eager",
    ]
    assert "- on the host until backward: h" in after.diff(before)
    assert before.diff(before) == ""
    lines = LONG.diff(zt.Plan("p")).splitlines()
    assert len(lines) == 12 and lines[-1] == "  ... 32 more changes"


def test_the_traffic_of_a_plan_is_not_saved(tmp_path):
    """It is computed from the program when the plan is applied."""
    LONG.save(tmp_path / "plan")
    assert "traffic" not in (tmp_path / "plan").read_text()
    loaded = zt.Plan.load(tmp_path / "plan")
    assert loaded == LONG and loaded.digest == LONG.digest and not loaded.traffic


def test_a_long_note_wraps():
    plan = zt.Plan("program", notes=("word " * 60,))
    lines = str(plan).splitlines()
    assert (
        lines[1].startswith("  note: word")
        and all(len(line) <= WIDTH for line in lines)
        and len(lines) == 4
    )
