"""The host functions compile every kernel that they would launch, for a GPU that is not there; nothing runs."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("with a GPU, a launch would run", allow_module_level=True)

kernel = importlib.import_module("ztrans.ops.kernel")
symmetric = importlib.import_module("ztrans.ops.symmetric")
op = {
    name: importlib.import_module(f"ztrans.ops.{name}")
    for name in (
        "adamw_pack", "all_gather", "barrier", "cast_pack", "dequantise", "quantise", "reduce_scatter", "stochastic_round",
        "unpack",
    )
}  # fmt: skip


class Card:
    """A double of a GPU, with the properties that the compiler reads."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def kernels(monkeypatch) -> list:
    """The kernels that were compiled instead of launched."""
    from triton.runtime import driver

    compiled_kernels = []
    monkeypatch.setattr(driver, "_active", Card())

    def compile_only(self, grid):
        def launch(*args, **options):
            compiled_kernels.append(self.jit.warmup(*args, grid=grid, **{"enable_fp_fusion": True, **options}))

        return launch

    monkeypatch.setattr(kernel.Kernel, "__getitem__", compile_only)
    return compiled_kernels


def test_moves(kernels):
    parts = [torch.ones(5000), torch.ones(3), torch.ones(9).bfloat16()]
    out = torch.empty(5012, dtype=torch.bfloat16)
    op["cast_pack"].launch(parts, [5000, 3, 9], 1, out)
    op["unpack"].launch(out, [5000, 3, 9], 1, [torch.empty(n, dtype=torch.bfloat16) for n in (5000, 3, 9)])
    op["stochastic_round"].launch(parts[0], torch.tensor(1))
    assert len(kernels) == 4 and all("cubin" in k.asm for k in kernels)


@pytest.mark.parametrize("scale, seed", [(None, None), (torch.ones(()), torch.tensor(3))], ids=["plain", "all"])
def test_adamw(kernels, scale, seed):
    ps, gs, ms, vs = ([torch.ones(n) for n in (5, 16, 1)] for _ in range(4))
    gs[1] = gs[1].bfloat16()
    one = torch.ones(())
    for out in ([None] if seed is None else []) + [torch.empty(22, dtype=torch.bfloat16)]:
        op["adamw_pack"].launch(ps, gs, ms, vs, one, one, scale, 0.9, 0.999, 1e-8, 0.1, [5, 16, 1], out, seed)
    assert len(kernels) in (2, 4) and all("cubin" in k.asm for k in kernels)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised(kernels, kind):
    buffer = torch.zeros(op["quantise"].row_bytes([200, 3]), dtype=torch.uint8)
    op["quantise"].launch([torch.ones(200), torch.ones(3)], [200, 3], kind, buffer)
    op["dequantise"].launch(buffer, [200, 3], 1, kind, [torch.empty(200), torch.empty(3)])
    assert len(kernels) == 2 and all("cubin" in k.asm for k in kernels)


@pytest.mark.parametrize("together", [1, 2], ids=["one rank", "all ranks"])
def test_collectives(kernels, together):
    at, _ = symmetric.in_one_process(2, 4096)
    tables = (at.buffers, at.pads, at.error)
    op["barrier"].launch(at.pads, at.error, 0, 100)
    for channels in (1, 32):
        outs = [torch.empty(n) for _ in range(together) for n in (10, 6)]
        op["all_gather"].launch(*tables, outs, [5, 3], 0, 16, channels, 100, together=together)
        parts = [torch.empty(n) for _ in range(together) for n in (5, 3)]
        op["reduce_scatter"].launch(
            *tables, parts, [5, 3], "mean", torch.bfloat16, 0, 16, channels, 100, together=together
        )
    assert len(kernels) == 5 and all("cubin" in k.asm for k in kernels)
    assert kernels[1].metadata.launch_cooperative_grid == (together > 1)
    assert kernels[1] is kernels[3] and kernels[2] is kernels[4]  # one kernel each: arguments that vary from call to call are no constants of it
