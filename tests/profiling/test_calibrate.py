"""calibrate: a link for every axis of a mesh, and for the joint axes that are asked for."""

from __future__ import annotations

import pytest

import ztrans as zt
from tests.support import dtensors


@pytest.mark.slow
def test_a_matmul_that_takes_longer_than_a_burst_is_measured(monkeypatch):
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.0)
    ((cluster,),) = dtensors.on_ranks([0], lambda mesh: [zt.calibrate(mesh)], dp=2)
    assert cluster.link("dp").bandwidth > 0


def test_joint_axes_are_measured_where_they_are_asked_for(monkeypatch):
    """The other ranks are fake, so messages arrive at once."""
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.01)

    def links(mesh):
        with pytest.raises(
            ValueError, match=r"calibrate: no mesh axis 'tp'; there are 'dp', 'cp', 'one'."
        ):
            zt.calibrate(mesh, joint=[("dp", "tp")])
        return zt.calibrate(mesh, {"dp": "rail"}, [("cp", "dp"), ("dp", "one")]), zt.calibrate(mesh)

    ((joint, single),) = dtensors.on_ranks([0], links, dp=2, cp=2, one=1)
    names = {axis: link.name for axis, link in joint.links}
    assert names == {"dp": "rail", "cp": "local", "dp*cp": "rail", "dp*one": "rail", "one": "local"}
    assert joint.link("dp*cp") != joint.link("dp") and joint.link("dp*cp").overhead > 0
    slowest = min(single.link("dp"), single.link("cp"), key=lambda link: link.bandwidth)
    assert single.link("dp*cp") == slowest, "derived where it is not measured"
    assert single.link("dp*one") == single.link("dp"), (
        "an axis of one rank has a link that costs nothing"
    )
