"""Work: what the functions take that an equation calls, in operations, bytes or launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..graph import Eqn, Graph
from ..op_facts import is_matmul
from .functions import functions

hops = torch.ops.higher_order


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
