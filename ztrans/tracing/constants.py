"""Constants: read the elements of traced tensors that depend on no argument of the step.

    bool((mask == causal).all())

reads an element, which a traced tensor does not have. If the step computes both masks from their sizes alone, the
operations that compute them run again, on real tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from ..ir.op_facts import is_random, is_written
from ..ir.relations import tensors_in
from .overloads import named

aten = torch.ops.aten
# The operations that read elements. The last two are expressed by the first one.
READS = (
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.item.default,
    aten.is_nonzero.default,
)
_LARGEST = 1 << 20  # elements of a tensor that is computed again


def read_constant(op: Any, args: Sequence[Any], tracer: Any) -> Any:
    """What `op`, one of `READS`, reads from tensors that the nodes of a trace so far have computed.

    None if the tensors depend on an argument of the step or on random numbers. No mode of PyTorch may be active.
    """
    nodes = [
        get_proxy_slot(x, tracer, None, lambda slot: slot.proxy.node) for x in tensors_in(args)
    ]
    values = _values(tracer)
    if any(node not in values for node in nodes):
        return None
    tensors = (values[node] for node in nodes if node is not None)
    return op(*(next(tensors) if isinstance(x, torch.Tensor) else x for x in args))


def _values(tracer: Any) -> dict[fx.Node, Any]:
    """The values of all nodes that are small, and that depend on no argument of the step and on no random number."""
    values: dict[fx.Node, Any] = {}
    for node in tracer.graph.nodes:
        is_known = all(before in values for before in node.all_input_nodes)
        if node.op == "get_attr":
            values[node] = getattr(tracer.root, node.target)
        elif node.op == "call_function" and node.target is operator.getitem:
            if is_known:
                values[node] = values[node.args[0]][node.args[1]]
        elif isinstance(node.target, torch._ops.OpOverload):
            if is_known and _is_pure(node.target) and _is_small(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            else:
                _forget_written(node, values)
    return values


def _forget_written(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    """Remove the values whose memory an operation of unknown effect writes."""
    op: Any = node.target
    written = {a.name for a in op._schema.arguments if is_written(a)}
    arguments = named(op, node.args, node.kwargs)
    memory = set[int]()
    for name in written & arguments.keys():
        nodes: list[fx.Node] = []
        fx.map_arg(arguments[name], nodes.append)
        memory |= {address for n in nodes for address in _addresses(values.get(n))}
    for known in [n for n, value in values.items() if not memory.isdisjoint(_addresses(value))]:
        del values[known]


def _addresses(value: Any) -> list[int]:
    """The addresses of the memory of all tensors in a value."""
    return [x.untyped_storage().data_ptr() for x in tensors_in([value])]


def _is_pure(op: Any) -> bool:
    """Whether an operation may run once more. A collective would wait for ranks that do not run it."""
    return op.namespace == "aten" and not is_random(op)


def _is_small(node: fx.Node) -> bool:
    return all(x.numel() <= _LARGEST for x in tensors_in([node.meta.get("val")]))
