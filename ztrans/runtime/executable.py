"""Generated code as a function from flat inputs to flat outputs that overwrites the state.

A step of several micro-batches has an executable for the first one, one for all in the middle, and one for the last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..calling.inputs import device_of
from ..ir.ambient import without_autocast, without_function_modes
from ..ir.donation import donation, is_constant
from ..ir.graph import Graph, Var
from ..ir.layout import local_shape
from ..ir.micro_batches import Carry, MicroBatchPrograms, micro_batch_programs
from ..ir.source import Source, where
from ..rewrites.update_groups import EqnGroup
from .codegen import coordinates, to_fx
from .collectives import Start
from .host_copies import HostCopy
from .runner import Runner


@dataclass(frozen=True, eq=False)
class Executable:
    """A program of one rank as a function from flat inputs to flat outputs.

    It overwrites the first `num_state` inputs, the state, with the new state.

    Attributes:
        program: the FX module that runs.
        num_state: the number of leaves of the state.
        on_write: a function to call before the first write to the state.
        aliased_outputs: the positions of the outputs to copy, because they share memory with arguments or constants,
            which later steps and the caller use.
    """

    program: fx.GraphModule
    num_state: int
    on_write: Callable[[], None] | None
    aliased_outputs: tuple[int, ...]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad(), without_autocast(), without_function_modes():
            try:
                outputs = self.program.forward(*inputs)
            except BaseException as error:
                # The traceback holds the values of the program, and messages must not use them once it frees them.
                self._join()
                line = _line_of(error, self.program) if isinstance(error, Exception) else None
                if line is not None:
                    error.add_note(f"  at {where(line)}")
                raise
            if self.on_write is not None:
                self.on_write()
            for i in self.aliased_outputs:
                outputs[i] = outputs[i].clone()
            _write_back(inputs[: self.num_state], outputs)
        return outputs

    def _join(self) -> None:
        """Make compute wait for all messages and copies in progress."""
        for module in self.program.modules():
            if isinstance(module, Start | HostCopy):
                module.join()


def executable(
    graph: Graph,
    mesh: DeviceMesh | None,
    on_write: Callable[[], None] | None = None,
    groups: Sequence[EqnGroup] = (),
    device: torch.device | None = None,
) -> Executable:
    """The program of this rank of `mesh`, ready to run eagerly. The equations of a group are one call."""
    code = to_fx(graph, mesh, donate=True, groups=groups, on_write=on_write, device=device)
    return bind(graph, code, on_write)


def bind(
    graph: Graph, program: fx.GraphModule, on_write: Callable[[], None] | None = None
) -> Executable:
    """The FX module that `to_fx` has made from `graph`, ready to run."""
    return Executable(program, graph.num_state, on_write, aliased_outputs(graph))


def aliased_outputs(graph: Graph) -> tuple[int, ...]:
    """The positions of the outputs, other than the state, that share memory with an argument or a constant.

    Later steps write over the state and read the constants again, and the caller may write over a batch. Donated
    inputs, such as sums over micro-batches, may be returned without a copy.
    """
    owner = donation(graph).owner
    donated_inputs = {v for v, _ in graph.donated}
    reused_owners = set()
    for v in (*graph.inputs, *graph.new_state):
        if v not in donated_inputs:
            reused_owners.add(owner[v])
    for eqn in graph.eqns:
        if is_constant(eqn):
            reused_owners.add(owner[eqn.out])
    positions = []
    for i, v in enumerate(graph.results, graph.num_state):
        if isinstance(v, Var) and owner[v] in reused_owners:
            positions.append(i)
    return tuple(positions)


def _line_of(error: Exception, program: fx.GraphModule) -> Source | None:
    """The user's line of the operation that failed in generated code; None if it is unknown."""
    code = type(program).forward.__code__
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    lines = program.code.splitlines()
    if traceback is None or traceback.tb_lineno > len(lines):
        return None
    # Each line of the code assigns to the name of its node.
    name = lines[traceback.tb_lineno - 1].partition("=")[0].strip()
    for node in program.graph.nodes:
        if node.name == name and "eqn" in node.meta:
            return node.meta["eqn"].source
    return None


def _write_back(state: Sequence[torch.Tensor], outputs: list[Any]) -> None:
    """Copy each new leaf of the state into the storage of the old one, unless the program has written it there."""
    # In most steps it has written all of them, and this check runs in C.
    if all(map(operator.is_, state, outputs)):
        return
    new_values = {}
    for i, old in enumerate(state):
        new = outputs[i]
        if new is old:
            continue
        if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
            new_values[i] = new
    # A new value may share a storage of the state, which could be overwritten before the value is copied.
    storages = {x.untyped_storage().data_ptr() for x in state if x.numel()}
    for i, new in new_values.items():
        if new.numel() and new.untyped_storage().data_ptr() in storages:
            new_values[i] = new.clone()
    for i, new in new_values.items():
        state[i].copy_(new)
    outputs[: len(state)] = state


@dataclass(frozen=True, eq=False)
class StepExecutable(Runner):
    """The code of a step, which runs its micro-batches in turn.

    Attributes:
        graph: the whole step; with one micro-batch, in the order in which it runs.
        programs: the programs of the micro-batches.
        runs: the executable of each different program.
        last_as_run: the program of the last micro-batch in the order in which it runs.
    """

    graph: Graph
    programs: MicroBatchPrograms
    runs: Mapping[Graph, Executable]
    last_as_run: Graph

    @property
    def executable(self) -> StepExecutable:
        """The code of the step: this object."""
        return self

    @functools.cached_property
    def last(self) -> Executable:
        """The executable of the last micro-batch."""
        return self.runs[self.programs.last]

    @property
    def program(self) -> fx.GraphModule:
        """The FX module of the last micro-batch."""
        return self.last.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        return self.last(self.before_last(inputs))

    def before_last(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run all micro-batches but the last, and return the inputs of the last."""
        if self.graph.micro == 1:
            return inputs
        carry = Carry(self.graph, self.programs, inputs)
        for program in self.programs.before_last:
            carry.take(self.runs[program](carry.inputs()))
        return carry.inputs()


def step_executable(
    graph: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
    compile_program: Callable[[Graph, Sequence[torch.Tensor]], tuple[Graph, Executable]],
) -> StepExecutable:
    """The executable of a program and its micro-batches.

    Args:
        graph: the program.
        mesh: the mesh that it runs on.
        inputs: its flat inputs on this rank, or others like them.
        compile_program: compiles a program for example inputs. Returns the program in the order in which it runs, and
            its executable.
    """
    programs = micro_batch_programs(graph)
    runs: dict[Graph, Executable] = {}
    last = graph
    for program in programs.different:
        example = inputs
        if graph.micro > 1:
            example = _example(graph, programs, program, mesh, inputs)
        last, runs[program] = compile_program(program, example)
    return StepExecutable(graph if graph.micro > 1 else last, programs, runs, last)


def _example(
    graph: Graph,
    programs: MicroBatchPrograms,
    part: Graph,
    mesh: DeviceMesh | None,
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Example inputs of `part`, the program of a micro-batch, made from inputs of the whole program."""
    rank = coordinates(part, mesh)
    device = device_of(inputs) or torch.device("cpu")
    example = list(Carry(graph, programs, inputs).inputs())
    for v in part.inputs[len(example) :]:
        shape = local_shape(v, part.axes, rank)
        example.append(torch.empty(shape, dtype=v.dtype, device=device))
    return example
