"""stochastic_round(old, x, key, whole, offsets): fp32 to bf16, up or down with the odds that keep the mean.

    old      bf16, or a moment in int8 or uint8 (see `moments`), x's shape: the stored value that the result replaces.
             `stochastic_round_` writes the result there, and `stochastic_round` returns a new tensor; neither reads it
    x        fp32, any shape: the new value of a leaf of the state, or the part of one rank
    key      the key of this leaf in this step, from `leaf_keys`: an int32 scalar tensor on x's device
    whole    the shape of the whole leaf
    offsets  the index in the whole leaf at which x begins, along each dim; at most one dim is cut
    ->       old's dtype, x's shape, contiguous

leaf_keys(step, leaves): the keys of all leaves in a step. They differ from step to step and from leaf to leaf.

    step     the number of the step: a scalar tensor, integer or fp32
    leaves   for each leaf an integer of 32 bits, a hash of its name and of a seed
    ->       int32[leaves], on the device of step

An element becomes one of its two neighbours in bf16: 16 random bits are added to the bits of fp32, and the last 16 are
cut off. The random bits are a hash of the key and the element's index in the whole leaf (row-major, modulo 2**32), so
they do not depend on the number of ranks, on the device, or on the order of operations. Values that bf16 holds exactly
stay, and so do infinities and NaN. From the largest bf16 on, values are rounded to nearest, so only those that this
makes infinite become so.

Bytes moved at least: 6 for each element. Torch rounds moments on GPUs too. The hash is lowbias32 of Chris Wellons'
hash-prospector.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .kernel import kernel, tl
from .moments import MOMENTS, coded
from .operation import define
from .tables import on_device

LARGEST = torch.finfo(torch.bfloat16).max
_BLOCK = 2048
# On CPUs, the elements that are rounded together, whose temporary values fit into the cache of a core.
_CPU_BLOCK = 1 << 15


def stochastic_round(
    x: torch.Tensor,
    key: torch.Tensor,
    whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Round `x` to `dtype` at random. By default it is a whole leaf. The docstring of this file has the details.

    >>> (key,) = leaf_keys(torch.tensor(1), [0])
    >>> stochastic_round(torch.full((5,), 1 + 2**-8), key)
    tensor([1.0078, 1.0078, 1.0000, 1.0000, 1.0000], dtype=torch.bfloat16)
    """
    whole = [*x.shape] if whole is None else whole
    offsets = [0] * x.ndim if offsets is None else offsets
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.ops.ztrans.stochastic_round_.default(out, x, key, whole, offsets)


def leaf_keys(step: torch.Tensor, leaves: Sequence[int]) -> torch.Tensor:
    """The keys of leaves in a step. The docstring of this file has the details."""
    return torch.ops.ztrans.leaf_keys.default(step, leaves)


def rounded(
    old: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    whole: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """stochastic_round in plain torch, without writes, so that Inductor fuses it with the update."""
    return _rounded(x, _hash(_indices(x, whole, offsets) ^ key), old.dtype)


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


def _rounded(x: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, rounded by the last bits of `noise`, 16 for bf16."""
    if dtype in MOMENTS:
        return coded(x, noise, dtype)
    up = (x.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    # NaN is not less than anything.
    return torch.where(x.abs() < LARGEST, up.view(torch.float32), x).to(torch.bfloat16)


def reference(
    out: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    whole: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """`rounded`, block by block, so that its dozen temporary values are small and stay in the cache."""
    elements = x.reshape(-1).split(_CPU_BLOCK)
    start, inner, skipped = flat_part(x.shape, whole, offsets)
    first = 0
    for some, result in zip(elements, out.view(-1).split(_CPU_BLOCK)):
        i = torch.arange(first, first + len(some), device=x.device)
        index = (start + i + i // inner * skipped).int()
        result.copy_(_rounded(some, _hash(index ^ key), out.dtype))
        first += len(some)
    return out


def _leaf_keys(step: torch.Tensor, leaves: Sequence[int]) -> torch.Tensor:
    return _hash(_hash(step.int()) ^ _names(tuple(leaves), step.device))


@functools.cache
def _names(leaves: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return on_device(torch.tensor([*map(_signed, leaves)], dtype=torch.int32), device)


@kernel
def mixed(x):
    """lowbias32 of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def rounded_at_random(x, index, key):
    """An fp32 value in bf16. `index` is that of the element in the whole leaf."""
    noise = mixed(index.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)) & 0xFFFF
    up = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    up = up.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 3.3895313892515355e38, up, x).to(tl.bfloat16)


@kernel(unspecialized="count start inner skipped")
def _round(x, key, out, count, start, inner, skipped, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    index = start + i + i // inner * skipped
    value = rounded_at_random(tl.load(x + i, mask=mask), index, tl.load(key))
    tl.store(out + i, value, mask=mask)


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    whole: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """stochastic_round_ by the kernel, which knows bf16."""
    if out.dtype in MOMENTS:
        return out.copy_(rounded(out, x, key, whole, offsets))
    x = x.contiguous()
    if x.numel():
        start, inner, skipped = flat_part(x.shape, whole, offsets)
        with torch.cuda.device_of(x):
            _round[(-(-x.numel() // _BLOCK),)](
                x, key, out, x.numel(), start, inner, skipped, BLOCK=_BLOCK, num_warps=8
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
    old: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    whole: Sequence[int],
    offsets: Sequence[int],
) -> None:
    is_stored = old.dtype == torch.bfloat16 or old.dtype in MOMENTS
    if old.shape != x.shape or not is_stored or old.device != x.device:
        raise ValueError(
            f"stochastic_round: the old value must be bf16, int8 or uint8{list(x.shape)} on {x.device}, got "
            f"{old.dtype}{list(old.shape)} on {old.device}."
        )
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round: x must be fp32, got {x.dtype}.")
    if key.numel() != 1 or key.dtype != torch.int32 or key.device != x.device:
        raise TypeError(
            f"stochastic_round: key must be an int32 scalar on {x.device}, got {key.dtype}{list(key.shape)} on "
            f"{key.device}."
        )
    fits = len(whole) == len(offsets) == x.ndim
    fits = fits and all(k >= 0 and k + n <= m for n, m, k in zip(x.shape, whole, offsets))
    if not fits or sum(n != m for n, m in zip(x.shape, whole)) > 1:
        raise ValueError(
            f"stochastic_round: {list(x.shape)} at {list(offsets)} is no part of {list(whole)} along one dim."
        )


def _check_in_place(old: torch.Tensor, *args: Any) -> None:
    _check(old, *args)
    if not old.is_contiguous():
        raise ValueError("stochastic_round_: the old value must be contiguous.")


def _check_keys(step: torch.Tensor, leaves: Sequence[int]) -> None:
    if step.numel() != 1 or step.dtype not in (torch.int32, torch.int64, torch.float32):
        raise TypeError(
            f"leaf_keys: step must be a scalar of int32, int64 or fp32, got {step.dtype}{list(step.shape)}."
        )
    if not all(0 <= leaf < 1 << 32 for leaf in leaves):
        raise ValueError("leaf_keys: leaves must be integers of 32 bits.")


def _contiguous_like(old: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(old, memory_format=torch.contiguous_format)


_ARGUMENTS = "Tensor x, Tensor key, int[] whole, int[] offsets"
define(
    f"stochastic_round_(Tensor(a!) self, {_ARGUMENTS}) -> Tensor(a!)",
    _check_in_place,
    reference,
    launch,
    lambda out, *_: out,
)
define(
    f"stochastic_round(Tensor self, {_ARGUMENTS}) -> Tensor",
    _check,
    lambda old, *args: reference(_contiguous_like(old), *args),
    lambda old, *args: launch(_contiguous_like(old), *args),
    lambda old, *_: _contiguous_like(old),
    tags=(torch.Tag.pointwise,),
)
define(
    "leaf_keys(Tensor step, int[] leaves) -> Tensor",
    _check_keys,
    _leaf_keys,
    _leaf_keys,
    lambda step, leaves: torch.empty(len(leaves), dtype=torch.int32, device=step.device),
)
