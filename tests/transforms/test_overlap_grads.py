"""overlap_grads as text: reductions start where gradients are born."""

import pytest
from net import lower
from programs import CASES
from worlds import sharded

import ztrans as zt
from ztrans.collectives import REDUCE_SCATTER
from ztrans.graph import is_view_or_cast


def test_program(golden):
    """The casts of both gradients, which autograd runs last, are done where the matmuls are."""
    assert str(lower(zt.overlap_grads())) == golden


def test_diff(golden):
    assert zt.diff(lower(), lower(zt.overlap_grads())) == golden


@pytest.mark.parametrize("name", ["gpt_adam", "cast_inside", "cast_outside", "autocast"])
def test_every_reduction_starts_where_its_last_member_is_born(name):
    _, _, lowered = sharded(CASES[name], 4, steps=1, transforms=(zt.overlap_grads(),))
    eqns = lowered.graph.eqns
    at = {out: i for i, e in enumerate(eqns) for out in e.outs}
    made = {out: e for e in eqns for out in e.outs}
    readers: dict = {}
    for e in eqns:
        for v in e.ins:
            readers.setdefault(v, []).append(e)

    def born(v):
        while is_view_or_cast(made[v]) and len(readers[v]) == 1:
            v = made[v].ins[0]
        return at[v]

    for i, e in enumerate(eqns):
        if e.op is REDUCE_SCATTER and e.provenance.role == "grad":
            between = eqns[max(map(born, e.ins)) + 1 : i]
            # Only views, casts, other collectives and updates that came in lie between a gradient's birth and its reduction.
            moved = (is_view_or_cast(b) or b.provenance or str(b.op) == "wait" or b.region == "update" for b in between)
            assert all(moved), (name, e)


def test_the_size_of_a_bucket_can_be_given():
    def sizes(**options):
        _, _, lowered = sharded(CASES["gpt_adam"], 4, steps=1, transforms=(zt.overlap_grads(**options),))
        found = [e for e in lowered.graph.eqns if e.op is REDUCE_SCATTER and e.provenance.role == "grad"]
        return [sum(v.numel * v.dtype.itemsize for v in e.ins) for e in found], found  # in bytes

    assert all(len(e.ins) == 1 for e in sizes(bucket=0)[1]), "each gradient alone"
    for cap in (1000, 4000):
        found, eqns = sizes(bucket=cap)
        assert all(size <= cap or len(e.ins) == 1 for size, e in zip(found, eqns))
