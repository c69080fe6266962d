"""Agreement of ranks: on the program and the plan before they run, and on how long a step took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .layout import AbstractMesh
from .mesh import everywhere
from .plan import fingerprint

if TYPE_CHECKING:
    from .stages import Lowered


def agree(lowered: Lowered) -> Lowered:
    """Compare hashes of program and plan over the mesh when a program first runs, so that a disagreement is an
    error and not a hang. A rank that is the only one with a new program says so while it waits.

    Ranks that planned otherwise, having measured otherwise, take the plan of the mesh's first rank.

    Raises: RuntimeError naming the ranks that differ.
    """
    if not isinstance(lowered.mesh, DeviceMesh) or lowered.mesh.size() == 1:
        return lowered
    mesh, digest, me = lowered.mesh, lowered.plan.digest, dist.get_rank()
    ranks = mesh.mesh.flatten().tolist()
    name, inputs = lowered.graph.name, ", ".join(map(repr, lowered.graph.inputs[lowered.graph.num_state :]))
    alone = (
        f"{name}: rank {me} has a new program, its batch is {inputs}, and has waited a minute for the other ranks "
        f"to come with theirs.\nThey may be late; or they passed shapes that they had before, and will never come: "
        f"every rank must pass the same shapes in every step. Pad batches to one length on all ranks."
    )
    programs, digests = zip(*everywhere((fingerprint(lowered.hinted), digest), mesh, alone))
    differ = [rank for rank, value in zip(ranks, programs) if value != programs[0]]
    if differ:
        raise RuntimeError(
            f"{name}: ranks {differ} lowered another program than rank {ranks[0]} did.\n"
            f"On rank {me} its batch is {inputs}; every rank must pass the same shapes and "
            f"take the same branches. Compare print(step.lower(state, batch)) of two ranks."
        )
    if len(set(digests)) == 1:
        return lowered
    plan = everywhere(lowered.plan if me == ranks[0] else None, mesh)[0]
    return lowered if digest == digests[0] else lowered.planned(plan)


def slowest(seconds: Sequence[float], mesh: DeviceMesh | AbstractMesh | None) -> list[float]:
    """Each of these as it was on the rank where it was longest."""
    every = everywhere(seconds, mesh) if isinstance(mesh, DeviceMesh) else [seconds]
    return list(map(max, zip(*every)))
