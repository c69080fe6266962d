"""The facts about every operation that the laws, the golden programs and the random programs use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from tests.support.programs import CASES
from tests.support.worlds import batches, traced
from ztrans.ir.collectives import rules
from ztrans.ir.graph import Eqn, Var
from ztrans.ir.layout import as_tensor
from ztrans.ir.op_facts import _ROWS, OpFacts, is_view, op_facts
from ztrans.rewrites.erase import erase_marks

aten = torch.ops.aten
FILE = Path(__file__).with_name("op_facts.txt")
LINES = FILE.read_text().splitlines()


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


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
        assert hasattr(aten, name) or hasattr(torch.ops.higher_order, name), name
        assert row and facts.issuperset(row), name


def test_exact_operations_are_elementwise():
    for name, row in _ROWS.items():
        if "exact" in row:
            packet = getattr(aten, name)
            tags = {
                tag for overload in packet.overloads() for tag in getattr(packet, overload).tags
            }
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


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def check_storage(eqn: Eqn, values: dict) -> None:
    """Compute an equation and compare where its results are with what its rules say."""
    results = rules(eqn).meaning([eqn], [values])[0]
    arguments = [values[v] for v in eqn.ins if values[v].numel()]
    for v, result in zip(eqn.outs, results):
        if v is None:
            continue
        values[v] = result
        if not result.numel() or not arguments:
            continue  # nothing is stored, or there is nothing to share
        if rules(eqn).shares_storage(eqn):
            assert shares_memory(result, values[eqn.ins[0]]), eqn
        else:
            assert not any(shares_memory(result, x) for x in arguments), eqn


@pytest.mark.parametrize("name", CASES)
def test_results_share_memory_as_their_rules_say(name):
    """A result in the memory of an argument, of which the rules do not say so, would be written over too early."""
    case = CASES[name]
    graph = erase_marks(traced(case, 1).graph)
    inputs = pytree.tree_leaves((case.state(), batches(case, 1)[0]))
    values = dict(zip(graph.inputs, map(as_tensor, inputs), strict=True))
    for eqn in graph.eqns:
        check_storage(eqn, values)


def test_results_of_the_steps_own_collectives_share_memory_as_their_rules_say(mesh_of_one):
    """A wait returns its argument. All others return new tensors, even if a rank is alone."""
    functional = torch.ops._c10d_functional
    group = mesh_of_one.get_group().group_name
    calls = {
        functional.all_reduce.default: ("sum", group),
        functional.all_reduce_coalesced.default: ("sum", group),
        functional.all_gather_into_tensor.default: (1, group),
        functional.all_gather_into_tensor_coalesced.default: (1, group),
        functional.reduce_scatter_tensor.default: ("sum", 1, group),
        functional.reduce_scatter_tensor_coalesced.default: ("sum", 1, group),
        functional.all_to_all_single.default: ([4], [4], group),
        functional.broadcast.default: (0, group),
        functional.wait_tensor.default: (),
    }
    x, y = (Var(name, torch.float32, (4, 2)) for name in "xy")
    tensor = torch.arange(8.0).view(4, 2)
    for op, options in calls.items():
        takes_list = "coalesced" in op._schema.name
        eqn = Eqn(op, ([x] if takes_list else x, *options), (y,))
        result = op([tensor] if takes_list else tensor, *options)
        result = result[0] if takes_list else result
        assert shares_memory(result, tensor) == rules(eqn).shares_storage(eqn), op
