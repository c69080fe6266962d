"""The functions that generated code calls are those of its operations, for every operation of the test programs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.graph import substitute
from ztrans.ir.operations import called
from ztrans.runtime.codegen import DIRECT_FUNCTIONS


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
        op = called(e.op) if isinstance(e.op, torch._ops.OpOverload) else None
        if op in DIRECT_FUNCTIONS:
            empty = {v: torch.empty(v.shape, dtype=v.dtype, device="meta") for v in e.ins}
            args = substitute(e.args, empty.__getitem__)
            kwargs = substitute(e.kwargs, empty.__getitem__)
            function = DIRECT_FUNCTIONS[op]
            assert dispatched(function, args, kwargs) == dispatched(op, args, kwargs)
