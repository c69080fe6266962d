"""PyTorch's global state around a call.

A step is traced under the caller's autocast, default dtype and default device, and its program is valid for these
only. The program contains every cast that autocast inserted, and runs without autocast. Other modes of PyTorch, such as
`torch.no_grad()` or the attention kernel of `sdpa_kernel`, are fixed when a step is traced. No program may be called
inside torch.compile or a transform of torch.func.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree


@functools.cache
def _devices() -> tuple[str, ...]:
    """The types of devices of this machine. Each has its own autocast."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def ambient() -> dict[str, Any]:
    """The settings of PyTorch on which a trace depends, by name."""
    settings: dict[str, Any] = {}
    for device in _devices():
        is_on = torch.is_autocast_enabled(device)
        settings[f"autocast on {device}"] = torch.get_autocast_dtype(device) if is_on else "off"
    settings["the default dtype"] = torch.get_default_dtype()
    settings["the default device"] = torch.get_default_device()
    return settings


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off inside the context: a program already contains the casts of the caller's autocast."""
    with contextlib.ExitStack() as contexts:
        for device in _devices():
            if torch.is_autocast_enabled(device):
                contexts.enter_context(torch.autocast(device, enabled=False))
        yield


def without_function_modes() -> contextlib.AbstractContextManager:
    """Hide calls of PyTorch's functions from the caller's modes, which would see them and slow them down."""
    return torch._C.DisableTorchFunction()


def refuse_under_compile(name: str) -> None:
    """Refuse to run the program `name` under torch.compile, which would trace the code that finds the program.

    Raises: TypeError under torch.compile.
    """
    # The first is true if Dynamo traces this frame. If it runs the frame without tracing, its callback is still set.
    if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() not in (None, False):
        raise TypeError(
            f"{name}: called under torch.compile. A step makes its own programs, and compiles them with "
            f"backend='inductor'.\n"
            f"Call it outside of torch.compile, or pass torch.compiler.disable(step) to the compiled function. The "
            f"model and the loss inside of a step may be compiled."
        )


def refuse_inside(name: str, arguments: Any) -> None:
    """Refuse to run the program `name` inside a transform of PyTorch, which cannot see into a program.

    Raises: TypeError inside a transform of torch.func, forward-mode differentiation, or another trace.
    """
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.peek_interpreter_stack().key().name.lower()
        raise TypeError(
            f"{name}: called inside torch.func.{kind}. A step runs as a program, which torch.func cannot see into.\n"
            f"Apply torch.func.{kind} inside the step, or to the function of the step."
        )
    if forward_ad._current_level >= 0 and _has_tangent(arguments):
        raise TypeError(
            f"{name}: called with a dual tensor of forward-mode differentiation. A program computes no tangents.\n"
            f"Use torch.func.jvp inside the step, or on the function of the step."
        )
    if get_proxy_mode() is not None:
        raise TypeError(
            f"{name}: called while another step is traced.\n"
            f"Call the function of this step instead, and apply its transforms to the outer step."
        )


def refuse_anomaly_mode(name: str) -> None:
    """Refuse to run the program `name` under PyTorch's anomaly detection, which would find nothing.

    Raises: RuntimeError inside torch.autograd.detect_anomaly.
    """
    if torch.is_anomaly_enabled():
        raise RuntimeError(
            f"{name}: called under torch.autograd.detect_anomaly, which watches autograd, and a program runs without "
            f"autograd.\n"
            f"To find the first NaN, print({name}.check_finite(state, *batch)): it names the equation, its line and "
            f"its operands, in forward and in the update too. Or run the function of the step, where detect_anomaly "
            f"works: with zt.eager(): ..."
        )


def _has_tangent(arguments: Any) -> bool:
    """Whether a tensor among the arguments is a dual tensor of forward-mode differentiation."""
    for x in pytree.tree_leaves(arguments):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            return True
    return False
