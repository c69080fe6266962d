"""The interpreter runs the collectives that a step itself contains. The results of each rank are computed by hand."""

import pytest
import torch

import ztrans as zt
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.source import Source

own = torch.ops._c10d_functional
RANKS = [torch.arange(6.0) + 10 * r for r in range(2)]
X, Y = Var("x", torch.float32, (6,)), Var("y", torch.float32, (6,))


def program(op, *args) -> Graph:
    """A program of one collective over tp, of `x` alone or of `x` and `y`."""
    many = isinstance(args[0], list)
    outs = tuple(Var(f"o{k}", torch.float32, (6,)) for k in range(1 + many))
    eqn = Eqn(op.default, (*args, "tp"), outs, source=Source("/home/me/train.py", 12, "step"))
    return Graph("exchange", (X, Y), (eqn,), outs, 0, mesh=(("tp", 2),))


def exchanged(op, *args) -> list[list]:
    outs = zt.ir.lockstep(program(op, *args), [[x, -x] for x in RANKS])
    return [[o.tolist() for o in each] for each in outs]


A, B = (x.tolist() for x in RANKS)
SUM = [a + b for a, b in zip(A, B)]
RESULTS = {
    "sum": ((own.all_reduce, X, "sum"), [SUM, SUM]),
    "avg": ((own.all_reduce, X, "avg"), [[s / 2 for s in SUM]] * 2),
    "gather": ((own.all_gather_into_tensor, X, 2), [A + B, A + B]),
    "scatter": ((own.reduce_scatter_tensor, X, "sum", 2), [SUM[:3], SUM[3:]]),
    "exchange": ((own.all_to_all_single, X, [2, 2], [2, 4]), [A[:2] + B[:2], A[2:] + B[2:]]),
    "broadcast": ((own.broadcast, X, 1), [B, B]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_collective_of_the_step_has_the_result_of_torch_distributed(kind):
    (op, *args), wanted = RESULTS[kind]
    assert exchanged(op, *args) == [[w] for w in wanted]


@pytest.mark.parametrize("kind", ["sum", "gather", "scatter"])
def test_a_coalesced_collective_of_the_step_has_several_results(kind):
    (op, _, *how), wanted = RESULTS[kind]
    both = getattr(own, op.__name__.split(".")[-1] + "_coalesced")
    assert exchanged(both, [X, Y], *how) == [[w, [-v for v in w]] for w in wanted]


@pytest.mark.skipif(not hasattr(own, "isend"), reason="this torch has no functional isend")
def test_a_point_to_point_message_is_refused():
    with pytest.raises(ValueError) as e:
        exchanged(own.isend, X, 1, 0)
    assert str(e.value) == (
        "lockstep: the step's own isend goes from one rank to another, and here all ranks run one program.\n"
        "  at /home/me/train.py:12 in step\n"
        "Run the step on real ranks, lowered.compile() on each, or send with a collective (all_to_all, broadcast)."
    )
