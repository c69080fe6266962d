"""The HTML page of a timeline: in a notebook, of a program of any size, with recomputation and a second memory."""

from __future__ import annotations

import dataclasses
import re
from html import unescape

import pytest
import torch

import ztrans as zt
from tests.report.test_timeline import by_hand
from tests.support.net import lower
from tests.support.pages import data_of
from ztrans.ir.graph import Eqn, Provenance, Region, Var
from ztrans.ir.source import Source
from ztrans.report.event import COMPUTE, Event
from ztrans.report.page import page
from ztrans.report.timeline import Timeline, one_by_one

SIMULATED = lower(zt.overlap_grads(), zt.prefetch()).timeline
MOST = 5_000_000  # bytes of a page
aten = torch.ops.aten


@pytest.mark.parametrize("count", [1, 2], ids=["a timeline", "two"])
def test_a_timeline_shows_in_a_notebook(count):
    """The page is in a sandboxed frame. Its script runs only there, and no text of the page can close the frame."""
    timelines = [SIMULATED() for _ in range(count)]
    cell = (timelines[0] if count == 1 else timelines[0].compare(timelines[1]))._repr_html_()
    attributes = re.fullmatch(r"<iframe ([^<>]*)></iframe>", cell)[1]
    assert 'sandbox="allow-scripts"' in attributes and attributes.count('"') == 2 * 3
    html = unescape(re.search(r'srcdoc="([^"]*)"', attributes)[1])
    assert html == page(timelines) and not re.search(r"(src|href)=|https?://|@import|fetch\(", html)


def large(layers: int = 80, operations: int = 420) -> Timeline:
    """A timeline of the size of Llama-3-70B: names and lines differ, and each layer has messages of nine members."""
    events: list[Event] = []
    memory: list[tuple[float, int]] = []
    now = 0.0

    def run(region: Region, layer: int, k: int) -> None:
        nonlocal now
        number = (layer * operations + k) * 7
        x, y = (
            Var(f"{name}_{number + i}", torch.bfloat16, (8192, 8192 + k))
            for i, name in enumerate(("mul", "add"))
        )
        line = Source("/home/me/model.py", 10 + k % 90, "Block.forward")
        seconds = (1 + number % 13) * 1e-5
        events.append(
            Event(COMPUTE, now, seconds, Eqn(aten.mm.default, (x, y), (y,), {}, region, line))
        )
        now += seconds
        memory.append((now, (10**9 + number * 999_983) % 10**10))

    def send(role: str, lane: str, layer: int) -> None:
        paths = tuple(f"params.layers.{layer}.block.weight_{m}" for m in range(9))
        members = [Var(path, torch.float32, (8192, 28672)) for path in paths]
        outs = tuple(
            Var(f"{path}.{role}'", torch.bfloat16, (8192, 28672), future=True) for path in paths
        )
        why = Provenance(role, paths, "dp")
        e = Eqn(aten.cat.default, (members,), outs, {}, "backward", None, None, why)
        events.append(Event(lane, now, 2e-3, e, stall=1e-4 * (layer % 2), bytes=10**9))

    for region in ("forward", "backward"):
        for layer in range(layers):
            send("param", "dp gather", layer)
            for k in range(operations // 2):
                run(region, layer, k)
            send("grad", "dp reduce", layer)
    return Timeline("large, simulated", now + 3e-3, tuple(events), tuple(memory), limit=11 * 10**9)


@pytest.mark.slow
def test_the_page_of_a_large_program_has_every_operation():
    timeline = large()
    html = page([timeline])
    assert len(timeline.events) > 33_000 and len(html) < MOST
    (shown,) = data_of(html)["timelines"]
    assert len(shown["bars"]) == len(timeline.events)
    assert shown["limit"] == 11 * 10**9 and shown["memories"][0]["peak"] == timeline.peak


@pytest.mark.slow
def test_operations_too_many_for_a_page_share_bars():
    """A page has at most fifty thousand bars, which take the time of all operations."""
    once = large(layers=10)
    timeline = one_by_one("large, simulated", [once] * 16)
    html = page([timeline])
    data = data_of(html)
    (shown,) = data["timelines"]
    assert len(timeline.events) > 60_000 and len(shown["bars"]) <= 50_000 and len(html) < MOST
    compute = [bar for bar in shown["bars"] if bar[0] == 0]
    assert sum(bar[2] for bar in compute) == pytest.approx(1e6 * timeline.compute, rel=1e-3)
    stalls = [bar[3] for bar in shown["bars"] if bar[3]]
    assert sum(stalls) == pytest.approx(1e6 * timeline.stalled), (
        "a message that is waited for is alone"
    )
    (device,) = shown["memories"]
    assert len(device["points"]) <= 50_000
    assert max(live for _, live in device["points"]) == device["peak"] == timeline.peak
    assert any(
        re.match(r"\d+ operations, the longest add_\d+ = mm", text) for text in data["texts"]
    )


def with_two_memories() -> Timeline:
    """A timeline with a recomputed operation, a copy to the host, the memory of the host, and a limit."""
    x, y, again = (Var(name, torch.float32, (4,)) for name in ("x", "y", "y.again"))
    relu = Eqn(aten.relu.default, (x,), (y,))
    repeated = relu.replace(outs=(again,), region="backward", repeats=relu)
    why = Provenance("offload", ("m",), "host")  # type: ignore[arg-type]
    future = Var("m'", torch.float32, (4,), future=True)
    copy = Eqn(aten.neg.default, (x,), (future,), provenance=why)
    plain = by_hand()
    events = Event(COMPUTE, 2.0, 0.5, repeated), Event("host out", 0.5, 2.0, copy, bytes=1 << 20)
    return dataclasses.replace(
        plain,
        events=(*plain.events, *events),
        other_memories={"host": ((0.0, 0), (0.5, 50), (1.0, 50), (2.5, 120))},
        limit=400,
    )


def test_recomputed_operations_and_copies_to_the_host_have_colours_of_their_own():
    timeline = with_two_memories()
    data = data_of(page([timeline]))
    used = [kind for kind, _, _, is_used in data["kinds"] if is_used]
    assert used == ["forward", "backward", "recomputed", "update", "grad", "offload"]
    assert len({light for _, light, _, _ in data["kinds"]}) == len(data["kinds"])
    (shown,) = data["timelines"]
    device, host = shown["memories"]
    assert (device["name"], host["name"]) == ("device", "host")
    assert host["points"] == [[0.0, 0], [5e5, 50], [2.5e6, 120]] and host["peak"] == 120
    assert ["offload", *host["colours"], True] in data["kinds"]
    assert shown["limit"] == 400
    rows = [" ".join(row.split()) for row in str(timeline).splitlines()]
    assert "peak memory 300 B 75.0% at 1.00 s, of 400 B" in rows
    assert "on the host 120 B" in rows
    assert "on the host" in str(timeline.compare(timeline)) and "on the host" not in str(by_hand())
