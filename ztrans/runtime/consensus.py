"""Consensus: the ranks of a mesh agree on a program and a plan before they run, and on the duration of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import buffer_bytes, is_start, wire_dtype
from ..ir.collectives.user_collectives import is_users, is_wait
from ..ir.graph import DTYPES, Graph, variables
from ..ir.layout import AbstractMesh
from ..ir.printer import op_name
from .meeting import SAME_PROGRAM, Call, everywhere, first_difference, meet


def messages(graph: Graph) -> list[str]:
    """The messages that a program sends, in order, a line for each. They must be the same on every rank."""
    lines = [f"{graph.micro} micro-batches"] if graph.micro > 1 else []
    for e in graph.eqns:
        if is_start(e):
            sizes = [buffer_bytes(e, k, graph.axes) for k in range(len(e.outs))]
            names = [f"{out.name.removesuffix(chr(39))} ({size} bytes)" for out, size in zip(e.results, sizes)]
            kind = " ".join(filter(None, (op_name(e.op), e.kwargs.get("op"))))
            wire = DTYPES.get(wire_dtype(e, e.ins[0]), "")
            lines.append(f"{kind} over {e.kwargs['axis']} as {wire} of {', '.join(names)}")
        elif is_users(e) and not is_wait(e):
            # No sizes: along another axis, ranks may have batches of other sizes, and so messages of other sizes.
            shown = ", ".join(f"{v.name}: {DTYPES.get(v.dtype, v.dtype)}" for v in variables(e.args))
            lines.append(f"{op_name(e.op)} over {e.args[-1] if e.args else ''} of {shown}")
    return lines


def messages_hash(graph: Graph) -> int:
    """A hash of `messages`, the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(messages(graph)).encode()).digest()[:8], "big", signed=True)


class Proposal(NamedTuple):
    """A rank's proposal of what to run."""

    program: str  # a hash of its program
    update: str  # a hash of its update
    messages: list[str]
    plan: Any


def proposals(name: str, mesh: DeviceMesh, mine: Proposal) -> list[Proposal]:
    """The proposals of all ranks of a mesh. They must be for the same step; the sizes of its batches may differ.

    Raises: RuntimeError on every rank if the steps differ. It names the ranks and the first message in which they do.
    """
    meet(mesh, Call(f"a step of {name}, with a program that is new here"))
    everyone = everywhere(mine, mesh)
    first, ranks = everyone[0], mesh.mesh.flatten().tolist()
    differ = [r for r, p in zip(ranks, everyone) if (p.update, p.messages) != (first.update, first.messages)]
    if not differ:
        return everyone
    lists = [p.messages for p in everyone]
    if all(sent == lists[0] for sent in lists):
        difference = "  They send the same messages, and update the state otherwise.\n"
    else:
        difference = first_difference(ranks, lists)
    raise RuntimeError(
        f"{name}: ranks {differ} lowered another program than rank {ranks[0]} did.\n{difference}{SAME_PROGRAM}"
    )


def check_adopted(name: str, mesh: DeviceMesh, everyone: Sequence[Proposal], problem: str) -> None:
    """Check that the plan of the first rank fits the programs of all ranks.

    `problem` says why it does not fit the program of this rank, and is empty if it does.

    Raises: RuntimeError on every rank if the plan does not fit the program of one of them.
    """
    mine = f"rank {dist.get_rank()}: {problem}" if problem else ""
    problems = everywhere(mine, mesh) if len({p.program for p in everyone}) > 1 else [mine]
    if any(problems):
        raise RuntimeError(
            f"{name}: the plan of rank {mesh.mesh.flatten()[0]} does not fit the program of another rank.\n"
            f"  {next(filter(None, problems))}\nPad the batches to one size on all ranks."
        )


def slowest(seconds: Sequence[float], mesh: DeviceMesh | AbstractMesh | None) -> list[float]:
    """For each of these durations, the longest over all ranks."""
    by_rank = everywhere(seconds, mesh) if isinstance(mesh, DeviceMesh) else [seconds]
    return list(map(max, zip(*by_rank)))
