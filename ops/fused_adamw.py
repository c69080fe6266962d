"""fused_adamw: update many parameters of fp32 from gradients in half precision, in one launch.

    self         parameters, contiguous and fp32, or bf16 if there are keys; overwritten
    grads        a gradient for each, fp32, bf16 or fp16, all of one dtype
    exp_avgs, exp_avg_sqs
                 the moments, like the parameters; overwritten
    state_steps  for each parameter the number of its steps, this one included: fp32 scalars
    halves       optional copies of the parameters in bf16 or fp16; overwritten with the new parameters
    keys         if parameters and moments are bf16 between steps: for each parameter the keys with which it, its first
                 and its second moment are rounded (see `stochastic_round`)
    whole, offsets
                 with keys: of each parameter the shape of the whole leaf, and the index at which the parameter begins
                 there, one after the other
    lr           a scalar tensor: fp32 on the device of the parameters, or of any dtype on the CPU
    scale        an optional factor of all gradients, such as for clipping: an fp32 scalar tensor
    the others   as in `torch._fused_adamw_`

With keys it computes in fp32 what it reads in bf16, and rounds once: 12 bytes for each element in place of 24.

`fused_adamw_` writes in place; `fused_adamw` returns new tensors. They compute the same bits as PyTorch's fused AdamW,
and without `weight_decay` its fused Adam, on a GPU from the same gradients in fp32, but need no copy of the gradients
in fp32. Bytes moved at least, for each element: 24, its gradient, and 2 more for a copy in half precision. There is one
launch for all parameters, and three small ones for the powers of beta.

The order of operations follows PyTorch's `native/cuda/fused_adam_utils.cuh`. nvcc fuses some products and sums into one
operation, which rounds once. The machine code of PyTorch 2.11 for sm_90 shows which: each is a call of `fma` here, and
nothing else is fused. `torch.pow` computes the powers of beta, because each version of CUDA rounds powers in its own
way, and `torch.pow` is compiled together with the optimizers. `maximize`, `amsgrad` and gradients that are divided by a
loss scale are left to PyTorch.

Errors: other dtypes, parameters or moments that are not contiguous, and lists whose lengths or sizes do not agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .kernel import FLOATS, element, kernel, tl
from .operation import define, define_composite
from .stochastic_round import flat_part, rounded_at_random
from .stochastic_round import reference as round_on_cpu
from .tables import addresses, blocks, on_device

BLOCK = 2048
_ARGUMENTS = (
    "{0} self, Tensor[] grads, {1} exp_avgs, {2} exp_avg_sqs, Tensor[] state_steps, {3}? halves=None, "
    "Tensor[]? keys=None, int[]? whole=None, int[]? offsets=None, *, "
    "Tensor lr, float beta1, float beta2, float weight_decay, float eps, Tensor? scale=None"
)
_WRITTEN = ("Tensor(a!)[]", "Tensor(b!)[]", "Tensor(c!)[]", "Tensor(d!)[]")
# Lists that need not be in fp32: their name in errors, and their dtypes, as text and as a set.
_DTYPES = {
    "grads": ("gradients", "all fp32, all bf16 or all fp16", FLOATS.keys()),
    "halves": ("halves", "all bf16 or all fp16", FLOATS.keys() - {torch.float32}),
}
Tensors = Sequence[torch.Tensor]


@kernel
def _adam_block(
    p, g, m, v, h, mask, factor, step_size, correction, lr, beta1, beta2, weight_decay, eps, index, keys,
    HALVES: tl.constexpr, SCALES: tl.constexpr, DECAYS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    param = tl.load(p + i, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(g + i, mask=mask, other=0.0).to(tl.float32)
    if SCALES:
        grad = grad * factor
    exp_avg = tl.load(m + i, mask=mask, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(v + i, mask=mask, other=0.0).to(tl.float32)
    if DECAYS:
        param = tl.fma(-(lr * weight_decay), param, param)
    square = grad * grad
    exp_avg = tl.fma(beta1, exp_avg, tl.fma(-beta1, grad, grad))
    exp_avg_sq = tl.fma(beta2, exp_avg_sq, tl.fma(-beta2, square, square))
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction) + eps
    param = param - tl.div_rn(step_size * exp_avg, denominator)
    if ROUNDS:
        tl.store(p + i, rounded_at_random(param, index, tl.load(keys)), mask=mask)
        tl.store(m + i, rounded_at_random(exp_avg, index, tl.load(keys + 1)), mask=mask)
        tl.store(v + i, rounded_at_random(exp_avg_sq, index, tl.load(keys + 2)), mask=mask)
    else:
        tl.store(p + i, param, mask=mask)
        tl.store(m + i, exp_avg, mask=mask)
        tl.store(v + i, exp_avg_sq, mask=mask)
    if HALVES:
        tl.store(h + i, param.to(h.dtype.element_ty), mask=mask)


@kernel(unspecialized="count")
def _adam(
    rows, bases, scale, powers, keys, places, rate, beta1, beta2, weight_decay, eps, count,
    PARAM: tl.constexpr, GRAD: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, SCALES: tl.constexpr,
    LOADS_RATE: tl.constexpr, DECAYS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 3
    tensor = tl.load(row)
    start = tl.load(row + 1)
    left = tl.load(row + 2).to(tl.int32)
    size = PARAM.primitive_bitwidth // 8
    p = tl.load(bases + tensor) + start * size
    g = tl.load(bases + count + tensor) + start * (GRAD.primitive_bitwidth // 8)
    m = tl.load(bases + 2 * count + tensor) + start * size
    v = tl.load(bases + 3 * count + tensor) + start * size
    h = p
    if HALVES:
        h = tl.load(bases + 4 * count + tensor) + start * 2
    factor = tl.load(scale) if SCALES else 1.0
    lr = tl.load(rate) if LOADS_RATE else tl.cast(rate, tl.float32)
    step_size = tl.div_rn(lr, 1 - tl.load(powers + tensor))
    correction = tl.sqrt_rn(1 - tl.load(powers + count + tensor))
    i = tl.arange(0, BLOCK)
    index = i
    if ROUNDS:
        keys += tensor * 3
        place = places + tensor * 3
        index = start + i
        index += tl.load(place) + index // tl.load(place + 1) * tl.load(place + 2)
    # Aligned addresses let Triton load and store 16 bytes at a time.
    if (((p | g | m | v | h) & 15) == 0) & (left % 8 == 0):
        _adam_block(
            tl.multiple_of(p.to(tl.pointer_type(PARAM)), 16),
            tl.multiple_of(g.to(tl.pointer_type(GRAD)), 16),
            tl.multiple_of(m.to(tl.pointer_type(PARAM)), 16),
            tl.multiple_of(v.to(tl.pointer_type(PARAM)), 16),
            tl.multiple_of(h.to(tl.pointer_type(HALF)), 16),
            i < tl.multiple_of(left, 8),
            factor, step_size, correction, lr, beta1, beta2, weight_decay, eps, index, keys,
            HALVES, SCALES, DECAYS, ROUNDS, BLOCK,
        )  # fmt: skip
    else:
        _adam_block(
            p.to(tl.pointer_type(PARAM)),
            g.to(tl.pointer_type(GRAD)),
            m.to(tl.pointer_type(PARAM)),
            v.to(tl.pointer_type(PARAM)),
            h.to(tl.pointer_type(HALF)),
            i < left,
            factor, step_size, correction, lr, beta1, beta2, weight_decay, eps, index, keys,
            HALVES, SCALES, DECAYS, ROUNDS, BLOCK,
        )  # fmt: skip


def launch(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, state_steps: Tensors,
    halves: Tensors | None = None, keys: Tensors | None = None, whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None, *, lr: torch.Tensor, beta1: float, beta2: float, weight_decay: float,
    eps: float, scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """fused_adamw_ by the kernel."""
    if not self:
        return
    rows = _rows(tuple(p.numel() for p in self), self[0].device)
    if not len(rows):
        return
    powers = _powers(beta1, beta2, state_steps)
    rate = _rate(lr, rows.device)
    halves = halves or []
    stacked_keys = places = None
    if keys:
        places = _places(
            tuple(p.shape for p in self), tuple(whole or ()), tuple(offsets or ()), rows.device
        )
        stacked_keys = torch.stack(list(keys))
    grads = [g.contiguous() for g in grads]
    with torch.cuda.device_of(rows):
        bases = addresses([*self, *grads, *exp_avgs, *exp_avg_sqs, *halves], rows.device)
        _adam[(len(rows),)](
            rows, bases, scale, powers, stacked_keys, places, rate, beta1, beta2, weight_decay, eps, len(self),
            PARAM=element(self[0].dtype), GRAD=element(grads[0].dtype), HALF=element((halves or grads)[0].dtype),
            HALVES=bool(halves), SCALES=scale is not None, LOADS_RATE=isinstance(rate, torch.Tensor),
            DECAYS=weight_decay != 0, ROUNDS=bool(keys), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@functools.cache
def _rows(numels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64[blocks, 3]: for each block its tensor, its first element, and its number of elements."""
    pieces = [(k, 0, numel) for k, numel in enumerate(numels)]
    return on_device(blocks(pieces, numels, BLOCK, advancing=(1,), remaining=(2,)), device)


@functools.cache
def _places(
    shapes: tuple[torch.Size, ...],
    whole: tuple[int, ...],
    offsets: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """int64[tensors, 3]: where the elements of each tensor lie in its whole leaf (see `flat_part`)."""
    parts = [flat_part(*place) for place in _each(shapes, whole, offsets)]
    return on_device(torch.tensor(parts), device)


def _each(
    shapes: Sequence[torch.Size], whole: Sequence[int], offsets: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """The shape, the whole shape and the offsets of each parameter."""
    start = 0
    for shape in shapes:
        end = start + len(shape)
        yield shape, whole[start:end], offsets[start:end]
        start = end


def _rate(lr: torch.Tensor, device: torch.device) -> torch.Tensor | float:
    """The learning rate for the kernel: a tensor that it can read, or a number."""
    return lr if lr.device == device and lr.dtype == torch.float32 else lr.item()


def _powers(beta1: float, beta2: float, state_steps: Tensors) -> torch.Tensor:
    """fp32[2, tensors]: beta1 and beta2 to the power of each tensor's number of steps."""
    steps = torch.stack(list(state_steps))
    powers = steps.new_empty(2, len(steps))
    torch.pow(beta1, steps, out=powers[0])
    torch.pow(beta2, steps, out=powers[1])
    return powers


def reference(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, state_steps: Tensors,
    halves: Tensors | None = None, keys: Tensors | None = None, whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None, *, lr: torch.Tensor, beta1: float, beta2: float, weight_decay: float,
    eps: float, scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """fused_adamw_ in plain torch, tensor by tensor."""
    if not self:
        return
    if keys:
        stored = (self, exp_avgs, exp_avg_sqs)
        wide = [[x.to(torch.float32) for x in tensors] for tensors in stored]
        numbers: dict[str, Any] = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": weight_decay,
            "eps": eps,
        }
        params, first_moments, second_moments = wide
        reference(
            params,
            grads,
            first_moments,
            second_moments,
            state_steps,
            halves,
            **numbers,
            scale=scale,
        )
        for k, place in enumerate(_each([p.shape for p in self], whole or (), offsets or ())):
            for j, (tensors, results) in enumerate(zip(stored, wide)):
                round_on_cpu(tensors[k], results[k], keys[3 * k + j], *place[1:])
        return
    powers = _powers(beta1, beta2, state_steps)
    rate, decay, epsilon = map(_fp32, (lr, weight_decay, eps))
    first, second = map(_fp32, (beta1, beta2))
    for k, (p, grad, m, v) in enumerate(zip(self, grads, exp_avgs, exp_avg_sqs)):
        g = _scaled(grad, scale)
        if weight_decay:
            p.copy_(fma(-(rate * decay), p, p))
        square = g * g
        m.copy_(fma(first, m, fma(-first, g, g)))
        v.copy_(fma(second, v, fma(-second, square, square)))
        step_size = rate / (1 - powers[0, k])
        denominator = _sqrt(v) / _sqrt(1 - powers[1, k]) + epsilon
        p.sub_(step_size * m / denominator)
    for half, p in zip(halves or [], self):
        half.copy_(p)


def _scaled(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A gradient in fp32, times the scale if there is one."""
    wide = grad.to(torch.float32)
    return wide if scale is None else wide * scale


def _fp32(number: Any) -> torch.Tensor:
    """A number in fp32, as a kernel gets it."""
    return torch.as_tensor(number).to("cpu", torch.float32)


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of fp32. `torch.sqrt` does not round correctly on every CPU."""
    return x.double().sqrt().to(torch.float32)


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of fp32, rounded once.

    In fp64 the product is exact. The sum is rounded to odd, which makes the next rounding, to fp32, right.
    """
    product = x.double() * y.double()
    total = product + z
    shifted = total - product
    error = (product - (total - shifted)) + (z - shifted)
    bits = total.view(torch.int64)
    is_inexact = error.isfinite() & (error != 0)
    towards_error = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where(is_inexact & (bits % 2 == 0), bits + towards_error, bits)
    return odd.view(torch.float64).to(torch.float32)


def _check_lists(lists: dict[str, Tensors], stored: torch.dtype) -> None:
    """Check the lists of an update by their names: the parameters, the gradients, and the moments."""
    params = lists["self"]
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(
                f"update: {len(params)} parameters, but {len(tensors)} tensors in {name}."
            )
        for k, (x, p) in enumerate(zip(tensors, params)):
            if x.shape != p.shape:
                raise ValueError(
                    f"update: {name}[{k}] must have the shape {list(p.shape)} of its parameter; got {list(x.shape)}."
                )
        by_default = (name, "fp32" if stored == torch.float32 else "bf16", {stored})
        subject, wanted, accepted = _DTYPES.get(name, by_default)
        dtypes = {x.dtype for x in tensors}
        if len(dtypes) > 1 or not dtypes <= accepted:
            raise TypeError(f"update: {subject} must be {wanted}; got {_listed(dtypes)}.")
        # The kernel's launch copies gradients with gaps. The other lists are overwritten.
        if name != "grads" and not all(x.is_contiguous() for x in tensors):
            raise TypeError(f"update: {name} must be contiguous.")
    devices = {x.device for tensors in lists.values() for x in tensors}
    if len(devices) > 1:
        raise ValueError(f"update: all tensors must be on one device; got {_listed(devices)}.")


def _listed(things: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, things)))


def _check_scale(params: Tensors, scale: torch.Tensor | None) -> None:
    if scale is None or not params:
        return
    is_scalar = scale.numel() == 1 and scale.dtype == torch.float32
    if not is_scalar or scale.device != params[0].device:
        raise ValueError(
            f"update: scale must be an fp32 scalar on {params[0].device}; got {scale.dtype}{list(scale.shape)} on "
            f"{scale.device}."
        )


def _check(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, state_steps: Tensors,
    halves: Tensors | None = None, keys: Tensors | None = None, whole: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None, *, scale: torch.Tensor | None = None, **numbers: Any,
) -> None:  # fmt: skip
    _check_scale(self, scale)
    lists = {"self": self, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if halves:
        lists["halves"] = halves
    _check_lists(lists, torch.bfloat16 if keys else torch.float32)
    dims = sum(p.ndim for p in self)
    if keys and not (len(keys) == 3 * len(self) and len(whole or ()) == len(offsets or ()) == dims):
        raise ValueError(
            f"update: {len(self)} parameters of {dims} dims in all have 3 keys each, and a size and an offset for each "
            f"dim; got {len(keys)}, {len(whole or ())} and {len(offsets or ())}."
        )
    if len(state_steps) != len(self):
        raise ValueError(
            f"update: {len(self)} parameters, but {len(state_steps)} numbers of steps."
        )
    devices = {p.device for p in self}
    for x in state_steps:
        if x.dtype != torch.float32 or x.device not in devices:
            raise ValueError("update: state_steps must be fp32 on the device of the parameters.")


define(f"fused_adamw_({_ARGUMENTS.format(*_WRITTEN)}) -> ()", _check, reference, launch)
_in_place = torch.ops.ztrans.fused_adamw_.default


def _fused_adamw(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, state_steps: Tensors,
    halves: Tensors | None = None, *places: Any, **numbers: Any,
) -> tuple[Tensors, ...]:  # fmt: skip
    """The new parameters, the new moments, and the new copies in half precision, if any."""
    new_lists = []
    for tensors in (self, exp_avgs, exp_avg_sqs, halves or []):
        new_lists.append([x.clone() for x in tensors])
    params, first, second, casts = new_lists
    _in_place(params, grads, first, second, state_steps, casts, *places, **numbers)
    return params, first, second, casts


define_composite(
    f"fused_adamw({_ARGUMENTS.format(*['Tensor[]'] * 4)}) -> "
    "(Tensor[] self_out, Tensor[] exp_avgs_out, Tensor[] exp_avg_sqs_out, Tensor[] halves_out)",
    _fused_adamw,
)
