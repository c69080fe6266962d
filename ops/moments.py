"""narrowed(x, dtype), widened(x): a moment of an optimizer in 8 bits, and back.

    int8     a first moment: sign, 5 bits of exponent and 2 of mantissa. Magnitudes are from 2**-26 (1.5e-8) to 40;
             larger ones become 40. Codes +-127 stand for NaN
    uint8    a second moment: its fourth root with 5 bits of exponent and 3 of mantissa. Values are from 2**-64 (5e-20)
             to 8e18; smaller ones become 2**-64, never 0, and larger ones 8e18. Code 255 stands for NaN

Zeros stay zeros; infinities, NaN and negative second moments become NaN. There is no scale, so each element is rounded
by itself: one large gradient costs its neighbours nothing, and all layouts have the same bits. With a scale for each
block of 256, a gradient of 1e4 among ones of 1e-3 makes an update of 70,000 rates, as sqrt(v) of its neighbours becomes
0; if that is rounded up, they stand still.

Moments must be rounded at random (`stochastic_round`). One that changes by 1/1000 in a step, rounded to nearest, stays
where it is, and rounded up it never falls: the loss of the demo's GPT is 2.5% larger after 300 steps. Odds that
keep the mean of the fourth root make that of 1 / sqrt(v) over the steps right, to first order, and the loss differs by
0.15% at most. With odds that keep the mean of sqrt(v), as many codes act as a larger rate, and it differs by 0.5%.
"""

from __future__ import annotations

import torch

from .operation import define

# Of each dtype: the bits of fp32 that are cut off, the exponent of the smallest code 1, and the code of NaN.
_FORMS = {torch.int8: (21, -26, 127), torch.uint8: (20, -16, 255)}
MOMENTS = frozenset(_FORMS)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 in another dtype, rounded to nearest: codes of a moment in int8 or uint8, any other as `x.to(dtype)`.

    What has the dtype already stays as it is.

    >>> narrowed(torch.tensor([0.0, 1.0, -3.2]), torch.int8)
    tensor([   0,  105, -111], dtype=torch.int8)
    """
    if dtype not in _FORMS or x.dtype == dtype:
        return x.to(dtype)
    return nearest(x, dtype)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`narrowed` of fp32 to int8 or uint8 in plain torch, so that Inductor fuses it with what computes x."""
    half = torch.full((), 1 << (_FORMS[dtype][0] - 1), dtype=torch.int32, device=x.device)
    return coded(x, half, dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """The fp32 values of a moment in int8 or uint8.

    >>> widened(narrowed(torch.tensor([0.0, 1.0, 1e-6, 1e-30]), torch.uint8))
    tensor([0.0000e+00, 1.0000e+00, 9.5367e-07, 5.4210e-20])
    """
    return torch.ops.ztrans.widened.default(x)


def coded(x: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 in int8 or uint8, rounded by the last bits of `noise`, int32; half of their range rounds to nearest."""
    cut, smallest, nan = _FORMS[dtype]
    first = ((127 + smallest) << (23 - cut)) - 1
    noise = noise & ((1 << cut) - 1)
    a = x.abs() if dtype == torch.int8 else x.sqrt().sqrt()
    code = (((a.view(torch.int32) + noise) >> cut) - first).clamp(1, nan - 1)
    if dtype == torch.int8:
        # Below the smallest code, up to that or down to 0.
        below = (noise + 1) * 2.0 ** (smallest - cut) <= a
        code = torch.where(a < 2.0**smallest, below.to(torch.int32), code)
    code = torch.where(a == 0, 0, torch.where(a < torch.inf, code, nan))
    return torch.where(x < 0, -code, code).to(dtype) if dtype == torch.int8 else code.to(dtype)


def decoded(x: torch.Tensor) -> torch.Tensor:
    """`widened` in plain torch, so that Inductor fuses it with the update."""
    cut, smallest, nan = _FORMS[x.dtype]
    first = ((127 + smallest) << (23 - cut)) - 1
    code = x.to(torch.int32)
    magnitude = code.abs()
    a = ((magnitude + first) << cut).view(torch.float32)
    if x.dtype == torch.uint8:
        a = (a * a) * (a * a)
    a = torch.where(magnitude == 0, 0.0, torch.where(magnitude == nan, torch.nan, a))
    return torch.where(code < 0, -a, a)


def _check_narrowed(x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != torch.float32 or dtype not in _FORMS:
        raise TypeError(f"narrowed: fp32 becomes int8 or uint8, got {x.dtype} and {dtype}.")


def _check(x: torch.Tensor) -> None:
    if x.dtype not in _FORMS:
        raise TypeError(f"widened: a moment is int8 or uint8, got {x.dtype}.")


define(
    "widened(Tensor x) -> Tensor",
    _check,
    decoded,
    decoded,
    lambda x: torch.empty_like(x, dtype=torch.float32),
    tags=(torch.Tag.pointwise,),
)
define(
    "narrowed(Tensor x, ScalarType dtype) -> Tensor",
    _check_narrowed,
    nearest,
    nearest,
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
    tags=(torch.Tag.pointwise,),
)
