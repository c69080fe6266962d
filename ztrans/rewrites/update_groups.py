"""Put equal updates of many parameters next to each other, so that one call computes them all.

An optimizer does the same to every parameter. A program has one equation for each parameter, so that each can be
updated as soon as its gradient arrives. Where several can be updated at the same place, one call of a fused optimizer
or of an operation over lists updates all of them:

    p1 = add(p, u); q1 = add(q, v)    -->    p1, q1 = _foreach_add([p, q], [u, v])

The scalars that an optimizer computes from the step count of each parameter become one vector:

    s1 = div(lr, c1); s2 = div(lr, c2)    -->    s1, s2 = unbind(div(lr, stack([c1, c2])))

Equations are equal if they have the same operation, literals and keyword arguments, and read results of equal
equations. Equal equations never depend on each other, and groups of them never form a cycle, because the arguments of
an equation are part of the comparison. Only consecutive equations of the update change places, so forward, backward and
all messages stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import torch

from ..ir.collectives import rules
from ..ir.dependencies import sorted_by
from ..ir.donation import overwritten_place
from ..ir.graph import Eqn, Graph, Primitive, Var, producers, variables
from ..ir.op_facts import CAST, is_random, op_facts, overloads
from ..ir.structure import structure
from ..ops import HALF
from .number_operands import ITEM, Number

aten = torch.ops.aten
EqnGroup = tuple[Eqn, ...]  # equations that one call computes
# An operation over lists, its arguments and its keyword arguments.
ListCall = tuple[Any, tuple, Mapping[str, Any]]


def group_updates(
    graph: Graph, may_move: Callable[[Eqn], bool] = lambda e: True, parts: int = 1
) -> tuple[Graph, tuple[EqnGroup, ...]]:
    """Put equal updates that may move next to each other.

    Args:
        graph: the program.
        may_move: whether an equation may move.
        parts: how many parts to divide the parameters into, of about equal bytes. Each part is updated separately, so
            that the temporary values of few parameters are live at a time. The scalars of all parameters are computed
            together.

    Returns: The program in the new order, and its groups of several equations.
    """
    passed_once = _passed_once(graph)
    ordered: list[EqnGroup] = []
    for movable, run in groupby(graph.eqns, may_change_places):
        eqns = list(run)
        if movable and len(eqns) > 1:
            ordered += _regrouped(eqns, passed_once, may_move, parts)
        else:
            ordered += [(e,) for e in eqns]
    groups = tuple(group for group in ordered if len(group) > 1)
    return graph.replace(eqns=tuple(chain.from_iterable(ordered))), groups


def is_fused_update(e: Eqn) -> bool:
    """Whether the equation is an update of a fused optimizer."""
    return op_facts(e.op).fused_update


def has_list_form(e: Eqn) -> bool:
    """Whether PyTorch has the operation over lists, with the same bits.

    The bits are the same for elementwise operations, except in half precision, where numbers are rounded first.
    """
    facts = op_facts(e.op)
    if not facts.pointwise:
        return False
    if any(v.dtype in HALF for v in (*e.ins, *e.results)):
        return False
    return hasattr(aten, f"_foreach_{facts.name}")


def is_scalar_arithmetic(e: Eqn) -> bool:
    """Whether an equation computes a scalar from scalars, with the same bits as an element of a vector.

    CPUs compute some functions, such as powers, by different code for vectors than for scalars; GPUs do not.
    """
    facts = op_facts(e.op)
    # PyTorch computes this power as a square root, which is exact.
    is_root = e.op is aten.pow.Tensor_Scalar and e.args[1] == 0.5
    if not ((facts.pointwise and (facts.exact or is_root)) or e.op is CAST):
        return False
    if any(isinstance(v, Number) for v in e.results):
        return False
    # A sum with a factor may be rounded once or twice.
    if variables(e.kwargs) or e.kwargs.get("alpha", 1) != 1 or len(e.results) != 1:
        return False
    return bool(e.ins) and not any(v.shape or v.layout for v in (*e.ins, *e.results))


def may_share_call(e: Eqn) -> bool:
    """Whether one call may compute an update together with equal ones, in some order of the program."""
    has_one_call = is_fused_update(e) or has_list_form(e) or is_scalar_arithmetic(e)
    return may_change_places(e) and (has_one_call or is_read_of_host(e))


def is_read_of_host(e: Eqn) -> bool:
    """Whether an equation reads a scalar as a Python number. A vector of such scalars is read in one call."""
    return e.op is ITEM and isinstance(e.out, Number)


def may_change_places(e: Eqn) -> bool:
    """Whether an equation is an update that may change places with the updates next to it."""
    is_ordered = isinstance(e.op, Primitive) or rules(e).remote or is_random(e)
    return e.region == "update" and not is_ordered


class _Numbering:
    """The numbers of the equations of a run: equal equations have the same number."""

    def __init__(self, passed_once: Collection[Var]) -> None:
        self.passed_once = passed_once
        self._numbers: dict[Hashable, int] = {}
        # For each value, the number of its equation, and its position among the results.
        self._sources: dict[Var, tuple[int, int]] = {}

    def number(self, e: Eqn) -> int:
        """The number of an equation, after the equations that compute its arguments were numbered."""
        number = self._numbers.setdefault(structure(e, self._identity), len(self._numbers))
        for k, v in enumerate(e.results):
            self._sources[v] = number, k
        return number

    def is_computed(self, v: Var) -> bool:
        """Whether an equation of the run has computed a value."""
        return v in self._sources

    def _identity(self, v: Var) -> Hashable:
        """What an argument must have in common with the argument of an equal equation."""
        if v in self.passed_once:
            return v
        # A value from outside the run, such as a gradient, may be another tensor for each parameter.
        is_scalar = not v.shape
        return self._sources.get(v, (v.dtype, is_scalar))


def _passed_once(graph: Graph) -> set[Var]:
    """The values that a call for several parameters has as one argument, such as a learning rate.

    They are keyword arguments, and scalars that several equations with the same operation and the same literals read as
    the same argument. Equations that compute scalars do not count: their operands become vectors. Nor does the keyword
    `value`: operations over lists take a list for it.
    """
    keyword_values: set[Var] = set()
    readers: Counter[tuple[Hashable, int, Var]] = Counter()
    for e in graph.eqns:
        if e.region != "update":
            continue
        keyword_values.update(variables({key: x for key, x in e.kwargs.items() if key != "value"}))
        scalars = [k for k, v in enumerate(e.args) if isinstance(v, Var) and not v.shape]
        if any(v.shape for v in e.results):
            literals = structure(e, lambda v: None)
            for position in scalars:
                readers[literals, position, e.args[position]] += 1
            if isinstance(e.kwargs.get("value"), Var):
                readers[literals, -1, e.kwargs["value"]] += 1
    # A scalar with a single reader may belong to one parameter, such as its step count.
    shared_scalars = {v for (_, _, v), count in readers.items() if count > 1}
    return keyword_values | shared_scalars


def _regrouped(
    run: list[Eqn],
    passed_once: Collection[Var],
    may_move: Callable[[Eqn], bool],
    parts: int,
) -> list[EqnGroup]:
    """The equations of a run as groups of equal ones."""
    numbering = _Numbering(passed_once)
    part_of = _parts(run, parts)
    groups: dict[Hashable, list[Eqn]] = {}
    for e in run:
        number = numbering.number(e)
        # Only the scalars that the run computes form a vector already.
        reads_tensor = is_read_of_host(e) and not numbering.is_computed(e.ins[0])
        has_one_call = may_share_call(e) and not reads_tensor
        key = (number, part_of.get(e, 0)) if has_one_call and may_move(e) else e
        groups.setdefault(key, []).append(e)
    return _ordered(run, list(map(tuple, groups.values())))


def _parts(run: Sequence[Eqn], parts: int) -> dict[Eqn, int]:
    """The part of each equation that computes more than scalars. All equations of a parameter are in one part."""
    if parts == 1:
        return {}
    first_eqn: dict[Eqn, Eqn] = {}  # the first equation of the same parameter
    makers: dict[Var, Eqn] = {}
    result_bytes: Counter[Eqn] = Counter()  # of a parameter, by its first equation
    for e in run:
        if not any(v.shape for v in e.results):
            continue
        parameters = [first_eqn[makers[v]] for v in e.ins if v in makers]
        first_eqn[e] = parameters[0] if parameters else e
        for v in e.results:
            result_bytes[first_eqn[e]] += v.nbytes
            if v.shape:
                makers[v] = e

    part_bytes = max(1, sum(result_bytes.values()) / parts)
    part_of_first: dict[Eqn, int] = {}
    bytes_before = 0
    for e, count in result_bytes.items():
        part_of_first[e] = int(bytes_before / part_bytes)
        bytes_before += count
    return {e: part_of_first[first] for e, first in first_eqn.items()}


def _ordered(run: Sequence[Eqn], groups: Sequence[EqnGroup]) -> list[EqnGroup]:
    """The groups in the order of the run, as far as every value is computed before it is read.

    A group takes the place of its last equation. A group of scalars takes the place of its first, so that its readers
    run early, because their other arguments are live until then.
    """
    group_of: dict[Eqn, int] = {}
    for k, group in enumerate(groups):
        group_of.update(dict.fromkeys(group, k))
    place: dict[int, int] = {}
    for i, e in enumerate(run):
        k = group_of[e]
        if k not in place or any(v.shape for v in e.results):
            place[k] = i

    makers = producers(run)
    needs: dict[int, set[int]] = {k: set() for k in range(len(groups))}
    for e in run:
        needs[group_of[e]].update(group_of[makers[v]] for v in e.ins if v in makers)
    return [groups[k] for k in sorted_by(place.__getitem__, needs)]


def overwriting_first(e: Eqn, in_place: Any) -> Eqn | None:
    """An in-place equation with its overwritten argument first, where operations over lists write.

    Returns: The equation, or None if its arguments cannot be swapped.
    """
    place = overwritten_place(in_place)
    if place == 0:
        return e
    operand = e.args[0]
    # The operand must be a scalar, so that the result has the strides of the overwritten tensor.
    may_swap = place == 1 and op_facts(e.op).commutes and not e.kwargs
    if not may_swap or not isinstance(operand, Var) or operand.shape:
        return None
    return e.replace(args=(e.args[1], operand, *e.args[2:]))


def list_call(eqns: Sequence[Eqn], in_place: bool) -> ListCall | None:
    """The operation over lists that computes equal equations in one call, with its arguments and keyword arguments.

    A scalar tensor that all equations share as an argument is passed once, if an operation accepts that.

    Returns: The call, or None if no operation over lists accepts the arguments.

    >>> x, y = Var("x", torch.float32, (2,)), Var("y", torch.float32, (3,))
    >>> list_call([Eqn(aten.add.Scalar, (v, 1), (v,)) for v in (x, y)], in_place=True)
    (<OpOverload(op='aten._foreach_add_', overload='Scalar')>, ([x: f32[2], y: f32[3]], 1), {})
    """
    first = eqns[0]
    if not isinstance(first.op, torch._ops.OpOverload):
        return None
    if in_place and not isinstance(first.args[0], Var):
        return None
    suffix = "_" if in_place else ""
    packet = getattr(aten, f"_foreach_{op_facts(first.op).name}{suffix}", None)

    # Only operations on a single tensor have `value` as a keyword; over lists it is the last argument.
    kwargs = dict(first.kwargs)
    rows = [e.args for e in eqns]
    if "value" in kwargs:
        del kwargs["value"]
        rows = [(*e.args, e.kwargs["value"]) for e in eqns]

    # A scalar that is passed once needs no copies, but not every operation over lists accepts a tensor there.
    for shared_once in (True, False):
        args = list(_list_arguments(rows, shared_once))
        for overload in overloads(packet):
            if _accepts(overload, args, kwargs):
                return overload, tuple(args), kwargs
    return None


def _list_arguments(rows: Sequence[tuple], shared_once: bool) -> Iterator[Any]:
    """The arguments of an operation over lists: lists of tensors or of numbers, but literals and equal numbers once.

    With `shared_once` a scalar that all equations share is passed once too, unless it is the first argument.
    """
    for position, column in enumerate(zip(*rows)):
        first = column[0]
        passed_once = not isinstance(first, Var)
        if not passed_once and position > 0 and (shared_once or isinstance(first, Number)):
            passed_once = not first.shape and len(set(column)) == 1
        yield first if passed_once else list(column)


def _accepts(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an overload over lists accepts arguments of these types."""
    keywords = {a.name for a in overload._schema.arguments if a.kwarg_only}
    if not kwargs.keys() <= keywords:
        return False
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    types = [str(a.type) for a in positional[: len(args)]]
    if types != [_schema_type(x) for x in args]:
        return False
    rest = positional[len(args) :]
    return all(a.has_default_value() for a in rest)


def _schema_type(x: Any) -> str:
    """The type of an argument in a schema."""
    if isinstance(x, list):
        return f"List[{_schema_type(x[0])}]"
    return "Tensor" if isinstance(x, Var) and not isinstance(x, Number) else "number"
