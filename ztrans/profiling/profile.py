"""Profile: a measured step as a timeline, and the speeds of the cluster that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import members
from ..ir.graph import Eqn, Graph
from ..ir.pairing import pair
from ..ir.printer import format_seconds, op_name
from ..ir.relations import grouped
from ..planning.cluster import Cluster, assumed
from ..planning.cost import memory
from ..planning.event_simulator import Message
from ..planning.simulate import messages, signature
from ..planning.timeline import COMPUTE, Event, Timeline
from ..runtime.agreement import everywhere
from ..runtime.executable import bind
from .instrument import Record, Times, mark, recorded, watching
from .link_fit import sending, unpacking
from .trace_fit import Observed, explain


@dataclass(frozen=True, repr=False)
class Profile:
    """A measured step of this rank.

    Attributes:
        timeline: when every operation and message ran.
        seconds_by_signature: the duration of each kind of operation, by its `simulate.signature`. That of a collective
            is the time to pack and start it; with " wait" behind it, the time to turn the received bytes into values.
        messages: the messages of each recorded step.
        overhead: the seconds of a step that the recording took.
    """

    timeline: Timeline
    seconds_by_signature: Mapping[str, float]
    messages: tuple[tuple[Observed, ...], ...]
    overhead: float

    def __str__(self) -> str:
        return f"{self.timeline}\nrecording took {format_seconds(self.overhead)}"

    def __repr__(self) -> str:
        return f"Profile({self.timeline!r})"

    def cluster(self, base: Cluster) -> Cluster:
        """`base` with the measured durations of operations, and with links fitted to the measured messages."""
        axes = {axis for axis, _ in base.links}
        has_link = lambda axis: axis in axes or axes.issuperset(members(axis))
        usual = [_combined(same, median) for same in zip(*self.messages) if has_link(same[0].axis)]
        known = dict(base.links) | {
            m.axis: base.link(m.axis) for m in usual
        }  # of joint axes, the slowest at first
        links = []
        for axis, link in explain(tuple(known.items()), usual):
            over = [m for m in usual if m.axis == axis]
            link = dataclasses.replace(
                link, inside=None
            )  # the fitted figures are those of whole messages
            link = sending(link, [(m.received, m.spent) for m in over])
            links.append((axis, unpacking(link, [(m.kind, m.received, m.unpacked) for m in over])))
        return dataclasses.replace(base, links=tuple(links)).with_measured(
            self.seconds_by_signature
        )

    def agreed(self, mesh: DeviceMesh) -> Profile:
        """This profile with durations that are the same on every rank, for planning. The timeline stays this rank's.

        The durations of operations are those of the rank that computes longest, because the others wait for it. A
        message is issued when the last rank has issued it, and done when it is done on all ranks: the last rank to
        start a message may receive its bytes at once, while the others have waited for it, so no single rank can tell
        how long it takes. All ranks must call this.
        """
        if mesh.size() == 1:
            return self
        mine = self.timeline.compute, dict(self.seconds_by_signature), self.messages
        computed, seconds, steps = zip(*everywhere(mine, mesh))
        slowest = seconds[computed.index(max(computed))]
        over_ranks = tuple(
            tuple(_combined(same, max) for same in zip(*ranks)) for ranks in zip(*steps)
        )
        return dataclasses.replace(self, seconds_by_signature=slowest, messages=over_ranks)


def _combined(same: Sequence[Observed], moment: Callable[[Iterable[float]], float]) -> Observed:
    """One message from several observations of it: medians, and with `moment` when it was issued and when done."""
    return same[0]._replace(
        issued=moment(m.issued for m in same),
        done=moment(m.done for m in same),
        spent=median(m.spent for m in same),
        unpacked=median(m.unpacked for m in same),
    )


def profile(
    graph: Graph,
    program: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    steps: int = 3,
    prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda inputs: inputs,
) -> Profile:
    """Run and record some steps. All ranks must call it. Times are medians over the steps.

    Args:
        graph: the lowered program.
        program: its FX module on this rank.
        inputs: its flat local inputs. The state among them is donated, and advances by `steps` steps.
        steps: the number of steps.
        prepare: returns the inputs of the program from `inputs`, before each step. It runs all micro-batches but the
            last, which is recorded, and then waits for all ranks, so that times since the start of a step are
            comparable between ranks.

    Raises: ValueError if `steps` is below 1.

    >>> from ztrans.runtime.codegen import to_fx
    >>> from ztrans.ir.graph import Eqn, Var
    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> graph = Graph("f", (x,), (Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0)
    >>> list(profile(graph, to_fx(graph), [torch.ones(4)]).seconds_by_signature)
    ['relu(f32[4])']
    """
    if steps < 1:
        raise ValueError(f"profile: {steps} steps; at least one is needed.")
    device = next(
        (x.device.type for x in inputs if x.device.type != "cpu"), "cpu"
    )  # some state may be on the CPU
    module: Any = recorded(program)
    run = bind(graph, module)
    runs = []
    with watching() as watchers:
        for _ in range(steps):
            module.record = Record(device, watchers)
            run(prepare(inputs))
            runs.append(module.record.times())
    timeline, observed = (
        _timeline(graph, _medians(runs)),
        tuple(tuple(_observed(graph, t)) for t in runs),
    )
    return Profile(timeline, _by_signature(graph, runs), observed, _overhead(graph, runs, device))


def _medians(runs: Sequence[Times]) -> Times:
    """The median of each reading. Medians keep the order of readings, so the bars of a lane never overlap."""
    marks, started, done, arrived = (
        tuple(map(median, zip(*rows))) for rows in zip(*(t[:-1] for t in runs))
    )
    return Times(marks, started, done, arrived, end=median(t.end for t in runs))


class _Sent(NamedTuple):
    """A message of a program, and its readings in one run.

    Those of the step's own collectives are None: only their wait shows when they were done.
    """

    eqn: Eqn  # the equation that sends it
    message: Message
    received: int  # bytes
    readings: (
        tuple[float, float, float] | None
    )  # when it was started, when it was done, when its first wait returned


def _messages(graph: Graph, t: Times) -> list[_Sent]:
    """The messages of a program with their readings."""
    # The durations that the cluster gives to messages are not used here, so it may be any cluster.
    sent, starts = messages(graph, assumed("cpu", graph.axes)), pair(graph).starts
    ours = [k for k, (e, _, _) in enumerate(sent) if e in starts]
    arrived = dict(zip(sorted(ours, key=lambda k: sent[k][1].need), t.arrived))
    readings = {k: (started, done, arrived[k]) for k, started, done in zip(ours, t.started, t.done)}
    return [_Sent(*message, readings.get(k)) for k, message in enumerate(sent)]


def _observed(graph: Graph, t: Times) -> Iterator[Observed]:
    for e, m, received, readings in _messages(graph, t):
        if readings is not None:
            started, done, arrived = readings
            axis, spent, unpacked = (
                e.kwargs["axis"],
                started - t.marks[m.issue - 1],
                t.marks[m.need + 1] - arrived,
            )
            kind = op_name(e.op)
            yield Observed(
                axis, graph.axes[axis], kind, received, m.lane, started, done, spent, unpacked
            )


def _timeline(graph: Graph, t: Times) -> Timeline:
    begin, end = list(t.marks[:-1]), list(t.marks[1:])
    bars: list[Event] = []
    free: dict[str, float] = {}  # for each lane, when its last message was done
    for e, m, received, readings in _messages(graph, t):
        if readings is not None:
            issue, finish, arrived = readings
            end[m.issue - 1] = issue  # the rest of that equation's time is spent on recording
            stall = max(arrived - begin[m.need], 0.0) if finish > begin[m.need] else 0.0
        else:  # the step's own collective, which the program may not wait for
            issue = end[m.issue - 1]
            finish, stall = (
                (end[m.need], end[m.need] - begin[m.need]) if m.need < len(end) else (t.end, 0.0)
            )
        if stall:
            begin[m.need] = finish = begin[m.need] + stall
        # A busy host may notice the end of a message later than that of the next one in its lane.
        start = max(issue, free.get(m.lane, 0.0))
        free[m.lane] = finish = max(start, finish)
        bars.append(Event(m.lane, start, finish - start, e, stall, received))
    compute = [Event(COMPUTE, a, b - a, e) for e, a, b in zip(graph.eqns, begin, end, strict=True)]
    curve = tuple(zip(t.marks, memory(graph).live))
    return Timeline(f"{graph.name}, measured", t.end, (*compute, *bars), curve)


def _durations(graph: Graph, runs: Sequence[Times]) -> Iterator[tuple[str, list[float]]]:
    """The signature of each equation and its duration in each run, except for waits behind the first of their bucket.

    That of a start ends when the collective is issued. That of a wait begins when the bytes have arrived.
    """
    pairs = pair(graph)
    started, arrived = zip(*(t.started for t in runs)), zip(*(t.arrived for t in runs))
    for i, e in enumerate(graph.eqns):
        key, begin, end = (
            signature(e, graph),
            [t.marks[i] for t in runs],
            [t.marks[i + 1] for t in runs],
        )
        waited = pairs.waits.get(e)
        if e in pairs.starts:
            end = list(next(started))
        elif waited is not None:
            if waited.started.first_wait != i:
                continue  # the first wait has unpacked the bucket
            key, begin = f"{signature(waited.start, graph)} wait", list(next(arrived))
        yield key, [b - a for a, b in zip(begin, end)]


def _by_signature(graph: Graph, runs: Sequence[Times]) -> dict[str, float]:
    """The duration for each signature: the mean over its equations of their medians over the steps, scaled.

    A delay, for instance by messages that arrive, hits different equations in each step. The medians of single
    equations omit it, but the median of whole steps includes it. So all means are scaled to add up to the median step.
    """
    durations = list(_durations(graph, runs))
    medians = grouped((key, median(seconds)) for key, seconds in durations)
    total = sum(map(sum, medians.values()))
    scale = median(map(sum, zip(*(seconds for _, seconds in durations)))) / total if total else 1.0
    return {key: fmean(seconds) * scale for key, seconds in sorted(medians.items())}


def _overhead(graph: Graph, runs: Sequence[Times], device: str) -> float:
    """The seconds that a step spent on readings of the clock, after equations and for collectives."""
    record = Record(device, {})
    for _ in range(1000):
        mark(record)
    reading = record.times().end / 1000
    starts = [started.index for started in pair(graph).starts.values()]
    watching = median(sum(t.marks[i + 1] - s for i, s in zip(starts, t.started)) for t in runs)
    return reading * (len(graph.eqns) + len(starts)) + watching
