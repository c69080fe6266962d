"""Copies between the memory of the device and that of the host: types, verification, lifetimes, donation."""

import dataclasses

import pytest
import torch

from ztrans import ir
from ztrans.ir.collectives import WAIT, lane, rules
from ztrans.ir.donation import donation
from ztrans.ir.graph import Eqn, Graph, Split, Var
from ztrans.ir.liveness import liveness
from ztrans.planning.cost import memory

ADD = torch.ops.aten.add.Tensor


def moved(order: str = "in update out", over: bool = True) -> Graph:
    """A step whose only state is on the host: it adds one to it."""
    h = Var("m", torch.float32, (6, 16), (Split("dp"),), memory="host")
    start = ir.to_device(h, "m.device", ("m",), region="update")
    arrived = ir.wait_for_copy(start.out, region="update")
    new = dataclasses.replace(arrived.out, name="m1")
    add = Eqn(ADD, (arrived.out, 1.0), (new,), region="update")
    out = ir.to_host(new, "m1.host", ("m",), over=h if over else None, region="update")
    left = ir.wait_for_copy(out.out, region="update")
    parts = {"in": (start, arrived), "update": (add,), "out": (out, left)}
    eqns = [e for part in order.split() for e in parts[part]]
    return Graph("step", (h,), tuple(eqns), (left.out,), 1, mesh=(("dp", 2),))


def with_eqn(graph: Graph, index: int, **changes) -> Graph:
    eqns = list(graph.eqns)
    eqns[index] = eqns[index].replace(**changes)
    return graph.replace(eqns=tuple(eqns))


def test_the_memory_is_a_part_of_the_type():
    value = Var("m", torch.float32, (6, 16), (Split("dp"),), memory="host")
    assert value.type == "f32<host>[6@dp,16]"
    assert not value.is_like(dataclasses.replace(value, memory="device"))


def test_a_program_with_copies_prints():
    lines = str(ir.check(moved())).splitlines()
    assert [line.strip() for line in lines[4:]] == [
        "# update",
        "m.device': f32[6@dp,16]! = to_device(m)",
        "m.device: f32[6@dp,16] = wait(m.device')",
        "m1: f32[6@dp,16] = add(m.device, 1.0)",
        "m1.host': f32<host>[6@dp,16]! = to_host(m1, over=m)",
        "m1.host: f32<host>[6@dp,16] = wait(m1.host')",
        "return m1.host",
    ]


def test_a_value_on_the_host_is_not_computed_with():
    graph = moved()
    reads_host = with_eqn(graph, 2, args=(graph.inputs[0], 1.0))
    with pytest.raises(
        ir.ProgramError, match=r"m: f32<host>\[6@dp,16\] is in the memory of the host, .* to_device"
    ):
        ir.check(reads_host)


def test_no_operation_makes_a_value_on_the_host():
    graph = moved()
    out = dataclasses.replace(graph.eqns[2].out, memory="host")
    with pytest.raises(
        ir.ProgramError, match=r"m1: .* is in the memory of the host, where nothing"
    ):
        ir.check(with_eqn(graph, 2, outs=(out,)))


def test_a_copy_is_not_read_before_its_wait():
    graph = moved()
    future = graph.eqns[0].out
    with pytest.raises(ir.ProgramError, match=r"m.device': .* is read before its wait"):
        ir.check(with_eqn(graph, 2, args=(future, 1.0)))


def test_a_copy_that_nothing_waits_for_is_refused():
    graph = moved()
    without_wait = graph.replace(eqns=graph.eqns[:4], outputs=graph.inputs)
    with pytest.raises(ir.ProgramError, match=r"m1.host': .* is never waited for"):
        ir.check(without_wait)


@pytest.mark.parametrize(
    ("index", "changes", "problem"),
    [
        (0, {"provenance": None}, "a copy has a provenance"),
        (3, {"op": ir.TO_DEVICE}, "is copied from the host to the device"),
    ],
)
def test_a_copy_that_is_not_well_formed_is_refused(index, changes, problem):
    with pytest.raises(ir.ProgramError, match=problem):
        ir.check(with_eqn(moved(), index, **changes))


def test_a_copy_keeps_type_and_shape():
    graph = moved()
    narrow = dataclasses.replace(graph.eqns[0].out, dtype=torch.bfloat16)
    with pytest.raises(ir.ProgramError, match="changes the type of m: f32<host>"):
        ir.check(with_eqn(graph, 0, outs=(narrow,)))
    half = dataclasses.replace(graph.inputs[0], name="n", dtype=torch.bfloat16)
    two = graph.replace(inputs=(*graph.inputs, half))
    with pytest.raises(ir.ProgramError, match="does not fit into the storage of n: bf16<host>"):
        ir.check(with_eqn(two, 3, kwargs={"over": half}))


def test_a_copy_takes_part_in_no_collective():
    start, wait = moved().eqns[:2]
    assert not ir.is_start(start) and ir.is_copy(start)
    assert not rules(start).remote and not rules(wait).remote
    assert rules(Eqn(WAIT, (), ())).remote, "that of a collective does"
    assert [lane(e) for e in moved().eqns if ir.is_copy(e)] == ["host in", "host out"]


def test_the_copy_writes_over_the_old_leaf():
    graph = moved()
    decided = donation(graph)
    leaf, new = graph.inputs[0], graph.outputs[0]
    assert decided.owner[new] is leaf
    assert graph.eqns[3] in decided.in_place_ops
    apart = moved(over=False)
    assert donation(apart).owner[apart.outputs[0]] is not apart.inputs[0]


def test_the_update_writes_over_the_copy_on_the_device():
    graph = moved()
    assert donation(graph).owner[graph.eqns[2].out] is donation(graph).owner[graph.eqns[1].out]


def test_a_source_lives_until_the_wait():
    graph = moved()
    lifetimes = liveness(graph)
    assert lifetimes.last[lifetimes.root[graph.eqns[2].out]] == 4


def test_a_leaf_that_is_still_read_is_not_written_over():
    """The copy to the host stands before the end of the copy to the device."""
    graph = moved()
    start, arrived, add, out, left = graph.eqns
    constant = Eqn(torch.ops.aten.zeros.default, ([6, 16],), add.outs, region="update")
    early = graph.replace(eqns=(start, constant, out, left, arrived))
    assert out not in donation(early).in_place_ops


def test_the_two_memories_are_counted_apart():
    counted = memory(moved())
    part = 3 * 16 * 4
    assert (counted.peak, counted.host_peak, counted.state) == (part, part, 0)
    assert "host 192 B" in str(counted)
    assert memory(moved(over=False)).host_peak == 2 * part


def test_copies_compute_nothing():
    graph = moved().replace(mesh=())
    plain = dataclasses.replace(graph.inputs[0], layout=())
    x = torch.randn(6, 16)
    alone = ir.rename(graph.replace(inputs=(plain,)), {graph.inputs[0]: plain})
    assert torch.equal(ir.evaluate(alone, x)[0], x + 1)
