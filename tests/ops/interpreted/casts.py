"""The interpreter's casts and `fma` made exact: its own cut bits off, and round a product before they add to it."""

from __future__ import annotations

import importlib

import numpy as np
import torch

_FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def exact_casts() -> None:
    """Have the interpreter round as GPUs do."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    cut_off = interpreter._convert_float

    def cast(values: np.ndarray, src, dst, mode):
        if src.name not in _FLOATS or dst.name not in _FLOATS:
            return cut_off(values, src, dst, mode)
        a, b = _FLOATS[src.name], _FLOATS[dst.name]
        raw = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=f"u{a.itemsize}").copy()
        rounded = (
            torch.from_numpy(raw.view(f"i{a.itemsize}"))
            .view(a)
            .to(b)
            .view(_INTEGERS[b.itemsize])
            .numpy()
        )
        return rounded.view(f"u{b.itemsize}").reshape(values.shape)

    interpreter._convert_float = cast


def exact_fma() -> None:
    """Have the interpreter round x * y + z of fp32 once, as GPUs do."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    fused_adamw = importlib.import_module("ztrans.ops.fused_adamw")

    def fma(self, x, y, z):
        arrays = (torch.from_numpy(np.asarray(each.data).copy()) for each in (x, y, z))
        return interpreter.TensorHandle(fused_adamw.fma(*arrays).numpy(), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
