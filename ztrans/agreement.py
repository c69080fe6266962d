"""Agreement of ranks: on the program and the plan before they run, and on how long a step took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .communicate import all_gather
from .layout import AbstractMesh
from .plan import fingerprint

if TYPE_CHECKING:
    from .stages import Lowered


def agree(lowered: Lowered) -> Lowered:
    """Compare hashes of program and plan over all ranks, so that a disagreement is an error and not a hang.

    Ranks that planned otherwise, having measured otherwise, take rank 0's plan.

    Raises: RuntimeError naming the ranks that differ.
    """
    if not isinstance(lowered.mesh, DeviceMesh) or lowered.mesh.size() == 1:
        return lowered
    mine = torch.tensor(
        [_number(fingerprint(lowered.hinted)), _number(lowered.plan.digest)], device=lowered.mesh.device_type
    )
    every = mine.new_empty(2 * dist.get_world_size())
    all_gather(every, mine)
    programs, digests = every.view(-1, 2).T.tolist()
    differ = [rank for rank, value in enumerate(programs) if value != programs[0]]
    if differ:
        inputs = ", ".join(repr(v) for v in lowered.graph.inputs[lowered.graph.num_state :])
        raise RuntimeError(
            f"{lowered.graph.name}: ranks {differ} lowered another program than rank 0 did.\n"
            f"On rank {dist.get_rank()} its batch is {inputs}; every rank must pass the same shapes and "
            f"take the same branches. Compare print(step.lower(state, batch)) of two ranks."
        )
    if len(set(digests)) == 1:
        return lowered
    sent = [lowered.plan]
    dist.broadcast_object_list(sent, src=0)
    return lowered if digests[dist.get_rank()] == digests[0] else lowered.planned(sent[0])


def slowest(seconds: Sequence[float], mesh: DeviceMesh | AbstractMesh | None) -> list[float]:
    """Each of these as it was on the rank where it was longest."""
    every: list[Any] = [seconds]
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, seconds)
    return list(map(max, zip(*every)))


def _number(digest: str) -> int:
    return int(digest[:15], 16)
