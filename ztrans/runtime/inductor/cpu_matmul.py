"""Cpu matmul: which library multiplies two matrices on a CPU, found by trying both.

PyTorch gives products of fp32 matrices to MKL, which is behind oneDNN by a tenth on processors that are
not Intel's, and ahead where a transposed matrix must first be copied.

A private operation of torch, `mkldnn._linear_pointwise`, lives here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .fake_layouts import Strided

aten = torch.ops.aten
GAIN = 0.97  # of the time: what must be won for another library's rounding
_ROUNDS = 5


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`aten.mm` by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`aten.addmm` of a row, by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


_OTHERS = {aten.mm.default: mm, aten.addmm.default: addmm}


def other(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable | None:
    """What computes `op` in less time than it does itself, of arguments that lie so, if anything does."""
    if op not in _OTHERS or kwargs or not _can(args):
        return None
    lies = tuple((x.shape, x.stride) for x in args)
    return _OTHERS[op] if _share(op, lies, torch.get_num_threads()) < GAIN else None


def _can(args: Sequence[Any]) -> bool:
    if not all(isinstance(x, Strided) for x in args):
        return False
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" and 0 not in x.shape for x in args)
    return plain and [len(x.shape) for x in args] in ([2, 2], [1, 2, 2]) and torch.backends.mkldnn.is_available()


@functools.cache
def _share(op: Callable, lies: tuple, threads: int) -> float:
    """The time of the other one, as a share of that of `op`."""
    with torch.no_grad():
        args = [torch.empty_strided(shape, stride).fill_(0.5) for shape, stride in lies]
        return share(lambda: _OTHERS[op](*args), lambda: op(*args))


def share(other: Callable[[], object], call: Callable[[], object]) -> float:
    """The time of `other`, as a share of that of `call`; the best of a few rounds each."""
    best: dict[Callable, float] = {}
    for _ in range(_ROUNDS):
        for each in (call, other):
            start = time.perf_counter()
            each()
            best[each] = min(best.get(each, float("inf")), time.perf_counter() - start)
    return best[other] / best[call]
