"""import_graph: the equations of a graph that make_fx has recorded for a call of a higher-order operator.

The functions that the operator calls are graphs of their own, and become sub-programs.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from ...ir.collectives import rules
from ...ir.graph import Graph, Names, Primitive, Var, dce, is_random
from ...ir.nested.functions import Function
from ...ir.printer import op_name
from ...ir.source import Source
from ..functionalize import Alias, Builder, Storage
from .errors import no_nested
from .triton_kernels import import_launch

aten = torch.ops.aten


def import_graph(builder: Builder, module: fx.GraphModule, inputs: Sequence[Any], operation: Callable) -> Any:
    """Add the equations of a recorded graph, and return its outputs as traced tensors.

    `operation` imports an operation of the graph. Nodes without a line have the present one.
    """
    line, env, unread = builder.source, dict[fx.Node, Any](), iter(inputs)
    outputs: Any = []
    for node in module.graph.nodes:
        builder.source = node.meta.get("custom", {}).get("source") or line
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(unread)
        elif node.op == "get_attr":
            constant = getattr(module, node.target)
            is_function = isinstance(constant, fx.GraphModule)
            env[node] = _function(node.target, constant, builder.source, operation) if is_function else constant
        elif node.op == "output":
            outputs = args[0]
        elif node.target.__name__ == "getitem":
            env[node] = args[0][args[1]]
        elif isinstance(node.target, HigherOrderOperator):
            env[node] = _higher_order(builder, node, args, kwargs)
        else:
            env[node] = operation(builder, node.target, args, kwargs, node.meta.get("seen"))
    return outputs


def _higher_order(builder: Builder, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    """Import the call of a higher-order operator. Its results are the leaves of what it returns."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return import_launch(builder, kwargs)
    seen, tree = pytree.tree_flatten(node.meta.get("seen"))
    args, kwargs = pytree.tree_map(builder.read, (args, kwargs))
    if node.target is torch.ops.higher_order.flex_attention_backward:
        joint = args[8].graph.outputs  # None for a tensor that score_mod reads without a gradient, which fakes have
        seen[3:] = [x if grad is not None else None for x, grad in zip(seen[3:], joint[5:])]
    results = builder.emit(node.target, args, kwargs, seen)
    return pytree.tree_unflatten(Alias.of(results), tree)


def _in_memory_of_their_own(builder: Builder, outputs: Sequence[Any], arguments: Sequence[Alias]) -> list[Any]:
    """The values of outputs. One that shares memory with an argument or an output before it is copied."""
    owned = {id(x.storage) for x in arguments}
    results: list[Any] = []
    for x in outputs:
        value = builder.read(x)
        if isinstance(x, Alias) and id(x.storage) in owned:
            value = builder.emit(aten.clone.default, (value,))
        owned |= {id(x.storage)} if isinstance(x, Alias) else set()
        results.append(value)
    return results


def _function(name: str, module: fx.GraphModule, line: Source | None, operation: Callable) -> Function:
    """A function that a higher-order operator calls, which make_fx has recorded as a graph of its own."""
    seen = [n.meta["seen"] for n in module.graph.nodes if n.op == "placeholder"]
    arguments = [Alias(Storage(Var(letters(k), x.dtype, tuple(x.shape)))) for k, x in enumerate(seen)]
    values = [x.storage.value for x in arguments]
    builder = Builder(Names(v.name for v in values), {v: x.stride() for v, x in zip(values, seen)}, source=line)
    outputs = import_graph(builder, module, arguments, operation)
    listed = [*outputs] if isinstance(outputs, (tuple, list)) else [outputs]
    results = _in_memory_of_their_own(builder, listed, arguments)
    graph = dce(Graph(name.replace("_graph", ""), tuple(values), tuple(builder.eqns), tuple(results), 0))
    changed = any(x.storage.version for x in arguments)
    problem = "changes its argument in place" if changed else no_function(graph)
    if problem is not None:
        raise no_nested(name, problem, line)
    returns = next((kind for kind in (tuple, list) if isinstance(outputs, kind)), torch.Tensor)
    return Function(graph, returns)


def no_function(graph: Graph) -> str | None:
    """Why a program cannot be a function of an equation, or None if it can be one."""
    for e in graph.eqns:
        if is_random(e.op):
            return f"draws random numbers ({op_name(e.op)})"
        if isinstance(e.op, Primitive) or rules(e).remote:
            return f"communicates ({op_name(e.op)})"
    return None


def letters(index: int) -> str:
    """The name of an argument.

    >>> letters(0), letters(25), letters(26)
    ('a', 'z', 'a1')
    """
    turn, letter = divmod(index, 26)
    return string.ascii_lowercase[letter] + (str(turn) if turn else "")
