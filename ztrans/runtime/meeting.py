"""meeting: the ranks of a mesh tell each other what they call, before any of them sends a message of that call.

Messages of a step carry no names. Ranks that call different things would take each other's bytes for their own,
or wait for ever. So each call that communicates begins with a meeting: every rank sends a short record of what it
is about to do to every other. If the records differ, all ranks raise the same error, and nothing else was sent.

A rank that fails or ends leaves a note in the store of the process group. The others find it when their connection
to that rank is lost, and can say why.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .process_groups import Channel, LostRank, ProcessGroups, process_groups

_RECORD = struct.Struct("<qq112s")
_PATIENCE = 0.5  # seconds in which other ranks can say why they are gone


class Call(NamedTuple):
    """What a rank is about to do: a name, a hash of the messages that it will send, the steps of its state so far."""

    name: str
    messages: int = 0
    steps: int = 0


def meet(mesh: DeviceMesh, call: Call, messages: Callable[[], Sequence[str]] = tuple) -> None:
    """Wait for all ranks of a mesh, and compare what they call. `messages` describes those of `call`, one a line.

    Raises: RuntimeError on every rank when the calls differ; LostRank when a rank is gone or does not come.
    """
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    try:
        groups.open()
        channel = _ranks(groups)
        record = _RECORD.pack(call.messages, call.steps, call.name.encode()[:112])
        calls = [Call(_text(name), *numbers) for *numbers, name in map(_RECORD.unpack, _gathered(channel, record))]
    except LostRank as error:
        raise lost(mesh, call.name, error) from error
    groups.calls += 1
    if len(set(calls)) > 1:
        same = len({each.name for each in calls}) == 1 and len({each.messages for each in calls}) > 1
        raise RuntimeError(_differ(groups, calls, everywhere(list(messages()), mesh) if same else []))


def everywhere(value: Any, mesh: DeviceMesh) -> list[Any]:
    """What each rank of a mesh brings, in the order of `mesh.mesh`. All of them must call it, and no others.

    Raises: LostRank when a rank is gone or does not come.
    """
    groups = process_groups(mesh)
    if groups.is_alone:
        return [value] * len(groups.ranks)
    values = [value] * len(groups.ranks)
    try:
        groups.open()
        channel = _ranks(groups)
        with channel.errors():
            dist.all_gather_object(values, value, group=channel.group)
    except LostRank as error:
        raise lost(mesh, "ztrans", error) from error
    return values


def lost(mesh: DeviceMesh, name: str, error: BaseException) -> LostRank:
    """The error of a rank that waits in vain for others.

    Closes its channels, so that nobody waits for this rank, and says what is known of the others.
    """
    groups = process_groups(mesh)
    leave(mesh, f"lost other ranks in {name}", is_cause=False)
    notes = _notes(groups)
    causes = {rank: text for rank, (is_cause, text) in notes.items() if is_cause}
    lines = [f"  Rank {rank} {text}.\n" for rank, text in sorted(causes.items())]
    silent = [rank for rank in groups.ranks if rank not in notes and rank != groups.ranks[groups.rank]]
    if silent and not causes:
        lines.append(
            f"  {_named(silent).capitalize()} said nothing: killed, out of memory, stopped, or busy with something "
            f"else. See the log there.\n"
        )
    if not causes or any("ended" in text for text in causes.values()):
        lines.append(
            "Every rank must take the same number of steps. If data ends earlier on some ranks, stop all ranks "
            "together, or drop the last batches: DistributedSampler(..., drop_last=True).\n"
        )
    head = f"{name}: rank {groups.ranks[groups.rank]} has lost other ranks of the mesh.\n"
    return LostRank(f"{head}{''.join(lines)}The backend says: {_first_line(error)}")


def leave(mesh: DeviceMesh, why: str, is_cause: bool = True) -> None:
    """Leave a note for the other ranks of a mesh, and close the connections to them."""
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    if groups.farewell is not None:
        groups.farewell.detach()
    store = groups.store()
    _in_time(lambda: _write(store, groups.ranks[groups.rank], is_cause, why))
    groups.close()


def _ranks(groups: ProcessGroups) -> Channel:
    """The channel in which ranks tell each other what they call; its end leaves a note."""
    channel = groups.channel(None, "ranks")
    if groups.farewell is None or groups.farewell.peek() is None or groups.farewell.peek()[0] is not channel.group:
        known, rank = weakref.ref(groups), groups.ranks[groups.rank]
        groups.farewell = weakref.finalize(channel.group, _end, groups.store(), rank, known, os.getpid())
    return channel


def _end(store: dist.Store, rank: int, known: weakref.ref[ProcessGroups], process: int) -> None:
    """When the process group or the process ends: say to the others that no more calls will come from here, and why."""
    groups = known()
    if process != os.getpid():
        return  # a child that was forked
    failed = getattr(sys, "last_type", None)
    why = f"ended with {failed.__name__}" if failed else "ended its program, or destroyed its process group,"
    after = f" after {groups.calls} calls in which all ranks took part" if groups is not None else ""
    _in_time(lambda: _write(store, rank, True, f"{why}{after}"))


def _write(store: dist.Store, rank: int, is_cause: bool, why: str) -> None:
    store.set(f"note/{rank}", json.dumps([is_cause, why]))


def _gathered(channel: Channel, record: bytes) -> list[bytes]:
    """The records of all ranks of a channel, each as long as this one."""
    mine, n = torch.frombuffer(bytearray(record), dtype=torch.uint8), channel.group.size()
    records = torch.empty(n, len(record), dtype=torch.uint8)
    records[channel.group.rank()] = mine
    with channel.errors():
        if channel.is_direct:
            for work in channel.exchange([mine] * n, list(records)):
                work.wait()
        else:
            dist.all_gather(list(records), mine, group=channel.group)
    return [bytes(each.tolist()) for each in records]


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _differ(groups: ProcessGroups, calls: Sequence[Call], messages: Sequence[Sequence[str]]) -> str:
    """What is said on every rank when calls differ; `messages` are those of every rank, where only these do."""
    names = list(dict.fromkeys(call.name for call in calls))
    ranks_of = lambda kind: {x: [r for r, c in zip(groups.ranks, calls) if kind(c) == x] for x in map(kind, calls)}
    head = f"{' and '.join(names)}: the ranks of the mesh do not do the same, so none of them has sent anything.\n"
    if len(names) > 1:
        lines = [f"  {_named(ranks)}: {name}\n" for name, ranks in ranks_of(lambda c: c.name).items()]
        return (
            f"{head}{''.join(lines)}Every rank must make the same calls in the same order. If the data of some ranks "
            f"has ended, stop all ranks together, or drop the last batches: DistributedSampler(..., drop_last=True)."
        )
    if messages:
        lines = first_difference(groups.ranks, messages)
        return (
            f"{head}{lines}Batches may differ in size from rank to rank, but every rank must take the same branches, "
            f"with the same transforms. Compare print(step.lower(state, batch)) of two ranks."
        )
    lines = "".join(f"  {_named(ranks)}: {steps} steps\n" for steps, ranks in ranks_of(lambda c: c.steps).items())
    return (
        f"{head}  The states have taken different numbers of steps since they were sharded:\n{lines}"
        f"Load the same checkpoint on all ranks, state = step.shard(loaded), and go on from there."
    )


def first_difference(ranks: Sequence[int], messages: Sequence[Sequence[str]]) -> str:
    """The first message that another rank has otherwise than the first rank has it."""
    first = [*messages[0], "no more messages"]
    other = next(k for k, those in enumerate(messages) if list(those) != list(messages[0]))
    pairs = zip(first, [*messages[other], "no more messages"])
    place, (here, there) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"  Message {place} of the step is\n    on rank {ranks[0]}: {here}\n    on rank {ranks[other]}: {there}\n"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _notes(groups: ProcessGroups) -> dict[int, tuple[bool, str]]:
    """The notes of the other ranks: whether they say the cause, and what they say."""
    notes: dict[int, tuple[bool, str]] = {}
    others = [rank for rank in groups.ranks if rank != groups.ranks[groups.rank]]

    def read() -> None:
        store, end = groups.store(), time.monotonic() + _PATIENCE
        while len(notes) < len(others) and time.monotonic() < end:
            for rank in (rank for rank in others if rank not in notes):
                if store.check([f"note/{rank}"]):
                    notes[rank] = tuple(json.loads(store.get(f"note/{rank}")))
            time.sleep(0.02)

    _in_time(read)
    return dict(notes)


def _in_time(talk: Callable[[], object]) -> None:
    """Talk to the store for as long as it is worth: its host may be what is gone."""

    def quietly() -> None:
        try:
            talk()
        except RuntimeError:
            return  # the store is gone, and what it could tell with it

    thread = threading.Thread(target=quietly, name="ztrans-store", daemon=True)
    thread.start()
    thread.join(2 * _PATIENCE)
