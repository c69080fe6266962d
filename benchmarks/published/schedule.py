"""The schedule of FSDP, for a program of ztrans: a message for each block, one gather ahead, one reduction at a time.

FSDP1 and FSDP2 gather the parameters of a block (a unit) at once: in forward while the block before computes, and
again in backward. All other parameters belong to the root unit, which is gathered once a step and kept. The gradients
of a block are reduced once backward has passed it, and the reduction is waited for before the next one starts. The
update runs last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from ztrans.ir.collectives import ALL_GATHER
from ztrans.ir.graph import Eqn, Graph
from ztrans.ir.verifier import check
from ztrans.planning.cluster import Cluster
from ztrans.planning.formulate import formulate
from ztrans.planning.realise import realise
from ztrans.planning.skeleton import Collective, skeleton
from ztrans.planning.solver.problem import Bucket, Problem, Schedule

ROOT = -1


def unit_of(start: Eqn) -> int:
    """The number of the block whose parameters a collective sends, or `ROOT`."""
    found = re.search(r"layers\.(\d+)\.", start.provenance.paths[0])
    return int(found[1]) if found else ROOT


def by_fsdp(graph: Graph, cluster: Cluster, fsdp: int) -> Graph:
    """A program with hints, in the order of FSDP1 or FSDP2. With FSDP2, torchtitan also keeps the last block."""
    s = skeleton(graph)
    problem = formulate(s, cluster, float("inf"), "last")
    units = [unit_of(c.start) for c in s.gathers]
    kept = {ROOT, max(units)} if fsdp == 2 else {ROOT}
    levers = frozenset(i for i, lever in enumerate(problem.levers) if units[lever.drops] in kept)
    dropped = problem.dropped(levers)
    sent = [i for i in range(len(s.gathers)) if i not in dropped]
    schedule = Schedule(
        _gathers(problem, s.gathers, sent), _reductions(problem, s.reductions), levers
    )
    return check(realise(s, schedule, problem))


def _gathers(
    problem: Problem, collectives: Sequence[Collective], sent: Iterable[int]
) -> tuple[Bucket, ...]:
    """The root at the start, and each block where the block before it is first used."""

    def block(i: int) -> tuple[int, str]:
        start = collectives[i].start
        return unit_of(start), start.region

    gathers = problem.gathers
    groups = {unit: list(members) for unit, members in groupby(sent, key=block) if unit[0] != ROOT}
    root = [i for i in sent if block(i)[0] == ROOT]
    buckets = [_bucket(problem, part, 0) for part in _by_key(gathers, root)]
    before = 0
    for members in groups.values():
        for part in _by_key(gathers, members):
            buckets.append(_bucket(problem, part, before))
        before = min(gathers[i].use for i in members)
    return tuple(sorted(buckets, key=lambda bucket: bucket.start))


def _bucket(problem: Problem, members: Sequence[int], start: int) -> Bucket:
    """Members that start together, no earlier than they exist, and are waited for where the first of them is used."""
    use = min(problem.gathers[i].use for i in members)
    release = max(problem.gathers[i].release for i in members)
    return Bucket(tuple(members), min(max(start, release), use), use)


def _reductions(problem: Problem, collectives: Sequence[Collective]) -> tuple[Bucket, ...]:
    """Each unit once all of its gradients are there; the wait is where the next unit starts."""
    end = len(problem.seconds)
    units = [
        unit_of(c.start) if c.start.provenance.role == "grad" else ROOT - 1 - i
        for i, c in enumerate(collectives)
    ]
    members: dict[int, list[int]] = {}
    for i, number in enumerate(units):
        members.setdefault(number, []).append(i)
    starts = []
    for unit_members in members.values():
        for part in _by_key(problem.reductions, unit_members):
            starts.append((max(problem.reductions[i].born for i in part) + 1, tuple(part)))
    starts.sort()
    buckets = []
    for (start, part), (following, _) in pairwise([*starts, (end, ())]):
        need = min(problem.reductions[i].deadline for i in part)
        buckets.append(Bucket(part, start, max(start, min(following, need))))
    return tuple(buckets)


def _by_key(collectives: Sequence, members: Iterable[int]) -> list[list[int]]:
    """Members that may share a message."""
    parts: dict = {}
    for i in members:
        parts.setdefault(collectives[i].key, []).append(i)
    return list(parts.values())


def copied_bytes(graph: Graph, fsdp: int) -> int:
    """The bytes that FSDP moves in copies which the program does not have.

    FSDP2 receives the parameters of a unit in one buffer and copies each of them out of it. FSDP1's parameters are
    views of its buffer.
    """
    if fsdp == 1:
        return 0
    return 2 * sum(whole_bytes(e) for e in graph.eqns if is_gather(e))


def is_gather(e: Eqn) -> bool:
    return e.op is ALL_GATHER and e.provenance is not None and e.provenance.role == "param"


def whole_bytes(e: Eqn) -> int:
    """The bytes of the parameters that a gather makes whole."""
    return sum(out.numel * out.dtype.itemsize for out in e.results)
