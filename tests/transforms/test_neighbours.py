"""`shard_params(reshard=n)`: each n neighbours keep a parameter in parts, and gather it again among themselves."""

import pytest
import torch

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import (
    ALL,
    batches,
    default_dtype,
    distance,
    on_ranks,
    plain,
    sharded,
    slices,
)
from ztrans.ir.collectives import ALL_GATHER, SHARD

MESH = zt.AbstractMesh(dp=4)
PROGRAMS = [
    ("mlp_momentum", torch.float32),
    ("uneven", torch.float64),
    ("gpt_adam", torch.float32),
]


def gathers(lowered):
    """The axis and the region of each gather of parameters, and the number of its members."""
    starts = [e for e in lowered.graph.eqns if e.op is ALL_GATHER and e.provenance.role == "param"]
    return {(e.kwargs["axis"], e.region) for e in starts}


def test_the_program_prints(golden):
    assert str(lower(mesh=MESH, reshard=2)) == golden


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", PROGRAMS)
@pytest.mark.parametrize("transforms", [(), ALL], ids=["as written", "planned"])
def test_no_bit_changes(name, dtype, transforms):
    with default_dtype(dtype):
        case = CASES[name]
        for ranks, count in ((4, 2), (6, 3)):
            each = [
                sharded(case, ranks, 3, 2, transforms, reshard=reshard)
                for reshard in ("always", count)
            ]
            assert distance(each[0][0], each[1][0]) == 0
            assert distance(each[0][1], each[1][1]) == 0
            assert gathers(each[0][2]) == {("dp", "forward"), ("dp", "backward")}
            assert gathers(each[1][2]) == {("dp", "forward"), (f"dp/{count}", "backward")}


@pytest.mark.parametrize("transforms", [(), ALL], ids=["as written", "planned"])
def test_no_bit_changes_in_half_precision(transforms):
    """With `fuse_cast_gather`, the parts that neighbours keep have bf16 too."""
    torch.manual_seed(0)
    params = {"up": torch.randn(16, 8), "down": torch.randn(6, 16)}
    state = {"params": params, "m": {k: torch.zeros_like(p) for k, p in params.items()}, "lr": 0.1}
    batches = [((torch.randn(4, 8), torch.randn(4, 6)),) for _ in range(4)]
    results = []
    for reshard in ("always", 2):
        lowered = lower(*transforms, mesh=MESH, reshard=reshard)
        results.append(lowered.lockstep(state, batches))
    assert distance(*results) == 0
    (cut,) = [e for e in lowered.graph.eqns if e.op is SHARD]
    assert cut.out.dtype == (torch.bfloat16 if transforms else torch.float32)


@pytest.mark.slow
def test_it_computes_what_the_plain_step_computes():
    with default_dtype(torch.float64):
        state, _, _ = sharded(CASES["gpt_adam"], 8, reshard=2)
        assert distance(state, plain(CASES["gpt_adam"])[0]) <= 1e-10


def test_backward_receives_a_half_of_what_it_reads():
    """From the other of two neighbours; forward receives three quarters of each parameter, with padded rows."""
    always, parts = (lower(mesh=MESH, reshard=reshard) for reshard in ("always", 2))
    up = 16 * 8 * 4
    padded = 8 * 16 * 4
    down = 6 * 16 * 4
    sent = parts.cost_analysis()
    assert always.cost_analysis().over("dp", "param") == (up + 2 * padded) * 3 / 4
    assert sent.over("dp", "param") == (up + padded) * 3 / 4
    assert sent.over("dp/2", "param") == down / 2
    (cut,) = [e for e in parts.graph.eqns if e.op is SHARD]
    assert cut.region == "forward" and cut.out.type == "f32[6@dp/2,16]"


def test_neighbours_on_a_replicated_mesh_and_on_a_joint_axis():
    with default_dtype(torch.float64):
        case = CASES["mlp_momentum"]
        meshes = [
            ({"axis": "dp", "replicate_axis": "host"}, zt.AbstractMesh(host=2, dp=4), "dp/2"),
            ({"axis": ("dp", "cp")}, zt.AbstractMesh(dp=2, cp=4), "dp*cp/4"),
        ]
        for options, mesh, axis in meshes:
            state, _, lowered = sharded(case, 8, 3, 2, mesh=mesh, reshard=int(axis[-1]), **options)
            assert (axis, "backward") in gathers(lowered)
            assert distance(state, plain(case, 2)[0]) <= 1e-10


def test_in_micro_batches():
    with default_dtype(torch.float64):
        case = CASES["mlp_momentum"]
        parts = slices(batches(case, 1)[0], 4)
        states = []
        for reshard in ("always", 2):
            transforms = zt.shard_params(MESH, reshard=reshard), *ALL, zt.accumulate(3)
            lowered = zt.chain(*transforms)(case.step).lower(case.state(), *parts[0])
            states.append(lowered.lockstep(case.state(), parts)[0])
        assert distance(*states) == 0
        assert ("dp/2", "backward") in gathers(lowered)


def test_where_all_ranks_are_neighbours_parameters_are_gathered_as_always():
    """So the same script runs on one host, and on one rank."""
    for ranks in (1, 2, 4):
        case = CASES["mlp_momentum"]
        mesh = zt.AbstractMesh(dp=ranks)
        always, parts = (
            on_ranks(case, ranks, zt.shard_params(mesh, reshard=reshard), *ALL)
            for reshard in ("always", 4)
        )
        texts = ([zt.ir.equation(e) for e in low.graph.eqns] for low in (always, parts))
        assert next(texts) == next(texts)


def test_errors():
    with pytest.raises(ValueError, match="reshard=1; it is a number of neighbours, at least 2"):
        zt.shard_params(MESH, reshard=1)
    with pytest.raises(ValueError, match="or 'auto', or 'always'"):
        zt.shard_params(MESH, reshard="host")
    with pytest.raises(ValueError) as error:
        lower(mesh=MESH, reshard=3)
    assert str(error.value) == (
        "shard_params: reshard=3, which does not divide the 4 ranks of 'dp'.\n"
        "Use the number of ranks that a host has on this axis, or 'auto'."
    )
