"""arrived(x, parts, dim, bits, block, kind): what a receiver gets of a value that is sent as short codes.

    x       float32, bfloat16 or float16
    parts   the number of parts in which x is sent; each has blocks of its own
    dim     the dim along which x is cut into parts, as by torch.chunk; -1 to cut its elements in order
    bits, block, kind   the format of the codes, as in `encode`
    ->      x's dtype and shape, contiguous: decode(encode(part)) of each part

In fp32, what has arrived arrives unchanged: its codes are the same. So a value may be rounded here, and then be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .decode import decode_unpack
from .encode import encode_pack
from .operation import LIBRARY, define_composite


def arrived(
    x: torch.Tensor, parts: int, dim: int, bits: int, block: int, kind: str = "int"
) -> torch.Tensor:
    """What arrives of `x`. The docstring of this file has the details.

    >>> arrived(torch.tensor([7.0, 1.4, -0.6, 0.1]), 2, 0, 4, 2)
    tensor([ 7.0000,  1.0000, -0.6000,  0.0857])
    """
    return torch.ops.ztrans.arrived.default(x, parts, dim, bits, block, kind)


def meaning(
    x: torch.Tensor, parts: int, dim: int, bits: int, block: int, kind: str
) -> torch.Tensor:
    """arrived in terms of `encode` and `decode`: on a GPU, a launch of each for all parts."""
    form = bits, block, kind

    def send(cut: torch.Tensor, size: int) -> torch.Tensor:
        codes = encode_pack([cut], [size], *form, ranks=parts)
        return decode_unpack(codes, [size], [cut.shape], x.dtype, *form)[0]

    return by_parts(x, parts, dim, send)


def by_parts(
    x: torch.Tensor, parts: int, dim: int, send: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """What arrives of `x`. `send` returns what arrives of a tensor in parts of so many elements, in their order."""
    cut = x.reshape(-1) if dim < 0 else x.movedim(dim, 0)
    rows, *last_dims = cut.shape
    whole = send(cut, -(-rows // parts) * math.prod(last_dims))
    return whole.view(x.shape) if dim < 0 else whole.movedim(0, dim).contiguous()


define_composite(
    "arrived(Tensor x, int parts, int dim, int bits, int block, str kind) -> Tensor", meaning
)
torch.library.register_fake("ztrans::arrived", lambda x, *_: x.new_empty(x.shape), lib=LIBRARY)
