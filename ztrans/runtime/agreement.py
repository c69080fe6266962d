"""The comparison with which the ranks of a mesh check, before they communicate, that they make the same call.

The messages of a step have no names. If ranks made different calls, a rank would read bytes meant for another call, or
wait forever. So each call that communicates begins with `agree`: the ranks compare a digest of the call's name and of
the values that must be equal on all of them. If the digests differ, they send the values themselves, and all ranks
raise the same error before anything else is sent.

A record has the digest, its complement, and some bits. Ranks combine records by an elementwise maximum, which gives the
greatest digest and the complement of the least one, so the digests are equal if these two match. A record has the same
size for any number of ranks. In a round, each rank exchanges it with at most eight others, farther away in each round:
one round for 9 ranks, two for 81, four for 6,561. gloo's own collectives, `all_reduce` included, would pass messages
around the ring of all ranks.

On GPUs the host launches work ahead of the device, and waiting for the other hosts in every step would end that. So
there the answer about a step is read when the next call begins. If the ranks differ, the step has been launched, and
its messages may wait for each other forever, so all ranks end (see `watch`). If a rank makes another call instead, such
as `save`, it learns that the others have launched a step, and ends them at once. With more than 9 ranks, all ranks
exchange the rounds after the first when the next call begins.

A record also says whether its rank has been asked to stop (see `stop`), so all ranks learn that in the same step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import MOST_RANKS_OF_EXCHANGE
from ..ir.dependencies import grouped
from ..ir.printer import counted
from . import stop
from .session import STOP_TOGETHER, Session, rank_names, session_of

T = TypeVar("T")
Explain = Callable[[Mapping[int, Any]], str]

_DIGEST = struct.Struct("<2q")
_FARTHEST = MOST_RANKS_OF_EXCHANGE // 2  # multiples of a distance, on either side of a rank
# The version of the records. Ranks compare versions first, in messages whose form never changes.
_RECORDS = 1
_VERSIONS = 256  # bytes of text
_MOST_REMARKS = 4
_IN_TIME = "the ranks of the mesh do not do the same, so none of them has sent anything.\n"
_LAUNCHED = (
    "the ranks of the mesh do not make the same call. This rank has sent nothing, but others have launched "
    "a step.\n"
)
_OTHER_VERSIONS = "ztrans: the ranks of the mesh run different versions, and their programs and messages may differ.\n"
_LATE = (
    "the ranks of the mesh did not do the same, and the step has run: its state is half updated.\n"
)


def agree(
    session: Session,
    call: str,
    mine: Any,
    explain: Explain,
    launches: bool = False,
    remarks: Sequence[str] = (),
) -> None:
    """Check that all ranks of a mesh make the same call. All of them must call this together.

    Args:
        session: the session of the mesh.
        call: the name of the call.
        mine: this rank's values that must be the same on all ranks, made of numbers and texts.
        explain: maps the values of all ranks, by rank, to the text of the error; empty if they may differ in this way.
            All ranks call it, so it may communicate.
        launches: whether this rank launches a step first, and reads the answer when the next call begins.
        remarks: lines for the error about this rank's call if the other ranks make another one.

    Raises: RuntimeError on every rank if the ranks make different calls, or run different versions; LostRank if a rank
        has ended or does not answer.
    """
    if session.is_alone:
        return
    session.read_pending()
    question = _Question(session, call, mine, explain, launches, remarks)
    if launches:
        session.pending = question
        return
    answer = question.answer(session)
    if answer.is_mixed:  # others have launched a step
        session.leave(mine.note if isinstance(mine, Failure) else f"made another call, {call}")
        raise RuntimeError(f"{call}: {_LAUNCHED}")
    if answer.problem:
        session.forget_carried()
        raise RuntimeError(f"{answer.calls}: {_IN_TIME}{answer.problem}")


class Failure(NamedTuple):
    """The value of a rank that cannot make a call."""

    call: str
    reason: str

    @property
    def note(self) -> str:
        """The text of this rank's note, for ranks that have launched the step without it."""
        return f"failed in {self.call} with {self.reason.splitlines()[0]}"


def say_failure(mesh: DeviceMesh, name: str, error: Exception) -> None:
    """Tell the other ranks that this one has no program for a step, and why.

    They raise an error before they send anything. If they have launched the step, as on GPUs, this rank leaves.
    """
    failure = Failure(step_of(name), f"{type(error).__name__}: {error}")
    # The caller raises this rank's own error, which says more.
    with contextlib.suppress(RuntimeError):
        call = f"{step_of(name)}, without a program"
        agree(session_of(mesh), call, failure, lambda by_rank: "")


def agree_on_call(mesh: DeviceMesh, call: str) -> None:
    """Check that all ranks of a mesh make this call."""
    agree(session_of(mesh), call, None, lambda by_rank: "")


class _Answer(NamedTuple):
    """The result of a comparison.

    Attributes:
        calls: the names of the ranks' calls.
        problem: the difference in words; empty if the ranks agree.
        is_mixed: whether some ranks have launched a step while others wait in another call.
    """

    calls: str
    problem: str = ""
    is_mixed: bool = False


class _Record(NamedTuple):
    """The record of a rank, or the maximum of several: two halves of a digest, their complements, and bits.

    Attributes:
        launches: 1 if a rank launches its step before it reads the answer.
        waits: 1 if a rank waits for the answer.
        stops: 1 if a rank has been asked to stop.
    """

    high: int
    low: int
    not_high: int
    not_low: int
    launches: int
    waits: int
    stops: int

    @property
    def has_equal_digests(self) -> bool:
        return (self.high, self.low) == (~self.not_high, ~self.not_low)

    @property
    def is_mixed(self) -> bool:
        return bool(self.launches and self.waits)


class _Question:
    """A comparison in progress: its first exchange of records has begun.

    `launches` says that this rank launches its step before it reads the answer.
    """

    def __init__(
        self,
        session: Session,
        call: str,
        mine: Any,
        explain: Explain,
        launches: bool,
        remarks: Sequence[str],
    ) -> None:
        self.call = call
        self.mine = mine
        self.explain = explain
        self.remarks = remarks
        # Every step sends this record, so it holds a hash of fixed size. Values are sent only if the hashes differ.
        high, low = _DIGEST.unpack_from(hashlib.sha256(repr((call, mine)).encode()).digest())
        record = _Record(high, low, ~high, ~low, launches, not launches, stop.is_requested())
        with session.leaving(call):
            session.open()
            session.sent_records.clear()
            channel = session.channel(None, "ranks")
            if not session.has_compared_versions:
                _compare_versions(session)
            self._rounds = rounds_of(channel.group.rank(), len(session.ranks))
            self._begin_round(session, self._rounds[0], record)

    def _begin_round(self, session: Session, ranks: Sequence[int], record: _Record) -> None:
        channel = session.channel(None, "ranks")
        mine = torch.tensor(record)
        self.records = mine.repeat(len(ranks), 1)  # the row of this rank stays
        works = channel.exchange([mine] * len(ranks), list(self.records), ranks)
        receives = len(ranks) - 1
        self._receives = works[:receives]
        session.sent_records += works[receives:]

    def _end_round(self) -> _Record:
        """Wait for the records of the other ranks, and return the maximum.

        It does not wait for the sends. Every rank posts its receives before its sends, so when its record arrives, our
        record has been handed to the connection. If that rank then resets the connection, gloo never wakes a wait for
        the send.
        """
        try:
            while self._receives:
                self._receives.pop().wait()
        except BaseException:
            self._receives.clear()  # a message in progress would keep its connection open
            raise
        return _Record(*self.records.amax(0).tolist())

    def read(self, session: Session) -> None:
        """Read the answer about a step that this rank has launched.

        Raises: RuntimeError on every rank if the ranks made different calls; LostRank if a rank has ended.
        """
        answer = self.answer(session)
        if answer.is_mixed:
            # The other rank leaves the session, and its note names its call.
            error = RuntimeError(f"another rank did not launch {answer.calls}")
            raise session.lost(answer.calls, error)
        if answer.problem:
            # A rank may wait for a message that no rank sends, so the mesh cannot continue. All ranks come here.
            text = f"{answer.calls}: {_LATE}{answer.problem}"
            session.leave(f"has read that in {text}")
            raise RuntimeError(text)

    def answer(self, session: Session) -> _Answer:
        """Wait for the records, and compare them."""
        channel = session.channel(None, "ranks")
        with session.leaving(self.call), channel.errors():
            record = self._end_round()
            for ranks in self._rounds[1:]:
                if record.is_mixed:
                    break
                self._begin_round(session, ranks, record)
                record = self._end_round()
        if record.is_mixed:
            # Ranks that have launched a step read the answer at another time, so the values cannot be exchanged.
            return _Answer(self.call, is_mixed=True)
        if record.stops:
            session.stop_requested = True
        if record.has_equal_digests:
            return _Answer(self.call)
        calls = {}
        values = {}
        remarks = {}
        by_rank = session.from_all((self.call, self.mine, tuple(self.remarks)))
        for rank, (call, value, remarks_of_rank) in zip(session.ranks, by_rank):
            calls[rank] = call
            values[rank] = value
            remarks[rank] = remarks_of_rank
        failure = _failure_text(values)
        if failure:
            return _Answer(self.call, failure)
        if len(set(calls.values())) > 1:
            names = " and ".join(dict.fromkeys(calls.values()))
            return _Answer(names, _different_calls(calls, remarks))
        return _Answer(self.call, self.explain(values))


@functools.cache
def rounds_of(rank: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each round, the ranks with which a rank exchanges records, itself included.

    After each round its record covers all ranks up to some distance on either side.

    >>> rounds_of(0, 3)
    ((0, 1, 2),)
    >>> rounds_of(0, 16)
    ((0, 1, 2, 3, 4, 12, 13, 14, 15), (0, 7, 9))
    """
    rounds = []
    covered = 0
    while covered < ranks // 2:
        step = 2 * covered + 1
        members = {rank}
        for distance in range(step, _FARTHEST * step + 1, step):
            if distance - covered <= ranks // 2:
                members |= {(rank + distance) % ranks, (rank - distance) % ranks}
        rounds.append(tuple(sorted(members)))
        covered += _FARTHEST * step
    return tuple(rounds)


def _compare_versions(session: Session) -> None:
    """Check once for a mesh that all ranks run the same versions.

    Raises: RuntimeError on every rank if they do not.
    """
    mine = torch.frombuffer(bytearray(_versions().encode().ljust(_VERSIONS)), dtype=torch.uint8)
    versions = mine.repeat(len(session.ranks), 1)
    channel = session.channel(None, "ranks")
    with channel.errors():
        dist.all_gather(list(versions), mine, channel.group)
    texts = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in versions]
    if len(set(texts)) > 1:
        raise RuntimeError(
            f"{_OTHER_VERSIONS}{_lines_by_ranks(dict(zip(session.ranks, texts)))}"
            f"Install the same versions on all hosts."
        )
    session.has_compared_versions = True


def _versions() -> str:
    library = sys.modules[__name__.partition(".")[0]]
    python = ".".join(map(str, sys.version_info[:2]))
    return f"ztrans {library.__version__}, torch {torch.__version__}, Python {python}, records {_RECORDS}"


def everywhere(value: T, mesh: DeviceMesh) -> list[T]:
    """The values that the ranks of a mesh pass, in the order of `mesh.mesh`. All ranks must call it together.

    Raises: LostRank if a rank has ended or does not answer.
    """
    return session_of(mesh).from_all(value)


def from_first(value: T, mesh: DeviceMesh) -> T:
    """The value that the first rank of a mesh passes. All ranks must call it together.

    Raises: LostRank, on the other ranks, if the first one has ended or does not answer.
    """
    return session_of(mesh).from_first(value)


def _failure_text(values: Mapping[int, Any]) -> str:
    """The line of an error about the first rank that cannot make a call; empty if all can."""
    for rank, value in values.items():
        if isinstance(value, Failure):
            return f"  Rank {rank} has failed with {value.reason}"
    return ""


def _different_calls(calls: Mapping[int, str], remarks: Mapping[int, Sequence[str]]) -> str:
    """The text of an error about ranks that make different calls, with remarks about the call of each rank."""
    texts = {}
    for rank, call in calls.items():
        lines = "".join(f"\n    {remark}" for remark in remarks[rank][:_MOST_REMARKS])
        texts[rank] = call + lines
    return (
        f"{_lines_by_ranks(texts)}Every rank must make the same calls in the same order, evaluations too: an `if` "
        f"around one must be the same on all ranks. If the data of some ranks has ended, {STOP_TOGETHER}"
    )


def _lines_by_ranks(texts: Mapping[int, str]) -> str:
    """A line for each different text, with the ranks that have it."""
    ranks_by_text = grouped((text, rank) for rank, text in texts.items())
    return "".join(f"  {rank_names(ranks)}: {text}\n" for text, ranks in ranks_by_text.items())


def different_steps(steps: Mapping[int, int]) -> str:
    """The text of an error about states that have taken different numbers of steps, by rank."""
    counts = {rank: counted(count, "step") for rank, count in steps.items()}
    return (
        f"  The states have taken different numbers of steps since they were sharded:\n{_lines_by_ranks(counts)}"
        f"Load the same checkpoint on all ranks, state = step.shard(loaded), and go on from there."
    )


def step_of(name: str) -> str:
    """The name of the call in which ranks compare a step."""
    return f"a step of {name}"


def new_program_of(name: str) -> str:
    """The name of the call in which ranks agree on a program for a step."""
    return f"{step_of(name)}, with a program that is new here"
