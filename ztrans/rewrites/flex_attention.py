"""Equations of flex_attention and its backward, whose functions run inside a kernel.

A kernel never holds the scores [batch, head, query, key]. Without a kernel attention is dense: it holds all scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..ir.graph import Eqn, Graph, Var, variables

hops = torch.ops.higher_order
# The number of tensors of scores that dense attention holds at its peak.
_SCORES: Mapping[object, int] = {hops.flex_attention: 3, hops.flex_attention_backward: 7}


def is_attention(eqn: Eqn) -> bool:
    """Whether an equation is flex_attention or its backward."""
    return eqn.op in _SCORES


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether GPUs have a kernel of attention for queries of this dtype. CPUs have none."""
    return dtype != torch.float64


def is_dense(options: Any) -> bool:
    """Whether an argument has the options of dense attention."""
    return isinstance(options, Mapping) and options.get("BACKEND") == "DENSE"


def with_kernels_chosen(graph: Graph, on_cpus: bool) -> Graph:
    """Choose a kernel or dense attention for a traced program. Its equations bind only results that are read."""
    values_read = {v for e in graph.eqns for v in e.ins} | set(variables(graph.outputs))
    eqns = []
    for e in graph.eqns:
        if is_attention(e):
            e = e.replace(outs=tuple(out if out in values_read else None for out in e.outs))
            if on_cpus or not has_kernel(e.args[0].dtype):
                e = e.replace(args=tuple(map(_dense, e.args)))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def _dense(argument: Any) -> Any:
    return {**argument, "BACKEND": "DENSE"} if isinstance(argument, Mapping) else argument


def score_bytes(eqn: Eqn, shape: Callable[[Var], tuple[int, ...]]) -> int:
    """The bytes of scores that an equation holds while it runs: 0 unless it is dense attention.

    Scores are fp32, or fp64 for queries in fp64.
    """
    if not is_attention(eqn) or not any(map(is_dense, eqn.args)):
        return 0
    query, key = eqn.args[:2]
    elements = math.prod(shape(query)[:3]) * shape(key)[2]
    return _SCORES[eqn.op] * elements * max(4, query.dtype.itemsize)
