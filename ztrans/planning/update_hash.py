"""update_hash: a hash of the update of the state, which ranks compare. It is the same for every size of the batch."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.collectives import role
from ..ir.graph import Eqn, Graph, Var
from ..ir.higher_order import Function
from ..ir.op_facts import is_random
from ..ir.printer import one_line
from ..ir.relations import instances
from ..ir.structure import elements
from ..ir.varying import replicated_equations

# Roles of collectives whose members may have the shape of the batch.
_BATCH_SIZED = ("output", "pmean")


def update_hash(graph: Graph) -> str:
    """A hash of the update of the state, with its constants. It must be equal on all ranks, or states would diverge.

    Values are numbered in order, because a batch of another size may give them other names.
    """
    digest = hashlib.sha256()
    sized = _batch_sized(graph)
    numbers: dict[Var, Any] = {v: v.name for v in graph.inputs}
    of_state = replicated_equations(graph)
    reduces = any(role(e) == "grad" for e in graph.eqns)
    for e in graph.eqns:
        if e not in of_state or e.provenance is not None:
            continue
        # Without reductions of gradients all of forward is of the state. It may differ along the step's own axes.
        if (reduces or e.region == "update") and not any(out in sized for out in e.outs):
            leaves, tree = pytree.tree_flatten((e.args, dict(e.kwargs)))
            digest.update(repr((str(e.op), tree, [_literal(x, numbers) for x in leaves])).encode())
            digest.update(_constants(e))
    return digest.hexdigest()[:16]


def _batch_sized(graph: Graph) -> set[Var]:
    """The values whose shapes or constants may depend on the size of the batch."""
    sized = set(graph.batch)
    for e in graph.eqns:
        depends = is_random(e) or any(v in sized for v in e.ins)
        if e.provenance is not None:
            depends = e.provenance.role in _BATCH_SIZED
        if depends:
            sized.update(e.results)
    return sized


def _literal(x: Any, numbers: dict[Var, Any]) -> Any:
    """A value as its number, a tensor as its shape, a literal as text."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape)
    if isinstance(x, Function):
        return one_line(x)
    return numbers.setdefault(x, len(numbers)) if isinstance(x, Var) else repr(x)


def _constants(e: Eqn) -> bytes:
    """The contents of the constant tensors of an equation, such as those of torch.tensor(...) in the step."""
    return b"".join(map(elements, instances((e.args, e.kwargs), torch.Tensor)))
