"""The launch of a Triton kernel by an equation, such as `out1 = triton(add_kernel[(2,)](n=24, BLOCK=16), x, y, out)`.

A kernel writes into its arguments. The equation first copies the arguments that the kernel changes, and its results are
these copies. The wrappers of a kernel, `triton.autotune` and `triton.heuristics`, choose some of its arguments when it
runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch


def unwrapped(kernel: Any) -> FunctionType:
    """The Python function of a kernel, without Triton's wrappers, which compile, interpret or tune it."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def has_tuning_wrappers(kernel: Any) -> bool:
    """Whether wrappers choose arguments of a kernel when it runs. Its grid may depend on their choice."""
    return hasattr(getattr(kernel, "fn", None), "fn")


@dataclass(frozen=True, eq=False, repr=False)
class Launch:
    """The launch of a Triton kernel, the first argument of its equation.

    Attributes:
        kernel: the kernel, compiled for a GPU, or run by Triton's interpreter.
        grid: the numbers of programs, or a function that returns them if wrappers choose arguments of the kernel.
        tensors: the names of the tensors among the arguments, in the order of the equation.
        changed: the names of the tensors that the kernel changes.
        numbers: the other arguments, and options such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, ...] | Callable
    tensors: tuple[str, ...]
    changed: tuple[str, ...]
    numbers: Mapping[str, Any]

    def __repr__(self) -> str:
        grid = "..." if callable(self.grid) else self.grid
        numbers = ", ".join(f"{name}={x}" for name, x in self.numbers.items())
        return f"{self.name}[{grid}]({numbers})"

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return unwrapped(self.kernel).__name__

    @property
    def __name__(self) -> str:
        """The name of the function in the code that calls it."""
        return self.name

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The new values of the arguments that the kernel changes.

        Raises: RuntimeError if the tensors are on CPUs, and the kernel was compiled for a GPU.
        """
        tensors = dict(zip(self.tensors, values, strict=True))
        for name in self.changed:
            tensors[name] = tensors[name].clone()
        on_cpus = all(x.is_cpu for x in values)
        kernel = _interpreted(self.kernel) if on_cpus else self.kernel

        # Functions that prune the configurations of a kernel get a dict of the positional arguments, by name.
        options = {**tensors, **self.numbers}
        names = list(takewhile(lambda name: name in options, kernel.arg_names))
        positional = [options.pop(name) for name in names]
        kernel[self.grid](*positional, **options)
        return [tensors[name] for name in self.changed]


def _interpreted(kernel: Any) -> Any:
    """A kernel for Triton's interpreter, with the first configuration that is not pruned. No configuration is timed.

    Raises: RuntimeError if it was compiled for a GPU.
    """
    if has_tuning_wrappers(kernel):
        untimed = copy.copy(kernel)
        untimed.fn = _interpreted(kernel.fn)
        untimed.cache = {}
        untimed.cache_results = False
        untimed.do_bench = lambda run, quantiles: [0.0] * len(quantiles)
        return untimed
    if type(kernel).__name__ != "InterpretedFunction":
        code = kernel.fn.__code__
        raise RuntimeError(
            f"triton: kernel {code.co_name} was compiled for a GPU, and its tensors are on CPUs.\n"
            f"  at {code.co_filename}:{code.co_firstlineno} in {code.co_name}\n"
            f"Run the step on a GPU, or set TRITON_INTERPRET=1 before Triton is imported."
        )
    return kernel
