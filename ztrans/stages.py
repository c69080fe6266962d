"""Traced, Lowered, Compiled: the stages of a step, as `jax.stages`.

`Traced` is the program as written; `Lowered` the program of one rank, transforms applied and order
fixed; `Compiled` that program bound to this rank's devices. Each prints as its program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from . import inductor
from . import plan as plans
from .bound import bound
from .capture import Capture, check_device, placed, with_rates
from .cluster import Cluster, assumed
from .collectives import erase_marks, erase_trivial
from .communicate import all_gather
from .cost import Cost, Memory, cost, memory
from .evaluate import join, lockstep, scatter
from .execute import executable
from .graph import Graph, Var, dce
from .groups import by_axis
from .layout import AbstractMesh
from .mesh import check_runs
from .plan import Plan
from .pose import pose
from .profile import Profile, profile
from .schedule import skeleton
from .simulate import simulate
from .timeline import Timeline
from .trace import Program, no_collection
from .transforms.base import Transform


@dataclass(frozen=True)
class Traced:
    """A step's program as written, before any transform, as `jax.stages.Traced`."""

    program: Program
    transforms: tuple[Transform, ...]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @no_collection()
    def lower(self, *, cluster: Cluster | None = None, plan: Plan | None = None) -> Lowered:
        """The per-rank program: transforms applied, collectives placed, buckets and order planned.

        The plan is made for `cluster`: that of `shard_params`, or else an assumed one (H100s on
        InfiniBand; CPUs on gigabit Ethernet). A `plan` that was made before is applied as it is.

        Raises: ValueError when a plan is for another program, or a memory budget cannot be met.
        """
        mesh = next((t.mesh for t in self.transforms if hasattr(t, "mesh")), None)
        graph = by_axis(self.graph, mesh) if isinstance(mesh, DeviceMesh) else self.graph
        history = [("trace", graph)]
        for transform in sorted(self.transforms, key=lambda t: not t.as_written):
            graph = transform.rewrite(graph)
            graph = graph.replace(history=(*graph.history, repr(transform)))
            history.append((transform.name, graph))
        hinted = dce(erase_trivial(erase_marks(graph)))
        own = next((t.cluster for t in self.transforms if getattr(t, "cluster", None) is not None), None)
        cluster = cluster or own or assumed(getattr(mesh, "device_type", "cuda"), hinted.axes)
        if plan is None:
            plan, graph = plans.make(hinted, cluster)
        else:
            graph = plans.apply(hinted, plan)
        history.append(("lower", graph))
        return Lowered(graph, tuple(history), self.program, mesh, plan, cluster, hinted)

    def __str__(self) -> str:
        return str(self.graph)


@dataclass(frozen=True)
class Lowered:
    """The program of one rank, ready to compile, as `jax.stages.Lowered`."""

    graph: Graph
    history: tuple[tuple[str, Graph], ...]
    program: Program
    mesh: DeviceMesh | AbstractMesh | None
    plan: Plan
    cluster: Cluster
    hinted: Graph = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return str(self.graph)

    def __repr__(self) -> str:
        return f"Lowered({self.graph!r})"

    def cost_analysis(self) -> Cost:
        """FLOPs, bytes of memory traffic, and wire bytes by axis and role, on one rank."""
        return cost(self.graph)

    def memory_analysis(self) -> Memory:
        """Live bytes over the program, its peak, and the values and lines that hold it."""
        return memory(self.graph)

    def timeline(self, cluster: Cluster | None = None) -> Timeline:
        """The step played on a cluster (default: that of its plan), to print or to save as a picture.

        It carries the bound that no order of the same collectives can beat within the same memory.
        """
        cluster = cluster or self.cluster
        played, s = simulate(self.graph, cluster), skeleton(self.hinted)
        if not s.gathers and not s.reductions:
            return played
        least = bound(pose(s, cluster, played.peak))
        return dataclasses.replace(played, bound=(least.seconds, least.binds))

    def replan(self, profile: Profile | Cluster) -> Lowered:
        """Plan again from what was measured; `plan.notes` say what that should gain.

        Every rank may bring its own profile: when the program first runs, rank 0's plan counts. The
        first steps are recorded and the rest replayed better, as in DeepSpeed's DeepCompile.
        """
        cluster = profile if isinstance(profile, Cluster) else profile.cluster(self.cluster)
        plan, graph = plans.make(self.hinted, cluster)
        before, after = (simulate(g, cluster).seconds for g in (self.graph, graph))
        note = f"expected {after:.4g} s a step, where the plan before has {before:.4g} s ({after / before - 1:+.1%})"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
        return dataclasses.replace(self.planned(plan), cluster=cluster)

    def planned(self, plan: Plan) -> Lowered:
        """This program in the order of another plan."""
        graph = plans.apply(self.hinted, plan)
        history = (*self.history[:-1], ("lower", graph))
        return dataclasses.replace(self, graph=graph, plan=plan, history=history)

    def lockstep(self, state: Any, batches: Sequence[tuple]) -> tuple[Any, list[Any]]:
        """Run one step of all ranks in this process, equation by equation, from the full state.

        `batches` holds each rank's batch arguments. Returns the full new state and each rank's output;
        nothing is updated in place. No process group is needed, so it runs under an AbstractMesh.
        """
        graph, program = self.graph, self.program
        static = {i for i, _ in program.static}
        flat = [[_local(x) for i, x in enumerate(pytree.tree_leaves((state, *b))) if i not in static] for b in batches]
        n = graph.num_state
        whole = [x.contiguous() for x in flat[0][:n]]
        ranks = [part + leaves[n:] for part, leaves in zip(scatter(graph, whole), flat, strict=True)]
        outs = lockstep(graph, ranks)
        full = join(graph, outs)
        results = [pytree.tree_unflatten([*full, *out[n:]], program.out_tree) for out in outs]
        return results[0][0], [output for _, output in results]

    def compile(self, *, backend: str = "eager", cuda_graph: bool = False) -> Compiled:
        """A callable program on this rank's devices.

        Backend "eager" runs it operation by operation; with "inductor" what lies between collectives and
        matrix products is compiled, when it first runs. With `cuda_graph` the second call captures the whole
        step, and it and those that follow replay it: see `capture`, and `Compiled.close`.

        Raises: ValueError for another backend, where Inductor has no compiler, or for a graph without a GPU.
        """
        if backend not in ("eager", "inductor"):
            raise ValueError(f"compile: unknown backend {backend!r}; there are 'eager' and 'inductor'.")
        if backend == "inductor":
            inductor.check_compiler()
        if self.mesh is not None:
            check_runs(self.mesh)
        if cuda_graph:
            check_device(getattr(self.mesh, "device_type", None))
        return Compiled(self, backend, cuda_graph)


@dataclass(frozen=True)
class Compiled:
    """A program bound to this rank: callable, no longer transformable, as `jax.stages.Compiled`.

    The first call compares programs over all ranks, and takes rank 0's plan where they differ.
    """

    lowered: Lowered
    backend: str = "eager"
    cuda_graph: bool = False
    _bound: list[tuple[Lowered, Callable]] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def as_text(self) -> str:
        """The program that runs."""
        return str(self._bound[0][0] if self._bound else self.lowered)

    def __str__(self) -> str:
        return self.as_text()

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        flat, local = self._inputs(state, batch)
        outputs = self._run(local)(local)
        for i, old in enumerate(flat[: self.lowered.graph.num_state]):
            # the same DTensor objects, whose storage now holds the new state
            outputs[i] = old if isinstance(old, torch.Tensor) else outputs[i]
        return pytree.tree_unflatten(outputs, self.lowered.program.out_tree)

    def profile(self, state: Any, *batch: Any, steps: int = 3) -> Profile:
        """Run `steps` real steps and record them: when what ran, in the lanes of `Lowered.timeline`.

        The state is donated and advances. All ranks must call it. A step with `cuda_graph` is recorded as it
        is without. See `profile.Profile`.
        """
        _, local = self._inputs(state, batch)
        run = self._run(local)
        local = placed(self.lowered.graph, local) if self.cuda_graph else local
        return profile(self._bound[0][0].graph, run.program, local, steps)

    def close(self) -> None:
        """Let go of the captured CUDA graph, if there is one.

        Before the process group goes, or to go on with another state: the next call runs the step as it is,
        and the one after captures it anew.
        """
        for _, run in self._bound:
            if isinstance(run, Capture):
                run.close()

    def tune(self, state: Any, *batch: Any, steps: int = 3) -> tuple[Compiled, Profile]:
        """Plan again from `steps` recorded steps, record as many of that plan, and keep the faster one.

        Returns that, and what was recorded first. The plan's notes say what a step took on the slowest
        rank. The state is donated and advances. All ranks must call it.
        """
        before = self.profile(state, *batch, steps=steps)
        again = dataclasses.replace(self, lowered=self._bound[0][0].replan(before), _bound=[])
        after = again.profile(state, *batch, steps=steps)
        first, second = _slowest([before.timeline.seconds, after.timeline.seconds], self.lowered.mesh)
        lowered, run = (again if second < first else self)._bound[0]
        note = f"measured {second:.4g} s a step, where the plan before took {first:.4g} s"
        notes = (*lowered.plan.notes, note if second < first else f"{note} and was kept")
        plan = dataclasses.replace(lowered.plan, notes=notes)
        lowered = dataclasses.replace(lowered, plan=plan, cluster=again.lowered.cluster)
        return dataclasses.replace(self, lowered=lowered, _bound=[(lowered, run)]), before

    def _run(self, local: Sequence[torch.Tensor]) -> Callable:
        if not self._bound:
            lowered = agree(self.lowered)
            _check_donation(lowered.graph, local)
            if self.cuda_graph:
                lowered = dataclasses.replace(lowered, graph=with_rates(lowered.graph))
                local = placed(lowered.graph, local)
            if self.backend == "inductor":
                graph, run = inductor.executable(lowered.graph, lowered.mesh, local)
                lowered = dataclasses.replace(lowered, graph=graph)
            else:
                run = executable(lowered.graph, lowered.mesh)
            self._bound.append((lowered, Capture(run, lowered.graph) if self.cuda_graph else run))
        return self._bound[0][1]

    def _inputs(self, state: Any, batch: tuple) -> tuple[list, list[torch.Tensor]]:
        """The flat arguments, and what they hold on this rank."""
        program, graph = self.lowered.program, self.lowered.graph
        leaves, tree = pytree.tree_flatten((state, *batch))
        if tree != program.in_tree:
            raise TypeError(f"{graph.name}: compiled for arguments {program.in_tree}, called with {tree}.")
        for i, value in program.static:
            if leaves[i] != value:
                raise TypeError(f"{graph.name}: compiled for {program.paths[i]}={value!r}, called with {leaves[i]!r}.")
        static = {i for i, _ in program.static}
        flat = [x for i, x in enumerate(leaves) if i not in static]
        local = [_local(x) for x in flat]
        for v, x, y in zip(graph.inputs, flat, local, strict=True):
            if v.shape != tuple(getattr(x, "shape", ())) or v.dtype != y.dtype:
                got = Var("", y.dtype, tuple(getattr(x, "shape", ()))).type
                raise TypeError(f"{graph.name}: compiled for {v}, called with {got}.")
        return flat, local


def _local(x: Any) -> torch.Tensor:
    if isinstance(x, DTensor):
        return x.to_local()
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
    return x.detach()


def _check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """State is written in place, so each leaf of it needs memory of its own, contiguous as it was traced."""
    spans = []
    for i, (v, x) in enumerate(zip(graph.inputs, inputs)):
        if i < graph.num_state and not x.is_contiguous():
            raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
        if x.numel():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
            spans.append((x.data_ptr(), x.data_ptr() + size * x.itemsize, i))
    spans.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end and min(i, j) < graph.num_state:
            raise TypeError(_donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory"))


def _donated(graph: Graph, what: str) -> str:
    return (
        f"{graph.name}: {what}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )


def agree(lowered: Lowered) -> Lowered:
    """Compare hashes of program and plan over all ranks, so that a disagreement is an error and not a hang.

    Ranks that planned otherwise, having measured otherwise, take rank 0's plan.

    Raises: RuntimeError naming the ranks that differ.
    """
    if not isinstance(lowered.mesh, DeviceMesh) or lowered.mesh.size() == 1:
        return lowered
    mine = torch.tensor(
        [_number(plans.fingerprint(lowered.hinted)), _number(lowered.plan.digest)], device=lowered.mesh.device_type
    )
    every = mine.new_empty(2 * dist.get_world_size())
    all_gather(every, mine)
    programs, digests = every.view(-1, 2).T.tolist()
    differ = [rank for rank, value in enumerate(programs) if value != programs[0]]
    if differ:
        inputs = ", ".join(repr(v) for v in lowered.graph.inputs[lowered.graph.num_state :])
        raise RuntimeError(
            f"{lowered.graph.name}: ranks {differ} lowered another program than rank 0 did.\n"
            f"On rank {dist.get_rank()} its batch is {inputs}; every rank must pass the same shapes and "
            f"take the same branches. Compare print(step.lower(state, batch)) of two ranks."
        )
    if len(set(digests)) == 1:
        return lowered
    sent = [lowered.plan]
    dist.broadcast_object_list(sent, src=0)
    return lowered if digests[dist.get_rank()] == digests[0] else lowered.planned(sent[0])


def _slowest(seconds: Sequence[float], mesh: DeviceMesh | AbstractMesh | None) -> list[float]:
    """Each of these as it was on the rank where it was longest."""
    every: list[Any] = [seconds]
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, seconds)
    return list(map(max, zip(*every)))


def _number(digest: str) -> int:
    return int(digest[:15], 16)
