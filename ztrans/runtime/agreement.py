"""Agreement: the ranks of a mesh compare what they are about to do.

The messages of a step have no names. If ranks made different calls, one would take the bytes of another for its own,
or wait forever. So each call that communicates begins with `agree`: every rank sends the name of its call, and a digest
of what must be the same on all ranks, to every other rank. If the records differ, all ranks raise the same error, and
nothing else has been sent.

On GPUs the host launches work ahead of the device, and would have to wait for the other hosts in every step. So there
the answer about a step is read when the next call begins. If the ranks differ, that step has run, and its state is
marked as half updated.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..ir.axes import rows
from ..ir.collectives import buffer_bytes, is_start, role, wire_dtype
from ..ir.graph import DTYPES, Eqn, Graph, Var, variables
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.relations import grouped
from ..ir.user_collectives import is_users, is_wait
from ..ir.varying import replicated_equations
from .collectives import has_second_level_at_wait
from .failure import STOP_TOGETHER, fail, lost, rank_names
from .process_groups import LostRank, ProcessGroups, Work, process_groups

T = TypeVar("T")
Explain = Callable[[Mapping[int, Any]], str]

_RECORD = struct.Struct("<16s112s")  # the digest of a value, and the name of a call
_IN_TIME = "the ranks of the mesh do not do the same, so none of them has sent anything.\n"
_LATE = (
    "the ranks of the mesh did not do the same, and the step has run: its state is half updated.\n"
)
_NO_MORE = "no more messages"
_SAME_PROGRAM = (
    "Batches may differ in size from rank to rank, but every rank must take the same branches, with the same "
    "transforms, hyperparameters and numbers, and its update must not depend on the size of its batch. Compare "
    "print(step.lower(state, batch)) of two ranks."
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
    question = _Question.ask(mesh, groups, call, mine, explain)
    if if_late is not None:
        groups.pending = question, if_late
        return
    calls, problem = question.answer(mesh)
    if problem:
        groups.forget_carried()
        raise RuntimeError(f"{calls}: {_IN_TIME}{problem}")


class Failure(NamedTuple):
    """What a rank says of a call that it cannot make, in place of its value."""

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
        groups.forget_carried()
        if_late(f"the ranks did not do the same in {calls}")
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
    def ask(
        mesh: DeviceMesh, groups: ProcessGroups, call: str, mine: Any, explain: Explain
    ) -> _Question:
        """Send this rank's record, and begin to receive those of the others."""
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
            raise lost(mesh, call, error) from error
        return _Question(call, mine, explain, records, works)

    def answer(self, mesh: DeviceMesh) -> tuple[str, str]:
        """Wait for all records. Returns the calls of the ranks, and what differs; that is empty if they agree."""
        groups = process_groups(mesh)
        try:
            with groups.channel(None, "ranks").errors():
                for work in self.works:
                    work.wait()
        except LostRank as error:
            raise lost(mesh, self.call, error) from error
        records = list(_RECORD.iter_unpack(self.records.numpy().tobytes()))
        if len(set(records)) == 1:
            return self.call, ""
        names = [name.rstrip(b"\0").decode(errors="replace") for _, name in records]
        if len(set(names)) > 1:
            return " and ".join(dict.fromkeys(names)), _different_calls(groups.ranks, names)
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
        raise lost(mesh, "ztrans", error) from error


def _failed(values: Mapping[int, Any]) -> str:
    """What an error says about the first rank that cannot make a call; empty if all can."""
    for rank, value in values.items():
        if isinstance(value, Failure):
            return f"  Rank {rank} has failed with {value.reason}"
    return ""


def _different_calls(ranks: Sequence[int], names: Sequence[str]) -> str:
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


# ---- programs


class Contract:
    """What a program does that must be the same on all ranks: its messages, its update, and the numbers that it reads.

    `update` is a hash of the update of the state. `mesh` is the mesh that runs the program, in the order that it has.
    """

    def __init__(self, graph: Graph, update: str, mesh: DeviceMesh | None = None) -> None:
        lines = messages(graph, at_waits(graph, mesh) if mesh is not None else {})
        self.lines = [*lines, _NO_MORE, f"an update with the hash {update}"]
        self.digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
        self._numbers = _shared_numbers(graph)

    def terms(self, inputs: Sequence[torch.Tensor], steps: int, goes_on: bool = False) -> tuple:
        """What the ranks compare in a step on these inputs, with a state that has taken so many steps.

        A step `goes_on` with the gathers that the step before has started, or starts them itself.
        """
        # Numbers on a GPU are not compared: the host would wait for them.
        numbers = []
        for i, name in self._numbers.items():
            if inputs[i].is_cpu:
                numbers.append(f"{name} = {inputs[i].tolist()}")
        return self.digest, numbers, steps, goes_on

    def explain(self, mesh: DeviceMesh, terms: Mapping[int, tuple]) -> str:
        """What an error says about terms that differ, by rank. All ranks of the mesh must call it."""
        first, *rest = terms.values()
        if all(of_rank[:3] == first[:3] for of_rank in rest):
            return _different_ways({rank: goes_on for rank, (*_, goes_on) in terms.items()})
        if all(of_rank[:2] == first[:2] for of_rank in rest):
            return different_steps({rank: steps for rank, (_, _, steps, _) in terms.items()})
        mine = [*self.lines, *terms[dist.get_rank()][1]]
        return first_difference(list(terms), everywhere(mine, mesh))


def _different_ways(goes_on: Mapping[int, bool]) -> str:
    """What an error says if only some ranks can use the gathers that the step before has started, by rank."""
    ranks = {
        way: [rank for rank, its_way in goes_on.items() if its_way == way] for way in (True, False)
    }
    return (
        f"  On {rank_names(ranks[True])} the step begins with gathers that the step before has started, as "
        f"prefetch(across_steps=True) says. On {rank_names(ranks[False])} it has another state, or one that has "
        f"changed since.\nChange the state between the same two steps on all ranks. The next call starts these gathers "
        f"anew on all of them."
    )


def messages(graph: Graph, sent_at_waits: Mapping[int, str]) -> list[str]:
    """The messages that a program sends, in order, a line for each. They must be the same on every rank.

    `sent_at_waits` are the lines of those that a wait sends, by the index of that wait.
    """
    lines = [f"{graph.micro} micro-batches"] if graph.micro > 1 else []
    for index, eqn in enumerate(graph.eqns):
        if index in sent_at_waits:
            lines.append(sent_at_waits[index])
        elif is_start(eqn):
            members = []
            for k, out in enumerate(eqn.results):
                size = buffer_bytes(eqn, k, graph.axes)
                members.append(f"{_member_name(eqn, out)} ({size} bytes)")
            kind = " ".join(filter(None, (op_name(eqn.op), eqn.kwargs.get("op"))))
            wire = DTYPES.get(wire_dtype(eqn, eqn.ins[0]), "")
            lines.append(f"{kind} over {eqn.kwargs['axis']} as {wire} of {', '.join(members)}")
        elif is_users(eqn) and not is_wait(eqn):
            # No sizes: along another axis, ranks may have batches of other sizes, and so messages of other sizes.
            values = [f"{v.name}: {DTYPES.get(v.dtype, v.dtype)}" for v in variables(eqn.args)]
            group = eqn.args[-1] if eqn.args else ""
            lines.append(f"{op_name(eqn.op)} over {group} of {', '.join(values)}")
    return lines


def at_waits(graph: Graph, mesh: DeviceMesh) -> dict[int, str]:
    """The messages that the waits of a program send, a line for each, by the index of the wait.

    Over gloo, the first wait for a message in two levels sends its second level, unless that has been sent before. If
    ranks waited in different orders, each could wait for what the other one sends at a later wait.
    """
    lines = {}
    for started in dict.fromkeys(waited.started for waited in pair(graph).waits.values()):
        start = started.start
        if has_second_level_at_wait(mesh, start, graph.axes):
            names = ", ".join(_member_name(start, out) for out in start.results)
            lines[started.first_wait] = (
                f"the second level of {op_name(start.op)} of {names}, at the first wait for it"
            )
    return lines


def _member_name(start: Eqn, out: Var) -> str:
    """The name of a member. If it belongs to no leaf, its number may be another one for a batch of another size."""
    name = out.name.removesuffix("'")
    return name if role(start) in ("param", "grad", "state") else re.sub(r"_\d+\b", "", name)


def _shared_numbers(graph: Graph) -> dict[int, str]:
    """The numbers that the new state depends on, other than through a reduction over the ranks: places and names."""
    in_state = set(variables(graph.outputs[: graph.num_state]))
    for eqn in replicated_equations(graph):
        in_state.update(eqn.ins)
    arguments = list(enumerate(graph.inputs))[graph.num_state :]
    return {
        i: v.name for i, v in arguments if v in in_state and v not in graph.batch and not v.future
    }


def first_difference(ranks: Sequence[int], lines: Sequence[Sequence[str]]) -> str:
    """What an error says about the first line in which a rank differs from the first rank.

    Behind `_NO_MORE`, the lines say how a rank updates its state.
    """
    k = next(k for k, lines_there in enumerate(lines) if list(lines_there) != list(lines[0]))
    # A rank may have more lines: numbers on a GPU have none.
    pairs = list(zip_longest(lines[0], lines[k], fillvalue="nothing"))
    position = next(i for i, (here, there) in enumerate(pairs) if here != there)
    place = f"Message {position} of the step is"
    if _NO_MORE in lines[0][:position]:
        place = "They send the same messages, but would update the state in another way or with other numbers."
    here, there = pairs[position]
    return f"  {place}\n    on rank {ranks[0]}: {here}\n    on rank {ranks[k]}: {there}\n{_SAME_PROGRAM}"


def step_of(name: str) -> str:
    """The name of the call in which ranks compare a step."""
    return f"a step of {name}"


def new_program_of(name: str) -> str:
    """The name of the call in which ranks agree on a program for a step."""
    return f"{step_of(name)}, with a program that is new here"


class Proposal(NamedTuple):
    """What a rank proposes to run."""

    program: str  # a hash of its program
    plan: Any


def agree_on_program(
    name: str, mesh: DeviceMesh, contract: Contract, mine: Proposal
) -> list[Proposal]:
    """The proposals of all ranks of a mesh. They must be for the same step; the sizes of its batches may differ.

    Raises: RuntimeError on every rank if the steps differ. It names the ranks and the first message in which they do.
    """

    def explain(lines: Mapping[int, list[str]]) -> str:
        return first_difference(list(lines), list(lines.values()))

    agree(mesh, new_program_of(name), contract.lines, explain)
    return everywhere(mine, mesh)


def agree_on_plan(name: str, mesh: DeviceMesh, problem: str) -> None:
    """Check that the plan of the first rank fits the programs of all ranks.

    `problem` says why it does not fit the program of this rank, and is empty if it does, as on the first rank.

    Raises: RuntimeError on every rank if the plan does not fit the program of one of them.
    """

    def explain(problems: Mapping[int, str]) -> str:
        rank, text = next((rank, text) for rank, text in problems.items() if text)
        first = next(iter(problems))
        return (
            f"  The plan of rank {first} does not fit the program of rank {rank}: {text}\n"
            f"Pad the batches to one size on all ranks."
        )

    agree(mesh, name, problem, explain)


# ---- values of the state

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # the positions that a digest distinguishes


class Leaf(NamedTuple):
    """A description of one leaf on one rank. `values` is its digest, or None if the values are not compared."""

    path: str
    kind: str
    values: tuple[int, ...] | None


def agree_on_state(
    mesh: DeviceMesh,
    axes: Sequence[Sequence[str]],
    paths: Sequence[str],
    leaves: Sequence[Any],
    source: int | None,
) -> None:
    """Compare each leaf of a state between the ranks that differ only along the axes of that leaf.

    Ranks that initialised their model from different random numbers would train different replicas, or a mixture of
    several models, and nothing would show it. Along the other axes of the mesh, such as that of tensor parallelism,
    ranks may hold different leaves. With a `source`, only the values of that rank are used, so values are not compared.

    Raises: RuntimeError on every rank, naming the first leaf that differs.
    """
    mine = [_described(path, x, source is None) for path, x in zip(paths, leaves)]

    def explain(described: Mapping[int, Sequence[Leaf]]) -> str:
        (first, first_leaves), *rest = described.items()
        for rank, theirs in rest:
            if [leaf.path for leaf in theirs] != [leaf.path for leaf in first_leaves]:
                return (
                    f"  Rank {rank} has {len(theirs)} leaves and rank {first} has {len(first_leaves)}, or they "
                    f"have other names.\nBuild the same model and optimizer on every rank. Of an optimizer that "
                    f"divides its state over ranks itself, use its single-device class."
                )
        different = different_leaf(mesh, axes, described)
        return _leaf_difference(described, *different) if different is not None else ""

    agree(mesh, "shard", mine, explain)


def different_leaf(
    mesh: DeviceMesh, axes: Sequence[Sequence[str]], by_rank: Mapping[int, Sequence[Any]]
) -> tuple[int, int, int] | None:
    """The first leaf that ranks which differ only along its axes describe differently, and two of these ranks."""
    names = mesh.mesh_dim_names or ()
    groups = {of_leaf: rows(mesh.mesh, names, of_leaf) for of_leaf in set(map(tuple, axes))}
    for k, of_leaf in enumerate(axes):
        for first, *rest in groups[tuple(of_leaf)]:
            for rank in rest:
                if by_rank[rank][k] != by_rank[first][k]:
                    return k, first, rank
    return None


def digest(x: torch.Tensor) -> tuple[int, ...]:
    """Two sums of the bits of a tensor: a plain one, and one weighted by the position of each element.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
    False
    """
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    words = x.contiguous().view(-1).view(_WORDS[x.itemsize])
    rest = words.numel() % _ROW
    sums = words[: words.numel() - rest].view(-1, _ROW).sum(0, dtype=torch.int64)
    sums[:rest] += words[words.numel() - rest :].to(torch.int64)
    # The factor is odd, so that every position counts.
    weights = torch.arange(1, _ROW + 1, device=x.device) * 0x9E3779B1
    return tuple(torch.stack([sums.sum(), (sums * weights).sum()]).tolist())


def _described(path: str, x: Any, compare_values: bool) -> Leaf:
    if isinstance(x, DTensor):
        return Leaf(path, f"a DTensor {list(x.shape)} of {x.dtype}", None)
    if not isinstance(x, torch.Tensor):
        return Leaf(path, f"a number, {x!r}", None)
    kind = f"{list(x.shape)} of {x.dtype}"
    if not compare_values:
        return Leaf(path, kind, None)
    if x.is_meta:
        return Leaf(path, f"{kind} on meta, without values", None)
    return Leaf(path, kind, digest(x))


def _leaf_difference(described: Mapping[int, Sequence[Leaf]], k: int, first: int, rank: int) -> str:
    there = described[first][k]
    here = described[rank][k]
    if there.kind != here.kind:
        return (
            f"  {here.path} is {there.kind} on rank {first} and {here.kind} on rank {rank}.\n"
            f"Build the same state on every rank, or let one rank's count: step.shard(state, source=0), where the "
            f"others hold tensors of the same shapes, which may be on meta."
        )
    return (
        f"  {here.path} has other values on rank {rank} than on rank {first}, so the ranks would train different "
        f"replicas.\nLet the values of rank 0 count, step.shard(state, source=0), or seed all ranks alike before the "
        f"model is built, and load the same checkpoint."
    )
