"""Micro-batches as they run: one executable for the first, one for each in the middle, and one for the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.graph import Graph
from ..ir.layout import local_shape
from ..ir.micro_batches import Carry, Parts, parts
from .codegen import coordinates
from .executable import Executable


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The program of one rank as a function from flat inputs to flat outputs, which runs its micro-batches in turn.

    `last` is the program of the last micro-batch in the order in which it runs.
    """

    graph: Graph
    parts: Parts
    runs: Mapping[Graph, Executable]  # for each different part
    last: Graph

    @property
    def program(self) -> fx.GraphModule:
        """The FX module of the last micro-batch."""
        return self.runs[self.parts.last].program

    @property
    def modules(self) -> torch.nn.Module:
        """The FX modules of all micro-batches."""
        return torch.nn.ModuleList(run.program for run in self.runs.values())

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        return self.runs[self.parts.last](self.before_last(inputs))

    def before_last(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run all micro-batches but the last. Returns the inputs of the last."""
        carry = Carry(self.graph, self.parts, inputs)
        for part in self.parts.before_last:
            carry.take(self.runs[part](carry.inputs()))
        return carry.inputs()


def micro_batches(
    graph: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    executable: Callable[[Graph, Sequence[torch.Tensor]], tuple[Graph, Executable]],
) -> MicroBatches:
    """What runs the micro-batches of a program.

    Args:
        graph: the program.
        mesh: the mesh that it runs on.
        inputs: its flat inputs on this rank, or others like them.
        executable: returns a program in the order in which it runs, and what runs it, for inputs like those given.
    """
    programs, runs, last = parts(graph), dict[Graph, Executable](), graph
    for part in programs.different:
        last, runs[part] = executable(part, _example(graph, programs, part, mesh, inputs))
    return MicroBatches(graph, programs, runs, last)


def _example(
    graph: Graph,
    programs: Parts,
    part: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Inputs of one of the parts like those that it will get, given inputs of the whole program."""
    first = Carry(graph, programs, inputs).inputs()
    at, device = (
        coordinates(part, mesh),
        next((x.device for x in inputs if x.ndim), torch.device("cpu")),
    )
    more = part.inputs[len(first) :]
    return [
        *first,
        *(torch.empty(local_shape(v, part.axes, at), dtype=v.dtype, device=device) for v in more),
    ]
