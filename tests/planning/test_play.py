"""The event simulator: laws of queues and shared links.

It is also compared with a slow simulation in exact fractions, which shares no code with it.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.evaluate import evaluate
from ztrans.planning.network import Level, Message, Network
from ztrans.planning.play import play
from ztrans.planning.solver.problem import Bucket, Problem, Reduction, Schedule, Wire


@st.composite
def programs(draw, lanes=("a", "b", "c"), links=("x", "y"), host=0, beside=0):
    """Durations of operations, and messages in the order of their places.

    For each message compute spends up to `host` on sending it, and up to `host` on unpacking it. Packing and unpacking
    it beside compute take up to `beside`, and it may be hierarchical.
    """
    compute = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    link = {lane: draw(st.sampled_from(links)) for lane in lanes}
    messages = []
    for _ in range(draw(st.integers(0, 6))):
        issue = draw(st.integers(0, len(compute)))
        need = draw(st.integers(issue, len(compute)))
        lane = draw(st.sampled_from(lanes))
        takes = [draw(st.integers(0, most)) for most in (4, 8, host, host, beside, beside)]
        inside = None
        if beside and draw(st.booleans()):
            seconds = [draw(st.integers(0, most)) for most in (4, 8, beside)]
            inside = Level(f"{lane} inside", draw(st.sampled_from(links)), *seconds)
        messages.append(Message(issue, need, lane, link[lane], *takes, inside))
    return [float(c) for c in compute], sorted(messages, key=lambda m: m.issue)


class Part:
    """A level of a message in the slow simulation, and what is left of it. `after` is the level before it."""

    def __init__(self, level, after=None):
        self.lane, self.link, self.after = level.lane, level.link, after
        self.latency, self.bytes = Fraction(level.latency), Fraction(level.seconds)
        self.unpack = Fraction(level.unpack_beside)
        self.begin = self.end = None

    @property
    def left(self):
        return self.latency + self.bytes + self.unpack

    @property
    def moves(self):
        return self.begin is not None and not self.latency and self.bytes > 0


def slowly(compute, messages):
    """The slow simulation, which goes from one event to the next.

    Returns the start of each place, and the begin and end of each message.
    """
    todo = []
    for k in range(len(compute) + 1):
        for i in (i for i, m in enumerate(messages) if m.issue == k):
            todo += [("run", messages[i].overhead), ("issue", i)]
        todo += [("wait", [i for i, m in enumerate(messages) if m.need == k])]
        todo += [("place", k), *([("run", compute[k])] if k < len(compute) else [])]
    now, busy = Fraction(0), None  # `busy` is the time at which the running operation ends
    queues, start, last, packed = {}, {}, {}, {}
    packing = []  # [message, what is left of its packing]
    while todo or packing or any(queues.values()):
        changed = True
        while changed:  # events that take no time
            changed = False
            if packing and packing[0][1] == 0:
                packed[packing.pop(0)[0]], changed = True, True
            for queue in queues.values():
                if not queue:
                    continue
                i, part = queue[0]
                ready = part.after.end is not None if part.after else i in packed
                if part.begin is None and ready:
                    part.begin, changed = now, True
                if part.begin is not None and part.left == 0:
                    part.end, changed = now, True
                    queue.pop(0)
            if busy is not None and busy == now:
                busy, changed = None, True
            while todo and busy is None:
                kind, i = todo[0]
                if kind == "wait" and i:
                    ends = {j: last[j].end for j in i if last[j].end is not None}
                    if not ends:
                        break
                    first_done = min(ends, key=ends.__getitem__)
                    i.remove(
                        first_done
                    )  # the first to arrive is unpacked while the others are still on their way
                    todo.insert(0, ("run", messages[first_done].unpack))
                    continue
                if kind == "issue":
                    message = messages[i]
                    packing.append([i, Fraction(message.pack_beside)])
                    before = Part(message.inside) if message.inside else None
                    last[i] = Part(message, before)
                    for part in filter(None, (before, last[i])):
                        queues.setdefault(part.lane, []).append((i, part))
                elif kind == "place":
                    start[i] = now
                elif kind == "run" and i:
                    busy = now + Fraction(i)
                todo.pop(0)
                changed = True
        heads = [queue[0][1] for queue in queues.values() if queue]
        heads = [part for part in heads if part.begin is not None]
        moving = [part for part in heads if part.moves]
        share = {part: sum(each.link == part.link for each in moving) for part in moving}
        soon = [part.latency for part in heads if part.latency]
        soon += [part.bytes * share[part] for part in moving]
        soon += [part.unpack for part in heads if not part.latency and not part.bytes]
        soon += [packing[0][1]] if packing else []
        soon += [busy - now] if busy is not None else []
        if not soon:
            break
        step = min(soon)
        for part in heads:
            if part.latency:
                part.latency -= step
            elif part.bytes:
                part.bytes -= step / share[part]
            else:
                part.unpack -= step
        if packing:
            packing[0][1] -= step
        now += step
    parts = [last[i] for i in range(len(messages))]
    return (
        [start[k] for k in range(len(compute) + 1)],
        [part.begin for part in parts],
        [part.end for part in parts],
    )


def approximately(numbers):
    return pytest.approx([float(x) for x in numbers], abs=1e-9)


@pytest.mark.slow
@given(programs() | programs(host=3) | programs(host=2, beside=4))
def test_play_agrees_with_a_slow_simulation(program):
    compute, messages = program
    played, (start, begin, end) = play(compute, messages), slowly(compute, messages)
    assert list(played.start) == approximately(start)
    assert list(played.begin) == approximately(begin)
    assert list(played.end) == approximately(end)
    assert played.seconds == pytest.approx(float(max([*start, *end])), abs=1e-9)


@given(programs())
def test_a_place_waits_for_the_messages_that_it_needs_and_for_nothing_else(program):
    compute, messages = program
    played = play(compute, messages)
    arrive = 0.0
    for k, start in enumerate(played.start):
        needed = [i for i, m in enumerate(messages) if m.need == k]
        assert played.arrive[k] == pytest.approx(arrive, abs=1e-9)
        assert start == max([played.arrive[k], *(played.end[i] for i in needed)])
        assert sum(played.stall[i] for i in needed) == pytest.approx(
            start - played.arrive[k], abs=1e-9
        )
        arrive = start + (compute[k] if k < len(compute) else 0.0)


@given(programs())
def test_lanes_are_first_in_first_out(program):
    compute, messages = program
    played = play(compute, messages)
    before = {}
    for i, m in enumerate(messages):
        free = max(played.arrive[m.issue], before.get(m.lane, 0.0))
        assert played.begin[i] == free, "it begins when it is issued and its lane is free"
        assert played.end[i] >= free + m.latency + m.seconds - 1e-9
        before[m.lane] = played.end[i]


@given(programs())
def test_a_link_is_used_whole_while_bytes_move(program):
    """The times in which bytes move on a link add up to the seconds of its messages."""
    compute, messages = program
    played = play(compute, messages)
    for link in {m.link for m in messages}:
        moving = sorted(
            (begin + m.latency, end)
            for m, begin, end in zip(messages, played.begin, played.end)
            if m.link == link
        )
        busy, until = 0.0, 0.0
        for a, b in moving:
            busy += max(0.0, b - max(a, until))
            until = max(until, b)
        assert busy == pytest.approx(sum(m.seconds for m in messages if m.link == link), abs=1e-9)


@given(programs(lanes=("a", "b"), links=("x",)), st.data())
def test_without_shared_links_less_work_makes_nothing_later(program, data):
    compute, messages = program
    messages = [m._replace(link=m.lane) for m in messages]
    less = [c * data.draw(st.sampled_from([0.0, 0.5, 1.0])) for c in compute]
    faster = []
    for m in messages:
        latency = m.latency * data.draw(st.sampled_from([0.25, 1.0]))
        seconds = m.seconds * data.draw(st.sampled_from([0.25, 1.0]))
        faster.append(m._replace(latency=latency, seconds=seconds))
    slow, fast = play(compute, messages), play(less, faster)
    for field in ("arrive", "start", "begin", "end"):
        assert all(
            a <= b + 1e-9 for a, b in zip(getattr(fast, field), getattr(slow, field), strict=True)
        )


def test_with_a_shared_link_a_faster_message_can_delay_the_step():
    """It lets a later message start earlier, which then takes a share of the link from an urgent one."""
    first = Message(0, 1, "other", "other", 0.0, 8.0)
    urgent, late = (
        Message(0, 3, "gather", "wire", 0.0, 8.0),
        Message(2, 4, "reduce", "wire", 0.0, 8.0),
    )
    compute = [0.0, 0.0, 2.0, 9.0]
    slow, fast = (
        play(compute, [first, urgent, late]),
        play(compute, [first._replace(seconds=4.0), urgent, late]),
    )
    assert slow.end[1] == 8.0 and slow.start[3] == 10.0 and slow.seconds == 19.0
    assert fast.end[1] == 12.0 and fast.start[3] == 12.0 and fast.seconds == 21.0


@given(programs())
def test_twice_as_long_operations_and_messages_take_twice_as_long(program):
    compute, messages = program
    twice = [m._replace(latency=2 * m.latency, seconds=2 * m.seconds) for m in messages]
    once, doubled = play(compute, messages), play([2 * c for c in compute], twice)
    for field in ("arrive", "start", "begin", "end", "stall"):
        assert [2 * x for x in getattr(once, field)] == list(getattr(doubled, field))


@given(programs(lanes=("a", "b"), links=("x",)))
def test_messages_on_different_links_do_not_slow_each_other(program):
    compute, messages = program
    messages = [m._replace(link=m.lane, need=len(compute)) for m in messages]
    together = dict(zip(map(id, messages), play(compute, messages).end))
    for lane in {m.lane for m in messages}:
        alone = [m for m in messages if m.lane == lane]
        assert [together[id(m)] for m in alone] == list(play(compute, alone).end)


def test_messages_share_a_link_equally():
    """Two messages on one link move at half speed. When the shorter has arrived, the longer has the link to itself."""
    short, long = Message(0, 1, "a", "x", 0.0, 2.0), Message(0, 1, "b", "x", 0.0, 3.0)
    played = play([0.0], [short, long])
    assert played.end == (4.0, 5.0) and played.stall == (4.0, 1.0)
    assert play([0.0], [short, long._replace(link="y")]).end == (2.0, 3.0)
    assert play([0.0], [short, long._replace(lane="a")]).end == (2.0, 5.0)
    three = [
        Message(0, 1, lane, "x", 0.0, seconds)
        for lane, seconds in (("a", 3.0), ("b", 2.0), ("c", 1.0))
    ]
    played = play([0.0], three)
    assert played.end == (6.0, 5.0, 3.0)
    assert played.stall == (1.0, 2.0, 3.0), (
        "each message counts for the time that it adds after the one before it"
    )


def test_a_message_takes_no_share_of_the_link_during_its_latency():
    played = play([0.0], [Message(0, 1, "a", "x", 3.0, 2.0), Message(0, 1, "b", "x", 0.0, 3.0)])
    assert played.end == (5.0, 3.0)
    queued = play([0.0], [Message(0, 1, "a", "x", 3.0, 2.0), Message(0, 1, "a", "x", 3.0, 2.0)])
    assert queued.end == (5.0, 10.0), (
        "in one lane a latency starts only when the message before has arrived"
    )


def test_at_a_place_messages_are_issued_before_compute_waits():
    first, second = Message(0, 1, "a", "x", 0.0, 5.0), Message(1, 2, "b", "y", 0.0, 4.0)
    played = play([1.0, 1.0], [first, second])
    assert played.begin == (0.0, 1.0) and played.end == (5.0, 5.0)
    assert played.arrive == (0.0, 1.0, 6.0) and played.start == (0.0, 5.0, 6.0)
    assert played.stall == (4.0, 0.0)


def test_the_step_ends_when_its_last_message_has_arrived():
    """Also if nothing waits for that message."""
    unused = play([1.0], [Message(0, 2, "a", "x", 0.0, 3.0)])
    assert unused.start[-1] == 1.0 and unused.seconds == 3.0
    assert play([1.0], []).seconds == 1.0 and play([], []).seconds == 0.0


def test_a_message_that_is_issued_later_does_not_change_the_past():
    network = Network()
    a = network.issue(Message(0, 9, "a", "x", 1.0, 4.0), 0.0)
    network.run(3.0)
    assert network.begin[a] == 0.0 and network.end[a] == float("inf")
    b = network.issue(Message(0, 9, "b", "x", 0.0, 1.0), 3.0)
    assert [network.arrival(i) for i in (a, b)] == [6.0, 5.0]


def test_a_message_that_follows_another_is_waited_for_after_the_next_of_its_kind():
    """Two reductions of 2 seconds are waited for at places 2 and 3. One of 5 follows each, on another link.

    The first follower is sent at 2, when compute has waited for a second, and arrives at 7. The second is sent at 4, is
    the next in the lane, and arrives at 12. The first is waited for once the second has been sent, at place 3. The
    second is needed at place 4, after compute that takes 1 second.
    """
    second = Reduction("second", 5, 1, 0)
    first = Reduction("first", 2, 1, 0, deadline=4, second=second)
    reductions = (first, first._replace(born=1))
    wires = {"first": Wire("a", "x", 0.0, 1.0), "second": Wire("b", "y", 0.0, 1.0)}
    problem = Problem((0.0, 1.0, 1.0, 1.0), (0,) * 4, (False,) * 4, (), reductions, wires)
    buckets = (Bucket((0,), 1, 2), Bucket((1,), 2, 3))
    played = evaluate(problem, Schedule((), buckets)).played
    assert played.end == (2.0, 7.0, 4.0, 12.0)
    assert played.stall == (1.0, 3.0, 1.0, 4.0)
    assert played.start == (0.0, 0.0, 2.0, 7.0, 12.0)


def test_the_first_level_of_a_message_runs_beside_the_second_level_of_the_one_before():
    inside = Level("a inside", "bus", 0.0, 2.0)
    message = Message(0, 1, "a", "wire", 0.0, 3.0, inside=inside)
    played = play([0.0], [message] * 3)
    assert played.inside == ((0.0, 2.0), (2.0, 4.0), (4.0, 6.0))
    assert (played.begin, played.end) == ((2.0, 5.0, 8.0), (5.0, 8.0, 11.0))
    in_one_lane = play([0.0], [message._replace(inside=None, seconds=5.0)] * 3)
    assert in_one_lane.seconds == 15.0


def test_a_gpu_packs_and_unpacks_beside_compute():
    """In one queue for all lanes before it is sent, and in its lane after its bytes have moved."""
    first = Message(0, 2, "a", "x", 0.0, 2.0, pack_beside=1.0, unpack_beside=3.0)
    second = first._replace(lane="b", link="y")
    played = play([9.0, 0.0], [first, second])
    assert played.begin == (1.0, 2.0) and played.end == (6.0, 7.0)
    assert played.seconds == 9.0 and played.stall == (0.0, 0.0)
    queued = play([9.0, 0.0], [first, first])
    assert queued.begin == (1.0, 6.0) and queued.end == (6.0, 11.0)


def test_a_message_takes_a_share_of_compute_that_runs_while_it_is_under_way():
    """It passes when the message is waited for. Nothing is taken while compute stands still."""
    message = Message(0, 1, "a", "x", 0.0, 4.0, taken=0.25)
    hidden = play([10.0, 0.0], [message])
    assert hidden.start == (0.0, 11.0, 11.0) and hidden.lost == ((10.0, 1.0),)
    exposed = play([1.0, 0.0], [message])
    assert exposed.stall == (3.0,) and exposed.lost == ((4.0, 0.25),)
    assert exposed.start[1] == 4.25
    two = play([10.0, 0.0], [message, message._replace(lane="b", link="y")])
    assert two.seconds == 12.0
    first = Level("a inside", "bus", 0.0, 2.0)
    assert play([10.0, 0.0], [message._replace(inside=first)]).seconds == 11.5


def test_what_is_taken_does_not_count_where_compute_waits_for_another_message():
    first = Message(0, 1, "a", "x", 0.0, 3.0)
    second = Message(0, 2, "b", "y", 0.0, 4.0, taken=0.5)
    played = play([0.0, 8.0], [first, second])
    assert played.stall == (3.0, 0.0)
    assert played.lost[1] == (11.0, 0.5), "three of its four seconds were a stall"
