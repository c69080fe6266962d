"""Properties of transforms on random programs (see `tests/fuzz`), and of cutting leaves of random shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ztrans as zt
from tests.fuzz.check import Case
from tests.fuzz.steps import step_of
from tests.fuzz.truth import doubles
from tests.support.cover import parameters_of
from tests.support.worlds import distance, slices
from ztrans.ir.collectives import ALL_GATHER, WAIT, is_start, rules

pytestmark = [
    # PyTorch's own modules raise this warning when they first take a forward-mode derivative.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    # A program does not check whether a matrix is singular.
    pytest.mark.filterwarnings("ignore:trace. .*_linalg_check_errors"),
]


def lowered(seed: int, *transforms: zt.Transform) -> zt.ir.Graph:
    """The program of the random step with this seed, on four ranks at stage 3."""
    program = Case.of(seed).program
    with doubles():
        state, batch = program.state(), slices(program.batch(4, 0), 4)[0]
        step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=4)), *transforms)(step_of(program))
        return step.lower(state, *batch).graph


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, bound",
    parameters_of(
        [(seed, bound) for seed in range(1, 5) for bound in (0, 256, 4096)],
        [(1, 0), (2, 256), (3, 4096), (4, 256)],
    ),
)
def test_prefetch_stays_within_its_bytes_in_flight(seed, bound):
    graph, under_way = lowered(seed, zt.prefetch(max_in_flight=bound)), {}
    parameters = [e for e in graph.eqns if e.op is ALL_GATHER and e.provenance.role == "param"]
    received = {
        e: [rules(e).received_bytes(e, k, graph.axes) for k in range(len(e.outs))]
        for e in parameters
    }
    largest = max((n for sizes in received.values() for n in sizes), default=0)
    for e in graph.eqns:
        if e in received:
            under_way[e] = sum(received[e])
        elif e.op is WAIT:  # a wait for one member of a bucket waits for the whole message
            under_way = {
                bucket: n for bucket, n in under_way.items() if e.args[0] not in bucket.outs
            }
        elif not is_start(e):
            assert sum(under_way.values()) <= max(bound, largest), f"while {e.op} runs"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_cutting_and_joining_are_inverse(shape, ranks):
    from ztrans.ir.graph import Split, Var
    from ztrans.ir.interpreter import join_state, split_state

    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    v = Var("x", x.dtype, tuple(shape), (Split("dp", 0),))
    graph = zt.ir.Graph("f", (v,), (), (v,), 1, mesh=(("dp", ranks),))
    parts = split_state(graph, [x])
    chunks = torch.chunk(x, ranks)
    for r, (part,) in enumerate(parts):
        assert part.shape[0] == (
            chunks[r].shape[0] if r < len(chunks) else 0
        )  # as torch.chunk and DTensor cut
    assert torch.equal(join_state(graph, parts)[0], x)
    assert [s[0].shape for s in slices((x,), 1)] == [x.shape]


def test_the_distance_of_the_tests_sees_what_is_not_finite():
    nan, one = torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0])
    assert distance(nan, one) == distance(one, nan) == float("inf")
    assert distance(nan, nan) == distance(one, one) == 0
