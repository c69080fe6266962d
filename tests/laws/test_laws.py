"""The laws of SPEC.md that hold for all transforms: algebra, order, and equality to the bit."""

import itertools
import re
from collections import Counter

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES, autocast
from tests.support.worlds import ALL, on_ranks, sharded
from ztrans.ir.collectives import ALL_GATHER, is_start

MESH = zt.AbstractMesh(dp=4)
SHARD, OVERLAP, PREFETCH, FUSE = (
    zt.shard_params(MESH),
    zt.overlap_grads(),
    zt.prefetch(),
    zt.fuse_cast_gather(),
)


def step(state, batch):
    return state, batch


def test_monoid():
    assert (
        zt.chain(SHARD, zt.chain(OVERLAP, PREFETCH))
        == zt.chain(zt.chain(SHARD, OVERLAP), PREFETCH)
        == zt.chain(SHARD, OVERLAP, PREFETCH)
    )
    assert zt.chain()(step) == zt.Step(step)
    assert zt.chain(zt.chain(), SHARD, zt.chain()) == zt.chain(SHARD)
    assert zt.chain(SHARD, OVERLAP)(step).transforms == (SHARD, OVERLAP)


def test_stack_is_chain():
    @FUSE
    @PREFETCH
    @OVERLAP
    @SHARD
    def decorated(state, batch):
        return state, batch

    assert decorated == zt.chain(SHARD, OVERLAP, PREFETCH, FUSE)(decorated.fn)
    assert zt.chain(SHARD, OVERLAP)(step) == OVERLAP(SHARD(step))
    assert hash(zt.chain(SHARD, OVERLAP)) == hash(zt.chain(SHARD, OVERLAP))


def test_repr():
    assert repr(zt.chain(SHARD, OVERLAP, PREFETCH, FUSE)(step)) == (
        "Step(step, shard_params(axis='dp', stage=3), overlap_grads(), prefetch(), fuse_cast_gather())"
    )
    assert repr(zt.prefetch(max_in_flight=1)) == "prefetch(max_in_flight=1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stage", [("autocast", 2), ("autocast", 3), ("clipped", 0), ("sam", 3)]
)
def test_rewrites_and_schedules_commute(name, stage):
    """All six orders give the same program text, header included, and the same bits.

    Casts are fused with gathers at stages 2 and 3 alone; at stage 0 the plan has reductions alone.
    """
    case, shard = CASES[name], zt.shard_params(MESH, stage=stage)
    orders = list(itertools.permutations((OVERLAP, PREFETCH, FUSE)))
    assert len({str(on_ranks(case, 4, shard, *order)) for order in orders}) == 1
    states = [
        sharded(case, 4, stage, steps=2, transforms=order)[0] for order in (orders[0], orders[-1])
    ]
    assert all(torch.equal(a, b) for a, b in zip(*map(torch.utils._pytree.tree_leaves, states)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stage",
    [("autocast", 1), ("autocast", 3), ("cast_outside", 2), ("cast_outside", 3), ("gpt_adam", 3)],
)
def test_fuse_cast_gather_is_bitwise(name, stage):
    """At stages 1 and 2 a parameter is gathered once, and at stage 3 for backward too. The last step has no casts."""
    a, _, _ = sharded(CASES[name], 4, stage, 2, transforms=(OVERLAP, PREFETCH))
    b, _, _ = sharded(CASES[name], 4, stage, 2, transforms=(OVERLAP, PREFETCH, FUSE))
    assert all(torch.equal(x, y) for x, y in zip(*map(torch.utils._pytree.tree_leaves, (a, b))))


SCHEDULES = {"overlap": (OVERLAP,), "prefetch": (PREFETCH,), "both": (OVERLAP, PREFETCH)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stage, schedules",
    [
        *(("gpt_adam", stage, schedules) for stage in (0, 2, 3) for schedules in SCHEDULES),
        *(
            (name, stage, "both")
            for name in ("sam", "accumulation", "cast_inside", "clipped", "lora", "muon")
            for stage in (0, 3)
        ),
    ],
)
def test_schedules_permute(name, stage, schedules):
    """A schedule keeps every equation, except gathers that the plan drops. Collectives are compared member by member.

    One step has every schedule at every stage. The others have both schedules, with reductions alone and with all
    collectives.
    """
    shard = zt.shard_params(MESH, stage=stage)
    before, after = (
        on_ranks(CASES[name], 4, shard),
        on_ranks(CASES[name], 4, shard, *SCHEDULES[schedules]),
    )
    gone = members(before.graph) - members(after.graph)
    assert not members(after.graph) - members(before.graph)
    assert sum(gone.values()) == 2 * len(after.plan.dropped)  # a gather and its wait


def members(graph):
    counts = Counter(str(e.outs[0]) for e in graph.eqns if not is_start(e))
    counts.update(
        str((e.op, v, o)) for e in graph.eqns if is_start(e) for v, o in zip(e.ins, e.outs)
    )
    return counts


@pytest.mark.slow
def test_schedules_change_no_bit():
    a, _, _ = sharded(CASES["gpt_adam"], 4, transforms=())
    b, _, _ = sharded(CASES["gpt_adam"], 4, transforms=(OVERLAP, PREFETCH))
    assert all(torch.equal(x, y) for x, y in zip(*map(torch.utils._pytree.tree_leaves, (a, b))))


def test_idempotent():
    assert OVERLAP(OVERLAP(SHARD(step))) == OVERLAP(SHARD(step))
    assert zt.chain(SHARD, PREFETCH, PREFETCH, SHARD)(step) == zt.chain(SHARD, PREFETCH)(step)
    with pytest.raises(
        ValueError, match=re.escape("prefetch: applied twice with different options")
    ):
        zt.chain(SHARD, zt.prefetch(), zt.prefetch(max_in_flight=1))(step)


def test_shard_params_precedes():
    with pytest.raises(ValueError, match="Apply it first: as the innermost decorator"):
        zt.chain(OVERLAP, SHARD)(step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adam", "clipped", "per_sample", "autocast"])
def test_on_one_rank_the_collectives_vanish(name):
    lowered = on_ranks(CASES[name], 1, zt.shard_params(zt.AbstractMesh(dp=1)), *ALL)
    assert not any(is_start(e) for e in lowered.graph.eqns)
    assert "@dp" not in str(lowered).split("):")[0]


@pytest.mark.slow
def test_printing_is_deterministic_and_names_are_stable():
    a, b = (on_ranks(autocast(), 4, SHARD) for _ in range(2))  # two functions, so each is traced
    assert str(a) == str(b)
    scheduled = on_ranks(CASES["autocast"], 4, SHARD, OVERLAP, PREFETCH)
    names = lambda g: {o.name for e in g.graph.eqns for o in e.outs if o is not None}
    kept = {
        n for n in names(a) if ".full_1" in n
    }  # a parameter that is kept is not gathered a second time
    assert names(a) - kept <= names(scheduled) <= names(a)


def test_history_names_each_pass_that_changes_the_program():
    """On one rank nothing is sent; the moments wait on the host, so their copies find their places after the plan."""
    shard = zt.shard_params(zt.AbstractMesh(dp=1))
    lowered = on_ranks(CASES["adamw_fused"], 1, shard, zt.offload(where="m.*", at_least=0))
    names = [name for name, _ in lowered.history]
    assert names == [
        "make_fx", "trace", "shard_params", "offload", "erase_trivial", "plan", "lower",
    ]  # fmt: skip
    assert lowered.history[-1][1] is lowered.graph


def test_history_holds_every_stage_and_diff_shows_what_changed():
    lowered = on_ranks(CASES["autocast"], 4, SHARD, OVERLAP, PREFETCH, FUSE)
    assert [name for name, _ in lowered.history] == [
        "make_fx", "trace", "shard_params", "overlap_grads", "prefetch", "fuse_cast_gather", "lower",
    ]  # fmt: skip
    for _, graph in lowered.history[1:]:
        zt.ir.check(graph)
    stages = dict(lowered.history)
    changed = zt.ir.diff(stages["prefetch"], stages["fuse_cast_gather"])
    assert re.search(
        r"^-.*= all_gather\(\[params\.blocks\.0\.qkv\.weight\], axis=dp\)", changed, re.M
    )
    assert re.search(
        r"^\+.*= all_gather\(\[params\.blocks\.0\.qkv\.weight\], bf16, axis=dp\)", changed, re.M
    )


def test_every_transform_is_hashable_and_equal_by_options():
    assert zt.shard_params(MESH, stage=2) == zt.shard_params(zt.AbstractMesh(dp=4), stage=2)
    assert zt.shard_params(MESH, stage=2) != zt.shard_params(MESH, stage=3)
    assert len({OVERLAP, zt.overlap_grads(), PREFETCH, zt.prefetch()}) == 2
    assert len(set(ALL)) == 3


def test_gathers_have_the_role_and_path_of_their_parameters():
    lowered = on_ranks(CASES["gpt_adam"], 4, SHARD, *ALL)
    gathers = [e for e in lowered.graph.eqns if e.op is ALL_GATHER]
    assert gathers and all(
        e.provenance.role == "param" and e.provenance.axis == "dp" for e in gathers
    )
    paths = {path for e in gathers for path in e.provenance.paths}
    assert paths >= {"params.tokens.weight", "params.blocks.0.qkv.weight"}
    assert all(len(e.provenance.paths) == len(e.outs) for e in gathers)
