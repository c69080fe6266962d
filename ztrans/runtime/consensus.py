"""Consensus: the ranks of a mesh agree on a program and a plan before they run, and on the duration of a step."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import buffer_bytes, is_start, role, wire_dtype
from ..ir.collectives.user_collectives import is_users, is_wait
from ..ir.collectives.varying import alike
from ..ir.graph import DTYPES, Eqn, Graph, Var, variables
from ..ir.layout import AbstractMesh
from ..ir.printer import op_name
from .meeting import NO_MORE, SAME_PROGRAM, Call, everywhere, first_difference, meet


def messages(graph: Graph) -> list[str]:
    """The messages that a program sends, in order, a line for each. They must be the same on every rank."""
    lines = [f"{graph.micro} micro-batches"] if graph.micro > 1 else []
    for e in graph.eqns:
        if is_start(e):
            sizes = [buffer_bytes(e, k, graph.axes) for k in range(len(e.outs))]
            names = [f"{_shown(e, out)} ({size} bytes)" for out, size in zip(e.results, sizes)]
            kind = " ".join(filter(None, (op_name(e.op), e.kwargs.get("op"))))
            wire = DTYPES.get(wire_dtype(e, e.ins[0]), "")
            lines.append(f"{kind} over {e.kwargs['axis']} as {wire} of {', '.join(names)}")
        elif is_users(e) and not is_wait(e):
            # No sizes: along another axis, ranks may have batches of other sizes, and so messages of other sizes.
            shown = ", ".join(
                f"{v.name}: {DTYPES.get(v.dtype, v.dtype)}" for v in variables(e.args)
            )
            lines.append(f"{op_name(e.op)} over {e.args[-1] if e.args else ''} of {shown}")
    return lines


def _shown(start: Eqn, out: Var) -> str:
    """The name of a member. If it belongs to no leaf, its number may be another one for a batch of another size."""
    name = out.name.removesuffix("'")
    return name if role(start) in ("param", "grad", "state") else re.sub(r"_\d+\b", "", name)


class Promise:
    """What a program does that must be the same on all ranks: its messages, its update, and the numbers that it reads.

    `update` is a hash of the update of the state.
    """

    def __init__(self, graph: Graph, update: str) -> None:
        self.lines = [*messages(graph), NO_MORE, f"an update with the hash {update}"]
        self._hash = int.from_bytes(
            hashlib.sha256("\n".join(self.lines).encode()).digest()[:8], "big", signed=True
        )
        self._numbers = _shared_numbers(graph)

    def hash(self, inputs: Sequence[torch.Tensor]) -> int:
        """A hash of the promise for these inputs, the same in every process."""
        return self._hash ^ zlib.crc32(repr(self._values(inputs)).encode())

    def of(self, inputs: Sequence[torch.Tensor]) -> list[str]:
        """The lines of the promise for these inputs."""
        return [*self.lines, *(f"{name} = {value}" for name, value in self._values(inputs).items())]

    def _values(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The numbers by name, except for those on a GPU, for which the host would have to wait."""
        return {name: inputs[i].tolist() for i, name in self._numbers.items() if inputs[i].is_cpu}


def _shared_numbers(graph: Graph) -> dict[int, str]:
    """The numbers that the new state depends on, other than through a reduction over the ranks: places and names."""
    read = {*variables(graph.outputs[: graph.num_state]), *(v for e in alike(graph) for v in e.ins)}
    arguments = list(enumerate(graph.inputs))[graph.num_state :]
    return {i: v.name for i, v in arguments if v in read and v not in graph.batch}


class Proposal(NamedTuple):
    """A rank's proposal of what to run."""

    program: str  # a hash of its program
    promise: list[str]
    plan: Any


def proposals(name: str, mesh: DeviceMesh, mine: Proposal) -> list[Proposal]:
    """The proposals of all ranks of a mesh. They must be for the same step; the sizes of its batches may differ.

    Raises: RuntimeError on every rank if the steps differ. It names the ranks and the first message in which they do.
    """
    meet(mesh, Call(f"a step of {name}, with a program that is new here"))
    everyone = everywhere(mine, mesh)
    first, ranks = everyone[0], mesh.mesh.flatten().tolist()
    differ = [r for r, p in zip(ranks, everyone) if p.promise != first.promise]
    if not differ:
        return everyone
    difference = first_difference(ranks, [p.promise for p in everyone])
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
