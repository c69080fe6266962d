"""Known state: the state that a step returned last is recognised when it comes back.

In a loop every step is given the state that the step before it returned. So what was found out about that state is
still true: its layout, that its leaves share no memory, and which program it is for. Recognising it takes a fraction
of a microsecond a leaf. A leaf that was replaced, resized, moved or laid out anew in between is noticed, and the
state is then examined as a new one.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree


class StateLeaves(NamedTuple):
    """The leaves of a state, in the order of its tree, and the tensors that this rank holds of them."""

    leaves: Sequence[torch.Tensor]
    local: list[torch.Tensor]


class LastState:
    """The state that a step returned last, until it returns another one."""

    def __init__(self) -> None:
        self.known: KnownState | None = None

    def recognise(self, state: Any) -> StateLeaves | None:
        """The leaves of `state`, if the step returned it last, and nothing has changed; else None."""
        return self.known.recognise(state) if self.known is not None else None

    def remember(self, state: Any, leaves: Sequence[Any], key: Any) -> None:
        """Note a state that the step returns, whose program is specialised on `key`."""
        self.known = KnownState(state, leaves, key)


class KnownState:
    """What is known of a state. It keeps no leaf alive.

    `key` stands for the properties of the state that a program is specialised on.
    """

    def __init__(self, state: Any, leaves: Sequence[torch.Tensor], key: Any) -> None:
        self.key = key
        self._tree = _Tree(state)
        self._references = [weakref.ref(x) for x in leaves]
        self._distributed = [i for i, x in enumerate(leaves) if isinstance(x, DTensor)]
        self._trained = [i for i, x in enumerate(leaves) if x.requires_grad]
        local = self._local(leaves)
        # Types, sizes, strides, dtypes and devices, in the way in which TorchDynamo compares them.
        self._guards = TensorGuards(*local, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._addresses = list(map(torch.Tensor.data_ptr, local))
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in local if x.numel())
        self._starts, self._ends = [start for start, _ in spans], [end for _, end in spans]

    def recognise(self, state: Any) -> StateLeaves | None:
        """The leaves of `state`, if it is the known state and has not changed; else None."""
        leaves = self._tree.leaves(state)
        if leaves is None or not all(map(operator.is_, [known() for known in self._references], leaves)):
            return None
        local = self._local(leaves)
        if not self._guards.check(*local) or list(map(torch.Tensor.data_ptr, local)) != self._addresses:
            return None
        for i in self._trained:
            local[i] = local[i].detach()
        return StateLeaves(leaves, local)

    def overlaps(self, x: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a leaf."""
        if not x.numel():
            return False
        first = x.data_ptr()
        last = first + x.itemsize * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))) - 1
        before = bisect_right(self._starts, first) - 1  # the leaf that begins there or earlier
        return bisect_right(self._starts, last) - 1 > before or (before >= 0 and first < self._ends[before])

    def _local(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that this rank holds of the leaves."""
        local = list(leaves)
        for i in self._distributed:  # without torch.no_grad(), which an interrupt could leave behind
            local[i] = local[i]._local_tensor  # type: ignore[attr-defined]
        return local


class _Tree:
    """The structure of a tree: its containers level by level, each with its type and its keys, and its leaves."""

    def __init__(self, tree: Any) -> None:
        self._containers: list[tuple[int, Any, Any]] = []  # the place of each in the order of levels, type and keys
        nodes, below = [tree], dict[int, range]()
        for place, node in enumerate(nodes):  # which grows meanwhile
            children, keys = _opened(node)
            if children is not None:
                self._containers.append((place, type(node), keys))
                below[place] = range(len(nodes), len(nodes) + len(children))
                nodes += children
        self._places = list(_leaf_places(0, below))

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves of a tree of this structure, in the order in which a tree is flattened; None for another one."""
        nodes: list[Any] = [tree]
        for place, kind, keys in self._containers:
            node = nodes[place]
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
                children, now = _opened(node)
                if children is None or now != keys:
                    return None
                nodes += children
        return [*map(nodes.__getitem__, self._places)]


def _opened(node: Any) -> tuple[list | None, Any]:
    """The children of a container, and what tells it from others of its type; None for a leaf."""
    if type(node) is dict:
        return [*node.values()], [*node]
    if type(node) is list or type(node) is tuple:
        return [*node], len(node)
    if node is None:  # an empty subtree
        return [], None
    children, structure = pytree.tree_flatten(node, is_leaf=lambda x: x is not node)
    return (None, None) if structure.is_leaf() else (children, structure)


def _leaf_places(place: int, below: dict[int, range]) -> Iterator[int]:
    """The places of the leaves under a node, from left to right."""
    if place not in below:
        yield place
    for child in below.get(place, ()):
        yield from _leaf_places(child, below)
