"""Compiled: the program of one rank bound to its devices, to be run, profiled and tuned."""

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

from .ir.ambient import refuse_inside, without_autocast
from .ir.graph import Graph
from .ir.printer import Printed, format_seconds
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
from .tracing.arguments import Arguments, check_captured, check_donation, flat

if TYPE_CHECKING:
    from .stages import Lowered, Traced


class Bound(NamedTuple):
    """A program as it runs on this rank."""

    lowered: Lowered
    run: Any  # a function from flat inputs to flat outputs, with the FX `program` that it runs
    messages: int = 0  # a hash of those that it sends


@dataclass(frozen=True, repr=False)
class Compiled(Printed):
    """A program bound to this rank: callable, and no longer transformable, as `jax.stages.Compiled`.

    The first call compares the programs of all ranks, and takes rank 0's plan where plans differ. This is left out
    for a program that follows a plan which the ranks have `agreed` on for another batch size: it sends the same
    messages.

    Raises: TypeError when called with other arguments than it was compiled for, when a value that the step reads
    besides its arguments has changed since it was traced, and inside of torch.func's transforms.
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

    def __repr__(self) -> str:
        captured = ", cuda_graph=True" if self.cuda_graph else ""
        return f"Compiled({self.graph!r}, backend={self.backend!r}{captured})"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        refuse_inside(self.lowered.graph.name, (args, kwargs))
        check_captured(self.lowered.program, self.lowered.graph.name)
        return self.run(self._arguments(args, kwargs))

    @without_autocast()
    def run(self, arguments: Arguments) -> tuple[Any, Any]:
        """Run the program for arguments that fit it, and for captured values that are known to be those of the trace.

        A `Step` calls this: to choose a program, it has compared the captured values.
        """
        leaves, local = self._flat(arguments)
        with self._step(leaves, local) as run:
            outputs = run(local)
        for i, old in enumerate(leaves[: self.lowered.graph.num_state]):
            # the tensors that the caller passed, whose storages now hold the new state
            outputs[i] = old if isinstance(old, torch.Tensor) else outputs[i]
        return pytree.tree_unflatten(outputs, self.lowered.program.out_tree)

    @without_autocast()
    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Run `steps` real steps on these arguments and record when each operation and message ran.

        The state is donated and advances. All ranks must call it. Afterwards all have the same times of operations
        and links; the timeline, in the lanes of `Lowered.timeline`, is this rank's own. A step with `cuda_graph` is
        recorded without its graph. See `profile.Profile`.
        """
        check_captured(self.lowered.program, self.lowered.graph.name)
        leaves, local = self._flat(self._arguments(args, kwargs))
        with self._step(leaves, local) as run:
            self._writes.begin()
            local = placed(self.lowered.graph, local) if self.cuda_graph else local
            graph, mesh = self._bound[0].lowered.graph, self._mesh
            if mesh is None:
                return profile(graph, run.program, local, steps)
            return profile(graph, run.program, local, steps, functools.partial(everywhere, None, mesh)).agreed(mesh)

    def close(self) -> None:
        """Release the captured CUDA graph, if there is one.

        Call it before the process group is destroyed, or to go on with another state: the next call runs without a
        graph, and the one after it captures a new one.
        """
        for bound in self._bound:
            if isinstance(bound.run, Capture):
                bound.run.close()

    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> tuple[Compiled, Profile]:
        """Record `steps` steps, plan anew from them, record as many steps of the new plan, and keep the faster plan.

        Returns the program with that plan, and the first recording. The plan's notes give the seconds of a step on
        the slowest rank. The state is donated and advances. All ranks must call it.
        """
        before = self.profile(*args, steps=steps, **kwargs)
        replanned = dataclasses.replace(self, lowered=self._bound[0].lowered.replan(before), agreed=False, _bound=[])
        after = replanned.profile(*args, steps=steps, **kwargs)
        first, second = slowest([before.timeline.seconds, after.timeline.seconds], self.lowered.mesh)
        lowered, run, sent = (replanned if second < first else self)._bound[0]
        note = f"measured {format_seconds(second)} a step, where the plan before took {format_seconds(first)}"
        notes = (*lowered.plan.notes, note if second < first else f"{note} and was kept")
        plan = dataclasses.replace(lowered.plan, notes=notes)
        lowered = dataclasses.replace(lowered, plan=plan, cluster=replanned.lowered.cluster)
        return dataclasses.replace(self, lowered=lowered, _bound=[Bound(lowered, run, sent)]), before

    @property
    def _mesh(self) -> DeviceMesh | None:
        """The mesh of devices that the program runs on; None for a program of one process."""
        return self.lowered.mesh if isinstance(self.lowered.mesh, DeviceMesh) else None

    @contextlib.contextmanager
    def _step(self, leaves: Sequence[Any], local: Sequence[torch.Tensor]) -> Iterator[Any]:
        """The function that runs the program, once all ranks have met for this step."""
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
        """The program of the same step for other batch sizes, in the order of this program.

        The ranks have agreed on that order, so this rank alone may have such a batch. A program with other
        collectives cannot follow it: it is planned, and agreed on, as a new one.
        """
        known = self._bound[0].lowered if self._bound else self.lowered
        try:
            return dataclasses.replace(self, lowered=traced.follow(known), agreed=bool(self._bound), _bound=[])
        except ValueError:
            return dataclasses.replace(self, lowered=traced.lower(cluster=known.cluster), agreed=False, _bound=[])

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        return Arguments.of(self.lowered.program.captured.fn, args, kwargs)

    def _flat(self, arguments: Arguments) -> tuple[list, list[torch.Tensor]]:
        lowered = self.lowered
        leaves, local = flat(lowered.program, lowered.graph, lowered.mesh, arguments)
        check_donation(lowered.graph, local)  # at every call: the caller may have set one leaf to another
        return leaves, local

    def _bind(self, local: Sequence[torch.Tensor]) -> Bound:
        run: Any
        if not self._bound:
            lowered = self.lowered if self.agreed else _agreed(self.lowered)
            if any(x.is_cuda and x.dtype == torch.float64 and not x.ndim for x in local) or self.cuda_graph:
                lowered = dataclasses.replace(lowered, graph=with_rates(lowered.graph))
            if self.cuda_graph:
                local = placed(lowered.graph, local)
            if self.backend == "inductor":
                graph, run = inductor.executable(lowered.graph, self._mesh, local, self._writes.begin)
                lowered = dataclasses.replace(lowered, graph=graph)
            else:
                run = executable(lowered.graph, self._mesh, self._writes.begin)
            if self.cuda_graph:
                run = Capture(run, lowered.graph, check=functools.partial(check, run.program))
            self._bound.append(Bound(lowered, run, messages_hash(lowered.graph)))
        return self._bound[0]


def _agreed(lowered: Lowered) -> Lowered:
    """The program in the order of the first rank's plan, which may be for other measured times than this rank's.

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
