"""Let backward recompute values of forward, so that they need not stay in memory until then.

    a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
    ...                              -->    ...
    dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')

A transform chooses the values (see `transforms.remat`), or the user does by a selective checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial

import torch

from ..ir.collectives import rules
from ..ir.dependencies import reachable
from ..ir.graph import Eqn, Graph, Var, rename, variables
from ..ir.liveness import liveness
from ..ir.marks import reduced_values
from ..ir.op_facts import is_random
from ..ir.rewriter import Rewriter
from ..ir.varying import varying

# The tag of operations whose bits may differ from run to run. torch 2.11 does not have it.
_NONDETERMINISTIC = getattr(torch.Tag, "nondeterministic_bitwise", None)


def recompute(graph: Graph, chosen: Set[Var]) -> Graph:
    """Let backward recompute the values in `chosen`, right before it first reads them.

    Args:
        graph: the program.
        chosen: values of forward, each the owner of its storage. Their views are recomputed with them. The copy of a
            chosen value is computed from copies of the other chosen values that it depends on.
    """
    if not chosen:
        return graph
    new = Rewriter(graph)
    root = liveness(graph).root
    position = {e: i for i, e in enumerate(graph.eqns)}
    copies: dict[Var, Var] = {}

    def missing_makers(values: Iterable[Var]) -> list[Eqn]:
        """The equations of forward that must run again for those values that have no copies yet."""
        eqns = []
        for v in values:
            # `chosen` has the owner of each storage; its views are computed again with it.
            if root[v] in chosen and v not in copies and new.makers[v].region == "forward":
                eqns.append(new.makers[v])
        return eqns

    def copy_for(reader: Eqn, v: Var) -> Var:
        """The value that backward reads for a value of forward. Equations that recompute it precede `reader`."""
        eqns = reachable(missing_makers([v]), lambda e: missing_makers(e.ins))
        for e in sorted(eqns, key=lambda e: position[e]):
            for out in e.results:
                if root[out] in chosen:
                    copies[out] = new.fresh(out, ".again")
            # An equation with several results recomputes only the chosen ones.
            outs = tuple(None if out is None else copies.get(out) for out in e.outs)
            repeat = e.with_inputs(
                lambda v: copies.get(v, v), outs=outs, region="backward", repeats=e
            )
            new.insert_before(reader, repeat)
        return copies.get(v, v)

    for e in graph.eqns:
        if e.region == "backward":
            new.replace(e, e.with_inputs(partial(copy_for, e)))
    return new.applied()


def originals(graph: Graph) -> dict[Var, Var]:
    """The values that backward recomputes, each with the original of forward."""
    original_of: dict[Var, Var] = {}
    for e in graph.eqns:
        if e.repeats is None:
            continue
        for copy, v in zip(e.outs, e.repeats.outs):
            if copy is not None and v is not None:
                original_of[copy] = v
    return original_of


def without_repeats(graph: Graph) -> Graph:
    """The program whose backward reads the originals of all values of forward: the inverse of `recompute`."""
    eqns = tuple(e for e in graph.eqns if e.repeats is None)
    return rename(graph.replace(eqns=eqns), originals(graph))


def can_repeat(e: Eqn) -> bool:
    """Whether an equation of forward may run again in backward with the same bits.

    A draw would draw other numbers, and a collective of the step would be sent twice. The bits of some operations, such
    as sums of atomic additions, differ from run to run; PyTorch tags them.
    """
    if e.region != "forward" or is_random(e) or rules(e).remote:
        return False
    return _NONDETERMINISTIC is None or _NONDETERMINISTIC not in getattr(e.op, "tags", ())


def needed_after_backward(graph: Graph) -> set[Var]:
    """The storages that the step returns or its update reads. They stay in memory in any case."""
    root = liveness(graph).root
    needed = {root[v] for v in variables(graph.outputs)}
    for e in graph.eqns:
        if e.region == "update":
            needed.update(root[v] for v in e.ins)
    return needed


def reduced_storages(graph: Graph) -> set[Var]:
    """The storages that means and sums over ranks read. Their results are views until the program is sharded."""
    root = liveness(graph).root
    return {root[v] for v in reduced_values(graph)}


def repeatable(graph: Graph) -> dict[Var, Eqn]:
    """The values that backward may recompute, each the owner of its storage, with the equations that compute them.

    Values that depend on the state alone are left out: parameters and their casts are in memory during backward anyway,
    or are gathered for it.
    """
    root = liveness(graph).root
    over_batch = varying(graph, ("batch",))
    needed = needed_after_backward(graph) | reduced_storages(graph)
    values = {}
    for e in graph.eqns:
        if not can_repeat(e):
            continue
        for v in e.results:
            if root[v] is v and v in over_batch and v not in needed:
                values[v] = e
    return values


def checkpointed(graph: Graph, checkpoint: Mapping[Var, int | None], drops: Set[Var]) -> Graph:
    """Recompute the values that checkpoints drop, including matrix products.

    Random draws are kept. So are values that the update reads, that the step returns, or that are read outside their
    checkpoint: the next checkpoint begins with them.

    Args:
        graph: the program.
        checkpoint: the number of the checkpoint that computes each value, or None.
        drops: the values that the checkpoints do not store.
    """
    root = liveness(graph).root
    needed = needed_after_backward(graph)
    for e in graph.eqns:
        needed.update(_read_elsewhere(e, root, checkpoint))
    chosen = set()
    for e in graph.eqns:
        if e.region != "forward" or is_random(e):
            continue
        for v in e.results:
            if v in drops and root[v] is v and v not in needed:
                chosen.add(v)
    return recompute(graph, chosen)


def _read_elsewhere(
    e: Eqn, root: Mapping[Var, Var], checkpoint: Mapping[Var, int | None]
) -> list[Var]:
    """The storages that an equation of forward reads from another checkpoint than its own."""
    if e.region != "forward":
        return []
    storages = [root[v] for v in e.ins]
    own_checkpoint = checkpoint.get(e.out) if e.results else None
    return [v for v in storages if checkpoint.get(v) != own_checkpoint]
