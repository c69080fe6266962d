"""A measured step as a timeline, and the speeds of the cluster that follow from it.

The clock is read in the generated code of the program: after every equation, when a collective is started, when it is
done, and when the first wait for it returns. The lifetimes of values are the same as in the code without readings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import members
from ..ir.collectives import WAIT, is_start, lane
from ..ir.dependencies import grouped
from ..ir.graph import Eqn, Graph, producers
from ..ir.pairing import Pairs, pair
from ..ir.printer import op_name
from ..planning.cluster import Cluster, default_cluster
from ..planning.cost import memory
from ..planning.devices import CPU
from ..planning.durations import messages, signature
from ..planning.network import Message
from ..report.event import COMPUTE, Event
from ..report.timeline import Timeline
from ..runtime.agreement import everywhere
from ..runtime.collectives import Member, Work, wait
from ..runtime.cuda.streams import Done
from ..runtime.executable import bind
from .link_fit import Observed, fit_to_step, with_send_cost, with_unpack_cost


@dataclass(frozen=True, repr=False)
class Profile:
    """A measured step of this rank.

    Attributes:
        timeline: when every operation and message ran.
        seconds_by_signature: the duration of each kind of operation, by its `durations.signature`. That of a collective
            is the time to pack and start it; with " wait" after it, the time to turn the received bytes into values.
        messages: the messages of each recorded step.
    """

    timeline: Timeline
    seconds_by_signature: Mapping[str, float]
    messages: tuple[tuple[Observed, ...], ...]

    def __str__(self) -> str:
        return str(self.timeline)

    def __repr__(self) -> str:
        return f"Profile({self.timeline!r})"

    def cluster(self, base: Cluster) -> Cluster:
        """`base` with the measured durations of operations, and with links fitted to the measured messages."""
        axes = {axis for axis, _ in base.links}
        axis_links = base.links_with_neighbours
        usual = []
        for same in zip(*self.messages):
            axis = same[0].axis
            is_known = axis in axes or axes.issuperset(members(axis))
            if not is_known:
                continue  # an axis of the step's own collectives, which no plan moves
            usual.append(_combined(same, median))
            # The fit of a joint axis begins with the link of its slowest member.
            axis_links[axis] = base.link(axis)

        links = []
        for axis, link in fit_to_step(tuple(axis_links.items()), usual):
            on_axis = [message for message in usual if message.axis == axis]
            if on_axis:
                # The figures are those of whole messages, in all levels.
                link = dataclasses.replace(link, includes_packing=True, inside=None)
            link = with_send_cost(link, [(m.received, m.spent) for m in on_axis])
            link = with_unpack_cost(link, [(m.kind, m.received, m.unpacked) for m in on_axis])
            links.append((axis, link))

        # What messages take from the processor is part of the durations of operations.
        device = dataclasses.replace(base.device, lost_beside=())
        cluster = dataclasses.replace(base, device=device, links=tuple(links))
        return cluster.with_measured(self.seconds_by_signature)

    def of_plan(self, planned: Graph, as_run: Graph) -> Profile:
        """This profile with durations for the equations of the plan, although some run in another form.

        An operation may run with a number in place of a scalar (see `ir.number_operands`): the equation that binds the
        same value gives its duration. Equations that became part of another call, or arithmetic on numbers, take none.
        """
        run_as = producers(as_run.eqns)
        waits = pair(planned).waits
        seconds_of: dict[str, list[float]] = {}
        for eqn in planned.eqns:
            key = signature(eqn, planned)
            if key in self.seconds_by_signature or eqn in waits or not eqn.results:
                continue
            twin = run_as.get(eqn.out)
            seconds = 0.0
            if twin is not None:
                seconds = self.seconds_by_signature.get(signature(twin, as_run), 0.0)
            seconds_of.setdefault(key, []).append(seconds)
        planned_seconds = {key: fmean(seconds) for key, seconds in seconds_of.items()}
        by_signature = dict(sorted({**self.seconds_by_signature, **planned_seconds}.items()))
        return dataclasses.replace(self, seconds_by_signature=by_signature)

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
        by_rank = everywhere(mine, mesh)
        _, seconds_of_slowest, _ = max(by_rank, key=lambda of_rank: of_rank[0])
        messages_by_rank = [messages for _, _, messages in by_rank]
        steps = []
        for step_by_rank in zip(*messages_by_rank):
            steps.append(tuple(_combined(same, max) for same in zip(*step_by_rank)))
        return dataclasses.replace(
            self, seconds_by_signature=seconds_of_slowest, messages=tuple(steps)
        )


def _combined(same: Sequence[Observed], moment: Callable[[Iterable[float]], float]) -> Observed:
    """One message from several observations of it.

    `moment` combines the times of issue, and those of the end. All durations are medians.
    """
    return same[0]._replace(
        issued=moment(message.issued for message in same),
        done=moment(message.done for message in same),
        spent=median(message.spent for message in same),
        unpacked=median(message.unpacked for message in same),
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
            comparable between ranks. It starts the gathers that the program carries.

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
    # Some of the state of a step on a GPU may be on the CPU.
    device = "cpu"
    for tensor in inputs:
        if tensor.device.type != "cpu":
            device = tensor.device.type
            break
    module: Any = recorded(program)
    run = bind(graph, module)
    runs = []
    with _watching() as watchers:
        for _ in range(steps):
            module.record = Record(device, watchers)
            outputs = run(prepare(inputs))
            runs.append(module.record.times())
            # The gathers that the program has started for the next step: no step goes on with them.
            for member in outputs[len(outputs) - graph.carried :]:
                wait(member)
    return Profile(
        _timeline(graph, _medians(runs)),
        _seconds_by_signature(graph, runs),
        tuple(tuple(_observed(graph, times)) for times in runs),
    )


class _Ended:
    """Work that has been waited for."""

    def wait(self) -> None:
        """Return at once."""


class Times(NamedTuple):
    """The readings of one run, in seconds from its first equation.

    Attributes:
        marks: before the first equation, and after each equation.
        started: when each collective was started, in order of the starts.
        done: when each collective was done, in the same order.
        arrived: when the first wait for each collective returned, in order of these waits.
        end: the end of the run.
    """

    marks: tuple[float, ...]
    started: tuple[float, ...]
    done: tuple[float, ...]
    arrived: tuple[float, ...]
    end: float


class Record:
    """The readings of one run.

    On a CPU they are times. On a GPU they are events, which are compared after the run. They are on the current stream,
    except for the end of a collective, which is an event on the stream of its lane.
    """

    def __init__(self, device: str, watchers: Mapping[str, ThreadPoolExecutor]) -> None:
        self.device = device
        self.watchers = watchers
        self.marks: list[Any] = []
        self.started: list[Any] = []
        self.done: dict[int, Any] = {}
        self.watched: list[Future[None]] = []
        self.arrived: list[Any] = []

    def now(self, stream: Any = None) -> Any:
        """A reading of the clock."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        if stream is None:
            event.record()
        else:
            event.record(stream)
        return event

    def mark(self, weights: tuple[int, ...] = (1,)) -> None:
        """Note that equations have ended, which ran as a single call and share its time by their weights."""
        end = self.now()
        last_mark = self.marks[-1] if self.marks else end
        for passed in itertools.accumulate(weights[:-1]):
            if self.device == "cpu":
                self.marks.append(last_mark + (end - last_mark) * passed / sum(weights))
            else:
                # There is no event between two others, so the first equation with a weight has all of the time.
                self.marks.append(end if passed else last_mark)
        self.marks.append(end)

    def watch(self, members: tuple[Member, ...], lane: str) -> None:
        """Note that a collective has been started, and arrange for its end to be noted."""
        future = members[0].future
        k = len(self.started)
        self.started.append(self.now())
        if isinstance(future.work, Done):
            self.done[k] = self.now(future.work.lane)
        elif future.work is not None:
            # Work can be waited for only once: the watcher does, and the program waits for the watcher.
            watching = self.watchers[lane].submit(self._wait, future.work, k)
            self.watched.append(watching)
            future.work = SimpleNamespace(wait=watching.result)
        else:
            self.done[k] = self.started[k]  # nothing is under way

    def _wait(self, work: Work, k: int) -> None:
        """Wait for a collective, in the thread of its lane, because sends and receives have no callbacks."""
        work.wait()
        self.done[k] = self.now()

    def block(self, member: Member) -> None:
        """Wait until a collective is done, and note that, before the program turns the received bytes into values."""
        work = member.future.work
        if work is None:
            return  # another member of the bucket has been waited for
        work.wait()
        # The program waits too, and most works can be waited for only once.
        member.future.work = _Ended()
        self.arrived.append(self.now())

    def times(self) -> Times:
        """The readings in seconds. Call it right after the run: it reads the clock for the end of the run.

        Raises: the error of a collective that has not ended well.
        """
        end = self.now()
        # The watchers may not have noted the last ends. One that has failed raises its error here.
        for watching in self.watched:
            watching.result()
        if self.device != "cpu":
            torch.accelerator.synchronize()
        first = self.marks[0]

        def since(reading: Any) -> float:
            if self.device == "cpu":
                return reading - first
            return first.elapsed_time(reading) * 1e-3

        return Times(
            tuple(map(since, self.marks)),
            tuple(map(since, self.started)),
            tuple(since(self.done[k]) for k in range(len(self.started))),
            tuple(map(since, self.arrived)),
            since(end),
        )


@contextlib.contextmanager
def _watching() -> Iterator[Mapping[str, ThreadPoolExecutor]]:
    """Keep a thread for each lane, which waits for the collectives of that lane one after the other."""
    with contextlib.ExitStack() as stack:
        yield defaultdict(lambda: stack.enter_context(ThreadPoolExecutor(1, "ztrans-watcher")))


def recorded(program: fx.GraphModule) -> fx.GraphModule:
    """The same program with readings of the clock, which go to its attribute `record`. Set that before each run."""
    out = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    record: fx.Node | None = None
    for node in program.graph.nodes:
        eqn = node.meta.get("eqn")
        if record is None and node.op != "placeholder":
            record = out.get_attr("record")
            out.call_method("mark", (record,))
        if eqn is not None and eqn.op is WAIT:
            out.call_method("block", (record, copies[node.args[0]]))
        copies[node] = out.node_copy(node, copies.__getitem__)
        if eqn is not None and is_start(eqn) and node.op == "call_module":
            out.call_method("watch", (record, copies[node], lane(eqn)))
        if eqn is not None and node.next.meta.get("eqn") is not eqn:
            out.call_method("mark", (record, node.meta["weights"]))
    return fx.GraphModule({**_attributes(program), "record": None}, out, "Recorded")


def _attributes(program: fx.GraphModule) -> dict[str, Any]:
    """The modules, constants and other objects that the code of a program reads, by name."""
    attributes = {}
    for node in program.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            attributes[node.target] = getattr(program, node.target)
    return attributes


def _medians(runs: Sequence[Times]) -> Times:
    """The median of each reading. Medians keep the order of readings, so the bars of a lane never overlap."""
    return Times(
        marks=_median_of_each([times.marks for times in runs]),
        started=_median_of_each([times.started for times in runs]),
        done=_median_of_each([times.done for times in runs]),
        arrived=_median_of_each([times.arrived for times in runs]),
        end=median(times.end for times in runs),
    )


def _median_of_each(readings: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The medians of readings that were taken in every run."""
    return tuple(median(same) for same in zip(*readings))


class _Sent(NamedTuple):
    """A message of a program, and its readings in one run.

    Attributes:
        eqn: the equation that sends it.
        message: the message, as the simulator sees it.
        received: its bytes.
        readings: when it was started, when it was done, and when its first wait returned; None for the step's own
            collectives, of which only the wait shows when they were done, and for gathers that the next step waits for.
    """

    eqn: Eqn
    message: Message
    received: int
    readings: tuple[float, float, float] | None


def _messages(graph: Graph, times: Times) -> list[_Sent]:
    """The messages of a program with their readings."""
    # The durations that the cluster gives to messages are not used here, so it may be any cluster.
    all_messages = messages(graph, default_cluster(CPU, graph.axes))
    pairs = pair(graph)
    arrived = dict(zip(_first_waits(pairs), times.arrived))
    readings_of_starts = zip(times.started, times.done)
    every: list[_Sent] = []
    for eqn, message, received in all_messages:
        readings = None
        if eqn in pairs.starts:
            started, done = next(readings_of_starts)
            if message.need in arrived:
                readings = started, done, arrived[message.need]
        every.append(_Sent(eqn, message, received, readings))
    return every


def _first_waits(pairs: Pairs) -> list[int]:
    """The places of the first waits for collectives, in order, with those that the step before has started."""
    return sorted({waited.started.first_wait for waited in pairs.waits.values()})


def _observed(graph: Graph, times: Times) -> Iterator[Observed]:
    """The messages that were timed, as the fit of links sees them."""
    for eqn, message, received, readings in _messages(graph, times):
        if readings is None:
            continue
        started, done, arrived = readings
        axis = eqn.kwargs["axis"]
        yield Observed(
            axis,
            graph.axes[axis],
            op_name(eqn.op),
            received,
            message.lane,
            issued=started,
            done=done,
            spent=started - times.marks[message.issue - 1],
            unpacked=times.marks[message.need + 1] - arrived,
        )


def _timeline(graph: Graph, times: Times) -> Timeline:
    """A run as a timeline: a bar for each equation, and one for each message, in which compute may wait for it."""
    begin = list(times.marks[:-1])
    end = list(times.marks[1:])
    bars: list[Event] = []
    # For each lane, when its last message was done.
    free: dict[str, float] = {}
    for eqn, message, received, readings in _messages(graph, times):
        need = message.need
        stall = 0.0
        if readings is not None:
            issue, finish, arrived = readings
            # Operation `issue - 1` starts the message. The rest of its time is spent on recording.
            end[message.issue - 1] = issue
            if finish > begin[need]:
                stall = max(arrived - begin[need], 0.0)
        else:
            issue = end[message.issue - 1]
            finish = times.end
            # The program need not wait for the step's own collective.
            if need < len(end):
                finish = end[need]
                stall = end[need] - begin[need]
        if stall:
            # The bar of the wait begins when compute goes on.
            finish = begin[need] + stall
            begin[need] = finish

        # A busy host may notice the end of a message later than that of the next one in its lane.
        start = max(issue, free.get(message.lane, 0.0))
        finish = max(start, finish)
        free[message.lane] = finish
        bars.append(Event(message.lane, start, finish - start, eqn, stall, received))

    compute = []
    for eqn, began, ended in zip(graph.eqns, begin, end, strict=True):
        compute.append(Event(COMPUTE, began, ended - began, eqn))
    counted = memory(graph)
    live = tuple(zip(times.marks, counted.live))
    host = tuple(zip(times.marks, counted.live_on_host))
    name = f"{graph.name}, measured"
    limit = graph.hints.memory_limit
    return Timeline(name, times.end, (*compute, *bars), live, limit=limit, host_memory=host)


def _durations(graph: Graph, runs: Sequence[Times]) -> Iterator[tuple[str, list[float]]]:
    """The signature of each equation and its duration in each run, except for the later waits of each bucket.

    That of a start ends when the collective is issued. That of a wait begins when the bytes have arrived.
    """
    pairs = pair(graph)
    started = zip(*(times.started for times in runs))
    arrived = zip(*(times.arrived for times in runs))
    for i, eqn in enumerate(graph.eqns):
        key = signature(eqn, graph)
        begin: Sequence[float] = [times.marks[i] for times in runs]
        end: Sequence[float] = [times.marks[i + 1] for times in runs]
        wait = pairs.waits.get(eqn)
        if eqn in pairs.starts:
            end = next(started)
        elif wait is not None:
            # The first wait unpacks the bucket. The others take no time.
            if wait.started.first_wait != i:
                continue
            key = f"{signature(wait.start, graph)} wait"
            begin = next(arrived)
        yield key, [later - earlier for earlier, later in zip(begin, end)]


def _seconds_by_signature(graph: Graph, runs: Sequence[Times]) -> dict[str, float]:
    """The duration for each signature: the mean over its equations of their medians over the steps, scaled.

    A delay, for instance by messages that arrive, hits different equations in each step. The medians of single
    equations omit it, but the median of whole steps includes it. So all means are scaled to add up to the median step.
    """
    durations = list(_durations(graph, runs))
    medians = grouped((key, median(seconds)) for key, seconds in durations)
    total = sum(map(sum, medians.values()))
    scale = 1.0
    if total:
        whole_steps = map(sum, zip(*(seconds for _, seconds in durations)))
        scale = median(whole_steps) / total
    return {key: fmean(seconds) * scale for key, seconds in sorted(medians.items())}
