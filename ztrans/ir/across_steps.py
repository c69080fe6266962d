"""The first gathers of the next step start in the update of this one.

    def step(w, x):                                 def step(w, x, w.full'):
      w.full' = all_gather([w])                       w.full = wait(w.full'); y = mm(x, w.full)
      w.full = wait(w.full'); y = mm(x, w.full)  -->  ...
      ...                                             w1 = sub(w, g)
      w1 = sub(w, g)                                  w.full.next' = all_gather([w1])
      return w1, loss                                 return w1, loss, w.full.next'

What is carried is the value of a future, so a program stays a function: it takes the gathers that the step before has
started, and returns those that it has started itself. Nothing hides the gathers with which a step begins. Now the rest
of the update hides them, and what the host does between two steps. The state itself is complete when a step ends.

The gathers that are carried are those of the buckets that start with the step by its plan, and whose members are leaves
of the state. So they are the same on every rank and for every size of the batch. For the lower bound of such a step,
`without_gathers_of` makes the program that finds them done.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .collectives import role, rules
from .graph import Eqn, Graph, Var, producers
from .pairing import pair
from .rewriter import Rewriter


def carry_first_gathers(graph: Graph, at_start: Collection[str]) -> Graph:
    """The program that starts the first gathers of the next step, each as soon as its parameters are written.

    They are those of the values `at_start`, by name, which its plan gathers when the step starts.

    They start in the order in which the next step needs them: one that is needed later would delay the others. None
    starts before backward has ended, so they take no memory from it.
    """
    new = Rewriter(graph)
    first = _first_gathers(graph, at_start)
    starts = _of_next_step(new, first)
    for start in first:
        new.drop(start)
    _insert_starts(new, starts)
    before = tuple(producers(first))
    after = tuple(producers(starts))
    return new.applied().replace(
        inputs=(*graph.inputs, *before), outputs=(*graph.outputs, *after), carried=len(before)
    )


def _first_gathers(graph: Graph, at_start: Collection[str]) -> list[Eqn]:
    """The gathers of the values `at_start` that the step before can start, in order.

    Other gathers may stand before the first operation too. They are not carried, because in the program of another
    batch size an operation may precede them. A leaf whose new value is that of another leaf too is left out: the
    program would not say which of the two is gathered where there is no step before.
    """
    new_leaves = graph.outputs[: graph.num_state]
    times_returned = Counter(new_leaves)
    carriable = set()
    for leaf, new_leaf in zip(graph.inputs, new_leaves):
        if times_returned[new_leaf] == 1:
            carriable.add(leaf)
    first = []
    for e in graph.eqns:
        # The first operation. Gathers after it may stand elsewhere in the program of another batch size.
        if not rules(e).remote:
            break
        is_gather = role(e) == "param" and rules(e).moves and carriable.issuperset(e.ins)
        if is_gather and all(v.base_name in at_start for v in e.results):
            first.append(e)
    return first


def _insert_starts(new: Rewriter, starts: Sequence[Eqn]) -> None:
    """Start the gathers of the next step as soon as backward has ended and their leaves are written."""
    eqns = new.graph.eqns
    written_by: dict[Var, int] = {}
    backward_ends = -1
    for i, e in enumerate(eqns):
        for v in e.results:
            written_by[v] = i
        if e.region != "update":
            backward_ends = i

    # Each start comes after the ones that the next step needs before it, so `index` only grows.
    index = backward_ends
    for start in starts:
        for v in start.ins:
            # A leaf that the step does not change has no writer.
            index = max(index, written_by.get(v, -1))
        if index < 0:
            new.insert_before(eqns[0], start)
        else:
            new.insert_after(eqns[index], start)


def _of_next_step(new: Rewriter, first: Sequence[Eqn]) -> list[Eqn]:
    """The equations that start the first gathers of the next step: of the new leaves."""
    graph = new.graph
    new_leaf = dict(zip(graph.inputs[: graph.num_state], graph.outputs))
    starts = []
    for e in first:
        members = [new_leaf[v] for v in e.ins]
        # The prime says, here and in the inputs, that a future passes from one step to the next.
        futures = []
        for v in e.results:
            name = new.fresh_name(f"{v.base_name}.next")
            futures.append(dataclasses.replace(v, name=f"{name}'"))
        starts.append(e.replace(args=(members,), outs=tuple(futures), region="update"))
    return starts


class CarriedStart(NamedTuple):
    """A gather that a step starts for the next one: its equation, and the leaves that it gathers, by position."""

    eqn: Eqn
    leaves: tuple[int, ...]


def carried_starts(graph: Graph) -> list[CarriedStart]:
    """The gathers that a program starts for the next step, in the order of the futures that it carries."""
    makers = producers(graph.eqns)
    position = {v: i for i, v in enumerate(graph.outputs[: graph.num_state])}
    starts = []
    for e in dict.fromkeys(makers[v] for v in graph.carried_outputs):
        leaves = tuple(position[v] for v in e.ins)
        starts.append(CarriedStart(e, leaves))
    return starts


def gathers_before(graph: Graph) -> Graph:
    """The program that starts what a step needs from the step before, where there is none: from the old state."""
    eqns = []
    for start in carried_starts(graph):
        members = [graph.inputs[i] for i in start.leaves]
        eqns.append(start.eqn.replace(args=(members,)))
    return graph.replace(
        inputs=graph.tensor_inputs,
        eqns=tuple(eqns),
        outputs=graph.carried_outputs,
        num_state=0,
        carried=0,
    )


def without_gathers_of(graph: Graph, positions: set[int]) -> Graph:
    """The program with whole values of these leaves of the state as more inputs, and without their gathers.

    It is for a lower bound: the step before may have gathered all of them.
    """
    leaves = {graph.inputs[i] for i in positions}
    left_out: set[Eqn] = set()
    values: list[Var] = []
    for start, started in pair(graph).starts.items():
        if rules(start).moves and leaves.issuperset(start.ins):
            left_out.add(start)
            for i in started.waits:
                wait = graph.eqns[i]
                left_out.add(wait)
                values.append(wait.out)
    eqns = tuple(e for e in graph.eqns if e not in left_out)
    return graph.replace(inputs=(*graph.inputs, *values), eqns=eqns)
