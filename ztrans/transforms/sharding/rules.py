"""How an equation of the update runs on the shards of its arguments.

Parameters, their gradients and the state of their optimizers are cut along one dim over one mesh axis.

    elementwise   the result is cut as the arguments are              add, sqrt, where, casts, fused optimizers
    views         cut where a dim runs over the same memory           t, view, select along another dim
    reductions    along the cut dim: terms, one on each rank          sum, mean, norm, amax, any
                  along other dims: cut
    products      cut, if one factor is cut along rows or columns     mm, bmm, addmm, mv
    lists         cut, unless they are joined along that dim          stack, cat

Linear operations also run on terms. Everything else runs on whole values, and so does a product that sums over the cut
dim, unless its result is a single number. So an operation that is missing from this table costs messages, but never
gives wrong numbers. A user's operator has the rule that the user registered with
`torch.distributed.tensor.experimental.register_sharding`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ir.collectives import rules
from ...ir.graph import Eqn, Partial, Placement, Split, variables
from ...ir.higher_order import functions
from ...ir.layout import chunk, part
from ...ir.nested import tensors_in
from ...ir.op_facts import ADD, SCALES, adds_zero, arguments_by_name, op_facts, rearranges
from ...ir.operations import compute
from .registered_rules import NoRule, registered_rule

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
# Products in the notation of `torch.einsum`: the indices of each factor and of the result. A summand comes first.
_PRODUCTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "addmm": (("ij", "ik", "kj"), "ij"),
    "addmv": (("i", "ik", "k"), "i"),
    "baddbmm": (("bij", "bik", "bkj"), "bij"),
    "bmm": (("bik", "bkj"), "bij"),
    "dot": (("k", "k"), ""),
    "mm": (("ik", "kj"), "ij"),
    "mv": (("ik", "k"), "i"),
}
# Operations of one value that run on terms: f(x + y) = f(x) + f(y). Sums and products of several values run on terms
# under further conditions, in `_on_terms`.
_ADDITIVE = {"_to_copy", "mean", "neg", "sum"}
Cuts = Sequence[Split | None]


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
    rules_of_kinds = [_elementwise, _fused_optimizer]
    if all(v.numel for v in eqn.ins):
        rules_of_kinds += [_view, _reduction, _product, _list]
    for rule_of_kind in rules_of_kinds:
        sharding_rule = rule_of_kind(eqn, cuts, axis, size)
        if sharding_rule is not None:
            return sharding_rule
    return None


# ---- elementwise operations


def _elementwise(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """The result is cut like the largest argument that is cut."""
    if not _is_elementwise(eqn):
        return None
    # Dims are counted from the last one, because shapes are broadcast from there.
    shape = eqn.out.shape
    dims: dict[int, int] = {}  # by the number of elements of the argument
    for v, cut in zip(eqn.ins, cuts):
        if cut is not None:
            dim = cut.dim + len(shape) - len(v.shape)
            if v.shape[cut.dim] == shape[dim]:
                dims.setdefault(v.numel, dim)
    if not dims:
        return None

    dim = dims[max(dims)]
    ins: list[Placement] = []
    for v in eqn.ins:
        own_dim = dim + len(v.shape) - len(shape)
        is_broadcast = own_dim < 0 or v.shape[own_dim] != shape[dim]
        ins.append(None if is_broadcast else Split(axis, own_dim))
    return Rule(ins, [Split(axis, dim)] * len(eqn.outs))


def _is_elementwise(eqn: Eqn) -> bool:
    has_one_shape = all(out.shape == eqn.out.shape for out in eqn.results)
    return op_facts(eqn.op).elementwise and has_one_shape


def _fused_optimizer(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """A fused optimizer of one parameter is elementwise, except that it reads a whole step count and rate."""
    if not op_facts(eqn.op).fused_update:
        return None
    cut = next(cut for cut in cuts if cut is not None)
    ins: list[Placement] = []
    for name, argument in _arguments(eqn).items():
        is_cut = isinstance(argument, list | tuple) and name != "state_steps"
        ins += [cut if is_cut else None for _ in variables(argument)]
    return Rule(ins, [cut] * len(eqn.outs))


# ---- views


def _view(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """Each result of a view is cut along the dim that covers the same memory as the cut dim of the argument."""
    cut = cuts[0]
    if cut is None or not op_facts(eqn.op).view:
        return None
    if "stride" in _arguments(eqn):  # a part has other strides
        return None
    v = eqn.ins[0]
    whole_value = torch.empty(v.shape, dtype=v.dtype, device="meta")
    outs: list[Placement] = []
    for view in compute(eqn, {v: whole_value}):
        dim = _dim_of_rows(view, whole_value, cut.dim, size)
        if dim is None:
            return None
        outs.append(Split(axis, dim))
    return Rule(cuts, outs)


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


def _reduction(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """A reduction along the cut dim gives terms, one on each rank. Along other dims it keeps the cut."""
    name = op_facts(eqn.op).name
    cut = cuts[0]
    if name not in _REDUCTIONS or cut is None:
        return None
    shape = eqn.ins[0].shape
    dims = _reduced_dims(eqn)
    if cut.dim not in dims:
        dim = cut.dim
        if len(eqn.out.shape) < len(shape):  # the result lacks the reduced dims
            dim -= sum(reduced_dim < cut.dim for reduced_dim in dims)
        return Rule(cuts, [Split(axis, dim)] * len(eqn.outs))
    combining_op = _combining_op(name, _arguments(eqn), shape[cut.dim], size)
    # A second result has the positions of a maximum, which are counted from the start of a part.
    if combining_op is None or len(eqn.outs) > 1:
        return None
    return Rule(cuts, [Partial(axis, combining_op)])


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


# ---- products


def _product(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """A product is cut along the only index along which factors are cut. An inner product is a sum."""
    name = op_facts(eqn.op).name
    if name not in _PRODUCTS:
        return None
    factors, result = _PRODUCTS[name]
    # A summand may lack dims at the front of the result, along which it is broadcast.
    indices = [factor[len(factor) - len(v.shape) :] for factor, v in zip(factors, eqn.ins)]
    index = _only_cut_index(eqn, indices, cuts)
    if index is None:
        return None
    if index in result:
        out: Placement = Split(axis, result.index(index))
    elif not result:
        out = Partial(axis, "sum")
    else:
        return None
    ins: list[Placement] = []
    for own_indices in indices:
        ins.append(Split(axis, own_indices.index(index)) if index in own_indices else None)
    return Rule(ins, [out])


def _only_cut_index(eqn: Eqn, indices: Sequence[str], cuts: Cuts) -> str | None:
    """The index along which factors are cut; None if there are two, or if a summand is broadcast along it."""
    cut_indices = set()
    for own_indices, cut in zip(indices, cuts):
        if cut is not None:
            cut_indices.add(own_indices[cut.dim])
    if len(cut_indices) > 1:
        return None
    (index,) = cut_indices
    lengths = set()
    for own_indices, v in zip(indices, eqn.ins):
        if index in own_indices:
            lengths.add(v.shape[own_indices.index(index)])
    return index if len(lengths) == 1 else None


# ---- lists


def _list(eqn: Eqn, cuts: Cuts, axis: str, size: int) -> Rule | None:
    """Values in a list are cut alike. `stack` adds a dim; `cat` joins them along a dim that may not be cut."""
    name = op_facts(eqn.op).name
    if name not in ("stack", "cat"):
        return None
    cut_dims = {cut.dim for cut in cuts if cut is not None}
    if len(cut_dims) > 1:
        return None
    (cut_dim,) = cut_dims
    list_dim = _arguments(eqn).get("dim", 0) % len(eqn.out.shape)
    if name == "cat" and cut_dim == list_dim:
        return None
    shift = 1 if name == "stack" and list_dim <= cut_dim else 0
    return Rule([Split(axis, cut_dim)] * len(eqn.ins), [Split(axis, cut_dim + shift)])


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
