"""Rewrite a program: insert, replace and drop equations, let others read other values, and reorder them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .dependencies import sorted_by
from .graph import Eqn, Graph, Names, Var, producers, rename


class Rewriter:
    """Edits of a program, which `applied` makes at once, in one pass.

    All edits name equations and values of the program as it was.

    >>> import torch
    >>> from ztrans import ir
    >>> x, y = (Var(name, torch.float32, (2,)) for name in "xy")
    >>> relu = Eqn(torch.ops.aten.relu.default, (x,), (y,))
    >>> new = Rewriter(Graph("f", (x,), (relu,), (y,), 0))
    >>> z = new.fresh(x, ".neg")
    >>> new.insert_before(relu, Eqn(torch.ops.aten.neg.default, (x,), (z,)))
    >>> new.replace_reads([relu], x, z)
    >>> [ir.equation(e) for e in new.applied().eqns]
    ['x.neg: f32[2] = neg(x)', 'y: f32[2] = relu(x.neg)']

    Attributes:
        graph: the program as it was.
        makers: the equation that binds each of its values.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = producers(graph.eqns)
        self._names = Names(v.name for v in (*graph.inputs, *self.makers))
        self._before: dict[Eqn | None, list[Eqn]] = {}
        self._after: dict[Eqn, list[Eqn]] = {}
        self._replacements: dict[Eqn, tuple[Eqn, ...]] = {}
        self._new_reads: dict[Eqn, dict[Var, Var]] = {}
        self._aliases: dict[Var, Any] = {}

    def fresh_name(self, name: str) -> str:
        """This name, or if the program has it already, the name and a number."""
        return self._names.fresh(name)

    def fresh(self, v: Var, suffix: str = "", **changes: Any) -> Var:
        """A new value like `v`, with other fields. Its name is that of `v` with a suffix."""
        return dataclasses.replace(v, name=self.fresh_name(f"{v.name}{suffix}"), **changes)

    def insert_before(self, eqn: Eqn | None, *new: Eqn) -> None:
        """Insert equations before another one, or at the end of the program for None."""
        self._before.setdefault(eqn, []).extend(new)

    def insert_after(self, eqn: Eqn, *new: Eqn) -> None:
        """Insert equations after another one."""
        self._after.setdefault(eqn, []).extend(new)

    def replace(self, eqn: Eqn, *new: Eqn) -> None:
        """Write other equations in place of one."""
        self._replacements[eqn] = new

    def drop(self, eqn: Eqn) -> None:
        """Leave an equation out."""
        self._replacements[eqn] = ()

    def replace_reads(self, readers: Iterable[Eqn], old: Var, new: Var) -> None:
        """Let these equations read `new` instead of `old`."""
        for eqn in readers:
            self._new_reads.setdefault(eqn, {})[old] = new

    def alias(self, old: Var, new: Any) -> None:
        """Let the whole program, inserted equations and outputs too, read `new` instead of `old`."""
        self._aliases[old] = new

    def applied(self) -> Graph:
        """The program with the edits. Its inputs stay."""
        eqns: list[Eqn] = []
        for e in self.graph.eqns:
            eqns += self._before.get(e, ())
            for written in self._replacements.get(e, (e,)):
                eqns.append(self._with_new_reads(written, e))
            eqns += self._after.get(e, ())
        eqns += self._before.get(None, ())
        graph = self.graph.replace(eqns=tuple(eqns))
        return rename(graph, self._aliases) if self._aliases else graph

    def _with_new_reads(self, written: Eqn, e: Eqn) -> Eqn:
        new_reads = self._new_reads.get(e)
        if new_reads is None:
            return written
        return written.with_inputs(lambda v: new_reads.get(v, v))


def prerequisites(graph: Graph) -> dict[Eqn, list[Eqn]]:
    """For each equation, those that compute what it reads."""
    makers = producers(graph.eqns)
    return {e: [makers[v] for v in e.ins if v in makers] for e in graph.eqns}


def reordered(
    graph: Graph, key: Callable[[Eqn], Any], needs: Mapping[Eqn, Sequence[Eqn]] | None = None
) -> Graph:
    """The program with its equations sorted by `key`, as far as each can follow those that it needs.

    Args:
        key: what to sort by. Equations with equal keys keep their order.
        needs: for each equation, those that must run before it; by default, those that compute what it reads.

    >>> import torch
    >>> x, y, z = (Var(name, torch.float32, (2,)) for name in "xyz")
    >>> eqns = tuple(Eqn(torch.ops.aten.neg.default, (x,), (out,)) for out in (y, z))
    >>> graph = reordered(Graph("f", (x,), eqns, (y, z), 0), lambda e: e.out is y)
    >>> [e.out.name for e in graph.eqns]
    ['z', 'y']
    """
    position = {e: i for i, e in enumerate(graph.eqns)}
    order = sorted_by(lambda e: (key(e), position[e]), needs or prerequisites(graph))
    return graph.replace(eqns=tuple(order))
