"""Check that a program is well formed, as is done for every program that a transform or a plan returns."""

from __future__ import annotations

from .axes import whole_axis, with_joint_sizes
from .collectives import rules
from .copies import is_copy
from .graph import Eqn, Graph, Var, producers, variables
from .rules import Rules


class ProgramError(ValueError):
    """A program is not well formed, which is a mistake of the transform or the plan that returned it."""


def check(graph: Graph) -> Graph:
    """Verify that a program is well formed, and return it.

    Every value is bound once, and before it is read. Every future is waited for exactly once, and nothing else reads
    it. One that is carried to the next step is a gather of the new state, or a leaf of it that is being copied to the
    host, and nothing reads it. Only a copy reads or makes a value in the memory of the host. Every collective has a
    provenance, and its axis is one of the mesh. Members and results of a collective agree in number and shape, and a
    gather sends what is cut. The numbers of neighbours divide the ranks of their axis. Every leaf of the state is
    returned with the type that it had.

    Raises: ProgramError that names the equation.
    """
    _check_neighbours(graph)
    values = _Bindings()
    for var in graph.inputs:
        values.bind(var, None)
    for eqn in graph.eqns:
        of_eqn = rules(eqn)
        for var in eqn.ins:
            values.check_read(var, of_eqn, eqn)
        problem = of_eqn.problem(eqn, graph.axes)
        if problem is not None:
            raise _wrong(problem, eqn)
        for out in eqn.results:
            if out.memory == "host" and not of_eqn.copies:
                raise _wrong(f"{out} is in the memory of the host, where nothing computes", eqn)
            values.bind(out, eqn)
    _check_outputs(graph, values)
    _check_state(graph)
    _check_carried(graph)
    return graph


def _check_neighbours(graph: Graph) -> None:
    for axis in graph.joint:
        whole = whole_axis(axis)
        ranks = with_joint_sizes(dict(graph.mesh), [whole])[whole]
        if ranks % graph.axes[axis]:
            raise ProgramError(
                f"axis {axis} is of {graph.axes[axis]} neighbours, which do not divide {ranks} ranks"
            )


def _wrong(problem: str, eqn: Eqn | None) -> ProgramError:
    if eqn is None:
        return ProgramError(f"{problem}, at the inputs")
    return ProgramError(f"{problem}, at {', '.join(map(str, eqn.outs))} = {eqn.op} [{eqn.source}]")


class _Bindings:
    """The values that are bound so far, by name, and the futures that nothing has waited for."""

    def __init__(self) -> None:
        self.by_name: dict[str, Var] = {}
        self.unwaited: dict[Var, None] = {}

    def is_bound(self, var: Var) -> bool:
        return self.by_name.get(var.name) is var

    def bind(self, var: Var, eqn: Eqn | None) -> None:
        # Printed programs, plans and generated code know values by their names.
        if var.name in self.by_name:
            raise _wrong(f"{var} is bound twice", eqn)
        self.by_name[var.name] = var
        if var.future:
            self.unwaited[var] = None

    def check_read(self, var: Var, of_eqn: Rules, eqn: Eqn | None) -> None:
        if not self.is_bound(var):
            raise _wrong(f"{var} is read before it is bound", eqn)
        if var.memory == "host" and not of_eqn.copies:
            raise _wrong(
                f"{var} is in the memory of the host, where nothing computes: copy it with to_device, and wait",
                eqn,
            )

        waits = of_eqn.reads_futures
        if var.future and not waits:
            raise _wrong(f"{var} is a future and is read before its wait", eqn)
        if waits and not var.future:
            raise _wrong(f"{var} is waited for but is not a future", eqn)
        if waits and var not in self.unwaited:
            raise _wrong(f"{var} is waited for twice", eqn)
        if waits:
            del self.unwaited[var]


def _check_outputs(graph: Graph, values: _Bindings) -> None:
    carried = graph.carried_futures
    for var in variables(graph.outputs):
        if not values.is_bound(var):
            raise ProgramError(f"output {var} is not bound")
        if var.future and var not in carried:
            raise ProgramError(f"output {var} is still a future")
    for var in values.unwaited:
        if var not in carried:
            raise ProgramError(f"{var} is never waited for")
    for var in carried:
        if var not in values.unwaited:
            raise ProgramError(f"{var} is carried to the next step, and is no future")


def _check_state(graph: Graph) -> None:
    state = graph.inputs[: graph.num_state]
    if len(graph.outputs) < len(state):
        raise ProgramError(
            f"{len(state)} leaves of state come back as {len(graph.outputs)} outputs"
        )

    # Most programs carry nothing, and need no table of what computes their values.
    starts = producers(graph.eqns) if graph.carried_futures else {}
    for old, new in zip(state, graph.outputs):
        if not isinstance(new, Var) or not old.is_like(new) or old.future != new.future:
            raise ProgramError(f"state {old} comes back as {new}")
        if new.future and not (new in starts and is_copy(starts[new]) and new.memory == "host"):
            raise ProgramError(f"state {new} is a future, and no copy to the host makes it")


def _check_carried(graph: Graph) -> None:
    """Check that each future that the step carries is a gather of new leaves, and has the type of the input for it."""
    for var in graph.tensor_inputs[graph.num_state :]:
        if var.future:
            raise ProgramError(f"input {var} is a future, and the step does not carry it")

    new_leaves = set(graph.outputs[: graph.num_state])
    starts = producers(graph.eqns) if graph.carried else {}
    for before, after in zip(graph.carried_inputs, graph.carried_outputs):
        start = starts[after]
        if not rules(start).moves or not new_leaves.issuperset(start.ins):
            raise ProgramError(f"{after} is carried, and is no gather of the new state")
        if not before.future or not before.is_like(after):
            raise ProgramError(f"the step before has started {before}, and this one starts {after}")


def check_interface(before: Graph, after: Graph) -> None:
    """Verify that a rewritten program has the inputs and outputs that it had before; layouts may differ.

    After its outputs there may be more, whose names are in `Graph.added`.

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

    # Outputs are added at the end, so that the callers of earlier transforms find theirs where they were.
    more = after.added[len(before.added) :]
    if after.added != (*before.added, *more) or len(set(after.added)) != len(after.added):
        raise ProgramError(
            f"the added outputs are {after.added}, and they were {before.added}: add others behind them"
        )
    if len(after.outputs) != len(before.outputs) + len(more):
        extra = f", and {len(more)} names in graph.added for more" if more else ""
        raise ProgramError(
            f"there are {len(after.outputs)} outputs, and there were {len(before.outputs)}{extra}. Add outputs behind "
            f"the others, with a name for each: graph.replace(outputs=(*graph.outputs, y), added=(*graph.added, 'y'))"
        )
    no_inputs = after.batch.difference(after.inputs)
    if no_inputs:
        raise ProgramError(f"{', '.join(map(str, no_inputs))} of the batch is no input")
