"""The values of tensors that are the same in every call of a step, computed while the step is traced.

A step may read such a value: `nn.TransformerEncoder` asks whether a mask is causal, and a model asks how long a table
of its own is. The trace has recorded the operations that compute it, so they run here, once, on tensors with values.

They may start from literals and shapes, and from inputs whose values are known: the tensors of a lifted module. If the
trace reads such an input, the program is valid for its value only: the step may not change it, and a call with another
value is refused.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..calling.inputs import KnownValue, have_equal_bits
from ..ir.nested import tensors_in
from ..ir.op_facts import draws, is_written
from ..ir.source import Source

# The last copy of each module tensor that a trace has read. All programs of a step, up to 64, share it, because a mask
# may have many megabytes.
_copies = WeakIdKeyDictionary()


class KnownInputs:
    """The inputs of a step whose values are known, and the inputs that its trace has read.

    Args:
        values: their values, by position among the inputs.
        inputs: the tensors of the trace that stand for all inputs.
    """

    def __init__(self, values: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        mode: Any = get_proxy_mode()
        self._values = values
        self._positions: dict[fx.Node, int] = {}
        for i in values:
            self._positions[get_proxy_slot(inputs[i], mode.tracer).proxy.node] = i
        self.read: dict[int, KnownValue] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._positions

    def value(self, node: fx.Node, line: Source | None) -> torch.Tensor:
        """The value of an input, on the CPU, which the user's `line` reads."""
        i = self._positions[node]
        if i not in self.read:
            self.read[i] = KnownValue(i, _copy_of(self._values[i]), line)
        return self.read[i].value


def _copy_of(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU: the last one, unless the tensor has changed since."""
    copy = _copies.get(x)
    if copy is None or copy.shape != x.shape or not have_equal_bits(copy, x):
        copy = _copies[x] = x.detach().to("cpu", copy=True)
    return copy


def result_of_known(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: KnownInputs, line: Source | None
) -> Any:
    """The result of an operation on known values; None if an argument depends on an input of unknown value.

    All tensor arguments belong to the current trace.
    """
    mode: Any = get_proxy_mode()
    tracer = mode.tracer
    nodes: dict[int, fx.Node] = {}
    for x in tensors_in((args, kwargs)):
        slot = get_proxy_slot(x, tracer, None)
        if slot is None:
            return None
        nodes[id(x)] = slot.proxy.node
    needed = _needed(tracer.graph, nodes.values(), inputs)
    if needed is None:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        values: dict[fx.Node, Any] = {}
        for node in tracer.graph.nodes:
            if node not in needed:
                continue
            if node in inputs:
                # A clone: the step may write to it, and calls are compared with the value as it was.
                values[node] = inputs.value(node, line).clone()
            else:
                values[node] = _computed(node, tracer.root, values)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: values[nodes[id(x)]], (args, kwargs)
        )
        return op(*args, **kwargs)


def _needed(graph: fx.Graph, nodes: Iterable[fx.Node], inputs: KnownInputs) -> set[fx.Node] | None:
    """The nodes that compute the values of `nodes`, or None if these depend on another input, a draw or other ranks.

    A node that writes into the memory of one of them, through any view, is one of them too.
    """
    writers = [(node, _storages(_written(node))) for node in graph.nodes if _written(node)]
    needed: set[fx.Node] = set()
    storages: set[int | None] = set()
    found = list(nodes)
    while found:
        node = found.pop()
        if node in needed:
            continue
        if node not in inputs and not _is_computed_alone(node):
            return None
        needed.add(node)
        storages |= _storages([node])
        found += node.all_input_nodes
        if not found:
            found = [
                writer
                for writer, written in writers
                if writer not in needed and not storages.isdisjoint(written)
            ]
    return needed


def _is_computed_alone(node: fx.Node) -> bool:
    """Whether a node is a literal, or an operation of PyTorch that draws nothing: its arguments determine its value."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return not draws(op, node.args, node.kwargs)


def _computed(node: fx.Node, root: Any, values: dict[fx.Node, Any]) -> Any:
    """The value of a node, on the CPU, from the values of the nodes before it."""
    if node.op == "get_attr":
        return getattr(root, str(node.target)).detach().clone()
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    on_cpu = lambda device: torch.device("cpu")
    args, kwargs = pytree.tree_map_only(torch.device, on_cpu, (args, kwargs))
    function: Any = node.target
    return function(*args, **kwargs)


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written: list[fx.Node] = []
    for k, declared in enumerate(node.target._schema.arguments):
        if is_written(declared):
            x = node.args[k] if k < len(node.args) else node.kwargs.get(declared.name)
            written += (each for each in pytree.tree_leaves(x) if isinstance(each, fx.Node))
    return written


def _storages(nodes: Iterable[fx.Node]) -> set[int | None]:
    """The storages of the tensors that nodes stand for."""
    storages: set[int | None] = set()
    for node in nodes:
        storages.update(map(storage_of, tensors_in(node.meta.get("val"))))
    return storages


def storage_of(x: torch.Tensor) -> int | None:
    """The storage of a tensor, also inside transforms of torch.func; None for a tensor without one."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.untyped_storage()._cdata if x.layout is torch.strided else None
