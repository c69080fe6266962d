"""A timeline, or two side by side, as text, as an HTML page, as a picture and as a trace for Perfetto."""

import dataclasses
import json
import re

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.pages import changes, data_of
from ztrans.ir.graph import Eqn, Provenance, Var
from ztrans.planning.cluster import Device, Link
from ztrans.report.event import COMPUTE, Event
from ztrans.report.page import page

MACHINE = zt.cluster(Device("machine", (("f32", 1e9),), 1e9, 1e-5), dp=Link("wire", 1e-3, 1e6))


def step(state, x):
    def loss(params):
        return torch.relu(x @ params["up"] @ params["down"]).square().mean()

    grads, value = grad_and_value(loss)(state)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


def lowered(*transforms):
    chained = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *transforms)(step)
    return chained.lower(
        {"up": torch.zeros(16, 32), "down": torch.zeros(32, 16)},
        torch.zeros(4, 16),
        cluster=MACHINE,
    )


@pytest.fixture(scope="module")
def simulated() -> zt.Timeline:
    return lowered(zt.overlap_grads(), zt.prefetch()).timeline()


@pytest.fixture(scope="module")
def measured(simulated) -> zt.Timeline:
    """A stand-in for a measured timeline: everything takes twice as long, and there is no bound."""
    events = tuple(
        dataclasses.replace(e, start=2 * e.start, seconds=2 * e.seconds, stall=2 * e.stall)
        for e in simulated.events
    )
    curve = tuple((2 * at, live) for at, live in simulated.memory)
    return zt.Timeline("step, measured", 2 * simulated.seconds, events, curve)


def by_hand() -> zt.Timeline:
    """A timeline of three operations and a message. The last operation waits for the message."""
    x, y, f = (Var(name, torch.float32, (4,), future=name == "f'") for name in ("x", "y", "f'"))
    ops = [
        Eqn(torch.ops.aten.relu.default, (x,), (y,), region=region)
        for region in ("forward", "backward", "update")
    ]
    start = Eqn(torch.ops.aten.neg.default, (x,), (f,), provenance=Provenance("grad", ("w",), "dp"))
    bars = [Event(COMPUTE, at, 1.0, e) for at, e in zip((0.0, 1.0, 4.0), ops)]
    message = Event("dp reduce", 1.5, 2.5, start, stall=2.0, bytes=3 << 20)
    return zt.Timeline(
        "f, simulated", 5.0, (*bars, message), ((0.0, 100), (1.0, 300), (4.0, 200)), (4.0, "wire")
    )


def test_the_figures_of_a_timeline():
    t = by_hand()
    assert t.lanes == [COMPUTE, "dp reduce"] and t.busy("dp reduce") == 2.5
    assert (t.compute, t.stalled, t.peak, t.exposed) == (3.0, 2.0, 300, {("dp", "grad"): 2.0})
    assert t.compute + t.stalled == t.seconds


def test_the_text_of_a_timeline():
    assert str(by_hand()) == (
        "f, simulated: 5.00 s\n"
        "compute      3.00 s  60.0%  3 operations\n"
        "dp reduce    2.50 s  50.0%  1 messages, 3.00 MiB\n"
        "exposed      2.00 s  40.0%\n"
        "  dp grad    2.00 s  40.0%\n"
        "bound        4.00 s  80.0%  wire binds: 1.25x\n"
        "peak memory   300 B         at 1.00 s\n"
        "worst stalls\n"
        "  f = neg  2.00 s  40.0%"
    )


def test_a_timeline_prints_as_a_table(simulated, golden):
    assert str(simulated) == golden


def test_two_timelines_print_side_by_side(simulated, measured, golden):
    assert str(simulated.compare(measured)) == golden


def test_two_timelines_have_a_ratio_in_every_row(simulated, measured):
    head, *rest = str(simulated.compare(measured)).splitlines()
    assert head.split() == ["simulated", "measured", "ratio"]
    rows = {row.strip().split("  ")[0]: row.split() for row in rest}
    for name in ("step", "compute", "dp gather", "dp reduce", "exposed", "dp grad", "dp param"):
        assert rows[name][-1] == "2.00", name
    assert rows["peak memory"][-1] == "1.00"
    alone = dataclasses.replace(
        measured, events=tuple(e for e in measured.events if e.lane != "dp gather")
    )
    (row,) = (
        row for row in str(simulated.compare(alone)).splitlines() if row.startswith("dp gather")
    )
    assert row.split()[-2:] == ["-", "-"], "only one timeline has this lane"


def test_a_page_holds_lanes_memory_and_the_users_lines(simulated, measured, tmp_path):
    simulated.compare(measured).save(tmp_path / "step.html")
    html = (tmp_path / "step.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import|fetch\(", html), (
        "the page loads nothing from elsewhere"
    )
    data = data_of(html)
    assert [t["name"] for t in data["timelines"]] == ["step, simulated", "step, measured"]
    assert data["table"] == str(simulated.compare(measured))
    for shown, t in zip(data["timelines"], (simulated, measured)):
        assert shown["lanes"] == t.lanes == [COMPUTE, "dp gather", "dp reduce"]
        (device,) = shown["memories"]
        assert device["points"] == [[round(at * 1e6, 3), live] for at, live in changes(t.memory)]
        assert device["peak"] == t.peak and shown["limit"] is None
        assert len(shown["bars"]) == len(t.events) and shown["table"] == str(t)
        assert all(
            0 <= bar[0] < 3 and min(bar[1:4]) >= 0 and bar[1] + bar[2] <= t.seconds * 1e6 + 1e-2
            for bar in shown["bars"]
        )
        texts = [[data["texts"][i] for i in bar[6:]] for bar in shown["bars"]]
        assert any(re.fullmatch(r"test_timeline\.py:\d+ step\.loss", line) for _, _, line in texts)
        assert [title for title, _, _ in texts if title.startswith("up.full =")] == [
            "up.full = all_gather"
        ] or any("all_gather" in title for title, _, _ in texts)
    assert data_of(page([simulated]))["table"] == str(simulated)


@pytest.mark.parametrize("text", ["</script><b>", "<!--<script>", "<!-- & -->"])
def test_a_page_escapes_the_names_that_it_shows(text):
    """A name must not close the script, or open a script or a comment that swallows the rest of the page."""
    t = by_hand()
    name = dataclasses.replace(t.events[0].eqn.outs[0], name=text)
    odd = dataclasses.replace(t.events[0], eqn=t.events[0].eqn.replace(outs=(name,)))
    html, plain = page([dataclasses.replace(t, events=(odd, *t.events[1:]))]), page([t])
    assert html.count("<") == plain.count("<"), "names are packed with the other data"
    assert any(text in shown for shown in data_of(html)["texts"])


def test_a_perfetto_trace_is_in_order(simulated, measured, tmp_path):
    simulated.compare(measured).to_perfetto(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "s", "f", "C"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["step, simulated", "step, measured"]
    lanes: dict = {}
    for e in events:
        assert e.get("ts", 0) >= 0 and e.get("dur", 0) >= 0
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"]))
    assert len(lanes) == 2 * 3
    for bars in lanes.values():
        for (a, long), (b, _) in zip(sorted(bars), sorted(bars)[1:]):
            assert a + long <= b + 1e-3, "bars of a lane do not overlap"
    at = [e.get("ts", -1.0) for e in events]
    assert at == sorted(at), "names first, then events in order of time"
    arrows = {ph: {e["id"]: e["ts"] for e in events if e["ph"] == ph} for ph in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() and all(
        arrows["s"][k] <= arrows["f"][k] for k in arrows["s"]
    )
    live = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(live) == simulated.peak
    stalls = sum(e["dur"] for e in events if e["name"] == "stall" and e["pid"] == 1)
    assert stalls == pytest.approx(simulated.stalled * 1e6)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_timeline_is_saved_as_a_picture(simulated, measured, ending, tmp_path):
    pytest.importorskip("matplotlib")
    simulated.compare(measured).save(tmp_path / f"step{ending}")
    drawn = (tmp_path / f"step{ending}").read_bytes()
    assert drawn.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending])
    if ending == ".svg":
        words = {
            "step, simulated",
            "step, measured",
            "compute",
            "dp gather",
            "dp reduce",
            "memory",
            "compute stands still",
        }
        assert {w for w in words if f">{w}<" in drawn.decode()} == words


@pytest.mark.parametrize(("limit", "is_drawn"), [(400, True), (600, True), (601, False)])
def test_a_picture_has_its_time_axis_and_a_limit_that_is_near_the_peak(tmp_path, limit, is_drawn):
    """Below a limit of more than twice the peak, which is 300 bytes, the curve would be flat."""
    pytest.importorskip("matplotlib")
    dataclasses.replace(by_hand(), limit=limit).save(tmp_path / "step.svg")
    drawn = (tmp_path / "step.svg").read_text()
    texts = re.findall("<text[^>]*>([^<]*)<", drawn)
    assert {"0", "1000", "5000", "ms", "peak 300 B"} <= {*texts}
    assert (f"limit {limit} B" in texts) == is_drawn


def test_an_unknown_file_ending_is_refused(simulated, tmp_path):
    with pytest.raises(ValueError) as caught:
        simulated.save(tmp_path / "step.gif")
    assert (
        str(caught.value)
        == f"save: {str(tmp_path / 'step.gif')!r} does not end in one of .html, .png, .svg, .pdf."
    )


def test_a_timeline_has_the_lower_bound_of_its_plan(simulated):
    least, binds = simulated.bound
    assert 0 < least <= simulated.seconds and binds == "wire"
    # Each of six messages has a latency of a millisecond, and two can overlap, as there are two lanes.
    assert least > 3e-3 and lowered().timeline().bound is None, (
        "a program without schedules is not planned"
    )
