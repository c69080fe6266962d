"""Recognise a call that is like the last call of a program, so that it needs no examination.

In a loop every step gets the state that the previous step returned, and a batch like the previous one. So the facts
about the last call still hold: its signature, the layout of its leaves, and that they share no memory. Recognising the
state takes a fraction of a microsecond per leaf. A leaf that was replaced, resized, moved or stored in another layout
is detected, and the call is examined as a new one. A tensor with the properties and the memory of a leaf counts as that
leaf.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.layout import as_tensor
from .call import BoundCall
from .inputs import Inputs, computed_local_part
from .signature import Constant, Leaf, Surroundings
from .snapshot import Snapshot

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Guard:
    """The last call of a program, with the state that it returned. It keeps no tensor of the caller alive.

    Args:
        call: the call.
        surroundings: the surroundings of the call.
        snapshots: by position, the leaves of the state whose values the trace has read.
    """

    def __init__(
        self, call: BoundCall, surroundings: Surroundings, snapshots: Mapping[int, Snapshot]
    ) -> None:
        self._snapshots = snapshots
        self._surroundings = surroundings
        self._keywords = call.keywords
        self._state = KnownState(call.state)
        arguments = call.batch, call.extra
        self._batch_tree = KnownTree(arguments)
        leaves = self._batch_tree.leaves(arguments) or []
        self._kinds = list(map(type, leaves))
        self._batch = [Leaf.of(x, is_state=False) for x in leaves]
        self._inputs = [
            i for i, leaf in enumerate(self._batch) if not isinstance(leaf.abstract, Constant)
        ]
        # The numbers of the last call as tensors, by position.
        self._numbers: dict[int, torch.Tensor] = {}

    def match(self, call: BoundCall, surroundings: Surroundings) -> Inputs | None:
        """The inputs of a call that is like the last one; None for any other call.

        A call is not like the last one if an argument is in the storage of a leaf of the state.
        """
        if call.keywords != self._keywords or surroundings != self._surroundings:
            return None
        arguments = self._batch_tree.leaves((call.batch, call.extra))
        if arguments is None or not self._is_like(arguments):
            return None
        state = self._state.match(call.state)
        if state is None:
            return None
        for position, snapshot in self._snapshots.items():
            if not snapshot.is_unchanged(state, position):
                return None
        for i in self._inputs:
            if isinstance(arguments[i], torch.Tensor):
                tensor = computed_local_part(arguments[i])
                if self._state.shares_storage(tensor):
                    return None
            else:
                tensor = self._number(i, arguments[i])
            state.tensors.append(tensor)
        return state

    def _number(self, i: int, number: Any) -> torch.Tensor:
        """A number as a tensor. The tensor of the last call is reused, if it still has the same value."""
        tensor = self._numbers.get(i)
        # 0.0 equals -0.0 but gives other results, so a tensor of zero is never reused.
        if tensor is None or type(number) is not float or number == 0 or tensor.item() != number:
            tensor = as_tensor(number)
            self._numbers[i] = tensor
        return tensor

    def _is_like(self, arguments: list) -> bool:
        """Whether the arguments after the state have the same properties as in the last call."""
        # The types differ, for instance, if a container is where a leaf was.
        if list(map(type, arguments)) != self._kinds:
            return False
        for x, last in zip(arguments, self._batch):
            # All floats have the same signature, and a lifted loop passes many.
            if type(x) is not float and Leaf.of(x, is_state=False) != last:
                return False
        return True


class KnownState:
    """The properties and the memory addresses of a state."""

    def __init__(self, state: Any) -> None:
        self._tree = KnownTree(state)
        leaves = self._tree.leaves(state) or []
        # These must stay the same objects: the local tensor of a DTensor, for instance, does not show its layout.
        self._references = [
            (i, weakref.ref(x)) for i, x in enumerate(leaves) if type(x) not in _PLAIN
        ]
        self._distributed = [i for i, x in enumerate(leaves) if isinstance(x, DTensor)]
        self._trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        # Their local tensors, which are compared, never require gradients.
        self._distributed_trained = self._distributed_requires_grad(leaves)
        tensors = self._local(leaves)
        # Types, sizes, strides, dtypes and devices, compared as TorchDynamo does.
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}

    def match(self, state: Any) -> Inputs | None:
        """The leaves of `state` and their tensors, if it is the known state and has not changed; else None."""
        leaves = self._tree.leaves(state)
        if leaves is None or any(reference() is not leaves[i] for i, reference in self._references):
            return None
        if self._distributed_requires_grad(leaves) != self._distributed_trained:
            return None
        tensors = self._local(leaves)
        # A leaf that is no longer a tensor raises a TypeError here.
        try:
            if not self._guards.check(*tensors):
                return None
            if list(map(torch.Tensor.data_ptr, tensors)) != self._addresses:
                return None
        except TypeError:
            return None
        for i in self._trained:
            tensors[i] = tensors[i].detach()
        return Inputs(leaves, tensors)

    def shares_storage(self, x: torch.Tensor) -> bool:
        """Whether a tensor is in the storage of a leaf."""
        return x.untyped_storage().data_ptr() in self._storages

    def _distributed_requires_grad(self, leaves: Sequence[torch.Tensor]) -> list[bool]:
        """For each DTensor, whether it requires a gradient."""
        return [leaves[i].requires_grad for i in self._distributed]

    def _local(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's tensors of the leaves."""
        tensors = list(leaves)
        # Not by `to_local` under torch.no_grad(): an interrupt could leave gradients off.
        for i in self._distributed:
            tensors[i] = tensors[i]._local_tensor  # type: ignore[attr-defined]
        return tensors


class KnownTree:
    """The structure of a tree: its containers with their types and keys, and the positions of its leaves.

    It finds the leaves of a tree of the same structure faster than PyTorch's flatten.
    """

    def __init__(self, tree: Any) -> None:
        # For each container: its position among all nodes, its type, and its keys.
        self._containers: list[tuple[int, Any, Any]] = []
        # The positions of the leaves, from left to right.
        self._leaves: list[int] = []
        self._num_nodes = 1
        self._record(tree, 0)

    def _record(self, node: Any, position: int) -> None:
        """Record the node at a position, and its descendants."""
        children, keys = _children(node)
        if children is None:
            self._leaves.append(position)
            return
        self._containers.append((position, type(node), keys))
        # `leaves` visits the containers in this order, and appends the children of each to its list of nodes.
        first = self._num_nodes
        self._num_nodes += len(children)
        for k, child in enumerate(children):
            self._record(child, first + k)

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves of a tree of this structure, in the order of a flatten; None for another structure.

        A leaf is not examined: it may be a container.
        """
        nodes: list[Any] = [tree]
        for position, kind, keys in self._containers:
            node = nodes[position]
            if type(node) is not kind:
                return None
            if kind is dict:
                if [*node] != keys:
                    return None
                nodes += node.values()
            elif kind is list or kind is tuple:
                if len(node) != keys:
                    return None
                nodes += node
            else:
                children, present = _children(node)
                if children is None or present != keys:
                    return None
                nodes += children
        return [*map(nodes.__getitem__, self._leaves)]


def _children(node: Any) -> tuple[list | None, Any]:
    """The children of a container, and its keys, length or context, which must stay equal; None for a leaf."""
    if type(node) is dict:
        return [*node.values()], [*node]
    if type(node) is list or type(node) is tuple:
        return [*node], len(node)
    # Flatten one level. `tree_flatten` makes a reference cycle with `is_leaf`, which must not keep the node alive.
    node_id = id(node)
    children, structure = pytree.tree_flatten(node, is_leaf=lambda x: id(x) != node_id)
    if structure.is_leaf():
        return None, None
    return children, structure
