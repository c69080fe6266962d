"""sum_coded(terms, outs, sizes, op, count, bits, block, kind): sum the encoded terms that have arrived, in rank order.

    terms   one row for each rank: uint8[sum of coded_bytes(size)], contiguous: what rank r encoded for this rank
    outs    contiguous, float32, bfloat16 or float16; at most `sizes` elements each
    op      sum, or mean
    count   the divisor of a mean: the number of ranks, unless a row is itself the sum of several ranks

Every term is decoded to float32 and added to the sum, which starts with the first one, so no term is decoded as a
whole. A mean is divided, and the result is rounded once: the bits of `reduce` of the decoded terms. Errors: another
reduction, other formats or dtypes, rows of another length, outs larger than their sizes. Bytes moved at least: one read
of each term and one write of the result; for 8 ranks and 8 bits, 12.1 bytes an element of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .decode import CompiledDecode, codes_and_scale, decoder, launch_sum
from .encode import RUN, check_buffer, coded_bytes, has_kernel, runs
from .kernel import FLOATS
from .operation import check_like, define
from .reduce import mean


def sum_coded(
    terms: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    op: str,
    count: int,
    bits: int,
    block: int,
    kind: str = "int",
) -> None:
    """Sum `terms` into `outs`. The docstring of this file describes the arguments.

    >>> from .encode import encode
    >>> terms = encode(torch.tensor([[127.0, 5.0], [127.0, 1.0]]), 8, 2)
    >>> total = torch.empty(2)
    >>> sum_coded(terms.unbind(), [total], [2], "mean", 2, 8, 2); total
    tensor([127.,   3.])
    """
    torch.ops.ztrans.sum_coded.default(terms, outs, sizes, op, count, bits, block, kind)


def reference(
    terms: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    op: str,
    count: int,
    bits: int,
    block: int,
    kind: str,
    compiled: CompiledDecode | None = None,
) -> None:
    """sum_coded in plain torch, a run of blocks at a time, or by what is compiled of `decode_blocks`."""
    nbytes = [coded_bytes(size, bits, block, kind) for size in sizes]
    rows = [term.view(1, -1).split(nbytes, 1) for term in terms]
    decode, add = (decoder(bits, kind, compiled, torch.float32, add) for add in (False, True))
    for out, size, *places in zip(outs, sizes, *rows, strict=True):
        for same in zip(*(runs(place, size, bits, block, RUN) for place in places)):
            total = torch.empty(same[0].codes.shape[1], block, device=out.device)
            decode(*codes_and_scale(same[0]), total)
            for run in same[1:]:
                add(*codes_and_scale(run), total)
            if op == "mean":
                total = mean(total, count)
            here = out.view(-1)[same[0].elements]
            here.copy_(total.view(-1)[: len(here)])


def launch(
    terms: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    op: str,
    count: int,
    bits: int,
    block: int,
    kind: str,
) -> None:
    """sum_coded by the kernel of `decode`: one launch."""
    if all(has_kernel(bits, block, kind, term.unsqueeze(0)) for term in terms):
        launch_sum(terms, outs, sizes, count if op == "mean" else 1, bits, block, kind)
    else:
        reference(terms, outs, sizes, op, count, bits, block, kind)


def _check(terms, outs, sizes, op, count, bits, block, kind) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"sum_coded: unknown operation {op!r}; use sum or mean.")
    if not terms or not outs or len(outs) != len(sizes):
        raise ValueError(f"sum_coded: {len(terms)} terms, {len(outs)} outs, {len(sizes)} sizes.")
    nbytes = sum(coded_bytes(size, bits, block, kind) for size in sizes)
    for term in terms:
        check_buffer("sum_coded", term.unsqueeze(0), 1, nbytes)
    if outs[0].dtype not in FLOATS:
        raise TypeError(f"sum_coded: {outs[0].dtype} is not fp32, bf16 or fp16.")
    check_like("sum_coded", "out", outs, outs[0].dtype, terms[0].device)
    for k, (out, size) in enumerate(zip(outs, sizes)):
        if out.numel() > size:
            raise ValueError(f"sum_coded: out {k} has {out.numel()} elements, room is for {size}.")


define(
    "sum_coded(Tensor[] terms, Tensor(a!)[] outs, int[] sizes, str op, int count, int bits, int block, str kind) -> ()",
    _check,
    reference,
    launch,
)
