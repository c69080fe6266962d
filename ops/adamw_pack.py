"""adamw_pack(params, grads, exp_avgs, exp_avg_sqs, ...): AdamW on fp32 shards, and their bf16 into the next gather.

    params, exp_avgs, exp_avg_sqs   float32, contiguous; updated in place
    grads                           float32, bfloat16 or float16, of the params' sizes
    step, lr, scale                 float32 tensors of one element, read on the device: a captured step
                                    sees them change. step counts from 1. scale multiplies the
                                    gradients: the clip coefficient, or 1 where it is None
    out, sizes                      bfloat16 or float16[sum(sizes)]: the send buffer, laid out as by
                                    cast_pack; zero behind a param smaller than its size. None: not written
    seed                            None: out is the new params rounded to nearest even. One integer on
                                    the device: rounded at random, see stochastic_round (bfloat16 only)

The update is that of `torch.optim.AdamW`, to a few units of the last place. Errors: sizes, dtypes or devices that
do not fit, params or moments that are not contiguous, a size too small. One launch for each dtype
among the gradients. Bytes moved at least: 28 an element with fp32 gradients, 26 with bf16, and 2
for each element of `out`. Neither the clip nor the cast needs a pass of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .kernel import FLOATS, element, kernel
from .stochastic_round import draws, round_at_random
from .stochastic_round import reference as rounded
from .tables import addresses, blocks, check_device, on_device

if TYPE_CHECKING:
    import triton.language as tl

_lib = torch.library.Library("ztrans", "FRAGMENT")
_lib.define(
    "adamw_pack(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor step, Tensor lr, Tensor? scale, float beta1, float beta2, float eps, float weight_decay,"
    " int[] sizes, Tensor(d!)? out=None, Tensor? seed=None) -> ()"
)

_BLOCK = 1024


def adamw_pack(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: torch.Tensor | float,
    lr: torch.Tensor | float = 1e-3,
    scale: torch.Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> None:
    """Update in place, and write `out`, as the head of this file says.

    >>> p, m, v, out = torch.ones(2), torch.zeros(2), torch.zeros(2), torch.empty(2, dtype=torch.bfloat16)
    >>> adamw_pack([p], [torch.ones(2)], [m], [v], step=1, lr=0.5, weight_decay=0, out=out)
    >>> p, out
    (tensor([0.5000, 0.5000]), tensor([0.5000, 0.5000], dtype=torch.bfloat16))
    """
    if not params:
        raise ValueError("adamw_pack: no params.")
    device = params[0].device
    step, lr = (
        x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.float32, device=device) for x in (step, lr)
    )
    sizes = [p.numel() for p in params] if sizes is None else sizes
    torch.ops.ztrans.adamw_pack.default(
        params, grads, exp_avgs, exp_avg_sqs, step, lr, scale, *betas, eps, weight_decay, sizes, out, seed
    )


def reference(params, grads, ms, vs, step, lr, scale, beta1, beta2, eps, weight_decay, sizes, out, seed) -> None:
    """The meaning of adamw_pack, tensor by tensor."""
    t, rate = float(step), float(lr)
    left1, left2 = 1 - beta1**t, 1 - beta2**t
    offset = 0
    for p, g, m, v, size in zip(params, grads, ms, vs, sizes, strict=True):
        g = g.to(torch.float32).view(p.shape) if scale is None else g.to(torch.float32).view(p.shape) * scale.view(())
        m.lerp_(g.view(m.shape), 1 - beta1)
        v.mul_(beta2).addcmul_(g.view(v.shape), g.view(v.shape), value=1 - beta2)
        denominator = v.sqrt().div_(math.sqrt(left2)).add_(eps)
        p.mul_(1 - rate * weight_decay).addcdiv_(m.view(p.shape), denominator.view(p.shape), value=-rate / left1)
        if out is not None:
            here, n = out[offset : offset + size], p.numel()
            exact = p.view(-1)
            here[:n].copy_(exact if seed is None else rounded(exact, draws(offset, n, seed)))
            here[n:].zero_()
        offset += size


@kernel
def _left(step, log_beta):
    # 1 - beta ** step, also where that is near 0, in fp32: a series for small exponents.
    x = step * log_beta
    series = 1.0 + x / 9.0
    for k in tl.static_range(7):
        series = 1.0 + x / (8.0 - k) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@kernel
def _update(p, g, m, v, stride, keep, scale, whole2, beta2, fresh1, fresh2, eps):
    g = g.to(tl.float32) * scale
    m = m + fresh1 * (g - m)
    v = beta2 * v + fresh2 * g * g
    return p * keep - stride * tl.div_rn(m, tl.sqrt_rn(v) * whole2 + eps), m, v


@kernel(numbers="count")
def _adamw(
    rows, bases, count, step, lr, scale, seed, log1, log2, beta2, fresh1, fresh2, eps, decay,
    GRAD: tl.constexpr, OUT: tl.constexpr, SCALED: tl.constexpr, WRITE: tl.constexpr, RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 5
    k, start, at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    have, want = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    p = tl.load(bases + k) + start * 4
    g = tl.load(bases + count + k) + start * (GRAD.primitive_bitwidth // 8)
    m = tl.load(bases + 2 * count + k) + start * 4
    v = tl.load(bases + 3 * count + k) + start * 4
    out = p
    if WRITE:
        out = tl.load(bases + 4 * count) + at * (OUT.primitive_bitwidth // 8)

    t, rate, coefficient = tl.load(step), tl.load(lr), 1.0
    if SCALED:
        coefficient = tl.load(scale)
    keep = 1.0 - rate * decay
    stride, whole2 = tl.div_rn(rate, _left(t, log1)), tl.div_rn(1.0, tl.sqrt_rn(_left(t, log2)))

    i = tl.arange(0, BLOCK)
    if (have >= BLOCK) & (((p | g | m | v | out) & 15) == 0):
        p_at = tl.multiple_of(p.to(tl.pointer_type(tl.float32)), 16) + i
        m_at = tl.multiple_of(m.to(tl.pointer_type(tl.float32)), 16) + i
        v_at = tl.multiple_of(v.to(tl.pointer_type(tl.float32)), 16) + i
        g_at = tl.multiple_of(g.to(tl.pointer_type(GRAD)), 16) + i
        new_p, new_m, new_v = _update(
            tl.load(p_at), tl.load(g_at, eviction_policy="evict_first"), tl.load(m_at), tl.load(v_at),
            stride, keep, coefficient, whole2, beta2, fresh1, fresh2, eps,
        )  # fmt: skip
        tl.store(p_at, new_p)
        tl.store(m_at, new_m)
        tl.store(v_at, new_v)
        if WRITE:
            out_at = tl.multiple_of(out.to(tl.pointer_type(OUT)), 16) + i
            if RANDOM:
                tl.store(out_at, round_at_random(new_p, at + i, tl.load(seed)))
            else:
                tl.store(out_at, new_p.to(OUT))
    else:
        here = i < have
        p_at, g_at = p.to(tl.pointer_type(tl.float32)) + i, g.to(tl.pointer_type(GRAD)) + i
        m_at, v_at = m.to(tl.pointer_type(tl.float32)) + i, v.to(tl.pointer_type(tl.float32)) + i
        new_p, new_m, new_v = _update(
            tl.load(p_at, mask=here, other=0), tl.load(g_at, mask=here, other=0),
            tl.load(m_at, mask=here, other=0), tl.load(v_at, mask=here, other=0),
            stride, keep, coefficient, whole2, beta2, fresh1, fresh2, eps,
        )  # fmt: skip
        tl.store(p_at, new_p, mask=here)
        tl.store(m_at, new_m, mask=here)
        tl.store(v_at, new_v, mask=here)
        if WRITE:
            new_p = tl.where(here, new_p, 0.0)
            out_at = out.to(tl.pointer_type(OUT)) + i
            if RANDOM:
                tl.store(out_at, round_at_random(new_p, at + i, tl.load(seed)), mask=i < want)
            else:
                tl.store(out_at, new_p.to(OUT), mask=i < want)


def launch(params, grads, ms, vs, step, lr, scale, beta1, beta2, eps, weight_decay, sizes, out, seed) -> None:
    """adamw_pack by the kernel: a launch for each dtype among the gradients."""
    grads = [g.contiguous() for g in grads]
    numels, device, wanted = tuple(p.numel() for p in params), params[0].device, tuple(sizes)
    log1, log2 = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
    for dtype in dict.fromkeys(g.dtype for g in grads):
        rows = _rows(numels, wanted, tuple(g.dtype == dtype for g in grads), out is not None, device)
        if not len(rows):
            continue
        bases = addresses([*params, *grads, *ms, *vs, *(() if out is None else (out,))], device)
        with torch.cuda.device_of(rows):
            _adamw[(len(rows),)](
                rows, bases, len(params), step, lr, step if scale is None else scale, step if seed is None else seed,
                log1, log2, beta2, 1 - beta1, 1 - beta2, eps, weight_decay,
                GRAD=element(dtype), OUT=element(torch.bfloat16 if out is None else out.dtype),
                SCALED=scale is not None, WRITE=out is not None, RANDOM=seed is not None, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip


@functools.cache
def _rows(numels: tuple[int, ...], sizes: tuple[int, ...], chosen: tuple[bool, ...], write: bool, device):
    pieces, offset = [], 0
    for k, (numel, size) in enumerate(zip(numels, sizes)):
        if chosen[k]:
            pieces.append((k, 0, offset, numel, size if write else numel))
        offset += size
    return on_device(blocks(pieces, [piece[4] for piece in pieces], _BLOCK, moving=(1, 2, ~3, ~4)), device)


def _check(params, grads, ms, vs, step, lr, scale, sizes, out, seed) -> None:
    if len({len(params), len(grads), len(ms), len(vs), len(sizes)}) > 1:
        raise ValueError("adamw_pack: as many params as grads, exp_avgs, exp_avg_sqs and sizes.")
    for k, (p, g, m, v, size) in enumerate(zip(params, grads, ms, vs, sizes)):
        _check_tensors(k, p, g, m, v, size)
    optional = [x for x in (scale, out, seed) if x is not None]
    check_device("adamw_pack", params[0].device, (*params, *grads, *ms, *vs, step, lr, *optional))
    numbers = [step, lr] if scale is None else [step, lr, scale]
    if any(x.dtype != torch.float32 or x.numel() != 1 for x in numbers):
        raise TypeError("adamw_pack: step, lr and scale must be float32 of one element.")
    if out is not None:
        _check_out(out, sizes)
    if seed is not None:
        _check_seed(seed, out)


def _check_tensors(k, p, g, m, v, size) -> None:
    if any(x.numel() != p.numel() for x in (g, m, v)) or size < p.numel():
        raise ValueError(f"adamw_pack: tensors {k} are of different sizes, or {size} is too small for them.")
    if not p.dtype == m.dtype == v.dtype == torch.float32 or g.dtype not in FLOATS:
        raise TypeError(f"adamw_pack: param and moments {k} must be float32, the gradient of 16 or 32 bits.")
    if not (p.is_contiguous() and m.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"adamw_pack: param and moments {k} must be contiguous: they are updated in place.")


def _check_out(out, sizes) -> None:
    if out.dtype not in (torch.bfloat16, torch.float16) or not out.is_contiguous():
        raise TypeError("adamw_pack: out must be bfloat16 or float16, and contiguous.")
    if out.numel() != sum(sizes):
        raise ValueError(f"adamw_pack: out has {out.numel()} elements, sizes come to {sum(sizes)}.")


def _check_seed(seed, out) -> None:
    if seed.numel() != 1 or seed.is_floating_point() or out is None or out.dtype != torch.bfloat16:
        raise TypeError("adamw_pack: a seed is one integer, and out is bfloat16.")


def _by(run):
    def implementation(ps, gs, ms, vs, step, lr, scale, beta1, beta2, eps, weight_decay, sizes, out=None, seed=None):
        _check(ps, gs, ms, vs, step, lr, scale, sizes, out, seed)
        run(ps, gs, ms, vs, step, lr, scale, beta1, beta2, eps, weight_decay, sizes, out, seed)

    return implementation


_lib.impl("adamw_pack", _by(reference), "CPU")
_lib.impl("adamw_pack", _by(launch), "CUDA")
torch.library.register_fake("ztrans::adamw_pack", _by(lambda *_: None), lib=_lib)
