"""Refuse a state that a failed step has half updated, and end a failed step on all ranks.

A step updates its state in place, in part while backward still runs. If the step fails in between, some leaves are new
and some are old, and the values do not show which. So the failure is recorded for each leaf of this state (see
`leaf_records`), and the next use of one raises an error. A step that fails before its first write leaves the old state.

A rank whose step fails leaves the session of its mesh (see `session`), so that the step ends on all ranks. A signal
handler may raise between any two lines of Python: wherever it interrupts a call, the call fails in the same way.

A GPU runs a step after the call of the step has returned. `check_ended` waits for such steps before a state is read.

`one_thread` refuses a second thread, whose messages would mix with the messages of the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..calling.host_memory import let_copies_end
from ..calling.leaf_records import RECORDS, check_whole
from .channels import LostRank, release_messages
from .host_copies import release_carried_copies
from .session import Session, all_sessions, in_one_line
from .watch import described


class Writes:
    """Whether a run of a program has begun to write its state."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self) -> None:
        """Called by the program before its first write."""
        self.begun = True


def check_ended(leaves: Sequence[Any], name: str) -> None:
    """Wait for all steps on GPUs and their copies to the host; then check that none has left this state half updated.

    Raises: RuntimeError if one has, if the ranks made different calls, or if a GPU has failed.
    """
    for session in all_sessions():
        session.read_pending()  # a step in which the ranks differ may never end
        session.check_goes_on()
        if session.watcher is not None:
            session.watcher.in_flight.wait()
        check_launched(session, name)
    let_copies_end()
    release_carried_copies()
    check_whole(leaves, name)


def check_launched(session: Session, name: str) -> None:
    """Check the steps that the GPU has not ended. If another rank is lost in one of them, this process ends.

    Raises: RuntimeError if the GPU of this rank has failed, or an earlier step of this rank.
    """
    if session.watcher is None:
        return
    watcher = session.watcher
    device_error = watcher.in_flight.device_error
    if device_error:
        watcher.fail(f"has a GPU that failed: {device_error}")
        raise RuntimeError(
            f"{name}: the device of rank {dist.get_rank()} has failed: {device_error}\n"
            f"It runs nothing more in this process. Start again from a checkpoint in new processes; with "
            f"CUDA_LAUNCH_BLOCKING=1 the error names the line that launched the kernel."
        )
    session.check_goes_on()
    error = session.error_of_kernels()
    if error:
        watcher.lost(error)


@contextlib.contextmanager
def running(
    name: str, leaves: Sequence[Any], session: Session | None, writes: Writes
) -> Iterator[None]:
    """Run a step of the program `name`, whose state has these leaves. If it fails, it ends on all ranks."""
    writes.begun = False
    watcher = session.watcher if session is not None else None
    with ending_together(name, leaves, session, writes):
        if watcher is not None:
            watcher.in_flight.begin()
            watcher.launched()
        yield
        if watcher is not None:
            event = torch.Event()
            event.record()
            watcher.in_flight.record(event)
    if session is not None:
        session.in_step = 0
    RECORDS.of_state(leaves).steps += 1


@contextlib.contextmanager
def ending_together(
    name: str, leaves: Sequence[Any], session: Session | None, writes: Writes
) -> Iterator[None]:
    """Run a part of a step of the program `name`. If it fails, the step ends on all ranks.

    A failure after the first write is recorded for the leaves. After any failure this rank leaves the session, because
    it has sent only some of the messages that other ranks wait for.

    Raises: the error of the step, with a note; LostRank if another rank failed first.
    """
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    except BaseException as error:
        # An interrupt may arrive inside the exit of torch.no_grad().
        torch.set_grad_enabled(grad_enabled)
        step_name = f"step {RECORDS.of_state(leaves).steps + 1} of {name}"
        kind = type(error).__name__
        reason = in_one_line(error)
        if isinstance(error, GeneratorExit):
            # An interrupt arrived in the exit of this context, and Python closes its generator later.
            kind = reason = "an interrupt, such as KeyboardInterrupt"
        if writes.begun:
            RECORDS.refuse(leaves, f"{step_name} failed with {kind}")
        if session is not None and isinstance(error, LostRank):
            # An exchange of values inside the step has left already, and its error says why.
            loss = error if error.reason else session.lost(step_name, error)
            if writes.begun and loss.reason:
                RECORDS.refuse(leaves, loss.reason)
            raise LostRank(f"{loss}\n{_remark_on_state(leaves)}", loss.reason) from error
        if session is not None:
            release_messages(error)
            # On GPUs the other ranks end, and print the whole text.
            text = described(error) if session.watcher is not None else reason
            session.leave(f"failed in {step_name} with {text}")
        error.add_note(f"ztrans: {step_name} was ended by this. {_remark_on_state(leaves)}")
        raise


@contextlib.contextmanager
def one_thread(lock: threading.RLock, name: str) -> Iterator[None]:
    """Hold the lock of a mesh, so that only one thread runs its steps.

    If an interrupt keeps a thread from releasing the lock, only this thread can run steps from then on.

    Raises: RuntimeError if another thread runs.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{name}: another thread runs a step of this mesh. The messages of the two steps would mix.\n"
            f"Run the steps of one mesh from one thread."
        )
    try:
        yield
    finally:
        lock.release()


def _remark_on_state(leaves: Sequence[Any]) -> str:
    """The sentence of an error about the state, which this step or an interrupted one before may have half updated."""
    if RECORDS.failure(leaves):
        return "The state is half updated."
    return "The state is as it was before the step."
