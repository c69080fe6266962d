"""The functions that generated code calls are those of its operations, for every operation of the test programs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir import Eqn, Graph, Var, evaluate, substitute
from ztrans.ir.operations import direct, stride_safe
from ztrans.runtime.codegen import to_fx

aten = torch.ops.aten


class Dispatched(Exception):
    """Raised where an operation is dispatched, before it computes."""


class First(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise Dispatched(func, len(args), sorted(kwargs or {}))


def dispatched(function, args, kwargs) -> tuple:
    """The first operation that a call dispatches, and how many arguments it has."""
    with torch.no_grad(), First(), pytest.raises(Dispatched) as caught:
        function(*args, **kwargs)
    return caught.value.args


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_direct_function_dispatches_what_the_operation_does(name):
    for e in on_ranks(CASES[name], 1).graph.eqns:
        op = stride_safe(e.op) if isinstance(e.op, torch._ops.OpOverload) else None
        if op is not None and direct(op) is not op:
            empty = {v: torch.empty(v.shape, dtype=v.dtype, device="meta") for v in e.ins}
            args = substitute(e.args, empty.__getitem__)
            kwargs = substitute(e.kwargs, empty.__getitem__)
            assert dispatched(direct(op), args, kwargs) == dispatched(op, args, kwargs)


# Operations of generated code that no program of the first test has.
X, Y, ONE = torch.ones(4), torch.ones(4), torch.tensor(1.0)
CALLS = {
    aten.add.out: ((X, Y), {"alpha": 2, "out": X}),
    aten.add_.Tensor: ((X, Y), {"alpha": 2}),
    aten.addcdiv.default: ((X, X, Y), {"value": 2.0}),
    aten.addcdiv_.default: ((X, X, Y), {"value": 2.0}),
    aten.addcmul.default: ((X, X, Y), {"value": 2.0}),
    aten.addcmul_.default: ((X, X, Y), {"value": 2.0}),
    aten.div.out: ((X, Y), {"out": X}),
    aten.div_.Tensor: ((X, Y), {}),
    aten.lerp.Scalar: ((X, Y, 0.5), {}),
    aten.lerp_.Scalar: ((X, Y, 0.5), {}),
    aten.linalg_vector_norm.default: ((X, 2, [0], True), {"dtype": torch.float64}),
    aten.mul.out: ((X, Y), {"out": X}),
    aten.mul_.Tensor: ((X, Y), {}),
    aten.relu_.default: ((X,), {}),
    aten.rsub.Scalar: ((X, 1), {}),
    aten.sigmoid_.default: ((X,), {}),
    aten.sqrt_.default: ((X,), {}),
    aten.stack.default: (([X, Y], 1), {}),
    aten.sub.out: ((X, Y), {"alpha": 2, "out": X}),
    aten.sub_.Tensor: ((X, Y), {"alpha": 2}),
    aten.tanh_.default: ((X,), {}),
    aten.unbind.int: ((X, 0), {}),
    aten.view.default: ((X, [2, 2]), {}),
    aten.where.self: ((X > 0, X, ONE), {}),
    aten.where.self_out: ((X > 0, X, ONE), {"out": X}),
    aten._foreach_addcdiv_.ScalarList: (([X], [X], [Y], [2.0]), {}),
    aten._foreach_addcmul_.Scalar: (([X], [X], [Y], 2.0), {}),
    aten._foreach_add_.List: (([X], [Y]), {"alpha": 2}),
    aten._foreach_add_.Scalar: (([X], 2.0), {}),
    aten._foreach_div.ScalarList: (([X], [2.0]), {}),
    aten._foreach_lerp_.Scalar: (([X], [Y], 0.5), {}),
    aten._foreach_mul_.Tensor: (([X], ONE), {}),
    aten._foreach_pow.ScalarAndTensor: ((2.0, [X]), {}),
    aten._foreach_sqrt_.default: (([X],), {}),
}


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_a_direct_function_of_generated_code_dispatches_what_its_operation_does(op):
    args, kwargs = CALLS[op]
    assert dispatched(direct(op), args, kwargs) == dispatched(op, args, kwargs)


def test_one_tensor_may_be_a_constant_of_several_equations():
    """As the large constant of a checkpoint, which backward computes again."""
    x, y, z, out = (Var(name, torch.float32, (2,)) for name in ("x", "y", "z", "out"))
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    constants = ((x, first, y), (y, first, z), (z, second, out))
    eqns = (Eqn(torch.ops.aten.add.Tensor, (v, constant), (w,)) for v, constant, w in constants)
    graph = Graph("f", (x,), tuple(eqns), (out,), 0)
    (expected,) = evaluate(graph, torch.zeros(2))
    (result,) = to_fx(graph)(torch.zeros(2))
    assert torch.equal(result, expected)
