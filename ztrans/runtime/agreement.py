"""The ranks of a mesh compare what they are about to do.

The messages of a step have no names. If ranks made different calls, one would take the bytes of another for its own,
or wait forever. So each call that communicates begins with `agree`: every rank sends the name of its call, and a digest
of what must be the same on all ranks, to every other rank. If the records differ, all ranks raise the same error, and
nothing else has been sent.

On GPUs the host launches work ahead of the device, and would have to wait for the other hosts in every step. So there
the answer about a step is read when the next call begins. If the ranks differ, that step has been launched, and its
state is marked as half updated. Its messages may wait for each other forever, so all ranks end (see `watch`). A rank
that makes another call meanwhile, such as `save`, learns that a step has been launched, and ends them at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import MOST_RANKS_OF_EXCHANGE
from ..ir.dependencies import grouped
from .failure import (
    STOP_TOGETHER,
    quit_with_note,
    quitting_after_loss,
    rank_names,
)
from .process_groups import ProcessGroups, Work, process_groups

T = TypeVar("T")
Explain = Callable[[Mapping[int, Any]], str]

# A record: the digest of a value, whether the rank launches its step before it reads the answer, the name of a call.
_RECORD = struct.Struct("<16s?111s")
_IN_TIME = "the ranks of the mesh do not do the same, so none of them has sent anything.\n"
_LAUNCHED = (
    "the ranks of the mesh do not make the same call. This rank has sent nothing, but others have launched "
    "a step.\n"
)
_LATE = (
    "the ranks of the mesh did not do the same, and the step has run: its state is half updated.\n"
)


def agree(
    mesh: DeviceMesh,
    call: str,
    mine: Any,
    explain: Explain,
    mark: Callable[[str], None] | None = None,
) -> None:
    """Check that all ranks of a mesh make the same call. All of them must call this together.

    Args:
        mesh: the mesh.
        call: the name of the call.
        mine: what must be the same on all ranks, a value of numbers and texts.
        explain: returns what the error says about the values of all ranks, by rank, if they differ; an empty text if
            they may differ in this way. All ranks call it, so it may ask them for more.
        mark: if it is given, the step is launched first, and the answer is read when the next call begins. If the
            ranks differ, this function marks the state of the step; it gets the cause.

    Raises: RuntimeError on every rank if the ranks make different calls; LostRank if a rank has ended or does not
        answer.
    """
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    groups.settle()
    question = _Question.ask(groups, call, mine, explain, launches=mark is not None)
    if mark is not None:
        groups.pending = _PendingAnswer(question, mark)
        return
    answer = question.answer(groups)
    if answer.others_have_launched:
        note = mine.note if isinstance(mine, Failure) else f"made another call, {call}"
        quit_with_note(groups, note)
        raise RuntimeError(f"{answer.calls}: {_LAUNCHED}{answer.problem}")
    if answer.problem:
        groups.forget_carried()
        raise RuntimeError(f"{answer.calls}: {_IN_TIME}{answer.problem}")


class Failure(NamedTuple):
    """What a rank that cannot make a call sends in place of its value."""

    call: str
    reason: str

    @property
    def note(self) -> str:
        """What this rank writes for others that have gone on without it."""
        return f"failed in {self.call} with {self.reason.splitlines()[0]}"


def say_failure(mesh: DeviceMesh, name: str, error: Exception) -> None:
    """Tell the other ranks that this one has no program for a step, and why.

    They raise an error before they send anything. If they have launched the step, as on GPUs, this rank quits the mesh.
    """
    failure = Failure(step_of(name), f"{type(error).__name__}: {error}")
    # The error of this rank says more than the one of all ranks.
    with contextlib.suppress(RuntimeError):
        agree(mesh, f"{step_of(name)}, without a program", failure, lambda by_rank: "")


def agree_on_call(mesh: DeviceMesh, call: str) -> None:
    """Check that all ranks of a mesh make this call."""
    agree(mesh, call, None, lambda by_rank: "")


def launches_first(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh launch a step before they read the answer about it: on GPUs."""
    return mesh.device_type != "cpu"


class _Answer(NamedTuple):
    """What a comparison has found.

    Attributes:
        calls: the calls of the ranks.
        problem: what differs, in words; empty if the ranks agree.
        others_have_launched: whether some ranks have gone on with their call, and others, as this one, have not.
    """

    calls: str
    problem: str = ""
    others_have_launched: bool = False


@dataclass(frozen=True, eq=False)
class _PendingAnswer:
    """The answer about a step that this rank has launched; `mark` marks the state of the step."""

    question: _Question
    mark: Callable[[str], None]

    def read(self, groups: ProcessGroups) -> None:
        """Raises: RuntimeError on every rank if the ranks made different calls; LostRank if a rank has ended."""
        answer = self.question.answer(groups)
        if answer.problem:
            self.mark(f"the ranks did not do the same in {answer.calls}")
            # A message that no rank sends may be waited for, so nothing goes on. All ranks know that here.
            text = f"{answer.calls}: {_LATE}{answer.problem}"
            quit_with_note(groups, f"has read that in {text}")
            raise RuntimeError(text)


@dataclass(frozen=True, eq=False)
class _Question:
    """A comparison that has begun: `works` fill the records of all ranks.

    This rank `launches` its step before it reads the answer, or waits for the answer.
    """

    call: str
    mine: Any
    explain: Explain
    launches: bool
    records: torch.Tensor
    works: list[Work]

    @staticmethod
    def ask(
        groups: ProcessGroups, call: str, mine: Any, explain: Explain, launches: bool
    ) -> _Question:
        """Send this rank's record, and begin to receive those of the others."""
        # Every step sends this record, so it is a hash of a fixed size. Values are sent only if hashes differ.
        digest = hashlib.sha256(repr(mine).encode()).digest()[:16]
        record = bytearray(_RECORD.pack(digest, launches, call.encode()[:111]))
        records = torch.frombuffer(record, dtype=torch.uint8).repeat(len(groups.ranks), 1)
        works: list[Work]
        with quitting_after_loss(groups, call):
            groups.open()
            channel = groups.channel(None, "ranks")
            this_rank = records[channel.group.rank()]
            with channel.errors():
                if channel.is_gloo and len(records) <= MOST_RANKS_OF_EXCHANGE:
                    works = [*channel.exchange([this_rank] * len(records), list(records))]
                else:
                    works = [dist.all_gather(list(records), this_rank, channel.group, True)]
        return _Question(call, mine, explain, launches, records, works)

    def answer(self, groups: ProcessGroups) -> _Answer:
        """Wait for all records, and compare them."""
        with quitting_after_loss(groups, self.call), groups.channel(None, "ranks").errors():
            try:
                while self.works:
                    self.works.pop().wait()
            except BaseException:
                self.works.clear()  # a message in progress would keep its connection open
                raise
        records = list(_RECORD.iter_unpack(self.records.numpy().tobytes()))
        if len(set(records)) == 1:
            return _Answer(self.call)
        names = [name.rstrip(b"\0").decode(errors="replace") for *_, name in records]
        calls = " and ".join(dict.fromkeys(names))
        if any(launches != self.launches for _, launches, _ in records):
            # Ranks that have launched a step read this at another time, so no rank may ask for the values.
            problem = _different_calls(groups.ranks, names)
            return _Answer(calls, problem, others_have_launched=not self.launches)
        # Only now are the values themselves sent.
        values = dict(zip(groups.ranks, _from_all(groups, self.mine)))
        failure = _failed(values)
        if failure:
            return _Answer(self.call, failure)
        if len(set(names)) > 1:
            return _Answer(calls, _different_calls(groups.ranks, names))
        return _Answer(self.call, self.explain(values))


def everywhere(value: T, mesh: DeviceMesh) -> list[T]:
    """The values that the ranks of a mesh pass, in the order of `mesh.mesh`. All of its ranks must call it together.

    Raises: LostRank if a rank has ended or does not answer.
    """
    return _from_all(process_groups(mesh), value)


def from_first(value: T, mesh: DeviceMesh) -> T:
    """The value that the first rank of a mesh passes. All of its ranks must call it together.

    Raises: LostRank, on the other ranks, if the first one has ended or does not answer.
    """
    groups = process_groups(mesh)
    with quitting_after_loss(groups, "ztrans"):
        if not groups.is_alone:
            groups.open()
        return groups.from_first(value)


def _from_all(groups: ProcessGroups, value: T) -> list[T]:
    """The values that the ranks pass; LostRank says why another rank is lost."""
    with quitting_after_loss(groups, "ztrans"):
        if not groups.is_alone:
            groups.open()
        return groups.from_all(value)


def _failed(values: Mapping[int, Any]) -> str:
    """What an error says about the first rank that cannot make a call; empty if all can."""
    for rank, value in values.items():
        if isinstance(value, Failure):
            return f"  Rank {rank} has failed with {value.reason}"
    return ""


def _different_calls(ranks: Sequence[int], names: Sequence[str]) -> str:
    """What an error says about ranks that make calls of different names."""
    by_name = grouped(zip(names, ranks))
    lines = "".join(f"  {rank_names(same)}: {name}\n" for name, same in by_name.items())
    return (
        f"{lines}Every rank must make the same calls in the same order. If the data of some ranks has ended, "
        f"{STOP_TOGETHER}"
    )


def different_steps(steps: Mapping[int, int]) -> str:
    """What an error says about states that have taken different numbers of steps, by rank."""
    by_steps = grouped((count, rank) for rank, count in steps.items())
    lines = "".join(f"  {rank_names(ranks)}: {count} steps\n" for count, ranks in by_steps.items())
    return (
        f"  The states have taken different numbers of steps since they were sharded:\n{lines}"
        f"Load the same checkpoint on all ranks, state = step.shard(loaded), and go on from there."
    )


def step_of(name: str) -> str:
    """The name of the call in which ranks compare a step."""
    return f"a step of {name}"


def new_program_of(name: str) -> str:
    """The name of the call in which ranks agree on a program for a step."""
    return f"{step_of(name)}, with a program that is new here"
