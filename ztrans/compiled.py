"""Compiled: the program of one rank bound to its devices; run, measured, tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .ir.ambient import refuse_inside, without_autocast
from .ir.graph import Graph
from .ir.printer import format_seconds, html, program
from .planning.fingerprint import update_fingerprint
from .planning.plan_transfer import landmarks, transfer
from .profiling.profile import Profile, profile
from .runtime.codegen import executable
from .runtime.consensus import Proposal, check_adopted, messages, messages_hash, proposals, slowest
from .runtime.cuda.graph_capture import Capture, placed, with_rates
from .runtime.cuda.symmetric_start import check
from .runtime.failure import Writes, alone, check_whole, running, steps_of
from .runtime.inductor import backend as inductor
from .runtime.meeting import Call, everywhere, meet
from .runtime.process_groups import process_groups
from .tracing.arguments import check_captured, check_donation, flat

if TYPE_CHECKING:
    from .stages import Lowered, Traced


class Bound(NamedTuple):
    """A program as it runs on this rank, and a hash of the messages that it sends."""

    lowered: Lowered
    run: Callable
    messages: int = 0


@dataclass(frozen=True, repr=False)
class Compiled:
    """A program bound to this rank: callable, no longer transformable, as `jax.stages.Compiled`.

    The first call compares programs over all ranks, and takes rank 0's plan where they differ. A program with a plan
    that the ranks `agreed` on for another batch shape needs no more than to send the same messages.

    Raises: TypeError when called with other arguments than it was compiled for, when what the step reads besides
    its arguments has changed since it was traced, and inside of torch.func's transforms.
    """

    lowered: Lowered
    backend: str = "eager"
    cuda_graph: bool = False
    agreed: bool = field(default=False, compare=False, repr=False)
    _bound: list[Bound] = field(default_factory=list, compare=False, repr=False)
    _writes: Writes = field(default_factory=Writes, compare=False, repr=False)
    _runner: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def graph(self) -> Graph:
        """The program that runs; before the first call the lowered one."""
        return (self._bound[0].lowered if self._bound else self.lowered).graph

    def as_text(self, *, full: bool = False) -> str:
        """The program that runs as text; a long bucket folds, or with `full` has a line for each member."""
        return program(self.graph, full)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        captured = ", cuda_graph=True" if self.cuda_graph else ""
        return f"Compiled({self.graph!r}, backend={self.backend!r}{captured})"

    def _repr_html_(self) -> str:
        return html(self.graph)

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        refuse_inside(self.lowered.graph.name, (state, batch))
        check_captured(self.lowered.program, self.lowered.graph.name)
        return self.run(state, batch)

    @without_autocast()
    def run(self, state: Any, batch: tuple) -> tuple[Any, Any]:
        """What a call does when the step has been looked up for what it captures, as `Step` does."""
        leaves, local = self._flat(state, batch)
        with self._step(leaves, local) as run:
            outputs = run(local)
        for i, old in enumerate(leaves[: self.lowered.graph.num_state]):
            # the same DTensor objects, whose storage now holds the new state
            outputs[i] = old if isinstance(old, torch.Tensor) else outputs[i]
        return pytree.tree_unflatten(outputs, self.lowered.program.out_tree)

    @without_autocast()
    def profile(self, state: Any, *batch: Any, steps: int = 3) -> Profile:
        """Run `steps` real steps and record them: when what ran, in the lanes of `Lowered.timeline`.

        The state is donated and advances. All ranks must call it, and know the same of operations and links
        after it; the timeline is this rank's. A step with `cuda_graph` is recorded as it is without. See
        `profile.Profile`.
        """
        check_captured(self.lowered.program, self.lowered.graph.name)
        leaves, local = self._flat(state, batch)
        with self._step(leaves, local) as run:
            self._writes.begin()
            local = placed(self.lowered.graph, local) if self.cuda_graph else local
            graph, mesh = self._bound[0].lowered.graph, self._mesh
            if mesh is None:
                return profile(graph, run.program, local, steps)
            return profile(graph, run.program, local, steps, functools.partial(everywhere, None, mesh)).agreed(mesh)

    def close(self) -> None:
        """Let go of the captured CUDA graph, if there is one.

        Before the process group goes, or to go on with another state: the next call runs the step as it is,
        and the one after captures it anew.
        """
        for bound in self._bound:
            if isinstance(bound.run, Capture):
                bound.run.close()

    def tune(self, state: Any, *batch: Any, steps: int = 3) -> tuple[Compiled, Profile]:
        """Plan again from `steps` recorded steps, record as many of that plan, and keep the faster one.

        Returns that, and what was recorded first. The plan's notes say what a step took on the slowest
        rank. The state is donated and advances. All ranks must call it.
        """
        before = self.profile(state, *batch, steps=steps)
        again = dataclasses.replace(self, lowered=self._bound[0].lowered.replan(before), agreed=False, _bound=[])
        after = again.profile(state, *batch, steps=steps)
        first, second = slowest([before.timeline.seconds, after.timeline.seconds], self.lowered.mesh)
        lowered, run, sent = (again if second < first else self)._bound[0]
        note = f"measured {format_seconds(second)} a step, where the plan before took {format_seconds(first)}"
        notes = (*lowered.plan.notes, note if second < first else f"{note} and was kept")
        plan = dataclasses.replace(lowered.plan, notes=notes)
        lowered = dataclasses.replace(lowered, plan=plan, cluster=again.lowered.cluster)
        return dataclasses.replace(self, lowered=lowered, _bound=[Bound(lowered, run, sent)]), before

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh of devices that the program runs on; None for a program of one process."""
        return self.lowered.mesh if isinstance(self.lowered.mesh, DeviceMesh) else None

    @contextlib.contextmanager
    def _step(self, leaves: Sequence[Any], local: Sequence[torch.Tensor]) -> Iterator[Callable]:
        """What runs the program, once all ranks have come to it."""
        name, mesh = self.lowered.graph.name, self._mesh
        state = leaves[: self.lowered.graph.num_state]
        check_whole(state, name)
        with alone(self._runner if mesh is None else process_groups(mesh).runner, name):
            bound = self._bind(local)
            if mesh is not None:
                call = Call(f"a step of {name}", bound.messages, steps_of(state))
                meet(mesh, call, lambda: messages(bound.lowered.graph))
            with running(f"step {steps_of(state) + 1} of {name}", state, mesh, self._writes):
                if self.cuda_graph:
                    self._writes.begin()
                yield bound.run

    def for_other_sizes(self, traced: Traced) -> Compiled:
        """The program of the same step for a batch of other sizes, in the order of this one.

        The ranks agreed on that order, so they need not agree again, and this rank alone may have such a batch. A
        program that cannot follow it, since it has other collectives, is planned and agreed on as a new one.
        """
        known = self._bound[0].lowered if self._bound else self.lowered
        try:
            return dataclasses.replace(self, lowered=traced.follow(known), agreed=bool(self._bound), _bound=[])
        except ValueError:
            return dataclasses.replace(self, lowered=traced.lower(cluster=known.cluster), agreed=False, _bound=[])

    def _flat(self, state: Any, batch: tuple) -> tuple[list, list[torch.Tensor]]:
        lowered = self.lowered
        leaves, local = flat(lowered.program, lowered.graph, lowered.mesh, state, batch)
        check_donation(lowered.graph, local)  # each time: one leaf may since have been set to another
        return leaves, local

    def _bind(self, local: Sequence[torch.Tensor]) -> Bound:
        if not self._bound:
            lowered = self.lowered if self.agreed else _agreed(self.lowered)
            if any(x.is_cuda and x.dtype == torch.float64 and not x.ndim for x in local) or self.cuda_graph:
                lowered = dataclasses.replace(lowered, graph=with_rates(lowered.graph))
            if self.cuda_graph:
                local = placed(lowered.graph, local)
            if self.backend == "inductor":
                graph, run = inductor.executable(lowered.graph, lowered.mesh, local, self._writes.begin)
                lowered = dataclasses.replace(lowered, graph=graph)
            else:
                run = executable(lowered.graph, lowered.mesh, self._writes.begin)
            if self.cuda_graph:
                run = Capture(run, lowered.graph, check=functools.partial(check, run.program))
            self._bound.append(Bound(lowered, run, messages_hash(lowered.graph)))
        return self._bound[0]


def _agreed(lowered: Lowered) -> Lowered:
    """The program in the order of the plan of the mesh's first rank, which may have measured otherwise.

    Raises: RuntimeError on every rank where ranks lowered different programs, or where that plan does not fit one.
    """
    mesh, name = lowered.mesh, lowered.graph.name
    if not isinstance(mesh, DeviceMesh) or mesh.size() == 1:
        return lowered
    plan, hinted = lowered.plan, lowered.hinted
    mine = Proposal(plan.program, update_fingerprint(hinted), messages(hinted), (plan, landmarks(hinted, plan)))
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
