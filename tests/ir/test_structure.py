"""Structures are equal if and only if the equations compute the same: bits, dtypes and strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ztrans.ir import Eqn, Graph, Var
from ztrans.ir.higher_order import Function
from ztrans.ir.operations import compute
from ztrans.ir.structure import structure, structures

aten = torch.ops.aten
NUMBERS = (1, 1.0, True, 0, 0.0, -0.0, False, math.nan, 2, 2.0, math.inf, 1j, complex(0.0, -0.0))

numbers = st.sampled_from(NUMBERS) | st.floats(width=32) | st.integers(-3, 3)
shapes = st.lists(st.integers(1, 3), max_size=2)


def of_tensor(x: torch.Tensor) -> tuple:
    return x.dtype, tuple(x.shape), x.stride(), bits(x)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tables(draw: st.DrawFn) -> torch.Tensor:
    """Long constants that differ in a single element, which their text leaves out."""
    table = torch.zeros(2000)
    table[draw(st.integers(997, 1003))] = draw(st.sampled_from([0.0, -0.0, 1.0]))
    return table


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, tuple, dict]:
    """A call of an operation whose result shows every argument, and the tensors that it reads."""
    kind = draw(st.sampled_from(["full", "constant", "strides", "lists"]))
    if kind == "full":  # its dtype is that of the number, and its elements are the number
        return aten.full.default, ([2, *draw(shapes)], draw(numbers)), {}
    if kind == "constant":
        return aten.clone.default, (draw(tables()),), {}
    x = torch.arange(6.0).view(2, 3) + draw(st.integers(0, 1))
    if kind == "strides":  # a transposed argument gives a transposed result
        transposed = draw(st.booleans())
        x = x.view(3, 2).t() if transposed else x
        return aten.mul.Tensor, (x, draw(st.sampled_from([2.0, 3.0]))), {}
    return (
        aten.stack.default,
        ([x, *([x] if draw(st.booleans()) else [])], draw(st.sampled_from([0, 1]))),
        {},
    )


def computed(call: tuple[Any, tuple, dict]) -> tuple[Any, list[tuple]]:
    """The structure of the equation of a call, and its results; tensors are constants of the equation."""
    op, args, kwargs = call
    eqn = Eqn(op, args, (Var("y", torch.float32, ()),), kwargs)
    return structure(eqn, lambda v: v), [of_tensor(x) for x in compute(eqn, {})]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(calls(), calls())
@example((aten.full.default, ([2], 1), {}), (aten.full.default, ([2], 1.0), {}))
@example((aten.full.default, ([2], 1), {}), (aten.full.default, ([2], True), {}))
@example((aten.full.default, ([2], 0.0), {}), (aten.full.default, ([2], -0.0), {}))
@example((aten.full.default, ([2], math.nan), {}), (aten.full.default, ([2], float("nan")), {}))
def test_structures_are_equal_if_and_only_if_results_are(a, b):
    of_a, results_a = computed(a)
    of_b, results_b = computed(b)
    if a[0] is b[0]:
        assert (of_a == of_b) == (results_a == results_b)
    if of_a == of_b:
        assert hash(of_a) == hash(of_b)


@settings(max_examples=100, deadline=None)
@given(numbers)
def test_a_structure_equals_that_of_a_copy(number):
    of_a, _ = computed((aten.full.default, ([2], number), {}))
    # The text of NaN has no payload, and the bits of a literal count.
    is_copied = isinstance(number, float) and number == number
    copied = float(repr(number)) if is_copied else number
    of_b, _ = computed((aten.full.default, ((2,), copied), {}))
    assert of_a == of_b


X = Var("x", torch.float32, (4,))
Y = Var("y", torch.float32, (4,))
Z = Var("z", torch.float32, (4,))


def chain(x: Var, y: Var, z: Var, number: float) -> list[Eqn]:
    return [Eqn(aten.mul.Tensor, (x, number), (y,)), Eqn(aten.add.Tensor, (y, x), (z,))]


def test_names_do_not_count():
    a, b, c = (Var(name, torch.float32, (4,)) for name in "abc")
    of_type = lambda v: v.type
    one = structures(chain(X, Y, Z, 2.0), [X], [Z], of_type)
    assert one == structures(chain(a, b, c, 2.0), [a], [c], of_type)
    assert one != structures(chain(a, b, c, 2), [a], [c], of_type)
    assert one != structures(chain(a, b, c, 2.0), [a], [b], of_type)


def test_an_input_that_is_passed_twice_differs_from_two_inputs():
    add = lambda x, y: [Eqn(aten.add.Tensor, (x, y), (Z,))]
    of_type = lambda v: v.type
    assert structures(add(X, X), [X, X], [Z], of_type) != structures(
        add(X, Y), [X, Y], [Z], of_type
    )


@pytest.mark.parametrize("number", [2, 3.0, -0.0])
def test_the_functions_that_an_equation_calls_count(number):
    body = lambda n: Function(Graph("f", (X,), tuple(chain(X, Y, Z, n)), (Z,), 0), tuple)
    call = lambda n: Eqn(torch.ops.higher_order.cond, (X, body(n), body(2.0), [X]), (Z,))
    assert structure(call(2.0), id) == structure(call(2.0), id)
    assert structure(call(2.0), id) != structure(call(number), id)


def test_which_results_are_bound_counts():
    of_type = lambda v: v.type
    both = Eqn(aten.max.dim, (X, 0), (Y, Z))
    first = Eqn(aten.max.dim, (X, 0), (Y, None))
    second = Eqn(aten.max.dim, (X, 0), (None, Y))
    assert len({structure(each, of_type) for each in (both, first, second)}) == 3


def test_the_strides_of_a_constant_count():
    """`clone` keeps them, so the results of the two calls have other strides."""
    rows = torch.arange(4.0).view(2, 2)
    columns = rows.t().contiguous().t()
    assert torch.equal(rows, columns)
    of_rows, results_of_rows = computed((aten.clone.default, (rows,), {}))
    of_columns, results_of_columns = computed((aten.clone.default, (columns,), {}))
    assert results_of_rows != results_of_columns
    assert of_rows != of_columns
