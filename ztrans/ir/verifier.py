"""Check that a program is well formed. Every program that a transform or a plan returns is checked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from .axes import whole_axis, with_joint_sizes
from .collectives import rules
from .copies import is_copy
from .graph import Eqn, Graph, Var, producers, variables
from .printer import counted
from .rules import INVARIANT, Rules
from .varying import varying

_NONE: Mapping[str, torch.dtype] = MappingProxyType({})


class ProgramError(ValueError):
    """A program is not well formed. The transform or the plan that returned it has a bug."""


def check(graph: Graph) -> Graph:
    """Verify that a program is well formed, and return it.

    - Every value is bound once, before it is read. The types of results follow from the arguments (`Rules.problem`).
    - Every future is waited for exactly once, and nothing else reads it. A future that is carried to the next step is
      not read at all: it is a gather of the new state, or a leaf of the new state that is being copied to the host.
    - Only copies read and make values in the memory of the host, or another one beside the device's.
    - A collective has a provenance, and its axis belongs to the mesh. Its members and results agree in number and
      shape, and a gather sends values that are split.
    - The number of neighbours divides the ranks of their axis.
    - Every leaf of the state, and every hidden copy of one, is returned with its old type.

    Raises: ProgramError that names the equation.
    """
    _check_neighbours(graph)
    values = _Bindings()
    for var in graph.inputs:
        values.bind(var, None)
    for eqn in graph.eqns:
        eqn_rules = rules(eqn)
        for var in eqn.ins:
            values.check_read(var, eqn_rules, eqn)
        problem = eqn_rules.problem(eqn, graph.axes)
        if problem is not None:
            raise _error_at(eqn, problem)
        for out in eqn.results:
            if out.memory != "device" and not eqn_rules.copies:
                where = f"in the memory of the {out.memory}, where nothing computes"
                raise _error_at(eqn, f"{out} is {where}")
            values.bind(out, eqn)
    _check_outputs(graph, values)
    _check_state(graph)
    _check_carried(graph)
    _check_hidden(graph)
    return graph


def _check_neighbours(graph: Graph) -> None:
    for axis in graph.joint:
        all_ranks_axis = whole_axis(axis)
        ranks = with_joint_sizes(dict(graph.mesh), [all_ranks_axis])[all_ranks_axis]
        if ranks % graph.axes[axis]:
            raise ProgramError(
                f"axis {axis} is of {graph.axes[axis]} neighbours, which do not divide {ranks} ranks"
            )


def _error_at(eqn: Eqn | None, problem: str) -> ProgramError:
    """The error of a problem at an equation, or at the inputs for None."""
    if eqn is None:
        return ProgramError(f"{problem}, at the inputs")
    return ProgramError(f"{problem}, at {', '.join(map(str, eqn.outs))} = {eqn.op} [{eqn.source}]")


class _Bindings:
    """The values that are bound so far, by name, and the futures that nothing has waited for yet."""

    def __init__(self) -> None:
        self.by_name: dict[str, Var] = {}
        self.unwaited: dict[Var, None] = {}

    def is_bound(self, var: Var) -> bool:
        return self.by_name.get(var.name) is var

    def bind(self, var: Var, eqn: Eqn | None) -> None:
        # Printed programs, plans and generated code identify values by name.
        if var.name in self.by_name:
            raise _error_at(eqn, f"{var} is bound twice")
        self.by_name[var.name] = var
        if var.future:
            self.unwaited[var] = None

    def check_read(self, var: Var, eqn_rules: Rules, eqn: Eqn | None) -> None:
        if not self.is_bound(var):
            raise _error_at(eqn, f"{var} is read before it is bound")
        if var.memory != "device" and not eqn_rules.copies:
            where = f"in the memory of the {var.memory}, where nothing computes"
            raise _error_at(eqn, f"{var} is {where}: copy it with to_device, and wait")

        is_wait = eqn_rules.reads_futures
        if var.future and not is_wait:
            raise _error_at(eqn, f"{var} is a future and is read before its wait")
        if is_wait and not var.future:
            raise _error_at(eqn, f"{var} is waited for but is not a future")
        if is_wait and var not in self.unwaited:
            raise _error_at(eqn, f"{var} is waited for twice")
        if is_wait:
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
            raise ProgramError(f"{var} is carried to the next step but is not a future")


def _check_state(graph: Graph) -> None:
    if len(graph.outputs) < graph.num_state:
        raise ProgramError(
            f"state of {counted(graph.num_state, 'leaf', 'leaves')} comes back as "
            f"{counted(len(graph.outputs), 'output')}"
        )

    # Most programs carry nothing, so the table of producers is made only for those with futures.
    makers = producers(graph.eqns) if graph.carried_futures else {}
    for old, new in graph.leaves:
        if not isinstance(new, Var) or not old.is_like(new) or old.future != new.future:
            raise ProgramError(f"state {old} comes back as {new}")
        if new.future and not (new in makers and is_copy(makers[new]) and new.memory != "device"):
            raise ProgramError(f"state {new} is a future, but no copy to the host makes it")


def _check_carried(graph: Graph) -> None:
    """Check that each carried future is a gather of new leaves, with the type of the input that receives it."""
    for var in graph.arguments:
        if var.future:
            raise ProgramError(f"input {var} is a future, but the step does not carry it")

    new_leaves = set(graph.new_state)
    makers = producers(graph.eqns) if graph.carried else {}
    for old, new in zip(graph.carried_inputs, graph.carried_outputs):
        start = makers.get(new)
        if start is None or not rules(start).moves or any(v not in new_leaves for v in start.ins):
            raise ProgramError(f"{new} is carried but is not a gather of the new state")
        if not old.future or not old.is_like(new):
            raise ProgramError(f"the step before has started {old}, and this one starts {new}")


def _check_hidden(graph: Graph) -> None:
    for old, new in zip(graph.hidden_inputs, graph.hidden_outputs, strict=True):
        if not isinstance(new, Var) or not old.is_like(new):
            raise ProgramError(f"{old}, a copy of a leaf, comes back as {new}")


def check_interface(
    before: Graph, after: Graph, micro: int = 1, dtypes: Mapping[str, torch.dtype] = _NONE
) -> None:
    """Verify that a rewritten program has the same inputs and outputs as before; layouts may differ.

    `dtypes` has the new dtypes of leaves of the state that the rewrite stores in another one, by name.

    It may have more outputs after the old ones, with their names in `Graph.added`. If `before` is the program of one of
    `micro` micro-batches, `after` may have the rows of all of them in its inputs. Each leaf of the new state that was
    equal on all ranks of a sharded program still is.

    Raises: ProgramError that names the input or the leaf, or gives the number of outputs.
    """
    if after.num_state != before.num_state:
        raise ProgramError(f"{after.num_state} inputs are state, and {before.num_state} were")
    if len(after.inputs) != len(before.inputs):
        raise ProgramError(
            f"there are {len(after.inputs)} inputs, and there were {len(before.inputs)}"
        )
    for old, new in zip(before.inputs, after.inputs):
        shape = old.shape
        if after.micro < micro and old in before.batch and shape:
            shape = (shape[0] * micro, *shape[1:])
        dtype = dtypes.get(old.name, old.dtype)
        if (old.name, dtype, shape) != (new.name, new.dtype, new.shape):
            raise ProgramError(f"input {old} has become {new}")

    # New outputs come last, so that the users of earlier transforms find their outputs in the same place.
    new_names = after.added[len(before.added) :]
    if after.added != (*before.added, *new_names) or len(set(after.added)) != len(after.added):
        raise ProgramError(
            f"the added outputs are {after.added}, and they were {before.added}: add others after them"
        )
    if len(after.outputs) != len(before.outputs) + len(new_names):
        extra = f", and {len(new_names)} names in graph.added for more" if new_names else ""
        raise ProgramError(
            f"there are {len(after.outputs)} outputs, and there were {len(before.outputs)}{extra}. Add outputs after "
            f"the others, with a name for each: graph.replace(outputs=(*graph.outputs, y), added=(*graph.added, 'y'))"
        )
    not_inputs = after.batch.difference(after.inputs)
    if not_inputs:
        raise ProgramError(f"{', '.join(map(str, not_inputs))} of the batch is not an input")
    if before.mesh and after.mesh == before.mesh:
        _check_equal_on_ranks(before, after)


def _check_equal_on_ranks(before: Graph, after: Graph) -> None:
    """Check that no leaf of the new state differs over more axes of the mesh than before the rewrite.

    The batch counts as different over all axes, because a program does not say over which it is. So a leaf that is
    equal thanks to collectives of the step itself is not checked. Over an axis of one rank nothing differs.
    """
    axes = tuple(axis for axis, size in after.mesh if size > 1)
    old_axes = varying(before, axes)
    new_axes = varying(after, axes)
    for leaf, old, new in zip(after.state, before.new_state, after.new_state):
        more = new_axes.get(new, INVARIANT) - old_axes.get(old, INVARIANT)
        if more:
            raise ProgramError(
                f"the new value of {leaf.name} differs over {', '.join(sorted(more))}, and was equal there: it has "
                f"lost a reduction"
            )
