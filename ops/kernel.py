"""A decorator that makes a function a Triton kernel when it is first launched.

    @kernel
    def _double(x, n, BLOCK: tl.constexpr): ...        defined at module level, as any Triton kernel
    _double[grid](x, n, BLOCK=1024, num_warps=4)

Triton is imported at the first launch. So every module can be imported without Triton, and only a launch raises an
error if Triton is missing. Inside a kernel, `tl` is `triton.language`, and other kernels can be called by name.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

# Triton casts between these dtypes as torch does. Other dtypes are moved as bits, or cast by torch.
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
tl: Any = None  # in a kernel it is `triton.language`
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


class Kernel:
    """A Triton kernel, compiled when it is first launched."""

    __name__: str

    def __init__(self, function: Callable, unspecialized: str = "") -> None:
        self.function = function
        self.unspecialized = unspecialized.split()
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    @functools.cached_property
    def jit(self) -> Any:
        """The function as Triton's own object."""
        triton = _triton(f"the kernel {self.__name__.lstrip('_')}")
        function = self.function
        code = function.__code__
        # The kernel gets globals of its own, with `tl` and the names that it uses. The module's globals do not change.
        scope: dict[str, Any] = {}
        for name in code.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                scope[name] = value.jit if isinstance(value, Kernel) else value
        scope.update(__name__=function.__module__, tl=triton.language)
        copy = types.FunctionType(code, scope, function.__name__, function.__defaults__)
        functools.update_wrapper(copy, function, updated=())
        return triton.jit(copy, do_not_specialize=self.unspecialized)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        # Without fused multiply-add, every product and every sum is rounded separately, as in the reference.
        return functools.partial(self.jit[grid], enable_fp_fusion=False)


def kernel(function: Callable | None = None, *, unspecialized: str = "") -> Any:
    """Mark `function` as a Triton kernel, or as a part of one.

    Triton compiles no variants for special values of the `unspecialized` arguments. If one rank had to compile a
    variant in the middle of a step, the other ranks would wait for it.
    """
    if function is None:
        return functools.partial(Kernel, unspecialized=unspecialized)
    return Kernel(function, unspecialized)


def element(dtype: torch.dtype, bits: bool = False) -> Any:
    """Triton's type for `dtype`. With `bits`, it is the integer type of the same size."""
    language = _triton(f"a kernel on {dtype}").language
    return language.dtype(_BITS[dtype.itemsize] if bits else FLOATS[dtype])


def _triton(subject: str) -> Any:
    try:
        import triton
        import triton.language
    except ImportError as missing:
        raise RuntimeError(
            f"{subject} needs Triton, which is not installed here: pip install triton."
        ) from missing
    return triton
