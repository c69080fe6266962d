"""Launch: an equation of a Triton kernel, `out1 = triton(add_kernel[(2,)](n=24, BLOCK=16), x, y, out)`.

A kernel writes into its arguments. The equation copies those that it changes, and its results are the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def unwrapped(kernel: Any) -> Callable:
    """The function that a kernel was made of, without Triton's wrappers, which compile, interpret or tune it."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


@dataclass(frozen=True, eq=False, repr=False)
class Launch:
    """The launch of a Triton kernel, the first argument of its equation.

    Attributes:
        kernel: the kernel, compiled for a GPU, or run by Triton's interpreter.
        grid: the numbers of programs, or, for a kernel that is tuned when it first runs, a function that returns them.
        tensors: the names of the arguments that are tensors, in the order in which the equation has them.
        changed: the names of those that the kernel changes.
        numbers: the other arguments, and options such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, ...] | Callable
    tensors: tuple[str, ...]
    changed: tuple[str, ...]
    numbers: Mapping[str, Any]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={x}" for name, x in self.numbers.items())
        return f"{self.name}[{'...' if callable(self.grid) else self.grid}]({numbers})"

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return unwrapped(self.kernel).__name__

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The new values of the arguments that the kernel changes."""
        given = {n: x.clone() if n in self.changed else x for n, x in zip(self.tensors, values, strict=True)}
        self.kernel[self.grid](**given, **self.numbers)
        return [given[name] for name in self.changed]


class LaunchModule(torch.nn.Module):
    """A launch as a submodule of generated code."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.forward = launch
