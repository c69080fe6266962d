"""Work: what the functions take that an equation calls, in operations, bytes or launches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..graph import Eqn, Graph, Var
from ..operations import is_matmul
from .functions import functions

hops = torch.ops.higher_order
# The tensors of scores at the peak of dense attention.
_SCORES: dict[object, int] = {hops.flex_attention: 3, hops.flex_attention_backward: 7}


def inner_work(eqn: Eqn, count: Callable[[Graph], int]) -> int | None:
    """What the functions of an equation take in all, by what a run of each takes; None if they are part of a kernel.

    `cond` runs the longer of its branches. `scan` runs its function once for each row. A `while_loop` is counted as
    one turn, because the number of its turns depends on values.
    """
    taken = [count(function.graph) for function in functions(eqn)]
    if not taken or is_matmul(eqn):
        return None
    if eqn.op is hops.cond:
        return max(taken)
    return sum(taken) * (eqn.args[2][0].shape[0] if eqn.op is hops.scan else 1)


def scores(eqn: Eqn, shape: Callable[[Var], tuple[int, ...]]) -> int:
    """The bytes of the scores [batch, head, query, key] that flex_attention holds while it runs; 0 for other equations.

    Without a kernel of its own it computes all of them, in fp32, or for queries of f64 in f64.
    """
    if eqn.op not in _SCORES:
        return 0
    query, key = eqn.args[:2]
    return _SCORES[eqn.op] * math.prod(shape(query)[:3]) * shape(key)[2] * max(4, query.dtype.itemsize)
