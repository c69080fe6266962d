"""The primitives of ztrans, and the rules of every operation, be it a primitive, a collective of the user, or other."""

from __future__ import annotations

import functools
from typing import Any

from ..graph import Eqn, Primitive
from .future import WAIT
from .gather import ALL_GATHER
from .interface import Rules
from .marks import MARKS
from .micro_marks import MICRO_MARKS
from .reduction import ALL_REDUCE, REDUCE_SCATTER
from .shard import SHARD
from .start import Start
from .user_collectives import functional_name
from .user_rules import USER_START, USER_WAIT

STARTS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
PRIMITIVES = (*STARTS, WAIT, SHARD, *MARKS, *MICRO_MARKS)
_ORDINARY = Rules()


def rules(eqn: Eqn) -> Rules:
    """The rules of an equation's operation.

    >>> from ztrans.ir import SHARD, WAIT
    >>> rules(Eqn(SHARD, (), ())).lane, rules(Eqn(WAIT, (), ())).remote
    (None, True)
    """
    return _rules(eqn.op)


@functools.cache
def _rules(op: Any) -> Rules:
    if isinstance(op, Primitive):
        return op.rules
    name = functional_name(op)
    if name == "wait_tensor":
        return USER_WAIT
    return USER_START if name else _ORDINARY


def is_start(eqn: Eqn) -> bool:
    """Whether the equation starts a collective that a transform placed."""
    return isinstance(rules(eqn), Start)


def role(eqn: Eqn) -> str:
    """The role of a collective, or "" for any other equation."""
    return eqn.provenance.role if eqn.provenance else ""


def lane(eqn: Eqn) -> str:
    """The name of the queue of a collective. Gathers and reductions of an axis have queues of their own."""
    return f"{rules(eqn).axis(eqn)} {rules(eqn).lane}"
