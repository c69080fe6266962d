"""Warn of a gradient that is averaged over the ranks, and that the loss is then computed from.

Such a step differentiates through an inner step of gradient descent:

    g = gradient(g0, w); w1 = sub(w, g); loss = f(w1, x)      g is that of all samples, after `shard_params`

If the inner step is one of the whole batch, as in unrolled optimisation, this is meant. If it is one of a task, as in
MAML, each rank has tasks of its own, and their gradients may not be averaged. The program does not say which.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..ir.graph import Eqn, Graph, Var
from ..ir.marks import differentiated_gradients, reduced_values
from ..ir.source import where
from ..ir.varying import varying


def warn_of_inner_gradients(graph: Graph, axes: tuple[str, ...]) -> None:
    """Warn once if a plain program computes forward from a gradient that is averaged, and differentiates through it."""
    differentiated = differentiated_gradients(graph)
    if not differentiated:
        return
    varies, reduced = varying(graph, axes), reduced_values(graph)
    inner: list[Eqn] = []
    for e in differentiated:
        gradient, value = e.args
        if gradient in varies and value not in varies and e.out not in reduced:
            inner.append(e)
    if inner and _reaches_forward(graph, (e.out for e in inner), varies.keys()):
        first = inner[0]
        warnings.warn(
            f"shard_params: {graph.name} computes its loss from a gradient of {first.args[1]}, which is averaged over "
            f"the ranks.\n"
            f"  at {where(first.source)}\n"
            f"If it is the gradient of a task, as in MAML, take it of zt.pvary(params, x), where x is the batch of the "
            f"task. If that of the whole batch is meant, say so: zt.pmean(gradient).",
            stacklevel=2,
        )


def _reaches_forward(graph: Graph, values: Iterable[Var], varies: Iterable[Var]) -> bool:
    """Whether forward combines tensors that depend on `values`, and do not vary, with tensors that do.

    Scalars do not count: a penalty on the norm of a gradient is added to the loss.
    """
    varying_values, reached = {*varies}, {*values}
    for e in graph.eqns:
        if reached.isdisjoint(e.ins):
            continue
        if varying_values.isdisjoint(e.results):
            reached.update(e.results)
        elif e.region == "forward" and any(v in reached and v.shape for v in e.ins):
            return True
    return False
