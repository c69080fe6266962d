"""calibrate: a link for every axis of a mesh."""

from __future__ import annotations

import pytest

import ztrans as zt
from tests.support import dtensors


@pytest.mark.slow
def test_a_matmul_that_takes_longer_than_a_burst_is_measured(monkeypatch):
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.0)
    ((cluster,),) = dtensors.on_ranks([0], lambda mesh: [zt.calibrate(mesh)], dp=2)
    assert cluster.link("dp").bandwidth > 0


@pytest.mark.slow
def test_every_axis_has_a_link_and_joint_axes_that_of_their_slowest_member(monkeypatch):
    """The other ranks are fake, so messages arrive at once."""
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.01)
    (cluster,) = dtensors.on_ranks([0], zt.calibrate, dp=2, cp=2, one=1)
    names = {axis: link.name for axis, link in cluster.links}
    assert names == {"dp": "local", "cp": "local", "one": "local"}
    assert cluster.link("dp").overhead > 0
    slowest = min(cluster.link("dp"), cluster.link("cp"), key=lambda link: link.bandwidth)
    assert cluster.link("dp*cp") == slowest
    assert cluster.link("dp*one") == cluster.link("dp"), (
        "an axis of one rank has a link that costs nothing"
    )
