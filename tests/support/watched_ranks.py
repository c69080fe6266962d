"""A rank that a process watches, as on GPUs: `python watched_ranks.py PORT RANK SCENARIO`. There are two ranks.

Rank 1 does what the scenario says after two steps. Rank 0 launches a third one, which then never ends. The events of
steps are doubles, and the store is that of the test.
"""

from __future__ import annotations

import ctypes
import sys
import time

import torch.distributed as dist

from ztrans.runtime.watch import Place, Watcher

LONG = 250  # seconds; the tests fail if a rank waits for so long


class Event:
    """The event of a step that has ended, or never ends."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done


def step(watcher: Watcher, ends: bool = True) -> None:
    watcher.in_flight.begin()
    watcher.launched()
    watcher.in_flight.record(Event(ends))


def main(port: int, rank: int, scenario: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    place = Place(dist.PrefixStore(f"run/{scenario}", store), "mesh", rank, 2, 300.0)
    watcher = Watcher(place, lambda: None)
    step(watcher)
    step(watcher)
    print(f"rank {rank} has taken two steps")
    if scenario == "both end":
        time.sleep(3 * (1 - rank))
        return
    if rank == 1 and scenario == "exits":
        sys.exit(7)
    if rank == 0:
        step(watcher, ends=False)
        if scenario == "exits":
            time.sleep(LONG)
        # What Inductor's launcher does while the queue is full. No thread of this process runs.
        ctypes.PyDLL(None).sleep(LONG)
    watcher.fail("failed in step 3 of train with ValueError: planted\nin two lines")
    time.sleep(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
