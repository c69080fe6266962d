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
        "all_gather",
        "barrier",
        "cast_pack",
        "reduce_scatter",
        "sum_terms",
        "encode",
        "decode",
        "sum_coded",
        "unpack",
        "fused_adamw",
    )
}


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
            compiled_kernels.append(
                self.jit.warmup(*args, grid=grid, **{"enable_fp_fusion": True, **options})
            )

        return launch

    monkeypatch.setattr(kernel.Kernel, "__getitem__", compile_only)
    return compiled_kernels


def test_moves(kernels):
    parts = [torch.ones(5000), torch.ones(3), torch.ones(9).bfloat16()]
    out = torch.empty(5012, dtype=torch.bfloat16)
    op["cast_pack"].launch(parts, [5000, 3, 9], 1, out)
    op["unpack"].launch(
        out, [5000, 3, 9], 1, [torch.empty(n, dtype=torch.bfloat16) for n in (5000, 3, 9)]
    )
    assert len(kernels) == 3 and all("cubin" in k.asm for k in kernels)


@pytest.mark.parametrize("together", [1, 2], ids=["one rank", "all ranks"])
def test_collectives(kernels, together):
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
    assert len(kernels) == 5 and all("cubin" in k.asm for k in kernels)
    assert kernels[1].metadata.launch_cooperative_grid == (together > 1)
    assert (
        kernels[1] is kernels[3] and kernels[2] is kernels[4]
    )  # one kernel each: arguments that vary from call to call are no constants of it


def test_sums_of_rows_that_are_not_aligned_load_single_elements(kernels):
    """A row of 8 bf16 is 16 bytes. If rows have any other length, only the first one starts at a multiple of 16."""
    launch = op["sum_terms"].launch
    for count in (8, 9):
        launch(torch.ones(2, count).bfloat16(), [torch.empty(count)], [count], "sum", 2)
    launch(torch.ones(2, 0).bfloat16(), [torch.empty(0)], [0], "sum", 2)
    loads = ["ld.global.v4" in k.asm["ptx"] for k in kernels]
    assert loads == [True, False], "and nothing is launched for an empty part"


def test_updates(kernels):
    """One kernel for each dtype of gradients: numbers of tensors and of elements are no constants of it."""
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    for numels in ([5000, 3], [8], [16, 1, 2]):
        lists = [[torch.ones(n) for n in numels] for _ in range(3)]
        grads = [torch.ones(n).bfloat16() for n in numels]
        steps = [torch.tensor(1.0) for _ in numels]
        op["fused_adamw"].launch(
            lists[0], grads, *lists[1:], steps, lr=torch.tensor(0.1), **numbers
        )
    assert all("cubin" in k.asm for k in kernels)
    assert len(kernels) == 3 and len({id(k) for k in kernels}) == 1


def test_codes(kernels):
    """One kernel for each dtype of parts, whatever their number; one decodes all values, and one sums all terms."""
    parts = [torch.ones(5000), torch.ones(3), torch.ones(9).bfloat16()]
    sizes = [5000, 3, 9]
    out = torch.zeros(1, 5248 + 2 * 264, dtype=torch.uint8)[:, : 5120 + 80 + 2 * 260]
    op["encode"].launch(parts, sizes, 1, 8, 256, "int", out)
    op["decode"].launch(out, sizes, 8, 256, "int", [torch.empty(n) for n in sizes])
    outs = [torch.empty(n) for n in sizes]
    op["sum_coded"].launch([out[0], out[0]], outs, sizes, "mean", 2, 8, 256, "int")
    op["decode"].launch(out[:, :0], [0], 8, 256, "int", [torch.empty(0)])
    assert len(kernels) == 4 and all("cubin" in k.asm for k in kernels)
