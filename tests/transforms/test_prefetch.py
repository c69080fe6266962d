"""prefetch as text: gathers start ahead of their use."""

from net import lower
from programs import CASES
from worlds import sharded

import ztrans as zt
from ztrans.collectives import ALL_GATHER, WAIT


def test_program(golden):
    assert str(lower(zt.prefetch())) == golden


def test_diff(golden):
    assert zt.diff(lower(), lower(zt.prefetch())) == golden


def ahead(lowered) -> int:
    """The most gathers under way at once."""
    most, under_way = 0, set()
    for e in lowered.graph.eqns:
        if e.op is ALL_GATHER:
            under_way.add(e.outs[0])
            most = max(most, len(under_way))
        elif e.op is WAIT:
            under_way.discard(e.args[0])
    return most


def test_more_bytes_more_ahead():
    def lowered(*transforms):
        return sharded(CASES["gpt_adam"], 4, steps=1, transforms=transforms)[2]

    depths = [ahead(lowered(*t)) for t in ((), (zt.prefetch(max_in_flight=0),), (zt.prefetch(max_in_flight=4096),))]
    assert depths[0] == 1 and depths[1] == 2 < depths[2]
    everything = lowered(zt.prefetch(max_in_flight=1 << 40)).graph.eqns
    gathers = [i for i, e in enumerate(everything) if e.op is ALL_GATHER]
    assert gathers == list(range(len(gathers))), "with no bound every gather starts at once"
