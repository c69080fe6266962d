"""calibrate: a link for every axis of a mesh."""

from __future__ import annotations

import pytest
import torch

import ztrans as zt
from tests.support import dtensors
from ztrans.profiling.calibrate import (
    _attention_rates,
    _median_seconds,
    _product_rate,
    _without_tf32,
)


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


def test_a_call_that_takes_all_of_a_burst_is_timed_once(monkeypatch):
    seconds = iter([9.0, 0.25, 1.0])  # the first one is the warm-up
    monkeypatch.setattr("ztrans.profiling.calibrate._seconds", lambda run, device: next(seconds))
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.25)
    assert _median_seconds(lambda: None, torch.device("cpu")) == 0.25


def test_a_product_grows_until_it_takes_5_ms(monkeypatch):
    seconds = {512: 1e-3, 1024: 8e-3}  # by the number of its rows
    monkeypatch.setattr("ztrans.profiling.calibrate._matmul", lambda n, dtype, device: n)
    monkeypatch.setattr("ztrans.profiling.calibrate._median_seconds", lambda n, device: seconds[n])
    assert _product_rate(torch.float32, torch.device("cpu")) == 2 * 1024**3 / 8e-3


def test_every_dtype_of_products_has_a_rate(monkeypatch):
    """A dtype without one counts as f32, which on a GPU is ten times too slow for fp16."""
    monkeypatch.setattr("ztrans.profiling.calibrate._BURST", 0.01)
    (cluster,) = dtensors.on_ranks([0], zt.calibrate, dp=1)
    rates = dict(cluster.device.flops)
    assert rates.keys() == {"f64", "f32", "bf16", "f16"}
    assert min(rates.values()) > 0 and rates["f64"] < rates["f32"]


def test_attention_is_measured_as_for_long_sequences(monkeypatch):
    """The clock of this test says that a call takes 1 ms. Backward has five products where forward has two."""
    monkeypatch.setattr(
        "ztrans.profiling.calibrate._median_seconds", lambda run, device: [run(), 1e-3][1]
    )
    forward, backward = _attention_rates(256, torch.device("cpu"))
    pairs = 2 * 32 * 256 * 128 * 128  # of a query and a key, times the width, of a product
    assert forward == pytest.approx(2 * pairs / 1e-3 * (128 + 75 + 90) / 128)
    assert backward == pytest.approx(5 * pairs / 1e-3 * (128 + 240 + 90) / 128)


def test_products_in_fp32_are_measured_without_tf32():
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        with _without_tf32():
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = before
