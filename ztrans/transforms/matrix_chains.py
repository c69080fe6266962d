"""Matrix chains: matrix products in an update that depend on each other and sum over the sharded dim.

Muon's Newton-Schulz iteration is such a chain. On parts, each product that sums over the sharded dim would need a
message: ten for each matrix. In bf16 each sum over ranks would also add a rounding error, which later products amplify.
So if a chain has several such products, its sources are gathered once, and it runs on whole values on every rank, with
the same bits as in one process.

    x = cast(g, bf16); n = norm(x); y = div(x, n); a = mm(y, t(y)); b = mm(a, a); ...
      -->   x_full = wait(all_gather(x)); n = norm(x_full); y = ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..ir.graph import Eqn, Graph, Layout, Split, Var, producers
from ..ir.marks import GRADIENT
from ..ir.op_facts import is_matmul, is_random
from ..ir.relations import reachable
from ..ir.user_collectives import is_users

LayoutOf = Callable[[Var], Layout]
aten = torch.ops.aten
_PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)


def matrix_chains(graph: Graph, layout: LayoutOf) -> tuple[frozenset[Eqn], tuple[str, ...]]:
    """The equations of a plain program that belong to such chains, and the names of the leaves that they update.

    `layout` gives the layout that each value has if every equation of the update runs on parts.
    """
    update = [e for e in graph.eqns if e.region == "update"]
    chained = _chained(update, layout)
    sources = _sources(
        [v for e in update if e in chained for v in e.ins], producers(update), layout
    )
    needed: set[Var] = set()
    whole: set[Eqn] = set()
    for e in reversed(_following(update, sources, layout)):
        if _contracts(e, layout) or any(out in needed for out in e.outs):
            whole.add(e)
            needed.update(e.ins)
    return frozenset(whole), _leaves(graph, sources)


def _chained(update: Iterable[Eqn], layout: LayoutOf) -> set[Eqn]:
    """The products that sum over the sharded dim, and depend on another such product or have one depend on them."""
    chained: set[Eqn] = set()
    depends_on: dict[Var, frozenset[Eqn]] = {}
    for e in update:
        before: frozenset[Eqn] = frozenset().union(*(depends_on.get(v, ()) for v in e.ins))
        if _contracts(e, layout):
            chained |= {e, *before} if before else set()
            before = before | {e}
        if before:
            depends_on.update((out, before) for out in e.results)
    return chained


def _contracts(e: Eqn, layout: LayoutOf) -> bool:
    """Whether an equation is a product that sums over the sharded dim of one of its factors."""
    is_product = getattr(e.op, "overloadpacket", None) in _PRODUCTS
    factors = [v for v in e.args if isinstance(v, Var)][-2:] if is_product else []
    summed = ((p, len(v.shape) + dim) for v, dim in zip(factors, (-1, -2)) for p in layout(v))
    return any(isinstance(p, Split) and p.dim == dim for p, dim in summed)


def _sources(values: Iterable[Var], makers: dict[Var, Eqn], layout: LayoutOf) -> list[Var]:
    """The values to gather so that every rank can compute `values` whole: the first factors of their chains."""
    stack = [v for v in values if layout(v)]
    sources, seen = dict[Var, None](), set(stack)
    while stack:
        line = _line(stack.pop(), makers, layout)
        e = makers.get(line[-1])
        if e is not None and is_matmul(e):
            stack += [v for v in dict.fromkeys(e.ins) if layout(v) and v not in seen]
            seen.update(e.ins)
        else:  # each value of the line gives all that follow it: gather one with the fewest bytes
            sources[min(reversed(line), key=lambda v: v.dtype.itemsize)] = None
    return list(sources)


def _line(v: Var, makers: dict[Var, Eqn], layout: LayoutOf) -> list[Var]:
    """`v` and the values of its size that it is computed from, each from the next, back to a matrix product."""
    line = [v]
    while (e := makers.get(line[-1])) is not None and _runs_anywhere(e) and not is_matmul(e):
        parts = {x for x in e.ins if layout(x)}
        if len(parts) != 1 or (x := parts.pop()).numel != v.numel:
            break
        line.append(x)
    return line


def _following(update: Iterable[Eqn], sources: Iterable[Var], layout: LayoutOf) -> list[Eqn]:
    """The equations that can run on whole values once `sources` are gathered, and read values computed from these."""
    inside, following = set(sources), []
    for e in update:
        reads = [v for v in e.ins if v in inside]
        if reads and _runs_anywhere(e) and all(v in inside or not layout(v) for v in e.ins):
            following.append(e)
            inside.update(e.results)
    return following


def _runs_anywhere(e: Eqn) -> bool:
    """Whether every rank can run the equation on whole values, with the same result."""
    return isinstance(e.op, torch._ops.OpOverload) and not is_random(e.op) and not is_users(e)


def _leaves(graph: Graph, sources: Iterable[Var]) -> tuple[str, ...]:
    """The names of the leaves from whose gradients `sources` are computed; the name of a source that has none."""
    makers, names = producers(graph.eqns), set[str]()
    leaf_of = {e.out: e.args[1].name for e in graph.eqns if e.op is GRADIENT}

    def alike(v: Var) -> list[Var]:
        """The values of the shape of `v`, up to the order of its dims, from which the update computes it."""
        e = makers.get(v)
        if e is None or v in leaf_of or e.region != "update":
            return []
        return [x for x in e.ins if sorted(x.shape) == sorted(v.shape)]

    for source in sources:
        names |= {leaf_of[v] for v in reachable([source], alike) if v in leaf_of} or {source.name}
    order = {v.name: k for k, v in enumerate(graph.inputs)}
    return tuple(sorted(names, key=lambda name: (order.get(name, len(order)), name)))


def note(leaves: tuple[str, ...]) -> str:
    """The note of a program with such chains, which update `leaves`."""
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return (
        f"the updates of {', '.join(leaves[:3])}{more} multiply matrices over the sharded dim more than once: "
        f"their factors are gathered once, and they run whole on every rank"
    )
