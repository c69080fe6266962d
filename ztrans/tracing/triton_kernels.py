"""Triton kernels that a step launches: each launch is one equation, with a GPU or without one.

    add_kernel[grid](x, y, out, n, BLOCK=16)    -->    out1 = triton(add_kernel[(2,)](n=24, BLOCK=16), x, y, out)

While a step is traced, a launch runs nothing. The source of a kernel tells which arguments it changes (see
`kernel_writes`). Kernels of an operator of `torch.library` (`triton_op`, `custom_op`) are a part of this operator.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14, with triton 3.6 to 3.8.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._library.triton import set_wrap_triton_enabled

from ..calling.global_state import patched
from ..ir.launch import Launch, chooses, unwrapped
from .errors import writes_nothing
from .functionalize import Builder
from .kernel_writes import changed_arguments


@contextlib.contextmanager
def record_launches() -> Iterator[None]:
    """Record launches of Triton kernels instead of running them, whether `wrap_triton` has wrapped a kernel or not."""
    if "triton" not in sys.modules:  # then no kernel exists
        yield
        return
    from triton.runtime.jit import KernelInterface

    with patched(KernelInterface, __getitem__=_recorded_launch), set_wrap_triton_enabled(False):
        yield


def _recorded_launch(kernel: Any, grid: Any) -> Callable:
    def launch(*args: Any, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args)) | options
        size = grid(arguments) if callable(grid) and not chooses(kernel) else grid
        numbers = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
        launched = {"grid": (size,) if isinstance(size, int) else size, "numbers": numbers}
        torch.ops.higher_order.triton_kernel_wrapper_mutation(
            kernel_idx=kernel_side_table.add_kernel(kernel),
            constant_args_idx=kernel_side_table.add_constant_args(launched),
            grid=[],
            tma_descriptor_metadata={},
            kwargs={name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)},
        )

    return launch


def import_launch(builder: Builder, recorded: Mapping[str, Any]) -> None:
    """Import a recorded launch as an equation, and write its results to the arguments that the kernel changes.

    Raises: ValueError if its source writes into none of them.
    """
    kernel: Any = kernel_side_table.get_kernel(recorded["kernel_idx"])
    launched, tensors = (
        kernel_side_table.get_constant_args(recorded["constant_args_idx"]),
        recorded["kwargs"],
    )
    changed_names = changed_arguments(unwrapped(kernel))
    launch = Launch(
        kernel,
        launched["grid"],
        tuple(tensors),
        tuple(n for n in tensors if n in changed_names),
        launched["numbers"],
    )
    if not launch.changed:
        raise writes_nothing(launch.name, builder.source)
    values = {name: builder.read(x) for name, x in tensors.items()}
    like = [builder.meta(values[name]) for name in launch.changed]
    op = torch.ops.higher_order.triton_kernel_wrapper_functional
    for name, value in zip(
        launch.changed, builder.emit(op, (launch, *values.values()), like=like, name="triton")
    ):
        builder.write(tensors[name], value)
