"""Emission: emit the calls of an equation into an FX program.

To add a collective, add its emitter to `EMITTERS`, or pass a table with it to `codegen.to_fx`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    GRADIENT,
    PMEAN,
    PSUM,
    REDUCE_SCATTER,
    SHARD,
    WAIT,
    rules,
)
from ..ir.donation import is_constant
from ..ir.graph import Eqn, Primitive, Var, substitute
from ..ir.layout import local_shape, part
from ..ir.nested.attention import is_attention
from ..ir.nested.call import call_operator
from ..ir.nested.functions import Function
from ..ir.nested.launch import Launch, LaunchModule
from ..ir.operations import bound
from ..ir.printer import op_name
from ..ir.update_groups import list_call
from .call_forms import call_form
from .collectives import channel, wait
from .cuda.streams import Streams
from .cuda.symmetric_start import start
from .inductor import attention


@dataclass(frozen=True)
class Emission:
    """The FX program of one rank while it is written: its code, its submodules, and the node of each value."""

    out: fx.Graph
    module: torch.nn.Module
    nodes: dict[Var, Any]
    sizes: Mapping[str, int]  # of the mesh axes
    at: Mapping[str, int]  # this rank's index along each of them
    mesh: DeviceMesh | None
    streams: Streams | None
    hoists: bool = True  # whether small constants are made once; a function may return them, to be written over

    def call(self, name: str, module: torch.nn.Module, *members: Var) -> fx.Node:
        """Add `module` as the submodule `name`, and emit a call of it with the values of `members`."""
        self.module.add_module(name, module)
        return self.out.call_module(name, tuple(self.nodes[v] for v in members))

    def emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """Emit a call of an operation of PyTorch, or of a function in its place."""
        read = self.read(tuple(args)), {k: self.read(x) for k, x in kwargs.items()}
        return self.out.call_function(call_form(op, args, kwargs), *read)

    def constant(self, x: torch.Tensor) -> fx.Node:
        """A constant of the program, as an attribute of its module."""
        name = f"constant_{len(list(self.module.buffers()))}"
        self.module.register_buffer(name, x)
        return self.out.get_attr(name)

    def read(self, x: Any) -> Any:
        """An argument, with the nodes of its values."""
        if isinstance(x, torch.Tensor):  # a literal: torch.tensor(...) inside the step
            return self.constant(x)
        if isinstance(x, Function):
            return self.function(x)
        if isinstance(x, (list, tuple)):
            return type(x)([self.read(item) for item in x])
        return substitute(x, self.nodes.__getitem__)

    def returned(self, x: Any) -> Any:
        """An output: the node of a value, or a constant. One that code cannot write is an attribute of the module."""
        if isinstance(x, Var):
            return self.nodes[x]
        if x is None or type(x) in (bool, int, float, complex, str, bytes):
            return x
        name = f"object_{len(self.out.nodes)}"
        setattr(self.module, name, x)
        held = self.out.get_attr(name)
        return self.out.call_method("copy", (held,)) if isinstance(x, numpy.ndarray) else held

    def function(self, function: Function) -> fx.Node:
        """A function that an operation calls, as a submodule with code of its own."""
        name = f"{function.graph.name}_{len(list(self.module.children()))}"
        self.module.add_module(name, nested(function))
        return self.out.get_attr(name)


def nested(function: Function) -> fx.GraphModule:
    """The code of a function that an operation calls."""
    graph, out = function.graph, fx.Graph()
    nodes: dict[Var, Any] = {v: out.placeholder(v.name) for v in graph.inputs}
    emission = Emission(out, torch.nn.Module(), nodes, {}, {}, None, None, hoists=False)
    for e in graph.eqns:
        nodes.update((v, node) for v, node in zip(e.outs, operation(emission, e)) if v is not None)
    out.output(function.returned(substitute(graph.outputs, nodes.__getitem__)))
    return fx.GraphModule(emission.module, out, graph.name)


# A function of the program, an equation and its index; it emits calls and returns the nodes of the results.
Emitter = Callable[[Emission, Eqn, int], list[Any]]


def started(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """Emit a submodule that starts the collective, and a future for each member."""
    axis = eqn.kwargs["axis"]
    messages = (
        channel(emission.mesh, axis, rules(eqn).lane == "gather")
        if emission.mesh is not None
        else None
    )
    module = start(eqn, emission.sizes, emission.at, messages, emission.streams)
    return unpacked(emission.out, emission.call(f"{eqn.op}_{place}", module, *eqn.ins), eqn.outs)


def waited(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """Emit a call of `collectives.wait`, which returns the value of a future."""
    return [emission.out.call_function(wait, (emission.nodes[eqn.args[0]],))]


def sharded(emission: Emission, eqn: Eqn, place: int) -> list[fx.Node]:
    """Emit a call that returns this rank's part of a whole value, as a view."""
    (value, dim), axis = eqn.args, eqn.kwargs["axis"]
    rows = local_shape(value, emission.sizes, emission.at)[dim]
    mine = part(rows, emission.sizes[axis], emission.at[axis])
    return [emission.out.call_function(torch.narrow, (emission.nodes[value], dim, *mine))]


def unchanged(emission: Emission, eqn: Eqn, place: int) -> list[Any]:
    """Emit no call: a mark that no transform has replaced is its first argument."""
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


def operation(emission: Emission, eqn: Eqn, function: Any = None) -> list:
    """Emit the call of an operation, or of a `function` in its place.

    Returns the node of each result, None for those not bound. A small constant is made once, and is an attribute.
    """
    op: Any = function or eqn.op
    if isinstance(op, torch._ops.HigherOrderOperator):
        return _higher_order(emission, eqn)
    if emission.hoists and is_constant(eqn):
        return [emission.constant(op(*eqn.args, **eqn.kwargs))]
    call = emission.emit(op, eqn.args, eqn.kwargs)
    if isinstance(op, torch._ops.OpOverload) and not op._schema.returns:  # an update over lists
        return _overwritten(emission, eqn, op)
    return _results(emission.out, eqn, call)


def _higher_order(emission: Emission, eqn: Eqn) -> list:
    """Emit the call of a higher-order operator, or the launch of a kernel. Returns the node of each result."""
    launch = next((x for x in eqn.args[:1] if isinstance(x, Launch)), None)
    if launch is not None:
        name = f"{launch.name}_{len(list(emission.module.children()))}"
        leaves = emission.call(name, LaunchModule(launch), *eqn.ins)
    elif is_attention(eqn):
        leaves = emission.call(*_attention(emission, eqn), *eqn.ins)
    else:
        args: Any = (eqn.op, bound(eqn), *emission.read(eqn.args))
        leaves = emission.out.call_function(
            call_operator, args, {k: emission.read(v) for k, v in eqn.kwargs.items()}
        )
    return unpacked(emission.out, leaves, eqn.outs)


def _attention(emission: Emission, eqn: Eqn) -> tuple[str, attention.Attention]:
    """The submodule that computes attention, and its name. Equal layers share it, and so its kernel."""
    text, modules = attention.text(eqn), dict(emission.module.named_children())
    shared = (
        (name, m)
        for name, m in modules.items()
        if isinstance(m, attention.Attention) and m.text == text
    )
    return next(shared, None) or (
        f"{op_name(eqn.op)}_{len(modules)}",
        attention.Attention(eqn, nested),
    )


def unpacked(out: fx.Graph, call: fx.Node, outs: Sequence[Var | None]) -> list:
    """The node of each result of a call that returns a sequence; None for those not bound."""
    return [
        None if v is None else out.call_function(operator.getitem, (call, k))
        for k, v in enumerate(outs)
    ]


def _results(out: fx.Graph, eqn: Eqn, call: fx.Node) -> list:
    """The node of each result of a call of an operation."""
    op: Any = eqn.op
    schema = op._schema
    item = lambda node, k: out.call_function(operator.getitem, (node, k))
    is_list = [isinstance(r.type, torch.ListType) for r in schema.returns]
    if len(is_list) > 1 and all(
        is_list
    ):  # lists of one tensor each, or none: an SGD may have no momenta
        given = {a.name: x for a, x in zip(schema.arguments, eqn.args)}
        filled = [k for k, r in enumerate(schema.returns) if given[r.name.removesuffix("_out")]]
        lists = [item(call, k) for k in filled]
        return [item(each, 0) for each in lists]
    return unpacked(out, call, eqn.outs) if len(is_list) > 1 or is_list[0] else [call]


def updates(emission: Emission, eqns: Sequence[Eqn], twin: Any) -> list[list]:
    """Emit one call of a fused optimizer for the updates of several tensors. Returns the results of each update."""
    args = [[v for e in eqns for v in e.args[k]] for k in range(len(eqns[0].args))]
    emission.emit(twin, args, eqns[0].kwargs)
    return [_overwritten(emission, e, twin) for e in eqns]


def _overwritten(emission: Emission, eqn: Eqn, twin: Any) -> list:
    """The nodes of the values that an update of one tensor overwrites; each argument is a list of one, or of none."""
    declared = zip(eqn.args, twin._schema.arguments)
    return [emission.nodes[a[0]] for a, s in declared if s.alias_info is not None and a]


def over_lists(emission: Emission, eqns: Sequence[Eqn], twin: Any) -> list[list]:
    """Emit one call of an operation over lists for equal equations, in place of those that have a `twin`.

    Returns the results of each equation.
    """
    call = list_call(eqns, in_place=twin is not None)
    if call is None:
        raise ValueError(f"{eqns[0].op} has no form over lists for these equations.")
    node = emission.emit(*call)
    if twin is not None:
        return [[emission.nodes[e.args[0]]] for e in eqns]
    return [[each] for each in unpacked(emission.out, node, [e.out for e in eqns])]
