"""What the host functions launch, compiled as a launch compiles it, for a card that is not there and without running."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU launches are real", allow_module_level=True)

kernel = importlib.import_module("ztrans.ops.kernel")
symmetric = importlib.import_module("ztrans.ops.symmetric")
op = {
    name: importlib.import_module(f"ztrans.ops.{name}")
    for name in ("all_gather", "barrier", "cast_pack", "reduce_scatter", "unpack")
}


class Card:
    """As much of a GPU as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def made(monkeypatch) -> list:
    """The kernels that were compiled instead of launched."""
    from triton.runtime import driver

    found = []
    monkeypatch.setattr(driver, "_active", Card())

    def compile_only(self, grid):
        def launch(*args, **options):
            found.append(self.jit.warmup(*args, grid=grid, **{"enable_fp_fusion": True, **options}))

        return launch

    monkeypatch.setattr(kernel.Kernel, "__getitem__", compile_only)
    return found


def test_moves(made):
    parts = [torch.ones(5000), torch.ones(3), torch.ones(9).bfloat16()]
    out = torch.empty(5012, dtype=torch.bfloat16)
    op["cast_pack"].launch(parts, [5000, 3, 9], 1, out)
    op["unpack"].launch(out, [5000, 3, 9], 1, [torch.empty(n, dtype=torch.bfloat16) for n in (5000, 3, 9)])
    assert len(made) == 3 and all("cubin" in k.asm for k in made)


@pytest.mark.parametrize("together", [1, 2], ids=["one rank", "all ranks"])
def test_collectives(made, together):
    at, _ = symmetric.in_one_process(2, 4096)
    tables = (at.buffers, at.pads, at.error)
    op["barrier"].launch(at.pads, at.error, 0, 100)
    for channels in (1, 32):
        outs = [torch.empty(n) for _ in range(together) for n in (10, 6)]
        op["all_gather"].launch(*tables, outs, [5, 3], 0, channels, 100, together=together)
        parts = [torch.empty(n) for _ in range(together) for n in (5, 3)]
        op["reduce_scatter"].launch(
            *tables, parts, [5, 3], "mean", torch.bfloat16, 0, channels, 100, together=together
        )
    assert len(made) == 5 and all("cubin" in k.asm for k in made)
    assert made[1].metadata.launch_cooperative_grid == (together > 1)
    assert made[1] is made[3] and made[2] is made[4]  # no variants for what varies from call to call
