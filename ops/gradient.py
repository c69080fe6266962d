"""gradient(g, p): mark `g` as the gradient for `p`. The value is `g`.

    g: any float tensor, p: the tensor for which `g` is the gradient, of the same shape.  ->  g

A traced program keeps the mark, so no transform has to guess which values are gradients. The derivative of the mark
marks the cotangent: a transform that averages `g` over ranks must average the cotangent too, because averaging is its
own transpose. Under `vmap` the mark vanishes, because the user reduces per-sample gradients.
"""

from __future__ import annotations

import torch

_lib = torch.library.Library("ztrans", "FRAGMENT")
# PyTorch would otherwise keep a copy of the arguments with each call in a trace, for their strides.
_lib.define("gradient(Tensor g, Tensor p) -> Tensor", tags=(torch.Tag.flexible_layout,))
_lib.impl("gradient", lambda g, p: g.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("ztrans::gradient", lambda g, p: torch.empty_like(g), lib=_lib)


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
        return g.view_as(g), dims[
            0
        ]  # not `g` itself: autograd would cut it off from what it was computed from


def gradient(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mark `g` as the gradient for `p`.

    >>> gradient(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    return _Gradient.apply(g, p)
