"""Rewrite a program: insert, replace, drop and reorder equations, and let them read other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..ir.dependencies import sorted_by
from ..ir.graph import Eqn, Graph, Names, Var, producers, rename


class Rewriter:
    """A list of edits of a program, which `applied` makes in one pass.

    All edits refer to equations and values of the original program.

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
        graph: the original program.
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
        """A name that the program does not have: `name`, with a number if necessary."""
        return self._names.fresh(name)

    def fresh(self, v: Var, suffix: str = "", **changes: Any) -> Var:
        """A new value like `v`, named after `v` with a suffix, and with other changes."""
        return dataclasses.replace(v, name=self.fresh_name(f"{v.name}{suffix}"), **changes)

    def insert_before(self, eqn: Eqn | None, *new: Eqn) -> None:
        """Insert equations before another one. With None they are inserted at the end of the program."""
        self._before.setdefault(eqn, []).extend(new)

    def insert_after(self, eqn: Eqn, *new: Eqn) -> None:
        """Insert equations after another one."""
        self._after.setdefault(eqn, []).extend(new)

    def replace(self, eqn: Eqn, *new: Eqn) -> None:
        """Replace an equation by others."""
        self._replacements[eqn] = new

    def drop(self, eqn: Eqn) -> None:
        """Remove an equation."""
        self._replacements[eqn] = ()

    def replace_reads(self, readers: Iterable[Eqn], old: Var, new: Var) -> None:
        """Let these equations read `new` instead of `old`."""
        for eqn in readers:
            self._new_reads.setdefault(eqn, {})[old] = new

    def alias(self, old: Var, new: Any) -> None:
        """Let the whole program read `new` instead of `old`, including inserted equations and outputs."""
        self._aliases[old] = new

    def applied(self) -> Graph:
        """The program with all edits, and with its old inputs."""
        eqns: list[Eqn] = []
        for e in self.graph.eqns:
            eqns += self._before.get(e, ())
            for replacement in self._replacements.get(e, (e,)):
                eqns.append(self._with_new_reads(replacement, e))
            eqns += self._after.get(e, ())
        eqns += self._before.get(None, ())
        graph = self.graph.replace(eqns=tuple(eqns))
        return rename(graph, self._aliases) if self._aliases else graph

    def _with_new_reads(self, replacement: Eqn, e: Eqn) -> Eqn:
        """The equation that stands where `e` was, with the new reads of `e`."""
        new_reads = self._new_reads.get(e)
        if new_reads is None:
            return replacement
        return replacement.with_inputs(lambda v: new_reads.get(v, v))


def prerequisites(graph: Graph) -> dict[Eqn, list[Eqn]]:
    """For each equation, the equations that compute its arguments."""
    makers = producers(graph.eqns)
    return {e: [makers[v] for v in e.ins if v in makers] for e in graph.eqns}


def reordered(
    graph: Graph, key: Callable[[Eqn], Any], needs: Mapping[Eqn, Sequence[Eqn]] | None = None
) -> Graph:
    """The program with its equations sorted by `key`, as far as each can follow the equations that it needs.

    Args:
        graph: the program.
        key: the sort key. Equations with equal keys keep their order.
        needs: for each equation, the equations that must run before it; by default its `prerequisites`.

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
