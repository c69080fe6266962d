"""overlap_grads as text: reductions start where gradients are born."""

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


def test_every_reduction_starts_at_birth():
    for name in ("gpt_adam", "cast_inside", "cast_outside", "autocast"):
        _, _, lowered = sharded(CASES[name], 4, steps=1, transforms=(zt.overlap_grads(),))
        eqns = lowered.graph.eqns
        at = {out: i for i, e in enumerate(eqns) for out in e.outs}
        made = {out: e for e in eqns for out in e.outs}
        readers: dict = {}
        for e in eqns:
            for v in e.ins:
                readers.setdefault(v, []).append(e)
        for i, e in enumerate(eqns):
            if e.op is REDUCE_SCATTER and e.provenance.role == "grad":
                (v,) = e.ins
                while is_view_or_cast(made[v]) and len(readers[v]) == 1:
                    v = made[v].ins[0]
                between = eqns[at[v] + 1 : i]
                # Only views, casts and other collectives lie between a gradient's birth and its reduction.
                assert all(is_view_or_cast(b) or b.provenance or str(b.op) == "wait" for b in between), (name, e)


def test_bytes_under_way_are_bounded():
    for bound in (0, 1000, 5000):
        _, _, lowered = sharded(CASES["gpt_adam"], 4, steps=1, transforms=(zt.overlap_grads(max_in_flight=bound),))
        under_way, most = {}, 0
        for e in lowered.graph.eqns:
            if e.op is REDUCE_SCATTER:
                under_way[e.outs[0]] = e.ins[0].numel * 4
            elif str(e.op) == "wait":
                under_way.pop(e.args[0], None)
            else:  # while anything is computed
                assert sum(under_way.values()) <= bound or len(under_way) <= 2
                most = max(most, len(under_way))
        assert most >= 2
