"""Products on a CPU: time both libraries that can multiply two matrices, and use the faster one.

PyTorch computes products of fp32 matrices with MKL. On processors that are not from Intel, MKL takes a tenth more time
than oneDNN, but less time than oneDNN if that must first copy a transposed matrix.

A private operation of torch, `mkldnn._linear_pointwise`, lives here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .fake_layouts import Strided

aten = torch.ops.aten
GAIN = (
    0.97  # oneDNN, which rounds differently, is used if it takes less than this share of the time
)
_ROUNDS = 5


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`aten.mm` by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`aten.addmm` of a row, by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


_BY_ONEDNN: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mm.default: mm,
    aten.addmm.default: addmm,
}


def alternative(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable | None:
    """The function that computes `op` by oneDNN, if it is faster on tensors of these layouts, or None."""
    if op not in _BY_ONEDNN or kwargs or not _applies(args):
        return None
    layouts = tuple((x.shape, x.stride) for x in args)
    return _BY_ONEDNN[op] if _time_share(op, layouts, torch.get_num_threads()) < GAIN else None


def _applies(args: Sequence[Any]) -> bool:
    if not all(isinstance(x, Strided) for x in args):
        return False
    plain = all(
        x.dtype == torch.float32 and x.device.type == "cpu" and 0 not in x.shape for x in args
    )
    if not plain or [len(x.shape) for x in args] not in ([2, 2], [1, 2, 2]):
        return False
    # oneDNN reads a bias as dense, and in full.
    is_dense = all(bias.shape == (args[-1].shape[1],) and bias.stride == (1,) for bias in args[:-2])
    return is_dense and torch.backends.mkldnn.is_available()


@functools.cache
def _time_share(op: Callable, layouts: tuple, threads: int) -> float:
    """The time of oneDNN as a share of that of `op`. Both are the best of a few rounds, in turns.

    `threads` is an argument because the time depends on it.
    """
    by_onednn, best = _BY_ONEDNN[op], {op: math.inf, _BY_ONEDNN[op]: math.inf}
    with torch.no_grad():
        args = [torch.empty_strided(shape, stride).fill_(0.5) for shape, stride in layouts]
        for _ in range(_ROUNDS):
            for each in best:
                start = time.perf_counter()
                each(*args)
                best[each] = min(best[each], time.perf_counter() - start)
    return best[by_onednn] / best[op]
