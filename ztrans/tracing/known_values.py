"""Compute values that are the same in every call of a step, for a step that reads them while it is traced.

`nn.TransformerEncoder` asks whether a mask is causal, and a model asks how long its own table is. The trace has
recorded the operations that compute such a value, so they run here, once, on tensors with values.

The operations may start from literals and shapes, and from inputs whose values are known: the tensors of a lifted
module. If the trace reads such an input, the program is valid only for its value: the step may not change it, and a
call with another value is refused.

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

# The last copy of each module tensor that a trace has read. Up to 64 programs of a step share it: a mask may have many
# megabytes.
_copies = WeakIdKeyDictionary()


class KnownInputs:
    """The inputs of a step whose values are known.

    Args:
        values: the known values, by position among the inputs.
        inputs: the tensors of the trace, one for each input.

    Attributes:
        read: the inputs that the trace has read, by position.
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
        """The value, on the CPU, of an input that the user's `line` reads."""
        i = self._positions[node]
        if i not in self.read:
            self.read[i] = KnownValue(i, _copy_of(self._values[i]), line)
        return self.read[i].value


def _copy_of(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU: the previous copy, unless the tensor has changed since."""
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
    ancestors = _ancestors(tracer.graph, nodes.values(), inputs)
    if ancestors is None:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        values: dict[fx.Node, Any] = {}
        for node in tracer.graph.nodes:
            if node not in ancestors:
                continue
            if node in inputs:
                # A clone, because the operations may write to it, and later calls are compared with the value.
                values[node] = inputs.value(node, line).clone()
            else:
                values[node] = _value_of(node, tracer.root, values)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: values[nodes[id(x)]], (args, kwargs)
        )
        return op(*args, **kwargs)


def _ancestors(
    graph: fx.Graph, nodes: Iterable[fx.Node], inputs: KnownInputs
) -> set[fx.Node] | None:
    """The nodes that compute the values of `nodes`; None if these depend on another input, a draw or other ranks.

    A node that writes into the memory of one of them, through any view, is one of them too.
    """
    writers: list[tuple[fx.Node, set[int | None]]] = []
    for node in graph.nodes:
        targets = _written_arguments(node)
        if targets:
            writers.append((node, _storages(targets)))
    ancestors: set[fx.Node] = set()
    storages: set[int | None] = set()
    frontier = list(nodes)
    while frontier:
        node = frontier.pop()
        if node in ancestors:
            continue
        if node not in inputs and not _is_deterministic(node):
            return None
        ancestors.add(node)
        storages |= _storages([node])
        frontier += node.all_input_nodes
        # Only now is all memory of the ancestors known, and with it the nodes that write into it.
        if not frontier:
            for writer, target_storages in writers:
                if writer not in ancestors and storages & target_storages:
                    frontier.append(writer)
    return ancestors


def _is_deterministic(node: fx.Node) -> bool:
    """Whether a node is a literal, or an operation of PyTorch that draws nothing: its arguments determine its value."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return not draws(op, node.args, node.kwargs)


def _value_of(node: fx.Node, root: Any, values: dict[fx.Node, Any]) -> Any:
    """The value of a node, on the CPU, from the values of earlier nodes."""
    if node.op == "get_attr":
        return getattr(root, str(node.target)).detach().clone()
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    on_cpu = lambda device: torch.device("cpu")
    args, kwargs = pytree.tree_map_only(torch.device, on_cpu, (args, kwargs))
    function: Any = node.target
    return function(*args, **kwargs)


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments: list[fx.Node] = []
    for k, parameter in enumerate(node.target._schema.arguments):
        if is_written(parameter):
            x = node.args[k] if k < len(node.args) else node.kwargs.get(parameter.name)
            arguments += (leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, fx.Node))
    return arguments


def _storages(nodes: Iterable[fx.Node]) -> set[int | None]:
    """The storages of the tensors that nodes compute."""
    storages: set[int | None] = set()
    for node in nodes:
        storages.update(map(storage_of, tensors_in(node.meta.get("val"))))
    return storages


def storage_of(x: torch.Tensor) -> int | None:
    """The storage of a tensor, also under transforms of torch.func; None for a tensor without one."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.untyped_storage()._cdata if x.layout is torch.strided else None
