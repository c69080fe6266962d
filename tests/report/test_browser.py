"""The page of a timeline in a browser: headless Chromium, where there is one. It draws itself, and answers the pointer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page import large, with_two_memories
from ztrans.report.page import page
from ztrans.report.palette import COLOURS
from ztrans.report.timeline import Timeline

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium-headless-shell"
)

# Stands before the page. Once the page is drawn, it moves the pointer to some points, and sends what it has seen.
PROBE = """
<script>
const failures = [];
addEventListener("error", event => failures.push(event.message));
addEventListener("unhandledrejection", event => failures.push(String(event.reason)));
const frame = () => new Promise(requestAnimationFrame);
async function watch(points) {
  const figures = document.querySelector("pre"), canvas = document.querySelector("canvas");
  while (!failures.length && !figures.textContent) await frame();
  await frame();
  const box = canvas.getBoundingClientRect(), pen = canvas.getContext("2d"), colours = new Set();
  const pixels = points.length ? pen.getImageData(0, 0, canvas.width, canvas.height).data : [];
  for (let i = 0; i < pixels.length; i += 4) {
    colours.add("#" + [0, 1, 2].map(k => pixels[i + k].toString(16).padStart(2, "0")).join(""));
  }
  const tips = points.map(([x, y]) => {
    const place = { clientX: box.left + 108 + x * (box.width - 124), clientY: box.top + y, bubbles: true };
    canvas.dispatchEvent(new PointerEvent("pointermove", place));
    return document.getElementById("tip").innerText;
  });
  const legend = [...document.querySelectorAll("#legend span")].map(entry => entry.textContent);
  const seen = { failures, legend, tips, colours: [...colours], title: document.title };
  await fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
}
addEventListener("DOMContentLoaded", () => watch(POINTS));
</script>
"""


def processor_seconds(group: int) -> float:
    """The processor time of a group of processes so far, which is the same on a busy machine."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def opened(timelines: list[Timeline], points: list[tuple[float, float]] = ()) -> dict[str, Any]:
    """What a browser sees on a page, after the pointer was at some points: a part of the width, and pixels from the top."""
    head = '<html lang="en">'
    body = (
        page(timelines).replace(head, head + PROBE.replace("POINTS", json.dumps(points))).encode()
    )
    seen: dict[str, Any] = {}
    is_seen = threading.Event()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body if self.path == "/" else b"")

        def do_POST(self) -> None:
            seen.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            is_seen.set()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
        address = f"http://127.0.0.1:{server.server_port}/"
        with subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-port=0", address],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as browser:
            try:
                assert is_seen.wait(120), "the browser has not answered"
                seen["seconds"] = processor_seconds(browser.pid)
            finally:
                browser.terminate()
                server.shutdown()
    return seen


def test_the_page_of_a_large_program_opens_in_a_second():
    """A page of three operations takes the time that the browser itself needs."""
    small = opened([with_two_memories()])
    seen = opened([large()])
    assert not small["failures"] and not seen["failures"]
    assert seen["seconds"] - small["seconds"] < 1.0
    assert seen["title"] == "large, simulated"
    assert {"forward", "backward", "param", "grad"} <= {*seen["legend"]}


def test_a_page_shows_recomputation_and_two_memories():
    timeline = with_two_memories()
    # In the middle of the recomputed operation, of the copy, and of the memory band.
    seen = opened([timeline], [(0.45, 50), (0.25, 90), (0.45, 200)])
    assert not seen["failures"]
    assert seen["legend"] == [
        "forward",
        "backward",
        "recomputed",
        "update",
        "grad",
        "offload",
        "compute stands still",
    ]
    operation, copy, memory = seen["tips"]
    assert operation.startswith("compute, recomputed") and "y.again: f32[4] = relu(x)" in operation
    assert copy.startswith("host out, offload") and "1.00 MiB" in copy
    assert memory.splitlines()[0].startswith("300") and "50 B on the host" in memory
    drawn = {*seen["colours"]}
    assert {COLOURS[kind][0] for kind in ("recomputed", "offload", "grad")} <= drawn
    assert "#b4553d" in drawn, "the limit"


def test_two_timelines_share_a_page():
    timeline = with_two_memories()
    seen = opened([timeline, timeline])
    assert not seen["failures"] and "f, simulated and f, simulated" in seen["title"]
