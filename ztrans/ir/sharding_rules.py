"""How an equation runs on parts of its arguments: the update on shards, and a segment in tiles (see `analyses`).

Parameters, their gradients and the state of their optimizers are cut along one dim over one mesh axis; the values of a
segment are cut along one dim over time. An operation has a pattern (see `patterns`), which may depend on its arguments:

    elementwise     ... -> ...          add, sqrt, where, casts, fused optimizers
    views           a b -> b a          t, view, select: where a dim of the result runs over the same memory
    reductions      a b -> b            sum, mean, norm, amax, any
    products        m k, k n -> m n     mm, bmm, addmm, mv
    lists           _ b -> _ b          cat along the first dim; stack
    rows            b _ -> b _          softmax along the last dim, layer norms, attention, reads by index, losses

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
from .graph import Eqn, Partial, Placement, Split, Var
from .higher_order import functions
from .layout import chunk, part
from .nested import tensors_in
from .op_facts import ADD, SCALES, adds_zero, arguments_by_name, op_facts, rearranges
from .operations import compute
from .patterns import WHOLE, Letters, Pattern, along, letters_of, parse
from .registered_rules import NoRule, registered_rule

_ELEMENTWISE = parse("... -> ...")
# A summand comes first. It would be added once in each term, so these products are not cut along the dim that they sum
# over.
_PRODUCTS: Mapping[str, Pattern] = {
    "addmm": parse("m n, m _, _ n -> m n"),
    "addmv": parse("m, m _, _ -> m"),
    "baddbmm": parse("b m n, b m _, b _ n -> b m n"),
    "bmm": parse("b m k, b k n -> b m n"),
    "dot": parse("k, k ->"),
    "mm": parse("m k, k n -> m n"),
    "mv": parse("m k, k -> m"),
}
# Reductions, and the operation that combines their results on parts, if there is one. Norms are combined by their
# order.
_REDUCTIONS: Mapping[str, str | None] = {
    "all": "min",
    "amax": "max",
    "amin": "min",
    "any": "max",
    "argmax": None,
    "argmin": None,
    "linalg_vector_norm": "norm",
    "logsumexp": None,
    "max": "max",
    "mean": "mean",
    "min": "min",
    "sum": "sum",
}
# Operations of one value that run on terms: f(x + y) = f(x) + f(y). Sums and products of several values run on terms
# under further conditions, in `_on_terms`.
_ADDITIVE = {"_to_copy", "mean", "neg", "sum"}
# Operations along their argument `dim`: each row of the other dims is computed by itself.
_ALONG_A_DIM = {
    *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
    *("cumsum", "scatter", "scatter_add", "slice_backward"),
}
# Normalizations of rows; `input` has the rows. Their weights are whole, and the gradients of weights are terms.
_NORMS = {
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
    *("native_layer_norm", "native_layer_norm_backward"),
}
_ATTENTION = {
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    *(
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
}
MEAN, SUM = 1, 2  # the reductions of a loss, as PyTorch numbers them


class Rule(NamedTuple):
    """The placements of the `ins` of an equation as it reads them, and of its `outs`."""

    ins: Sequence[Placement]
    outs: Sequence[Placement]


def rule(
    eqn: Eqn, placements: Sequence[Placement], axis: str, size: int, contracts: bool = False
) -> Rule:
    """The rule for an equation whose `ins` have these placements over a mesh axis of `size` ranks.

    Args:
        contracts: whether a product of matrices may be cut along the dim that it sums over. Its terms are as large as
            the product, so ranks would send more than the parts of its arguments.

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
    if eqn.op.namespace not in ("aten", "ztrans"):
        return Rule(*registered_rule(eqn, placements, axis, size))
    found = _of_torch(eqn, placements, axis, size) or whole_values
    is_contracted = op_facts(eqn.op).name in _PRODUCTS and any(
        isinstance(p, Partial) for p in found.outs
    )
    return whole_values if is_contracted and eqn.out.shape and not contracts else found


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
    term = Partial(axis, pattern.terms) if pattern.terms else None
    return Rule(along(letter, ins, split, None), along(letter, outs, split, term))


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
    return _PRODUCTS.get(facts.name) or _of_rows(eqn)


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


# ---- rows


def _of_rows(eqn: Eqn) -> Pattern | None:
    """The pattern of an operation that computes each row of its results from the same row of its arguments.

    _softmax 1              a _ -> a _
    select_backward 0       b -> _ b
    native_layer_norm       a b _, _, _ -> a b _, a b _, a b _
    attention               b h _ _, b h _ _, b h _ _ -> b h _ _, b h _
    embedding               _ d, a b -> a b d
    gather 1                a _, a b -> a b
    """
    name = op_facts(eqn.op).name
    arguments = _arguments(eqn)
    if name in _ALONG_A_DIM:
        return _along_a_dim(eqn, arguments["dim"])
    if name == "gather":
        rows = tuple(_names(len(eqn.out.shape)))
        dim = arguments["dim"] % max(1, len(rows))
        alike = [n == m for n, m in zip(eqn.ins[0].shape, eqn.ins[1].shape)]
        source = (k if d != dim and alike[d] else WHOLE for d, k in enumerate(rows))
        if len(alike) != len(rows) or not all(same or d == dim for d, same in enumerate(alike)):
            return None
        return Pattern((tuple(source), rows), (rows,))
    if name in _NORMS:
        return _norm(eqn, len(arguments["normalized_shape"]))
    if name in _ATTENTION:
        return _attention(eqn)
    if name.startswith(("nll_loss_", "nll_loss2d_")):
        return _nll_loss(eqn)
    if name == "embedding":
        rows = tuple(_names(len(eqn.ins[1].shape)))
        return Pattern(((WHOLE, "row"), rows), ((*rows, "row"),))
    if name == "embedding_dense_backward":
        rows = tuple(_names(len(eqn.ins[1].shape)))
        # Gradients that are scaled by frequency depend on all indices.
        scales = arguments.get("scale_grad_by_freq", False)
        return None if scales else Pattern(((*rows, "row"), rows), ((WHOLE, "row"),))
    if name == "select_backward":
        names = _names(len(eqn.out.shape))
        dim = arguments["dim"] % len(names)
        rest = (*names[:dim], *names[dim + 1 :])
        return Pattern((rest,), ((*names[:dim], WHOLE, *names[dim + 1 :]),))
    return None


def _along_a_dim(eqn: Eqn, dim: int) -> Pattern | None:
    """All values have one shape, except along `dim`."""
    shape = eqn.out.shape
    if not shape:
        return None
    dim %= len(shape)
    rest = lambda v: (*v.shape[:dim], *v.shape[dim + 1 :])
    if any(rest(v) != rest(eqn.out) or len(v.shape) != len(shape) for v in eqn.ins):
        return None
    names = _names(len(shape))
    names[dim] = WHOLE
    return Pattern((tuple(names),), (tuple(names),))


def _norm(eqn: Eqn, normalized: int) -> Pattern:
    """A norm over the last dims: each row of `input` has its own statistics.

    Only the first dim of several rows is cut: on CPUs PyTorch's backward reads statistics as if they were contiguous.
    """
    arguments = _arguments(eqn)
    shape = arguments["input"].shape
    weights = [arguments.get("weight"), arguments.get("bias")]
    names = [WHOLE] * (len(shape) - normalized)
    first = next((dim for dim in range(len(names)) if shape[dim] > 1), None)
    if first is not None:
        names[first] = "row"

    def letters(v: Var | None) -> tuple[str, ...]:
        if v is None or v in weights:
            return ()
        return (*names, *(WHOLE for _ in v.shape[len(names) :]))

    whole = lambda v: (WHOLE,) * len(v.shape)
    ins = tuple(whole(v) if v in weights else letters(v) for v in eqn.ins)
    if op_facts(eqn.op).name.endswith("_backward"):
        gradients_of_weights = tuple(() if v is None else whole(v) for v in eqn.outs[1:])
        return Pattern(ins, (letters(eqn.outs[0]), *gradients_of_weights))
    return Pattern(ins, tuple(map(letters, eqn.outs)))


def _attention(eqn: Eqn) -> Pattern | None:
    """Attention of each sequence and head by itself. The seeds of a dropout belong to no sequence."""
    if op_facts(eqn.op).name.endswith("_backward") and len(eqn.results) > 3:
        return None  # the fourth gradient is that of a bias, which may be broadcast

    def letters(v: Var | None) -> tuple[str, ...]:
        if v is None:
            return ()
        dims = len(v.shape)
        return ("b", "h", WHOLE, WHOLE)[:dims] if dims > 2 else (WHOLE,) * dims

    return Pattern(tuple(map(letters, eqn.ins)), tuple(map(letters, eqn.outs)), None)


def _nll_loss(eqn: Eqn) -> Pattern | None:
    """The losses of all samples, or their sum. A mean is no term: backward reads the weight of all samples."""
    arguments = _arguments(eqn)
    logits, target = arguments["self"], arguments["target"]
    if arguments["reduction"] == MEAN or len(logits.shape) == 1:
        return None
    is_sum = arguments["reduction"] == SUM
    names = {logits: ("n", WHOLE, "a", "b"), target: ("n", "a", "b")}
    if not is_sum and "grad_output" in arguments:
        names[arguments["grad_output"]] = names[target]
    letters = lambda v: names.get(v, (WHOLE,) * 4)[: len(v.shape)]
    is_backward = op_facts(eqn.op).name.endswith("_backward")
    # The second result is the weight of all samples, which backward reads for a mean.
    losses: tuple[Letters, ...] = (() if is_sum else letters(target), ())
    outs = (letters(logits),) if is_backward else losses
    return Pattern(tuple(map(letters, eqn.ins)), outs, "sum" if is_sum else None)


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
