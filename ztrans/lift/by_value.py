"""By value: fused optimizers whose hyperparameters are inputs of the program.

A fused kernel takes a learning rate as a tensor, and all other numbers by value: PyTorch reads such a tensor when it
calls the kernel. In a trace there is no value to read. So the call is traced with other values, and the tensors are
then written into its node. An FX graph with such a node can be read and imported, and does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

_ANY_VALUE = 0.5
_AS_TENSORS = ("lr", "grad_scale", "found_inf")


def by_value(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a fused optimizer. Its keyword arguments may be tensors where it takes numbers by value."""
    tensors = {}
    for key, x in kwargs.items():
        if isinstance(x, torch.Tensor) and key not in _AS_TENSORS:
            tensors[key] = x
    mode = get_proxy_mode()
    if mode is None or not tensors:
        return func(*args, **kwargs)
    result = func(*args, **{**kwargs, **dict.fromkeys(tensors, _ANY_VALUE)})
    node = next(n for n in reversed(mode.tracer.graph.nodes) if "_fused_" in str(n.target))
    read = {name: get_proxy_slot(x, mode.tracer).proxy.node for name, x in tensors.items()}
    node.kwargs = {**node.kwargs, **read}
    return result
