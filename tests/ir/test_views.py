"""A program is called with fewer views, and the bits are those of its equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ztrans as zt
from tests.support.programs import CASES
from tests.support.traced import trace
from tests.support.worlds import on_ranks
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.views import simpler_calls

aten = torch.ops.aten


def program(fn, *args):
    """The program of `fn`, whose arguments are its state."""
    return trace(lambda state: (state, fn(*state)), list(args)).graph


def called(graph):
    """The names of the operations that a program calls."""
    calls = simpler_calls(graph, lambda v: v.shape)
    return [str(part.op).split(".")[1] for e in graph.eqns for part in calls.eqns.get(e, (e,))]


def rows(*shape):
    return torch.randn(*shape)


KINDS = {
    "a linear layer": (F.linear, (rows(2, 5, 4), rows(3, 4), rows(3)), ["linear"]),
    "a linear layer of rows": (F.linear, (rows(5, 4), rows(3, 4), rows(3)), ["linear"]),
    "without a bias": (F.linear, (rows(5, 4), rows(3, 4)), ["linear"]),
    "two linear layers": (
        lambda x, w: F.linear(F.linear(x, w, w[0]), w, w[0]),
        (rows(2, 5, 4), rows(4, 4)),
        ["select", "linear", "select", "linear"],
    ),
    "a view of a view": (lambda x: x.view(4, 6).view(2, 12) + 1, (rows(24),), ["view", "add"]),
    "a view and back": (lambda x: x.view(4, 6).view(24) + 1, (rows(24),), ["add"]),
    "both views are read": (lambda x: (x.view(4, 6) + 1, x.view(4, 6).view(8, 3) + 1), (rows(24),), None),
    "a transpose and back": (lambda x: x.t().t() + 1, (rows(3, 2),), ["add"]),
    "other dims": (lambda x: x.transpose(0, 1).transpose(1, 2) + 1, (rows(3, 2, 4),), ["transpose", "transpose", "add"]),
    "dims from the end": (lambda x: x.transpose(-1, 0).transpose(0, 2) + 1, (rows(3, 2, 4),), ["add"]),
    "a sum": (lambda x: x.sum(0, keepdim=True).view(4) + 1, (rows(3, 4),), ["sum", "add"]),
    "a sum of two dims": (lambda x: x.sum((0, 2), keepdim=True).view(4) + 1, (rows(3, 4, 2),), ["sum", "add"]),
    "a sum in another shape": (lambda x: x.sum(0, keepdim=True).view(2, 2) + 1, (rows(3, 4),), ["sum", "view", "add"]),
    "a dim more and back": (lambda x: x.unsqueeze(1).squeeze(1) + 1, (rows(3, 2),), ["add"]),
    "a strided value": (
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
        (rows(5, 2, 4), rows(3, 4), rows(3)),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_calls(name):
    fn, args, expected = KINDS[name]
    graph = program(fn, *args)
    if expected is not None:
        assert called(graph) == expected
    module = zt.to_fx(graph)
    for computed, meant in zip(module(*args), zt.evaluate(graph, *args), strict=True):
        assert torch.equal(computed, meant) and computed.shape == meant.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_equations(name):
    """Forward, backward and update of whole steps, on one rank."""
    graph = on_ranks(CASES[name], 1).graph
    torch.manual_seed(0)
    given = [torch.rand(v.shape).to(v.dtype) for v in graph.inputs]
    seeds = [torch.random.manual_seed(1).get_state()] * 2
    torch.random.set_rng_state(seeds[0])
    computed = zt.to_fx(graph)(*given)
    torch.random.set_rng_state(seeds[1])
    meant = zt.evaluate(graph, *given)
    for value, expected in zip(computed, meant, strict=True):
        assert torch.equal(value, expected) or (value.isnan() == expected.isnan()).all()


def test_sizes_are_those_of_this_rank():
    """The parts of a value have other sizes than the value, so its views are of the parts."""
    x = Var("x", torch.float32, (8, 4))
    flat, back = Var("flat", torch.float32, (32,)), Var("back", torch.float32, (8, 4))
    eqns = (
        Eqn(aten.view.default, (x, [16]), (flat,)),
        Eqn(aten.view.default, (flat, [4, 4]), (back,)),
    )
    graph = Graph("f", (x,), eqns, (back,), 0)
    halves = {x: (4, 4), flat: (16,), back: (4, 4)}
    assert simpler_calls(graph, halves.__getitem__).equal == {back: x}
