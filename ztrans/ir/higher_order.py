"""Higher-order operators: equations that call functions, each of them a program.

    y = cond(p, true_fn, false_fn, [x, w])
      def true_fn(x: f32[4], w: f32[4]):
        mul: f32[4] = mul(x, w)
        return mul

A function reads only its arguments. Its program has no collectives, no random draws and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph import Eqn, Graph, substitute
from .nested import instances
from .op_facts import is_matmul
from .operations import compute

hops = torch.ops.higher_order


@dataclass(frozen=True, eq=False)
class Function:
    """A sub-program among the arguments of an equation. It is called with one tensor for each input.

    Attributes:
        graph: the program.
        returns: the type of its return value: a tensor, or the tuple or list of its outputs.
    """

    graph: Graph
    returns: type

    def __call__(self, *values: Any) -> Any:
        env = dict(zip(self.graph.inputs, values, strict=True))
        for e in self.graph.eqns:
            for v, x in zip(e.outs, compute(e, env)):
                if v is not None:
                    env[v] = x
        return self.returned([substitute(out, env.__getitem__) for out in self.graph.outputs])

    def returned(self, outputs: Sequence[Any]) -> Any:
        """The return value of the function for these outputs."""
        return self.returns(outputs) if issubclass(self.returns, (tuple, list)) else outputs[0]


def functions(eqn: Eqn) -> list[Function]:
    """The functions that an equation calls, in the order of its arguments."""
    if isinstance(eqn.op, torch._ops.OpOverload):  # most equations
        return []
    return instances((eqn.args, eqn.kwargs), Function)


def inner_work(eqn: Eqn, count: Callable[[Graph], int]) -> int | None:
    """The total of a count, such as bytes, over all runs of an equation's functions.

    `cond` counts as the larger of its branches. `scan` runs its function once for each row.

    Args:
        eqn: the equation.
        count: the count of one run of a function, from its program.

    Returns: The total, or None if the equation has no functions or they are part of a kernel.
    """
    counts = [count(function.graph) for function in functions(eqn)]
    if not counts or is_matmul(eqn):
        return None
    if eqn.op is hops.cond:
        return max(counts)
    if eqn.op is hops.scan:
        first_input = eqn.args[2][0]
        return sum(counts) * first_input.shape[0]
    return sum(counts)
