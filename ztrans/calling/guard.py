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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.layout import as_tensor
from .call import BoundCall
from .inputs import Inputs, computed_local_part
from .kept import WithKept
from .leaf_records import RECORDS, Snapshot
from .signature import Constant, Leaf, Surroundings

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, WithKept)


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
        self._refusals = RECORDS.refusals
        self._keywords = call.keywords
        self._state = KnownState(call.state)
        self._arguments = KnownArguments((call.batch, call.extra))

    def match(self, call: BoundCall, surroundings: Surroundings) -> Inputs | None:
        """The inputs of a call that is like the last one; None for any other call.

        A call is not like the last one if an argument is in the storage of a leaf of the state, or if a leaf of any
        state has been recorded since that a step must refuse.
        """
        if call.keywords != self._keywords or surroundings != self._surroundings:
            return None
        if RECORDS.refusals != self._refusals:
            return None
        tensors = self._arguments.match((call.batch, call.extra), self._state.storages)
        if tensors is None:
            return None
        state = self._state.match(call.state)
        if state is None:
            return None
        for position, snapshot in self._snapshots.items():
            if not snapshot.is_unchanged(state, position):
                return None
        state.tensors.extend(tensors)
        return state


class KnownArguments:
    """The properties of the arguments after the state."""

    def __init__(self, arguments: Any) -> None:
        self._tree = KnownTree(arguments)
        leaves = self._tree.leaves(arguments) or []
        self._kinds = list(map(type, leaves))
        # The positions of tensors, and of the arguments that the program gets as they are.
        self._tensors: list[int] = []
        self._unchanged: set[int] = set()
        # The numbers of the last call, each with its tensor.
        self._numbers: dict[int, tuple[Any, torch.Tensor]] = {}
        # Constants and DTensors.
        self._others: dict[int, Leaf] = {}
        self._inputs: list[int] = []
        for i, x in enumerate(leaves):
            leaf = Leaf.of(x, is_state=False)
            is_constant = isinstance(leaf.abstract, Constant)
            if not is_constant:
                self._inputs.append(i)
            if is_constant or isinstance(x, DTensor):
                self._others[i] = leaf
            elif isinstance(x, torch.Tensor):
                self._tensors.append(i)
                if computed_local_part(x) is x:
                    self._unchanged.add(i)
            else:
                self._numbers[i] = x, as_tensor(x)
        self._guards = _guards_of([leaves[i] for i in self._tensors])

    def match(self, arguments: Any, storages: Collection[int]) -> list[torch.Tensor] | None:
        """This rank's tensor of each input among these arguments; None if they are not like the known ones.

        They are not if their properties differ, or if one is in a storage with one of these addresses.
        """
        leaves = self._tree.leaves(arguments)
        # The types differ, for instance, if a container is where a leaf was.
        if leaves is None or list(map(type, leaves)) != self._kinds:
            return None
        if not self._guards.check(*[leaves[i] for i in self._tensors]):
            return None
        for i, leaf in self._others.items():
            if Leaf.of(leaves[i], is_state=False) != leaf:
                return None
        tensors = []
        for i in self._inputs:
            x = leaves[i]
            if i in self._numbers:
                number, tensor = self._numbers[i]
                # By identity, because 0.0 equals -0.0 but gives other results.
                if x is not number:
                    tensor = as_tensor(x)
                    self._numbers[i] = x, tensor
            else:
                tensor = x if i in self._unchanged else computed_local_part(x)
                if tensor.untyped_storage().data_ptr() in storages:
                    return None
            tensors.append(tensor)
        return tensors


class KnownState:
    """The properties and the memory addresses of a state.

    Attributes:
        storages: the addresses of the storages of its leaves.
    """

    def __init__(self, state: Any) -> None:
        self._tree = KnownTree(state)
        leaves = self._tree.leaves(state) or []
        # These must stay the same objects: the local tensor of a DTensor, for instance, does not show its layout.
        self._references = [
            (i, weakref.ref(x)) for i, x in enumerate(leaves) if type(x) not in _PLAIN
        ]
        self._trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        # For each DTensor, whether it requires a gradient. Its local tensor, which is compared, never does.
        self._distributed = {
            i: x.requires_grad for i, x in enumerate(leaves) if isinstance(x, DTensor)
        }
        tensors = [x._local_tensor if isinstance(x, DTensor) else x for x in leaves]
        self._guards = _guards_of(tensors)
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}

    def match(self, state: Any) -> Inputs | None:
        """The leaves of `state` and their tensors, if it is the known state and has not changed; else None."""
        leaves = self._tree.leaves(state)
        if leaves is None:
            return None
        for i, reference in self._references:
            if reference() is not leaves[i]:
                return None
        tensors = list(leaves)
        for i, requires_grad in self._distributed.items():
            if leaves[i].requires_grad != requires_grad:
                return None
            # Not by `to_local` under torch.no_grad(): an interrupt could leave gradients off.
            tensors[i] = leaves[i]._local_tensor
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


def _guards_of(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """The types, sizes, strides, dtypes and devices of tensors, to be compared as TorchDynamo does."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


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
            elif kind in _SEQUENCES:
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
    if type(node) in _SEQUENCES:
        return [*node], len(node)
    # Flatten one level. `tree_flatten` makes a reference cycle with `is_leaf`, which must not keep the node alive.
    node_id = id(node)
    children, structure = pytree.tree_flatten(node, is_leaf=lambda x: id(x) != node_id)
    if structure.is_leaf():
        return None, None
    return children, structure
