"""Measure a step as a timeline, and derive the speeds of the cluster from it.

The generated code of the program reads the clock after every equation, when a collective is started, when it is done,
and when the first wait for it returns. Values live as long as in the code without readings.
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
from ..runtime.runner import Runner
from ..runtime.session import session_of
from .link_fit import Observed, fit_to_step, with_send_cost, with_unpack_cost


@dataclass(frozen=True, repr=False)
class Profile:
    """A measured step of this rank.

    Attributes:
        timeline: when every operation and message ran.
        seconds_by_signature: the duration of each kind of operation, by its `durations.signature`. For a collective it
            is the time to pack and start it; for its signature plus " wait", the time to turn the received bytes into
            values.
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
        typical_messages = []
        for observations in zip(*self.messages):
            axis = observations[0].axis
            is_known = axis in axes or axes.issuperset(members(axis))
            if not is_known:
                continue  # an axis of the step's own collectives, which no plan moves
            typical_messages.append(_combined(observations, median))
            # The fit of a joint axis begins with the link of its slowest member.
            axis_links[axis] = base.link(axis)

        links = []
        for axis, link in fit_to_step(tuple(axis_links.items()), typical_messages):
            on_axis = [message for message in typical_messages if message.axis == axis]
            if on_axis:
                # The fitted figures cover whole messages, with packing and all levels.
                link = dataclasses.replace(link, includes_packing=True, inside=None)
            link = with_send_cost(link, [(m.received, m.spent) for m in on_axis])
            link = with_unpack_cost(link, [(m.kind, m.received, m.unpacked) for m in on_axis])
            links.append((axis, link))

        # The measured durations of operations include the compute that messages take.
        device = dataclasses.replace(base.device, lost_beside=())
        cluster = dataclasses.replace(base, device=device, links=tuple(links))
        return cluster.with_measured(self.seconds_by_signature)

    def of_plan(self, planned: Graph, as_run: Graph) -> Profile:
        """This profile with a duration for every equation of the plan, although some run in another form.

        An operation may run with a number instead of a scalar (see `number_operands`). Then its duration comes from
        the equation that binds the same value. Equations that became part of another call, or arithmetic on numbers,
        take no time.
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
        """This profile with the same durations on every rank, for planning. The timeline stays this rank's own.

        Operations take as long as on the rank that computes longest, because the others wait for it. A message counts
        as issued when the last rank has issued it, and as done when it is done on all ranks. No single rank can tell
        how long it takes: the last rank to start it may receive its bytes at once, while the others have waited for it.
        All ranks must call this.
        """
        if mesh.size() == 1:
            return self
        summary = self.timeline.compute, dict(self.seconds_by_signature), self.messages
        summaries = everywhere(summary, mesh)
        _, seconds_of_slowest, _ = max(summaries, key=lambda summary: summary[0])
        messages_by_rank = [messages for _, _, messages in summaries]
        steps = []
        for step_by_rank in zip(*messages_by_rank):
            steps.append(tuple(_combined(observations, max) for observations in zip(*step_by_rank)))
        return dataclasses.replace(
            self, seconds_by_signature=seconds_of_slowest, messages=tuple(steps)
        )


def _combined(
    observations: Sequence[Observed], combine: Callable[[Iterable[float]], float]
) -> Observed:
    """One message from several observations of it.

    `combine` applies to the times of issue and to the times of the end. All durations are medians.
    """
    return observations[0]._replace(
        issued=combine(message.issued for message in observations),
        done=combine(message.done for message in observations),
        spent=median(message.spent for message in observations),
        unpacked=median(message.unpacked for message in observations),
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
        prepare: makes the inputs of the program from `inputs`, before each step. It runs all micro-batches but the
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
    # A step on a GPU may keep some of its state on the CPU.
    device = "cpu"
    for tensor in inputs:
        if tensor.device.type != "cpu":
            device = tensor.device.type
            break
    module: Any = recorded(program)
    run = bind(graph, module)
    runs = []
    with _lane_watchers() as watchers:
        for _ in range(steps):
            module.record = Record(device, watchers)
            outputs = run(prepare(inputs))
            runs.append(module.record.times())
            # No next step uses the gathers that the program has started for it.
            for member in outputs[len(outputs) - graph.carried :]:
                wait(member)
    return Profile(
        _timeline(graph, _medians(runs)),
        _seconds_by_signature(graph, runs),
        tuple(tuple(_observed(graph, times)) for times in runs),
    )


def profile_step(
    runner: Runner,
    planned: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    steps: int,
) -> Profile:
    """Run and record some steps of this rank, without a CUDA graph. All ranks of the mesh must call it.

    Of several micro-batches, the last is recorded.

    Args:
        runner: runs the program on this rank.
        planned: the program of the last micro-batch, as it was planned.
        mesh: the mesh of the program.
        inputs: its flat local inputs. The state among them is donated, and advances by `steps` steps.
        steps: the number of steps.
    """
    executable = runner.executable
    watcher = session_of(mesh).watcher if mesh is not None else None

    def prepare(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        inputs = executable.before_last(inputs)
        if mesh is not None:
            everywhere(None, mesh)
        if watcher is not None:
            watcher.launched()  # each step of a profile has the whole time
        return [*inputs, *runner.start_carried(inputs)]

    as_run = executable.last_as_run
    measured = profile(as_run, executable.program, runner.placed(inputs), steps, prepare)
    measured = measured.of_plan(planned, as_run)
    return measured if mesh is None else measured.agreed(mesh)


class _FinishedWork:
    """Work that is done, so that nothing waits for it."""

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

    On a CPU readings are times. On a GPU they are events, which are compared after the run: on the stream of its lane
    for the end of a collective, on the current stream for all others.
    """

    def __init__(self, device: str, watchers: Mapping[str, ThreadPoolExecutor]) -> None:
        self.device = device
        self.watchers = watchers
        self.marks: list[Any] = []
        self.started: list[Any] = []
        self.done: dict[int, Any] = {}
        self.watcher_futures: list[Future[None]] = []
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
        """Record the ends of equations that ran as a single call. They share its time by their weights."""
        end = self.now()
        last_mark = self.marks[-1] if self.marks else end
        for weight_so_far in itertools.accumulate(weights[:-1]):
            if self.device == "cpu":
                self.marks.append(last_mark + (end - last_mark) * weight_so_far / sum(weights))
            else:
                # An event cannot lie between two others, so the first equation with a weight gets all of the time.
                self.marks.append(end if weight_so_far else last_mark)
        self.marks.append(end)

    def watch(self, members: tuple[Member, ...], lane: str) -> None:
        """Record the start of a collective, and watch for its end."""
        future = members[0].future
        k = len(self.started)
        self.started.append(self.now())
        if isinstance(future.work, Done):
            self.done[k] = self.now(future.work.lane)
        elif future.work is not None:
            # Work can be waited for only once, so the watcher waits for it, and the program for the watcher.
            watcher_future = self.watchers[lane].submit(self._wait, future.work, k)
            self.watcher_futures.append(watcher_future)
            future.work = SimpleNamespace(wait=watcher_future.result)
        else:
            self.done[k] = self.started[k]  # nothing was sent

    def _wait(self, work: Work, k: int) -> None:
        """Wait for a collective in the thread of its lane, because sends and receives have no callbacks."""
        work.wait()
        self.done[k] = self.now()

    def block(self, member: Member) -> None:
        """Wait for a collective and record its arrival, before the program turns the received bytes into values."""
        work = member.future.work
        if work is None:
            return  # another member of the bucket has been waited for
        work.wait()
        # The program waits too, and most works can be waited for only once.
        member.future.work = _FinishedWork()
        self.arrived.append(self.now())

    def times(self) -> Times:
        """The readings in seconds. Call it right after the run: it reads the clock for the end of the run.

        Raises: the error of a failed collective.
        """
        end = self.now()
        # The watchers may still be recording the last ends. A failed one raises its error here.
        for watcher_future in self.watcher_futures:
            watcher_future.result()
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
def _lane_watchers() -> Iterator[Mapping[str, ThreadPoolExecutor]]:
    """A thread for each lane, which waits for the collectives of that lane one after another."""
    with contextlib.ExitStack() as stack:
        yield defaultdict(lambda: stack.enter_context(ThreadPoolExecutor(1, "ztrans-watcher")))


def recorded(program: fx.GraphModule) -> fx.GraphModule:
    """The same program with readings of the clock, which go to its attribute `record`. Set it before each run."""
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
        marks=_elementwise_median([times.marks for times in runs]),
        started=_elementwise_median([times.started for times in runs]),
        done=_elementwise_median([times.done for times in runs]),
        arrived=_elementwise_median([times.arrived for times in runs]),
        end=median(times.end for times in runs),
    )


def _elementwise_median(runs: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median over the runs of each reading."""
    return tuple(median(readings) for readings in zip(*runs))


class _SentMessage(NamedTuple):
    """A message of a program, and its readings in one run.

    Attributes:
        eqn: the equation that sends it.
        message: the message as the simulator sees it.
        received: its bytes.
        readings: the times of its start, its end, and the return of its first wait. None for the step's own
            collectives, whose end shows only in their wait, and for gathers that the next step waits for.
    """

    eqn: Eqn
    message: Message
    received: int
    readings: tuple[float, float, float] | None


def _messages(graph: Graph, times: Times) -> list[_SentMessage]:
    """The messages of a program with their readings."""
    # The cluster only decides the durations of the messages, which are not used here. So any cluster will do.
    all_messages = messages(graph, default_cluster(CPU, graph.axes))
    pairs = pair(graph)
    arrived = dict(zip(_first_waits(pairs), times.arrived))
    readings_of_starts = zip(times.started, times.done)
    sent_messages: list[_SentMessage] = []
    for eqn, message, received in all_messages:
        readings = None
        if eqn in pairs.starts:
            started, done = next(readings_of_starts)
            if message.need in arrived:
                readings = started, done, arrived[message.need]
        sent_messages.append(_SentMessage(eqn, message, received, readings))
    return sent_messages


def _first_waits(pairs: Pairs) -> list[int]:
    """The places of the first waits for all collectives, in order; the step before may have started some of them."""
    return sorted({wait.started.first_wait for wait in pairs.waits.values()})


def _observed(graph: Graph, times: Times) -> Iterator[Observed]:
    """The timed messages, for the fit of links."""
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
    """A run as a timeline, with a bar for each equation and each message, and the stalls of compute."""
    begin = list(times.marks[:-1])
    end = list(times.marks[1:])
    bars: list[Event] = []
    # For each lane, the end of its last message.
    lane_end: dict[str, float] = {}
    for eqn, message, received, readings in _messages(graph, times):
        need = message.need
        stall = 0.0
        if readings is not None:
            issue, finish, arrived = readings
            # Operation `issue - 1` starts the message. The rest of its time goes into recording.
            end[message.issue - 1] = issue
            if finish > begin[need]:
                stall = max(arrived - begin[need], 0.0)
        else:
            issue = end[message.issue - 1]
            finish = times.end
            # The program may never wait for the step's own collective.
            if need < len(end):
                finish = end[need]
                stall = end[need] - begin[need]
        if stall:
            # The bar of the wait begins when compute continues.
            finish = begin[need] + stall
            begin[need] = finish

        # A busy host may notice the end of a message later than the end of the next one in its lane.
        start = max(issue, lane_end.get(message.lane, 0.0))
        finish = max(start, finish)
        lane_end[message.lane] = finish
        bars.append(Event(message.lane, start, finish - start, eqn, stall, received))

    compute = []
    for eqn, start, finish in zip(graph.eqns, begin, end, strict=True):
        compute.append(Event(COMPUTE, start, finish - start, eqn))
    usage = memory(graph)
    live = tuple(zip(times.marks, usage.live))
    others = {kind: tuple(zip(times.marks, n)) for kind, n in usage.other_memories.items()}
    name = f"{graph.name}, measured"
    limit = graph.hints.memory_limit
    return Timeline(name, times.end, (*compute, *bars), live, limit=limit, other_memories=others)


def _durations(graph: Graph, runs: Sequence[Times]) -> Iterator[tuple[str, list[float]]]:
    """The signature of each equation and its duration in each run, except for the later waits of each bucket.

    The duration of a start ends when the collective is issued. The duration of a wait begins when the bytes arrive.
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
        yield key, [finish - start for start, finish in zip(begin, end)]


def _seconds_by_signature(graph: Graph, runs: Sequence[Times]) -> dict[str, float]:
    """The duration of each signature: the mean over its equations of their medians over the steps, scaled.

    A delay, for instance by messages that arrive, hits different equations in each step. The medians of single
    equations omit it, but the median of whole steps includes it. So all means are scaled to add up to the median step.
    """
    durations = list(_durations(graph, runs))
    medians = grouped((key, median(seconds)) for key, seconds in durations)
    total = sum(sum(seconds) for seconds in medians.values())
    scale = 1.0
    if total:
        seconds_by_step = zip(*(seconds for _, seconds in durations))
        scale = median(sum(seconds) for seconds in seconds_by_step) / total
    return {key: fmean(seconds) * scale for key, seconds in sorted(medians.items())}
