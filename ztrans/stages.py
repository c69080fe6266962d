"""Traced and Lowered: the stages of a step before it is compiled, as `jax.stages`.

`Traced` is the program as written; `Lowered` the program of one rank, transforms applied and order
fixed. Each prints as its program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .compiled import Compiled
from .ir.ambient import no_collection, refuse_inside, without_autocast
from .ir.collectives import erase_marks, erase_trivial
from .ir.graph import Graph, dce
from .ir.interpreter import join, lockstep, scatter
from .ir.layout import AbstractMesh
from .ir.user_collectives import by_axis
from .ir.write_order import writes_last
from .planning import plan as plans
from .planning.cluster import Cluster, assumed
from .planning.cost import Cost, Memory, cost, memory
from .planning.fingerprint import fingerprint
from .planning.formulate import formulate
from .planning.make_plan import make
from .planning.plan import Plan
from .planning.plan_transfer import landmarks, transfer
from .planning.program_order import skeleton
from .planning.simulate import simulate
from .planning.solver.lower_bound import bound
from .planning.timeline import Timeline
from .profiling.profile import Profile
from .runtime.codegen import check_compiler
from .runtime.cuda.graph_capture import check_device
from .runtime.mesh import check_runs
from .tracing.arguments import check_captured, local_part, traced_leaves
from .tracing.trace import Program
from .transforms.base import Transform, rewritten


@dataclass(frozen=True)
class Traced:
    """A step's program as written, before any transform, as `jax.stages.Traced`."""

    program: Program
    transforms: tuple[Transform, ...]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @no_collection()
    @without_autocast()
    def lower(self, *, cluster: Cluster | None = None, plan: Plan | None = None) -> Lowered:
        """The per-rank program: transforms applied, collectives placed, buckets and order planned.

        The plan is made for `cluster`, by default an assumed one (H100s on InfiniBand; CPUs on gigabit
        Ethernet; `tune` measures). A `plan` that was made before is applied as it is.

        Raises: ValueError when a plan is for another program, or a memory budget cannot be met.
        """
        mesh, history = self._transformed()
        hinted = history[-1][1]
        cluster = cluster or assumed(getattr(mesh, "device_type", "cuda"), hinted.axes)
        if plan is None:
            plan, graph = make(hinted, cluster)
        else:
            graph = plans.apply(hinted, plan)
            plan = plans.weighed(plan, memory(graph).peak, hinted.budget, cluster.device)
        return Lowered(graph, (*history[:-1], ("lower", graph)), self.program, mesh, plan, cluster, hinted)

    @no_collection()
    def follow(self, other: Lowered) -> Lowered:
        """The program of one rank in the order of another of the same step, which is for a batch of other sizes.

        Raises: ValueError when it does not have the same collectives.
        """
        mesh, history = self._transformed()
        hinted, plan = history[-1][1], other.plan
        if plan.program != fingerprint(hinted):
            plan = transfer(plan, landmarks(other.hinted, plan), hinted)
        graph = plans.ordered(hinted, plan)
        history = (*history[:-1], ("lower", graph))
        plan = plans.weighed(plan, memory(graph).peak, hinted.budget, other.cluster.device)
        return Lowered(graph, history, self.program, mesh, plan, other.cluster, hinted)

    def _transformed(self) -> tuple[DeviceMesh | AbstractMesh | None, tuple[tuple[str, Graph], ...]]:
        """The mesh, and the program after each transform; at last with what no transform used taken out."""
        mesh = next((t.mesh for t in self.transforms if hasattr(t, "mesh")), None)
        graph = by_axis(self.graph, mesh) if isinstance(mesh, DeviceMesh) else self.graph
        history = [("trace", graph)]
        for transform in sorted(self.transforms, key=lambda t: t.turn):
            graph = rewritten(graph, transform)
            history.append((transform.name, graph))
        hinted = dce(erase_trivial(erase_marks(graph)))
        hinted = writes_last(hinted) if hinted.writes_last else hinted
        return mesh, (*history, ("hinted", hinted))

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
        least = bound(formulate(s, cluster, played.peak))
        return dataclasses.replace(played, bound=(least.seconds, least.binds))

    def replan(self, profile: Profile | Cluster) -> Lowered:
        """Plan again from what was measured; `plan.notes` say what that should gain.

        Every rank may bring its own profile: when the program first runs, rank 0's plan counts. The
        first steps are recorded and the rest replayed better, as in DeepSpeed's DeepCompile.
        """
        cluster = profile if isinstance(profile, Cluster) else profile.cluster(self.cluster)
        plan, graph = make(self.hinted, cluster)
        before, after = (simulate(g, cluster).seconds for g in (self.graph, graph))
        note = f"expected {after:.4g} s a step, where the plan before has {before:.4g} s ({after / before - 1:+.1%})"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
        return dataclasses.replace(self, cluster=cluster).planned(plan)

    def planned(self, plan: Plan) -> Lowered:
        """This program in the order of another plan."""
        return self._ordered(plan, plans.apply(self.hinted, plan))

    def following(self, plan: Plan) -> Lowered:
        """This program in the order of another rank's plan, though it may need more memory than was asked for."""
        return self._ordered(plan, plans.ordered(self.hinted, plan))

    def _ordered(self, plan: Plan, graph: Graph) -> Lowered:
        history = (*self.history[:-1], ("lower", graph))
        plan = plans.weighed(plan, memory(graph).peak, graph.budget, self.cluster.device)
        return dataclasses.replace(self, graph=graph, plan=plan, history=history)

    def lockstep(self, state: Any, batches: Sequence[tuple]) -> tuple[Any, list[Any]]:
        """Run one step of all ranks in this process, equation by equation, from the full state.

        `batches` holds each rank's batch arguments. Returns the full new state and each rank's output;
        nothing is updated in place. No process group is needed, so it runs under an AbstractMesh.

        Raises: TypeError for arguments, or values that the step captured, other than those it was traced for.
        """
        graph, program = self.graph, self.program
        refuse_inside(f"{graph.name}.lockstep", (state, batches))
        check_captured(program, graph.name)
        flat = [[local_part(x) for x in traced_leaves(program, graph.name, state, b)] for b in batches]
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
            check_compiler()
        if self.mesh is not None:
            check_runs(self.mesh)
        if cuda_graph:
            check_device(getattr(self.mesh, "device_type", None))
        return Compiled(self, backend, cuda_graph)
