"""The player: laws of queues and shared links, and a slow simulation in fractions that shares no code with it."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ztrans.planning.event_simulator import Message, Network, play


@st.composite
def programs(draw, lanes=("a", "b", "c"), links=("x", "y"), host=0):
    """Durations of operations, and messages whose places are in order; compute spends up to `host` on sending one, and
    on unpacking it."""
    compute = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    link = {lane: draw(st.sampled_from(links)) for lane in lanes}
    messages = []
    for _ in range(draw(st.integers(0, 6))):
        issue = draw(st.integers(0, len(compute)))
        need = draw(st.integers(issue, len(compute)))
        lane = draw(st.sampled_from(lanes))
        takes = [draw(st.integers(0, most)) for most in (4, 8, host, host)]
        messages.append(Message(issue, need, lane, link[lane], *takes))
    return [float(c) for c in compute], sorted(messages, key=lambda m: m.issue)


def slowly(compute, messages):
    """The same, from one moment at which something changes to the next; `start` of places, `begin` and `end` of messages."""
    todo = []
    for k in range(len(compute) + 1):
        for i in (i for i, m in enumerate(messages) if m.issue == k):
            todo += [("run", messages[i].host), ("issue", i)]
        todo += [("wait", [i for i, m in enumerate(messages) if m.need == k])]
        todo += [("place", k), *([("run", compute[k])] if k < len(compute) else [])]
    now, busy = Fraction(0), None  # when the operation that runs ends
    queues, latency, bytes_ = {}, {}, {}
    start, begin, end = {}, {}, {}
    while todo or any(queues.values()):
        changed = True
        while changed:  # what takes no time
            changed = False
            for queue in queues.values():
                if queue and queue[0] not in begin:
                    begin[queue[0]], changed = now, True
                if queue and latency[queue[0]] == 0 and bytes_[queue[0]] == 0:
                    end[queue.pop(0)], changed = now, True
            if busy is not None and busy == now:
                busy, changed = None, True
            while todo and busy is None:
                what, i = todo[0]
                if what == "wait" and i:
                    come = min(i, key=lambda j: end.get(j, float("inf")))
                    if come not in end:
                        break
                    i.remove(come)  # the first that comes is unpacked while others are on their way
                    todo.insert(0, ("run", messages[come].unpack))
                    continue
                if what == "issue":
                    queues.setdefault(messages[i].lane, []).append(i)
                    latency[i], bytes_[i] = Fraction(messages[i].latency), Fraction(messages[i].seconds)
                elif what == "place":
                    start[i] = now
                elif what == "run" and i:
                    busy = now + Fraction(i)
                todo.pop(0)
                changed = True
        heads = [queue[0] for queue in queues.values() if queue]
        moving = [i for i in heads if latency[i] == 0]
        share = {i: sum(messages[j].link == messages[i].link for j in moving) for i in moving}
        soon = [latency[i] for i in heads if latency[i]] + [bytes_[i] * share[i] for i in moving]
        soon += [busy - now] if busy is not None else []
        if not soon:
            break
        step = min(soon)
        for i in heads:
            if latency[i]:
                latency[i] -= step
            else:
                bytes_[i] -= step / share[i]
        now += step
    return [start[k] for k in range(len(compute) + 1)], [begin[i] for i in range(len(messages))], [
        end[i] for i in range(len(messages))
    ]  # fmt: skip


def near(numbers):
    return pytest.approx([float(x) for x in numbers], abs=1e-9)


@settings(max_examples=300)
@given(programs() | programs(host=3))
def test_it_agrees_with_a_slow_simulation(program):
    compute, messages = program
    played, (start, begin, end) = play(compute, messages), slowly(compute, messages)
    assert list(played.start) == near(start)
    assert list(played.begin) == near(begin)
    assert list(played.end) == near(end)
    assert played.seconds == pytest.approx(float(max([*start, *end])), abs=1e-9)


@given(programs())
def test_a_place_starts_after_all_that_it_needs_and_stalls_for_it_only(program):
    compute, messages = program
    played = play(compute, messages)
    arrive = 0.0
    for k, start in enumerate(played.start):
        needed = [i for i, m in enumerate(messages) if m.need == k]
        assert played.arrive[k] == pytest.approx(arrive, abs=1e-9)
        assert start == max([played.arrive[k], *(played.end[i] for i in needed)])
        assert sum(played.stall[i] for i in needed) == pytest.approx(start - played.arrive[k], abs=1e-9)
        arrive = start + (compute[k] if k < len(compute) else 0.0)


@given(programs())
def test_lanes_are_first_in_first_out(program):
    compute, messages = program
    played = play(compute, messages)
    before = {}
    for i, m in enumerate(messages):
        free = max(played.arrive[m.issue], before.get(m.lane, 0.0))
        assert played.begin[i] == free, "as soon as its lane is free, and no sooner"
        assert played.end[i] >= free + m.latency + m.seconds - 1e-9
        before[m.lane] = played.end[i]


@given(programs())
def test_no_work_is_lost_and_no_link_idles_beside_it(program):
    """While bytes move on a link it is used whole: the union of those times is as long as its messages."""
    compute, messages = program
    played = play(compute, messages)
    for link in {m.link for m in messages}:
        moving = sorted(
            (begin + m.latency, end) for m, begin, end in zip(messages, played.begin, played.end) if m.link == link
        )
        busy, until = 0.0, 0.0
        for a, b in moving:
            busy += max(0.0, b - max(a, until))
            until = max(until, b)
        assert busy == pytest.approx(sum(m.seconds for m in messages if m.link == link), abs=1e-9)


@given(programs(lanes=("a", "b"), links=("x",)), st.data())
def test_nothing_is_later_with_less_to_do_where_links_are_not_shared(program, data):
    compute, messages = program
    messages = [m._replace(link=m.lane) for m in messages]
    less = [c * data.draw(st.sampled_from([0.0, 0.5, 1.0])) for c in compute]
    faster = [
        m._replace(**{what: getattr(m, what) * data.draw(st.sampled_from([0.25, 1.0])) for what in ("latency", "seconds")})
        for m in messages
    ]
    slow, fast = play(compute, messages), play(less, faster)
    for what in ("arrive", "start", "begin", "end"):
        assert all(a <= b + 1e-9 for a, b in zip(getattr(fast, what), getattr(slow, what), strict=True))


def test_more_bandwidth_may_come_later_where_a_link_is_shared():
    """A message that comes earlier lets another start, which takes its share from what compute waits for."""
    first = Message(0, 1, "other", "other", 0.0, 8.0)
    urgent, late = Message(0, 3, "gather", "wire", 0.0, 8.0), Message(2, 4, "reduce", "wire", 0.0, 8.0)
    compute = [0.0, 0.0, 2.0, 9.0]
    slow, fast = play(compute, [first, urgent, late]), play(compute, [first._replace(seconds=4.0), urgent, late])
    assert slow.end[1] == 8.0 and slow.start[3] == 10.0 and slow.seconds == 19.0
    assert fast.end[1] == 12.0 and fast.start[3] == 12.0 and fast.seconds == 21.0


@given(programs())
def test_time_has_no_unit(program):
    compute, messages = program
    twice = [m._replace(latency=2 * m.latency, seconds=2 * m.seconds) for m in messages]
    once, doubled = play(compute, messages), play([2 * c for c in compute], twice)
    for what in ("arrive", "start", "begin", "end", "stall"):
        assert [2 * x for x in getattr(once, what)] == list(getattr(doubled, what))


@given(programs())
def test_empty_places_may_be_left_out(program):
    compute, messages = program
    places = sorted({0, len(compute), *(m.issue for m in messages), *(m.need for m in messages)})
    few, all_ = play(compute, messages, places), play(compute, messages)
    assert few.start == tuple(all_.start[k] for k in places)
    assert (few.begin, few.end, few.stall, few.seconds) == (all_.begin, all_.end, all_.stall, all_.seconds)


@given(programs(lanes=("a", "b"), links=("x",)))
def test_links_do_not_touch_while_nothing_waits(program):
    compute, messages = program
    messages = [m._replace(link=m.lane, need=len(compute)) for m in messages]
    together = dict(zip(map(id, messages), play(compute, messages).end))
    for lane in {m.lane for m in messages}:
        alone = [m for m in messages if m.lane == lane]
        assert [together[id(m)] for m in alone] == list(play(compute, alone).end)


def test_equal_shares():
    """Two on one link take twice as long; the longer has the link to itself when the shorter has come."""
    one, other = Message(0, 1, "a", "x", 0.0, 2.0), Message(0, 1, "b", "x", 0.0, 3.0)
    played = play([0.0], [one, other])
    assert played.end == (4.0, 5.0) and played.stall == (4.0, 1.0)
    assert play([0.0], [one, other._replace(link="y")]).end == (2.0, 3.0)
    assert play([0.0], [one, other._replace(lane="a")]).end == (2.0, 5.0)
    three = [Message(0, 1, lane, "x", 0.0, seconds) for lane, seconds in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    played = play([0.0], three)
    assert played.end == (6.0, 5.0, 3.0)
    assert played.stall == (1.0, 2.0, 3.0), "in the order in which they come, each what it adds"


def test_a_latency_takes_no_share():
    played = play([0.0], [Message(0, 1, "a", "x", 3.0, 2.0), Message(0, 1, "b", "x", 0.0, 3.0)])
    assert played.end == (5.0, 3.0)
    queued = play([0.0], [Message(0, 1, "a", "x", 3.0, 2.0), Message(0, 1, "a", "x", 3.0, 2.0)])
    assert queued.end == (5.0, 10.0), "in one lane even latencies queue"


def test_issue_comes_before_wait_at_a_place():
    first, second = Message(0, 1, "a", "x", 0.0, 5.0), Message(1, 2, "b", "y", 0.0, 4.0)
    played = play([1.0, 1.0], [first, second])
    assert played.begin == (0.0, 1.0) and played.end == (5.0, 5.0)
    assert played.arrive == (0.0, 1.0, 6.0) and played.start == (0.0, 5.0, 6.0)
    assert played.stall == (4.0, 0.0)


def test_a_message_that_nobody_waits_for_ends_the_step_when_it_has_come():
    unused = play([1.0], [Message(0, 2, "a", "x", 0.0, 3.0)])
    assert unused.start[-1] == 1.0 and unused.seconds == 3.0
    assert play([1.0], []).seconds == 1.0 and play([], []).seconds == 0.0


def test_a_network_knows_no_future():
    """Messages that are issued later change only what comes later."""
    network = Network()
    a = network.issue(Message(0, 9, "a", "x", 1.0, 4.0), 0.0)
    network.run(3.0)
    assert network.begin[a] == 0.0 and network.end[a] == float("inf")
    b = network.issue(Message(0, 9, "b", "x", 0.0, 1.0), 3.0)
    assert [network.come(i) for i in (a, b)] == [6.0, 5.0]
