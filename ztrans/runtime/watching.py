"""Watch over one rank of a mesh of GPUs, from another process, and end the rank when another one is lost.

On GPUs a lost rank ends all processes, with the text of the first error. A rank that waits for another one may be
inside a kernel, or inside a launch that holds the GIL, so no thread of the rank is certain to run. This process needs
only the id of the rank's process. `watch.Watcher` starts it, and sends it these lines:

    launched N      the host begins to launch step N
    ended N         the GPU has ended N steps
    failed TEXT     the rank has failed, and raises its own error
    lost TEXT       the host has lost its connection to another rank, and waits until its process is ended
    left            the program of the rank is about to end, and the GPU has ended all of its steps

The ranks meet in the store of torch.distributed, twice a second:

    any             there is something to read
    failure         the first failure: a rank and its text, with which every other rank ends
    left            the first rank whose program has ended, and the number of its steps
    number left     the number of programs that have ended

| who notices | what | what happens |
|---|---|---|
| the rank itself | an error in its step | it raises; its text is the failure |
| this process | the rank has ended without a report, for instance because it was killed | that is the failure |
| this process | its rank has launched a step after the last one of a rank that has left | that is the failure |
| this process | a step has not ended within nine tenths of the time-out | that is the failure |
| this process | the failure of another rank, or a store that is gone | the rank ends |
| this process | all ranks have left | nothing; this process ends |

This file runs as a script, so it imports nothing of ztrans: `import torch` takes seconds already.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

INTERVAL = 0.5  # seconds between two looks, each of which asks the store once
# The share of the time-out that a step may take. After the whole of it, PyTorch would end the process without a reason.
_TIMEOUT_SHARE = 0.9
_REPORT_TIMEOUT = 5.0  # seconds that a lost rank has to report why
_GRACE = 3.0  # seconds that the rank has to log the text, flush its output and end by itself
_STEPS_DIFFER = (
    "Every rank must take the same number of steps. If data ends earlier on some ranks, stop all ranks together, or "
    "drop the last batches: DistributedSampler(..., drop_last=True)"
)
_WITHOUT_A_WORD = (
    "has ended without a word: it was killed, perhaps for lack of memory, or called os._exit"
)
_STORE_GONE = "the process that holds the store of torch.distributed has ended"


class Store(Protocol):
    """The methods of a store of torch.distributed that this process uses."""

    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Watch:
    """What this process knows of its rank, and decides about it.

    Attributes:
        launched, ended: the number of steps that the rank has launched, and that its GPU has ended.
        last_line_at: when the rank has sent its last line.
        failure: how this rank has failed; empty if it has not.
        lost: the backend's text about a lost rank, and when it arrived; None if no rank is lost.
        has_left: whether the program of the rank is about to end.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float, now: float) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self.launched = 0
        self.ended = 0
        self.last_line_at = now
        self.failure = ""
        self.lost: tuple[str, float] | None = None
        self.has_left = False
        self._published: set[str] = set()  # the keys of the store that this process has set

    def hear(self, line: str, now: float) -> None:
        """Read a line of the rank."""
        self.last_line_at = now
        word, _, rest = line.partition(" ")
        if word == "launched":
            self.launched = int(rest)
        elif word == "ended":
            self.ended = int(rest)
        elif word == "failed":
            self.failure = json.loads(rest)
        elif word == "lost":
            self.lost = json.loads(rest), now
        elif word == "left":
            self.has_left = True

    def look(self, now: float, is_running: bool) -> str | None:
        """Decide why the rank must end: an empty text if it may go on, None if this process has nothing more to do."""
        if not is_running and not self.has_left and not self.failure:
            self.failure = _WITHOUT_A_WORD
        if self.failure:
            self._say_failure(self.failure)
            return "" if is_running else None  # the rank raises its own error
        if self.has_left:
            return self._look_after_leaving(is_running)
        problem = self._problem(now)
        if problem:
            self._say_failure(problem)
        if not self.store.check(["any"]) or not self.store.check(["failure"]):
            return ""
        rank, text = json.loads(self.store.get("failure"))
        return f"rank {rank} {text}."

    def _look_after_leaving(self, is_running: bool) -> str | None:
        """The decision, as `look` returns it, about a rank whose program is about to end."""
        if "left" not in self._published:
            self._published.add("left")
            self.store.compare_set("left", "", json.dumps([self.rank, self.launched]))
            self.store.set("any", "")
            self.store.add("number left", 1)
        all_have_left = self.store.add("number left", 0) == self.ranks
        if all_have_left or not is_running or self.store.check(["failure"]):
            return None
        return ""

    def _problem(self, now: float) -> str:
        """What is wrong with the rank: text that follows its name; empty if nothing is."""
        if self.lost is not None:
            text, lost_at = self.lost
            is_late = now - lost_at > _REPORT_TIMEOUT
            return f"has lost other ranks, which said nothing: {text}" if is_late else ""
        seconds = now - self.last_line_at
        if self.launched > self.ended and seconds > _TIMEOUT_SHARE * self.timeout:
            return (
                f"has waited {seconds:.0f} s for step {self.ended + 1} to end, nine tenths of the time-out of the "
                f"process group, and no rank said why: one may be stopped, or busy with something else"
            )
        if self.launched and self.store.check(["any"]) and self.store.check(["left"]):
            rank, steps = json.loads(self.store.get("left"))
            if self.launched > steps:
                return (
                    f"has launched step {self.launched}, and the program of rank {rank} has ended after step {steps}, "
                    f"by sys.exit or because its data has ended. {_STEPS_DIFFER}"
                )
        return ""

    def _say_failure(self, text: str) -> None:
        """Put a failure of the rank into the store, unless another one is there."""
        if "failure" not in self._published:
            self._published.add("failure")
            self.store.compare_set("failure", "", json.dumps([self.rank, text]))
            self.store.set("any", "")


def connect(place: dict[str, Any]) -> Store:
    """A connection of this process to the store that its rank has described."""
    import torch.distributed as dist

    store: dist.Store
    if "path" in place:
        store = dist.FileStore(place["path"], -1)
    else:
        store = dist.TCPStore(place["host"], place["port"], is_master=False, wait_for_workers=False)
    return dist.PrefixStore(place["key"], store)


def lines_within(seconds: float) -> Iterator[str]:
    """The lines that the rank sends. Waits for the first one, for at most `seconds`; none if the pipe is closed."""
    ready, _, _ = select.select([0], [], [], seconds)
    data = os.read(0, 1 << 16) if ready else b""
    if ready and not data:
        time.sleep(seconds)
    while data and not data.endswith(b"\n"):  # the pipe was full
        data += os.read(0, 1 << 16) or b"\n"
    yield from data.decode().rstrip("\n").split("\n") if data else ()


def end(process: int, text: str) -> None:
    """End the rank with this text. It ends by itself, or is killed if it does not, as when a launch holds the GIL."""
    os.write(1, text.encode())
    os.close(1)
    until = time.monotonic() + _GRACE
    while os.getppid() == process and time.monotonic() < until:
        time.sleep(0.05)
    if os.getppid() == process:
        print(text, file=sys.stderr, flush=True)
        os.kill(process, signal.SIGKILL)


def main() -> None:
    """Watch over the rank that the first argument describes, until it has ended."""
    place = json.loads(sys.argv[1])
    rank = place["rank"]
    try:
        watch = Watch(connect(place), rank, place["ranks"], place["timeout"], time.monotonic())
    except RuntimeError:
        watch = None
    while True:
        try:
            if watch is None:
                raise RuntimeError("no connection")
            for line in lines_within(INTERVAL):
                watch.hear(line, time.monotonic())
            cause = watch.look(time.monotonic(), os.getppid() == place["process"])
        except RuntimeError:  # of the store
            has_ended = watch is not None and (watch.has_left or watch.failure)
            cause = None if has_ended else f"{_STORE_GONE}."
        if cause is None:
            return
        if cause:
            text = (
                f"ztrans: rank {rank} ends, because the ranks of a mesh of GPUs end together: {cause}\n"
                f"Start them again from the last checkpoint, as torchrun --max-restarts does (docs/launch.md)."
            )
            end(place["process"], text)
            return


if __name__ == "__main__":
    main()
