"""kernel: a function that becomes a Triton kernel when it is first launched.

    @kernel
    def _double(x, n, BLOCK: tl.constexpr): ...        written at module level, as any Triton kernel
    _double[grid](x, n, BLOCK=1024, num_warps=4)

Triton is imported at the first launch, not before. So a machine without it can import every module, and the error
that names Triton is raised when a kernel is launched. Inside a kernel, `tl` is `triton.language`, and other kernels can
be called by name.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

# Triton casts between these dtypes as torch does. Others are moved as bits, or cast by torch.
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
tl: Any = None  # in a kernel it is `triton.language`
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


class Kernel:
    """A Triton kernel, compiled when it is first launched."""

    __name__: str

    def __init__(self, function: Callable, numbers: str = "") -> None:
        self.function, self.numbers = function, numbers.split()
        self.__name__, self.__module__, self.__doc__ = function.__name__, function.__module__, function.__doc__

    @functools.cached_property
    def jit(self) -> Any:
        """The function as Triton's own object."""
        triton = _triton(f"the kernel {self.__name__.lstrip('_')}")
        function, code = self.function, self.function.__code__
        # The kernel gets a scope of its own, with `tl` and all that it names, so that the module stays as it is.
        used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        scope = {name: value.jit if isinstance(value, Kernel) else value for name, value in used.items()}
        scope |= {"__name__": function.__module__, "tl": triton.language}
        copy = types.FunctionType(code, scope, function.__name__, function.__defaults__)
        return triton.jit(functools.update_wrapper(copy, function, updated=()), do_not_specialize=self.numbers)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        # Every product and every sum is rounded by itself, as in the reference.
        return functools.partial(self.jit[grid], enable_fp_fusion=False)


def kernel(function: Callable | None = None, *, numbers: str = "") -> Any:
    """Mark `function` as a Triton kernel, or as a part of one.

    Triton compiles no variants for special values of the arguments in `numbers`: a rank that compiles in the middle
    of a step keeps the others waiting.
    """
    return Kernel(function, numbers) if function else functools.partial(Kernel, numbers=numbers)


def element(dtype: torch.dtype, bits: bool = False) -> Any:
    """Triton's name for `dtype`, or, as `bits`, for an integer of its size."""
    language = _triton(f"a kernel on {dtype}").language
    return language.dtype(_BITS[dtype.itemsize] if bits else FLOATS[dtype])


def _triton(what: str) -> Any:
    try:
        import triton
        import triton.language
    except ImportError as missing:
        raise RuntimeError(f"{what} needs Triton, which is not installed here: pip install triton.") from missing
    return triton
