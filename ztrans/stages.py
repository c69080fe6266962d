"""`Traced` and `Lowered`, the stages of a step before it is compiled, as in `jax.stages`.

`Traced` is the program as the user wrote it. Lowering applies the transforms, then plans the order of the program and
what backward recomputes or finds on the host. The result, `Lowered`, is the program of one rank. It can be analysed,
simulated on a cluster, run for all ranks in this process, and compiled. Printing a stage prints its program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from .all_ranks import step_of_all_ranks
from .backends import BACKENDS
from .calling.global_state import no_collection
from .compiled import Compiled
from .fitting import (
    Result,
    Trial,
    closest_error,
    fastest_variant,
    fastest_within,
    ways_to_fit,
    within_limit,
)
from .ir.ambient import without_autocast
from .ir.graph import Graph
from .ir.layout import AbstractMesh
from .ir.printer import Printed, counted, format_bytes, format_seconds
from .ir.user_collectives import by_axis
from .ir.verifier import check
from .ir.wire_traffic import wire_traffic
from .passes import History, passes, passes_after_plan, through
from .planning.cluster import Cluster, Device, default_cluster, default_device
from .planning.cost import Cost, Memory, cost, memory
from .planning.limit import DoesNotFit, check_peak, with_device_limit
from .planning.lower_bound import lower_bound
from .planning.make_plan import make_plan, with_memory_notes
from .planning.place_copies import HostIsFull, check_host_memory
from .planning.plan import Plan
from .planning.realise import apply_plan, follow_plan
from .planning.recompute.plan_recomputation import (
    has_choice,
    plan_recomputation,
    with_recomputation,
)
from .planning.simulate import simulate
from .planning.skeleton import skeleton
from .planning.summary import Summary, summarize
from .profiling.profile import Profile
from .report.progress import stage
from .report.timeline import Timeline
from .report.tracebacks import ends_at_user
from .runtime.codegen import to_fx
from .runtime.cuda.graph_capture import check_device, check_on_device
from .runtime.mesh import check_runs, device_memory
from .tracing.recording import Recording
from .transforms.base import (
    Transform,
    all_axes,
    byte_count,
    mesh_of,
    micro_batches_of,
    program_shardings,
    rewritten,
    stage_of,
    with_limit,
)

__all__ = ["Compiled", "Cost", "Lowered", "Memory", "Traced"]


@dataclass(frozen=True, repr=False)
class Traced(Printed):
    """A step's program as written, before any transform, as `jax.stages.Traced`."""

    recording: Recording
    transforms: tuple[Transform, ...]
    # Traces the step again for another number of micro-batches. None in `Lowered.traced`.
    trace_again: Callable[[int], Recording] | None = field(default=None, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        return self.recording.graph

    @property
    def fx(self) -> fx.GraphModule:
        """The FX graph from make_fx, from the flat inputs to the tensors among the outputs.

        FX's own tools print it: `print(traced.fx.code)`, `traced.fx.print_readable()`. It can be called, unless a fused
        optimizer of a lifted loop takes hyperparameters by value: these are inputs of the program.

        Raises: ValueError for a compiled program, which keeps no FX graph.
        """
        if self.recording.fx is None:
            raise ValueError(
                f"{self.graph.name}: a compiled program keeps no FX graph.\n"
                f"Trace it again: step.trace(state, *batch).fx."
            )
        return self.recording.fx

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches. The program computes one of them."""
        return micro_batches_of(self.transforms)

    @property
    def variants(self) -> list[Traced]:
        """This step with each combination of the options that its transforms leave open."""
        choices = [transform.variants for transform in self.transforms]
        return [
            dataclasses.replace(self, transforms=transforms)
            for transforms in itertools.product(*choices)
        ]

    def with_bits_of(self, other: Traced) -> Traced:
        """This step with the open options that change bits as they are in `other`, the same step for another batch."""
        transforms = []
        for mine, theirs in zip(self.transforms, other.transforms, strict=True):
            transforms.append(theirs if mine.variants_change_bits else mine)
        return dataclasses.replace(self, transforms=tuple(transforms))

    def with_transforms(self, transforms: tuple[Transform, ...]) -> Traced:
        """This step with other transforms, traced again if these need another number of micro-batches.

        Raises: ValueError if the batch cannot be cut into that number of parts.
        """
        recording = self.recording
        micro = micro_batches_of(transforms)
        if micro != self.micro_batches:
            if self.trace_again is None:
                raise ValueError(f"{self.graph.name}: there is no call to trace again.")
            recording = self.trace_again(micro)
        return dataclasses.replace(self, recording=recording, transforms=transforms)

    @ends_at_user
    def lower(
        self, *, cluster: Cluster | None = None, plan: Plan | None = None, follow: bool = False
    ) -> Lowered:
        """Apply all transforms, and plan buckets and order. Returns the program of one rank.

        Args:
            cluster: the devices and links to plan for; by default H100s on InfiniBand, with the memory of the GPUs
                that the step runs on, or CPUs on gigabit Ethernet. `Step.tune` plans from measured times.
            plan: an existing plan to use instead of a new one.
            follow: use `plan` even if the program then needs more memory than its limit, because other ranks use it.

        Raises:
            ValueError: the plan is for another program, or the program needs more memory than its limit.
            ProgramError: a transform returned a program that is not well formed.
        """
        if plan is not None:
            with stage(self.graph.name, "plan"):
                return self._variant_of(plan, cluster).with_plan(plan, follow=follow)
        try:
            return self._planned_variant(cluster)
        except DoesNotFit as error:
            try_with = functools.partial(self._trial, cluster)
            ways = ways_to_fit(self.graph, self.transforms, error, try_with)
            raise error.with_ways(ways) from None

    @ends_at_user
    def frontier(
        self, limits: Iterable[int | float], *, cluster: Cluster | None = None
    ) -> list[Lowered | None]:
        """The fastest program of one rank within each of several memory limits.

        The step is planned for each limit. For each limit, the result is the fastest of all these programs that fits
        it, so a larger limit is never slower. Two calls of `lower` do not promise that, because a search does not
        always find the best order. A program that was planned for another limit says so in its notes.

        Args:
            limits: bytes that may be live on a rank; fractions are cut off. Each limit replaces the option `memory` of
                `prefetch`, and of `remat` and `offload` where it is set.
            cluster: as for `lower`.

        Returns: a program for each limit, or None where the step does not fit.

        Raises: ValueError if a limit is not a number of bytes, no transform has a limit, or the step fits no limit.
        """
        limits_in_bytes = [byte_count("frontier: limits", limit // 1, 1) for limit in limits]
        results: dict[int, Result[Lowered]] = {}
        for limit in dict.fromkeys(limits_in_bytes):
            limited = within_limit(self.transforms, limit, self.graph.name)
            results[limit] = self._result(cluster, limited)
        trials = {limit: trial for limit, trial in results.items() if isinstance(trial, Trial)}
        if results and not trials:
            raise closest_error([results[limit] for limit in sorted(results, reverse=True)])

        programs: list[Lowered | None] = []
        for limit in limits_in_bytes:
            planned_for = fastest_within(trials, limit)
            if planned_for is None:
                programs.append(None)
            elif planned_for == limit:
                programs.append(trials[limit].lowered)
            else:
                programs.append(trials[planned_for].lowered._with_limit(limit, planned_for))
        return programs

    def _planned_variant(self, cluster: Cluster | None) -> Lowered:
        """The program of one rank in a new order, of the first of the fastest variants that fit.

        The notes of the plan name the chosen variant, and the time and memory of each.

        Raises: DoesNotFit if no variant fits: the error of the variant that needs the least memory. HostIsFull if the
            host has too little memory for any of them.
        """
        if len(self.variants) == 1:
            return self.planned(cluster)
        results = []
        for variant in self._different_variants(cluster):
            chosen_options = [repr(t) for t in variant.transforms if t not in self.transforms]
            result = self._result(cluster, variant.transforms)
            results.append((", ".join(chosen_options), result))
        lowered, notes = fastest_variant(results)
        return lowered.with_notes(notes)

    def _different_variants(self, cluster: Cluster | None) -> list[Traced]:
        """The first of each group of variants that are the same program: tiles may find nothing to cut."""
        different: dict[Hashable, Traced] = {}
        for variant in self.variants:
            late = tuple(t for t in variant.transforms if t.phase >= Transform.phase)
            graph, _ = variant._before_sharding(cluster)
            different.setdefault((str(graph.replace(transforms=())), late), variant)
        return list(different.values())

    def _result(
        self, cluster: Cluster | None, transforms: tuple[Transform, ...]
    ) -> Result[Lowered]:
        """The trial of this step with other transforms, or the error if it needs too much memory."""
        try:
            return self._trial(cluster, transforms)
        except (DoesNotFit, HostIsFull) as error:
            return error

    def _trial(self, cluster: Cluster | None, transforms: tuple[Transform, ...]) -> Trial[Lowered]:
        """This step with other transforms, in its planned order, with its simulated time and its peak.

        Raises: ValueError if the step cannot have them. DoesNotFit if it then needs more memory than its limit.
        """
        try:
            variant = self.with_transforms(transforms)
        except Exception as error:
            # The step itself may fail on smaller batches with any error.
            raise ValueError(f"{self.graph.name}: it cannot be traced again.") from error
        lowered = variant._planned_variant(cluster)
        seconds = simulate(lowered.graph, lowered.cluster).seconds
        return Trial(lowered, seconds, lowered.memory_analysis().peak)

    def _variant_of(self, plan: Plan, cluster: Cluster | None) -> Lowered:
        """The variant that a plan is for, before it has an order; the first variant if the plan is for none."""
        variants = [variant.without_order(cluster, plan) for variant in self.variants]
        # Fingerprints take time, so a single variant is not compared.
        if len(variants) > 1:
            for variant in variants:
                if skeleton(variant.unordered).fingerprint == plan.program:
                    return variant
        return variants[0]

    @no_collection()
    @without_autocast()
    def planned(self, cluster: Cluster | None) -> Lowered:
        """The program of one rank in a new order. The transforms must leave no option open.

        Raises: DoesNotFit if it needs more memory than its limit.
        """
        graph, history = self._before_sharding(cluster)

        @functools.cache
        def one_rank(recomputed: tuple[str, ...], on_host: tuple[str, ...]) -> Lowered:
            choice = Plan("", recomputed=recomputed, on_host=on_host)
            return self._one_rank(graph, history, cluster, choice)

        lowered = one_rank((), ())
        with stage(self.graph.name, "plan"):
            if not has_choice(lowered.unordered.hints):
                return lowered._ordered(*make_plan(lowered.unordered, lowered.cluster))
            chosen = plan_recomputation(
                graph,
                lambda recomputed, on_host: one_rank(recomputed, on_host).unordered,
                lowered.cluster,
            )
            lowered = one_rank(chosen.plan.recomputed, chosen.plan.on_host)
            return lowered._ordered(chosen.plan, chosen.ordered)

    @no_collection()
    @without_autocast()
    def without_order(self, cluster: Cluster | None, plan: Plan | None = None) -> Lowered:
        """The program of one rank with the hints of its transforms, before a plan has ordered it.

        Args:
            cluster: as for `lower`.
            plan: the plan whose recomputation and values on the host the program gets.
        """
        graph, history = self._before_sharding(cluster)
        return self._one_rank(graph, history, cluster, Plan("") if plan is None else plan)

    def _before_sharding(self, cluster: Cluster | None) -> tuple[Graph, History]:
        """The program after the transforms that rewrite the traced program, and the stages up to there."""
        if cluster is not None and not isinstance(cluster, Cluster):
            raise TypeError(
                f"lower: {cluster=} is not a Cluster. Name its links too: zt.cluster('h100', dp='infiniband')."
            )
        device = cluster.device if cluster is not None else self._default_device()
        mesh = mesh_of(self.transforms)
        graph = self.graph.replace(zero_stage=stage_of(self.transforms))
        # The collectives that the step itself calls name process groups. Programs name axes of the mesh.
        if isinstance(mesh, DeviceMesh):
            graph = by_axis(graph, mesh)
        graph = with_device_limit(with_limit(graph, self.transforms), device)
        history: History = (("trace", graph),)
        if self.recording.fx is not None:
            history = (("make_fx", self.recording.fx), *history)
        early = [t for t in self.transforms if t.phase < Transform.phase]
        return self._transformed(graph, history, early)

    def _transformed(
        self, graph: Graph, history: History, transforms: Sequence[Transform]
    ) -> tuple[Graph, History]:
        """The program after these transforms, phase by phase."""
        # Micro-batches come last in their phase.
        for transform in sorted(transforms, key=lambda t: (t.phase, t.micro_batches)):
            with stage(graph.name, transform.name, logging.DEBUG):
                graph = rewritten(graph, transform)
            history = (*history, (transform.name, graph))
        return graph, history

    def _one_rank(
        self, graph: Graph, history: History, cluster: Cluster | None, plan: Plan
    ) -> Lowered:
        """The program of one rank, without an order: `graph` after the transforms that shard and schedule.

        `graph` is the program after `_before_sharding`. The recomputation of `plan` and its moves to the host are
        applied.
        """
        if plan.recomputed:
            graph = with_recomputation(graph, plan)
            history = (*history, ("recompute", graph))
        late = [t for t in self.transforms if t.phase >= Transform.phase]
        graph, history = self._transformed(graph, history, late)
        graph, history = through(graph, history, passes(plan))

        # Each leaf of the state has axes of its own. All other inputs are distributed over all axes.
        shardings = program_shardings(graph, self.transforms).values()
        axes = [sharding.axes for sharding in shardings]
        every_axis = all_axes(self.transforms, shardings)
        axes += [every_axis for _ in graph.arguments]

        if cluster is None:
            cluster = default_cluster(self._default_device(), graph.axes)
        return Lowered(
            graph=graph,
            history=(*history, ("lower", graph)),
            recording=dataclasses.replace(self.recording, axes=tuple(axes)),
            mesh=mesh_of(self.transforms),
            plan=Plan("", recomputed=plan.recomputed, on_host=plan.on_host),
            cluster=cluster,
            unordered=graph,
            # `trace_again` holds the arguments of a call, which a program must not keep alive.
            traced=dataclasses.replace(self, trace_again=None),
        )

    def _default_device(self) -> Device:
        """The device to plan for if no cluster is passed, with the memory of the device that the step runs on.

        Without devices it is an H100. A step on a CPU without a mesh is also planned for an H100, whose memory then
        sets no limit.
        """
        mesh = mesh_of(self.transforms)
        if mesh is None:
            device_type = self.recording.device_type
            if device_type == "cpu":
                return default_device("cuda", math.inf)
        elif isinstance(mesh, DeviceMesh):
            device_type = mesh.device_type
        else:
            device_type = "meta"
        if device_type == "meta":
            return default_device("cuda")
        return default_device(device_type, device_memory(device_type))

    def __repr__(self) -> str:
        return f"Traced({self.graph!r}, {counted(len(self.transforms), 'transform')} to apply)"


@dataclass(frozen=True, repr=False)
class Lowered(Printed):
    """The program of one rank, ready to compile, as `jax.stages.Lowered`.

    `history` has every stage of the program by name: the FX graph of make_fx, the program as written, the program after
    each transform and after each later pass that changes it, and the program that runs. In a `Compiled` it has only the
    last one. `unordered` is the program with the hints of the transforms, before it has an order.
    """

    graph: Graph
    history: History
    recording: Recording
    mesh: DeviceMesh | AbstractMesh | None
    plan: Plan
    cluster: Cluster
    unordered: Graph = dataclasses.field(repr=False)
    traced: Traced = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        return f"Lowered({self.graph!r}, {self.plan!r})"

    def cost_analysis(self) -> Cost:
        """FLOPs, bytes of memory traffic, and wire bytes by axis and role, on one rank."""
        return cost(self.graph)

    def memory_analysis(self) -> Memory:
        """The live bytes at each equation, their peak, and the values that are live at the peak."""
        return memory(self.graph)

    def summary(self, measured: Profile | None = None) -> Summary:
        """The step on one screen: its time and what binds it, tokens a second, MFU, memory, bytes by axis.

        With a profile of this step, the measured figures stand beside the simulated ones.

        >>> import torch, ztrans as zt
        >>> step = zt.shard_params(zt.AbstractMesh(dp=8))(lambda state, x: (state, (x @ state).mean()))
        >>> lowered = step.lower(torch.ones(16, 16), torch.ones(4, 16), cluster=zt.cluster("h100", dp="infiniband"))
        >>> print(str(lowered.summary()).splitlines()[0])
        step on 8 ranks, H100
        """
        axes = [axis for t in self.traced.transforms for axis in t.axes]
        timelines = [self.timeline()]
        if measured is not None:
            timelines.append(measured.timeline)
        return summarize(
            self.traced.graph,
            self.traced.micro_batches,
            self.graph,
            self.cluster,
            axes,
            tuple(timelines),
            self.memory_analysis(),
            self.cost_analysis(),
        )

    def timeline(self, cluster: Cluster | None = None) -> Timeline:
        """Simulate the step on a cluster, by default the one it was planned for. Print the result, or save a picture.

        The timeline includes a lower bound: no order of the same collectives, within the same memory, is faster.
        """
        cluster = cluster or self.cluster
        timeline = simulate(self.graph, cluster)
        options = self.plan.lever_options
        bound = lower_bound(self.graph, self.unordered, options, cluster, timeline.peak)
        return dataclasses.replace(timeline, bound=bound)

    @ends_at_user
    def replan(self, profile: Profile | Cluster) -> Lowered:
        """Plan again, from measured times. `plan.notes` say how much faster the step should become.

        Each rank may pass its own profile. When the program first runs, all ranks use rank 0's plan.

        Source: DeepSpeed DeepCompile, 2025, also plans again after some recorded steps.
        """
        cluster = profile if isinstance(profile, Cluster) else profile.cluster(self.cluster)
        replanned = self.traced.planned(cluster)
        before = simulate(self.graph, cluster).seconds
        after = simulate(replanned.graph, cluster).seconds
        change = f"where the plan before has {format_seconds(before)} ({after / before - 1:+.1%})"
        note = f"expected {format_seconds(after)} a step, {change}"
        plan = dataclasses.replace(replanned.plan, notes=(*replanned.plan.notes, note))
        return dataclasses.replace(replanned, plan=plan)

    @no_collection()
    @without_autocast()
    def with_plan(self, plan: Plan, *, follow: bool = False) -> Lowered:
        """This program in the order of a plan; with `follow`, even if it then needs more memory than its limit.

        Raises: PlanError if the plan is not for this program. DoesNotFit or HostIsFull.
        """
        lowered = self
        if (plan.recomputed, plan.on_host) != (self.plan.recomputed, self.plan.on_host):
            lowered = self.traced.without_order(self.cluster, plan)
        order = follow_plan if follow else apply_plan
        return lowered._ordered(plan, order(lowered.unordered, plan), follow)

    def _with_limit(self, limit: int, planned_for: int) -> Lowered:
        """The program of this step within `limit`, in this order, which was planned for another limit."""
        transforms = within_limit(self.traced.transforms, limit, self.graph.name)
        traced = self.traced.with_transforms(transforms)
        limited = traced.without_order(self.cluster, self.plan)
        fingerprint = skeleton(limited.unordered).fingerprint
        note = f"found within {format_bytes(planned_for)}"
        plan = dataclasses.replace(self.plan, program=fingerprint, notes=(note, *self.plan.notes))
        return limited.with_plan(plan)

    def without_stages(self) -> Lowered:
        """This program as a compiled one keeps it: without the FX graph, the history, and the results of analyses.

        It can still be planned again, from the program as written.
        """
        recording = dataclasses.replace(self.recording, fx=None)
        return dataclasses.replace(
            self,
            history=(("lower", self.graph),),
            recording=recording,
            unordered=dataclasses.replace(self.unordered),
            traced=dataclasses.replace(
                self.traced, recording=dataclasses.replace(self.traced.recording, fx=None)
            ),
        )

    def with_notes(self, notes: Sequence[str]) -> Lowered:
        """This program with these notes in front of its plan's notes."""
        plan = dataclasses.replace(self.plan, notes=(*notes, *self.plan.notes))
        return dataclasses.replace(self, plan=plan)

    def to_fx(self) -> fx.GraphModule:
        """The program of one rank as an FX module from flat inputs to flat outputs, for tools that read FX."""
        return to_fx(self.graph)

    def _ordered(self, plan: Plan, graph: Graph, follow: bool = False) -> Lowered:
        """This program in the order of `graph`, with `plan` and its notes on memory and traffic.

        Raises: DoesNotFit, unless it must `follow` the plan, if it exceeds its limit with the copies and carried
            gathers that no plan counts. HostIsFull.
        """
        # The last stage is the program without an order. The ordered one replaces it.
        history: History = (*self.history[:-1], ("plan", graph))
        graph, history = through(graph, history, passes_after_plan(plan, self.cluster))
        check_host_memory(check(graph), self.cluster)
        if not follow:
            check_peak(graph, self.cluster.device)
        history = (*history[:-1], ("lower", graph))
        plan = with_memory_notes(plan, memory(graph).peak, graph.hints, self.cluster.device)
        plan = dataclasses.replace(plan, traffic=tuple(wire_traffic(graph).items()))
        return dataclasses.replace(self, graph=graph, plan=plan, history=history)

    @ends_at_user
    def lockstep(
        self, state: Any, batches: Sequence[tuple | Mapping[str, Any]]
    ) -> tuple[Any, list[Any]]:
        """Run one step of all ranks in this process, equation by equation.

        It needs no process group, so it also runs under an AbstractMesh. Nothing is updated in place.

        Args:
            state: the full state. A leaf of replicas that train apart may begin with a dim of these; otherwise all are
                equal. A leaf that `zt.store` keeps in bf16 may be wide too, and is rounded as by `step.shard`.
            batches: the batch arguments of each rank, as a tuple, or as a dict by name.

        Returns: The full new state, where such leaves have that dim, and the output of each rank.

        Raises: TypeError if the step was traced for other arguments, or for other values that it reads elsewhere. The
            error names the rank and the argument. ValueError if the number of batches is not the number of ranks, or
            if the step itself divides an argument, as `parallelize_module` does.
        """
        return step_of_all_ranks(self.graph, self.recording, state, batches)

    @ends_at_user
    def compile(
        self,
        *,
        backend: str = "eager",
        cuda_graph: bool = False,
        cast_ahead: bool = False,
    ) -> Compiled:
        """Bind the program to this rank's device, so that it can be called.

        Args:
            backend: "eager" runs the program operation by operation. "inductor" compiles the operations between
                collectives and matrix products, when the program first runs.
            cuda_graph: capture the whole step as a CUDA graph in the second call; that call and all later ones replay
                it. See `Compiled.close`. A call returns before a pinned batch has been copied to the GPU: write to the
                batch only after `torch.cuda.synchronize()`.
            cast_ahead: let updates also write the half-precision copies of parameters that the next step reads, for
                instance under autocast. Fused Adam and AdamW on a GPU do this, and elementwise updates with "inductor".
                It takes 2 more bytes per element of these parameters. A parameter that has changed since, by PyTorch's
                version counter, is cast again. The counter does not see writes through `.data`, by a collective of
                torch.distributed, or by a kernel of your own: call `Compiled.close` after these.

        Raises: ValueError if the backend is unknown, "inductor" has no compiler, or a CUDA graph has no GPU.
        """
        if backend not in BACKENDS:
            there_are = " and ".join(map(repr, BACKENDS))
            raise ValueError(f"compile: unknown backend {backend!r}; there are {there_are}.")
        BACKENDS[backend].check()
        if self.mesh is not None:
            check_runs(self.mesh)
        if cuda_graph and self.graph.carried:
            raise ValueError(
                f"compile: {self.graph.name} begins with gathers that the step before has started, as "
                f"prefetch(across_steps=True) says, and a CUDA graph contains all messages of its step.\n"
                f"Compile without cuda_graph, or leave across_steps out."
            )
        if cuda_graph:
            check_on_device(self.graph)
            check_device(getattr(self.mesh, "device_type", None))
        return Compiled(self.without_stages(), backend, cuda_graph, cast_ahead)
