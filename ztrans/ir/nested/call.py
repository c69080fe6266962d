"""Call: run a higher-order operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from .launch import Launch


def call_operator(
    op: HigherOrderOperator, wanted: Sequence[bool], *args: Any, **kwargs: Any
) -> list[Any]:
    """Call a higher-order operator, and return the leaves of its result, which are the results of its equation.

    `wanted` says of each of them whether the equation binds it. The backward of attention computes the gradients of the
    tensors that `score_mod` captures if these require some. In a program no value does.
    """
    if args and isinstance(args[0], Launch):
        return args[0](*args[1:])
    if op is torch.ops.higher_order.flex_attention_backward:
        *before, captured, of_mask = args
        args = (
            *before,
            tuple(x.detach().requires_grad_(wants) for x, wants in zip(captured, wanted[3:])),
            of_mask,
        )
    return pytree.tree_leaves(op(*args, **kwargs))
