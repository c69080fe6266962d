"""Let gradients wait on the host for an update that needs all of them, such as one that is clipped by their norm.

    s = sum(square(g))                           s = sum(square(g)); h = wait(to_host(g))
    ...                                   -->    ...
    m1 = lerp(m, mul(g, scale))                  g' = wait(to_device(h)); m1 = lerp(m, mul(g', scale))

What the update computes from one gradient alone, such as the sum of its squares, is computed before it leaves. A
gradient that was cast to a wider dtype leaves as it was before the cast, which is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.copies import to_device, to_host, wait_for_copy
from ..ir.graph import Eqn, Graph, Var, variables
from ..ir.op_facts import CAST
from ..ir.rewriter import Rewriter

# The gradients that a value of the update depends on; two stand for more.
Gradients = frozenset[Var]


def gradients_on_host(graph: Graph, at_least: int) -> Graph:
    """The program in which values of `at_least` bytes that wait for other gradients do so on the host."""
    new = Rewriter(graph)
    for v, readers in _waiting(graph, new.makers, at_least).items():
        cast = new.makers[v]
        is_widened = cast.op is CAST and cast.ins[0].dtype.itemsize < v.dtype.itemsize
        sent = cast.ins[0] if is_widened and cast.ins[0] in new.makers else v
        maker = new.makers[sent]
        leaves = to_host(sent, new.fresh_name(f"{v.name}.host")).like(maker, "update")
        on_host = wait_for_copy(leaves.out).like(leaves)
        new.insert_after(maker, leaves, on_host)

        returns = to_device(on_host.out, new.fresh_name(f"{v.name}.device"))
        returns = returns.like(readers[0], "update")
        eqns = [returns, wait_for_copy(returns.out).like(returns)]
        if sent is not v:
            widened = new.fresh(v, ".again")
            cast_again = cast.replace(args=(eqns[-1].out,), outs=(widened,), hint=None)
            eqns.append(cast_again.like(returns))
        new.insert_before(readers[0], *eqns)
        new.replace_reads(readers, v, eqns[-1].out)
    return new.applied()


def _waiting(graph: Graph, makers: Mapping[Var, Eqn], at_least: int) -> dict[Var, list[Eqn]]:
    """The values of one gradient that are read together with a value of several, with the equations that do so."""
    returned = set(variables(graph.outputs))
    of_value: dict[Var, Gradients] = {}

    def gradients(v: Var) -> Gradients:
        maker = makers.get(v)
        is_gradient = maker is not None and maker.region == "backward" and v.shape
        return frozenset([v]) if is_gradient else of_value.get(v, frozenset())

    waiting: dict[Var, list[Eqn]] = {}
    for e in graph.eqns:
        if e.region != "update":
            continue
        of_inputs = {v: gradients(v) for v in e.ins}
        of_value.update(dict.fromkeys(e.results, _union(of_inputs.values())))
        if all(len(found) < 2 for found in of_inputs.values()):
            continue
        for v, found in of_inputs.items():
            is_large = v.shape and v.nbytes >= at_least
            if len(found) == 1 and is_large and v not in returned:
                waiting.setdefault(v, []).append(e)
    return waiting


def _union(sets: Iterable[Gradients]) -> Gradients:
    """The union of sets, or two of its members."""
    found: set[Var] = set()
    for each in sets:
        found |= each
        if len(found) > 1:
            break
    return frozenset(sorted(found, key=lambda v: v.name)[:2])
