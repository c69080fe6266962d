"""verifier: check that a program is well formed, as is done for every program that a transform or a plan returns."""

from __future__ import annotations

from .collectives import rules
from .graph import Eqn, Graph, Var, variables


class ProgramError(ValueError):
    """A program is not well formed, which is a mistake of the transform or the plan that returned it."""


def check(graph: Graph) -> Graph:
    """Verify that a program is well formed, and return it.

    Every value is bound once, and before it is read. Every future is waited for exactly once, and nothing else reads
    it. Every collective has a provenance, and its axis is one of the mesh. Members and results of a collective agree in
    number and shape. Every leaf of the state is returned with the type that it had.

    Raises: ProgramError that names the equation.
    """
    bound: dict[str, Var] = {}
    waited: dict[Var, bool] = {}
    for var in graph.inputs:
        _bind(var, bound, waited, None)
    for eqn in graph.eqns:
        rule = rules(eqn)
        _check_reads(eqn, rule.reads_futures, bound, waited)
        problem = rule.problem(eqn, graph.axes)
        if problem is not None:
            raise _wrong(problem, eqn)
        for out in eqn.results:
            _bind(out, bound, waited, eqn)
    _check_outputs(graph, bound)
    for var, done in waited.items():
        if not done:
            raise ProgramError(f"{var} is never waited for")
    _check_state(graph)
    return graph


def _wrong(problem: str, at: Eqn | None) -> ProgramError:
    where = (
        f"at {', '.join(map(str, at.outs))} = {at.op} [{at.source}]"
        if at is not None
        else "at the inputs"
    )
    return ProgramError(f"{problem}, {where}")


def _bind(var: Var, bound: dict[str, Var], waited: dict[Var, bool], at: Eqn | None) -> None:
    if var.name in bound:
        raise _wrong(f"{var} is bound twice", at)
    bound[var.name] = var
    if var.future:
        waited[var] = False


def _check_reads(eqn: Eqn, waits: bool, bound: dict[str, Var], waited: dict[Var, bool]) -> None:
    for var in eqn.ins:
        if bound.get(var.name) is not var:
            raise _wrong(f"{var} is read before it is bound", eqn)
        if var.future and not waits:
            raise _wrong(f"{var} is a future and is read before its wait", eqn)
        if waits and not var.future:
            raise _wrong(f"{var} is waited for but is not a future", eqn)
        if waits and waited[var]:
            raise _wrong(f"{var} is waited for twice", eqn)
        if waits:
            waited[var] = True


def _check_outputs(graph: Graph, bound: dict[str, Var]) -> None:
    for var in variables(graph.outputs):
        if bound.get(var.name) is not var:
            raise ProgramError(f"output {var} is not bound")
        if var.future:
            raise ProgramError(f"output {var} is still a future")


def _check_state(graph: Graph) -> None:
    state = graph.inputs[: graph.num_state]
    if len(graph.outputs) < len(state):
        raise ProgramError(
            f"{len(state)} leaves of state come back as {len(graph.outputs)} outputs"
        )
    for old, new in zip(state, graph.outputs):
        if not isinstance(new, Var) or not old.is_like(new):
            raise ProgramError(f"state {old} comes back as {new}")


def check_interface(before: Graph, after: Graph) -> None:
    """Verify that a rewritten program has the inputs and outputs that it had before; layouts may differ.

    Behind its outputs there may be more, whose names are in `Graph.added`.

    Raises: ProgramError that names the input, or gives the number of outputs.
    """
    if after.num_state != before.num_state:
        raise ProgramError(f"{after.num_state} inputs are state, and {before.num_state} were")
    if len(after.inputs) != len(before.inputs):
        raise ProgramError(
            f"there are {len(after.inputs)} inputs, and there were {len(before.inputs)}"
        )
    for old, new in zip(before.inputs, after.inputs):
        if (old.name, old.dtype, old.shape) != (new.name, new.dtype, new.shape):
            raise ProgramError(f"input {old} has become {new}")
    more = after.added[len(before.added) :]
    if after.added != (*before.added, *more) or len(set(after.added)) != len(after.added):
        raise ProgramError(
            f"the added outputs are {after.added}, and they were {before.added}: add others behind them"
        )
    if len(after.outputs) != len(before.outputs) + len(more):
        named = f", and {len(more)} names in graph.added for more" if more else ""
        raise ProgramError(
            f"there are {len(after.outputs)} outputs, and there were {len(before.outputs)}{named}. Add outputs behind "
            f"the others, with a name for each: graph.replace(outputs=(*graph.outputs, y), added=(*graph.added, 'y'))"
        )
    if not after.batch <= set(after.inputs):
        raise ProgramError(
            f"{', '.join(map(str, after.batch - set(after.inputs)))} of the batch is no input"
        )
