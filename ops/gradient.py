"""gradient(g, p): says that `g` is the gradient of `p`. The value is `g`.

    g: any float tensor, p: the tensor that was differentiated for; the same shape.  ->  g

A traced program keeps the mark, so that a transform never has to guess which values are gradients.
The derivative of the mark marks the cotangent: where the transform averages `g` over ranks, the
cotangent must be averaged too, for averaging is its own transpose. Under `vmap` the mark vanishes,
because per-sample gradients are the user's to reduce.
"""

from __future__ import annotations

import torch

_lib = torch.library.Library("ztrans", "FRAGMENT")
_lib.define("gradient(Tensor g, Tensor p) -> Tensor")
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
        return g, dims[0]


def gradient(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mark `g` as the gradient of `p`."""
    return _Gradient.apply(g, p)
