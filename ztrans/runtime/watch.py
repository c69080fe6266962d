"""A thread that sees that another rank has failed while a GPU of this rank waits for it.

On CPUs the host waits for messages, and fails as soon as a connection is lost. On GPUs kernels wait, and the host may
wait for a kernel, also while it launches the step: the queue of launches may be full. So while a step is in flight, a
thread looks whether

- another rank has written a note into the store, because it has failed;
- the step has not ended within nine tenths of the time-out of the process group. After the whole time-out torch would
  end the process.

This rank then gives up: it writes a note itself, and stops its kernels that wait, also those of a captured graph. So
the host goes on. No later step starts from what these kernels have returned: the next call marks the states of all
steps in flight, and raises LostRank. A loss that the host reads before that may be wrong.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .failure import has_note, steps_of, write_note
from .in_flight import End, StepInFlight
from .process_groups import ProcessGroups, process_groups

_LOOK = 0.5  # seconds between two looks; each asks the store once
_SHARE = 0.9  # of the time-out, after which this rank gives up


@contextlib.contextmanager
def watched(mesh: DeviceMesh | None, name: str, leaves: Sequence[Any]) -> Iterator[None]:
    """Launch a step of the program `name`, which writes these leaves. On GPUs it is watched until it ends."""
    groups = process_groups(mesh) if mesh is not None else None
    if mesh is None or groups is None or groups.is_alone or mesh.device_type == "cpu":
        yield
        return
    end = End()
    step = StepInFlight(f"step {steps_of(leaves) + 1} of {name}", leaves, end)
    try:
        watch_step(groups, step)
        yield
        event = torch.Event(mesh.device_type)
        event.record()
        end.event = event
    except BaseException:
        groups.in_flight.drop_failed()
        raise


def watch_step(groups: ProcessGroups, step: StepInFlight) -> None:
    """Watch a step in flight, in a thread of the process."""
    groups.in_flight.add(step)
    if groups.watched_by != os.getpid():
        thread = threading.Thread(
            target=_watch, args=(weakref.ref(groups),), name="ztrans-watch", daemon=True
        )
        groups.watched_by = os.getpid()
        try:
            thread.start()
        except BaseException:
            groups.watched_by = 0  # so the next step tries again
            raise


class Watch:
    """What a thread knows of the steps in flight: the oldest one, and since when it is that."""

    def __init__(self) -> None:
        self.oldest: StepInFlight | None = None
        self.since = 0.0

    def look(self, groups: ProcessGroups, now: float) -> None:
        """Give up on the other ranks of a mesh if the oldest step in flight will not end."""
        oldest = groups.in_flight.oldest()
        if oldest is not self.oldest:
            self.oldest = oldest
            self.since = now
        if oldest is None or groups.in_flight.given_up:
            return
        cause = _why_it_will_not_end(groups, oldest, now - self.since)
        if cause:
            groups.in_flight.give_up(oldest, cause, lambda: _give_up(groups, oldest))


def _give_up(groups: ProcessGroups, step: StepInFlight) -> None:
    """Tell the other ranks of a mesh that this one waits for them no longer, and stop its kernels that wait.

    If the device of this rank has failed, the note says so. It is empty if another rank has failed.
    """
    of_device = groups.in_flight.device_error
    write_note(groups, f"failed in {step.name} with {of_device}" if of_device else "")
    groups.interrupt()


def _why_it_will_not_end(groups: ProcessGroups, step: StepInFlight, seconds: float) -> str:
    try:
        # The store may be slow to answer, so the time comes first.
        if seconds > _SHARE * groups.timeout:
            return f"{step.name} has not ended for {seconds:.0f} s"
        if has_note(groups):
            return f"another rank failed while {step.name} was running"
    except RuntimeError:
        return "the process group of the mesh, or the process that holds its store, has ended"
    return groups.in_flight.error()


def _watch(reference: weakref.ref[ProcessGroups]) -> None:
    """Look at the steps in flight of a mesh, again and again, as long as the mesh lives."""
    watch = Watch()
    try:
        while True:
            groups = reference()
            if groups is None:  # the mesh has ended
                return
            groups.connect_store()
            watch.look(groups, time.monotonic())
            del groups  # so that the mesh may end meanwhile
            time.sleep(_LOOK)
    finally:
        groups = reference()
        if groups is not None:
            groups.watched_by = 0  # so the next step starts another thread
