"""Leaves of the state in another form between steps: in another memory, or in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Var, substitute
from ..ir.op_facts import is_view_or_cast
from ..ir.rewriter import Rewriter
from .sharding.rank_values import Phase, next_phase

_UPDATE: Phase = (0, "update")  # all equations of the update, and the end of the program


class StoredLeaves:
    """The edits that keep leaves of a program in another form between steps.

    Each forward, each backward and the update bring a leaf in before the first equation that reads it there. Views and
    casts of a leaf are computed where they are read, so that no value of forward waits for backward.

    Args:
        graph: the program.
        stored: for each leaf, the value that replaces it among the inputs, in another memory or dtype.
        bring_in: `bring_in(rewriter, leaf, stored)` gives the equations that compute the leaf. They are put before its
            reader.
        take_out: `take_out(rewriter, value, stored)` gives those that compute the new stored value from the new value
            of the leaf. They are put after the equation that computes that.

    Attributes:
        deferred: the views and casts of these leaves in forward and backward, with the equations that compute them.
        brought_in: by phase, the value for a leaf, or for a view or cast of one.
    """

    def __init__(
        self,
        graph: Graph,
        stored: Mapping[Var, Var],
        bring_in: Callable[[Rewriter, Var, Var], list[Eqn]],
        take_out: Callable[[Rewriter, Var, Var], list[Eqn]],
    ) -> None:
        self.graph = graph
        self.stored = stored
        self.bring_in = bring_in
        self.take_out = take_out
        self.new = Rewriter(graph)
        self.deferred: dict[Var, Eqn] = {}
        self.brought_in: dict[Phase, dict[Var, Var]] = {}
        self.computed: set[Var] = set()  # the views and casts whose names are taken

    def program(self) -> Graph:
        """The edited program."""
        phase: Phase = (0, "forward")
        for e in self.graph.eqns:
            phase = next_phase(phase, e)
            if e.region != "update" and is_view_or_cast(e) and self._is_stored(e.ins[0]):
                self.deferred.update(dict.fromkeys(e.results, e))
                self.new.drop(e)
            elif any(map(self._is_stored, e.ins)):
                where_read = _UPDATE if e.region == "update" else phase
                local = self._with_stored_name(e)
                self.new.replace(e, local.with_inputs(partial(self._read, where_read, e)))

        new_state = []
        for leaf, new in self.graph.leaves:
            value = new
            if leaf not in self.stored:
                value = self._read(_UPDATE, None, new)
            elif new is leaf:
                value = self.stored[leaf]
            else:
                # If the step returns another leaf here, that leaf's value is stored.
                value = self._taken_out(self.stored[leaf], new)
            new_state.append(value)
        results = substitute(self.graph.results, partial(self._read, _UPDATE, None))
        inputs = tuple(self.stored.get(v, v) for v in self.graph.inputs)
        return self.new.applied().replace(inputs=inputs, outputs=(*new_state, *results))

    def _with_stored_name(self, e: Eqn) -> Eqn:
        """An equation that names the stored value of a leaf, if it names a leaf."""
        named = rules(e).named_argument
        if named is None:
            return e
        args = [*e.args]
        args[named] = self.stored.get(args[named], args[named])
        return e.replace(args=tuple(args))

    def _is_stored(self, v: Var) -> bool:
        return v in self.stored or v in self.deferred

    def _read(self, phase: Phase, reader: Eqn | None, v: Var) -> Var:
        """The value that an equation of a phase, or the end of the program, reads for `v`."""
        if not self._is_stored(v):
            return v
        values = self.brought_in.setdefault(phase, {})
        if v in self.deferred and v not in values:
            maker = self.deferred[v]
            source = self._read(phase, reader, maker.ins[0])
            outs = tuple(None if out is None else self._renamed(out) for out in maker.outs)
            _, region = phase
            again = maker.with_inputs(lambda _: source, outs=outs, region=region)
            self.new.insert_before(reader, again)
            values.update(zip(maker.results, again.results))
        elif v not in values:
            eqns = self.bring_in(self.new, v, self.stored[v])
            self.new.insert_before(reader, *(e.like(reader, phase[1]) for e in eqns))
            values[v] = eqns[-1].out
        return values[v]

    def _renamed(self, v: Var) -> Var:
        """A view or a cast of a leaf. Only the first of them keeps its name."""
        if v in self.computed:
            return self.new.fresh(v)
        self.computed.add(v)
        return v

    def _taken_out(self, old: Var, new: Var) -> Var:
        """The new stored value of a leaf."""
        maker = None if self._is_stored(new) else self.new.makers.get(new)
        value = self._read(_UPDATE, None, new)
        eqns = [e.like(maker, "update") for e in self.take_out(self.new, value, old)]
        if maker is None:
            self.new.insert_before(None, *eqns)
        else:
            self.new.insert_after(maker, *eqns)
        return eqns[-1].out
