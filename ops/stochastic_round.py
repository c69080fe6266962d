"""stochastic_round(x, seed): fp32 to bf16, up or down with the odds that keep the mean.

    x     float32, any shape
    seed  an integer tensor of one element on x's device, read there: a captured step draws anew
    ->    bfloat16, x's shape; contiguous

Each element becomes one of its two neighbours in bf16. Values that bf16 holds exactly, infinities and NaN stay.
The draw depends on the seed and the index of the element (mod 2**32) alone, through two rounds of a 32-bit
mixer, so CPU and GPU draw the same bits. It changes numerics, so it is used only where it is asked for by name.
Bytes moved at least: 6 an element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .kernel import kernel

if TYPE_CHECKING:
    import triton.language as tl

_lib = torch.library.Library("ztrans", "FRAGMENT")
_lib.define("stochastic_round(Tensor x, Tensor seed) -> Tensor")

_BLOCK = 2048


def stochastic_round(x: torch.Tensor, seed: torch.Tensor | int) -> torch.Tensor:
    """`x` in bf16, rounded at random.

    >>> stochastic_round(torch.full((5,), 1 + 2**-8), 0)
    tensor([1.0000, 1.0078, 1.0078, 1.0078, 1.0000], dtype=torch.bfloat16)
    """
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    return torch.ops.ztrans.stochastic_round.default(x, seed)


def draws(start: int, count: int, seed: torch.Tensor) -> torch.Tensor:
    """int64[count]: the 16 random bits of elements `start` and on."""
    index = torch.arange(start, start + count, device=seed.device) & 0xFFFFFFFF
    return _mixed(_mixed(index) ^ _mixed(seed.view(()).long() & 0xFFFFFFFF)) & 0xFFFF


def _mixed(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 15)


def reference(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The meaning of rounding by `noise`, 16 bits an element."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    up = (bits + noise.view(x.shape)) & 0xFFFF0000
    finite = (bits & 0x7F800000) != 0x7F800000
    kept = torch.where(finite, up, bits)
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept).int()
    return signed.view(torch.float32).to(torch.bfloat16)


@kernel
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@kernel
def round_at_random(x, index, seed):
    noise = _mix(_mix(index.to(tl.uint32)) ^ _mix(seed.to(tl.uint32))) & 0xFFFF
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + noise) & 0xFFFF0000, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)


@kernel(numbers="n")
def _round(x, seed, out, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # no mask: 16 bytes at a time
        tl.store(out + i, round_at_random(tl.load(x + i), i, tl.load(seed)))
    else:
        value = tl.load(x + i, mask=i < n, other=0)
        tl.store(out + i, round_at_random(value, i, tl.load(seed)), mask=i < n)


def launch(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """stochastic_round by the kernel."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    if x.numel():
        with torch.cuda.device_of(x):
            _round[(-(-x.numel() // _BLOCK),)](x, seed, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


def _by(run):
    def implementation(x, seed):
        if x.dtype != torch.float32 or seed.numel() != 1 or seed.is_floating_point() or seed.device != x.device:
            raise TypeError("stochastic_round: x must be float32, the seed one integer, both on one device.")
        return run(x, seed)

    return implementation


_lib.impl("stochastic_round", _by(lambda x, seed: reference(x, draws(0, x.numel(), seed))), "CPU")
_lib.impl("stochastic_round", _by(launch), "CUDA")
_fake = _by(lambda x, seed: x.new_empty(x.shape, dtype=torch.bfloat16))
torch.library.register_fake("ztrans::stochastic_round", _fake, lib=_lib)
