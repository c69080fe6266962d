"""Facts about operations: what kind each one is, such as elementwise, a view, or a matrix product.

PyTorch itself knows many of them: its tags say which operations are elementwise or random, schemas say which are views,
and its FLOP counter knows most matrix products. `_ROWS` has what PyTorch does not say, one row for each operation. A
fact is a property of the operation alone. If something depends on arguments, such as `alpha` of `add`, the pass that
asks must check it.

    op_facts(torch.ops.aten.add.Tensor)    OpFacts(name='add', pointwise=True, exact=True, linear=True, ...)

Primitives have rules (see `rules`) and none of these facts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:  # `graph` imports this module
    from .graph import Eqn

aten = torch.ops.aten
CAST = aten._to_copy.default
ADD = aten.add.Tensor
# Their result is their argument.
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
# A number as the second argument of one of these scales the first.
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


@dataclass(frozen=True)
class OpFacts:
    """The facts about an operation.

    Attributes:
        name: the name without the overload, such as `add`; with the namespace if the operation is not PyTorch's.
        pointwise: each element of the result is computed from the elements of the arguments at the same place. PyTorch
            tags these operations.
        elementwise: it is pointwise, or a copy, a constructor or a draw of random numbers, which PyTorch does not tag.
        reduction: each element of the result is computed from the elements along some dims.
        random: it may draw random numbers. An equation draws them depending on its arguments (see `draws`).
        view: its results are new tensors that share memory with an argument.
        matmul: it is a matrix product, a convolution or attention: a formula counts its FLOPs.
        fused_update: it is the update of a fused optimizer.
        exact: IEEE 754 rounds it correctly, so a part of the arguments gives the same bits as the whole.
        linear: scaling its terms together, or a factor or a numerator alone, scales the result.
        permutes: it is a view that shows every element of its argument once.
        lazy: it is a view that negates or conjugates the elements when they are read.
        by_row: each row of the result is computed from the same row of the arguments, and written after that is read.
        arithmetic: it is a sum, a difference, a product or a quotient. It may write over an argument even if its
            arguments have different strides.
        commutes: exchanging its first two arguments changes nothing.
        adds: it adds to its first argument, and may write the sum over it if it does not read that elsewhere.
        replaces: it replaces its first argument, whose elements it does not read, so it may write over it.
        cheap: it takes only the time to read the arguments and write the result, like an elementwise operation.
        fuses: TorchInductor fuses it with its neighbours, although it is neither elementwise nor a reduction.
    """

    name: str
    pointwise: bool = False
    elementwise: bool = False
    reduction: bool = False
    random: bool = False
    view: bool = False
    matmul: bool = False
    fused_update: bool = False
    exact: bool = False
    linear: bool = False
    permutes: bool = False
    lazy: bool = False
    by_row: bool = False
    arithmetic: bool = False
    commutes: bool = False
    adds: bool = False
    replaces: bool = False
    cheap: bool = False
    fuses: bool = False


# The facts about operations that PyTorch does not say, by name.
_ROWS: Mapping[str, tuple[str, ...]] = {
    # Elementwise. Functions such as `exp` are not exact: CPUs have different code for full vectors and for the elements
    # after the last full vector.
    "abs": ("exact",),
    "add": ("exact", "linear", "arithmetic", "commutes"),
    "ceil": ("exact",),
    "clamp": ("exact",),
    "clamp_max": ("exact",),
    "clamp_min": ("exact",),
    "div": ("exact", "linear", "arithmetic"),
    "eq": ("exact",),
    "floor": ("exact",),
    "ge": ("exact",),
    "gt": ("exact",),
    "isinf": ("exact",),
    "isnan": ("exact",),
    "le": ("exact",),
    "lt": ("exact",),
    "maximum": ("exact", "commutes"),
    "minimum": ("exact", "commutes"),
    "mul": ("exact", "linear", "arithmetic", "commutes"),
    "nan_to_num": ("exact",),
    "ne": ("exact",),
    "neg": ("exact", "linear"),
    "reciprocal": ("exact",),
    "round": ("exact",),
    "rsub": ("exact",),
    "sign": ("exact",),
    "sqrt": ("exact",),
    "sub": ("exact", "linear", "arithmetic"),
    "trunc": ("exact",),
    "where": ("exact", "linear"),
    # Copies and constructors.
    "_to_copy": ("elementwise", "cheap", "fuses"),
    "cat": ("fuses",),
    "clone": ("cheap", "linear"),
    "constant_pad_nd": ("fuses",),
    "copy": ("elementwise", "fuses", "replaces"),
    "empty_like": ("elementwise",),
    "fill": ("elementwise",),
    "full_like": ("elementwise", "fuses"),
    "ones_like": ("elementwise", "fuses"),
    "stack": ("fuses",),
    "zeros_like": ("elementwise", "fuses"),
    # Elementwise, without the tag in torch 2.11.
    "_conj_physical": ("pointwise", "elementwise"),
    # Draws of a random number for each element.
    "bernoulli": ("elementwise",),
    "exponential": ("elementwise",),
    "native_dropout": ("elementwise",),
    "normal_functional": ("elementwise",),
    "rand_like": ("elementwise",),
    "randint_like": ("elementwise",),
    "randn_like": ("elementwise",),
    "random": ("elementwise",),
    "uniform": ("elementwise",),
    # Views. The schemas of the last four do not say that the results share memory with the argument.
    "_conj": ("lazy",),
    "_neg_view": ("lazy",),
    "alias": ("permutes",),
    "detach": ("permutes",),
    "permute": ("permutes",),
    "squeeze": ("permutes",),
    "t": ("permutes",),
    "transpose": ("permutes",),
    "unsqueeze": ("permutes",),
    "view": ("permutes",),
    "_unsafe_view": ("view", "permutes"),
    "lift": ("view", "permutes"),
    "unsafe_split": ("view",),
    "unsafe_split_with_sizes": ("view",),
    # Sums and norms.
    "linalg_vector_norm": ("fuses",),
    "mean": ("linear",),
    "sum": ("linear",),
    # Normalizations and losses.
    "_fused_rms_norm": ("fuses",),
    "_fused_rms_norm_backward": ("fuses",),
    "_log_softmax": ("by_row", "fuses"),
    "_log_softmax_backward_data": ("by_row", "fuses"),
    "_native_batch_norm_legit_functional": ("fuses",),
    "_softmax": ("by_row", "fuses"),
    "_softmax_backward_data": ("by_row", "fuses"),
    "native_batch_norm_backward": ("fuses",),
    "native_group_norm": ("fuses",),
    "native_group_norm_backward": ("fuses",),
    "native_layer_norm": ("cheap", "fuses"),
    "native_layer_norm_backward": ("fuses",),
    "nll_loss_backward": ("fuses",),
    "nll_loss_forward": ("fuses",),
    # Products that are added to a summand.
    "addmm": ("adds",),
    "baddbmm": ("adds",),
    # Products, attention and recurrent layers that PyTorch's FLOP counter lacks.
    "_cudnn_attention_backward": ("matmul",),
    "_cudnn_attention_forward": ("matmul",),
    "_cudnn_rnn": ("matmul",),
    "_cudnn_rnn_backward": ("matmul",),
    "_grouped_mm": ("matmul",),
    "_int_mm": ("matmul",),
    "_scaled_dot_product_flash_attention_for_cpu": ("matmul",),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("matmul",),
    "_scaled_dot_product_fused_attention_overrideable": ("matmul",),
    "_scaled_dot_product_fused_attention_overrideable_backward": ("matmul",),
    "_scaled_grouped_mm": ("matmul",),
    "flex_attention": ("matmul",),
    "flex_attention_backward": ("matmul",),
    "mkldnn_rnn_layer": ("matmul",),
    "mkldnn_rnn_layer_backward": ("matmul",),
    # Reads by index. Scatters do not fuse: threads would race for their sums.
    "embedding": ("fuses",),
    "gather": ("fuses",),
    "index": ("fuses",),
    "select_backward": ("fuses",),
    "slice_backward": ("fuses",),
}

_FUSED_UPDATES = ("_fused_ada", "_fused_sgd", "fused_adamw")  # PyTorch's, and ours


@functools.cache
def op_facts(op: Any) -> OpFacts:
    """The facts about an operation.

    >>> op_facts(torch.ops.aten.mul.Tensor).exact, op_facts(torch.ops.aten.exp.default).exact
    (True, False)
    """
    matmul = getattr(op, "overloadpacket", op) in flop_registry
    if not isinstance(op, torch._ops.OpOverload):
        return _with_row(OpFacts(str(op), matmul=matmul))
    name = op._schema.name.removeprefix("aten::")
    pointwise = torch.Tag.pointwise in op.tags
    return _with_row(
        OpFacts(
            name,
            pointwise=pointwise,
            elementwise=pointwise,
            reduction=torch.Tag.reduction in op.tags,
            random=torch.Tag.nondeterministic_seeded in op.tags,
            view=any(_shares_memory(returned) for returned in op._schema.returns),
            matmul=matmul,
            fused_update=name.removeprefix("ztrans::").startswith(_FUSED_UPDATES),
        )
    )


def _with_row(facts: OpFacts) -> OpFacts:
    row: dict[str, Any] = dict.fromkeys(_ROWS.get(facts.name, ()), True)
    return dataclasses.replace(facts, **row)


def _shares_memory(returned: Any) -> bool:
    """Whether a result is a new tensor that shares memory with an argument, according to the schema."""
    return returned.alias_info is not None and not returned.alias_info.is_write


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema. Omitted arguments stay out."""
    return {a.name: x for a, x in zip(op._schema.arguments, args)} | dict(kwargs)


def is_written(argument: Any) -> bool:
    """Whether an operation changes this argument, according to its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def overloads(packet: Any) -> list[Any]:
    """The overloads of an operation; empty for None."""
    if packet is None:
        return []
    return [getattr(packet, name) for name in packet.overloads()]


def is_view(eqn: Eqn) -> bool:
    """Whether an equation is a view: its results share memory with its first argument."""
    return op_facts(eqn.op).view


def is_matmul(eqn: Eqn) -> bool:
    """Whether an equation is a matrix product, a convolution or attention."""
    return op_facts(eqn.op).matmul


def is_random(eqn: Eqn) -> bool:
    """Whether an equation draws random numbers. Draws are effects: they keep their order, and none is repeated."""
    return draws(eqn.op, eqn.args, eqn.kwargs)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers.

    PyTorch tags every fused attention as random, but one without dropout draws nothing. Nor does any backward, which
    gets the seed as an argument.

    >>> attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    >>> draws(attention, ("q", "k", "v"), {}), draws(attention, ("q", "k", "v", 0.1), {})
    (False, True)
    """
    facts = op_facts(op)
    if not facts.random or facts.name.endswith("_backward"):
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            probability = args[i] if i < len(args) else argument.default_value
            return kwargs.get(argument.name, probability) != 0.0
    return True


def adds_zero(eqn: Eqn) -> bool:
    """Whether an equation adds the number 0, as Python's `sum` does first."""
    if eqn.op is not ADD:
        return False
    summand = eqn.args[1]
    return type(summand) in (int, float) and summand == 0


def is_view_or_cast(eqn: Eqn) -> bool:
    """Whether an equation is a view or a cast of a single value, which is cheap to repeat and to move."""
    return len(eqn.ins) == 1 and (is_view(eqn) or eqn.op is CAST)


def rearranges(eqn: Eqn) -> bool:
    """Whether an equation is a view that shows the elements of its argument unchanged.

    Such a view commutes with an elementwise operation. A view of the bytes as another dtype does not, nor does a lazy
    view.
    """
    if not is_view(eqn) or op_facts(eqn.op).lazy:
        return False
    return all(out.dtype == eqn.ins[0].dtype for out in eqn.results)
