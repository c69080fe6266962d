"""Buckets, bounds and plans, held against every schedule that small problems have, and against known large ones."""

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.exhaustive import problem, rich, schedules
from tests.support.synthetic import by_size, fsdp2, seven
from ztrans.planning.event_simulator import Message
from ztrans.planning.solver.bucketing import consecutive, gather_buckets, reduction_buckets
from ztrans.planning.solver.evaluation import evaluate, memory
from ztrans.planning.solver.list_scheduler import Placement
from ztrans.planning.solver.loads import Choice, kept
from ztrans.planning.solver.lower_bound import bound
from ztrans.planning.solver.problem import Bucket, Gather, Problem, Reduction, Schedule, Update, Wire
from ztrans.planning.solver.solve import Infeasible, later, one_ahead, solve
from ztrans.planning.solver.validate import validate

INF = float("inf")
SMALL = settings(max_examples=200)
problems = st.randoms(use_true_random=False).map(problem)
costly = st.randoms(use_true_random=False).map(lambda chance: problem(chance, host=True))
riches = st.randoms(use_true_random=False).map(rich)


def least(p: Problem) -> tuple[int, int]:
    """What the planner says is needed, and where, when there is no memory at all."""
    try:
        solve(replace(p, memory=-1))
    except Infeasible as error:
        return error.needs, error.at
    raise AssertionError("-1 bytes are enough")


# Buckets.


def sizes(n):
    """Every way to cut n messages into buckets of neighbours."""
    for cuts in product([False, True], repeat=n - 1):
        ends = [k + 1 for k, cut in enumerate(cuts) if cut] + [n]
        yield [b - a for a, b in zip([0, *ends], ends)]


def sent(ready, seconds, latency, first, cut):
    """When the last bucket has been sent; None if one has a member that its last may not be with."""
    clock, a = 0.0, 0
    for size in cut:
        if a < first[a + size - 1]:
            return None
        clock = max(clock, ready[a + size - 1]) + latency + sum(seconds[a : a + size])
        a += size
    return clock


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=7), st.data())
def test_consecutive_buckets_are_the_best_there_are(messages, data):
    ready = [*accumulate(float(gap) for gap, _, _ in messages)]
    seconds = [float(s) for _, s, _ in messages]
    first = [min(f, j) for j, f in enumerate(accumulate(data.draw(st.integers(0, 1)) for _ in messages))]
    latency = float(data.draw(st.integers(0, 5)))
    ends = [sent(ready, seconds, latency, first, cut) for cut in sizes(len(messages))]
    found = sent(ready, seconds, latency, first, consecutive(ready, seconds, latency, first))
    assert found is not None, "a bucket reaches too far back"
    assert found == min(end for end in ends if end is not None)


def test_of_equal_buckets_the_larger():
    assert consecutive([9.0, 9.0, 9.0], [1.0, 1.0, 1.0], latency=0.0, first=[0, 0, 0]) == [3]


def free(chance: Random, **counts: int) -> Problem:
    """A problem of one key, in which only time counts."""
    p = problem(chance, keys=1, repeats=0.0, **counts)
    gathers = tuple(g._replace(release=0) for g in p.gathers)
    reductions = tuple(r._replace(need=None) for r in p.reductions)
    limits = dict.fromkeys(["max_between", "gathers_in_flight", "reductions_in_flight"])
    return replace(p, gathers=gathers, reductions=reductions, memory=INF, **limits)


@SMALL
@given(st.randoms(use_true_random=False))
def test_gathers_alone_are_bucketed_exactly(chance):
    """No schedule at all is better, buckets of members that are no neighbours included."""
    p = free(chance, gathers=4, reductions=0)
    buckets = gather_buckets(p, range(len(p.gathers)), np.full(len(p.seconds), INF), 1.0)
    found = Schedule(tuple(Bucket(b, 0, min(p.gathers[i].use for i in b)) for b in buckets), ())
    validate(p, found)
    every = [s for s in schedules(replace(p, gathers_in_flight=None)) if all(b.start == 0 for b in s.gathers)]
    assert evaluate(p, found).seconds == pytest.approx(min(evaluate(p, s).seconds for s in every))


@SMALL
@given(st.randoms(use_true_random=False))
def test_reductions_alone_are_bucketed_exactly(chance):
    p, end = free(chance, gathers=0, reductions=3), INF
    n = len(p.seconds)
    buckets = reduction_buckets(p, np.full(n, INF), 1.0)
    found = Schedule((), tuple(Bucket(b, max(p.reductions[i].born for i in b) + 1, n) for b in buckets))
    validate(p, found)
    for s in schedules(p):
        end = min(end, evaluate(p, s).seconds)
    assert evaluate(p, found).seconds == pytest.approx(end)


@given(st.randoms(use_true_random=False), st.sampled_from([0.1, 0.3, 1.0]), st.integers(0, 12))
def test_buckets_keep_their_portion_of_the_room(chance, portion, room):
    p = problem(chance, gathers=6, reductions=6)
    rooms = np.full(len(p.seconds), float(room))
    for things, buckets, most in (
        (p.gathers, gather_buckets(p, range(len(p.gathers)), rooms, portion), p.gathers_in_flight),
        (p.reductions, reduction_buckets(p, rooms, portion), p.reductions_in_flight),
    ):
        assert sorted(i for b in buckets for i in b) == [*range(len(things))]
        for b in buckets:
            assert len({things[i].key for i in b}) == 1
            assert len(b) == 1 or sum(things[i].held for i in b) <= min(portion * room, INF if most is None else most)
    for b in gather_buckets(p, range(len(p.gathers)), rooms, portion):
        assert max(p.gathers[i].release for i in b) <= min(p.gathers[i].use for i in b)


@given(st.randoms(use_true_random=False), st.integers(0, 2))
def test_buckets_of_reductions_start_as_often_as_they_must(chance, between):
    p = replace(problem(chance, keys=1, gathers=0, reductions=6), max_between=between, reductions_in_flight=None)
    n, needs = len(p.seconds), [r.need or len(p.seconds) for r in p.reductions]
    buckets = reduction_buckets(p, np.full(n, INF), 1.0)
    starts = [max(p.reductions[i].born for i in b) + 1 for b in buckets]
    validate(p, Schedule((), tuple(Bucket(b, k, min(needs[i] for i in b)) for b, k in zip(buckets, starts))))


# The bound.


@SMALL
@given(problems | costly | riches)
def test_no_schedule_beats_the_bound(p):
    limit = bound(p)
    assert 0 <= limit.compute <= limit.wire <= limit.memory == limit.seconds
    assert limit.compute >= sum(p.seconds)
    for s in schedules(p):
        assert evaluate(p, s).seconds >= limit.seconds - 1e-9


def test_the_bound_is_reached():
    """It is no idle one: in most small problems a schedule takes exactly as long."""
    tight = found = 0
    for seed in range(200):
        p = problem(Random(seed))
        if every := [evaluate(p, s).seconds for s in schedules(p)]:
            found += 1
            tight += min(every) <= bound(p).seconds + 1e-9
    assert found > 150 and tight > 0.6 * found


WIRES = {"w": Wire("lane", "link", 0.0, 1.0)}
LATE = {"w": Wire("lane", "link", 1.0, 1.0)}


@pytest.mark.parametrize("p, seconds, binds", [
    (Problem((5.0, 5.0), (0, 0), (True,) * 2, (Gather("w", 2, 2, 1, 1),), (), WIRES), 10.0, "compute"),
    (Problem((1.0, 1.0), (0, 0), (True,) * 2, (Gather("w", 2, 2, 0, 0), Gather("w", 6, 6, 1, 1)), (), WIRES), 9.0, "wire"),
    (Problem((1.0, 4.0), (0, 0), (True,) * 2, (Gather("w", 6, 6, 0, 0), Gather("w", 3, 3, 1, 1)), (), WIRES, 6), 14.0, "memory"),
    (Problem((1.0,), (0,), (True,), (Gather("w", 2, 2, 0, 0), Gather("w", 6, 6, 0, 0)), (), LATE), 10.0, "wire"),
])  # fmt: skip
def test_what_binds(p, seconds, binds):
    limit = bound(p)
    assert limit.binds == binds and limit.seconds == seconds
    assert min(evaluate(p, s).seconds for s in schedules(p)) == pytest.approx(seconds)


def test_what_messages_take_of_compute_counts_after_what_nothing_hides():
    """The gather comes at 5, and its values are made; the gradient is born, sent in 1, and its values made in 2."""
    wires = {"w": Wire("lane", "link", 0.0, 1.0, unpack=0.2), "r": Wire("other", "link", 0.0, 0.0, host=0.5, unpack=1.0)}
    p = Problem((1.0, 1.0), (0, 0), (True,) * 2, (Gather("w", 5, 5, 0, 0),), (Reduction("r", 2, 2, 0),), wires)
    assert bound(p).seconds == 11.0 == evaluate(p, solve(p)).seconds


def test_a_value_that_takes_no_room_need_not_be_sent_twice():
    gathers = Gather("w", 4, 0, 0, 0), Gather("w", 4, 0, 1, 1, 1, again=0)
    p = Problem((1.0, 1.0), (3, 3), (True, True), gathers, (), WIRES, memory=3)
    assert bound(p).seconds == 6.0 == evaluate(p, solve(p)).seconds


# Plans.


@SMALL
@given(problems | riches)
def test_plans_are_valid_and_keep_every_limit(p):
    """Those of memory, of bytes in flight, of matmuls between reductions; on several lanes, links and keys."""
    try:
        found = solve(p)
    except Infeasible as error:
        assert error.needs > p.memory
        assert not any(True for _ in schedules(p))
        return
    validate(p, found)
    outcome = evaluate(p, found)
    assert outcome.peak <= p.memory
    assert outcome.seconds >= bound(p).seconds - 1e-9
    assert solve(p) == found


def test_compute_that_sends_and_unpacks_is_counted():
    """No schedule beats the bound, and plans are nearly the best, where messages take compute too."""
    over = []
    for seed in range(150):
        p = problem(Random(seed), host=True)
        if best := min((evaluate(p, s).seconds for s in schedules(p)), default=None):
            found = solve(p)
            validate(p, found)
            assert bound(p).seconds <= best + 1e-9
            over.append(evaluate(p, found).seconds / best - 1)
    assert len(over) > 100 and min(over) >= -1e-9
    assert sum(x > 0.003 for x in over) <= 0.05 * len(over)


@SMALL
@given(problems)
def test_infeasible_says_the_least_that_is_needed_and_where(p):
    needs, at = least(p)
    enough = replace(p, memory=needs)
    found = solve(enough)
    validate(enough, found)
    assert evaluate(enough, found).peak == needs
    with pytest.raises(Infeasible) as error:
        solve(replace(p, memory=needs - 1))
    assert (error.value.needs, error.value.at) == (needs, at)
    assert str(error.value) == f"{needs} bytes are needed at operation {at}, whatever the schedule"
    for s in schedules(replace(p, memory=INF)):
        assert memory(p, s)[at] >= needs


def test_small_plans_are_nearly_the_best_there_are():
    """Where they are not, a bucket skips a neighbour, or a lane goes in another order than that of use."""
    over = []
    for seed in range(400):
        p = problem(Random(seed))
        if best := min((evaluate(p, s).seconds for s in schedules(p)), default=None):
            over.append(evaluate(p, solve(p)).seconds / best - 1)
    assert len(over) > 300 and min(over) >= -1e-9
    assert sum(x > 0.003 for x in over) <= 0.02 * len(over)
    assert max(over) < 0.35


@SMALL
@given(problems | costly | riches, st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.sampled_from([0.0, 1.0]))
def test_what_is_placed_takes_as_long_as_it_says(p, lead, reserve):
    dropped = kept(p, ())
    gathers = tuple((i,) for i in range(len(p.gathers)) if i not in dropped)
    choice = Choice(gathers, tuple((i,) for i in range(len(p.reductions))), dropped, lead, reserve)
    placed = Placement(p)(choice)
    assume(placed is not None)
    validate(p, placed.schedule)
    outcome = evaluate(p, placed.schedule)
    assert placed.seconds == pytest.approx(outcome.seconds, abs=1e-9)
    assert placed.peak == outcome.peak <= p.memory
    assert Placement(p)(choice, placed.seconds) == placed
    if placed.seconds:
        assert Placement(p)(choice, 0.99 * placed.seconds) in (None, placed)


@given(problems | riches, st.randoms(use_true_random=False))
def test_later_starts_change_no_time_and_no_peak_for_the_worse(p, chance):
    every = [s for s, _ in zip(schedules(p), range(300))]
    assume(every)
    schedule = chance.choice(every)
    moved = later(p, schedule)
    validate(p, moved)
    a, b = evaluate(p, schedule), evaluate(p, moved)
    assert b.seconds == pytest.approx(a.seconds) and b.peak <= a.peak
    assert all(x.start <= y.start for x, y in zip(schedule.gathers, moved.gathers))


@given(problems)
def test_one_ahead_is_none_or_a_schedule_that_fits(p):
    schedule = one_ahead(p, Schedule((), ()))
    if schedule is not None:
        validate(p, schedule)
        assert evaluate(p, schedule).peak <= p.memory
        assert evaluate(p, solve(p)).seconds <= evaluate(p, schedule).seconds + 1e-9


def test_nothing_to_plan():
    p = Problem((1.0, 2.0), (3, 4), (True, True), (), (), {}, memory=4)
    assert solve(p) == Schedule((), ())
    assert evaluate(p, solve(p)).seconds == 3.0 == bound(p).seconds


def test_more_memory_buys_time():
    """A gather is dropped when its value can be kept, and not before."""
    gathers = Gather("w", 8, 8, 0, 0), Gather("w", 8, 8, 2, 2, 1, again=0)
    p = Problem((1.0, 1.0, 1.0), (0, 8, 0), (True,) * 3, gathers, (Reduction("w", 1, 1, 2),), WIRES)
    tight, wide = solve(replace(p, memory=9)), solve(replace(p, memory=16))
    assert not tight.dropped and wide.dropped == {1}
    assert evaluate(p, wide).seconds < evaluate(p, tight).seconds


# The seven cases.

CASES = seven()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_the_memory_of_fsdp2_a_plan_is_near_the_bound(case):
    theirs = evaluate(case.problem, fsdp2(case))
    p = replace(case.problem, memory=theirs.peak)
    found = solve(p)
    validate(p, found)
    ours = evaluate(p, found)
    assert ours.peak <= theirs.peak
    assert bound(p).seconds <= ours.seconds <= min(1.05 * bound(p).seconds, theirs.seconds)
    for schedule in (fsdp2(case), by_size(case)):
        validate(case.problem, schedule)
        assert evaluate(case.problem, schedule).seconds >= bound(case.problem).seconds


def test_plans_are_the_same_in_every_process():
    """The wire's keys are strings and tuples, whose hashes differ from process to process."""
    program = (
        "from dataclasses import replace; from tests.support.synthetic import *; from ztrans.planning.solver.solve import solve\n"
        "case = seven(('gather', 'reduce'))[3]\n"
        "print(solve(replace(case.problem, memory=evaluate(case.problem, fsdp2(case)).peak), 3000))"
    )
    root = Path(__file__).parents[3]
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and "Bucket(" in found.pop()


@pytest.mark.parametrize("bandwidth", [45e9, 180e9, 0.117e9])
def test_the_rounding_of_floats_is_no_message(bandwidth):
    """There is room to keep every value, to the byte: what is left to be sent is nothing, and costs no latency."""
    wires = {"w": Wire("gather", "link", 1e-3, 1 / bandwidth)}
    for seed in range(200):
        chance = Random(seed)
        sizes = [512 * chance.randint(1, 10**6) for _ in range(3)]
        first = [Gather("w", 511 * n // 512, n, k, k) for k, n in enumerate(sizes)]
        again = [Gather("w", 511 * n // 512, n, 8 - k, 8 - k, k + 1, again=k) for k, n in reversed([*enumerate(sizes)])]
        seconds = tuple(chance.random() * 1e-5 for _ in range(9))
        p = Problem(seconds, (0,) * 9, (True,) * 9, (*first, *again), (), wires, memory=sum(sizes))
        keeps = Schedule(tuple(Bucket((k,), 0, k) for k in range(3)), (), frozenset([3, 4, 5]))
        validate(p, keeps)
        assert evaluate(p, keeps).peak <= p.memory
        assert bound(p).memory == bound(p).wire <= evaluate(p, keeps).seconds


def test_an_update_runs_while_the_next_message_is_under_way():
    """The gradients are born at 1 and 2 and travel for 4 each, one after the other: the first is there at 5, the
    second at 9. An update of 3 that follows the first runs beside the second; where it comes last it comes after."""
    wires = {"r": Wire("reduce", "link", 0.0, 1.0)}
    reductions = (Reduction("r", 4, 1, 0, need=2), Reduction("r", 4, 1, 1, need=2))
    updates = (Update(3.0, (0,)), Update(1.0, (1,)))
    p = Problem((1.0, 1.0), (0, 0), (False,) * 2, (), reductions, wires, updates=updates)
    apart = Schedule((), (Bucket((0,), 1, 2), Bucket((1,), 2, 2)))
    together = Schedule((), (Bucket((0, 1), 2, 2),))
    assert evaluate(p, apart).seconds == 10.0 and evaluate(p, together).seconds == 14.0
    last = replace(p, seconds=(1.0, 1.0, 4.0), live=(0,) * 3, matmul=(False,) * 3, updates=())
    assert evaluate(last, apart).seconds == 13.0
    assert bound(p).seconds == 9.0 and bound(last).seconds == 13.0
    assert solve(p) == apart


def test_a_message_at_fixed_places_is_waited_for_and_shares_its_link():
    wires = {"w": Wire("gather", "link", 0.0, 1.0)}
    other = Message(0, 1, "tp (step)", "link", 0.0, 2.0)
    p = Problem((1.0, 1.0), (0, 0), (False,) * 2, (Gather("w", 2, 1, 1, 1),), (), wires, others=(other,))
    assert bound(p).seconds == 5.0
    assert evaluate(p, solve(p)).seconds == 5.0 == min(evaluate(p, s).seconds for s in schedules(p))
    apart = replace(p, others=(other._replace(link="another"),))
    assert evaluate(apart, solve(apart)).seconds == 3.0 == bound(apart).seconds


def test_small_members_share_a_buffer():
    """Of two gathers of 4 in one bucket the buffer is there beside their values, at the start and at the wait, and this
    rank's half of it in between."""
    wires = {"w": Wire("gather", "link", 0.0, 1.0, ranks=2)}
    gathers = Gather("w", 2, 4, 2, 2, small=True), Gather("w", 2, 4, 3, 3, small=True)
    p = Problem((1.0,) * 4, (0,) * 4, (False,) * 4, gathers, (), wires, across=(0,) * 5)
    alone, both = Schedule((Bucket((0,), 0, 2), Bucket((1,), 0, 3)), ()), Schedule((Bucket((0, 1), 0, 2),), ())
    assert memory(p, alone).tolist() == [8, 8, 8, 4]
    assert memory(p, both).tolist() == [4 + 4 + 8 + 4, 12, 8 + 8 + 4, 4]
