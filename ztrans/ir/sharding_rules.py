"""How an equation of the update runs on the shards of its arguments.

Parameters, their gradients and the state of their optimizers are cut along one dim over one mesh axis. An operation
has a pattern (see `patterns`), which may depend on its arguments:

    elementwise     ... -> ...          add, sqrt, where, casts, fused optimizers
    views           a b -> b a          t, view, select: where a dim of the result runs over the same memory
    reductions      a b -> b            sum, mean, norm, amax, any
    products        m _, _ n -> m n     mm, bmm, addmm, mv
    lists           _ b -> _ b          cat along the first dim; stack

Linear operations also run on terms. Everything else runs on whole values. So an operation that is missing from this
table costs messages, but never gives wrong numbers. A user's operator has the rule that the user registered with
`torch.distributed.tensor.experimental.register_sharding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .collectives import rules
from .graph import Eqn, Partial, Placement, Split
from .higher_order import functions
from .layout import chunk, part
from .nested import tensors_in
from .op_facts import ADD, SCALES, adds_zero, arguments_by_name, op_facts, rearranges
from .operations import compute
from .patterns import WHOLE, Pattern, along, letters_of, parse
from .registered_rules import NoRule, registered_rule

_ELEMENTWISE = parse("... -> ...")
# A summand comes first. The terms of a product of matrices would be as large as the product, so none is cut along the
# dim that it sums over.
_PRODUCTS: Mapping[str, Pattern] = {
    "addmm": parse("m n, m _, _ n -> m n"),
    "addmv": parse("m, m _, _ -> m"),
    "baddbmm": parse("b m n, b m _, b _ n -> b m n"),
    "bmm": parse("b m _, b _ n -> b m n"),
    "dot": parse("k, k ->"),
    "mm": parse("m _, _ n -> m n"),
    "mv": parse("m _, _ -> m"),
}
# Reductions, and the operation that combines their results on parts. Norms are combined by their order.
_REDUCTIONS: Mapping[str, str] = {
    "all": "min",
    "amax": "max",
    "amin": "min",
    "any": "max",
    "linalg_vector_norm": "norm",
    "max": "max",
    "mean": "mean",
    "min": "min",
    "sum": "sum",
}
# Operations of one value that run on terms: f(x + y) = f(x) + f(y). Sums and products of several values run on terms
# under further conditions, in `_on_terms`.
_ADDITIVE = {"_to_copy", "mean", "neg", "sum"}


class Rule(NamedTuple):
    """The placements of the `ins` of an equation as it reads them, and of its `outs`."""

    ins: Sequence[Placement]
    outs: Sequence[Placement]


def rule(eqn: Eqn, placements: Sequence[Placement], axis: str, size: int) -> Rule:
    """The rule for an equation whose `ins` have these placements over a mesh axis of `size` ranks.

    Raises: NoRule for an operator of a user without a registered rule.
    """
    whole_values = Rule([None] * len(eqn.ins), [None] * len(eqn.outs))
    if not any(placements):
        return whole_values
    if rules(eqn).over_all_micro_batches:
        # A sum is cut as its terms are. Values are joined whole.
        is_sum = eqn.out.shape == eqn.ins[0].shape
        cuts = [p if is_sum and isinstance(p, Split) else None for p in placements]
        return Rule(cuts, cuts)
    if not isinstance(eqn.op, torch._ops.OpOverload):
        if functions(eqn):  # they may read any elements of their arguments
            return whole_values
        raise NoRule("an operator that calls other code")
    if eqn.op.namespace != "aten":
        return Rule(*registered_rule(eqn, placements, axis, size))
    return _of_torch(eqn, placements, axis, size) or whole_values


def _of_torch(eqn: Eqn, placements: Sequence[Placement], axis: str, size: int) -> Rule | None:
    """The rule of an operation of PyTorch, or None if it runs on whole values."""
    # The constants of the step: tensors from outside of it. They are whole on every rank, and not in `eqn.ins`.
    constants = tensors_in((eqn.args, eqn.kwargs))
    cuts = [p if isinstance(p, Split) else None for p in placements]
    if not any(cuts):
        return None if constants else _on_terms(eqn, placements)
    if any(x.ndim for x in constants):  # it would have to be cut as well
        return None
    pattern = pattern_of(eqn, size)
    return None if pattern is None else _on_cuts(eqn, pattern, cuts, axis)


def _on_cuts(eqn: Eqn, pattern: Pattern, cuts: Sequence[Split | None], axis: str) -> Rule | None:
    """The rule of a pattern for these cuts; None if they are along several letters, or along a dim without one.

    An elementwise operation is cut like its largest argument that is cut.
    """
    ins, outs = letters_of(pattern, tuple(v.shape for v in eqn.ins), len(eqn.outs))
    elements: dict[str, int] = {}  # of the largest argument that is cut along a letter
    for v, letters, cut in zip(eqn.ins, ins, cuts):
        if cut is not None:
            letter = letters[cut.dim]
            elements[letter] = max(v.numel, elements.get(letter, 0))
    if pattern is _ELEMENTWISE:
        elements.pop(WHOLE, None)  # an argument that is broadcast along its cut becomes whole
    elif len(elements) > 1:
        return None
    if not elements or WHOLE in elements:
        return None

    letter = max(elements, key=lambda letter: elements[letter])
    split = lambda dim: Split(axis, dim)
    return Rule(
        along(letter, ins, split, None), along(letter, outs, split, Partial(axis, pattern.terms))
    )


def pattern_of(eqn: Eqn, size: int) -> Pattern | None:
    """The pattern of an operation of PyTorch on the parts of `size` ranks; None if the table has none."""
    facts = op_facts(eqn.op)
    has_one_shape = all(out.shape == eqn.out.shape for out in eqn.results)
    # A fused optimizer of one parameter is elementwise too: its step count and rate are scalars.
    if (facts.elementwise and has_one_shape) or facts.fused_update:
        return _ELEMENTWISE
    if not all(v.numel for v in eqn.ins):
        return None
    if facts.view:
        return _view(eqn, size)
    if facts.name in _REDUCTIONS:
        return _reduction(eqn, size)
    if facts.name in ("stack", "cat"):
        return _list(eqn)
    return _PRODUCTS.get(facts.name)


def _names(count: int) -> list[str]:
    """The letters of a value with `count` dims."""
    return [f"d{dim}" for dim in range(count)]


# ---- views


def _view(eqn: Eqn, size: int) -> Pattern | None:
    """A dim has a letter if a dim of each result covers the same memory.

    t           a b -> b a
    select 0    _ b -> b
    """
    if "stride" in _arguments(eqn):  # a part has other strides
        return None
    v = eqn.ins[0]
    x = torch.empty(v.shape, dtype=v.dtype, device="meta")
    views = compute(eqn, {v: x})
    ins = [WHOLE] * x.ndim
    outs = [[WHOLE] * view.ndim for view in views]
    for dim, letter in enumerate(_names(x.ndim)):
        dims_of_views = (_dim_of_rows(view, x, dim, size) for view in views)
        dims = [view_dim for view_dim in dims_of_views if view_dim is not None]
        if len(dims) == len(views):
            ins[dim] = letter
            for out, view_dim in zip(outs, dims):
                out[view_dim] = letter
    return Pattern((tuple(ins),), tuple(map(tuple, outs)))


def _dim_of_rows(view: torch.Tensor, x: torch.Tensor, cut_dim: int, size: int) -> int | None:
    """The dim along which the parts of a view cover the same memory as the parts of `x` along `cut_dim`, or None.

    The whole dim covers as many bytes as the rows of `x`, and a part of it as many as a part of `x`. All sizes and
    steps are in bytes, because a view may have another dtype.
    """
    rows = x.shape[cut_dim]
    row_bytes = x.stride(cut_dim) * x.element_size()
    all_bytes = rows * row_bytes
    part_bytes = chunk(rows, size) * row_bytes
    steps = [stride * view.element_size() for stride in view.stride()]
    for dim, (count, step) in enumerate(zip(view.shape, steps)):
        covers_rows = count * step == all_bytes and chunk(count, size) * step == part_bytes
        if count > 1 and covers_rows:
            return dim if _stays_within_rows(view, steps, dim, all_bytes) else None
    return None


def _stays_within_rows(view: torch.Tensor, steps: Sequence[int], dim: int, all_bytes: int) -> bool:
    """Whether each row of a view along `dim` lies within a single row of the value.

    A step along another dim must stay within a row, or skip all rows, as a dim before the cut one does.
    """
    reach = view.storage_offset() * view.element_size() % all_bytes
    for other_dim, step in enumerate(steps):
        if other_dim != dim and step % all_bytes:
            reach += (view.shape[other_dim] - 1) * step
    return reach < steps[dim]


# ---- reductions


def _reduction(eqn: Eqn, size: int) -> Pattern:
    """A reduced dim has a letter if the results on its parts can be combined.

    sum 0       a b -> b
    max 1       a _ -> a, a
    """
    name = op_facts(eqn.op).name
    arguments = _arguments(eqn)
    shape = eqn.ins[0].shape
    reduced_dims = _reduced_dims(eqn)
    keeps_dims = len(eqn.out.shape) == len(shape)
    terms = "sum"
    ins = _names(len(shape))
    out = []
    for dim, letter in enumerate(_names(len(shape))):
        if dim not in reduced_dims:
            out.append(letter)
            continue
        if keeps_dims:
            out.append(WHOLE)
        op = _combining_op(name, arguments, shape[dim], size)
        # A second result has the positions of a maximum, which are counted from the start of a part.
        if op is None or len(eqn.outs) > 1:
            ins[dim] = WHOLE
        else:
            terms = op
    return Pattern((tuple(ins),), (tuple(out),), terms)


def _reduced_dims(eqn: Eqn) -> set[int]:
    count = len(eqn.ins[0].shape)
    dims = _arguments(eqn).get("dim")
    if isinstance(dims, int):
        return {dims % count}
    return {dim % count for dim in dims or range(count)}


def _combining_op(name: str, arguments: Mapping[str, Any], rows: int, size: int) -> str | None:
    """The operation that combines the results of a reduction on parts of `rows` rows, or None if there is none."""
    op: str | None = _REDUCTIONS[name]
    if op == "norm":
        order = float(arguments.get("ord", 2))
        if 0 < order < math.inf:
            return f"norm{order}"
        op = {math.inf: "max", -math.inf: "min"}.get(order)
    if op == "mean" and rows % size:
        return None  # parts of different sizes have different weights
    # An empty part has no maximum. But `any` and `all` of nothing are defined.
    has_empty_part = part(rows, size, size - 1)[1] == 0
    is_extreme = op in ("max", "min") and name not in ("any", "all")
    return None if is_extreme and has_empty_part else op


# ---- lists


def _list(eqn: Eqn) -> Pattern:
    """Values in a list are cut alike. `stack` adds a dim; `cat` joins them along one."""
    dim = _arguments(eqn).get("dim", 0) % len(eqn.out.shape)
    names = _names(len(eqn.out.shape))
    before, after = tuple(names[:dim]), tuple(names[dim + 1 :])
    joined = (*before, WHOLE, *after)
    is_stack = op_facts(eqn.op).name == "stack"
    return Pattern((before + after if is_stack else joined,), (joined,))


# ---- terms


def _on_terms(eqn: Eqn, placements: Sequence[Placement]) -> Rule | None:
    """The rule of an operation that may run before its arguments are reduced. They are terms, or whole values."""
    terms = [p for p in placements if isinstance(p, Partial)]
    rule_on_terms = Rule(placements, terms[:1] * len(eqn.outs))
    are_equal_terms = set(placements) == {terms[0]}
    if are_equal_terms and _moves_elements(eqn):
        return rule_on_terms
    # The other operations are linear. They commute with a sum or a mean, but not with a maximum or a norm.
    if terms[0].op not in ("sum", "mean") or not _keeps_kind(eqn):
        return None
    if are_equal_terms and _is_sum_or_cast(eqn):
        return rule_on_terms
    is_scaled = len(terms) == 1 and placements[0] is not None and eqn.op in SCALES
    return rule_on_terms if is_scaled else None


def _is_sum_or_cast(eqn: Eqn) -> bool:
    is_sum_of_two = eqn.op is ADD and len(eqn.ins) == 2
    return is_sum_of_two or op_facts(eqn.op).name in _ADDITIVE


def _keeps_kind(eqn: Eqn) -> bool:
    """Whether all values have one dtype, or are real floats. A cast to integers or bools is not linear."""
    dtypes = {v.dtype for v in (*eqn.ins, *eqn.results)}
    return len(dtypes) == 1 or all(dtype.is_floating_point for dtype in dtypes)


def _moves_elements(eqn: Eqn) -> bool:
    """Whether the results have the elements of the arguments, unchanged."""
    return adds_zero(eqn) or rearranges(eqn) or op_facts(eqn.op).name in ("stack", "cat", "clone")


def _arguments(eqn: Eqn) -> dict[str, Any]:
    """The arguments of an equation by their names."""
    return arguments_by_name(eqn.op, eqn.args, eqn.kwargs)
