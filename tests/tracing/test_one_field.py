"""Two calls that differ in one literal, one keyword or in strides are two values, in the program as in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ztrans as zt
from tests.ir.test_op_facts import LINES, operation
from ztrans.ir.op_facts import op_facts

# Values for arguments of each type, of which one is the default or the first choice, and the others differ from it.
_VALUES: dict[str, tuple] = {
    "number": (2, 3, 0.5, 1),
    "Scalar": (2, 3, 0.5, 1),
    "float": (2.0, 0.5),
    "int": (0, 1),
    "SymInt": (0, 1),
    "bool": (False, True),
    "str": ("none", "tanh"),
    "Optional[str]": (None, "trunc", "floor", "tanh"),
    "Optional[number]": (None, 0.75, 1.5),
    "Optional[float]": (None, 0.75),
    "Optional[ScalarType]": (None, torch.float64, torch.float16),
    "List[int]": ([0], [1]),
    "Optional[List[int]]": (None, [0], [1]),
}
# Results of these differ from call to call, or are no values.
_SKIPPED = ("empty", "c10d", "higher_order", "same", "_linalg_check", "fused")

Call = tuple[Any, tuple, dict]


def tensor_kinds() -> dict[str, tuple[int, ...]]:
    return {"scalars": (), "matrices": (4, 4)}


@functools.cache
def operations() -> tuple[Any, ...]:
    names = [line.split(":")[0] for line in LINES]
    known = [operation(name) for name in names if not any(word in name for word in _SKIPPED)]
    return tuple(op for op in known if not op_facts(op).random)


def calls(op: Any) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """A call with the first value for each argument, and calls that differ from it in one argument.

    Tensors are given by their number.
    """
    base: list[Any] = []
    keywords: dict[str, Any] = {}
    choices: list[tuple[int | str, tuple]] = []
    tensors = 0
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            base.append(("tensor", tensors))
            tensors += 1
            continue
        values = _VALUES.get(kind, ())
        if argument.has_default_value():
            values = (argument.default_value, *(v for v in values if v != argument.default_value))
        if not values:
            raise LookupError(kind)
        if argument.kwarg_only:
            keywords[argument.name] = values[0]
            choices.append((argument.name, values[1:]))
        else:
            choices.append((len(base), values[1:]))
            base.append(values[0])
    yield op, tuple(base), keywords
    for where, values in choices:
        for value in values:
            if isinstance(where, str):
                yield op, tuple(base), {**keywords, where: value}
            else:
                yield op, (*base[:where], value, *base[where + 1 :]), keywords


def run(call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    op, args, kwargs = call
    filled = [tensors[a[1]] if type(a) is tuple and a[0] == "tensor" else a for a in args]
    result = op(*filled, **kwargs)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x for x in results if isinstance(x, torch.Tensor)]


def runs(call: Call, tensors: list[torch.Tensor]) -> bool:
    try:
        return all(x.dtype.is_floating_point or x.numel() for x in run(call, tensors))
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return False


@functools.cache
def lawful_calls(shape: tuple[int, ...]) -> tuple[Call, ...]:
    """The calls that PyTorch accepts, of operations with two such calls at least."""
    found: list[Call] = []
    tensors = values(shape)
    for op in operations():
        try:
            lawful = [call for call in calls(op) if runs(call, tensors)]
        except LookupError:
            continue
        if len(lawful) > 1:
            found += lawful
    return tuple(found)


def values(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(shape, generator=generator, dtype=torch.float32) + k for k in range(6)]


@pytest.mark.parametrize("shape", tensor_kinds().values(), ids=tensor_kinds().keys())
def test_calls_that_differ_in_one_argument_are_two_values(shape):
    chosen = lawful_calls(shape)
    assert len(chosen) > 150, len(chosen)

    def step(x, rest):
        return x, [run(call, [x, *rest]) for call in chosen]

    inputs = values(shape)
    new, expected = step(*split(inputs))
    state, results = zt.Step.of(step).lower(*split(inputs)).compile()(*split(inputs))
    assert torch.equal(state, new)
    for call, traced, eager in zip(chosen, results, expected, strict=True):
        for a, b in zip(traced, eager, strict=True):
            assert a.dtype == b.dtype, call
            assert a.shape == b.shape, call
            assert torch.equal(a.nan_to_num(9.5), b.nan_to_num(9.5)), call


def split(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    copies = [x.clone() for x in tensors]
    return copies[0], copies[1:]


def test_pairs_of_scalars_differ_in_one_keyword():
    """An optimizer's arithmetic on scalars is computed once for equal calls, and for equal calls only."""

    def step(x, c, d):
        sums = [torch.add(c, d), torch.add(c, d, alpha=2), torch.add(c, d, alpha=3)]
        differences = [torch.sub(c, d), torch.sub(c, d, alpha=2)]
        quotients = [
            torch.div(c, d),
            torch.div(c, d, rounding_mode="floor"),
            torch.div(c, d, rounding_mode="trunc"),
        ]
        casts = [c.to(torch.float64), c.to(torch.float16), c.half().to(torch.float64)]
        return x, [*sums, *differences, *quotients, *casts]

    x, c, d = torch.zeros(2), torch.tensor(-3.23), torch.tensor(1.7)
    _, expected = step(x, c, d)
    _, results = zt.Step.of(step).lower(x, c, d).compile()(x, c, d)
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.item() == b.item()


def write_through_transposed(x, y):
    square = x.mul(2)
    other = x.t().mul(2)  # the same operation on the same shape, with other strides
    square.t().copy_(y)
    other.t().copy_(y)
    return square.view(-1), other.t().reshape(-1), other.as_strided((4, 4), (4, 1))


def views_of_both_orders(x, y):
    a = x.add(1)
    b = x.t().add(1)
    a[0].mul_(3)
    b[0].mul_(3)
    return a.as_strided((16,), (1,)), b.as_strided((16,), (1,)), b.t().view(-1)


def written_value_of_another_order(x, y):
    z = x.clone()
    z.copy_(y.t())
    z.t()[1].mul_(2)
    w = x.t().clone()
    w.add_(y.t())
    return z.view(-1), z.as_strided((4,), (1,), 4), w.t().contiguous().view(-1)


def transposed_twice(x, y):
    first = x.t().clone()
    reader = first.t()
    first.add_(1)
    kept = reader * 1  # t() of columns, which gives rows
    flat = x.view(16).clone()
    second = flat.view(4, 4).t()
    torch.add(y, 1, out=second)  # t() of rows, which gives columns
    return kept, flat.mul(1), second.t().view(-1)


def result_of_another_order(x, y):
    rows = x.clone().view(4, 4)
    columns = rows.view(2, 8).view(4, 4).t()
    torch.add(y, 1, out=columns)
    return columns.t().view(-1), rows.view(-1), columns.as_strided((4,), (1,), 4)


@pytest.mark.parametrize("change", [
    *(write_through_transposed, views_of_both_orders, written_value_of_another_order),
    *(transposed_twice, result_of_another_order),
])  # fmt: skip
def test_equal_operations_on_one_shape_with_two_strides(change):
    def step(x, y):
        return x, change(x, y)

    x, y = torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4) ** 2
    _, expected = step(x.clone(), y.clone())
    _, results = zt.Step.of(step).lower(x, y).compile()(x.clone(), y.clone())
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)
