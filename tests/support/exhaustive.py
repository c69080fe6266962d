"""Small random scheduling problems, and every schedule of a problem. Tests compare bounds and plans with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from random import Random

from tests.support.evaluate import memory
from tests.support.synthetic import whole_levers
from ztrans.planning.buffers import AT_START, AT_WAIT, Buffer
from ztrans.planning.levers import PARTS
from ztrans.planning.network import Message
from ztrans.planning.solver.problem import (
    END,
    Bucket,
    Gather,
    Inside,
    Lever,
    LeverKind,
    Problem,
    Reduction,
    Schedule,
    Update,
    Wire,
)
from ztrans.planning.solver.validate import validate

INF = float("inf")


def problem(
    chance: Random,
    *,
    keys: int = 3,
    gathers: int = 3,
    reductions: int = 2,
    repeats: float = 0.5,
    host: bool = False,
) -> Problem:
    """A random problem with at most `keys` bucket keys, `gathers` gathers and `reductions` reductions.

    Lanes and links may be shared. Memory and the other limits are random. With `host`, sending and unpacking a message
    takes compute time.
    """
    ops = chance.randint(2, 4)
    wires: dict[Hashable, Wire] = {
        key: Wire(
            chance.choice(["lane", "other"]),
            chance.choice(["link", "other"]),
            latency=chance.choice([0.0, 0.5, 2.0]),
            pace=0.5,
            overhead=chance.choice([0.0, 0.5]) if host else 0.0,
            byte_overhead=chance.choice([0.0, 0.25]) if host else 0.0,
        )
        for key in range(chance.randint(1, keys))
    }
    drawn = Problem(
        seconds=tuple(float(chance.randint(0, 3)) for _ in range(ops)),
        live=tuple(chance.randint(0, 3) for _ in range(ops)),
        matmul=tuple(chance.random() < 0.7 for _ in range(ops)),
        gathers=_gathers(chance, ops, [*wires], chance.randint(0, gathers), repeats),
        reductions=_reductions(chance, ops, [*wires], chance.randint(0, reductions)),
        wires=wires,
        memory=chance.choice([4, 6, 8, 10, 12, 16, INF]),
        max_between=chance.choice([INF, INF, 0, 1, 2]),
        gathers_in_flight=chance.choice([INF, INF, 0, 3, 5]),
        reductions_in_flight=chance.choice([INF, INF, 0, 3, 5]),
    )
    drawn = replace(drawn, levers=whole_levers(drawn.gathers))
    unpacked = {
        key: wire._replace(unpack=chance.choice([0.0, 0.25])) for key, wire in wires.items() if host
    }
    return replace(drawn, wires=wires | unpacked)


def rich(chance: Random, reductions: int = 2) -> Problem:
    """A random problem with every feature, and at most `reductions` reductions.

    It has updates that follow reductions, messages at fixed places, buffers that small members share, shards that are
    copied to be sent, bytes that are live at places, reduced values that stay live, packing beside compute, hierarchical messages, reductions whose results
    are reduced again, and updates that share launches.
    """
    p = problem(chance, reductions=reductions, host=True)
    ops, lanes, links = len(p.seconds), ["lane", "other", "third"], ["link", "other", "third"]
    updates = tuple(
        Update(
            float(chance.randint(0, 3)),
            tuple(
                sorted(
                    chance.sample(range(len(p.reductions)), chance.randint(0, len(p.reductions)))
                )
            ),
            chance.randint(0, ops),
        )
        for _ in range(chance.randint(0, 3))
    )
    others = []
    for issue in sorted(chance.randint(0, ops) for _ in range(chance.randint(0, 2))):
        latency, seconds = chance.choice([0.0, 0.5]), float(chance.randint(0, 3))
        others.append(
            Message(
                issue,
                chance.choice([issue, chance.randint(issue, ops)]),
                chance.choice(lanes),
                chance.choice(links),
                latency,
                seconds,
                taken=chance.choice([0.0, 0.25]),
            )
        )
    small = {key: chance.random() < 0.6 for key in p.wires}
    with_buffers = []
    for r in p.reductions:
        copied = chance.random() < 0.5
        buffers = []
        if copied:
            buffers.append(Buffer(r.bytes, AT_START, AT_WAIT))
        if chance.random() < 0.5:  # the result is made by the wait, or lies where it was received
            last = chance.randint(2 * r.born + 1, 2 * ops + 1)
            buffers.append(Buffer(1, chance.choice([AT_START, AT_WAIT]), last))
        if chance.random() < 0.3:
            buffers.append(Buffer(1, 2 * r.born + 2, AT_WAIT))
        temporaries = [(0, chance.choice([0, 2]))]
        if r.born + 2 <= ops and chance.random() < 0.3:
            temporaries.append((chance.randint(r.born + 2, ops), 2))
        with_buffers.append(
            r._replace(
                copied=copied,
                buffers=(*r.buffers, *buffers),
                temporaries=tuple(temporaries),
                small=small[r.key],
            )
        )
    wires = {
        key: wire._replace(
            ranks=2, pack=chance.choice([0.0, 0.25]), copy_out=chance.choice([0.0, 0.25])
        )
        for key, wire in p.wires.items()
    }
    drawn = replace(
        p,
        gathers=tuple(
            g._replace(small=small[g.key], arriving=chance.choice([0, 0, 1, 2])) for g in p.gathers
        ),
        reductions=tuple(with_buffers),
        wires=wires,
        memory=p.memory + chance.choice([0, 4]),
        live_at_places=tuple(min(chance.randint(0, 3), *p.live) for _ in range(ops + 1)),
        updates=updates,
        fixed_messages=tuple(others),
    )
    beside = {}
    for key, wire in wires.items():
        if chance.random() < 0.5:
            inside = Inside("inside", chance.choice(links), chance.choice([0.0, 0.5]), 0.25)
            taken = chance.choice([0.0, 0.25, 0.5])
            inside = chance.choice([None, inside])
            beside[key] = wire._replace(beside=True, inside=inside, taken=taken)
    return with_shared_launches(
        chance, with_second_reductions(chance, replace(drawn, wires=wires | beside))
    )


def with_shared_launches(chance: Random, p: Problem) -> Problem:
    """A problem whose updates share some of two launches."""
    updates = []
    for update in p.updates:
        launches = chance.sample(range(2), chance.randint(0, 2))
        pairs = tuple((launch, chance.choice([0.25, 0.5])) for launch in launches)
        updates.append(update._replace(launches=pairs))
    return replace(p, updates=tuple(updates))


def with_second_reductions(chance: Random, p: Problem) -> Problem:
    """A problem in which the results of some reductions are reduced again, over another link."""
    wires = dict(p.wires)
    reductions = list(p.reductions)
    for key in sorted({r.key for r in reductions}):
        if chance.random() < 0.3:
            lane, link = chance.choice(["lane", "third"]), chance.choice(["link", "third"])
            overhead = chance.choice([0.0, 0.25])
            wires[key, "second"] = Wire(lane, link, latency=0.5, pace=0.5, overhead=overhead)
            for i, r in enumerate(reductions):
                if r.key == key:
                    second = Reduction((key, "second"), chance.randint(0, 4), 1, r.born)
                    reductions[i] = r._replace(second=second, second_bytes=1)
    return replace(p, reductions=tuple(reductions), wires=wires)


def parted(chance: Random) -> Problem:
    """A random problem in which gathers of parts may be sent in place of gathers that repeat earlier ones.

    Values are large and their gathers slow, and between their uses much else is live. So it often pays to keep parts.
    """
    ops = 4
    lane, link = chance.choice(["lane", "near"]), chance.choice(["link", "near"])
    wires = {
        "w": Wire("lane", "link", latency=chance.choice([0.0, 0.5]), pace=0.5, ranks=4),
        "parts": Wire(lane, link, latency=chance.choice([0.0, 0.5]), pace=0.25, ranks=2),
    }
    count = chance.randint(1, 2)
    gathers = [Gather("w", chance.randint(3, 8), 4, k, k) for k in range(count)]
    for first in reversed(range(count)):
        use = ops - 1 - first
        again = gathers[first]._replace(use=use, last=use, release=first + 1, repeats=first)
        gathers.append(again)
    levers = list(whole_levers(gathers))
    for i, again in enumerate(gathers[count:], count):
        made = gathers[again.repeats or 0].use
        part = again._replace(
            key="parts", wire=chance.randint(0, 2), release=made + 1, repeats=None
        )
        kept = Buffer(chance.randint(1, 2), 2 * made, 2 * again.use)
        copy = made, chance.choice([0.0, 0.25])
        levers.append(Lever(PARTS, f"part {i}", i, (len(gathers),), (kept,), (copy,)))
        gathers.append(part)
    between = chance.randint(2, 5)
    return Problem(
        seconds=tuple(float(chance.randint(0, 3)) for _ in range(ops)),
        live=(0, between, between, 0),
        matmul=(True,) * ops,
        gathers=tuple(gathers),
        reductions=_reductions(chance, ops, ["w"], chance.randint(0, 1)),
        wires=wires,
        memory=between + chance.randint(4, 9),
        levers=tuple(levers),
    )


def levered(chance: Random) -> Problem:
    """A random problem with levers of any kind: on first gathers too, with any bytes, compute and messages."""
    p = problem(chance, keys=2, gathers=2, reductions=1)
    kind = LeverKind("any", shares=(0.0, 0.5, 1.0))
    ops = len(p.seconds)
    gathers = list(p.gathers)
    levers = list(p.levers)
    for i, gather in enumerate(p.gathers):
        for _ in range(chance.choice([0, 1, 1, 2])):
            buffers = []
            for _ in range(chance.randint(0, 2)):
                first = chance.randint(0, 2 * ops)
                buffers.append(Buffer(chance.randint(0, 3), first, chance.randint(first, 2 * ops)))
            sends = tuple(range(len(gathers), len(gathers) + chance.choice([0, 1, 1, 2])))
            for _ in sends:
                other = gather._replace(
                    key=chance.choice([*p.wires]),
                    wire=chance.randint(0, 6),
                    bytes=chance.randint(0, 4),
                    release=chance.randint(0, gather.use),
                    repeats=None,
                )
                gathers.append(other)
            compute = ((chance.randrange(ops), chance.choice([0.0, 0.25])),)
            levers.append(Lever(kind, "", i, sends, tuple(buffers), compute))
    return replace(p, gathers=tuple(gathers), levers=tuple(levers))


def _gathers(
    chance: Random, ops: int, keys: list, count: int, repeats: float
) -> tuple[Gather, ...]:
    drawn: list[Gather] = []
    for use in sorted(chance.randrange(ops) for _ in range(count)):
        last, wire, held = chance.randint(use, ops - 1), chance.randint(0, 6), chance.randint(0, 4)
        new = Gather(chance.choice(keys), wire, held, use, last, chance.randint(0, use))
        repeated = {g.repeats for g in drawn}
        latest = [i for i, g in enumerate(drawn) if i not in repeated]
        if latest and chance.random() < repeats:
            i = chance.choice(latest)
            first = drawn[i]
            same = {"key": first.key, "wire": first.wire, "bytes": first.bytes}
            new = new._replace(**same, release=min(first.last + 1, use), repeats=i)
        drawn.append(new)
    return tuple(drawn)


def _reductions(chance: Random, ops: int, keys: list, count: int) -> tuple[Reduction, ...]:
    reductions = []
    for born in sorted(chance.randrange(ops) for _ in range(count)):
        key, wire, size = chance.choice(keys), chance.randint(0, 6), chance.randint(0, 4)
        received = Buffer(chance.choice([0, 0, 1]), AT_START, AT_WAIT)
        need = chance.choice([END, chance.randint(born + 1, ops)])
        reductions.append(Reduction(key, wire, size, born, need, buffers=(received,)))
    return tuple(reductions)


def schedules(problem: Problem) -> Iterator[Schedule]:
    """Every schedule of a problem that fits its memory."""
    n = len(problem.seconds)
    ends = [min(n, r.deadline) for r in problem.reductions]
    reductions = [
        order
        for parts in grouped(range(len(problem.reductions)), problem.reductions)
        for starts in [[max(problem.reductions[i].born for i in part) + 1 for part in parts]]
        for waits in product(
            *(range(k, min(ends[i] for i in part) + 1) for part, k in zip(parts, starts))
        )
        for order in ordered([Bucket(*b) for b in zip(parts, starts, waits)])
        for order in with_shared_waits(problem, order)
    ]
    for count in range(len(problem.levers) + 1):
        for levers in map(frozenset, combinations(range(len(problem.levers)), count)):
            dropped = problem.dropped(levers)
            for parts in grouped(
                [i for i in range(len(problem.gathers)) if i not in dropped], problem.gathers
            ):
                uses = [min(problem.gathers[i].use for i in part) for part in parts]
                release = [max(problem.gathers[i].release for i in part) for part in parts]
                for starts in product(*(range(a, b + 1) for a, b in zip(release, uses))):
                    for gathers in ordered([Bucket(*b) for b in zip(parts, starts, uses)]):
                        for order in reductions:
                            schedule = Schedule(gathers, order, levers)
                            if fits(problem, schedule):
                                yield schedule


def with_shared_waits(
    problem: Problem, buckets: tuple[Bucket, ...]
) -> Iterator[tuple[Bucket, ...]]:
    """Reductions, where updates run after each wait, and where they run after the last wait at a place."""
    yield buckets
    shared = []
    for k, bucket in enumerate(buckets):
        has_second = problem.reductions[bucket.members[0]].second is not None
        is_followed = bucket.wait in [other.wait for other in buckets[k + 1 :]]
        shared.append(is_followed and not has_second)
    if any(shared):
        yield tuple(replace(bucket, with_next=each) for bucket, each in zip(buckets, shared))


def fits(problem: Problem, schedule: Schedule) -> bool:
    try:
        validate(problem, schedule)
    except ValueError:
        return False
    return memory(problem, schedule).max(initial=0) <= problem.memory


def grouped(
    indices: Sequence[int], collectives: Sequence[Gather | Reduction]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put collectives into buckets, each of one key."""
    for parts in partitions([*indices]):
        if all(len({collectives[i].key for i in part}) == 1 for part in parts):
            yield parts


def partitions(items: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not items:
        yield ()
        return
    first, *rest = items
    for parts in partitions(rest):
        yield ((first,), *parts)
        for i, part in enumerate(parts):
            yield (*parts[:i], (first, *part), *parts[i + 1 :])


def ordered(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, ...]]:
    """Every order in which buckets may be issued."""
    for order in permutations(buckets):
        if all(a.start <= b.start for a, b in pairwise(order)):
            yield order
