"""Compute an equation whose operation is PyTorch's.

The interpreter calls `compute`. Generated code calls the function that `stride_safe` returns for an operation.

PyTorch's operations do not always give fake tensors the strides of real ones. For instance, batch norm of a transposed
input returns a contiguous tensor, but a transposed one in a trace. A view that was possible in the trace may then need
a copy when the program runs (see `stride_safe`). This changes no value: a program is functional, so it does not matter
whether a view shares memory with its argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from .graph import Eqn, Var, substitute
from .op_facts import op_facts
from .triton_launch import Launch

aten = torch.ops.aten
_FROM = getattr(
    aten.random, "from"
)  # `from` is a keyword of Python, so generated code cannot name it
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Collectives accept only contiguous arguments in torch 2.11.
_NEED_CONTIGUOUS = TorchVersion(torch.__version__) < "2.13"


def bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.view(dtype)`, or the view of a contiguous copy if the strides do not allow one.

    >>> bits(torch.ones(2, 4).t(), torch.float64).shape
    torch.Size([4, 1])
    """
    try:
        return aten.view.dtype(x, dtype)
    except RuntimeError:
        return aten.view.dtype(x.contiguous(), dtype)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """`torch.view_as_complex(pairs)`, or the view of a contiguous copy if the strides do not allow one.

    >>> as_complex(torch.ones(2, 3).t())
    tensor([1.+1.j, 1.+1.j, 1.+1.j])
    """
    try:
        return aten.view_as_complex.default(pairs)
    except RuntimeError:
        return aten.view_as_complex.default(pairs.contiguous())


def strided(base: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    """`base.as_strided(...)` with an offset from the beginning of `base`.

    PyTorch counts from the beginning of the storage, but a program does not know where an input begins in its storage.
    """
    return aten.as_strided.default(base, size, stride, base.storage_offset() + (offset or 0))


def strided_scatter(
    base: torch.Tensor, new: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    """`as_strided_scatter` with an offset from the beginning of `base`, like `strided`."""
    start = base.storage_offset() + (offset or 0)
    return aten.as_strided_scatter.default(base, new, size, stride, start)


def drawn_from(x: torch.Tensor, low: int, high: int | None, **kwargs: Any) -> torch.Tensor:
    """Integers in [low, high), drawn like `x.random_(low, high)`."""
    return _FROM(x, low, high, **kwargs)


def recurrent_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """A recurrent layer of oneDNN. It saves its workspace for backward only if gradients are enabled."""
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


def recurrent_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of `recurrent_layer`.

    oneDNN returns one tensor for both biases. The second is a clone, because a program may overwrite each result.
    """
    *weights, bias, same_bias, hidden, cell = aten.mkldnn_rnn_layer_backward.default(*args)
    return *weights, bias, same_bias.clone(), hidden, cell


_STRIDE_SAFE: Mapping[Any, Callable] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view.dtype: bits,
    aten.view_as_complex.default: as_complex,
    aten.as_strided.default: strided,
    aten.as_strided_scatter.default: strided_scatter,
    _FROM: drawn_from,
    aten.mkldnn_rnn_layer.default: recurrent_layer,
    aten.mkldnn_rnn_layer_backward.default: recurrent_layer_backward,
}


# `aten.mm.default(a, b)` passes its arguments through a stack of values of any type. `torch.mm(a, b)` reads them
# directly and takes about a microsecond less. Each of these functions calls the same operation for all arguments.
_DIRECT: Mapping[Any, Callable] = {
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addcdiv.default: torch.addcdiv,
    aten.addcdiv_.default: torch.Tensor.addcdiv_,
    aten.addcmul.default: torch.addcmul,
    aten.addcmul_.default: torch.Tensor.addcmul_,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.convolution.default: torch.convolution,
    aten.div.Tensor: torch.div,
    aten.div.out: torch.div,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.embedding.default: torch.embedding,
    aten.expand.default: torch.Tensor.expand,
    aten.lerp.Scalar: torch.lerp,
    aten.lerp_.Scalar: torch.Tensor.lerp_,
    aten.linalg_vector_norm.default: torch.linalg.vector_norm,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul.out: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.reshape.default: torch.reshape,
    aten.rsub.Scalar: torch.rsub,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sigmoid_.default: torch.sigmoid_,
    aten.sqrt.default: torch.sqrt,
    aten.sqrt_.default: torch.sqrt_,
    aten.stack.default: torch.stack,
    aten.sub.Tensor: torch.sub,
    aten.sub.out: torch.sub,
    aten.sub_.Tensor: torch.Tensor.sub_,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.tanh_.default: torch.tanh_,
    aten.transpose.int: torch.transpose,
    aten.unbind.int: torch.unbind,
    aten.unsafe_split.Tensor: torch.unsafe_split,
    aten.view.default: torch.Tensor.view,
    aten.where.self: torch.where,
    aten.where.self_out: torch.where,
}


@functools.cache
def direct(op: Any) -> Callable:
    """A faster function of PyTorch that computes `op`, or `op` itself.

    >>> direct(aten.mm.default) is torch.mm
    True
    """
    name = op_facts(op).name
    if name.startswith("_foreach_"):  # documented, as a beta
        return getattr(torch, name)
    return _DIRECT.get(op, op)


@functools.cache
def stride_safe(op: Any) -> Callable:
    """A function that computes `op` for arguments with any strides."""
    is_collective = getattr(op, "namespace", None) == "_c10d_functional" and op is not _WAIT
    if is_collective and _NEED_CONTIGUOUS:
        return lambda x, *args, **kwargs: op(_contiguous(x), *args, **kwargs)
    return _STRIDE_SAFE.get(op, op)


def _contiguous(x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return x.contiguous()
    return [tensor.contiguous() for tensor in x]


def bound_results(eqn: Eqn) -> tuple[bool, ...]:
    """Whether the equation binds each of its results."""
    return tuple(out is not None for out in eqn.outs)


def call_operator(
    op: HigherOrderOperator, binds: Sequence[bool], *args: Any, **kwargs: Any
) -> list[Any]:
    """Call a higher-order operator, and return the leaves of its result, which are the results of its equation.

    Args:
        op: the operator.
        binds: for each result, whether the equation binds it.
        args, kwargs: the arguments of the operator.
    """
    if args and isinstance(args[0], Launch):
        launch, *tensors = args
        return launch(*tensors)

    # The backward of attention computes gradients of the tensors that `score_mod` captures only if they require
    # gradients, and no value of a program does.
    if op is torch.ops.higher_order.flex_attention_backward:
        *others, captured, mask_captures = args
        tracked = [x.detach().requires_grad_(is_bound) for x, is_bound in zip(captured, binds[3:])]
        args = (*others, tuple(tracked), mask_captures)
    return pytree.tree_leaves(op(*args, **kwargs))


def compute(eqn: Eqn, values: Mapping[Var, Any]) -> list[Any]:
    """Compute an equation whose operation is PyTorch's from `values`; return one result for each of its `outs`."""
    args = substitute(eqn.args, values.__getitem__)
    kwargs = substitute(eqn.kwargs, values.__getitem__)
    if isinstance(eqn.op, HigherOrderOperator):
        return call_operator(eqn.op, bound_results(eqn), *args, **kwargs)
    returned = stride_safe(eqn.op)(*args, **kwargs)
    results: list[Any] = []
    for x in returned if isinstance(returned, (tuple, list)) else (returned,):
        results += x if isinstance(x, list) else [x]
    return results
