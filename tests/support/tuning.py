"""What ranks measure of one another: a profiled step on real processes, and a plan that all make from it (see `ranks`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, slices


def tuned(mesh, report) -> None:
    """Train with and without tuning in the middle: the same bits, the same plan on every rank."""
    case, rank, world = CASES["gpt_adam"], dist.get_rank(), dist.get_world_size()
    part = slices(batches(case, 1)[0], world)[rank]
    plain, step = (zt.chain(zt.shard_params(mesh), *ALL)(case.step) for _ in range(2))
    state, other = step.shard(case.state()), plain.shard(case.state())
    state, _ = step(state, *part)
    said = step.compiled(state, *part).lowered.cost_analysis().wire_bytes
    measured = step.tune(state, *part, steps=2)
    state, _ = step(state, *part)
    for _ in range(6):
        other, _ = plain(other, *part)
    pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(other))
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    every: list = [None] * world
    program = step.compiled(state, *part)
    mine = (same, str(program), dict(measured.seconds_by_signature), measured.messages, measured.timeline.lanes)
    dist.all_gather_object(every, mine)
    lowered, bars = program.lowered, [e for e in measured.timeline.events if e.lane != "compute"]
    report(
        "tuned",
        bitwise=[one[0] for one in every],
        programs=len({one[1] for one in every}),
        agreed=all(one[2:4] == every[0][2:4] for one in every),
        lanes=[one[4] for one in every],
        wire=sum(e.bytes for e in bars),
        said=said,
        bandwidth=lowered.cluster.link("dp").bandwidth,
        assumed=zt.cluster("cpu", dp="ethernet-1g").link("dp").bandwidth,
        ratios=len(str(lowered.timeline().beside(measured.timeline)).splitlines()),
    )
