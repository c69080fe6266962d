"""Meeting: the ranks of a mesh compare their next calls, before any of them sends a message for its call.

The messages of a step have no names. If ranks made different calls, one would take the bytes of another for its own,
or wait forever. So each call that communicates begins with a meeting: every rank sends a short record of its call to
every other rank. If the records differ, all ranks raise the same error, and nothing else has been sent.

A rank that fails or ends leaves a note in the store of the process group. The others read the note when they lose
their connection to that rank, and can say why.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.relations import grouped
from .process_groups import Channel, LostRank, ProcessGroups, process_groups

T = TypeVar("T")
_RECORD = struct.Struct("<qq112s")
_PATIENCE = 0.5  # seconds to wait for the notes of other ranks
_STOP_TOGETHER = (
    "stop all ranks together, or drop the last batches: DistributedSampler(..., drop_last=True)."
)
NO_MORE = "no more messages"
SAME_PROGRAM = (
    "Batches may differ in size from rank to rank, but every rank must take the same branches, with the same "
    "transforms, hyperparameters and numbers, and its update must not depend on the size of its batch. Compare "
    "print(step.lower(state, batch)) of two ranks."
)


class Left(enum.StrEnum):
    """Why a rank has left the others."""

    FAILED = "failed"  # a step failed
    ENDED = "ended"  # its program ended, or its process group
    LOST = "lost"  # it lost other ranks, which say the cause


class Note(NamedTuple):
    """What a rank says to the others when it leaves them."""

    why: Left
    text: str


class Call(NamedTuple):
    """The record of a call."""

    name: str
    promise: int = 0  # a hash of the messages that it will send, and of its update of the state
    steps: int = 0  # the number of steps that its state has taken


def meet(mesh: DeviceMesh, call: Call, promise: Callable[[], Sequence[str]] = tuple) -> None:
    """Wait for all ranks of a mesh, and compare their calls. `promise` returns what `call.promise` is a hash of.

    Raises: RuntimeError on every rank if the calls differ; LostRank if a rank has ended or does not answer.
    """
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    try:
        groups.open()
        channel = _ranks_channel(groups)
        record = _RECORD.pack(call.promise, call.steps, call.name.encode()[:112])
        records = map(_RECORD.unpack, _gather(channel, record))
        calls = [
            Call(name.rstrip(b"\0").decode(errors="replace"), *numbers)
            for *numbers, name in records
        ]
    except LostRank as error:
        raise lost(mesh, call.name, error) from error
    groups.calls += 1
    if len(set(calls)) > 1:
        same_name = len({each.name for each in calls}) == 1
        promises_differ = same_name and len({each.promise for each in calls}) > 1
        raise RuntimeError(
            _differ(groups, calls, everywhere(list(promise()), mesh) if promises_differ else [])
        )


def everywhere(value: T, mesh: DeviceMesh) -> list[T]:
    """The values that the ranks of a mesh pass, in the order of `mesh.mesh`. All of its ranks must call it together.

    Raises: LostRank if a rank has ended or does not answer.
    """
    groups = process_groups(mesh)
    values = [value] * len(groups.ranks)
    if groups.is_alone:
        return values
    try:
        groups.open()
        channel = _ranks_channel(groups)
        with channel.errors():
            dist.all_gather_object(values, value, group=channel.group)
    except LostRank as error:
        raise lost(mesh, "ztrans", error) from error
    return values


def lost(mesh: DeviceMesh, name: str, error: BaseException) -> LostRank:
    """The error of a rank that has lost its connection to others, with the text of their notes.

    This also closes the channels of this rank, so that no other rank waits for it.
    """
    groups = process_groups(mesh)
    leave(mesh, Note(Left.LOST, f"lost other ranks in {name}"))
    notes = _notes(groups)
    silent = [rank for rank in groups.ranks if rank not in notes and rank != dist.get_rank()]
    head = f"{name}: rank {dist.get_rank()} has lost other ranks of the mesh.\n"
    message = (str(error).splitlines() or [type(error).__name__])[0]
    lines = _causes(notes, silent)
    text = "".join(f"{line}\n" for line in lines)
    return LostRank(
        f"{head}{text}The backend says: {message}", lines[0].strip().rstrip(".") if lines else ""
    )


def _causes(notes: Mapping[int, Note], silent: Sequence[int]) -> list[str]:
    """The lines of an error that say why ranks are lost, from their notes; `silent` ranks left none."""
    causes = {rank: note for rank, note in sorted(notes.items()) if note.why is not Left.LOST}
    lines = [f"  Rank {rank} {note.text}." for rank, note in causes.items()]
    if silent and not causes:
        lines.append(
            f"  {_named(silent).capitalize()} said nothing: killed, out of memory, stopped, or busy with something "
            f"else. See the log there."
        )
    if not causes or any(note.why is Left.ENDED for note in causes.values()):
        lines.append(
            f"Every rank must take the same number of steps. If data ends earlier on some ranks, {_STOP_TOGETHER}"
        )
    return lines


def leave(mesh: DeviceMesh, note: Note) -> None:
    """Leave a note for the other ranks of a mesh, and close the connections to them."""
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    if groups.farewell is not None:
        groups.farewell.detach()
    store = groups.store()
    in_time(lambda: _write(store, dist.get_rank(), note))
    groups.close()


def _ranks_channel(groups: ProcessGroups) -> Channel:
    """The channel of the meetings. When its group ends, this rank leaves a note."""
    channel = groups.channel(None, "ranks")
    farewell = groups.farewell.peek() if groups.farewell is not None else None
    if farewell is None or farewell[0] is not channel.group:
        known, rank = weakref.ref(groups), dist.get_rank()
        groups.farewell = weakref.finalize(
            channel.group, _end, groups.store(), rank, known, os.getpid()
        )
    return channel


def _end(store: dist.Store, rank: int, known: weakref.ref[ProcessGroups], process: int) -> None:
    """Leave a note that no more calls will follow, and why. It runs at the end of the process group or the process."""
    groups = known()
    if process != os.getpid():
        return  # a forked child
    failed = getattr(sys, "last_type", None)
    why = (
        f"ended with {failed.__name__}"
        if failed
        else "ended its program, or destroyed its process group,"
    )
    after = (
        f" after {groups.calls} calls in which all ranks took part" if groups is not None else ""
    )
    in_time(lambda: _write(store, rank, Note(Left.ENDED, f"{why}{after}")))


def _write(store: dist.Store, rank: int, note: Note) -> None:
    store.set(f"note/{rank}", json.dumps(note))


def _gather(channel: Channel, record: bytes) -> list[bytes]:
    """The records of all ranks of a channel, all of the same length."""
    mine, n = torch.frombuffer(bytearray(record), dtype=torch.uint8), channel.group.size()
    records = torch.empty(n, len(record), dtype=torch.uint8)
    records[channel.group.rank()] = mine
    with channel.errors():
        if channel.is_direct:
            for work in channel.exchange([mine] * n, list(records)):
                work.wait()
        else:
            dist.all_gather(list(records), mine, group=channel.group)
    return [bytes(row.tolist()) for row in records]


def _differ(groups: ProcessGroups, calls: Sequence[Call], promises: Sequence[Sequence[str]]) -> str:
    """The text of the error when calls differ. `promises` are those of every rank, if only they differ."""
    names = list(dict.fromkeys(call.name for call in calls))
    head = f"{' and '.join(names)}: the ranks of the mesh do not do the same, so none of them has sent anything.\n"
    if len(names) > 1:
        by_name = grouped((call.name, rank) for call, rank in zip(calls, groups.ranks))
        lines = [f"  {_named(ranks)}: {name}\n" for name, ranks in by_name.items()]
        return (
            f"{head}{''.join(lines)}Every rank must make the same calls in the same order. If the data of some ranks "
            f"has ended, {_STOP_TOGETHER}"
        )
    if promises:
        return f"{head}{first_difference(groups.ranks, promises)}{SAME_PROGRAM}"
    by_steps = grouped((call.steps, rank) for call, rank in zip(calls, groups.ranks))
    lines = [f"  {_named(ranks)}: {steps} steps\n" for steps, ranks in by_steps.items()]
    return (
        f"{head}  The states have taken different numbers of steps since they were sharded:\n{''.join(lines)}"
        f"Load the same checkpoint on all ranks, state = step.shard(loaded), and go on from there."
    )


def first_difference(ranks: Sequence[int], promises: Sequence[Sequence[str]]) -> str:
    """The lines of an error that show the first message in which a rank differs from the first rank.

    If their messages are equal, it is the first of the lines behind `NO_MORE`, which say how they update the state.
    """
    first, (k, other) = (
        promises[0],
        next((k, x) for k, x in enumerate(promises) if list(x) != list(promises[0])),
    )
    position, (here, there) = next(
        (i, pair) for i, pair in enumerate(zip(first, other)) if pair[0] != pair[1]
    )
    what = f"Message {position} of the step is"
    if NO_MORE in first[:position]:
        what = "They send the same messages, but would update the state in another way or with other numbers."
    return f"  {what}\n    on rank {ranks[0]}: {here}\n    on rank {ranks[k]}: {there}\n"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _notes(groups: ProcessGroups) -> dict[int, Note]:
    """The notes of the other ranks."""
    notes: dict[int, Note] = {}
    peers = [rank for rank in groups.ranks if rank != dist.get_rank()]

    def read() -> None:
        store, end = groups.store(), time.monotonic() + _PATIENCE
        while len(notes) < len(peers) and time.monotonic() < end:
            for rank in (rank for rank in peers if rank not in notes):
                if store.check([f"note/{rank}"]):
                    why, text = json.loads(store.get(f"note/{rank}"))
                    notes[rank] = Note(Left(why), text)
            time.sleep(0.02)

    in_time(read)
    return dict(notes)


def in_time(talk: Callable[[], object]) -> None:
    """Use the store, but give up after a time-out, because the host of the store may be the one that failed."""

    def quietly() -> None:
        try:
            talk()
        except RuntimeError:
            return  # the store has gone, and its notes with it

    thread = threading.Thread(target=quietly, name="ztrans-store", daemon=True)
    thread.start()
    thread.join(2 * _PATIENCE)
