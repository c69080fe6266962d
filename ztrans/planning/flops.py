"""Count the floating-point operations that the kernel of an equation computes.

PyTorch has formulas for products and convolutions; the formulas of fused attention, grouped products and recurrent
layers are here. A causal kernel computes half of the scores, so half of them count. Backward of fused attention
computes the scores again, which counts too: it has five products where forward has two. An equation without a formula
counts one operation for each element of its results, which is right if it takes as long as its bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ..ir.graph import Eqn, Graph, Primitive, Var
from ..ir.higher_order import functions, inner_work
from ..ir.layout import local_shape
from ..ir.op_facts import arguments_by_name, is_view, op_facts
from ..rewrites.flex_attention import is_attention as is_flex_attention

aten = torch.ops.aten
hops = torch.ops.higher_order
_KNOWN_NAMESPACES = ("aten", "prims", "ztrans", "_c10d_functional", "c10d_functional")
# PyTorch's own operations without a formula take as long as their bytes, except the ones with these prefixes.
_COMPUTE_MORE = (
    *("linalg_", "_linalg_", "cholesky", "_cholesky", "lu_", "_lu_", "triangular_solve", "geqrf"),
    *("matrix_exp", "_fft_", "_cdist", "_trilinear", "addbmm", "_sparse", "_weight_int"),
    *("lstm", "gru", "rnn_", "_cudnn_rnn", "miopen_", "mkldnn_"),
)


class Attention(NamedTuple):
    """What a call of fused attention computes on one rank.

    A query attends to `keys` keys on average: with a causal mask, to half of them.
    """

    queries: int  # of all heads and sequences
    keys: float
    width: int  # of a query and a key
    value_width: int
    causal: bool
    backward: bool

    @property
    def flops(self) -> int:
        """Two products in forward; in backward the scores again, and the gradients of scores, queries, keys and values.

        >>> Attention(8, 4.0, 64, 64, True, False).flops, Attention(8, 4.0, 64, 64, True, True).flops
        (8192, 20480)
        """
        scores = 2 * self.queries * self.keys
        if self.backward:
            return round(scores * (3 * self.width + 2 * self.value_width))
        return round(scores * (self.width + self.value_width))


class _Kernel(NamedTuple):
    """How a kernel of fused attention reads its arguments, whose names are the same for all kernels."""

    heads_second: bool  # [batch, heads, tokens, width], not [batch, tokens, heads, width]
    # If queries and keys differ in number, a causal mask aligns the last query with the last key, not the first ones.
    ends_together: bool = False


_HEADS_SECOND = _Kernel(heads_second=True)
_KERNELS: Mapping[str, _Kernel] = {
    "_scaled_dot_product_flash_attention": _HEADS_SECOND,
    "_scaled_dot_product_flash_attention_for_cpu": _HEADS_SECOND,
    "_scaled_dot_product_efficient_attention": _HEADS_SECOND,
    "_scaled_dot_product_cudnn_attention": _HEADS_SECOND,
    "_scaled_dot_product_fused_attention_overrideable": _HEADS_SECOND,
    "_cudnn_attention_forward": _HEADS_SECOND,
    "_flash_attention_forward": _Kernel(heads_second=False, ends_together=True),
    "_efficient_attention_forward": _Kernel(heads_second=False),
}


def flops(e: Eqn, graph: Graph) -> int:
    """Count the floating-point operations of one equation on the first rank."""
    inner = inner_work(e, lambda g: sum(flops(each, g) for each in g.eqns if not is_view(each)))
    if inner is not None:
        return inner
    if isinstance(e.op, Primitive):
        return 0
    attention = attention_of(e, graph)
    if attention is not None:
        return attention.flops
    formula = _formula(e.op)
    if formula is not None:
        return _flops_by_formula(formula, e, graph)
    # Without a formula, one operation for each element of the results.
    first_rank = dict.fromkeys(graph.axes, 0)
    return sum(math.prod(local_shape(o, graph.axes, first_rank)) for o in e.results)


def attention_of(e: Eqn, graph: Graph) -> Attention | None:
    """The attention that an equation computes on the first rank, fused or by flex_attention; None for other equations.

    The mask of flex_attention is a function, so it counts as attention to all keys. Packed sequences count as if each
    had the greatest length.
    """
    first_rank = dict.fromkeys(graph.axes, 0)

    def shape(v: Var) -> tuple[int, ...]:
        return local_shape(v, graph.axes, first_rank)

    if is_flex_attention(e):
        backward = e.op is hops.flex_attention_backward
        query, key, value = map(shape, e.args[:3])
        return Attention(math.prod(query[:-1]), key[-2], query[-1], value[-1], False, backward)

    name = op_facts(e.op).name
    backward = name.endswith("_backward")
    forward_name = name.removesuffix("_backward")
    kernel = _KERNELS.get(forward_name) or _KERNELS.get(f"{forward_name}_forward")
    if kernel is None:
        return None
    arguments = arguments_by_name(e.op, e.args, e.kwargs)
    query, key, value = (shape(arguments[each]) for each in ("query", "key", "value"))
    query_count, key_count = _lengths(arguments, query, key, kernel)
    mask = arguments.get("custom_mask_type", 0)
    causal = bool(arguments.get("is_causal") or mask)
    ends_together = kernel.ends_together or mask == 2
    keys = _mean_keys(query_count, key_count, ends_together) if causal else float(key_count)
    return Attention(math.prod(query[:-1]), keys, query[-1], value[-1], causal, backward)


def _lengths(
    arguments: Mapping[str, Any], query: tuple[int, ...], key: tuple[int, ...], kernel: _Kernel
) -> tuple[int, int]:
    """The greatest numbers of queries and of keys in a sequence."""
    if arguments.get("cum_seq_q") is not None:
        return int(arguments["max_q"]), int(arguments["max_k"])
    if arguments.get("cu_seqlens_q") is not None:
        return int(arguments["max_seqlen_q"]), int(arguments["max_seqlen_k"])
    dim = -2 if kernel.heads_second else -3
    return query[dim], key[dim]


def _mean_keys(queries: int, keys: int, ends_together: bool) -> float:
    """The average number of keys that a query attends to under a causal mask.

    >>> _mean_keys(8, 8, False), _mean_keys(4, 8, False), _mean_keys(4, 8, True), _mean_keys(8, 4, False)
    (4.0, 2.0, 6.0, 3.0)
    """
    if queries <= keys:
        return keys - queries / 2 if ends_together else queries / 2
    masked = keys**2 / (2 * queries)
    return masked if ends_together else keys - masked


def _formula(op: Any) -> Callable[..., Any] | None:
    """The formula of an operation, a function of the shapes of its arguments and results; None if it has none."""
    packet = getattr(op, "overloadpacket", op)
    return flop_registry.get(packet) or _PRODUCTS.get(op_facts(op).name)


def _flops_by_formula(formula: Callable[..., Any], e: Eqn, graph: Graph) -> int:
    """Count the operations of an equation on the first rank by a formula."""
    first_rank = dict.fromkeys(graph.axes, 0)

    def meta(v: Var) -> torch.Tensor:
        return torch.empty(local_shape(v, graph.axes, first_rank), dtype=v.dtype, device="meta")

    arguments = pytree.tree_map_only(Var, meta, list(e.args))
    outs: list[Any] = []
    for k, out in enumerate(e.outs):
        if out is not None:
            outs.append(meta(out))
        else:
            # A gradient that is not needed is None. It would have the shape of its argument.
            outs.append(arguments[k + 1] if k + 1 < len(arguments) else None)
    out_val = outs[0] if len(outs) == 1 else tuple(outs)
    return int(formula(*arguments, **e.kwargs, out_val=out_val))


def _product_flops(
    left: torch.Tensor, right: torch.Tensor, *others: Any, out_val: torch.Tensor, **options: Any
) -> int:
    """The operations of a product of integers, or of a product for each group of rows, as in a mixture of experts."""
    operations = 2 * out_val.numel() * left.shape[-1]
    # Two matrices are grouped along the dim that the product sums over, with a result for each group.
    if left.ndim == right.ndim == 2 < out_val.ndim:
        return operations // out_val.shape[0]
    return operations


def _recurrent_flops(x: torch.Tensor, *others: Any, times: int = 1, **options: Any) -> int:
    """The operations of a recurrent layer's products, `times` times.

    Each time step of each row is multiplied by the weights of all gates, for the input and for the hidden state.
    """
    matrices = others[0] if isinstance(others[0], list) else others[:2]
    rows = x.numel() // x.shape[-1]
    return 2 * times * rows * sum(w.numel() for w in matrices if w.ndim == 2)


# Backward has two products for each of forward: for the gradient of the values, and for the gradient of the weight.
_recurrent_backward_flops = functools.partial(_recurrent_flops, times=2)

_PRODUCTS: Mapping[str, Callable[..., Any]] = {
    "_cudnn_rnn": _recurrent_flops,
    "_cudnn_rnn_backward": _recurrent_backward_flops,
    "_grouped_mm": _product_flops,
    "_int_mm": _product_flops,
    "_scaled_grouped_mm": _product_flops,
    "mkldnn_rnn_layer": _recurrent_flops,
    "mkldnn_rnn_layer_backward": _recurrent_backward_flops,
}


def has_known_cost(e: Eqn) -> bool:
    """Whether an equation has a formula, or is known to take as long as its bytes.

    PyTorch's own operations without a formula take as long as their bytes, except a few. Other operations, such as the
    user's Triton kernels, have a known cost only if PyTorch's FLOP counter has a formula for them
    (`torch.utils.flop_counter.register_flop_formula`).
    """
    if isinstance(e.op, Primitive) or functions(e) or _formula(e.op) is not None:
        return True
    facts = op_facts(e.op)
    if facts.matmul or facts.view or facts.pointwise or facts.reduction or facts.fuses:
        return True
    if not isinstance(e.op, torch._ops.OpOverload):
        return False  # a Triton kernel
    return e.op.namespace in _KNOWN_NAMESPACES and not facts.name.startswith(_COMPUTE_MORE)
