"""Experts over `ep` whose hidden dim is cut over `tp`, dense layers over `tp`, and the batch over `dp` and `ep`."""

from __future__ import annotations

import dataclasses

import pytest
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support import expert_tensor, experts
from tests.support.dtensors import joined, local_leaves, lockstep, on_ranks
from tests.support.worlds import ALL, distance
from ztrans.ir.interpreter import split_state

CASES = [(stage, transforms) for stage in range(4) for transforms in ((), ALL)]
DATA = experts.batches(3)


def axis(path, leaf):
    return "dp" if ".experts." in path else ("dp", "ep")


def lowered(mesh):
    """The programs of a rank of ep and tp, and its parts of the state."""
    model = expert_tensor.parallel(expert_tensor.model(), mesh)
    step, state = expert_tensor.make_step(model), expert_tensor.init(model)
    traced = zt.shard_params(mesh, axis=axis)(step).trace(state, DATA[0].chunk(4)[0])
    chains = [
        zt.chain(zt.shard_params(mesh, axis=axis, stage=s), *others)(step).transforms
        for s, others in CASES
    ]
    return [
        dataclasses.replace(traced, transforms=chain).lower() for chain in chains
    ], local_leaves(state)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(range(4), lowered, dp=2, ep=2, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_computes_what_one_process_computes(ranks, case):
    model = expert_tensor.model()
    step, truth = expert_tensor.make_step(model), expert_tensor.init(model)
    programs = [
        cases[case] for cases, _ in ranks
    ] * 2  # those of a rank do not depend on its place in dp
    values = [split_state(programs[rank].graph, ranks[rank % 4][1])[rank] for rank in range(8)]
    for x in DATA:
        truth, loss = step(truth, x)
        outs = lockstep(
            [p.graph for p in programs],
            [[*mine, x.chunk(4)[rank // 2]] for rank, mine in enumerate(values)],
        )
        values, losses = [out[:-1] for out in outs], [out[-1] for out in outs]
    assert distance(losses, [loss] * 8) < 1e-14
    assert distance(joined(programs[0], values), pytree.tree_leaves(truth)) < 1e-14
    grads = [e for e in programs[0].graph.eqns if e.provenance and e.provenance.role == "grad"]
    assert {path: e.kwargs["axis"] for e in grads for path in e.provenance.paths} == {
        f"params.{k}": "dp" if k.startswith("experts.") else "dp*ep" for k in truth["params"]
    }
