"""`Compiled`, the program of one rank bound to its device, which can be run, profiled and tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .backends import BACKENDS, changed_leaves, make_runner
from .calling.call import BoundCall
from .calling.guard import Guard
from .calling.inputs import Inputs, check_donation, check_memory, device_of
from .calling.leaf_records import RECORDS, Snapshot, check_whole
from .calling.meta_leaves import check_written
from .calling.signature import Surroundings
from .ir.ambient import (
    refuse_anomaly_mode,
    refuse_inside,
    refuse_under_compile,
    without_autocast,
)
from .ir.graph import Graph
from .ir.layout import LeafSharding
from .ir.micro_batches import micro_batch_programs
from .ir.printer import Printed, format_bytes
from .planning.cost import Memory, memory
from .planning.limit import DoesNotFit
from .planning.place_copies import HostIsFull
from .planning.realise import PlanError
from .profiling.check_finite import NonFinite, first_non_finite
from .profiling.profile import Profile, profile_step
from .profiling.tuning import MeasuredPlan, Tuning
from .report.progress import stage
from .report.tracebacks import ends_at_user
from .runtime import stop
from .runtime.agreement import agree, agree_on_call, everywhere, say_failure, step_of
from .runtime.communicators import usable_bytes
from .runtime.contract import Contract, agree_on_plan, agree_on_program, update_hash
from .runtime.cuda.half_weights import HalfWeights
from .runtime.failure import (
    Writes,
    check_launched,
    ending_together,
    one_thread,
    running,
)
from .runtime.runner import Runner
from .runtime.session import Session, leave_if_cut_off, session_of
from .runtime.state import check_laid_out
from .runtime.transports import reserve
from .runtime.watch import described

if TYPE_CHECKING:
    from .stages import Lowered, Traced


class LocalProgram(NamedTuple):
    """A program as it runs on this rank.

    Attributes:
        lowered: the program, in the order in which it runs.
        runner: runs it, from flat inputs to flat outputs.
        writes: whether the runner has begun to write the state.
        session: the session of its mesh; None in one process.
        contract: what all ranks of the mesh must do alike; None without a mesh.
        half_weights: the hidden copies of parameters in half precision, in the order in which they are inserted.
        changed_leaves: the positions of the leaves of the state that a step changes.
        device: the GPU that it runs on; None on a CPU.
    """

    lowered: Lowered
    runner: Runner
    writes: Writes
    session: Session | None = None
    contract: Contract | None = None
    half_weights: Sequence[HalfWeights] = ()
    changed_leaves: Sequence[int] = ()
    device: torch.device | None = None


class Binding:
    """The mutable part of a compiled program, set by its runs on this rank. The first run binds the program.

    Attributes:
        local_program: the program as it runs on this rank; None before the first run.
        guard: recognises the next call if it is like the last one.
        lock: held by the thread that runs the program, if the program has no mesh.
    """

    def __init__(self, local_program: LocalProgram | None = None) -> None:
        self.local_program = local_program
        self.guard: Guard | None = None
        self.lock = threading.RLock()

    def match(self, call: BoundCall, surroundings: Surroundings) -> Inputs | None:
        """The inputs of a call that is like the last one; None for another call."""
        return self.guard.match(call, surroundings) if self.guard is not None else None


@dataclass(frozen=True, repr=False)
class Compiled(Printed):
    """A program bound to this rank: callable, and no longer transformable, as `jax.stages.Compiled`.

    It keeps the program that runs, and the program as written, from which `tune` plans again, but no earlier stage. The
    first call compares the programs of all ranks, and uses rank 0's plan if plans differ. A program that is
    `agreed` skips this: it follows a plan agreed on for another batch size, so it sends the same messages. `changes`
    says how its call differs from the one before, in words.

    Raises: TypeError if it was compiled for other arguments, if a value that the step reads elsewhere has changed since
        it was traced, or if it is called inside a transform of torch.func.
    """

    lowered: Lowered
    backend: str = "eager"
    cuda_graph: bool = False
    cast_ahead: bool = False
    agreed: bool = field(default=False, compare=False, repr=False)
    changes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    binding: Binding = field(default_factory=Binding, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        """The program in the order in which it runs; before the first call, the lowered program."""
        local_program = self.binding.local_program
        return (local_program.lowered if local_program is not None else self.lowered).graph

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """An unbound copy that shares the program, which is frozen. Copying a module that holds this makes one."""
        return dataclasses.replace(self, binding=Binding())

    def memory_analysis(self) -> Memory:
        """The live bytes at each equation of `graph`, their peak, and the values that are live at the peak.

        After the first call they include what this rank keeps for the program, such as the copies of `cast_ahead`.
        """
        return memory(self.graph)

    def __repr__(self) -> str:
        options = [f"backend={self.backend!r}"]
        if self.cuda_graph:
            options.append("cuda_graph=True")
        if self.cast_ahead:
            options.append("cast_ahead=True")
        return f"Compiled({self.graph!r}, {', '.join(options)})"

    @ends_at_user
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        refuse_under_compile(self.lowered.graph.name)
        recording = self.lowered.recording
        call = BoundCall.of(recording.function, args, kwargs)
        refuse_inside(self.lowered.graph.name, call)
        refuse_anomaly_mode(self.lowered.graph.name)
        surroundings = Surroundings.of(recording.function)
        try:
            inputs = self.binding.match(call, surroundings)
            if inputs is not None:
                return self.run_guarded(call, inputs)
            # A step would look for another program here. A compiled program can only refuse the call.
            with self._telling_refusals():
                recording.check_fits(call)
            return self.run(call, surroundings)
        except BaseException as error:
            leave_if_cut_off(self._mesh, step_of(self.lowered.graph.name), error)
            raise

    def run(self, call: BoundCall, surroundings: Surroundings) -> tuple[Any, Any]:
        """Run the program on a call that it was compiled for, in these surroundings."""
        recording = self.lowered.recording
        # If this call captures a CUDA graph and then fails, the guard would be of another state than the graph.
        self.binding.guard = None
        with self._telling_refusals():
            inputs = self._inputs(call)
        # The caller has set these leaves to numbers. A call that a guard recognises has none: steps return tensors.
        numbers = [i for i, leaf in enumerate(inputs.state) if not isinstance(leaf, torch.Tensor)]
        with self._step(inputs, numbers) as (run, tensors):
            outputs = run(tensors)
        for copies in self._local_program.half_weights:
            copies.remove_from(outputs)
        # The storage of a leaf now holds its new value. Return the leaf that the caller passed, maybe a DTensor.
        for i, leaf in enumerate(inputs.state):
            if isinstance(leaf, torch.Tensor):
                outputs[i] = leaf
        state, output = pytree.tree_unflatten(outputs, recording.tree_of_results(self.graph.added))
        read_by_trace = [value.position for value in recording.known]
        # Inference tensors have no version counter, so a guard cannot watch them: each call compares their values.
        if any(inputs.tensors[place].is_inference() for place in read_by_trace):
            return state, output
        snapshots = {place: Snapshot.of(inputs, place) for place in read_by_trace}
        self.binding.guard = Guard(call._replace(state=state), surroundings, snapshots)
        return state, output

    def run_guarded(self, call: BoundCall, inputs: Inputs) -> tuple[Any, Any]:
        """Run the program on a call that its guard has recognised. Returns the call's own state, updated in place."""
        with self._step(inputs) as (run, tensors):
            outputs = run(tensors)
        end = len(outputs) - len(self.graph.hidden)
        output = pytree.tree_unflatten(outputs[self.graph.num_state : end], self._output_tree)
        return call.state, output

    @functools.cached_property
    def _output_tree(self) -> pytree.TreeSpec:
        """The tree of a step's output, without the state."""
        tree = self.lowered.recording.tree_of_results(self.lowered.graph.added)
        return tree.children()[1]

    @property
    def _names_of_results(self) -> list[str]:
        """The names of the leaves of the new state, and of the outputs."""
        recording = self.lowered.recording
        tree = recording.tree_of_results(self.lowered.graph.added)
        state, output = pytree.tree_unflatten([0] * tree.num_leaves, tree)
        paths = recording.signature.paths[: len(pytree.tree_leaves(state))]
        outputs = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(output)]
        return [*(f"the new {path}" for path in paths), *(f"the output{key}" for key in outputs)]

    @ends_at_user
    @without_autocast()
    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Run `steps` steps on these arguments, and record when each operation and message ran.

        The state is donated and advances. All ranks must call it. The times of operations and links in the result are
        the same on all ranks. The timeline shows this rank, in the lanes of `Lowered.timeline`. A step with
        `cuda_graph` is recorded without its graph. Of several micro-batches, the last is recorded. See
        `profile.Profile`.
        """
        recording = self.lowered.recording
        call = BoundCall.of(recording.function, args, kwargs)
        with self._telling_refusals():
            recording.check_fits(call)
            inputs = self._inputs(call)
        with self._step(inputs) as (runner, tensors):
            local_program = self._local_program
            local_program.writes.begin()
            if local_program.session is not None:
                local_program.session.drop_carried()
            planned = micro_batch_programs(self.lowered.graph).last
            return profile_step(runner, planned, self._mesh, tensors, steps)

    @ends_at_user
    @without_autocast()
    def check_finite(self, *args: Any, **kwargs: Any) -> NonFinite | None:
        """Find the first value that is not finite and reaches the new state, the loss or another output.

        It runs one step on these arguments, equation by equation, and leaves the state and the random generators as
        they are, so it needs the state from before the step that went wrong. All ranks must call it. It is slow, and
        keeps the old state beside the new one. With "inductor" it runs the operations one by one.

        Returns: the equation with its line, and the ranges of its operands, to print: the same on all ranks. None if
            all results are finite.

        Source: JAX's debug_nans, and PyTorch's detect_anomaly, which only sees backward.

        >>> import ztrans as zt
        >>> step = zt.Step.of(lambda state, x: (state - (x * state).log().sum(), x.sum()))
        >>> found = step.check_finite(torch.ones(2), torch.tensor([-1.0, 2.0]))
        >>> found.equation, found.results[0].nan
        ('log: f32[2] = log(mul)', 1)
        """
        recording = self.lowered.recording
        graph = self.lowered.graph
        call = BoundCall.of(recording.function, args, kwargs)
        with self._telling_refusals():
            recording.check_fits(call)
            inputs = self._inputs(call)
        session = self._session
        lock = self.binding.lock if session is None else session.lock
        with one_thread(lock, graph.name), self._current_device(inputs.tensors):
            if session is not None and self._mesh is not None:
                check_launched(session, graph.name)
                agree_on_call(self._mesh, f"check_finite of {graph.name}")
            local_program = self.binding.local_program
            if local_program is None:
                local_program = self._new_local_program(inputs.tensors, inputs.state)
                self.binding.local_program = local_program
            runner = local_program.runner
            tensors = inputs.tensors
            names = self._names_of_results
            for copies in local_program.half_weights:
                tensors = copies.inserted(tensors)
                copies.refresh(inputs)
                place = len(names) if copies.place is None else copies.place
                names[place:place] = ["a copy in half precision"] * len(copies.copies)
            # It writes nothing, so a failure leaves the state whole.
            with ending_together(graph.name, inputs.state, session, Writes()):
                if session is not None:
                    session.drop_carried()
                as_run = runner.executable.graph
                placed = runner.placed(tensors)
                return first_non_finite(as_run, runner, self._mesh, placed, names)

    def close(self) -> None:
        """Release the CUDA graph, the copies of `cast_ahead`, and the gathers that were started for the next step.

        All ranks must call it, because it waits for these gathers. Call it before the process group is destroyed, or to
        continue with another state. The next call then runs without a graph, and the one after it captures a new graph.

        Raises: LostRank if a rank ends before these gathers do.
        """
        # The gathers belong to the mesh, so another program of it may have started them.
        if self._mesh is not None:
            session = session_of(self._mesh)
            with session.leaving("close"):
                session.drop_carried()
        local_program = self.binding.local_program
        if local_program is None:
            return
        local_program.runner.close()
        for copies in local_program.half_weights:
            copies.forget()

    @ends_at_user
    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> tuple[Compiled, Tuning]:
        """Record `steps` steps, plan from the measured times, record `steps` more, and keep the faster plan.

        The state is donated and advances. All ranks must call it.

        Returns: The program with the faster plan; and both plans as they were measured, which print which one is kept,
            how much faster it is, and where they differ.
        """
        before = self.profile(*args, steps=steps, **kwargs)
        local_program = self._local_program
        replanned = self._of(local_program.lowered.replan(before))
        after = replanned.profile(*args, steps=steps, **kwargs)

        # All ranks decide by the same two numbers, so they keep the same plan.
        seconds = before.timeline.seconds, after.timeline.seconds
        by_rank = [seconds] if self._mesh is None else everywhere(seconds, self._mesh)
        first, second = map(max, zip(*by_rank))
        new_program = replanned._local_program
        tuning = Tuning(
            self.lowered.graph.name,
            MeasuredPlan(local_program.lowered.plan, before, first),
            MeasuredPlan(new_program.lowered.plan, after, second),
        )
        faster = new_program if tuning.kept is tuning.after else local_program
        notes = *faster.lowered.plan.notes, f"measured: {tuning.verdict}"
        plan = dataclasses.replace(faster.lowered.plan, notes=notes)
        lowered = dataclasses.replace(faster.lowered, plan=plan, cluster=replanned.lowered.cluster)
        binding = Binding(faster._replace(lowered=lowered))
        return dataclasses.replace(self, lowered=lowered, binding=binding), tuning

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh of devices that the program runs on; None if it runs in one process."""
        return self.lowered.mesh if isinstance(self.lowered.mesh, DeviceMesh) else None

    @property
    def _session(self) -> Session | None:
        """The session of the mesh; None without a mesh. A bound program holds it, which saves the lookup."""
        local_program = self.binding.local_program
        if local_program is not None:
            if local_program.session is not None:
                local_program.session.check_exists()
            return local_program.session
        return session_of(self._mesh) if self._mesh is not None else None

    @property
    def _local_program(self) -> LocalProgram:
        """The bound program.

        Raises: RuntimeError if it has not run yet.
        """
        if self.binding.local_program is None:
            raise RuntimeError(f"{self.lowered.graph.name} has not run yet.")
        return self.binding.local_program

    @contextlib.contextmanager
    def _step(
        self, inputs: Inputs, numbers: Sequence[int] = ()
    ) -> Iterator[tuple[Runner, list[torch.Tensor]]]:
        """Compare this step with the other ranks' steps, then yield the runner of the program, and its inputs.

        `numbers` are the positions of the leaves that the caller has set to numbers.
        """
        name = self.lowered.graph.name
        local = inputs.tensors
        state = inputs.state
        session = self._session
        lock = self.binding.lock if session is None else session.lock
        with one_thread(lock, name), self._current_device(local):
            if session is not None:
                check_launched(session, name)
            local_program = self.binding.local_program or self._new_local_program(local, state)
            runner = local_program.runner
            for copies in local_program.half_weights:
                local = copies.inserted(local)
            uses_carried = runner.uses_carried(inputs)
            if session is not None:
                self._agree(session, local_program, local, state, uses_carried, numbers)
            # Bind only after the comparison: if one rank could not make its program, all ranks make theirs again.
            self.binding.local_program = local_program

            if runner.replays:
                with self._telling_refusals():
                    runner.check_numbers(local)
            extra = self.lowered.recording.function.extra
            if extra is not None:
                extra.before_run()
            with running(name, state, session, local_program.writes):
                if session is not None and not uses_carried:
                    session.drop_carried()
                for copies in local_program.half_weights:
                    copies.refresh(inputs)
                yield runner, local

            # The replay of a CUDA graph and kernels of Inductor do not increment the versions of what they write.
            changed = [inputs.tensors[i] for i in local_program.changed_leaves]
            torch.autograd.graph.increment_version(changed)
            runner.step_ended(inputs)
            for copies in local_program.half_weights:
                copies.step_ended(inputs)

    @contextlib.contextmanager
    def _telling_refusals(self) -> Iterator[None]:
        """Tell the other ranks if this rank refuses a call, because they make the same call and would wait for it."""
        try:
            yield
        except Exception as error:
            mesh = self._mesh
            local_program = self.binding.local_program
            if mesh is not None and local_program is not None and local_program.runner.replays:
                # The others have launched a replay, which ranks do not compare, so only a note reaches them.
                text = f"refused a step of {self.lowered.graph.name} with {described(error)}"
                with contextlib.suppress(RuntimeError):  # the process groups have been destroyed
                    session_of(mesh).leave(text)
            elif mesh is not None:
                say_failure(mesh, self.lowered.graph.name, error)
            raise

    def _current_device(
        self, local: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """A context in which the GPU of these inputs is the current device. It does nothing on a CPU.

        PyTorch makes streams and events, and Triton launches kernels, on the current device.
        """
        local_program = self.binding.local_program
        device = local_program.device if local_program is not None else device_of(local)
        return torch.accelerator.device_index(device.index if device is not None else None)

    def _agree(
        self,
        session: Session,
        local_program: LocalProgram,
        local: Sequence[torch.Tensor],
        state: Sequence[Any],
        uses_carried: bool,
        numbers: Sequence[int],
    ) -> None:
        """Compare this step with the steps of the other ranks.

        Replays of a CUDA graph are compared only after `zt.stop_on`, to pass on requests to stop.

        On GPUs the step is launched before the answer is read. Steps with `cuda_graph` wait for the answer until the
        graph is captured, which takes long anyway.
        """
        mesh = self._mesh
        contract = local_program.contract
        is_replay = local_program.runner.replays
        is_compared = not session.is_alone and (stop.is_watched() or not is_replay)
        if is_compared and mesh is not None and contract is not None:
            launches = session.launches_first and (is_replay or not self.cuda_graph)
            agree(
                session,
                step_of(self.lowered.graph.name),
                contract.terms(local, RECORDS.of_state(state).steps, uses_carried, numbers),
                functools.partial(contract.explain, mesh),
                launches,
            )
        # From here on, an error of any kind ends the step on all ranks.
        session.in_step = threading.get_ident()

    @property
    def is_bound(self) -> bool:
        """Whether the program has run, so that the ranks have agreed on its order."""
        return self.binding.local_program is not None

    def for_other_sizes(self, traced: Traced) -> Compiled:
        """The program of the same step for other batch sizes, in the order of this program.

        The ranks have agreed on that order, so a single rank may have a batch of such sizes. A program with other
        collectives cannot follow this order, and a larger one may not fit in memory with it. Such a program gets a plan
        of its own, with the same options that change bits, and all ranks must agree on that plan.
        """
        local_program = self.binding.local_program
        leader = local_program.lowered if local_program is not None else self.lowered
        traced = traced.with_bits_of(leader.traced)
        agreed = self.is_bound
        try:
            lowered = traced.lower(cluster=leader.cluster, plan=leader.plan, follow=True)
        except (PlanError, DoesNotFit, HostIsFull):
            lowered = traced.lower(cluster=leader.cluster)
            agreed = False
        return dataclasses.replace(self._of(lowered), agreed=agreed)

    def _of(self, lowered: Lowered) -> Compiled:
        """Another program, compiled as this one is."""
        return lowered.compile(
            backend=self.backend, cuda_graph=self.cuda_graph, cast_ahead=self.cast_ahead
        )

    def _check_device(self, inputs: Inputs) -> None:
        """Raises: TypeError if this program is bound to another device than that of the inputs."""
        local_program = self.binding.local_program
        if local_program is None:
            return
        device = device_of(inputs.tensors)
        if device != local_program.device:
            raise TypeError(
                f"{self.lowered.graph.name}: the program runs on {local_program.device or 'the CPU'}, and these "
                f"arguments are on {device or 'the CPU'}.\n"
                f"Compile it for them: lowered.compile(). A step makes a program for each device."
            )

    def _inputs(self, call: BoundCall) -> Inputs:
        """The inputs of a call whose signature fits.

        Raises: TypeError if the state is not laid out for the program, or if the step may not overwrite the state.
            RuntimeError if it is half updated. ValueError if nobody has written to a leaf, or if a CUDA graph has
            captured another state.
        """
        recording = self.lowered.recording
        graph = self.lowered.graph
        inputs = recording.local_inputs(call)
        self._check_device(inputs)
        # On a single rank every layout is the whole leaf.
        if self._mesh is not None and self._mesh.size() > 1:
            leaves = zip(graph.state, recording.axes)
            shardings = [LeafSharding(axes, v.layout) for v, axes in leaves]
            paths = recording.signature.paths
            check_laid_out(graph.name, self._mesh, paths, inputs.state, shardings, lowered=True)
        check_donation(graph, inputs.tensors)
        check_memory(graph, inputs.tensors)
        check_whole(inputs.state, graph.name)
        check_written(graph.name, recording.signature.paths, inputs.state)
        if self.binding.local_program is not None:
            self.binding.local_program.runner.check_state(inputs.tensors[: graph.num_state])
        return inputs

    @without_autocast()
    def _new_local_program(
        self, local: Sequence[torch.Tensor], state: Sequence[Any]
    ) -> LocalProgram:
        """Agree with the other ranks on a program, and make its executable."""
        lowered = self.lowered if self.agreed else _agreed(self.lowered, self.changes)
        writes = Writes()
        mesh = self._mesh
        session = self._session
        with ending_together(lowered.graph.name, state, session, writes):
            if mesh is not None and session is not None:
                # A failed step closes the channels, and the modules that start messages look them up.
                session.open()
                if not self.agreed and mesh.size() > 1:
                    # This needs all ranks. A program that one rank later binds alone sends the same messages.
                    reserve(mesh, list(micro_batch_programs(lowered.graph).in_order))
                    _check_room(mesh, lowered.graph)
            with stage(lowered.graph.name, f"compile ({self.backend})"):
                runner, half_weights = make_runner(
                    lowered.graph,
                    mesh,
                    local,
                    BACKENDS[self.backend],
                    self.cuda_graph,
                    self.cast_ahead,
                    writes,
                    session.watcher if session is not None else None,
                )
            graph = runner.executable.graph
            contract = None
            if mesh is not None:
                axes = lowered.recording.axes
                contract = Contract(graph, update_hash(lowered.unordered), mesh, axes)
            return LocalProgram(
                dataclasses.replace(lowered, graph=graph),
                runner,
                writes,
                session,
                contract,
                half_weights,
                changed_leaves=changed_leaves(self.lowered.graph),
                device=device_of(local),
            )


def _check_room(mesh: DeviceMesh, graph: Graph) -> None:
    """Check that a program fits in the memory that NCCL leaves. All ranks call it after they have connected.

    Raises: DoesNotFit on all ranks if the program does not fit on one.
    """
    if mesh.device_type != "cuda":
        return
    needs = memory(graph)
    usable = min(everywhere(usable_bytes(), mesh))
    if needs.peak > usable:
        raise DoesNotFit(
            f"{graph.name}: the step needs {format_bytes(needs.peak)}, and a GPU of the mesh has "
            f"{format_bytes(usable)} for it, without CUDA's context and the communicators of NCCL.",
            "Lower the limit of the step by the difference: zt.Device(reserve=...) or prefetch(memory=...).",
            usable,
            needs,
        )


def _agreed(lowered: Lowered, changes: Sequence[str]) -> Lowered:
    """The program in the order of rank 0's plan. This rank's own plan differs if it measured other times.

    Raises: RuntimeError on every rank if the ranks have lowered different programs, or if that plan does not fit the
        program of a rank.
    """
    mesh = lowered.mesh
    name = lowered.graph.name
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1:
        return lowered
    plan = lowered.plan
    contract = Contract(lowered.unordered, update_hash(lowered.unordered))
    with stage(name, "wait for the other ranks"):
        first = agree_on_program(name, mesh, contract, plan, changes)

    # A plan that does not fit on one rank must fail on all of them, so each rank tells the others whether it fits.
    problem = ""
    try:
        if plan.digest != first.digest:
            lowered = lowered.with_plan(first, follow=True)
    except ValueError as error:
        # A PlanError or HostIsFull.
        problem = str(error)
    except Exception as error:
        say_failure(mesh, name, error)
        raise
    agree_on_plan(name, mesh, problem)
    return lowered
