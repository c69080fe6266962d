"""Compiled: the program of one rank bound to its devices; run, measured, tuned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from . import inductor
from .agreement import agree, slowest
from .ambient import refuse_inside, without_autocast
from .arguments import check_captured, check_donation, flat
from .capture import Capture, placed, with_rates
from .execute import executable
from .mesh import everywhere
from .profile import Profile, profile
from .symmetric import check

if TYPE_CHECKING:
    from .stages import Lowered


@dataclass(frozen=True)
class Compiled:
    """A program bound to this rank: callable, no longer transformable, as `jax.stages.Compiled`.

    The first call compares programs over all ranks, and takes rank 0's plan where they differ.

    Raises: TypeError when called with other arguments than it was compiled for, when what the step reads besides
    its arguments has changed since it was traced, and inside of torch.func's transforms.
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
        refuse_inside(self.lowered.graph.name, (state, batch))
        check_captured(self.lowered.program, self.lowered.graph.name)
        return self.run(state, batch)

    @without_autocast()
    def run(self, state: Any, batch: tuple) -> tuple[Any, Any]:
        """What a call does when the step has been looked up for what it captures, as `Step` does."""
        leaves, local = self._flat(state, batch)
        outputs = self._run(local)(local)
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
        _, local = self._flat(state, batch)
        run = self._run(local)
        local = placed(self.lowered.graph, local) if self.cuda_graph else local
        graph, mesh = self._bound[0][0].graph, self.lowered.mesh
        if not isinstance(mesh, DeviceMesh):
            return profile(graph, run.program, local, steps)
        return profile(graph, run.program, local, steps, functools.partial(everywhere, None, mesh)).agreed(mesh)

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
        first, second = slowest([before.timeline.seconds, after.timeline.seconds], self.lowered.mesh)
        lowered, run = (again if second < first else self)._bound[0]
        note = f"measured {second:.4g} s a step, where the plan before took {first:.4g} s"
        notes = (*lowered.plan.notes, note if second < first else f"{note} and was kept")
        plan = dataclasses.replace(lowered.plan, notes=notes)
        lowered = dataclasses.replace(lowered, plan=plan, cluster=again.lowered.cluster)
        return dataclasses.replace(self, lowered=lowered, _bound=[(lowered, run)]), before

    def _flat(self, state: Any, batch: tuple) -> tuple[list, list[torch.Tensor]]:
        lowered = self.lowered
        leaves, local = flat(lowered.program, lowered.graph, lowered.mesh, state, batch)
        check_donation(lowered.graph, local)  # each time: one leaf may since have been set to another
        return leaves, local

    def _run(self, local: Sequence[torch.Tensor]) -> Callable:
        if not self._bound:
            lowered = agree(self.lowered)
            if any(x.is_cuda and x.dtype == torch.float64 and not x.ndim for x in local) or self.cuda_graph:
                lowered = dataclasses.replace(lowered, graph=with_rates(lowered.graph))
            if self.cuda_graph:
                local = placed(lowered.graph, local)
            if self.backend == "inductor":
                graph, run = inductor.executable(lowered.graph, lowered.mesh, local)
                lowered = dataclasses.replace(lowered, graph=graph)
            else:
                run = executable(lowered.graph, lowered.mesh)
            if self.cuda_graph:
                run = Capture(run, lowered.graph, check=functools.partial(check, run.program))
            self._bound.append((lowered, run))
        return self._bound[0][1]
