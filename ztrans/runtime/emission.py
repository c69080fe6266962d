"""Emission: the calls that an FX program makes for each equation: of a primitive, an operation, or updates.

A new collective has a row in `EMITTERS`, or in a table of its own that is passed to `codegen.to_fx`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, GRADIENT, PMEAN, PSUM, REDUCE_SCATTER, SHARD, WAIT, rules
from ..ir.graph import Eqn, Primitive, Var, substitute
from ..ir.layout import local_shape, part
from ..ir.operations import called
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
    """A view of this rank's part of a whole value."""
    (value, dim), axis = eqn.args, eqn.kwargs["axis"]
    rows = local_shape(value, emission.sizes, emission.at)[dim]
    mine = part(rows, emission.sizes[axis], emission.at[axis])
    return [emission.out.call_function(torch.narrow, (emission.nodes[value], dim, *mine))]


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


def operation(out: fx.Graph, eqn: Eqn, twin: Any, env: Mapping[Var, Any], module: torch.nn.Module) -> list:
    """Emit the call of an operation, or of its `twin`. Returns the node of each result, None for those not bound."""

    def read(x: Any) -> Any:
        if isinstance(x, torch.Tensor):  # a literal: torch.tensor(...) inside the step
            name = f"constant_{len(list(module.buffers()))}"
            module.register_buffer(name, x)
            return out.get_attr(name)
        if isinstance(x, (list, tuple)):
            return [read(item) for item in x]
        return substitute(x, env.__getitem__)

    args, kwargs = tuple(read(a) for a in eqn.args), {k: read(v) for k, v in eqn.kwargs.items()}
    call = out.call_function(twin or called(eqn.op), args, kwargs)
    if isinstance(twin, torch._ops.OpOverload) and not twin._schema.returns:  # an update over lists
        return [env[a[0]] for a, s in zip(eqn.args, twin._schema.arguments) if s.alias_info is not None and a]
    return _results(out, eqn, call)


def _results(out: fx.Graph, eqn: Eqn, call: fx.Node) -> list:
    """The node of each result of a call of an operation."""
    op: Any = eqn.op
    schema = op._schema
    item = lambda node, k: out.call_function(operator.getitem, (node, k))
    is_list = [isinstance(r.type, torch.ListType) for r in schema.returns]
    if len(is_list) > 1 and all(is_list):  # lists of one tensor each, which may be empty, as momenta are
        given = {a.name: x for a, x in zip(schema.arguments, eqn.args)}
        filled = [k for k, r in enumerate(schema.returns) if given[r.name.removesuffix("_out")]]
        lists = [item(call, k) for k in filled]
        return [item(each, 0) for each in lists]
    if len(is_list) > 1 or is_list[0]:
        return [None if v is None else item(call, k) for k, v in enumerate(eqn.outs)]
    return [call]


def updates(out: fx.Graph, eqns: Sequence[Eqn], twin: Any, env: Mapping[Var, Any]) -> list[list]:
    """Emit one call of a fused optimizer for the updates of several tensors. Returns the results of each update."""
    args = tuple([env[v] for e in eqns for v in e.args[k]] for k in range(len(eqns[0].args)))
    out.call_function(twin, args, substitute(dict(eqns[0].kwargs), env.__getitem__))
    written = [s.alias_info is not None for s in twin._schema.arguments]
    return [[env[a[0]] for a, over in zip(e.args, written) if over and a] for e in eqns]
