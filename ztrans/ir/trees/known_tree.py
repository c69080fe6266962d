"""Known trees: find the leaves of a tree whose structure is known, faster than PyTorch flattens one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree


class KnownTree:
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
    own = id(node)  # `tree_flatten` leaves a reference cycle behind, which must not hold the node
    children, structure = pytree.tree_flatten(node, is_leaf=lambda x: id(x) != own)
    return (None, None) if structure.is_leaf() else (children, structure)


def _leaf_places(place: int, below: dict[int, range]) -> Iterator[int]:
    """The places of the leaves under a node, from left to right."""
    if place not in below:
        yield place
    for child in below.get(place, ()):
        yield from _leaf_places(child, below)
