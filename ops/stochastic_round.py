"""stochastic_round(x, step, key, whole, offsets): fp32 to bf16, up or down with the odds that keep the mean.

    x        fp32, any shape: a leaf of the state, or the part of one rank
    step     the number of the step: a scalar tensor on x's device, integer or fp32
    key      an integer that names the leaf and the seed
    whole    the shape of the whole leaf
    offsets  the index in the whole leaf at which x begins, along each dim; at most one dim is cut
    ->       bf16, x's shape, contiguous

An element becomes one of its two neighbours in bf16: 16 random bits are added to the bits of fp32, and the last 16 are
cut off. The random bits are a hash of step, key and the element's index in the whole leaf (row-major, modulo 2**32),
so they do not depend on the number of ranks, on the device, or on the order of operations. Values that bf16 holds
exactly stay, and so do infinities and NaN. From the largest bf16 on, values are rounded to nearest, so only those that
this makes infinite become so.

Bytes moved at least: 6 for each element. The hash is lowbias32 of Chris Wellons' hash-prospector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .kernel import kernel, tl
from .operation import LIBRARY

LARGEST = torch.finfo(torch.bfloat16).max
_BLOCK = 2048
# On CPUs, the elements that are rounded together, whose temporary values fit into the cache of a core.
_CPU_BLOCK = 1 << 15


def stochastic_round(
    x: torch.Tensor,
    step: torch.Tensor,
    key: int,
    whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> torch.Tensor:
    """Round `x` to bf16 at random. By default it is a whole leaf. The docstring of this file has the details.

    >>> stochastic_round(torch.full((5,), 1 + 2**-8), torch.tensor(1), 0)
    tensor([1.0078, 1.0000, 1.0078, 1.0078, 1.0000], dtype=torch.bfloat16)
    """
    whole = [*x.shape] if whole is None else whole
    offsets = [0] * x.ndim if offsets is None else offsets
    return torch.ops.ztrans.stochastic_round.default(x, step, key, whole, offsets)


def meaning(
    x: torch.Tensor, step: torch.Tensor, key: int, whole: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """stochastic_round in plain torch, without writes, so that Inductor fuses it with the update."""
    return _rounded(x, _hash(_indices(x, whole, offsets) ^ _hash(_hash(step.int()) ^ _signed(key))))


def _indices(x: torch.Tensor, whole: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """int32, x's shape: the index of each element in the whole leaf, modulo 2**32."""
    index = torch.zeros((), dtype=torch.int32, device=x.device)
    for rows, length, start in zip(x.shape, whole, offsets):
        dim = torch.arange(start, start + rows, dtype=torch.int32, device=x.device)
        index = index.unsqueeze(-1) * length + dim
    return index


def _hash(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 of int32. The shifts are masked, because torch's fill with the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(bits: int) -> int:
    """The integer of 32 bits with a sign that has the same bits."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


def _rounded(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`x` in bf16, rounded by the last 16 bits of `noise`."""
    up = (x.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    # NaN is not less than anything.
    return torch.where(x.abs() < LARGEST, up.view(torch.float32), x).to(torch.bfloat16)


def reference(
    x: torch.Tensor, step: torch.Tensor, key: int, whole: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """`meaning`, block by block, so that its dozen temporary values stay in the cache."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    first = _hash(_hash(step.int()) ^ _signed(key))
    elements = x.reshape(-1).split(_CPU_BLOCK)
    indices = _indices(x, whole, offsets).reshape(-1).split(_CPU_BLOCK)
    for some, index, result in zip(elements, indices, out.view(-1).split(_CPU_BLOCK)):
        result.copy_(_rounded(some, _hash(index ^ first)))
    return out


@kernel
def mixed(x):
    """lowbias32 of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def leaf_noise(step, key):
    """The hash of step and key, with which the index of each element is combined."""
    return mixed(mixed(step.to(tl.int32).to(tl.uint32, bitcast=True)) ^ key)


@kernel
def rounded_at_random(x, index, noise):
    """An fp32 value in bf16."""
    up = (x.to(tl.uint32, bitcast=True) + (mixed(index.to(tl.uint32) ^ noise) & 0xFFFF)) & 0xFFFF0000
    up = up.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.3895313892515355e38, up, x).to(tl.bfloat16)


@kernel(unspecialized="key count start")
def _round(x, step, out, key, count, start, inner, skipped, BLOCK: tl.constexpr):
    noise = leaf_noise(tl.load(step), key.to(tl.uint32))
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    index = start + i + i // inner * skipped
    tl.store(out + i, rounded_at_random(tl.load(x + i, mask=mask), index, noise), mask=mask)


def launch(
    x: torch.Tensor, step: torch.Tensor, key: int, whole: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """stochastic_round by the kernel."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    if x.numel():
        start, inner, skipped = flat_part(x.shape, whole, offsets)
        with torch.cuda.device_of(x):
            _round[(-(-x.numel() // _BLOCK),)](
                x, step, out, key, x.numel(), start, inner, skipped, BLOCK=_BLOCK, num_warps=8
            )
    return out


def flat_part(
    shape: Sequence[int], whole: Sequence[int], offsets: Sequence[int]
) -> tuple[int, int, int]:
    """Where the elements of a part lie in the whole leaf: element i is `start + i + i // inner * skipped` there.

    >>> flat_part([4, 2, 5], [4, 6, 5], [0, 2, 0])
    (10, 10, 20)
    >>> flat_part([4, 5], [4, 5], [0, 0])
    (0, 20, 0)
    """
    start = 0
    for length, offset in zip(whole, offsets):
        start = start * length + offset
    for dim, (rows, length) in enumerate(zip(shape, whole)):
        if rows != length:
            inner = math.prod(shape[dim:])
            return start, max(inner, 1), math.prod(whole[dim:]) - inner
    return start, max(math.prod(shape), 1), 0


def _check(
    x: torch.Tensor, step: torch.Tensor, key: int, whole: Sequence[int], offsets: Sequence[int]
) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round: x must be fp32, got {x.dtype}.")
    if step.numel() != 1 or step.dtype not in (torch.int32, torch.int64, torch.float32):
        raise TypeError(
            f"stochastic_round: step must be a scalar of int32, int64 or fp32, got {step.dtype}{list(step.shape)}."
        )
    if not 0 <= key < 1 << 32:
        raise ValueError(f"stochastic_round: key must have 32 bits, got {key}.")
    fits = len(whole) == len(offsets) == x.ndim
    fits = fits and all(0 <= k and k + n <= m for n, m, k in zip(x.shape, whole, offsets))
    if not fits or sum(n != m for n, m in zip(x.shape, whole)) > 1:
        raise ValueError(
            f"stochastic_round: {list(x.shape)} at {list(offsets)} is no part of {list(whole)} along one dim."
        )


def _checked(run):
    def implementation(x, step, key, whole, offsets):
        _check(x, step, key, whole, offsets)
        return run(x, step, key, whole, offsets)

    return implementation


def _fake(x, *_):
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


LIBRARY.define(
    "stochastic_round(Tensor x, Tensor step, int key, int[] whole, int[] offsets) -> Tensor",
    tags=(torch.Tag.pointwise,),
)
LIBRARY.impl("stochastic_round", _checked(reference), "CPU")
LIBRARY.impl("stochastic_round", _checked(launch), "CUDA")
torch.library.register_fake("ztrans::stochastic_round", _checked(_fake), lib=LIBRARY)
