"""hadamard(x, dim, n): turn each n neighbours along a dim by the Hadamard matrix of size n.

    x     float32, bfloat16 or float16
    dim   the dim; its size is a multiple of n
    n     a power of 2
    ->    x's dtype and shape, contiguous: H @ x for each n elements, where H is +-1 / sqrt(n)

H is symmetric and orthogonal, so a second turn gives x back, up to rounding, and the turn of a sum is the sum of the
turns. One large element becomes n elements of equal magnitude, which is why codes with one scale for a block err less
after it. The product is computed in fp32.
"""

from __future__ import annotations

import functools

import torch

from .operation import LIBRARY, define_composite


def hadamard(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Turn each n neighbours along a dim. The docstring of this file has the details.

    >>> hadamard(torch.tensor([4.0, 0.0, 0.0, 0.0]), 0, 4)
    tensor([2., 2., 2., 2.])
    """
    return torch.ops.ztrans.hadamard.default(x, dim, n)


def meaning(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """hadamard in plain torch."""
    if n < 2 or n & (n - 1) or x.shape[dim] % n:
        raise ValueError(f"hadamard: {x.shape[dim]} elements are not turned by {n}, a power of 2.")
    rows = x.movedim(dim, -1).unflatten(-1, (-1, n)).float()
    turned = rows @ _matrix(n, x.device)
    return turned.flatten(-2).movedim(-1, dim).to(x.dtype).contiguous()


@functools.cache
def _matrix(n: int, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / n**0.5).to(device)


define_composite("hadamard(Tensor x, int dim, int n) -> Tensor", meaning)
torch.library.register_fake("ztrans::hadamard", lambda x, dim, n: x.new_empty(x.shape), lib=LIBRARY)
