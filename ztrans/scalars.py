"""Scalars that are tensors: `p.add_(g, alpha=-lr)` and `p.addcdiv_(m, v, value=-step)` with tensors.

PyTorch reads such a scalar with `.item()`, which would bake the value of lr or step into the
program. Written as arithmetic on tensors it stays an input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def with_tensor_scalar(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What `func(*args, **kwargs)` computes, when a scalar of it is a tensor; else NotImplemented.

    >>> x = torch.ones(2)
    >>> with_tensor_scalar(torch.Tensor.add_, (x, torch.ones(2)), {"alpha": torch.tensor(3.0)})
    tensor([4., 4.])
    """
    name = getattr(func, "__name__", "")
    plain = name.removeprefix("_foreach_").rstrip("_")
    if plain not in ("add", "sub", "addcmul", "addcdiv") or "out" in kwargs:
        return NotImplemented
    count = 3 if plain.startswith("addc") else 2
    key = "value" if count == 3 else "alpha"
    rest = [args[count]] if len(args) > count else [v for k, v in kwargs.items() if k in (key, "scalars")]
    over_list = name.startswith("_foreach_")
    if over_list and count == 2 and not rest and isinstance(args[-1], torch.Tensor):
        rest = [None]  # _foreach_add_(xs, step): the number that is added is a tensor
    elif not rest or not isinstance(rest[0], torch.Tensor) or len(args) < count:
        return NotImplemented
    scalar, in_place, operands = rest[0], name.endswith("_"), args[:count]
    if not over_list:
        return _one(plain, operands, scalar, in_place)
    columns = [a if isinstance(a, (list, tuple)) else [a] * len(operands[0]) for a in operands]
    each = scalar.unbind() if scalar is not None and scalar.ndim else [scalar] * len(operands[0])
    made = [_one(plain, row, s, in_place) for row, s in zip(zip(*columns), each)]
    return made


def _one(plain: str, operands: tuple, scalar: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    x, *rest = operands
    # As the operation does, before it scales; a number takes the dtype of what it meets.
    rest = [y.to(torch.result_type(x, y)) if isinstance(y, torch.Tensor) else y for y in rest]
    change = {"addcmul": torch.mul, "addcdiv": torch.div}.get(plain, lambda y: y)(*rest)
    change = change if scalar is None else change * scalar
    change = -change if plain == "sub" else change
    return x.add_(change) if in_place else x + change
