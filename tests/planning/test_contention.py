"""Messages and kernels that share the memory of a device."""

import dataclasses

import pytest

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.planning.cluster import LINKS, Link
from ztrans.planning.contention import Transfer, contended
from ztrans.planning.devices import CPU, H100
from ztrans.planning.simulate import simulate


def test_a_kernel_that_waits_for_memory_ends_later_by_what_the_stream_takes():
    (longer,) = contended([1.0], [2.0], [2.0], [Transfer(0.0, 4.0, 4e9)], 10e9)
    assert longer == pytest.approx(2.0 + 2 * 1e9 / 10e9)


def test_a_kernel_that_computes_longer_than_it_moves_bytes_loses_nothing():
    assert contended([0.0], [2.0], [1.0], [Transfer(0.0, 2.0, 10e9)], 10e9) == [2.0]
    (half,) = contended([0.0], [2.0], [1.5], [Transfer(0.0, 2.0, 10e9)], 10e9)
    assert half == pytest.approx(2.5)


def test_streams_add_up_and_count_only_while_they_move():
    streams = [Transfer(0.0, 1.0, 1e9), Transfer(0.5, 1.5, 2e9), Transfer(9.0, 10.0, 1e9)]
    (longer,) = contended([0.0], [1.0], [1.0], streams, 10e9)
    assert longer == pytest.approx(1.0 + (1e9 + 1e9) / 10e9)


def test_what_was_measured_and_what_takes_no_time_stays():
    assert contended([0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [Transfer(0.0, 2.0, 1e9)], 1e9) == [
        1.0,
        0.0,
    ]
    assert contended([0.0], [1.0], [1.0], [], 1e9) == [1.0]
    assert contended([0.0], [1.0], [1.0], [Transfer(0.0, 0.0, 1e9)], 1e9) == [1.0]


def test_on_a_gpu_messages_slow_the_kernels_that_wait_for_memory_and_on_a_cpu_they_do_not():
    shard = zt.shard_params(zt.AbstractMesh(dp=4))
    slow = dataclasses.replace(H100, bandwidth=1e6, launch_overhead=0.0)
    wire = Link("wire", 1e-6, 1e6)
    quiet = Link("wire", 1e-6, 1e-3)  # so slow that it moves no bytes while a kernel runs
    transforms = shard, zt.overlap_grads(), zt.prefetch()
    cluster = zt.cluster(slow, dp=wire)  # on which a plan has messages beside kernels
    lowered = on_ranks(CASES["mlp_momentum"], 4, *transforms, cluster=cluster)
    for device, slower in ((slow, 1.001), (CPU, 1.0)):
        beside, alone = (
            simulate(lowered.graph, zt.cluster(device, dp=link)).compute for link in (wire, quiet)
        )
        assert beside >= slower * alone * (1 - 1e-9)
        assert device is slow or beside == pytest.approx(alone)


def test_the_shipped_links_take_less_than_the_memory_has():
    """Otherwise a kernel beside a message would never end."""
    for name in ("nvlink4", "nvlink3", "infiniband", "infiniband-rail"):
        assert 3 * LINKS[name].bandwidth < zt.cluster("a100").device.bandwidth
