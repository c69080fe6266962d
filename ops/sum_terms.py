"""sum_terms(terms, outs, sizes, op, count): sum the terms that this rank has received, in rank order.

    terms   float32, bfloat16 or float16 [ranks, sum(sizes)], contiguous: row r is what rank r sent for this rank, its
            terms one after another
    outs    contiguous, float32 or a dtype of 16 bits; at most `sizes` elements each
    op      sum, or mean
    count   the divisor of a mean: the number of ranks, unless a row is itself the sum of several ranks

Terms of any dtype are summed in float32, starting with the first one. A mean is divided, and the result is rounded
once, so its bits equal those of `reduce`. Errors: mixed or unknown dtypes, outs larger than their sizes. Bytes moved at
least: one read of each term and one write of the result; for 8 ranks, bfloat16 to float32 is 20 bytes per element. One
launch of the kernel of reduce_scatter, without its barriers, fills all outs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernel import element
from .operation import check_like, define
from .reduce import reduce
from .reduce_scatter import BLOCK, check_sum, pieces_of, sum_rows
from .tables import addresses


def sum_terms(
    terms: torch.Tensor, outs: Sequence[torch.Tensor], sizes: Sequence[int], op: str, count: int
) -> None:
    """Sum `terms` into `outs`. The docstring of this file describes the arguments.

    >>> total = torch.empty(2)
    >>> sum_terms(torch.tensor([[1.0, 5.0], [3.0, 1.0]]), [total], [2], "mean", 2); total
    tensor([2., 3.])
    """
    torch.ops.ztrans.sum_terms.default(terms, outs, sizes, op, count)


def reference(
    terms: torch.Tensor, outs: Sequence[torch.Tensor], sizes: Sequence[int], op: str, count: int
) -> None:
    """sum_terms in plain torch, term by term."""
    for out, parts in zip(outs, terms.split(list(sizes), dim=1), strict=True):
        rows = [part[: out.numel()] for part in parts]
        out.view(-1).copy_(reduce(rows, op, out.dtype, count=count))


def launch(
    terms: torch.Tensor, outs: Sequence[torch.Tensor], sizes: Sequence[int], op: str, count: int
) -> None:
    """sum_terms by the kernel, with a program for each block of an out."""
    device = terms.device
    pieces = pieces_of(tuple(sizes), tuple(out.numel() for out in outs), 1, device)
    if not len(pieces):
        return
    rows = terms.unbind()
    buffers = addresses(rows, device)
    aligned = all(row.data_ptr() % 16 == 0 for row in rows)
    divisor = count if op == "mean" else 1
    with torch.cuda.device_of(terms):
        # Without barriers the kernel reads no pads, no error and no spins. Each row is a buffer for this rank alone.
        sum_rows[(len(pieces), 1)](
            buffers, buffers, buffers, pieces, len(pieces), addresses(outs, device), len(outs), 0, 0, 0,
            TERM=element(terms.dtype), OUT=element(outs[0].dtype), DIVISOR=divisor,
            WORLD=len(rows), ALIGNED=aligned, SYNC=False, BLOCK=BLOCK, num_warps=8, maxnreg=128,
        )  # fmt: skip


def _check(terms, outs, sizes, op, count) -> None:
    if not outs or len(outs) != len(sizes):
        raise ValueError(f"sum_terms: {len(outs)} outs, {len(sizes)} sizes.")
    if terms.ndim != 2 or terms.shape[1] != sum(sizes) or not terms.is_contiguous():
        raise ValueError(
            f"sum_terms: the terms must be contiguous rows of {sum(sizes)} elements, not {tuple(terms.shape)}."
        )
    check_like("sum_terms", "out", outs, outs[0].dtype, terms.device)
    check_sum("sum_terms", "out", outs, sizes, op, terms.dtype)


define(
    "sum_terms(Tensor terms, Tensor(a!)[] outs, int[] sizes, str op, int count) -> ()",
    _check,
    reference,
    launch,
)
