"""End a failed step on all ranks, and refuse a state that it has half updated.

A step updates its state in place, in part while backward still runs. If the step fails in between, some leaves are new
and some are old, and the values do not show which. So the cause is recorded for each leaf of this state, and the next
use of one raises an error. A step that fails before its first write leaves the old state.

A rank that fails writes a note into the store of the process group, and closes its connections. When other ranks lose
their connection to it, they read the note, raise an error with its text, and can go on. On GPUs they end instead, with
the text of the first error (see `watch`). A signal handler may raise between any two lines of Python: wherever it
interrupts a call, the call fails in the same way.

A GPU runs a step after the call of the step has returned. `check_ended` waits for such steps before a state is read.

The steps of each state are counted here, because errors name a step by its number, and ranks compare these numbers.
`one_thread` refuses a second thread, whose messages would mix with the messages of the first.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..calling.host_memory import let_copies_end
from ..ir.source import is_plumbing
from .host_copies import release_carried_copies
from .process_groups import LostRank, ProcessGroups, all_process_groups, process_groups
from .watch import described

STOP_TOGETHER = (
    "stop all ranks together, or drop the last batches: DistributedSampler(..., drop_last=True)."
)
_NOTES_TIMEOUT = 0.5  # seconds to wait for the notes of other ranks
_causes = WeakIdKeyDictionary()  # a leaf of a half updated state -> the failure that caused this
_steps = WeakIdKeyDictionary()  # the first tensor of a state -> the steps that the state has taken


class Writes:
    """Whether a run of a program has begun to write its state."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self) -> None:
        """Called by the program before its first write."""
        self.begun = True


def steps_of(leaves: Sequence[Any]) -> int:
    """The number of steps that a state has taken since it was sharded, or since this process first saw it."""
    first = _first_tensor(leaves)
    return 0 if first is None else _steps.get(first, 0)


def check_whole(leaves: Sequence[Any], name: str) -> None:
    """Check that no failed step has left this state half updated.

    Raises: RuntimeError if one has.
    """
    if not _causes:
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf in _causes:
            raise RuntimeError(
                f"{name}: this state is half updated, some leaves are new and some are old: {_causes[leaf]}.\n"
                f"Load a checkpoint and go on from there: state = step.shard(loaded). With "
                f'overlap_grads(update="last") a step writes nothing until every reduction is done, so most failures '
                f"leave the old state whole."
            )


def check_ended(leaves: Sequence[Any], name: str) -> None:
    """Wait for all steps on GPUs and their copies to the host; then check that none has left this state half updated.

    Raises: RuntimeError if one has, if the ranks made different calls, or if a GPU has failed.
    """
    for groups in all_process_groups():
        groups.settle()  # a step in which the ranks differ may never end
        groups.check_goes_on()
        groups.in_flight.wait()
        check_launched(groups, name)
    let_copies_end()
    release_carried_copies()
    check_whole(leaves, name)


def check_launched(groups: ProcessGroups | None, name: str) -> None:
    """Check the steps that the GPU has not ended. If another rank is lost in one of them, this process ends.

    Raises: RuntimeError if the GPU of this rank has failed, or an earlier step of this rank.
    """
    if groups is None or groups.watcher is None:
        return
    watcher = groups.watcher
    device_error = groups.in_flight.device_error
    if device_error:
        watcher.fail(f"has a GPU that failed: {device_error}")
        raise RuntimeError(
            f"{name}: the device of rank {dist.get_rank()} has failed: {device_error}\n"
            f"It runs nothing more in this process. Start again from a checkpoint in new processes; with "
            f"CUDA_LAUNCH_BLOCKING=1 the error names the line that launched the kernel."
        )
    groups.check_goes_on()
    error = groups.error_of_kernels()
    if error:
        watcher.lost(error)


def marker(leaves: Sequence[Any]) -> Callable[[str], None]:
    """A function that records why this state is half updated. It does not keep the state alive."""
    # The next state may share only some of these leaves.
    references = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def mark(cause: str) -> None:
        _record_half_updated([reference() for reference in references], cause)

    return mark


@contextlib.contextmanager
def running(
    name: str, leaves: Sequence[Any], groups: ProcessGroups | None, writes: Writes
) -> Iterator[None]:
    """Run a step of the program `name`, whose state has these leaves. If it fails, it ends on all ranks."""
    writes.begun = False
    with ending_together(name, leaves, groups, writes):
        yield
    if groups is not None:
        groups.in_step = 0
    first = _first_tensor(leaves)
    if first is not None:
        _steps[first] = _steps.get(first, 0) + 1


@contextlib.contextmanager
def ending_together(
    name: str, leaves: Sequence[Any], groups: ProcessGroups | None, writes: Writes
) -> Iterator[None]:
    """Run a part of a step of the program `name`. If it fails, the step ends on all ranks.

    A failure after the first write is recorded for the leaves. Any failure closes the channels to the other ranks,
    because this rank has sent only some of the messages that they wait for.

    Raises: the error of the step, with a note; LostRank if another rank failed first.
    """
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    except BaseException as error:
        # An interrupt may arrive inside the exit of torch.no_grad().
        torch.set_grad_enabled(grad_enabled)
        step_name = f"step {steps_of(leaves) + 1} of {name}"
        kind = type(error).__name__
        reason = _in_one_line(error)
        if isinstance(error, GeneratorExit):
            # An interrupt arrived in the exit of this context, and Python closes its generator later.
            kind = reason = "an interrupt, such as KeyboardInterrupt"
        if writes.begun:
            _record_half_updated(leaves, f"{step_name} failed with {kind}")
        if groups is not None:
            _release_messages(error)
        if groups is not None and isinstance(error, LostRank):
            loss = quit_after_loss(groups, step_name, error)
            if writes.begun:
                _record_half_updated(leaves, loss.reason)
            raise LostRank(f"{loss}\n{_remark_on_state(leaves)}", loss.reason) from error
        if groups is not None:
            # On GPUs the other ranks end, and print the whole text.
            text = described(error) if groups.watcher is not None else reason
            quit_with_note(groups, f"failed in {step_name} with {text}")
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


def quit_after_loss(groups: ProcessGroups, name: str, error: BaseException) -> LostRank:
    """Close the channels of this rank, which has lost other ranks of the mesh, so that no other rank waits for it.

    On GPUs this ends the process.

    Returns: the error to raise, with the text of the notes of other ranks.
    """
    _release_messages(error)
    if groups.watcher is not None:
        groups.watcher.lost(_in_one_line(error, with_type=False))
    quit_with_note(groups, "")
    notes = _read_notes(groups)
    silent = [rank for rank in groups.ranks if rank not in notes and rank != dist.get_rank()]
    causes = explain_loss(notes, silent)
    head = f"{name}: rank {dist.get_rank()} has lost other ranks of the mesh.\n"
    text = "".join(f"  {cause}\n" for cause in causes)
    reason = causes[0].rstrip(".") if causes else ""
    return LostRank(f"{head}{text}The backend says: {_in_one_line(error, with_type=False)}", reason)


@contextlib.contextmanager
def quitting_after_loss(groups: ProcessGroups, call: str) -> Iterator[None]:
    """Communicate with the other ranks of a mesh. This rank closes its channels if they are lost, or if it fails.

    Raises: LostRank, with the text of the notes of other ranks (on GPUs this process ends instead); the error of this
        rank, such as KeyboardInterrupt.
    """
    try:
        yield
    except LostRank as error:
        raise quit_after_loss(groups, call, error) from error
    except BaseException as error:
        quit_after_error(groups, call, error)
        raise


def quit_after_error(groups: ProcessGroups, call: str, error: BaseException) -> None:
    """Close the channels of this rank, which has failed in a call, unless they are closed. Other ranks learn why."""
    _release_messages(error)
    if groups.is_open:
        quit_with_note(groups, f"failed in {call} with {_in_one_line(error)}")


def _release_messages(error: BaseException) -> None:
    """Clear the frames of an error, because a message in progress in one of them keeps its connection open.

    The frames live as long as the error, or longer, until the garbage collector runs. Frames of the user's own code are
    not cleared.
    """
    errors = [error]
    for linked_error in errors:  # the loop appends to the list
        for earlier in (linked_error.__cause__, linked_error.__context__):
            if earlier is not None and not any(earlier is x for x in errors):
                errors.append(earlier)
        for frame, _ in traceback.walk_tb(linked_error.__traceback__):
            if is_plumbing(frame):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()


def quit_if_cut_off(mesh: object, call: str, error: BaseException) -> None:
    """Close the channels of this rank if an error has ended a call outside of the contexts that handle errors.

    A signal handler may raise between two contexts, or inside the exit of one. Any other error that is raised outside
    of a step on which the ranks have agreed is known to all of them.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    with contextlib.suppress(RuntimeError):  # the process group of the mesh has been destroyed
        groups = process_groups(mesh)
        is_in_step = groups.in_step == threading.get_ident()
        if is_in_step or not isinstance(error, Exception):
            quit_after_error(groups, call, error)


@contextlib.contextmanager
def interrupts_end(mesh: object, call: str) -> Iterator[None]:
    """Run a call of a mesh. If one rank is interrupted anywhere in the call, it ends on all ranks."""
    try:
        yield
    except BaseException as error:
        quit_if_cut_off(mesh, call, error)
        raise


def explain_loss(notes: Mapping[int, str], silent: Sequence[int]) -> list[str]:
    """Sentences that say why ranks are lost, from their notes. The `silent` ranks wrote none.

    A rank that failed because it had lost others writes an empty note: the lost ranks say why.
    """
    causes = [f"Rank {rank} {note}." for rank, note in sorted(notes.items()) if note]
    if silent and not causes:
        causes = [
            f"{rank_names(silent).capitalize()} said nothing: the program there has ended, or it was killed, is out of "
            f"memory, stopped, or busy with something else. See its log.",
            f"Every rank must take the same number of steps. If data ends earlier on some ranks, {STOP_TOGETHER}",
        ]
    return causes


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks as text, such as `ranks 0, 2`."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"


def _in_one_line(error: BaseException, with_type: bool = True) -> str:
    """The class and the first line of an error."""
    kind = type(error).__name__
    lines = str(error).splitlines()
    if not lines:
        return kind
    return f"{kind}: {lines[0]}" if with_type else lines[0]


def _remark_on_state(leaves: Sequence[Any]) -> str:
    """The sentence of an error about the state, which this step or an interrupted one before may have half updated."""
    if any(isinstance(leaf, torch.Tensor) and leaf in _causes for leaf in leaves):
        return "The state is half updated."
    return "The state is as it was before the step."


def quit_with_note(groups: ProcessGroups, note: str) -> None:
    """Close the channels of this rank. The note tells the other ranks why; on GPUs they end with its text."""
    if groups.is_alone:
        return
    if groups.watcher is not None:
        groups.watcher.fail(note)
    else:
        _write_note(groups, note)
    groups.close()


def _write_note(groups: ProcessGroups, note: str) -> None:
    """Write a note for the other ranks of a mesh, which read it when they lose their connection to this one."""
    _in_time(lambda: groups.store().set(f"note/{dist.get_rank()}", note))


def _read_notes(groups: ProcessGroups) -> dict[int, str]:
    """The notes of the other ranks, which may take some time to arrive."""
    notes: dict[int, str] = {}
    peers = [rank for rank in groups.ranks if rank != dist.get_rank()]

    def read_notes() -> None:
        store = groups.store()
        end = time.monotonic() + _NOTES_TIMEOUT
        while len(notes) < len(peers) and time.monotonic() < end:
            for rank in peers:
                if rank not in notes and store.check([f"note/{rank}"]):
                    notes[rank] = store.get(f"note/{rank}").decode()
            time.sleep(0.02)

    _in_time(read_notes)
    return dict(notes)


def _in_time(use_store: Callable[[], object]) -> None:
    """Use the store for a limited time, because the host of the store may be the one that failed."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, and its notes are lost
            use_store()

    thread = threading.Thread(target=run, name="ztrans-store", daemon=True)
    # No thread starts if memory is short, or at the end of the process. The failure itself matters more than its note.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(2 * _NOTES_TIMEOUT)


def _record_half_updated(leaves: Sequence[Any], cause: str) -> None:
    """Record why the state of these leaves is half updated, so that their next use raises an error."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _causes[leaf] = cause


def _first_tensor(leaves: Sequence[Any]) -> torch.Tensor | None:
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
