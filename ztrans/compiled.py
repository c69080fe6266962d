"""Compiled: the program of one rank, bound to its device. It can be run, profiled and tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .calling.call import BoundCall
from .calling.trees import opened
from .ir.ambient import refuse_inside, without_autocast
from .ir.donation import donation
from .ir.graph import Graph
from .ir.printer import Printed, format_seconds
from .ir.update_groups import Group, group_updates
from .planning.cost import memory
from .planning.fingerprint import update_fingerprint
from .planning.plan_transfer import landmarks, transfer
from .profiling.profile import Profile, profile
from .report.progress import stage
from .report.tracebacks import ends_at_user
from .runtime.consensus import Promise, Proposal, check_adopted, proposals, slowest
from .runtime.cuda.graph_capture import Capture, check_values, placed, with_rates
from .runtime.cuda.symmetric_start import check
from .runtime.executable import Executable, executable
from .runtime.failure import Writes, alone, check_whole, running, steps_of
from .runtime.inductor import backend as inductor
from .runtime.known_state import KnownState, LastState, StateLeaves
from .runtime.leaves import check_laid_out
from .runtime.meeting import Call, everywhere, meet
from .runtime.micro_batches import MicroBatches, micro_batches
from .runtime.process_groups import process_groups
from .tracing.arguments import (
    BatchKey,
    StateKey,
    batch_like,
    check_captured,
    check_donation,
    local_batch,
    local_inputs,
    state_key,
)

if TYPE_CHECKING:
    from .stages import Lowered, Traced


class Given(NamedTuple):
    """The arguments of a call, their keys, the leaves of the batch, and those of the state if it was returned last."""

    call: BoundCall
    state: StateLeaves | None
    batch: list
    state_key: StateKey
    batch_key: BatchKey

    @staticmethod
    def of(call: BoundCall, last: LastState) -> Given:
        """The arguments with what is known of their state."""
        state = last.recognise(call.state)
        batch, last.batch = batch_like(call, last.batch)
        key = last.known.key if state and last.known else state_key(call)
        return Given(call, state, batch, key, last.batch.key)


class Bound(NamedTuple):
    """A program as it runs on this rank."""

    lowered: Lowered
    run: Any  # a function from flat inputs to flat outputs; its attribute `program` is the FX program that it runs
    promise: Promise | None = None  # what the ranks of a mesh must do alike


@dataclass(frozen=True, repr=False)
class Compiled(Printed):
    """A program bound to this rank: callable, and no longer transformable, as `jax.stages.Compiled`.

    The first call compares the programs of all ranks, and uses rank 0's plan if plans differ. A program that is
    `agreed` skips this: it follows a plan agreed on for another batch size, so it sends the same messages.

    Raises: TypeError if the arguments are not those that it was compiled for, if a value that the step reads besides
        its arguments has changed since it was traced, or if it is called inside a transform of torch.func.
    """

    lowered: Lowered
    backend: str = "eager"
    cuda_graph: bool = False
    agreed: bool = field(default=False, compare=False, repr=False)
    _bound: list[Bound] = field(default_factory=list, compare=False, repr=False)
    _writes: Writes = field(default_factory=Writes, compare=False, repr=False)
    _runner: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _last: LastState = field(default_factory=LastState, compare=False, repr=False)
    # The keys of states and batches that this program has accepted, with the tree of its output.
    _accepted: dict[tuple[StateKey, BatchKey], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        """The program that runs; before the first call, the lowered program."""
        return (self._bound[0].lowered if self._bound else self.lowered).graph

    def __repr__(self) -> str:
        return f"Compiled({self.graph!r}, backend={self.backend!r}{', cuda_graph=True' if self.cuda_graph else ''})"

    @ends_at_user
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        refuse_inside(self.lowered.graph.name, (args, kwargs))
        check_captured(self.lowered.program, self.lowered.graph.name)
        return self.run(Given.of(BoundCall.of(self.lowered.program.captured.fn, args, kwargs), self._last), self._last)

    def run(self, given: Given, last: LastState) -> tuple[Any, Any]:
        """Run the program without checking the captured values.

        A `Step` calls this: it has compared the captured values when it chose the program. `last` holds the state
        that was returned last, and after this run the state that it returns.
        """
        key, n = (given.state_key, given.batch_key), self.lowered.graph.num_state
        out_tree = self._accepted.get(key)
        leaves, local = self._flat(given.call) if out_tree is None else self._known_inputs(given, last)
        with self._step(leaves, local) as run:
            outputs = run(local)
        if given.state is not None and out_tree is not None:
            return given.call.state, pytree.tree_unflatten(outputs[n:], out_tree)
        for i, old in enumerate(leaves[:n]):
            # Return the tensors that the caller passed: their storages now hold the new state.
            outputs[i] = old if isinstance(old, torch.Tensor) else outputs[i]
        state, output = pytree.tree_unflatten(outputs, self.lowered.program.returned(self.graph.added))
        self._accepted[key] = pytree.tree_structure(opened(output))
        last.known = KnownState(state, outputs[:n], given.state_key)
        return state, output

    @ends_at_user
    @without_autocast()
    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Run `steps` steps on these arguments, and record when each operation and message ran.

        The state is donated and advances. All ranks must call it. The times of operations and links in the result are
        the same on all ranks. The timeline, in the lanes of `Lowered.timeline`, is that of this rank. A step with
        `cuda_graph` is recorded without its graph, of micro-batches only the last. See `profile.Profile`.
        """
        check_captured(self.lowered.program, self.lowered.graph.name)
        leaves, local = self._flat(BoundCall.of(self.lowered.program.captured.fn, args, kwargs))
        with self._step(leaves, local) as run:
            self._writes.begin()
            local = placed(self.lowered.graph, local) if self.cuda_graph else local
            mesh, micro = self._mesh, run.run if isinstance(run, Capture) else run
            graph = micro.last if isinstance(micro, MicroBatches) else self._bound[0].lowered.graph

            def prepared(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                given = micro.before_last(inputs) if isinstance(micro, MicroBatches) else inputs
                if mesh is not None:
                    everywhere(None, mesh)
                return given

            measured = profile(graph, run.program, local, steps, prepared)
            return measured if mesh is None else measured.agreed(mesh)

    def close(self) -> None:
        """Release the captured CUDA graph, if there is one.

        Call it before the process group is destroyed, or to continue with another state. The next call then runs
        without a graph, and the one after it captures a new graph.
        """
        for bound in self._bound:
            if isinstance(bound.run, Capture):
                bound.run.close()

    @ends_at_user
    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> tuple[Compiled, Profile]:
        """Record `steps` steps, plan again from them, record as many steps with the new plan, and keep the faster plan.

        The notes of the plan give the seconds of a step on the slowest rank. The state is donated and advances. All
        ranks must call it.

        Returns: The program with the faster plan, and the first recording.
        """
        before = self.profile(*args, steps=steps, **kwargs)
        replanned = dataclasses.replace(self, lowered=self._bound[0].lowered.replan(before), agreed=False, _bound=[])
        after = replanned.profile(*args, steps=steps, **kwargs)
        first, second = slowest([before.timeline.seconds, after.timeline.seconds], self.lowered.mesh)
        lowered, run, promise = (replanned if second < first else self)._bound[0]
        note = f"measured {format_seconds(second)} a step, where the plan before took {format_seconds(first)}"
        notes = (*lowered.plan.notes, note if second < first else f"{note} and was kept")
        plan = dataclasses.replace(lowered.plan, notes=notes)
        lowered = dataclasses.replace(lowered, plan=plan, cluster=replanned.lowered.cluster)
        return dataclasses.replace(self, lowered=lowered, _bound=[Bound(lowered, run, promise)]), before

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh of devices that the program runs on, or None if it runs in one process."""
        return self.lowered.mesh if isinstance(self.lowered.mesh, DeviceMesh) else None

    @contextlib.contextmanager
    def _step(self, leaves: Sequence[Any], local: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Meet the other ranks for this step, then yield the function that runs the program."""
        name, mesh = self.lowered.graph.name, self._mesh
        state = leaves[: self.lowered.graph.num_state]
        check_whole(state, name)
        with alone(self._runner if mesh is None else process_groups(mesh).runner, name):
            if not self._bound:
                self._bound.append(self._bind(local))
            bound = self._bound[0]
            if mesh is not None and (promise := bound.promise) is not None:
                meet(mesh, Call(f"a step of {name}", promise.hash(local), steps_of(state)), lambda: promise.of(local))
            with running(name, state, mesh, self._writes):
                if self.cuda_graph:
                    self._writes.begin()
                yield bound.run

    def for_other_sizes(self, traced: Traced) -> Compiled:
        """The program of the same step for other batch sizes, in the order of this program.

        The ranks have agreed on that order, so a single rank may have a batch of such sizes. A program with other
        collectives cannot follow the order: it gets a plan of its own, on which all ranks must agree.
        """
        known = self._bound[0].lowered if self._bound else self.lowered
        try:
            lowered, agreed = traced.follow(known), bool(self._bound)
        except ValueError:
            lowered, agreed = traced.lower(cluster=known.cluster), False
        return dataclasses.replace(self, lowered=lowered, agreed=agreed, _bound=[], _accepted={})

    def _flat(self, call: BoundCall) -> tuple[list, list[torch.Tensor]]:
        program, graph = self.lowered.program, self.lowered.graph
        leaves, local = local_inputs(program, graph, call)
        if self._mesh is not None and self._mesh.size() > 1:  # a single rank holds all of a leaf, whatever its layout
            layouts = [v.layout for v in graph.inputs[: graph.num_state]]
            check_laid_out(graph.name, self._mesh, program.axes, program.paths, leaves, layouts, lowered=True)
        check_donation(graph, local)  # at every call, because the caller may have replaced a leaf by another
        return leaves, local

    def _known_inputs(self, given: Given, last: LastState) -> tuple[Sequence, list[torch.Tensor]]:
        """As `_flat`, for a state that was returned last, and a batch like one that was accepted before."""
        batch = local_batch(self.lowered.program, self.lowered.graph.num_state, given.batch)
        if given.state is None or last.known is None or any(map(last.known.overlaps, batch)):
            return self._flat(given.call)
        return given.state.leaves, [*given.state.local, *batch]

    @without_autocast()
    def _bind(self, local: Sequence[torch.Tensor]) -> Bound:
        run: Any
        lowered = self.lowered if self.agreed else _agreed(self.lowered)
        if any(x.is_cuda and x.dtype == torch.float64 and not x.ndim for x in local) or self.cuda_graph:
            lowered = dataclasses.replace(lowered, graph=with_rates(lowered.graph))
        if self.cuda_graph:
            check_values(lowered.graph)
            local = placed(lowered.graph, local)
        with stage(lowered.graph.name, f"compile ({self.backend})"):
            if lowered.graph.micro > 1:
                run = micro_batches(lowered.graph, self._mesh, local, self._executable)
            else:
                graph, run = self._executable(lowered.graph, local)
                lowered = dataclasses.replace(lowered, graph=graph)
        if self.cuda_graph:
            run = Capture(run, lowered.graph, check=functools.partial(check, run.modules))
        promise = Promise(lowered.graph, update_fingerprint(lowered.hinted)) if self._mesh is not None else None
        return Bound(lowered, run, promise)

    def _executable(self, graph: Graph, local: Sequence[torch.Tensor]) -> tuple[Graph, Executable]:
        """A program in the order in which it runs, and what runs it."""
        n, begin = graph.num_state, self._writes.begin
        on_write = begin if graph.outputs[:n] != graph.inputs[:n] else None
        if self.backend == "inductor":
            return inductor.executable(graph, self._mesh, local, on_write)
        graph, groups = _grouped(graph)
        return graph, executable(graph, self._mesh, on_write, groups)


def _grouped(graph: Graph) -> tuple[Graph, Sequence[Group]]:
    """The program with equal updates next to each other, and their groups.

    Updates that compute temporary values are left in their places where the peak of memory would rise otherwise.
    """
    twins, peak = donation(graph).twins, memory(graph).peak
    for may_move in (lambda e: True, lambda e: e in twins or not any(v.shape for v in e.results)):
        grouped, groups = group_updates(graph, may_move)
        if memory(grouped).peak <= peak:
            return grouped, groups
    return graph, ()


def _agreed(lowered: Lowered) -> Lowered:
    """The program in the order of rank 0's plan. This rank's own plan may differ, if it measured other times.

    Raises: RuntimeError on every rank if the ranks have lowered different programs, or if that plan does not fit the
        program of a rank.
    """
    mesh, name = lowered.mesh, lowered.graph.name
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1:
        return lowered
    plan, hinted = lowered.plan, lowered.hinted
    mine = Proposal(plan.program, Promise(hinted, update_fingerprint(hinted)).lines, (plan, landmarks(hinted, plan)))
    with stage(name, "wait for the plans of the other ranks"):
        everyone = proposals(name, mesh, mine)
    (first, marks), problem = everyone[0].plan, ""
    try:
        if plan.program != everyone[0].program:
            lowered = lowered.following(transfer(first, marks, hinted))
        elif plan.digest != first.digest:
            lowered = lowered.following(first)
    except ValueError as error:
        problem = str(error)
    check_adopted(name, mesh, everyone, problem)
    return lowered
