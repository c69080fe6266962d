"""Emission: the calls that a program of FX makes for each primitive, one emitter for each.

A new collective has a row in `EMITTERS`, or in a table of its own that is passed to `codegen.to_fx`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, GRADIENT, PMEAN, PSUM, REDUCE_SCATTER, SHARD, WAIT, rules
from ..ir.graph import Eqn, Primitive, Split, Var
from ..ir.layout import cut
from .collectives import channel, wait
from .cuda.streams import Streams
from .cuda.symmetric_start import start


@dataclass(frozen=True)
class Emission:
    """The FX program of one rank as it is written down: its code, its submodules, and the node of each value."""

    out: fx.Graph
    module: torch.nn.Module
    nodes: Mapping[Var, Any]
    sizes: Mapping[str, int]  # of the mesh axes
    at: Mapping[str, int]  # this rank's index along each of them
    mesh: DeviceMesh | None
    streams: Streams | None

    def call(self, name: str, module: torch.nn.Module, *members: Var) -> fx.Node:
        """A call of `module`, which becomes the submodule `name`, with the values of `members`."""
        self.module.add_module(name, module)
        return self.out.call_module(name, tuple(self.nodes[v] for v in members))


Emitter = Callable[[Emission, Eqn, int], list[Any]]  # the nodes of an equation's results; the int is its place


class _Cut(torch.nn.Module):
    """This rank's part of a whole value."""

    def __init__(self, split: Split, size: int, rank: int) -> None:
        super().__init__()
        self.split, self.size, self.rank = split, size, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cut(x, self.split, self.size, self.rank)


def started(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """A submodule that starts the collective, and a future of each member."""
    axis = eqn.kwargs["axis"]
    messages = channel(emission.mesh, axis, rules(eqn).lane == "gather") if emission.mesh is not None else None
    module = start(eqn, emission.sizes, emission.at, messages, emission.streams)
    futures = emission.call(f"{eqn.op}_{place}", module, *eqn.ins)
    return [emission.out.call_function(operator.getitem, (futures, k)) for k in range(len(eqn.outs))]


def waited(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """A call of `collectives.wait`, which gives the value of a future."""
    return [emission.out.call_function(wait, (emission.nodes[eqn.args[0]],))]


def sharded(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """A submodule that shows this rank's part of a whole value."""
    axis = eqn.kwargs["axis"]
    part = _Cut(Split(axis, eqn.args[1]), emission.sizes[axis], emission.at[axis])
    return [emission.call(f"shard_{place}", part, eqn.args[0])]


def unchanged(emission: Emission, eqn: Eqn, place: int) -> list[Any]:
    """No call: a mark that no transform has used is its first argument."""
    return [emission.nodes[eqn.args[0]]]


EMITTERS: Mapping[Primitive, Emitter] = {
    ALL_GATHER: started,
    REDUCE_SCATTER: started,
    ALL_REDUCE: started,
    WAIT: waited,
    SHARD: sharded,
    GRADIENT: unchanged,
    PMEAN: unchanged,
    PSUM: unchanged,
}
