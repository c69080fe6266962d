"""fused_adamw_, fused_adam_ and fused_sgd_: kernel and reference agree bit for bit, over several steps."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.ops.interpreted.patterns import same

update = importlib.import_module("ztrans.ops.update")

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
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_adam(dtype, decay, decoupled, skew):
    """The kernel reads a rate of fp32 itself; one of fp64 is passed to it as a number.

    Each of the two is in a case of each decay, each alignment and each optimizer.
    """
    rate = torch.tensor(1e-3, dtype=torch.float64 if decoupled == bool(skew) else torch.float32)
    lists = [tensors(1, 0, skew), tensors(0, 0, skew), tensors(0, 0, skew)]
    lists += [] if dtype == torch.float32 else [[x.to(dtype) for x in tensors(0, 0, skew)]]
    ours, true = copies(lists), copies(lists)
    options = {"lr": rate, "weight_decay": decay, "decoupled": decoupled, **ADAM}
    options |= {"scale": torch.tensor(0.3)} if decay else {}
    for step in range(1, 4):
        grads = [g.to(dtype) for g in tensors(10.0**-step, step, skew)]
        steps = [torch.tensor(float(step + k)) for k in range(len(NUMELS))]
        update.launch_adam(ours[0], grads, *ours[1:3], steps, *ours[3:], **options)
        update.reference_adam(true[0], grads, *true[1:3], steps, *true[3:], **options)
        assert_same(ours, true)
        assert all(map(same, ours[-1], [p.to(ours[-1][0].dtype) for p in true[0]])) or not lists[3:]
    assert not same(true[0][0], lists[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0, 0, False), (0.9, 0, False), (0.9, 0.2, False), (0.9, 0, True)],
)
def test_sgd(dtype, decay, momentum, dampening, nesterov, skew):
    halves = [] if dtype == torch.float32 else [x.to(dtype) for x in tensors(0, 0, skew)]
    lists = [tensors(1, 0, skew), tensors(1, 5, skew) if momentum else [], halves]
    ours, true = copies(lists), copies(lists)
    options = {
        "lr": torch.tensor(0.01), "weight_decay": decay, "momentum": momentum, "dampening": dampening,
        "nesterov": nesterov, "scale": torch.tensor(0.3) if decay else None,
    }  # fmt: skip
    for step in range(3):
        grads = [g.to(dtype) for g in tensors(1, step, skew)]
        update.launch_sgd(ours[0], grads, *ours[1:], is_first_step=step == 0, **options)
        update.reference_sgd(true[0], grads, *true[1:], is_first_step=step == 0, **options)
        assert_same(ours, true)
        assert all(same(h, p.to(dtype)) for h, p in zip(ours[2], true[0]))


def test_a_gradient_with_gaps_is_copied():
    params, moments, squares = ([torch.ones(6, 4)] for _ in range(3))
    grad = torch.randn(4, 6).bfloat16().t()
    update.launch_adam(
        params, [grad], moments, squares, [torch.tensor(1.0)],
        lr=torch.tensor(0.1), weight_decay=0.0, decoupled=True, **ADAM,
    )  # fmt: skip
    true = [[torch.ones(6, 4)] for _ in range(3)]
    update.reference_adam(
        true[0], [grad], true[1], true[2], [torch.tensor(1.0)],
        lr=torch.tensor(0.1), weight_decay=0.0, decoupled=True, **ADAM,
    )  # fmt: skip
    assert_same((params, moments, squares), true)


# For each element: parameters and moments are read and written, gradients are read, and halves are written.
BYTES = {
    ("adam", torch.bfloat16): 3 * 8 + 2,
    ("adam with halves", torch.bfloat16): 3 * 8 + 2 + 2,
    ("adam", torch.float32): 3 * 8 + 4,
    ("sgd", torch.bfloat16): 8 + 2,
    ("sgd with halves", torch.bfloat16): 8 + 2 + 2,
    ("sgd with momentum", torch.float16): 2 * 8 + 2,
}


@pytest.mark.parametrize(("name", "dtype"), BYTES, ids=str)
def test_each_element_is_moved_once(name, dtype, monkeypatch):
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
    halves = [torch.empty(n).bfloat16() for n in NUMELS] if "halves" in name else None
    if name.startswith("adam"):
        steps = [torch.ones(()) for _ in NUMELS]
        options = {"lr": rate, "weight_decay": 0.1, "decoupled": True, **ADAM}
        squares = [x.square() for x in squares]
        update.launch_adam(params, grads, moments, squares, steps, halves, **options)
    else:
        has_momentum = name == "sgd with momentum"
        options = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": False}
        options |= {"lr": rate, "is_first_step": False}
        update.launch_sgd(params, grads, moments if has_momentum else [], halves, **options)
    count = sum(-(-n // update.BLOCK) for n in NUMELS)
    assert sum(moved) - BYTES[name, dtype] * sum(NUMELS) in range(1, 80 * count)
