"""Gathers that one step starts and the next step waits for.

A step whose program carries gathers (see `across_steps`) ends while they are in progress. They belong to the mesh,
like its channels: the next step of the mesh uses them, or waits for them and drops them. It uses them if it begins with
the same gathers, and each leaf that they gather is unchanged since the last step. All ranks must do the same, because a
rank that starts gathers sends messages that the others do not expect. So the ranks compare this too (see `agreement`).

`Compiled` asks `uses_carried` before a step, and calls `Session.drop_carried` if the answer is no. A step that
fails closes the channels of the mesh and drops the carried gathers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..calling.inputs import Inputs
from ..calling.leaf_records import Snapshot
from ..ir.ambient import without_autocast
from ..ir.graph import Graph
from ..rewrites.across_steps import carried_starts
from .collectives import Member, Start, wait
from .contract import message_lines
from .executable import StepExecutable
from .runner import Runner
from .session import session_of


@dataclass(frozen=True, eq=False)
class Carried:
    """Gathers that a step has started for the next one.

    Attributes:
        sent: a line for each message that they send.
        members: the gathers in progress.
        starts: the modules that have started them.
        leaves: snapshots of the leaves that they gather, after the step; None if the gathers may not be used.
    """

    sent: tuple[str, ...]
    members: tuple[Member, ...]
    starts: tuple[Start, ...]
    leaves: tuple[Snapshot, ...] | None = None

    def wait(self) -> None:
        """Wait for the gathers, and drop their results."""
        for member in self.members:
            wait(member)

    def join(self) -> None:
        """Make compute wait for the gathers, so that the memory that they fill may be freed."""
        for start in self.starts:
            start.join()


class CarryingExecutable(Runner):
    """The program of one rank that carries gathers, as a function whose inputs and outputs do not include the gathers.

    Attributes:
        run: the code, whose last inputs are the carried gathers, and last outputs the gathers for the next step.
        sent: a line for each message that the gathers send.
        starts: the modules that start the gathers for the next step.
        leaves: for each of these modules, the positions of the leaves that it gathers.
        session: the session of the mesh, which holds the carried gathers.
    """

    def __init__(self, run: StepExecutable, graph: Graph, mesh: DeviceMesh) -> None:
        carried = carried_starts(graph)
        self.run = run
        starts_only = graph.replace(eqns=tuple(start.eqn for start in carried))
        self.sent = tuple(message_lines(starts_only, {}))
        self.starts = [_module(run.program, start.eqn.out.name) for start in carried]
        self.leaves = [start.leaves for start in carried]
        self.session = session_of(mesh)

    @property
    def executable(self) -> StepExecutable:
        """The code of the step."""
        return self.run

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        # If this step fails, nothing is carried, and the next step starts its gathers itself.
        carried = self.session.carried
        self.session.carried = None
        members = carried.members if carried is not None else self.start_carried(inputs)
        all_inputs: list[Any] = [*inputs, *members]
        outputs = self.run(all_inputs)
        end = len(outputs) - len(members)
        self.session.carried = Carried(self.sent, tuple(outputs[end:]), tuple(self.starts))
        # The caller may change the leaves before the next step, and the last start may not have packed them yet.
        self.starts[-1].release_members()
        return outputs[:end]

    def start_carried(self, inputs: Sequence[torch.Tensor]) -> tuple[Member, ...]:
        """Start the gathers from the leaves in `inputs`, for a step that uses no carried ones."""
        members: list[Member] = []
        try:
            with torch.no_grad(), without_autocast():
                for start, leaves in zip(self.starts, self.leaves):
                    members += start(*(inputs[i] for i in leaves))
        except BaseException:
            # The gathers that have started still write to memory that the error frees.
            for start in self.starts:
                start.join()
            raise
        return tuple(members)

    def uses_carried(self, inputs: Inputs) -> bool:
        """Whether a step on these inputs uses the gathers that the last step of the mesh has started."""
        carried = self.session.carried
        if carried is None or carried.leaves is None or carried.sent != self.sent:
            return False
        positions = chain(*self.leaves)
        return all(leaf.is_unchanged(inputs, i) for leaf, i in zip(carried.leaves, positions))

    def step_ended(self, inputs: Inputs) -> None:
        """Let the next step use the gathers that this one has started. Called after a step on these inputs succeeds."""
        carried = self.session.carried
        if carried is not None:
            leaves = tuple(Snapshot.of(inputs, i) for i in chain(*self.leaves))
            self.session.carried = dataclasses.replace(carried, leaves=leaves)


def _module(program: fx.GraphModule, name: str) -> Start:
    """The module that starts the collective whose first future has this name."""
    for node in program.graph.nodes:
        eqn = node.meta.get("eqn")
        if node.op == "call_module" and eqn is not None and eqn.results[0].name == name:
            return cast(Start, program.get_submodule(node.target))
    raise KeyError(name)
