"""Ranks on real processes profile a step, and all make the same plan from it (called by `ranks.py`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, slices


def tuned(mesh, report) -> None:
    """Train with and without tuning in the middle. Bits must be equal, and all ranks must have the same plan."""
    case, rank, world = CASES["mlp_momentum"], dist.get_rank(), dist.get_world_size()
    part = slices(batches(case, 1)[0], world)[rank]
    plain, step = (zt.chain(zt.shard_params(mesh), *ALL)(case.step) for _ in range(2))
    state, plain_state = step.shard(case.state()), plain.shard(case.state())
    state, _ = step(state, *part)
    predicted = step.compiled(state, *part).lowered.cost_analysis().wire_bytes
    measured = step.tune(state, *part, steps=2).before.profile
    state, _ = step(state, *part)
    for _ in range(6):
        plain_state, _ = plain(plain_state, *part)
    pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(plain_state))
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    by_rank: list = [None] * world
    program = step.compiled(state, *part)
    mine = (
        same,
        str(program),
        dict(measured.seconds_by_signature),
        measured.messages,
        measured.timeline.lanes,
    )
    dist.all_gather_object(by_rank, mine)
    lowered, bars = program.lowered, [e for e in measured.timeline.events if e.lane != "compute"]
    report(
        "tuned",
        bitwise=[row[0] for row in by_rank],
        programs=len({row[1] for row in by_rank}),
        agreed=all(row[2:4] == by_rank[0][2:4] for row in by_rank),
        lanes=[row[4] for row in by_rank],
        wire=sum(e.bytes for e in bars),
        predicted=predicted,
        bandwidth=lowered.cluster.link("dp").bandwidth,
        assumed=zt.cluster("cpu", dp="ethernet-1g").link("dp").bandwidth,
        ratios=len(str(lowered.timeline().compare(measured.timeline)).splitlines()),
    )
