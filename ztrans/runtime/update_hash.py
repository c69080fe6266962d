"""Hash what the new state depends on, for ranks to compare. The hash is the same for every size of the batch."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.collectives import role
from ..ir.graph import Eqn, Graph, Var
from ..ir.higher_order import Function
from ..ir.nested import instances
from ..ir.op_facts import is_random
from ..ir.printer import one_line
from ..ir.structure import elements
from ..ir.varying import replicated_equations

# Roles of collectives whose members may have the size of the batch.
_BATCH_SIZED = ("output", "pmean")


def update_hash(graph: Graph) -> str:
    """A hash of the update of the state, with its constants. If it differed between ranks, their states would diverge.

    Values are numbered in order, because a batch of another size may give them other names.
    """
    digest = hashlib.sha256()
    batch_sized = _batch_sized(graph)
    replicated = replicated_equations(graph)
    # Without reductions of gradients, the new state depends on all of forward, which may differ along the step's own
    # axes. Then only the update is hashed.
    reduces_grads = any(role(e) == "grad" for e in graph.eqns)
    numbers: dict[Var, Any] = {v: v.name for v in graph.inputs}
    for e in graph.eqns:
        if e not in replicated or e.provenance is not None:
            continue
        if e.region != "update" and not reduces_grads:
            continue
        if any(out in batch_sized for out in e.outs):
            continue

        leaves, tree = pytree.tree_flatten((e.args, dict(e.kwargs)))
        literals = [_literal(leaf, numbers) for leaf in leaves]
        digest.update(repr((str(e.op), tree, literals)).encode())
        digest.update(_constants(e))
    return digest.hexdigest()[:16]


def _batch_sized(graph: Graph) -> set[Var]:
    """The values whose shapes or constants may depend on the size of the batch."""
    sized = set(graph.batch)
    for e in graph.eqns:
        if e.provenance is not None:
            is_sized = e.provenance.role in _BATCH_SIZED
        else:
            is_sized = is_random(e) or any(v in sized for v in e.ins)
        if is_sized:
            sized.update(e.results)
    return sized


def _literal(x: Any, numbers: dict[Var, Any]) -> Any:
    """A value as its number, a tensor as its shape, a literal as text."""
    if isinstance(x, Var):
        return numbers.setdefault(x, len(numbers))
    if isinstance(x, torch.Tensor):
        return tuple(x.shape)
    if isinstance(x, Function):
        return one_line(x)
    return repr(x)


def _constants(e: Eqn) -> bytes:
    """The contents of the constant tensors of an equation, such as torch.tensor(...) in the step."""
    return b"".join(elements(x) for x in instances((e.args, e.kwargs), torch.Tensor))
