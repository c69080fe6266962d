"""The primitives of ztrans, and the rules of every operation, be it a primitive, a collective of the user, or other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..graph import Eqn, Primitive
from ..user_collectives import functional_name
from .future import WAIT
from .gather import ALL_GATHER
from .interface import Rules
from .marks import MARKS
from .reduction import ALL_REDUCE, REDUCE_SCATTER
from .shard import SHARD
from .start import Start
from .user_rules import USER_START, USER_WAIT

STARTS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
PRIMITIVES = (*STARTS, WAIT, SHARD, *MARKS)
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


def lane(eqn: Eqn) -> str:
    """The name of the queue of a collective. Gathers and reductions of an axis have queues of their own."""
    return f"{rules(eqn).axis(eqn)} {rules(eqn).lane}"


def wire_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """The bytes that one rank receives in a collective, padding included; 0 for any other operation.

    These are (n-1)/n of the whole value in a gather or a reduce_scatter over n ranks, and twice that in an all_reduce.
    """
    return rules(eqn).wire_bytes(eqn, sizes)


def sends_as_it_lies(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a collective sends a member from its own storage, which must then live until the wait."""
    return rules(eqn).sends_own(eqn, index, sizes)


def received_bytes(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
    """The bytes of the buffer in which a member of a collective is received; in a gather, those of the whole value."""
    return rules(eqn).received_bytes(eqn, index, sizes)


def unpacked_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """The bytes of the buffer in which a gather receives the members that are packed together.

    They are copied out of it: on a GPU as soon as they have arrived, on a CPU when the first of them is waited for.
    """
    return rules(eqn).unpacked_bytes(eqn, sizes)


def sent_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """The bytes of the buffers into which a collective packs, casts or pads its members before it sends them."""
    return rules(eqn).sent_bytes(eqn, sizes)
