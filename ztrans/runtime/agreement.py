"""The ranks of a mesh compare what they are about to do.

The messages of a step have no names. If ranks made different calls, one would take the bytes of another for its own,
or wait forever. So each call that communicates begins with `agree`: every rank sends the name of its call, and a digest
of what must be the same on all ranks, to every other rank. If the records differ, all ranks raise the same error, and
nothing else has been sent.

On GPUs the host launches work ahead of the device, and would have to wait for the other hosts in every step. So there
the answer about a step is read when the next call begins. If the ranks differ, that step has been launched, and its
state is marked as half updated. Its messages may wait for each other forever, so all ranks close their channels.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.dependencies import grouped
from .failure import STOP_TOGETHER, fail, leave_disagreement, leave_lost_ranks, rank_names
from .process_groups import LostRank, ProcessGroups, Work, process_groups

T = TypeVar("T")
Explain = Callable[[Mapping[int, Any]], str]

_RECORD = struct.Struct("<16s112s")  # the digest of a value, and the name of a call
_IN_TIME = "the ranks of the mesh do not do the same, so none of them has sent anything.\n"
_LATE = (
    "the ranks of the mesh did not do the same, and the step has run: its state is half updated.\n"
)


def agree(
    mesh: DeviceMesh,
    call: str,
    mine: Any,
    explain: Explain,
    if_late: Callable[[str], None] | None = None,
) -> None:
    """Check that all ranks of a mesh make the same call. All of them must call this together.

    Args:
        mesh: the mesh.
        call: the name of the call.
        mine: what must be the same on all ranks, a value of numbers and texts.
        explain: returns what the error says about the values of all ranks, by rank, if they differ; an empty text if
            they may differ in this way. All ranks call it, so it may ask them for more.
        if_late: read the answer when the next call begins. If it is bad, this function gets a line about it.

    Raises: RuntimeError on every rank if the ranks make different calls; LostRank if a rank has ended or does not
        answer.
    """
    groups = process_groups(mesh)
    if groups.is_alone:
        return
    settle(mesh)
    question = _Question.ask(groups, call, mine, explain)
    if if_late is not None:
        groups.pending = question, if_late
        return
    calls, problem = question.answer(mesh)
    if problem:
        groups.forget_carried()
        raise RuntimeError(f"{calls}: {_IN_TIME}{problem}")


class Failure(NamedTuple):
    """What a rank that cannot make a call sends in place of its value."""

    reason: str


def say_failure(mesh: DeviceMesh, name: str, error: Exception, is_new: bool) -> None:
    """Tell the other ranks that this one has no program for a step, and why.

    They raise an error before they send anything. On GPUs they do not wait for this rank, unless the step `is_new` to
    all of them: they have launched it, and this rank leaves them.
    """
    is_launched = answers_late(mesh) and not is_new
    call = new_program_of(name) if is_new else step_of(name)
    if is_launched:  # they answer no question about this step before their next call
        call = f"{call}, without a program"
    try:
        agree(mesh, call, Failure(f"{type(error).__name__}: {error}"), lambda by_rank: "")
    except RuntimeError:  # of all ranks; the error of this one says more
        if is_launched:
            fail(process_groups(mesh), step_of(name), error)


def agree_on_call(mesh: DeviceMesh, call: str) -> None:
    """Check that all ranks of a mesh make this call."""
    agree(mesh, call, None, lambda by_rank: "")


def answers_late(mesh: DeviceMesh) -> bool:
    """Whether the ranks of a mesh read the answer about a step when the next call begins: on GPUs."""
    return mesh.device_type != "cpu"


def settle(mesh: DeviceMesh) -> None:
    """Read the answer about the last step, if it has not been read yet.

    Raises: RuntimeError on every rank if the ranks made different calls; LostRank if a rank has ended.
    """
    groups = process_groups(mesh)
    if groups.pending is None:
        return
    question, if_late = groups.pending
    groups.pending = None
    calls, problem = question.answer(mesh)
    if problem:
        cause = f"the ranks did not do the same in {calls}"
        if_late(cause)
        leave_disagreement(groups, cause)
        raise RuntimeError(f"{calls}: {_LATE}{problem}")


@dataclass(frozen=True, eq=False)
class _Question:
    """A comparison that has begun: `works` fill the records of all ranks."""

    call: str
    mine: Any
    explain: Explain
    records: torch.Tensor
    works: Sequence[Work]

    @staticmethod
    def ask(groups: ProcessGroups, call: str, mine: Any, explain: Explain) -> _Question:
        """Send this rank's record, and begin to receive those of the others."""
        # Every step sends this record, so it is a hash of a fixed size. Values are sent only if hashes differ.
        digest = hashlib.sha256(repr(mine).encode()).digest()[:16]
        record = bytearray(_RECORD.pack(digest, call.encode()[:112]))
        records = torch.frombuffer(record, dtype=torch.uint8).repeat(len(groups.ranks), 1)
        works: Sequence[Work]
        try:
            groups.open()
            channel = groups.channel(None, "ranks")
            this_rank = records[channel.group.rank()]
            with channel.errors():
                if channel.is_direct:
                    works = channel.exchange([this_rank] * len(records), list(records))
                else:
                    works = [dist.all_gather(list(records), this_rank, channel.group, True)]
        except LostRank as error:
            raise leave_lost_ranks(groups, call, error) from error
        return _Question(call, mine, explain, records, works)

    def answer(self, mesh: DeviceMesh) -> tuple[str, str]:
        """Wait for all records. Returns the calls of the ranks, and what differs; that is empty if they agree."""
        groups = process_groups(mesh)
        try:
            with groups.channel(None, "ranks").errors():
                for work in self.works:
                    work.wait()
        except LostRank as error:
            raise leave_lost_ranks(groups, self.call, error) from error
        records = list(_RECORD.iter_unpack(self.records.numpy().tobytes()))
        if len(set(records)) == 1:
            return self.call, ""
        names = [name.rstrip(b"\0").decode(errors="replace") for _, name in records]
        if len(set(names)) > 1:
            return " and ".join(dict.fromkeys(names)), _different_calls(groups.ranks, names)
        # The ranks make the same call with different values. Only now are the values themselves sent.
        values = dict(zip(groups.ranks, everywhere(self.mine, mesh)))
        return self.call, _failed(values) or self.explain(values)


def everywhere(value: T, mesh: DeviceMesh) -> list[T]:
    """The values that the ranks of a mesh pass, in the order of `mesh.mesh`. All of its ranks must call it together.

    Raises: LostRank if a rank has ended or does not answer.
    """
    groups = process_groups(mesh)
    try:
        if not groups.is_alone:
            groups.open()
        return groups.from_all(value)
    except LostRank as error:
        raise leave_lost_ranks(groups, "ztrans", error) from error


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
