"""Ranks on one GPU as launches of their own, on streams of their own: messages through symmetric memory, as in a step.

In the one launch of `ranks.py`, all ranks begin together. Here each rank has streams for gathers and for reductions,
by a kernel and by copies, and pauses at random. So ranks are late by turns, and a message may overtake the one before
it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ztrans import ops
from ztrans.ops.all_gather import launch as gather
from ztrans.ops.reduce_scatter import launch as scatter
from ztrans.ops.symmetric import Symmetric, in_one_process
from ztrans.runtime.cuda.copies import exchange_by_copies, gather_by_copies

from .ranks import clean

RANKS = 4
CHANNELS = 16  # 4 ranks with 2 lanes of kernels have 128 blocks, and an H100 has room for 264
ROUNDS = 2000
CONTROL_ROUNDS = 200
REPLAYS = 1000
SIZES = (1 << 16, 72)  # elements of a rank's parts
SPINS = 1 << 20  # how often a rank looks for a signal before it gives up: about a second
MOST_CYCLES = 60_000  # of a pause: 30 us at 2 GHz
BF16 = torch.bfloat16
GATHERS, COPIES, SUMS, COPIED_SUMS = LANES = ("gathers", "copies", "sums", "copied sums")


def streams(device: torch.device, left: Callable[[], float] = lambda: 60.0) -> Iterator[list[dict]]:
    """4 ranks in one process. Each has a stream for gathers and one for reductions, by a kernel and by copies, and
    symmetric memory for each. It sends a message, which it overwrites with NaN when that has ended,
    then the next one, with random pauses in between. Every value that arrives is checked. Then the same from a CUDA
    graph for each stream. Kernels without barriers must be noticed.
    """
    # Streams beyond the number of connections share one, in which a kernel could wait behind one that waits for it.
    # CUDA loads a kernel when it is first launched, for which it may wait until others have ended.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    torch.cuda.set_device(device)
    ends = make_ends(RANKS, device)
    torch.cuda.synchronize(device)
    lanes = [torch.cuda.Stream(device, priority=-1) for _ in ends]
    for end, lane in zip(ends, lanes):
        with torch.cuda.stream(lane):
            end.warm_up()
    pauses = random.Random(0)

    def pause() -> None:
        torch.cuda._sleep(pauses.randrange(MOST_CYCLES))

    def played(send: Callable[[int], None], rounds: int) -> float:
        """Run some rounds, in each of which the ranks launch in another order. Returns the seconds of a round."""
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(rounds):
            for k in pauses.sample(range(len(ends)), len(ends)):
                with torch.cuda.stream(lanes[k]):
                    send(k)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / rounds

    lines = []
    seconds = played(lambda k: ends[k].send(pause), ROUNDS)
    lines.append(judged(f"{ROUNDS} messages on each stream", ends, seconds))
    yield lines
    graphs = [captured(end, lane, device) for end, lane in zip(ends, lanes)]

    def replay(k: int) -> None:
        pause()
        graphs[k].replay()

    seconds = played(replay, REPLAYS)
    lines.append(judged(f"{REPLAYS} replays of a graph on each stream", ends, seconds))
    yield lines
    played(lambda k: ends[k].send(pause, waits=False), CONTROL_ROUNDS)
    wrong = sum(end.wrong_values() for end in ends)
    key, text = ("result", "noticed") if wrong else ("failed", "not noticed")
    lines.append({"ranks": RANKS, "what": "wrong: kernels without barriers", key: text})
    yield lines


def judged(what: str, ends: Sequence[End], seconds: float) -> dict:
    """A line of the report.

    Raises: RuntimeError if a rank has waited in vain; AssertionError if a signal is left set.
    """
    for end in ends:
        end.memory.check()
    for lane in LANES:
        clean([end.memory for end in ends if end.lane == lane])
    wrong = sum(end.wrong_values() for end in ends)
    line = {"ranks": len(ends) // len(LANES), "what": what, "us": seconds * 1e6}
    key, text = ("failed", f"{wrong} wrong values") if wrong else ("result", "right")
    return line | {key: text}


def captured(end: End, lane: torch.cuda.Stream, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of one message of one rank."""
    graph = torch.cuda.CUDAGraph()
    with ops.filled_after_capture(device), torch.cuda.graph(graph, stream=lane):
        end.send(lambda: None)
    return graph


def make_ends(ranks: int, device: torch.device) -> list[End]:
    """The ends of all lanes on each rank."""
    ends = []
    for lane in LANES:
        # Copies of a reduction go through half of the memory, in rounds.
        nbytes = room(ranks) // 2 if lane == COPIED_SUMS else room(ranks)
        memories = in_one_process(ranks, nbytes, device)
        ends += [End(memory, lane) for memory in memories]
    return ends


def room(ranks: int) -> int:
    """The bytes that a rank sends in the larger of both messages."""
    return ranks * sum(SIZES) * BF16.itemsize


class End:
    """One rank's end of a lane. Each message has other values, and all ranks know those of the others.

    Rank r sends an integer of 0 to 96 by position, plus the number of the message, plus 11 r: at most 256, so bf16 has
    all of them exactly.
    """

    def __init__(self, memory: Symmetric, lane: str) -> None:
        self.memory = memory
        self.lane = lane
        self.sizes = [sum(SIZES)] if lane == COPIES else list(SIZES)
        self.is_sum = lane in (SUMS, COPIED_SUMS)
        ranks = memory.ranks
        device = memory.mine.device
        total = sum(SIZES)
        rows = ranks if self.is_sum else 1
        by_position = (torch.arange(rows * total, device=device) % 97).float()
        self.values = by_position + 11 * memory.rank
        self.sent = torch.empty(rows * total, dtype=BF16, device=device)
        self.count = torch.zeros((), device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.terms = torch.empty_like(self.sent).view(rows, -1)
        if self.is_sum:
            mine = by_position.view(ranks, total)[memory.rank]
            self.expected = ranks * mine + 11 * ranks * (ranks - 1) // 2
            self.counted = ranks  # how often the number of the message is in a value that arrives
            sizes = self.sizes
            self.received = torch.empty(total, device=device)
        else:
            offsets = 11 * torch.arange(ranks, device=device).float()[:, None]
            parts = [(part + offsets).view(-1) for part in by_position.split(self.sizes)]
            self.expected = torch.cat(parts)
            self.counted = 1
            sizes = [ranks * size for size in self.sizes]
            self.received = torch.empty(sum(sizes), dtype=BF16, device=device)
        self.outs = list(self.received.split(sizes))

    def warm_up(self) -> None:
        """Compile and load the kernels, and allocate their memory. Its barriers, which nobody sees, give up at once."""
        memory = self.memory
        device = memory.mine.device
        alone = in_one_process(memory.ranks, room(memory.ranks), device)
        self._write()
        torch.cuda._sleep(1)
        if self.lane in (COPIES, COPIED_SUMS):
            ops.barrier(alone[memory.rank], spins=0)
            if self.is_sum:
                ops.sum_terms(self.terms, self.outs, self.sizes, "sum", memory.ranks)
        else:
            self.memory = alone[memory.rank]
            self._launch(spins=0, waits=True)
            self.memory = memory
            self._launch(spins=0, waits=False)
        self._look()
        torch.cuda.synchronize(device)
        self.count.zero_()
        self.wrong.zero_()

    def send(self, pause: Callable[[], object], spins: int = SPINS, waits: bool = True) -> None:
        """Send a message, and check what arrives."""
        self._write()
        pause()
        if self.lane == COPIES:
            gather_by_copies(self.memory, self.outs, [self.sent], spins)
        elif self.lane == COPIED_SUMS:
            exchange_by_copies(self.memory, [self.terms], [self.sent], spins)
            ops.sum_terms(self.terms, self.outs, self.sizes, "sum", self.memory.ranks)
        else:
            self.memory.mine[: self.sent.nbytes].view(BF16).copy_(self.sent)
            pause()
            self._launch(spins, waits)
        self.memory.mine.fill_(255)  # bf16 of these bytes is NaN
        self._look()

    def _write(self) -> None:
        self.count.add_(1).remainder_(128)
        self.sent.copy_(self.values + self.count)

    def _look(self) -> None:
        self.wrong.add_((self.received != self.expected + self.counted * self.count).sum())
        self.received.fill_(-1)

    def _launch(self, spins: int, waits: bool) -> None:
        memory = self.memory
        options = {"channels": CHANNELS, "spins": spins}
        message = self.outs, self.sizes
        tables = memory.buffers, memory.pads, memory.error
        last = memory.rank, CHANNELS, spins
        if self.lane == GATHERS and waits:
            ops.all_gather(memory, *message, **options)
        elif self.lane == GATHERS:
            gather(*tables, *message, *last, sync=False)
        elif waits:
            ops.reduce_scatter(memory, *message, "sum", BF16, **options)
        else:
            scatter(*tables, *message, "sum", BF16, *last, sync=False)

    def wrong_values(self) -> int:
        """How many values were wrong, since this was last asked."""
        wrong = int(self.wrong)
        self.wrong.zero_()
        return wrong
