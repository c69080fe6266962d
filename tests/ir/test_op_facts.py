"""The facts about every operation that the laws, the golden programs and the random programs use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ztrans.ir.graph import Eqn, Var
from ztrans.ir.op_facts import _ROWS, OpFacts, is_view, op_facts

aten = torch.ops.aten
FILE = Path(__file__).with_name("op_facts.txt")
LINES = FILE.read_text().splitlines()


def operation(name: str) -> Any:
    """The operation that a line of the file names: `aten.add.Tensor`, or `higher_order.cond`."""
    namespace, _, rest = name.partition(".")
    found: Any = getattr(torch.ops, namespace)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(":")[0])
def test_the_facts_about_every_operation_in_use(line):
    name, _, expected = line.partition(":")
    facts = op_facts(operation(name))
    true = [field.name for field in dataclasses.fields(facts) if getattr(facts, field.name) is True]
    assert " ".join(true) == expected.strip()


def test_every_row_is_about_an_operation_and_names_facts_that_exist():
    facts = {field.name for field in dataclasses.fields(OpFacts)}
    for name, row in _ROWS.items():
        assert hasattr(aten, name), name
        assert row and facts.issuperset(row), name


def test_exact_operations_are_elementwise():
    for name, row in _ROWS.items():
        packet = getattr(aten, name)
        tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
        if "exact" in row:
            assert torch.Tag.pointwise in tags, name


def test_an_operation_of_another_library_has_no_row():
    with torch.library._scoped_library("ztrans_facts", "DEF") as library:
        library.define("add(Tensor x) -> Tensor")
        assert op_facts(torch.ops.ztrans_facts.add.default) == OpFacts("ztrans_facts::add")


def test_a_view_shares_memory_with_its_argument():
    x = torch.arange(6.0)
    y = Var("y", torch.float32, (2, 3))
    calls = [
        (aten.view.default, ([2, 3],)),
        (aten._unsafe_view.default, ([2, 3],)),
        (aten.unsafe_split.Tensor, (2,)),
        (aten.exp.default, ()),
    ]
    for op, args in calls:
        result = op(x, *args)
        first = result[0] if isinstance(result, (list, tuple)) else result
        shares = first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert is_view(Eqn(op, (x, *args), (y,))) == shares, op
