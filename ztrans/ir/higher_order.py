"""Higher-order operators: equations that call functions, which are programs themselves.

    y = cond(p, true_fn, false_fn, [x, w])
      def true_fn(x: f32[4], w: f32[4]):
        mul: f32[4] = mul(x, w)
        return mul

A function reads only its arguments. Its program has no collectives, no random draws and no state. `flex_attention`
calls functions inside a kernel, which never holds the scores [batch, head, query, key]; without a kernel it is dense,
and computes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph import Eqn, Graph, Var, substitute, variables
from .nested import instances
from .op_facts import is_matmul
from .operations import compute

hops = torch.ops.higher_order
# How many tensors of scores dense attention holds at its peak.
_SCORES: Mapping[object, int] = {hops.flex_attention: 3, hops.flex_attention_backward: 7}


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
            for v, x in zip(e.outs, compute(e, env)):
                if v is not None:
                    env[v] = x
        return self.returned([substitute(out, env.__getitem__) for out in self.graph.outputs])

    def returned(self, outputs: Sequence[Any]) -> Any:
        """What the function returns, from its outputs."""
        return self.returns(outputs) if issubclass(self.returns, (tuple, list)) else outputs[0]


def functions(eqn: Eqn) -> list[Function]:
    """The functions that an equation calls, in the order in which they stand among its arguments."""
    if isinstance(eqn.op, torch._ops.OpOverload):  # most equations
        return []
    return instances((eqn.args, eqn.kwargs), Function)


def inner_work(eqn: Eqn, count: Callable[[Graph], int]) -> int | None:
    """What the functions of an equation take in all, such as bytes, if `count` says what one run of each takes.

    `cond` runs the longer of its branches. `scan` runs its function once for each row.
    None if the functions are part of a kernel.
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


def is_attention(eqn: Eqn) -> bool:
    """Whether an equation is flex_attention, or its backward."""
    return eqn.op in _SCORES


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether kernels on a GPU compute attention to queries of this dtype. None do on a CPU."""
    return dtype != torch.float64


def is_dense(options: Any) -> bool:
    """Whether an argument is the options of attention that computes all scores."""
    return isinstance(options, Mapping) and options.get("BACKEND") == "DENSE"


def with_chosen_backend(graph: Graph, on_cpus: bool) -> Graph:
    """Choose a kernel or dense attention for a traced program, and let it bind only the results that are read."""
    needed = {v for e in graph.eqns for v in e.ins} | set(variables(graph.outputs))
    eqns = []
    for e in graph.eqns:
        if is_attention(e):
            e = e.replace(outs=tuple(out if out in needed else None for out in e.outs))
            if on_cpus or not has_kernel(e.args[0].dtype):
                e = e.replace(args=tuple(map(_dense, e.args)))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def _dense(argument: Any) -> Any:
    return {**argument, "BACKEND": "DENSE"} if isinstance(argument, Mapping) else argument


def score_bytes(eqn: Eqn, shape: Callable[[Var], tuple[int, ...]]) -> int:
    """The bytes of the scores that an equation holds while it runs; 0 if it is not dense attention.

    They are computed in fp32, or for queries of f64 in f64.
    """
    if not is_attention(eqn) or not any(map(is_dense, eqn.args)):
        return 0
    query, key = eqn.args[:2]
    elements = math.prod(shape(query)[:3]) * shape(key)[2]
    return _SCORES[eqn.op] * elements * max(4, query.dtype.itemsize)
