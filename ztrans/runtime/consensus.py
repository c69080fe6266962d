"""Agreement of ranks: on the program and the plan before they run, and on how long a step took."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import buffer_bytes, is_start, wire_dtype
from ..ir.graph import DTYPES, Graph, variables
from ..ir.layout import AbstractMesh
from ..ir.printer import op_name
from ..ir.user_collectives import is_users, is_wait
from ..planning.fingerprint import update_fingerprint
from ..planning.plan import Plan
from ..planning.plan_transfer import Landmark, landmarks, transfer
from .meeting import Call, everywhere, first_difference, meet

if TYPE_CHECKING:
    from ..stages import Lowered


def messages(graph: Graph) -> list[str]:
    """The messages that a program sends, in order, one a line: what must be the same on every rank."""
    lines = []
    for e in graph.eqns:
        if is_start(e):
            sizes = [buffer_bytes(e, k, graph.axes) for k in range(len(e.outs))]
            names = [f"{out.name.removesuffix(chr(39))} ({size} bytes)" for out, size in zip(e.outs, sizes)]
            kind = " ".join(filter(None, (e.op.name, e.kwargs.get("op"))))
            wire = DTYPES.get(wire_dtype(e, e.ins[0]), "")
            lines.append(f"{kind} over {e.kwargs['axis']} as {wire} of {', '.join(names)}")
        elif is_users(e) and not is_wait(e):
            # Along another axis ranks may have batches, and so messages, of other sizes.
            shown = ", ".join(f"{v.name}: {DTYPES.get(v.dtype, v.dtype)}" for v in variables(e.args))
            lines.append(f"{op_name(e.op)} over {e.args[-1] if e.args else ''} of {shown}")
    return lines


def messages_hash(graph: Graph) -> int:
    """A hash of `messages`, the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(messages(graph)).encode()).digest()[:8], "big", signed=True)


class Brought(NamedTuple):
    """What a rank brings to an agreement."""

    program: str
    update: str
    messages: list[str]
    plan: Plan
    marks: dict[str, Landmark]


def agree(lowered: Lowered) -> Lowered:
    """Compare the programs of all ranks of the mesh when a program first runs, so that a disagreement is an error.

    Batches may differ in size. All ranks take the plan of the mesh's first rank, which may have measured otherwise.

    Raises: RuntimeError on every rank, naming the ranks that differ and the first message where they do.
    """
    mesh, plan = lowered.mesh, lowered.plan
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1:
        return lowered
    name, hinted, ranks = lowered.graph.name, lowered.hinted, mesh.mesh.flatten().tolist()
    meet(mesh, Call(f"a step of {name}, with a program that is new here"))
    mine = Brought(plan.program, update_fingerprint(hinted), messages(hinted), plan, landmarks(hinted, plan))
    brought: list[Brought] = everywhere(mine, mesh)
    _check_alike(name, ranks, brought)
    first, problem = brought[0], ""
    try:
        if plan.program != first.program:
            lowered = lowered.following(transfer(first.plan, first.marks, hinted))
        elif plan.digest != first.plan.digest:
            lowered = lowered.following(first.plan)
    except ValueError as error:
        problem = f"rank {dist.get_rank()}: {error}"
    problems = everywhere(problem, mesh) if len({b.program for b in brought}) > 1 else [problem]
    if any(problems):
        raise RuntimeError(
            f"{name}: the plan of rank {ranks[0]} does not fit the program of another rank.\n"
            f"  {next(filter(None, problems))}\nPad the batches to one size on all ranks."
        )
    return lowered


def _check_alike(name: str, ranks: Sequence[int], brought: Sequence[Brought]) -> None:
    differ = [r for r, b in zip(ranks, brought) if (b.update, b.messages) != (brought[0].update, brought[0].messages)]
    if not differ:
        return
    lists = [b.messages for b in brought]
    alike = all(each == lists[0] for each in lists)
    what = "  They send the same messages, and update the state otherwise.\n" if alike else ""
    raise RuntimeError(
        f"{name}: ranks {differ} lowered another program than rank {ranks[0]} did.\n"
        f"{what or first_difference(ranks, lists)}"
        f"Batches may differ in size from rank to rank, but every rank must take the same branches, with the same "
        f"transforms and hyperparameters. Compare print(step.lower(state, batch)) of two ranks."
    )


def slowest(seconds: Sequence[float], mesh: DeviceMesh | AbstractMesh | None) -> list[float]:
    """Each of these as it was on the rank where it was longest."""
    every = everywhere(seconds, mesh) if isinstance(mesh, DeviceMesh) else [seconds]
    return list(map(max, zip(*every)))
