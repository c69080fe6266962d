"""By value: fused optimizers whose hyperparameters are inputs of the program.

A fused kernel takes a learning rate as a tensor, and all other numbers by value: PyTorch reads such a tensor when it
calls the kernel. In a trace there is no value to read. So the call is recorded with other values, and the tensors are
then written into its record.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_ANY_VALUE = 0.5
_AS_TENSORS = ("lr", "grad_scale", "found_inf")


def by_value(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a fused optimizer. Its keyword arguments may be tensors where it takes numbers by value."""
    tensors = {
        k: x for k, x in kwargs.items() if isinstance(x, torch.Tensor) and k not in _AS_TENSORS
    }
    mode: Any = get_proxy_mode()  # a `Watch`
    if mode is None or not tensors:
        return func(*args, **kwargs)
    result = func(*args, **{**kwargs, **dict.fromkeys(tensors, _ANY_VALUE)})
    mode.set_arguments("_fused_", tensors)
    return result
