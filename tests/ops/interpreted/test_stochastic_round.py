"""stochastic_round: kernel and reference agree bit for bit, on parts along any dim."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.interpreted.patterns import same
from ztrans import ops

module = importlib.import_module("ztrans.ops.stochastic_round")


@pytest.mark.parametrize(
    ("shape", "whole", "offsets"),
    [
        ((4099,), (4099,), (0,)),
        ((3, 700), (5, 700), (2, 0)),
        ((4, 3, 50), (4, 8, 50), (0, 5, 0)),
        ((), (), ()),
        ((0, 4), (6, 4), (6, 0)),
    ],
    ids=str,
)
def test_kernel(shape, whole, offsets):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-40, 38, shape, generator=draw)
    if x.ndim == 1:
        x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3.3896e38, 3.4e38])
    (key,) = ops.leaf_keys(torch.tensor(7), [123456789])
    ours, true = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
    module.launch(ours, x, key, whole, offsets)
    assert same(ours, module.reference(true, x, key, whole, offsets))
