"""The passes between the transforms of a step and the code of its program.

`stages` runs `passes` on the program that the transforms return. Then a plan orders the program, and
`passes_after_plan` add what depends on the order. Each pass that changes the program is a stage of `Lowered.history`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from .ir.graph import Graph, dce
from .planning.cluster import Cluster
from .planning.place_copies import place_copies
from .planning.plan import Plan
from .planning.recompute.plan_recomputation import values_on_host
from .planning.skeleton import THE_START
from .planning.start_exchanges import start_exchanges
from .rewrites.across_steps import carry_first_gathers
from .rewrites.erase import erase_marks, erase_trivial
from .rewrites.keep_gathers import keep_gathers
from .rewrites.keep_on_host import demanded_on_host, keep_on_host
from .rewrites.neighbours import among_neighbours
from .rewrites.writes_last import writes_last

# The name of each rewrite with the program after it.
History = tuple[tuple[str, Graph | fx.GraphModule], ...]
Pass = tuple[str, Callable[[Graph], Graph]]


def passes(plan: Plan) -> tuple[Pass, ...]:
    """The passes after the transforms, in order. The plan orders the program that they return."""
    return (
        ("keep_gathers", keep_gathers),
        ("erase_marks", erase_marks),
        ("erase_trivial", erase_trivial),
        ("dce", dce),
        ("among_neighbours", among_neighbours),
        ("keep_on_host", lambda graph: _with_values_on_host(graph, plan)),
        (
            "writes_last",
            lambda graph: writes_last(graph) if graph.hints.update == "last" else graph,
        ),
    )


def passes_after_plan(plan: Plan, cluster: Cluster) -> tuple[Pass, ...]:
    """The passes after the plan has put the equations in order."""
    return (
        ("carry_first_gathers", lambda graph: _with_carried_gathers(graph, plan)),
        ("start_exchanges", start_exchanges),
        ("place_copies", lambda graph: place_copies(graph, cluster)),
    )


def _with_values_on_host(graph: Graph, plan: Plan) -> Graph:
    """The program that keeps on the host, from forward to backward, the values that checkpoints and plan put there."""
    on_host = demanded_on_host(graph) | values_on_host(plan, graph)
    return dce(keep_on_host(graph, on_host)) if on_host else graph


def _with_carried_gathers(graph: Graph, plan: Plan) -> Graph:
    """The program that also starts the first gathers of the next step, if a transform asks for that."""
    if not graph.hints.across_steps:
        return graph
    at_start: set[str] = set()
    for names, place in plan.gathers:
        if place == THE_START:
            at_start.update(names)
    return carry_first_gathers(graph, at_start)


def through(graph: Graph, history: History, steps: Iterable[Pass]) -> tuple[Graph, History]:
    """The program after some passes. The history gets a stage for each pass that changes the program."""
    for name, rewrite in steps:
        after = rewrite(graph)
        if after.eqns != graph.eqns:
            history = (*history, (name, after))
        graph = after
    return graph, history
