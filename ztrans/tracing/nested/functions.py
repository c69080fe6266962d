"""Functions that a higher-order operator calls, as sub-programs: what they may contain, and the names of arguments."""

from __future__ import annotations

import string

from ...ir.collectives import rules
from ...ir.graph import Graph, Primitive, is_random
from ...ir.printer import op_name


def no_function(graph: Graph) -> str | None:
    """Why a program cannot be a function of an equation, or None if it can be one."""
    for e in graph.eqns:
        if is_random(e.op):
            return f"draws random numbers ({op_name(e.op)})"
        if isinstance(e.op, Primitive) or rules(e).remote:
            return f"communicates ({op_name(e.op)})"
    return None


def letters(index: int) -> str:
    """The name of an argument.

    >>> letters(0), letters(25), letters(26)
    ('a', 'z', 'a1')
    """
    turn, letter = divmod(index, 26)
    return string.ascii_lowercase[letter] + (str(turn) if turn else "")
