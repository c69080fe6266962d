"""The contract of a program, which must be the same on all ranks, and the agreement on a new program and its plan.

A contract has the program's messages, its update of the state, and the numbers that the new state depends on. The sizes
of batches may differ from rank to rank, and so may the rest of the program. All ranks follow the plan of the first one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import buffer_bytes, is_start, role, wire_format
from ..ir.graph import DTYPES, Eqn, Graph, Var, variables
from ..ir.higher_order import Function
from ..ir.nested import instances
from ..ir.op_facts import is_random
from ..ir.pairing import pair
from ..ir.printer import one_line, op_name
from ..ir.structure import elements
from ..ir.user_collectives import is_user_start
from ..ir.varying import replicated_equations
from .agreement import agree, different_steps, everywhere, from_first, new_program_of
from .collectives import has_second_level_at_wait
from .replicas import different_leaf
from .session import rank_names, session_of

T = TypeVar("T")
_NO_MORE = "no more messages"
# Roles of collectives whose members may have the size of the batch.
_BATCH_SIZED = ("output", "pmean")
_SAME_PROGRAM = (
    "Batches may differ in size from rank to rank, but every rank must take the same branches, with the same "
    "transforms, hyperparameters and numbers, and its update must not depend on the size of its batch. Compare "
    "print(step.lower(state, batch)) of two ranks."
)


class Terms(NamedTuple):
    """The values that the ranks compare in a step.

    Attributes:
        digest: the digest of the contract.
        numbers: the numbers among the arguments that the new state depends on, as text.
        state_numbers: the numbers in the state, by position.
        steps: the number of steps that the state has taken.
        uses_carried: whether the step uses the gathers that the step before has started, or starts its own.
    """

    digest: str
    numbers: list[str]
    state_numbers: dict[int, float]
    steps: int
    uses_carried: bool


class Contract:
    """The messages of a program, its update of the state, and the numbers that it reads. All ranks must have the same.

    Args:
        graph: the program.
        update: a hash of the update of the state (see `update_hash`).
        mesh: the mesh, once the program has the order in which it runs; None before.
        axes: for each input, the axes along which ranks hold the same values. Those of the state are read.
    """

    def __init__(
        self,
        graph: Graph,
        update: str,
        mesh: DeviceMesh | None = None,
        axes: Sequence[Sequence[str]] = (),
    ) -> None:
        lines = message_lines(graph, lines_at_waits(graph, mesh) if mesh is not None else {})
        self.lines = [*lines, _NO_MORE, f"an update with the hash {update}"]
        self.digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
        self._numbers = _shared_numbers(graph)
        self._state_axes = axes
        self._state_names = [v.name for v in graph.state]
        # Other scalars, such as the counters of an optimizer, are changed by the step itself, on all ranks alike.
        self._unchanged_scalars = []
        for i, (old, new) in enumerate(graph.leaves):
            if old.shape == () and new is old:
                self._unchanged_scalars.append(i)

    def terms(
        self,
        inputs: Sequence[torch.Tensor],
        steps: int,
        uses_carried: bool = False,
        set_by_caller: Sequence[int] = (),
    ) -> Terms:
        """The values that must be equal on all ranks before a step on these inputs.

        `set_by_caller` are the leaves of the state that the caller has set to numbers, by position.
        """
        # Numbers on a GPU are not compared: the host would wait for them.
        numbers = []
        for i, name in self._numbers.items():
            if inputs[i].is_cpu:
                numbers.append(f"{name} = {inputs[i].tolist()}")
        state_numbers = {}
        for i in (*self._unchanged_scalars, *set_by_caller):
            if inputs[i].is_cpu:
                state_numbers[i] = inputs[i].item()
        return Terms(self.digest, numbers, state_numbers, steps, uses_carried)

    def explain(self, mesh: DeviceMesh, terms: Mapping[int, Terms]) -> str:
        """The text of an error about terms that differ, by rank. All ranks of the mesh must call it."""
        first, *others = terms.values()
        if any((x.digest, x.numbers) != (first.digest, first.numbers) for x in others):
            mine = [*self.lines, *terms[dist.get_rank()].numbers]
            return first_difference(list(terms), everywhere(mine, mesh))
        if any(x.steps != first.steps for x in others):
            return different_steps({rank: x.steps for rank, x in terms.items()})
        if any(x.uses_carried != first.uses_carried for x in others):
            return _different_gathers({rank: x.uses_carried for rank, x in terms.items()})
        return self._different_state(mesh, {rank: x.state_numbers for rank, x in terms.items()})

    def _different_state(self, mesh: DeviceMesh, by_rank: Mapping[int, Mapping[int, float]]) -> str:
        """The text of an error about different numbers in the state; empty if they may differ.

        `by_rank` has the numbers by rank and position. Along an axis that the step does not use, ranks may have
        different numbers.
        """
        positions = sorted(set().union(*by_rank.values()))
        axes = [self._state_axes[i] for i in positions]
        values = {rank: [numbers.get(i) for i in positions] for rank, numbers in by_rank.items()}
        different = different_leaf(mesh, axes, values)
        if different is None:
            return ""
        k, first, rank = different
        name = self._state_names[positions[k]]
        return (
            f"  They would update the state with other numbers.\n"
            f"    on rank {first}: {name} = {_as_text(values[first][k])}\n"
            f"    on rank {rank}: {name} = {_as_text(values[rank][k])}\n"
            f"Set a number of the state to the same value on all ranks, between the same two steps. If it depends on a "
            f"loss, use the one that the step returns, which is the mean over all ranks."
        )


def _as_text(number: float | None) -> str:
    return "as the step before left it" if number is None else repr(number)


def _different_gathers(uses_carried: Mapping[int, bool]) -> str:
    """The text of an error if only some ranks can use the gathers that the step before has started, by rank."""
    using = [rank for rank, uses in uses_carried.items() if uses]
    starting = [rank for rank, uses in uses_carried.items() if not uses]
    return (
        f"  On {rank_names(using)} the step begins with gathers that the step before has started, as "
        f"prefetch(across_steps=True) says. On {rank_names(starting)} it has another state, or one that has "
        f"changed since.\nChange the state between the same two steps on all ranks. The next call starts these gathers "
        f"again on all of them."
    )


def _shared_numbers(graph: Graph) -> dict[int, str]:
    """The names, by position, of the numbers that the new state depends on, except through a reduction over ranks."""
    read_alike = set(graph.new_state)
    for eqn in replicated_equations(graph):
        read_alike.update(eqn.ins)
    names = {}
    for i, v in enumerate(graph.arguments, graph.num_state):
        is_number = v not in graph.batch and v.memory == "device"  # and no copy of a leaf
        if v in read_alike and is_number:
            names[i] = v.name
    return names


# ---- messages


def message_lines(graph: Graph, sent_at_waits: Mapping[int, str]) -> list[str]:
    """A line for each message that a program sends, in order. The lines must be the same on every rank.

    `sent_at_waits` has the lines of messages that a wait sends, by the index of the wait.
    """
    lines = [f"{graph.micro} micro-batches"] if graph.micro > 1 else []
    for index, eqn in enumerate(graph.eqns):
        if index in sent_at_waits:
            lines.append(sent_at_waits[index])
        elif is_start(eqn):
            lines.append(_message(graph, eqn))
        elif is_user_start(eqn):
            lines.append(_user_message(eqn))
    return lines


def _message(graph: Graph, start: Eqn) -> str:
    """The line of a collective: what it does, over which axis, and the names and bytes of its members."""
    members = []
    for k, out in enumerate(start.results):
        size = buffer_bytes(start, k, graph.axes)
        members.append(f"{_member_name(start, out)} ({size} bytes)")
    kind = op_name(start.op)
    if start.kwargs.get("op"):
        kind = f"{kind} {start.kwargs['op']}"
    wires = dict.fromkeys(str(wire_format(start, v)) for v in start.ins)
    wire = " and ".join(wires)
    if start.kwargs.get("between") is not None:
        wire = f"{wire}, between hosts as {start.kwargs['between']},"
    return f"{kind} over {start.kwargs['axis']} as {wire} of {', '.join(members)}"


def _user_message(eqn: Eqn) -> str:
    """The line of a collective that the user's step calls itself.

    It has no sizes: batches of other sizes along another axis make messages of other sizes.
    """
    values = [f"{v.name}: {DTYPES.get(v.dtype, v.dtype)}" for v in variables(eqn.args)]
    group = eqn.args[-1] if eqn.args else ""
    return f"{op_name(eqn.op)} over {group} of {', '.join(values)}"


def lines_at_waits(graph: Graph, mesh: DeviceMesh) -> dict[int, str]:
    """A line for each message that a wait of a program sends, by the index of the wait.

    Over gloo, the first wait for a hierarchical message sends its second level, unless that was sent before. If ranks
    waited in different orders, each could wait for a message that the other sends only at a later wait.
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
    """The name of a member, without its number if it belongs to no leaf: that may depend on the size of the batch."""
    name = out.base_name
    return name if role(start) in ("param", "grad", "state") else re.sub(r"_\d+\b", "", name)


def first_difference(ranks: Sequence[int], lines: Sequence[Sequence[str]]) -> str:
    """The text of an error about the first line in which a rank differs from the first rank.

    The lines after `_NO_MORE` are about the update of the state.
    """
    k = next(k for k, lines_there in enumerate(lines) if list(lines_there) != list(lines[0]))
    # Ranks may have different numbers of lines: numbers on a GPU have none.
    pairs = list(zip_longest(lines[0], lines[k], fillvalue="nothing"))
    position = next(i for i, (here, there) in enumerate(pairs) if here != there)
    place = f"Message {position} of the step is"
    if _NO_MORE in lines[0][:position]:
        place = "They send the same messages, but would update the state in another way or with other numbers."
    here, there = pairs[position]
    return f"  {place}\n    on rank {ranks[0]}: {here}\n    on rank {ranks[k]}: {there}\n{_SAME_PROGRAM}"


# ---- the update of the state


@cached_on_graph
def update_hash(graph: Graph) -> str:
    """A hash of the update of the state, with its constants. If it differed between ranks, their states would diverge.

    Values are numbered in order, because a batch of another size may give them other names.
    """
    digest = hashlib.sha256()
    batch_sized = _batch_sized(graph)
    replicated = replicated_equations(graph)
    # Without reductions of gradients, the new state depends on all of forward, which may differ along the step's own
    # axes. Then only the update is hashed.
    reduces_grads = any(role(e) == "grad" for e in graph.eqns)
    numbers: dict[Var, Any] = {v: v.name for v in graph.inputs}
    for e in graph.eqns:
        if e not in replicated or e.provenance is not None:
            continue
        if e.region != "update" and not reduces_grads:
            continue
        if any(out in batch_sized for out in e.outs):
            continue

        leaves, tree = pytree.tree_flatten((e.args, dict(e.kwargs)))
        literals = [_literal(leaf, numbers) for leaf in leaves]
        digest.update(repr((str(e.op), tree, literals)).encode())
        digest.update(_constants(e))
    return digest.hexdigest()[:16]


def _batch_sized(graph: Graph) -> set[Var]:
    """The values whose shapes or constants may depend on the size of the batch."""
    sized = set(graph.batch)
    for e in graph.eqns:
        if e.provenance is not None:
            is_sized = e.provenance.role in _BATCH_SIZED
        else:
            is_sized = is_random(e) or any(v in sized for v in e.ins)
        if is_sized:
            sized.update(e.results)
    return sized


def _literal(x: Any, numbers: dict[Var, Any]) -> Any:
    """A value as its number, a tensor as its shape, a literal as text."""
    if isinstance(x, Var):
        return numbers.setdefault(x, len(numbers))
    if isinstance(x, torch.Tensor):
        return tuple(x.shape)
    if isinstance(x, Function):
        return one_line(x)
    return repr(x)


def _constants(e: Eqn) -> bytes:
    """The contents of the constant tensors of an equation, such as torch.tensor(...) in the step."""
    return b"".join(elements(x) for x in instances((e.args, e.kwargs), torch.Tensor))


# ---- one program for all ranks


def agree_on_program(
    name: str, mesh: DeviceMesh, contract: Contract, plan: T, changes: Sequence[str] = ()
) -> T:
    """The plan of the first rank of a mesh. All ranks must plan the same step; the sizes of its batches may differ.

    `changes` says how the call differs from the one before, for the error if other ranks need no new program.

    Raises: RuntimeError on every rank if the steps differ. It names the ranks and the first message that differs.
    """

    def explain(lines: Mapping[int, list[str]]) -> str:
        return first_difference(list(lines), list(lines.values()))

    agree(session_of(mesh), new_program_of(name), contract.lines, explain, remarks=changes)
    return from_first(plan, mesh)


def agree_on_plan(name: str, mesh: DeviceMesh, problem: str) -> None:
    """Check that the plan of the first rank fits the programs of all ranks.

    `problem` says why the plan does not fit the program of this rank. It is empty if it fits, as on the first rank.

    Raises: RuntimeError on every rank if the plan does not fit the program of one of them.
    """

    def explain(problems: Mapping[int, str]) -> str:
        rank, text = next((rank, text) for rank, text in problems.items() if text)
        first = next(iter(problems))
        return (
            f"  The plan of rank {first} does not fit the program of rank {rank}: {text}\n"
            f"Pad the batches to one size on all ranks."
        )

    agree(session_of(mesh), name, problem, explain)
