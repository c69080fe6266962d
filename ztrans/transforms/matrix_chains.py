"""Matrix chains: products of matrices, one of another, that an update contracts over the dim that is cut.

Muon's Newton-Schulz iteration is one. On parts each of its products is a message, ten a matrix; and what is summed over
ranks in bf16 is rounded once more, which the next products make larger. Where a chain contracts over the cut dim more
than once, what it multiplies is gathered once, and the chain runs whole on every rank. That is exact.

    x = cast(g, bf16); n = norm(x); y = div(x, n); a = mm(y, t(y)); b = mm(a, a); ...
      -->   x_full = wait(all_gather(x)); n = norm(x_full); y = ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..ir.collectives import GRADIENT
from ..ir.graph import Eqn, Graph, Layout, Split, Var, is_random, producers
from ..ir.operations import is_matmul
from ..ir.user_collectives import is_users

LayoutOf = Callable[[Var], Layout]
aten = torch.ops.aten
_FACTORS = {aten.mm: slice(0, 2), aten.bmm: slice(0, 2), aten.addmm: slice(1, 3), aten.baddbmm: slice(1, 3)}


def matrix_chains(graph: Graph, layout: LayoutOf) -> tuple[frozenset[Eqn], tuple[str, ...]]:
    """The equations of a plain program that belong to such chains, and the leaves whose updates they are.

    `layout` says how each value of the program lies where every equation of the update runs on parts.
    """
    update = [e for e in graph.eqns if e.region == "update"]
    chained = _chained(update, layout)
    sources = _sources([v for e in update if e in chained for v in e.ins], producers(update), layout)
    needed: set[Var] = set()
    whole: set[Eqn] = set()
    for e in reversed(_following(update, sources, layout)):
        if _contracts(e, layout) or any(out in needed for out in e.outs):
            whole.add(e)
            needed.update(e.ins)
    return frozenset(whole), _leaves(graph, sources)


def _chained(update: Iterable[Eqn], layout: LayoutOf) -> set[Eqn]:
    """The products that contract over the cut dim, if another one is made of them, or they of another one."""
    chained: set[Eqn] = set()
    made_of: dict[Var, frozenset[Eqn]] = {}
    for e in update:
        before = frozenset().union(*(made_of.get(v, ()) for v in e.ins))
        if _contracts(e, layout):
            chained |= {e, *before} if before else set()
            before = before | {e}
        if before:
            made_of.update((out, before) for out in e.outs if out is not None)
    return chained


def _contracts(e: Eqn, layout: LayoutOf) -> bool:
    """Whether an equation is a product that sums over the dim that is cut, of its first factor or its second."""
    factors = e.args[_FACTORS[e.op.overloadpacket]] if is_matmul(e) and e.op.overloadpacket in _FACTORS else ()
    lies = ((p, len(v.shape) + dim) for v, dim in zip(factors, (-1, -2)) for p in layout(v))
    return any(isinstance(p, Split) and p.dim == dim for p, dim in lies)


def _sources(values: Iterable[Var], made: dict[Var, Eqn], layout: LayoutOf) -> list[Var]:
    """What to gather for `values`: what they are made of, through products and value by value, in the fewest bytes."""
    stack = [v for v in values if layout(v)]
    sources, seen = dict[Var, None](), set(stack)
    while stack:
        line = [stack.pop()]
        while (e := made.get(line[-1])) is not None and _runs_anywhere(e) and not is_matmul(e):
            parts = {v for v in e.ins if layout(v)}
            if len(parts) != 1 or (v := parts.pop()).numel != line[0].numel:
                break
            line.append(v)
        if e is not None and is_matmul(e):
            stack += [v for v in dict.fromkeys(e.ins) if layout(v) and v not in seen]
            seen.update(e.ins)
        else:
            sources[min(reversed(line), key=lambda v: v.dtype.itemsize)] = None
    return list(sources)


def _following(update: Iterable[Eqn], sources: Iterable[Var], layout: LayoutOf) -> list[Eqn]:
    """The equations that read of parts only what follows from `sources`."""
    inside, following = set(sources), []
    for e in update:
        reads = [v for v in e.ins if v in inside]
        if reads and _runs_anywhere(e) and all(v in inside or not layout(v) for v in e.ins):
            following.append(e)
            inside.update(out for out in e.outs if out is not None)
    return following


def _runs_anywhere(e: Eqn) -> bool:
    """Whether every rank may run the equation on whole values, and all get the same."""
    return isinstance(e.op, torch._ops.OpOverload) and not is_random(e.op) and not is_users(e)


def _leaves(graph: Graph, sources: Iterable[Var]) -> tuple[str, ...]:
    """The names of the leaves whose gradients `sources` are made of; of the sources themselves, if there are none."""
    made, names = producers(graph.eqns), set[str]()
    for source in sources:
        leaves, stack, seen = set[str](), [source], {source}
        while stack:
            v = stack.pop()
            e = made.get(v)
            if e is not None and e.op is GRADIENT:
                leaves.add(e.args[1].name)
            elif e is not None and e.region == "update":
                alike = {x for x in e.ins if sorted(x.shape) == sorted(v.shape)} - seen
                stack += alike
                seen |= alike
        names |= leaves or {source.name}
    order = {v.name: k for k, v in enumerate(graph.inputs)}
    return tuple(sorted(names, key=lambda name: (order.get(name, len(order)), name)))


def note(leaves: tuple[str, ...]) -> str:
    """What a program says of the chains in it."""
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return (
        f"the updates of {', '.join(leaves[:3])}{more} multiply matrices over the dim that is cut, more than once: "
        f"what they multiply is gathered once, and they run whole on every rank"
    )
