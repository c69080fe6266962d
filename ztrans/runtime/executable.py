"""Executable: generated code as a function from flat inputs to flat outputs, which overwrites the state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.ambient import without_autocast, without_function_modes
from ..ir.donation import donation, is_constant
from ..ir.graph import Graph, Var
from ..ir.source import Source, where
from ..ir.update_groups import Group
from .codegen import to_fx


@dataclass(frozen=True, eq=False)
class Executable:
    """A program of one rank as a function from flat inputs to flat outputs.

    It overwrites the first `num_state` inputs, the state, with the new state. It calls `on_write` before the first
    write. `program` is the FX module that runs. `shown` are the positions of outputs that show memory of arguments or
    of constants; they are copied, because later steps and the caller use that memory.
    """

    program: fx.GraphModule
    num_state: int
    on_write: Callable[[], None] | None
    shown: tuple[int, ...]

    @property
    def modules(self) -> torch.nn.Module:
        """The module that holds all collectives of the program."""
        return self.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad(), without_autocast(), without_function_modes():
            try:
                outputs = self.program.forward(*inputs)
            except Exception as error:
                if (line := _line_of(error, self.program)) is not None:
                    error.add_note(f"  at {where(line)}")
                raise
            if self.on_write is not None:
                self.on_write()
            for i in self.shown:
                outputs[i] = outputs[i].clone()
            _write_back(inputs[: self.num_state], outputs)
        return outputs


def executable(
    graph: Graph,
    mesh: DeviceMesh | None,
    on_write: Callable[[], None] | None = None,
    groups: Sequence[Group] = (),
) -> Executable:
    """The program of this rank of `mesh`, ready to run eagerly; equations of a group are one call."""
    return bind(graph, to_fx(graph, mesh, donate=True, groups=groups, on_write=on_write), on_write)


def bind(
    graph: Graph, program: fx.GraphModule, on_write: Callable[[], None] | None = None
) -> Executable:
    """An FX module that `to_fx` made of `graph`, ready to run."""
    return Executable(program, graph.num_state, on_write, shown(graph))


def shown(graph: Graph) -> tuple[int, ...]:
    """The positions of the outputs, other than the state, that share memory with an argument or a constant.

    Later steps write over the state, and read the constants again. The caller may write over a batch. Inputs that are
    given away, such as sums over micro-batches, belong to the outputs.
    """
    owner, n = donation(graph).owner, graph.num_state
    given = {v for v, _ in graph.donated}
    held = {
        owner[v]
        for v in (*graph.inputs, *graph.outputs[:n])
        if isinstance(v, Var) and v not in given
    }
    held |= {owner[v] for e in graph.eqns if is_constant(e) for v in e.results}
    return tuple(
        i for i, v in enumerate(graph.outputs) if i >= n and isinstance(v, Var) and owner[v] in held
    )


def _line_of(error: Exception, program: fx.GraphModule) -> Source | None:
    """The user's line of the operation that has failed in generated code, if it is known."""
    code, traceback = type(program).forward.__code__, error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    lines = program.code.splitlines()
    if traceback is None or traceback.tb_lineno > len(lines):
        return None
    name = lines[traceback.tb_lineno - 1].partition("=")[0].strip()
    nodes = {node.name: node for node in program.graph.nodes}
    return nodes[name].meta["eqn"].source if name in nodes and "eqn" in nodes[name].meta else None


def _write_back(state: Sequence[torch.Tensor], outputs: list[Any]) -> None:
    """Put each new state into the storage of the old one, where the program did not do so already."""
    if all(map(operator.is_, state, outputs)):
        return
    moved = [
        i
        for i, old in enumerate(state)
        if outputs[i] is not old and not _is_same_memory(outputs[i], old)
    ]
    storages = {x.untyped_storage().data_ptr() for x in state if x.numel()}

    def unshared(x: torch.Tensor) -> torch.Tensor:
        """`x`, cloned if it shares the state's storage, since that is written before `x` is read."""
        return x.clone() if x.numel() and x.untyped_storage().data_ptr() in storages else x

    copies = {i: unshared(outputs[i]) for i in moved}
    for i, new in copies.items():
        state[i].copy_(new)
    outputs[: len(state)] = state


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
