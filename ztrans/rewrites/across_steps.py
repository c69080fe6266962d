"""Start the first gathers of the next step in the update of this step.

    def step(w, x):                                 def step(w, x, w.full'):
      w.full' = all_gather([w])                       w.full = wait(w.full'); y = mm(x, w.full)
      w.full = wait(w.full'); y = mm(x, w.full)  -->  ...
      ...                                             w1 = sub(w, g)
      w1 = sub(w, g)                                  w.full.next' = all_gather([w1])
      return w1, loss                                 return w1, loss, w.full.next'

Nothing hides the gathers at the beginning of a step. When they are carried, the rest of the update hides them, and so
does the work of the host between two steps. A carried future is a value, so a program stays a function: it takes the
gathers that the previous step started, and returns the gathers that it started itself. The state itself is complete
when a step ends.

The carried gathers are the buckets that start with the step by its plan and whose members are leaves of the state. So
they are the same on every rank and for every size of the batch. For the lower bound of such a step,
`without_gathers_of` makes a program that finds all gathers done.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..ir.collectives import role, rules
from ..ir.graph import Eqn, Graph, Var, producers
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter


def carry_first_gathers(graph: Graph, at_start: Collection[str]) -> Graph:
    """Start the first gathers of the next step, each as soon as its parameters are written.

    They start in the order in which the next step needs them, because a later gather would delay the others. None
    starts before backward has ended, so that they take no memory from it.

    Args:
        graph: the program.
        at_start: the names of the values that its plan gathers when the step starts.
    """
    new = Rewriter(graph)
    first_gathers = _first_gathers(graph, at_start)
    next_gathers = _next_gathers(new, first_gathers)
    for start in first_gathers:
        new.drop(start)
    _insert_starts(new, next_gathers)
    carried_inputs = tuple(producers(first_gathers))
    carried_outputs = tuple(producers(next_gathers))
    return new.applied().replace(
        inputs=(*graph.inputs, *carried_inputs),
        outputs=(*graph.outputs, *carried_outputs),
        carried=len(carried_inputs),
    )


def _first_gathers(graph: Graph, at_start: Collection[str]) -> list[Eqn]:
    """The gathers of the values `at_start` that the previous step can start, in order.

    Other gathers may also stand before the first operation. They are not carried, because in the program of another
    batch size an operation may precede them. A leaf that shares its new value with another leaf is left out: without a
    previous step, the program would not say which of the two to gather.
    """
    times_returned = Counter(graph.new_state)
    carriable_leaves = set()
    for leaf, new_leaf in graph.leaves:
        if times_returned[new_leaf] == 1:
            carriable_leaves.add(leaf)
    gathers = []
    for e in graph.eqns:
        # The first operation. Gathers after it may stand elsewhere in the program of another batch size.
        if not rules(e).remote:
            break
        is_gather = role(e) == "param" and rules(e).moves and carriable_leaves.issuperset(e.ins)
        if is_gather and all(v.base_name in at_start for v in e.results):
            gathers.append(e)
    return gathers


def _insert_starts(new: Rewriter, starts: Sequence[Eqn]) -> None:
    """Start the gathers of the next step as soon as backward has ended and their leaves are written."""
    eqns = new.graph.eqns
    written_by: dict[Var, int] = {}
    end_of_backward = -1
    for i, e in enumerate(eqns):
        for v in e.results:
            written_by[v] = i
        if e.region != "update":
            end_of_backward = i

    # Each start follows the starts that the next step needs earlier, so `index` only grows.
    index = end_of_backward
    for start in starts:
        for v in start.ins:
            # A leaf that the step does not change has no writer.
            index = max(index, written_by.get(v, -1))
        if index < 0:
            new.insert_before(eqns[0], start)
        else:
            new.insert_after(eqns[index], start)


def _next_gathers(new: Rewriter, first_gathers: Sequence[Eqn]) -> list[Eqn]:
    """The first gathers of the next step, which gather the new leaves."""
    graph = new.graph
    new_leaf = dict(graph.leaves)
    starts = []
    for e in first_gathers:
        members = [new_leaf[v] for v in e.ins]
        # Like the inputs, the outputs end in the quote of a future.
        futures = []
        for v in e.results:
            name = new.fresh_name(f"{v.base_name}.next")
            futures.append(dataclasses.replace(v, name=f"{name}'"))
        starts.append(e.replace(args=(members,), outs=tuple(futures), region="update"))
    return starts


class CarriedStart(NamedTuple):
    """A gather that a step starts for the next one: its equation, and the positions of its leaves in the state."""

    eqn: Eqn
    leaves: tuple[int, ...]


def carried_starts(graph: Graph) -> list[CarriedStart]:
    """The gathers that a program starts for the next step, in the order of the carried futures."""
    makers = producers(graph.eqns)
    position = {v: i for i, v in enumerate(graph.new_state)}
    starts = []
    for e in dict.fromkeys(makers[v] for v in graph.carried_outputs):
        leaves = tuple(position[v] for v in e.ins)
        starts.append(CarriedStart(e, leaves))
    return starts


def gathers_before(graph: Graph) -> Graph:
    """The program that starts the carried gathers of a step without a previous step, from the old state."""
    eqns = []
    for start in carried_starts(graph):
        members = [graph.inputs[i] for i in start.leaves]
        eqns.append(start.eqn.replace(args=(members,)))
    return graph.replace(
        inputs=(*graph.state, *graph.arguments),
        eqns=tuple(eqns),
        outputs=graph.carried_outputs,
        num_state=0,
        carried=0,
    )


def without_gathers_of(graph: Graph, positions: set[int]) -> Graph:
    """The program without the gathers of these leaves of the state, which takes their whole values as more inputs.

    It is for a lower bound: the previous step may have gathered all of them.
    """
    leaves = {graph.inputs[i] for i in positions}
    omitted: set[Eqn] = set()
    values: list[Var] = []
    for start, paired in pair(graph).starts.items():
        if rules(start).moves and leaves.issuperset(start.ins):
            omitted.add(start)
            for i in paired.waits:
                wait = graph.eqns[i]
                omitted.add(wait)
                values.append(wait.out)
    eqns = tuple(e for e in graph.eqns if e not in omitted)
    return graph.replace(inputs=(*graph.inputs, *values), eqns=eqns)
