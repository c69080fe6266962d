"""Attention: which equations are flex_attention or its backward, and whether they compute all scores.

    out, lse, _ = flex_attention(q, k, v, score_mod, mask, 0.25, {'BACKEND': 'DENSE', ...})

A kernel never holds the scores [batch, head, query, key]. PyTorch has kernels for forward and backward on GPUs only,
and none for f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..graph import Eqn, Graph, Var, variables

hops = torch.ops.higher_order
# The tensors of scores at the peak of dense attention.
_SCORES: dict[object, int] = {hops.flex_attention: 3, hops.flex_attention_backward: 7}


def is_attention(eqn: Eqn) -> bool:
    """Whether an equation is flex_attention, or its backward."""
    return eqn.op in _SCORES


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether kernels on a GPU compute attention to queries of this dtype."""
    return dtype != torch.float64


def is_dense(options: Any) -> bool:
    """Whether an argument is the options of attention that computes all scores."""
    return isinstance(options, Mapping) and options.get("BACKEND") == "DENSE"


def settled(graph: Graph, on_cpus: bool) -> Graph:
    """Let the attention of a traced program bind only the results that are read.

    Where it has no kernel, it computes all scores.
    """
    read = set(variables([e.ins for e in graph.eqns])) | set(variables(graph.outputs))

    def dense(arg: Any) -> Any:
        return {**arg, "BACKEND": "DENSE"} if isinstance(arg, Mapping) else arg

    def settle(e: Eqn) -> Eqn:
        outs = tuple(out if out in read else None for out in e.outs)
        by_kernel = not on_cpus and has_kernel(e.args[0].dtype)
        return e.replace(args=e.args if by_kernel else tuple(map(dense, e.args)), outs=outs)

    return graph.replace(eqns=tuple(settle(e) if is_attention(e) else e for e in graph.eqns))


def scores(eqn: Eqn, shape: Callable[[Var], tuple[int, ...]]) -> int:
    """The bytes of the scores that an equation holds while it runs; 0 if it is not dense attention.

    They are computed in fp32, or for queries of f64 in f64.
    """
    if not is_attention(eqn) or not any(map(is_dense, eqn.args)):
        return 0
    query, key = eqn.args[:2]
    return (
        _SCORES[eqn.op] * math.prod(shape(query)[:3]) * shape(key)[2] * max(4, query.dtype.itemsize)
    )
