"""Insert equations into a program, and let others read new values, in one pass over the program."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.graph import Eqn, Graph, Var


class Edits:
    """Changes of a program, which `applied` makes at once.

    >>> import torch
    >>> from ztrans import ir
    >>> x, y, z = (Var(name, torch.float32, (2,)) for name in "xyz")
    >>> relu = Eqn(torch.ops.aten.relu.default, (x,), (y,))
    >>> edits = Edits(Graph("f", (x,), (relu,), (y,), 0))
    >>> edits.insert_before(relu, Eqn(torch.ops.aten.neg.default, (x,), (z,)))
    >>> edits.replace_reads([relu], x, z)
    >>> [ir.equation(e) for e in edits.applied().eqns]
    ['z: f32[2] = neg(x)', 'y: f32[2] = relu(z)']
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._before: dict[Eqn | None, list[Eqn]] = {}
        self._after: dict[Eqn, list[Eqn]] = {}
        self._new_reads: dict[Eqn, dict[Var, Var]] = {}

    def insert_before(self, eqn: Eqn | None, *new: Eqn) -> None:
        """Insert equations before another one, or at the end of the program for None."""
        self._before.setdefault(eqn, []).extend(new)

    def insert_after(self, eqn: Eqn, *new: Eqn) -> None:
        """Insert equations after another one."""
        self._after.setdefault(eqn, []).extend(new)

    def replace_reads(self, readers: Iterable[Eqn], old: Var, new: Var) -> None:
        """Let equations of the program read `new` instead of `old`."""
        for eqn in readers:
            self._new_reads.setdefault(eqn, {})[old] = new

    def applied(self) -> Graph:
        """The program with the changes; its inputs and outputs stay."""
        eqns: list[Eqn] = []
        for e in self.graph.eqns:
            eqns += self._before.get(e, ())
            eqns.append(self._edited(e))
            eqns += self._after.get(e, ())
        eqns += self._before.get(None, ())
        return self.graph.replace(eqns=tuple(eqns))

    def _edited(self, e: Eqn) -> Eqn:
        new_reads = self._new_reads.get(e)
        if new_reads is None:
            return e
        return e.with_inputs(lambda v: new_reads.get(v, v))
