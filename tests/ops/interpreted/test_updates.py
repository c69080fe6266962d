"""fused_adamw_: kernel and reference agree bit for bit, over several steps."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.ops.interpreted.patterns import same
from tests.support.cover import parameters_of
from ztrans import ops

fused_adamw = importlib.import_module("ztrans.ops.fused_adamw")

NUMELS = (2048 * 2 + 8, 3, 0, 2048, 1, 4099)
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def tensors(scale: float, seed: int, skew: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(n + skew, generator=draw)[skew:] for n in NUMELS]


def copies(lists):
    return [[x.clone() for x in each] for each in lists]


def assert_same(ours, true):
    for a, b in zip(ours, true, strict=True):
        assert all(map(same, a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("decay", "rate_dtype"),
    parameters_of(
        [(decay, dtype) for decay in (0.0, 0.1) for dtype in (torch.float32, torch.float64)],
        [(0.0, torch.float64), (0.1, torch.float32)],
    ),
    ids=str,
)
def test_adamw(dtype, decay, rate_dtype, skew):
    """The kernel reads a rate of fp32 itself; one of fp64 is passed to it as a number."""
    rate = torch.tensor(1e-3, dtype=rate_dtype)
    lists = [tensors(1, 0, skew), tensors(0, 0, skew), tensors(0, 0, skew)]
    lists += [] if dtype == torch.float32 else [[x.to(dtype) for x in tensors(0, 0, skew)]]
    ours, true = copies(lists), copies(lists)
    options = {"lr": rate, "weight_decay": decay, **ADAM}
    options |= {"scale": torch.tensor(0.3)} if decay else {}
    for step in range(1, 4):
        grads = [g.to(dtype) for g in tensors(10.0**-step, step, skew)]
        steps = [torch.tensor(float(step + k)) for k in range(len(NUMELS))]
        fused_adamw.launch(ours[0], grads, *ours[1:3], steps, *ours[3:], **options)
        fused_adamw.reference(true[0], grads, *true[1:3], steps, *true[3:], **options)
        assert_same(ours, true)
        assert all(map(same, ours[-1], [p.to(ours[-1][0].dtype) for p in true[0]])) or not lists[3:]
    assert not same(true[0][0], lists[0][0])


def test_a_gradient_with_gaps_is_copied():
    params, moments, squares = ([torch.ones(6, 4)] for _ in range(3))
    grad = torch.randn(4, 6).bfloat16().t()
    fused_adamw.launch(
        params, [grad], moments, squares, [torch.tensor(1.0)],
        lr=torch.tensor(0.1), weight_decay=0.0, **ADAM,
    )  # fmt: skip
    true = [[torch.ones(6, 4)] for _ in range(3)]
    fused_adamw.reference(
        true[0], [grad], true[1], true[2], [torch.tensor(1.0)],
        lr=torch.tensor(0.1), weight_decay=0.0, **ADAM,
    )  # fmt: skip
    assert_same((params, moments, squares), true)


# For each element: parameters and moments are read and written, gradients are read, and halves are written.
BYTES = {
    (torch.bfloat16, False): 3 * 8 + 2,
    (torch.bfloat16, True): 3 * 8 + 2 + 2,
    (torch.float32, False): 3 * 8 + 4,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_adamw_of_state_in_bf16(dtype, skew):
    """Parts of leaves, cut along the first or the second dim. With noise of other elements it would have other bits."""
    shapes = [(2048 * 2 + 8,), (7, 300), (4, 6, 50), (0, 3), ()]
    whole = [2048 * 2 + 8, 9, 300, 4, 8, 50, 6, 3]
    offsets = [0, 2, 0, 0, 1, 0, 6, 0]
    draw = torch.Generator().manual_seed(0)

    def some(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
        made = []
        for shape in shapes:
            count = torch.Size(shape).numel()
            flat = (scale * torch.randn(count + skew, generator=draw)).to(dtype)
            made.append(flat[skew:].view(shape))
        return made

    lists = [some(1, torch.bfloat16), some(0, torch.bfloat16), some(0, torch.bfloat16)]
    ours, true = copies(lists), copies(lists)
    options = {"lr": torch.tensor(1e-3), "weight_decay": 0.1, **ADAM}
    for step in range(1, 4):
        grads = some(10.0**-step, dtype)
        steps = [torch.tensor(float(step)) for _ in shapes]
        keys = list(ops.leaf_keys(torch.tensor(step), range(3 * len(shapes))))
        for update, state in ((fused_adamw.launch, ours), (fused_adamw.reference, true)):
            update(state[0], grads, *state[1:], steps, None, keys, whole, offsets, **options)
        assert_same(ours, true)
    assert not same(true[0][0], lists[0][0])


@pytest.mark.parametrize(("dtype", "has_halves"), BYTES, ids=str)
def test_each_element_is_moved_once(dtype, has_halves, monkeypatch):
    """What the kernel loads and stores, besides a few words of tables and scalars for each block."""
    moved = []
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, ptrs, mask, *args):
        moved.append(int(np.sum(mask.data)) * ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, *args)

    def counted_store(self, ptrs, value, mask, *args):
        moved.append(int(np.sum(mask.data)) * ptrs.get_element_ty().primitive_bitwidth // 8)
        return store(self, ptrs, value, mask, *args)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    params, grads, moments, squares = (tensors(1, k, 0) for k in range(4))
    grads = [g.to(dtype) for g in grads]
    rate = torch.tensor(0.1)
    halves = [torch.empty(n).bfloat16() for n in NUMELS] if has_halves else None
    steps = [torch.ones(()) for _ in NUMELS]
    options = {"lr": rate, "weight_decay": 0.1, **ADAM}
    squares = [x.square() for x in squares]
    fused_adamw.launch(params, grads, moments, squares, steps, halves, **options)
    count = sum(-(-n // fused_adamw.BLOCK) for n in NUMELS)
    assert sum(moved) - BYTES[dtype, has_halves] * sum(NUMELS) in range(1, 80 * count)
