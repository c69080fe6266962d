"""The guard of a program recognises a call like the last one without examining it.

In a loop every step gets the state that the step before it returned, and a batch like the one before. So what was found
out about the last call is still true: its signature, the layout of its leaves, and that they share no memory.
Recognising the state takes a fraction of a microsecond a leaf. A leaf that was replaced, resized, moved or laid out in
another way since then is noticed, and the call is then examined as a new one. A tensor with the properties and the
memory of a leaf is as good as that leaf.

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
    """The last call of a program, with the state that it returned. It keeps no tensor alive.

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
        """The inputs of a call of which everything is as in the last one; None for another call.

        An argument in the storage of a leaf of the state makes it another call.
        """
        if call.keywords != self._keywords or surroundings != self._surroundings:
            return None
        arguments = self._batch_tree.leaves((call.batch, call.extra))
        if arguments is None or not self._is_like(arguments):
            return None
        state = self._state.match(call.state)
        if state is None:
            return None
        for place, snapshot in self._snapshots.items():
            if not snapshot.is_unchanged(state, place):
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
        """A number as a tensor. The tensor of the last call serves again, unless the caller has written to it."""
        tensor = self._numbers.get(i)
        # 0.0 equals -0.0, and gives other results: a tensor of zero does not serve again.
        if tensor is None or type(number) is not float or number == 0 or tensor.item() != number:
            tensor = as_tensor(number)
            self._numbers[i] = tensor
        return tensor

    def _is_like(self, arguments: list) -> bool:
        """Whether the arguments other than the state have the properties of the last ones."""
        # They differ, for instance, if a container is where a leaf was.
        if list(map(type, arguments)) != self._kinds:
            return False
        for x, last in zip(arguments, self._batch):
            # All floats have the same signature, and a lifted loop has many.
            if type(x) is not float and Leaf.of(x, is_state=False) != last:
                return False
        return True


class KnownState:
    """The properties of a state, and the memory that it is in."""

    def __init__(self, state: Any) -> None:
        self._tree = KnownTree(state)
        leaves = self._tree.leaves(state) or []
        # These must be the same objects: the local tensor of a DTensor, for instance, does not tell its layout.
        self._references = [
            (i, weakref.ref(x)) for i, x in enumerate(leaves) if type(x) not in _PLAIN
        ]
        self._distributed = [i for i, x in enumerate(leaves) if isinstance(x, DTensor)]
        self._trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        # Their local tensors, which are compared, never require gradients.
        self._distributed_trained = self._distributed_requires_grad(leaves)
        tensors = self._local(leaves)
        # Types, sizes, strides, dtypes and devices, in the way in which TorchDynamo compares them.
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}

    def match(self, state: Any) -> Inputs | None:
        """The leaves of `state`, if it is the known state and has not changed; else None."""
        leaves = self._tree.leaves(state)
        if leaves is None or any(reference() is not leaves[i] for i, reference in self._references):
            return None
        if self._distributed_requires_grad(leaves) != self._distributed_trained:
            return None
        tensors = self._local(leaves)
        # A leaf that is not a tensor now is a TypeError.
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
        """Whether a tensor is in a storage in which a leaf is too."""
        return x.untyped_storage().data_ptr() in self._storages

    def _distributed_requires_grad(self, leaves: Sequence[torch.Tensor]) -> list[bool]:
        """For each DTensor, whether it requires a gradient."""
        return [leaves[i].requires_grad for i in self._distributed]

    def _local(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that this rank holds of the leaves."""
        tensors = list(leaves)
        # Without `to_local` and torch.no_grad(), whose effect an interrupt could leave on.
        for i in self._distributed:
            tensors[i] = tensors[i]._local_tensor  # type: ignore[attr-defined]
        return tensors


class KnownTree:
    """The structure of a tree: its containers with their types and keys, and its leaves.

    It finds the leaves of a tree of the same structure faster than PyTorch flattens one.
    """

    def __init__(self, tree: Any) -> None:
        # For each container its position among all nodes, its type and its keys.
        self._containers: list[tuple[int, Any, Any]] = []
        # The positions of the leaves, from left to right.
        self._leaves: list[int] = []
        self._num_nodes = 1
        self._record(tree, 0)

    def _record(self, node: Any, position: int) -> None:
        """Note what is at a position and under it."""
        children, keys = _children(node)
        if children is None:
            self._leaves.append(position)
            return
        self._containers.append((position, type(node), keys))
        # The method `leaves` meets containers in this order, and appends the children of each to the nodes before.
        first = self._num_nodes
        self._num_nodes += len(children)
        for k, child in enumerate(children):
            self._record(child, first + k)

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves of a tree of this structure, as if it was flattened; None for another one.

        Something else may be in the place of a leaf.
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
    """The children of a container, and what tells it from others of its type; None for a leaf."""
    if type(node) is dict:
        return [*node.values()], [*node]
    if type(node) is list or type(node) is tuple:
        return [*node], len(node)
    # One level is flattened. `tree_flatten` makes a reference cycle with `is_leaf`, which must not hold the node.
    itself = id(node)
    children, structure = pytree.tree_flatten(node, is_leaf=lambda x: id(x) != itself)
    if structure.is_leaf():
        return None, None
    return children, structure
