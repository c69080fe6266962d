"""profile: a step measured, as a timeline; and what it says of the cluster that it ran on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import pair
from ..ir.graph import Eqn, Graph
from ..ir.printer import format_seconds
from ..planning.cluster import Cluster, assumed
from ..planning.cost import memory
from ..planning.event_simulator import Message
from ..planning.simulate import messages, signature
from ..planning.timeline import COMPUTE, Event, Timeline
from ..runtime.codegen import bind
from ..runtime.meeting import everywhere
from .instrument import Record, Times, mark, recorded, watching
from .link_fit import sending, unpacking
from .trace_fit import Observed, explain

_TIMES = ("issued", "done", "spent", "unpacked")  # of a message


@dataclass(frozen=True, repr=False)
class Profile:
    """A measured step of this rank; `overhead` is the seconds that recording took.

    `seconds_by_signature` has what `simulate` asks for (see `simulate.signature`): of a collective what
    packing and starting takes, and with " wait" what is made of the bytes once they have come. `messages`
    are those of each recorded step.
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
        """`base` with what was measured: operations by type, and the links as far as the messages tell of them."""
        axes = {axis for axis, _ in base.links}
        usual = [_usual(same) for same in zip(*self.messages) if same[0].axis in axes]
        links = []
        for axis, link in explain(base.links, usual):
            over = [m for m in usual if m.axis == axis]
            link = sending(link, [(m.received, m.spent) for m in over])
            links.append((axis, unpacking(link, [(m.kind, m.received, m.unpacked) for m in over])))
        return dataclasses.replace(base, links=tuple(links)).with_measured(self.seconds_by_signature)

    def agreed(self, mesh: DeviceMesh) -> Profile:
        """This profile with figures that are the same on every rank, for planning; the timeline stays this rank's.

        Operations are those of the rank that computes longest, for which the others wait; a message is issued
        when the last rank has issued it, and done when it is done on all. All ranks must call it.
        """
        if mesh.size() == 1:
            return self
        computed, seconds, steps = zip(
            *everywhere((self.timeline.compute, dict(self.seconds_by_signature), self.messages), mesh)
        )
        slowest = seconds[computed.index(max(computed))]
        return dataclasses.replace(self, seconds_by_signature=slowest, messages=tuple(map(_together, zip(*steps))))


def _together(ranks: Sequence[tuple[Observed, ...]]) -> tuple[Observed, ...]:
    """The messages of one step on all ranks as one. The rank that comes last to a message may find its bytes there,
    and those that came before wait for it; so what any one of them sees says little."""
    return tuple(
        same[0]._replace(
            issued=max(m.issued for m in same),
            done=max(m.done for m in same),
            spent=median(m.spent for m in same),
            unpacked=median(m.unpacked for m in same),
        )
        for same in zip(*ranks)
    )


def _usual(same: Sequence[Observed]) -> Observed:
    """One message, of several steps."""
    return same[0]._replace(**{name: median(getattr(m, name) for m in same) for name in _TIMES})


def profile(
    graph: Graph,
    program: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    steps: int = 3,
    together: Callable[[], object] = lambda: None,
) -> Profile:
    """Run `steps` steps and record them; the state among `inputs` is donated and advances.

    `program` is the FX module of the lowered `graph` on this rank, `inputs` its flat local inputs. All
    ranks must call it; `together` waits for all of them before each step, so that the seconds from its start
    are those of one clock. Times are medians over the steps.

    Raises: ValueError for no steps.

    >>> from ztrans.runtime.codegen import to_fx
    >>> from ztrans.ir.graph import Eqn, Var
    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> graph = Graph("f", (x,), (Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0)
    >>> list(profile(graph, to_fx(graph), [torch.ones(4)]).seconds_by_signature)
    ['relu(f32[4])']
    """
    if steps < 1:
        raise ValueError(f"profile: {steps} steps; at least one is needed.")
    device = next((x.device.type for x in inputs if x.device.type != "cpu"), "cpu")  # a counter may lie on the CPU
    module, every = recorded(program), []
    run = bind(graph, module)
    with watching() as watchers:
        for _ in range(steps):
            module.record = record = Record(device, watchers)
            together()
            run(inputs)
            every.append(record.times())
    observed = tuple(_observed(graph, t) for t in every)
    return Profile(
        _timeline(graph, _medians(every)), _by_signature(graph, every), observed, _overhead(graph, every, device)
    )


def _medians(every: Sequence[Times]) -> Times:
    """Reading by reading: medians keep the order of readings, so the bars of a lane never overlap."""
    readings = (tuple(map(median, zip(*rows))) for rows in zip(*(t[:-1] for t in every)))
    return Times(*readings, end=median(t.end for t in every))


def _sent(graph: Graph) -> list[tuple[Eqn, Message, int]]:
    """The messages of a program, for lanes, places and bytes; not for how long they take."""
    return messages(graph, assumed("cpu", graph.axes))


def _observed(graph: Graph, t: Times) -> tuple[Observed, ...]:
    starts = pair(graph).starts
    ours = [each for each in _sent(graph) if each[0] in starts]
    came = dict(zip(sorted(range(len(ours)), key=lambda k: ours[k][1].need), t.came))
    found = []
    for k, ((e, m, moved), issued, done) in enumerate(zip(ours, t.started, t.done)):
        axis, spent, unpacked = e.kwargs["axis"], issued - t.marks[m.issue - 1], t.marks[m.need + 1] - came[k]
        found.append(Observed(axis, graph.axes[axis], e.op.name, moved, m.lane, issued, done, spent, unpacked))
    return tuple(found)


def _timeline(graph: Graph, t: Times) -> Timeline:
    n = len(graph.eqns)
    if len(t.marks) != n + 1:
        raise ValueError(f"profile: {len(t.marks)} readings of the clock for {n} equations; it is read after each.")
    begin, end = list(t.marks[:-1]), list(t.marks[1:])
    sent, starts = _sent(graph), pair(graph).starts
    ours = [k for k, (e, _, _) in enumerate(sent) if e in starts]
    started, done = dict(zip(ours, t.started)), dict(zip(ours, t.done))
    came = dict(zip(sorted(ours, key=lambda k: sent[k][1].need), t.came))
    bars, free = [], dict[str, float]()
    for k, (e, m, moved) in enumerate(sent):
        wait = m.need if m.need < n else None
        if k in done:
            end[m.issue - 1] = issue = started[k]  # what follows is recording
            finish, stall = done[k], max(came[k] - begin[wait], 0.0) if done[k] > begin[wait] else 0.0
        else:  # the step's own collective: when it was done shows at its wait alone
            issue = end[m.issue - 1]
            finish, stall = (end[wait], end[wait] - begin[wait]) if wait is not None else (t.end, 0.0)
        if stall:
            begin[wait] = finish = begin[wait] + stall
        start = min(max(issue, free.get(m.lane, 0.0)), finish)
        free[m.lane] = finish
        bars.append(Event(m.lane, start, finish - start, e, stall, moved))
    compute = [Event(COMPUTE, a, b - a, e) for e, a, b in zip(graph.eqns, begin, end)]
    curve = tuple(zip(t.marks, memory(graph).live))
    return Timeline(f"{graph.name}, measured", t.end, (*compute, *bars), curve)


def _by_signature(graph: Graph, every: Sequence[Times]) -> dict[str, float]:
    """The mean over the equations of one signature of what they usually take; together what a step usually does.

    What holds a step up, as messages that arrive, meets other equations in each step: medians of single
    equations know nothing of it, those of whole steps do.
    """
    pairs = pair(graph)
    taken: dict[str, list[list[float]]] = {}  # of each equation, of each step
    started, came = (iter(zip(*(t[k] for t in every))) for k in (1, 3))
    for i, e in enumerate(graph.eqns):
        begin, end = ([t.marks[k] for t in every] for k in (i, i + 1))
        key = signature(e, graph)
        waited = pairs.waits.get(e)
        if e in pairs.starts:
            end = next(started)
        elif waited is not None:
            if waited.started.first_wait != i:
                continue  # the first wait of a bucket unpacks it
            key, begin = f"{signature(waited.start, graph)} wait", next(came)
        taken.setdefault(key, []).append([b - a for a, b in zip(begin, end)])
    usual = {key: [median(steps) for steps in eqns] for key, eqns in taken.items()}
    known = sum(map(sum, usual.values()))
    whole = median(map(sum, zip(*(steps for eqns in taken.values() for steps in eqns)))) if known else 0.0
    return {key: fmean(seconds) * (whole / known if known else 1.0) for key, seconds in sorted(usual.items())}


def _overhead(graph: Graph, every: Sequence[Times], device: str) -> float:
    """The seconds a step spent on reading clocks: after each equation, and on each collective."""
    record = Record(device, {})
    for _ in range(1000):
        mark(record)
    reading = record.times().end / 1000
    starts = [started.index for started in pair(graph).starts.values()]
    watching = median(sum(t.marks[i + 1] - s for i, s in zip(starts, t.started)) for t in every)
    return reading * (len(graph.eqns) + len(starts)) + watching
