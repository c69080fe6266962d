"""Empty subtrees: None in a state has no leaf, as in JAX.

PyTorch's pytrees count None as a leaf. `none_as_empty` puts a node without children in its place, which unflattens to
None again. So a state passes `none_as_empty` before it is flattened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Empty:
    """A node without children, in the place of None."""


def none_as_empty(tree: Any) -> Any:
    """A tree in which every None is an empty subtree.

    >>> leaves, structure = pytree.tree_flatten(none_as_empty({"weight": 1, "bias": None}))
    >>> leaves, pytree.tree_unflatten(leaves, structure)
    ([1], {'weight': 1, 'bias': None})
    """
    leaves, structure = pytree.tree_flatten(tree)
    if all(x is not None for x in leaves):
        return tree
    return pytree.tree_unflatten([Empty() if x is None else x for x in leaves], structure)


def state_leaves(state: Any) -> list:
    """The leaves of a state, in the order of its tree.

    >>> state_leaves({"weight": 1, "bias": None})
    [1]
    """
    return pytree.tree_leaves(none_as_empty(state))


pytree.register_pytree_node(
    Empty,
    lambda _: ([], None),
    lambda *_: None,
    serialized_type_name="ztrans.Empty",
    flatten_with_keys_fn=lambda _: ([], None),
)
