"""Steps that hold DTensors of their own, as `parallelize_module` makes them, are sharded over another axis."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.plans import llama_dtensor
from tests.support.dtensors import (
    joined,
    llama,
    local_leaves,
    lockstep,
    loop_of,
    norm_mlp,
    on_ranks,
    sequence_parallel,
    tokens,
)
from tests.support.worlds import ALL, distance
from ztrans.ir.interpreter import split_state

STEPS = 3
CASES = [(stage, transforms) for stage in range(4) for transforms in ((), ALL)]


def lowered(mesh: DeviceMesh) -> tuple[list[zt.stages.Lowered], list[torch.Tensor]]:
    """The programs of a rank of tp for the small Llama, and its parts of the state, whole over dp."""
    model = llama_dtensor.parallel(llama(), mesh["tp"])
    step, state = llama_dtensor.make_step(model, torch.float32), llama_dtensor.init(model)
    traced = zt.shard_params(mesh)(step).trace(state, tokens(1)[0].chunk(2)[0])
    chains = [
        zt.chain(zt.shard_params(mesh, stage=stage), *transforms)(step).transforms
        for stage, transforms in CASES
    ]
    return [
        dataclasses.replace(traced, transforms=chain).lower() for chain in chains
    ], local_leaves(state)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks([0, 1], lowered, dp=2, tp=2)


@pytest.fixture(scope="module")
def truth():
    """The same model in one process, without DTensors."""
    model = llama()
    step, state, losses = (
        llama_dtensor.make_step(model, torch.float32),
        llama_dtensor.init(model),
        [],
    )
    for batch in tokens(STEPS):
        state, loss = step(state, batch)
        losses.append(loss)
    return pytree.tree_leaves(state), losses


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_parallelized_llama_computes_what_one_process_computes(ranks, truth, case):
    """Embedding and loss over the vocabulary, attention by heads, over tp=2; and shards over dp=2."""
    programs = [
        cases[case] for cases, _ in ranks
    ] * 2  # those of a rank do not depend on its place in dp
    values = [split_state(programs[rank].graph, ranks[rank % 2][1])[rank] for rank in range(4)]
    losses = []
    for batch in tokens(STEPS):
        outs = lockstep(
            [p.graph for p in programs],
            [[*mine, batch.chunk(2)[rank // 2]] for rank, mine in enumerate(values)],
        )
        values, last = [out[:-1] for out in outs], [out[-1] for out in outs]
        losses.append(last[0])
    state, wanted = joined(programs[0], values), truth[0]
    assert distance(losses, truth[1]) < 1e-6
    assert distance(state, wanted) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_parallelized_llama_on_two_hosts(truth):
    """Parts over tp=2, shards over dp=2, copies over host=2."""

    def lowered(mesh):
        model = llama_dtensor.parallel(llama(), mesh["tp"])
        step, state = llama_dtensor.make_step(model, torch.float32), llama_dtensor.init(model)
        shard = zt.shard_params(mesh, replicate_axis="host")
        return zt.chain(shard, *ALL)(step).lower(state, tokens(1)[0].chunk(4)[0]), local_leaves(
            state
        )

    ranks = on_ranks([0, 1], lowered, host=2, dp=2, tp=2)
    programs = [
        program for program, _ in ranks
    ] * 4  # those of a rank do not depend on its place in host and dp
    values = [split_state(programs[rank].graph, ranks[rank % 2][1])[rank] for rank in range(8)]
    for batch in tokens(STEPS):
        outs = lockstep(
            [p.graph for p in programs],
            [[*mine, batch.chunk(4)[rank // 2]] for rank, mine in enumerate(values)],
        )
        values, losses = [out[:-1] for out in outs], [out[-1] for out in outs]
    assert distance(losses, [truth[1][-1]] * 8) < 1e-6
    assert distance(joined(programs[0], values), truth[0]) < 1e-5


@pytest.fixture(scope="module")
def mesh():
    """The first rank of a mesh whose other ranks do not exist."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def on_tp(x: torch.Tensor, mesh: DeviceMesh, placement=None) -> DTensor:
    return DTensor.from_local(x, mesh["tp"], [placement or Shard(0)], run_check=False)


@pytest.fixture(scope="module")
def module(mesh):
    return sequence_parallel(norm_mlp(), mesh["tp"], source=None)


def train(module):
    """A step that takes gradients of `functional_call`."""

    def step(params, x):
        params = {k: p.detach().requires_grad_() for k, p in params.items()}
        loss = functional_call(module, params, (x,)).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    return step


def test_the_program_of_a_parallelized_module_prints(mesh, module, golden):
    """Its collectives name the axis. Gradients have the names of the leaves; those of whole leaves are summed over tp."""
    state = {k: p.detach() for k, p in module.named_parameters()}
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(train(module))
    lowered = step.lower(state, torch.randn(4, 8))
    assert re.sub(r" *# .*py:.*", "", str(lowered)) == golden
    sharded = step.shard(state)
    assert str(step.lower(sharded, torch.randn(4, 8))) == str(lowered), (
        "a state on dp and tp gives the same program"
    )


def test_leaves_of_a_sharded_state_live_on_both_axes(mesh, module):
    """A leaf that the step does not divide lives on dp alone, as with FSDP2."""
    state = {
        "split": on_tp(torch.randn(3, 4), mesh),
        "whole": on_tp(torch.ones(4), mesh, Replicate()),
        "plain": torch.ones(4, 2),
    }
    step = zt.shard_params(mesh)(lambda state, x: (state, 0.0))
    sharded = step.shard(state)
    places = {
        k: (x.device_mesh.mesh_dim_names, str(x.placements), tuple(x.to_local().shape))
        for k, x in sharded.items()
    }
    assert places == {
        "split": (("dp", "tp"), "(_StridedShard(dim=0, sf=2), Shard(dim=0))", (2, 4)),
        "whole": (("dp", "tp"), "(Shard(dim=0), Replicate())", (2,)),
        "plain": (("dp",), "(Shard(dim=0),)", (2, 2)),
    }
    sharded["split"].to_local().zero_()
    assert state["split"].to_local().any(), "shard copies"


def test_a_lifted_loop_keeps_its_lines_and_regions(mesh, module):
    loop, optimizer = loop_of(module)
    step, state = zt.lift(loop, module, optimizer)
    lowered = zt.shard_params(mesh)(step).lower(state, torch.randn(4, 8))
    reductions = [e for e in lowered.graph.eqns if e.provenance and e.provenance.role == "grad"]
    assert {p for e in reductions for p in e.provenance.paths} == {
        f"params.{k}" for k, _ in module.named_parameters()
    }
    assert all("loop" in str(e.source) for e in lowered.graph.eqns if e.region != "update")
    assert [e.region for e in lowered.graph.eqns if "layer_norm" in str(e.op)] == [
        "forward",
        "backward",
    ]


def test_a_dtensor_in_the_batch_is_its_local_part(mesh):
    step = zt.shard_params(mesh, stage=0)(lambda state, x: (state, x.sum()))
    x = on_tp(torch.randn(3, 2), mesh)
    lowered = step.lower(torch.ones(2), x)
    assert "x: f32[3,2]" in str(lowered) and "all_reduce(sum, sum, tp)" in str(lowered)


def test_a_batch_that_is_cut_over_the_axis_of_the_transforms_is_refused(mesh):
    """Its program would take the rows of a rank for those of all ranks."""
    step = zt.shard_params(mesh)(lambda state, x: (state, x.sum() / len(x)))
    x = DTensor.from_local(torch.ones(3, 2), mesh["dp"], [Shard(0)], run_check=False)
    with pytest.raises(
        TypeError, match=r"trace: x is a DTensor that is cut over an axis(?s:.)*x.to_local\(\)"
    ):
        step.lower(torch.ones(2), x)
    assert step.lower(torch.ones(2), x.to_local())


REFUSED = {
    "which tp=2 does not divide": lambda mesh: DTensor.from_local(
        torch.ones(2, 2),
        mesh["tp"],
        [Shard(0)],
        run_check=False,
        shape=torch.Size([3, 2]),
        stride=(2, 1),
    ),
    r"it is P\(sum\) over tp": lambda mesh: on_tp(torch.ones(2, 2), mesh, Partial()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_parts_that_no_program_can_hold_are_refused(mesh, why):
    with pytest.raises(
        ValueError,
        match=rf"trace: the ranks hold other parts of state.w than one program can have: .*{why}",
    ):
        zt.shard_params(mesh)(lambda state, x: (state, x)).trace(
            {"w": REFUSED[why](mesh)}, torch.ones(2)
        )


def test_a_leaf_stays_a_dtensor(mesh):
    step = zt.shard_params(mesh)(lambda state, x: ({"w": state["w"].to_local()}, x))
    with pytest.raises(
        ValueError,
        match=r"trace: state.w was a DTensor, and the step returned a full tensor in its place",
    ):
        step.trace({"w": on_tp(torch.ones(2, 2), mesh)}, torch.ones(2))


def test_lockstep_has_only_this_ranks_part(mesh):
    state = {"w": on_tp(torch.ones(2, 2), mesh)}
    lowered = zt.shard_params(mesh)(lambda state, x: (state, x.sum())).lower(state, torch.ones(2))
    with pytest.raises(
        ValueError,
        match=r"lockstep: state.w is a DTensor over 'tp', and this process has only its own part",
    ):
        lowered.lockstep(state, [(torch.ones(2),)] * 4)


def test_a_program_runs_only_for_leaves_that_the_step_divides_as_it_did(mesh):
    state = {"w": on_tp(torch.ones(4, 2), mesh)}
    step = zt.shard_params(mesh, stage=0)(lambda state, x: (state, x.sum()))
    compiled = step.lower(state, torch.ones(2)).compile()
    with pytest.raises(
        TypeError,
        match=r"state.w was .*Shard\(dim=0\).* and is .*Replicate",
    ):
        compiled(step.shard({"w": on_tp(torch.ones(8, 2), mesh, Replicate())}), torch.ones(2))
