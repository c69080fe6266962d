"""check: whether a program is well formed. Every pass's output is checked in the tests."""

from __future__ import annotations

from .collectives import WAIT
from .graph import Eqn, Graph, Var, variables


def check(graph: Graph) -> None:
    """Verify that the program is well formed: bound once, defined before use, futures waited for
    exactly once and read by nothing else, collectives with provenance, state types preserved.

    Raises: AssertionError, naming the equation. A failure is a bug in a pass, not a user's error.
    """
    bound: set[Var] = set()
    names: set[str] = set()
    waits: dict[Var, int] = {}
    eqn: Eqn | None = None

    def at() -> str:
        return f"at {', '.join(map(str, eqn.outs))} = {eqn.op} [{eqn.source}]" if eqn else "at the inputs"

    def bind(var: Var) -> None:
        assert var not in bound and var.name not in names, f"{var} is bound twice, {at()}"
        bound.add(var)
        names.add(var.name)
        if var.future:
            waits[var] = 0

    for var in graph.inputs:
        bind(var)
    for eqn in graph.eqns:
        for var in eqn.ins:
            assert var in bound, f"{var} is read before it is bound, {at()}"
            if eqn.op is WAIT:
                assert var.future, f"{var} is waited for but is not a future, {at()}"
                waits[var] += 1
                assert waits[var] == 1, f"{var} is waited for twice, {at()}"
            else:
                assert not var.future, f"{var} is a future and is read before its wait, {at()}"
        outs = [out for out in eqn.outs if out is not None]
        if eqn.op is WAIT:
            for future, out in zip(eqn.ins, outs, strict=True):
                same = (future.dtype, future.shape, future.layout) == (out.dtype, out.shape, out.layout)
                assert same and not out.future, f"wait changes the type of {future}, {at()}"
        elif any(out.future for out in outs):
            assert eqn.provenance is not None, f"a collective has no provenance, {at()}"
            assert eqn.provenance.axis in graph.axes, f"no such mesh axis, {at()}"
            assert len(outs) == len(eqn.ins), f"members and futures differ in number, {at()}"
            assert all(i.shape == o.shape for i, o in zip(eqn.ins, outs)), f"shapes differ, {at()}"
        for out in outs:
            bind(out)
    for var in variables(graph.outputs):
        assert var in bound, f"output {var} is not bound"
        assert not var.future, f"output {var} is still a future"
    for var, count in waits.items():
        assert count == 1, f"{var} is never waited for"
    for old, new in zip(graph.inputs[: graph.num_state], graph.outputs):
        same = isinstance(new, Var) and (old.shape, old.dtype, old.layout) == (
            new.shape,
            new.dtype,
            new.layout,
        )
        assert same, f"state {old} comes back as {new}"
