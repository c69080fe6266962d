"""Express operations with a scalar argument that is a tensor, such as `p.add_(g, alpha=-lr)` if `lr` is an input.

PyTorch would read such a scalar by `.item()`. Arithmetic on tensors does not, and on a CPU it gives the same bits as
PyTorch with a Python number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ops import HALF

# The operations with a scalar, and the number of operands before it.
_OPERANDS = {"add": 2, "sub": 2, "lerp": 2, "addcmul": 3, "addcdiv": 3}
_SCALAR_NAMES = ("alpha", "value", "scalars", "weight")


def with_tensor_scalar(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of `func(*args, **kwargs)` if the scalar argument is a tensor; otherwise NotImplemented.

    >>> x = torch.ones(2)
    >>> with_tensor_scalar(torch.Tensor.add_, (x, torch.ones(2)), {"alpha": torch.tensor(3.0)})
    tensor([4., 4.])
    """
    name = getattr(func, "__name__", "")
    operation = name.removeprefix("_foreach_").rstrip("_")
    count = _OPERANDS.get(operation)
    if count is None or len(args) < count or "out" in kwargs:
        return NotImplemented
    in_place = name.endswith("_")
    scalar = _scalar_argument(args[count:], kwargs)
    # `_foreach_add(tensors, tensor)` reads its tensor as a number.
    if name.startswith("_foreach_add") and scalar is None and isinstance(args[1], torch.Tensor):
        add = torch.Tensor.add_ if in_place else torch.Tensor.add
        return [add(x, args[1]) for x in args[0]]
    if not isinstance(scalar, torch.Tensor):
        return NotImplemented
    operands = args[:count]
    if name.startswith("_foreach_"):
        return _over_lists(operation, operands, scalar, in_place)
    return NotImplemented if scalar.ndim else _result(operation, operands, scalar, in_place)


def _over_lists(operation: str, operands: tuple, scalar: torch.Tensor, in_place: bool) -> Any:
    """The results of an operation over lists. `scalar` has one dim if each member of a list has its own scalar."""
    if any(isinstance(x, torch.Tensor) for x in operands):
        return NotImplemented
    results = []
    for k, members in enumerate(zip(*operands)):
        member_scalar = scalar[k] if scalar.ndim else scalar
        results.append(_result(operation, members, member_scalar, in_place))
    return results


def _scalar_argument(rest: tuple, kwargs: dict) -> Any:
    """The scalar of an operation, passed by position after the operands or by name; None if there is none."""
    if rest:
        return rest[0]
    for name in _SCALAR_NAMES:
        if name in kwargs:
            return kwargs[name]
    return None


def _result(operation: str, operands: tuple, scalar: torch.Tensor, in_place: bool) -> torch.Tensor:
    """The result for one tensor."""
    x, y = operands[:2]
    dtype = torch.result_type(x, y) if isinstance(y, torch.Tensor) else x.dtype
    # In half precision PyTorch computes in fp32, and keeps the scalar in fp32. Only `add` and `sub` on a CPU round it.
    rounds_scalar = x.device.type == "cpu" and operation in ("add", "sub")
    in_fp32 = dtype in HALF and not rounds_scalar
    compute_dtype = torch.float32 if in_fp32 else dtype
    rest = pytree.tree_map_only(
        torch.Tensor, lambda v: v.to(compute_dtype), (*operands[1:], scalar)
    )
    result = _scaled(operation, x.float() if in_fp32 else x, *rest).to(dtype)
    return x.copy_(result) if in_place else result


def _scaled(operation: str, x: torch.Tensor, y: Any, *rest: Any) -> torch.Tensor:
    """`x + scalar * y`, `x + scalar * y * z`, `x + scalar * y / z` or a lerp, with PyTorch's order of operations."""
    *z, scalar = rest
    if operation == "sub":
        scalar = -scalar
    if operation == "lerp":
        return torch.lerp(x, y, scalar)
    if operation == "addcdiv":
        return x + y * scalar / z[0]
    if operation == "addcmul":
        return torch.addcmul(x, y * scalar, z[0])
    # `addcmul` rounds once, as `add` with a number for its alpha does.
    if isinstance(y, torch.Tensor):
        return torch.addcmul(x, y, scalar)
    return x + y * scalar
