"""The reference results: the plain step on the whole batch, or data parallelism by hand where each rank rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .gradients import gradient
from .options import Options
from .programs import Program
from .steps import step_of

STEPS = 3
_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def doubles(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Inside, the default dtype is fp64, or another one, and torch uses one thread."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


def true_steps(program: Program, options: Options) -> tuple[Any, list[Any]]:
    """The state after `STEPS` steps, and the output of each step."""
    by_hand = program.rounds or options.reduce_dtype is not None
    step = step_of(program, averaging(options) if by_hand else gradient)
    state, outputs = program.state(), []
    for k in range(STEPS):
        state, output = step(
            state, *(in_micro_batches(x, program, options) for x in program.batch(options.world, k))
        )
        outputs.append(pytree.tree_map(torch.as_tensor, output))
    return state, outputs


def averaging(options: Options):
    """Data parallelism by hand: the gradient of each rank's samples, then the mean over the ranks."""

    def averaged(program: Program, trained, fixed, x, ids):
        shares = zip(x.chunk(options.world), ids.chunk(options.world))
        by_rank = [gradient(program, trained, fixed, *share) for share in shares]
        grads = {}
        for k, p in trained.items():
            terms = [g[k] for g, _ in by_rank]
            grads[k] = _mean(terms, options.reduce_dtype, options.keeps_whole(f"params.{k}", p))
        return grads, torch.stack([value for _, value in by_rank]).mean()

    return averaged


def in_micro_batches(x: torch.Tensor, program: Program, options: Options) -> torch.Tensor:
    """The samples in the order in which they are used: micro-batch by micro-batch, and within each, rank by rank."""
    return x.unflatten(0, (options.world, program.micro, -1)).transpose(0, 1).flatten(0, 2)


def _mean(terms: list[torch.Tensor], wire: torch.dtype | None, is_whole: bool) -> torch.Tensor:
    """The mean of `terms` after they are cast to the dtype of the wire, summed in rank order, in fp32 at least.

    An all_reduce, for a leaf that every rank has whole, rounds the mean to the dtype of the wire too.
    """
    result = terms[0].dtype
    if wire is not None and result.is_floating_point:
        terms = [t.to(wire) for t in terms]
    total = terms[0].float() if terms[0].dtype in _HALF else terms[0]
    for term in terms[1:]:
        total = total + term
    mean = total / len(terms)
    if wire is not None and is_whole and result.is_floating_point:
        mean = mean.to(wire)
    return mean.to(result)


def distance(a: Any, b: Any) -> float:
    """The largest relative distance of two leaves. For a leaf with a norm below 1e-3 the distance is relative to 1e-3."""
    worst = 0.0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        x, y = _doubles(x), _doubles(y)
        if x.shape != y.shape or not (x.isfinite() == y.isfinite()).all():
            return float("inf")
        if x.numel():
            worst = max(worst, ((x - y).norm() / max(y.norm().item(), 1e-3)).item())
    return worst


def _doubles(x: Any) -> torch.Tensor:
    x = torch.as_tensor(x).detach()
    return torch.view_as_real(x) if x.is_complex() else x.to(torch.float64)


def finite(tree: Any) -> bool:
    """Whether all numbers are finite, so that they can be compared. Leaves that hold bits are left out."""
    return all(
        bool(_doubles(x).isfinite().all()) for x in pytree.tree_leaves(tree) if not _is_bits(x)
    )


def _is_bits(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.uint8, torch.int64)
