"""Functions: the sub-programs of an equation, which a higher-order operator calls.

    y = cond(p, true_fn, false_fn, [x, w])
      def true_fn(x: f32[4], w: f32[4]):
        mul: f32[4] = mul(x, w)
        return mul

A function reads only its arguments. Its program has no collectives, no random draws and no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Eqn, Graph, substitute
from ..operations import compute
from ..relations import instances


@dataclass(frozen=True, eq=False)
class Function:
    """A sub-program among the arguments of an equation. It is called with one tensor for each input.

    Attributes:
        graph: the program.
        returns: the type of what it returns: a tensor, or the tuple or list of its outputs.
    """

    graph: Graph
    returns: type

    def __call__(self, *values: Any) -> Any:
        env = dict(zip(self.graph.inputs, values, strict=True))
        for e in self.graph.eqns:
            env.update((v, x) for v, x in zip(e.outs, compute(e, env)) if v is not None)
        return self.returned([substitute(out, env.__getitem__) for out in self.graph.outputs])

    def returned(self, outputs: Sequence[Any]) -> Any:
        """What the function returns, from its outputs."""
        return self.returns(outputs) if issubclass(self.returns, (tuple, list)) else outputs[0]


def functions(eqn: Eqn) -> list[Function]:
    """The functions that an equation calls, in the order in which they stand among its arguments."""
    if isinstance(eqn.op, torch._ops.OpOverload):  # most equations
        return []
    return list(instances((eqn.args, eqn.kwargs), Function))
