"""Generated code as a function from flat inputs to flat outputs, which overwrites the state.

A step of several micro-batches has an executable for the first, one for each in the middle, and one for the last.
"""

from __future__ import annotations

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
from ..ir.update_groups import EqnGroup
from .codegen import coordinates, to_fx
from .collectives import Start
from .host_copies import HostCopy


@dataclass(frozen=True, eq=False)
class Executable:
    """A program of one rank as a function from flat inputs to flat outputs.

    It overwrites the first `num_state` inputs, the state, with the new state. It calls `on_write` before the first
    write. `program` is the FX module that runs. `aliased_outputs` are the positions of outputs that show memory of
    arguments or of constants; they are copied, because later steps and the caller use that memory.
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
                # The traceback holds the values of the program. When it frees them, no message may use them any more.
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
        """Let compute wait for all messages and copies in progress."""
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
    """The program of this rank of `mesh`, ready to run eagerly; equations of a group are one call."""
    code = to_fx(graph, mesh, donate=True, groups=groups, on_write=on_write, device=device)
    return bind(graph, code, on_write)


def bind(
    graph: Graph, program: fx.GraphModule, on_write: Callable[[], None] | None = None
) -> Executable:
    """An FX module that `to_fx` made of `graph`, ready to run."""
    return Executable(program, graph.num_state, on_write, aliased_outputs(graph))


def aliased_outputs(graph: Graph) -> tuple[int, ...]:
    """The positions of the outputs, other than the state, that share memory with an argument or a constant.

    Later steps write over the state, and read the constants again. The caller may write over a batch. Donated
    inputs, such as sums over micro-batches, may be returned without a copy.
    """
    owner = donation(graph).owner
    given_away = {v for v, _ in graph.donated}
    lasting = set()
    for v in (*graph.inputs, *graph.outputs[: graph.num_state]):
        if isinstance(v, Var) and v not in given_away:
            lasting.add(owner[v])
    for eqn in graph.eqns:
        if is_constant(eqn):
            lasting.add(owner[eqn.out])
    aliased = []
    for i, v in enumerate(graph.outputs):
        if i >= graph.num_state and isinstance(v, Var) and owner[v] in lasting:
            aliased.append(i)
    return tuple(aliased)


def _line_of(error: Exception, program: fx.GraphModule) -> Source | None:
    """The user's line of the operation that has failed in generated code, if it is known."""
    code = type(program).forward.__code__
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    lines = program.code.splitlines()
    if traceback is None or traceback.tb_lineno > len(lines):
        return None
    # A line of the code assigns the value of the node that has its name.
    name = lines[traceback.tb_lineno - 1].partition("=")[0].strip()
    for node in program.graph.nodes:
        if node.name == name and "eqn" in node.meta:
            return node.meta["eqn"].source
    return None


def _write_back(state: Sequence[torch.Tensor], outputs: list[Any]) -> None:
    """Put each new state into the storage of the old one, where the program did not do so already."""
    if all(map(operator.is_, state, outputs)):  # as in most steps
        return
    new_values = {}
    for i, old in enumerate(state):
        new = outputs[i]
        if new is old:
            continue
        if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
            new_values[i] = new
    # A new value may lie in a storage of the state, which is written before the value is read.
    storages = {x.untyped_storage().data_ptr() for x in state if x.numel()}
    for i, new in new_values.items():
        if new.numel() and new.untyped_storage().data_ptr() in storages:
            new_values[i] = new.clone()
    for i, new in new_values.items():
        state[i].copy_(new)
    outputs[: len(state)] = state


@dataclass(frozen=True, eq=False)
class StepExecutable:
    """A step of one rank as a function from flat inputs to flat outputs, which runs its micro-batches in turn.

    `last_as_run` is the program of the last micro-batch in the order in which it runs. It is `graph` if there is one.
    """

    graph: Graph
    programs: MicroBatchPrograms
    runs: Mapping[Graph, Executable]  # for each different program
    last_as_run: Graph

    @property
    def last(self) -> Executable:
        """What runs the last micro-batch."""
        return self.runs[self.programs.last]

    @property
    def program(self) -> fx.GraphModule:
        """The FX module of the last micro-batch."""
        return self.last.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        return self.last(self.before_last(inputs))

    def before_last(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run all micro-batches but the last. Returns the inputs of the last."""
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
    """What runs the micro-batches of a program.

    Args:
        graph: the program.
        mesh: the mesh that it runs on.
        inputs: its flat inputs on this rank, or others like them.
        compile_program: returns a program in the order in which it runs, and what runs it, for inputs like those given.
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
    """Inputs of one of the parts like those that it will get, given inputs of the whole program."""
    rank = coordinates(part, mesh)
    device = device_of(inputs) or torch.device("cpu")
    example = list(Carry(graph, programs, inputs).inputs())
    for v in part.inputs[len(example) :]:
        shape = local_shape(v, part.axes, rank)
        example.append(torch.empty(shape, dtype=v.dtype, device=device))
    return example
