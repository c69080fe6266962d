"""The kernel of sum_terms has the bits of `reduce`, for all bit patterns."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.interpreted.patterns import bits, room, same
from tests.support.cover import parameters_of

reduce = importlib.import_module("ztrans.ops.reduce").reduce
sum_terms = importlib.import_module("ztrans.ops.sum_terms")

# The elements of each member for this rank, and the room for them in a row: a block and a bit, less than a block,
# nothing, several blocks, and a member of which the last rank has only a part.
SIZES = (2049, 3, 0, 6144, 130)
NUMELS = (2049, 3, 0, 6144, 17)
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("ranks", "op"),
    parameters_of(
        [(ranks, op) for ranks in (1, 2, 3, 8) for op in ("sum", "mean")],
        [(1, "mean"), (2, "sum"), (3, "mean"), (8, "sum")],
    ),
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("out", [*HALF, torch.float32], ids=str)
def test_the_bits_are_those_of_reduce(ranks, dtype, out, op):
    """NaN, infinities and subnormal numbers are among the terms, and what is behind a member stays as it was."""
    terms = bits(ranks * sum(SIZES), dtype, seed=ranks).view(ranks, -1)
    check(terms, SIZES, NUMELS, out, op, ranks)


@pytest.mark.parametrize(
    "padding", [0, 1, 8], ids="a row ends {} elements behind the last block".format
)
def test_rows_that_start_anywhere(padding, skew):
    """Rows are read 16 bytes at a time only if all of them start at multiples of 16 bytes."""
    sizes = (4096, 4096 + padding)
    terms = bits(4 * sum(sizes), torch.bfloat16, skew=skew).view(4, -1)
    check(terms, sizes, sizes, torch.float32, "sum", 4)


def test_a_mean_may_have_another_divisor_than_the_number_of_rows():
    """Between hosts, a row is the sum of the ranks of a host. A divisor of 6 is divided by, one of 8 multiplied with."""
    for count in (6, 8):
        terms = bits(2 * 5000, torch.float32, seed=count).view(2, -1)
        check(terms, (5000,), (5000,), torch.float32, "mean", count)


def test_subnormal_sums_keep_their_bits():
    tiny = torch.tensor([1e-40, -3e-41, 9e-41]).repeat(1000)
    terms = torch.stack([tiny, tiny, -tiny.roll(1), tiny])
    check(terms, (3000,), (3000,), torch.float32, "mean", 4)


def check(terms, sizes, numels, dtype, op, count) -> None:
    behind = 5
    memory = [room(n + behind, dtype) for n in numels]
    outs = [x[:n] for x, n in zip(memory, numels)]
    sum_terms.launch(terms, outs, sizes, op, count)
    parts = terms.split(list(sizes), dim=1)
    for x, out, part, n in zip(memory, outs, parts, numels):
        true = reduce([row[:n] for row in part], op, dtype, count=count)
        assert same(out, true)
        assert same(x[n:], room(behind, dtype))
