"""The functions that a program calls are those of its operations, for every operation of the test programs."""

from __future__ import annotations

import pytest
import torch

from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.graph import Primitive, Var, substitute
from ztrans.ir.operations import called
from ztrans.runtime.call_forms import _dispatched, call_form

aten = torch.ops.aten


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_form_dispatches_what_the_operation_does(name):
    for e in on_ranks(CASES[name], 1).graph.eqns:
        if isinstance(e.op, Primitive):
            continue
        form = call_form(e.op, e.args, e.kwargs)
        empty = {v: torch.empty(v.shape, dtype=v.dtype, device="meta") for v in e.ins}
        args, kwargs = (
            substitute(e.args, empty.__getitem__),
            substitute(e.kwargs, empty.__getitem__),
        )
        if isinstance(called(e.op), torch._ops.OpOverload):
            expected, computed = (_dispatched(f, args, kwargs) for f in (called(e.op), form))
            assert expected is not None and computed is not None and expected[0] is computed[0]
            assert len(expected[1]) == len(computed[1]) and expected[2].keys() == computed[2].keys()


def test_forms():
    x, number = Var("x", torch.float32, (2, 3)), Var("number", torch.float32, ())
    assert call_form(aten.mm.default, (x, x), {}) is torch.mm
    assert call_form(aten.add_.Tensor, (x, x), {"alpha": 2}) is torch.Tensor.add_
    assert call_form(aten.view.default, (x, [6]), {}) is torch.reshape, "whatever the strides are"
    assert call_form(aten.mul.Tensor, (x, number), {}) is torch.mul
    assert call_form(aten._foreach_add_.Scalar, ([x, x], 1), {}) is torch._foreach_add_
    # Functions that would choose another overload are not used.
    assert call_form(aten.add.Scalar, (x, 1), {}) is aten.add.Scalar
    # Nor is anything computed, or drawn, to find out.
    before = torch.random.get_rng_state()
    assert call_form(aten.bernoulli.p, (x, 0.5), {}) is torch.bernoulli
    assert torch.equal(torch.random.get_rng_state(), before)
