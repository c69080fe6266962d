"""Operations that mark the values of a traced program, and compute nothing.

    gradient(g, p)   marks `g` as the gradient for `p`, a tensor of the same shape.  ->  g
    pmean(x, axis)   asks for the mean of `x` over a mesh axis; "*" means all axes of the sharding.  ->  a tensor like x
    psum(x, axis)    asks for the sum, pmax(x, axis) for the maximum, pmin(x, axis) for the minimum
    pvary(x, like)   says that `x` belongs to the samples of `like`, as the parameters of a task in MAML do

With `gradient` no transform has to guess which values are gradients. The derivative of the mark marks the cotangent: a
transform that averages `g` over ranks must average the cotangent too, because averaging is its own transpose. Under
`vmap` the mark vanishes, because the user reduces per-sample gradients.

In a plain program, which has no axes, these are the identity. A transform that knows the axis replaces them by a
reduction. `pmean` and `psum` are their own transposes: the loss is averaged over the axis, so a cotangent that differs
from rank to rank is reduced in the same way. `pmax` and `pmin` have no derivative, as in JAX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .operation import LIBRARY

EVERY_AXIS = "*"


def _define(name: str, arguments: str) -> None:
    """Define the mark `name`. Its value is a copy of the first argument."""
    # Without the tag, PyTorch would keep a copy of the arguments with each call in a trace, for their strides.
    LIBRARY.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.flexible_layout,))
    LIBRARY.impl(name, lambda x, _: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ztrans::{name}", lambda x, _: torch.empty_like(x), lib=LIBRARY)


_define("gradient", "Tensor g, Tensor p")
_define("pmean", "Tensor x, str axis")
_define("psum", "Tensor x, str axis")
_define("pmax", "Tensor x, str axis")
_define("pmin", "Tensor x, str axis")
_define("pvary", "Tensor x, Tensor like")


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(g, p):
        return torch.ops.ztrans.gradient.default(g, p)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx, cotangent):
        return _Gradient.apply(cotangent, ctx.saved_tensors[0]), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return _Gradient.apply(tangent, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, dims, g, p):
        # Not `g` itself: autograd would detach it from its graph.
        return g.view_as(g), dims[0]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(x, name, axis):
        return getattr(torch.ops.ztrans, name).default(x, axis)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.name, ctx.axis = inputs

    @staticmethod
    def backward(ctx, cotangent):
        return _linear(cotangent, ctx.name, ctx.axis), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _linear(tangent, ctx.name, ctx.axis)

    @staticmethod
    def vmap(info, dims, x, name, axis):
        return _Reduce.apply(x, name, axis), dims[0]


def _linear(x: torch.Tensor, name: str, axis: str) -> torch.Tensor:
    """The reduction of a cotangent or a tangent, which is that of the value.

    Raises: NotImplementedError for a maximum or minimum, which is not linear.
    """
    if name in ("pmax", "pmin"):
        raise NotImplementedError(
            f"{name}: it has no derivative, as in JAX, and a gradient was asked for through it.\n"
            f"Detach the value first, zt.{name}(x.detach()), for example to shift the logits of a softmax."
        )
    return _Reduce.apply(x, name, axis)


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(x, like):
        return torch.ops.ztrans.pvary.default(x, like)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        # The gradient of `x` itself is that of all samples, and is marked where autograd returns it.
        return cotangent, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info, dims, x, like):
        return x.view_as(x), dims[0]


def gradient(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mark `g` as the gradient for `p`.

    >>> gradient(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    return _Gradient.apply(g, p)


def _reduced(name: str, tree: Any, axis: str | tuple[str, ...] | None) -> Any:
    if isinstance(axis, tuple) and axis and all(isinstance(a, str) for a in axis):
        axis = "*".join(axis)  # as a program names several axes that act as one
    if axis is not None and not isinstance(axis, str):
        raise TypeError(
            f"{name}: axis must be the name of a mesh axis or a tuple of names, got {axis!r}."
        )
    mark = lambda x: _Reduce.apply(x, name, axis or EVERY_AXIS)
    return pytree.tree_map_only(torch.Tensor, mark, tree)


def pmean(tree: Any, axis: str | tuple[str, ...] | None = None) -> Any:
    """The mean of every tensor of `tree` over a mesh axis or several, as `jax.lax.pmean`; in a plain step the identity.

    Without `axis` it is the mean over all axes that the step is sharded over. A mean of integers is rounded towards
    zero; a mean of bools is whether any of them is true.

    >>> pmean({"loss": torch.ones(2)}, "dp")
    {'loss': tensor([1., 1.])}
    """
    return _reduced("pmean", tree, axis)


def psum(tree: Any, axis: str | tuple[str, ...] | None = None) -> Any:
    """The sum of every tensor of `tree` over a mesh axis or several, as `jax.lax.psum`; in a plain step the identity.

    Without `axis` it is the sum over all axes that the step is sharded over.

    >>> psum(torch.ones(2), "dp")
    tensor([1., 1.])
    """
    return _reduced("psum", tree, axis)


def pmax(tree: Any, axis: str | tuple[str, ...] | None = None) -> Any:
    """The elementwise maximum of every tensor of `tree` over a mesh axis or several, as `jax.lax.pmax`.

    In a plain step it is the identity. Without `axis` it is over all axes that the step is sharded over. It is NaN if
    the value of any rank is. It has no derivative.

    Raises: TypeError for complex tensors, which have no order. NotImplementedError for a gradient through it.

    >>> pmax(torch.tensor([1.0, 3.0]).max(), "dp")
    tensor(3.)
    """
    return _extreme("pmax", tree, axis)


def pmin(tree: Any, axis: str | tuple[str, ...] | None = None) -> Any:
    """The elementwise minimum of every tensor of `tree` over a mesh axis or several, as `jax.lax.pmin`; see `pmax`.

    >>> pmin(torch.tensor([1.0, 3.0]).min(), "dp")
    tensor(1.)
    """
    return _extreme("pmin", tree, axis)


def _extreme(name: str, tree: Any, axis: str | tuple[str, ...] | None) -> Any:
    for x in pytree.tree_leaves(tree):
        if isinstance(x, torch.Tensor) and x.is_complex():
            raise TypeError(f"{name}: complex values have no order; reduce their absolute values.")
    return _reduced(name, tree, axis)


def pvary(tree: Any, like: torch.Tensor) -> Any:
    """Mark every tensor of `tree` as this rank's own, as `jax.lax.pvary` does; in a plain step the identity.

    A gradient for the state is averaged over the ranks. The gradient for a marked value is not: it belongs to the
    samples of this rank. So the parameters of a task in MAML are `pvary(params, x)`, where `x` is the batch of the
    task, and the gradients of its inner steps are those of the task. The gradient of the outer loss passes through to
    the parameters, and is averaged.

    Args:
        tree: tensors, in any pytree.
        like: a tensor of the batch, or one that is computed from it.

    >>> pvary({"w": torch.ones(2)}, like=torch.zeros(3))
    {'w': tensor([1., 1.])}
    """
    return pytree.tree_map_only(torch.Tensor, lambda x: _Vary.apply(x, like), tree)


def global_mean(
    sum: torch.Tensor, count: torch.Tensor | float, axis: str | tuple[str, ...] | None = None
) -> torch.Tensor:
    """The mean over the samples of all ranks: the sum of all `sum` divided by the sum of all `count`.

    It is right for any number of samples on each rank, as `total_loss / number_of_tokens` is in a plain step. Its
    gradient is the gradient of the mean over all samples.

    Args:
        sum: this rank's sum over its own samples, such as a loss with `reduction="sum"`.
        count: the number of these samples: a tensor of any dtype, or a number.
        axis: a mesh axis; by default all axes that the step is sharded over.

    >>> mask = torch.tensor([True, True, False])
    >>> global_mean((torch.tensor([1.0, 3.0, 5.0]) * mask).sum(), mask.sum())
    tensor(2.)
    """
    if not isinstance(count, torch.Tensor):
        count = torch.full((), count, dtype=sum.dtype, device=sum.device)
    return psum(sum, axis) / psum(count, axis)
