"""Latency and bandwidth of a link are recovered from synthetic timings, of single messages and of whole steps."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ztrans.planning.cluster import Link
from ztrans.planning.network import Message
from ztrans.planning.play import play
from ztrans.profiling.link_fit import Observed, Sample, fit, fit_to_step, solve, with_send_cost

GUESS = Link("wire", latency=1e-4, bandwidth=1e9, hop=7e-6, byte_overhead=3e-10)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = [4096 * 4**k for k in range(8)]


def samples(
    true: Link, noise: float = 0.0, sizes=SIZES, each: int = 3, ranks: int = 2
) -> list[Sample]:
    chance = random.Random(0)
    return [
        Sample(kind, n, sum(true.seconds(kind, n, ranks)) * chance.lognormvariate(0, noise))
        for kind in KINDS for n in sizes for _ in range(each)
    ]  # fmt: skip


@pytest.mark.parametrize("latency, bandwidth", [(3e-5, 4e10), (1e-3, 1.2e8), (5e-2, 1e6)])
@pytest.mark.parametrize("noise, tolerance", [(0.0, 0.03), (0.1, 0.1), (0.3, 0.25)])
def test_latency_and_bandwidth_are_recovered_from_noisy_samples(
    latency, bandwidth, noise, tolerance
):
    true = dataclasses.replace(GUESS, latency=latency, bandwidth=bandwidth, hop=0.0)
    # As in calibration, sizes on both sides of the size at which latency and transfer take equal times.
    middle = latency * bandwidth
    link = fit(
        dataclasses.replace(GUESS, hop=0.0),
        samples(true, noise, [middle * 4.0**k for k in range(-4, 5)]),
        2,
    )
    assert link.latency == pytest.approx(
        latency, rel=tolerance
    ) and link.bandwidth == pytest.approx(bandwidth, rel=tolerance)
    if not noise:
        assert link.efficiency == ()


def test_the_efficiency_of_each_kind_is_recovered():
    true = dataclasses.replace(
        GUESS,
        latency=2e-4,
        bandwidth=1e8,
        efficiency=(("all_reduce", 0.5), ("reduce_scatter", 0.8)),
    )
    link = fit(GUESS, samples(true, 0.05), 2)
    assert dict(link.efficiency) == {
        "all_reduce": pytest.approx(0.5, rel=0.1),
        "reduce_scatter": pytest.approx(0.8, rel=0.1),
    }
    assert link.bandwidth == pytest.approx(1e8, rel=0.1), (
        "the bandwidth of a link is that of its gathers"
    )


def test_outliers_change_the_fit_little():
    true = dataclasses.replace(GUESS, latency=2e-4, bandwidth=1e8)
    held = [
        s._replace(seconds=s.seconds * 50) if i % 12 == 5 else s
        for i, s in enumerate(samples(true, 0.05))
    ]
    link = fit(GUESS, held, 2)
    assert link.latency == pytest.approx(2e-4, rel=0.2) and link.bandwidth == pytest.approx(
        1e8, rel=0.2
    )


def test_figures_that_the_samples_do_not_determine_stay():
    """Small messages do not determine the bandwidth. No message determines `hop` or `byte_overhead`."""
    true = dataclasses.replace(GUESS, latency=1e-2)
    link = fit(GUESS, samples(true, 0.0, [64, 256]), 2)
    assert link.latency == pytest.approx(1e-2, rel=0.05) and link.bandwidth == pytest.approx(
        1e9, rel=0.05
    )
    assert (link.name, link.hop, link.byte_overhead) == (GUESS.name, GUESS.hop, GUESS.byte_overhead)
    assert (
        fit(GUESS, [], 2)
        == fit(GUESS, [Sample("all_gather", 0, 1.0), Sample("all_gather", 9, 0.0)], 2)
        == GUESS
    )


def test_a_known_hop_is_not_counted_as_latency():
    true = dataclasses.replace(GUESS, latency=2e-4, bandwidth=1e8, hop=1e-4)
    link = fit(dataclasses.replace(GUESS, hop=1e-4), samples(true, ranks=8), 8)
    assert link.latency == pytest.approx(2e-4, rel=0.05)


def test_the_compute_time_of_sending_is_recovered():
    """From messages of many sizes. Messages of one size determine only the sum of `overhead` and `byte_overhead` times bytes."""
    chance = random.Random(3)
    sizes = [1e3, 5e3, 3e5, 6e5, 1e6, 3e6] * 4
    link = with_send_cost(
        GUESS, [(n, (3e-4 + n * 6e-10) * chance.lognormvariate(0, 0.1)) for n in sizes]
    )
    assert link.overhead == pytest.approx(3e-4, rel=0.15) and link.byte_overhead == pytest.approx(
        6e-10, rel=0.15
    )
    assert (
        dataclasses.replace(link, overhead=GUESS.overhead, byte_overhead=GUESS.byte_overhead)
        == GUESS
    )
    equal = with_send_cost(GUESS, [(1e6, 2e-3)] * 9)
    assert equal.overhead + 1e6 * equal.byte_overhead == pytest.approx(2e-3, rel=0.05)
    assert with_send_cost(GUESS, []) == with_send_cost(GUESS, [(0.0, 1e-3), (1e3, 0.0)]) == GUESS


def test_solve_without_unknowns():
    assert solve(lambda x: [], [], []) == []


# The messages of a step queue and share the wire, so the time that a message takes depends on the others.


def played(true: Link, noise: float) -> list[Observed]:
    """Messages in two lanes, issued much faster than the link can send them."""
    chance, wanted, sent = random.Random(1), [], []
    for k in range(40):
        kind, lane = (("all_gather", "dp gather"), ("reduce_scatter", "dp reduce"))[k % 2]
        received = 20_000 * chance.randrange(1, 60)
        wanted.append((kind, lane, received))
        sent.append(Message(k, 40, lane, "wire", *true.seconds(kind, received, 2)))
    gap = 2e-3
    done = play([gap] * 39 + [0.0], sent).end
    return [
        Observed("dp", 2, kind, received, lane, k * gap, k * gap + (end - k * gap) * chance.lognormvariate(0, noise))
        for k, ((kind, lane, received), end) in enumerate(zip(wanted, done))
    ]  # fmt: skip


@pytest.mark.parametrize("noise, tolerance", [(0.0, 0.05), (0.05, 0.1)])
def test_a_link_is_recovered_from_messages_that_queue(noise, tolerance):
    true = dataclasses.replace(GUESS, latency=1e-3, bandwidth=1e8)
    ((axis, link),) = fit_to_step((("dp", GUESS),), played(true, noise))
    assert axis == "dp" and link.bandwidth == pytest.approx(1e8, rel=tolerance)
    naive = max(m.done - m.issued for m in played(true, noise))
    assert naive > 5 * max(sum(true.seconds(m.kind, m.received, 2)) for m in played(true, noise)), (
        "the messages must queue, else the test is too easy"
    )


def test_equal_messages_do_not_separate_latency_from_bandwidth():
    """They determine only the total time. If the known figures explain it, they stay."""
    chance, known = random.Random(2), dataclasses.replace(GUESS, latency=1e-3, bandwidth=1e8)
    seen = [
        Observed("dp", 2, "all_reduce", 2_000_000 + k, "dp reduce", k * 0.1, k * 0.1 + (1e-3 + 2e-2) * chance.lognormvariate(0, 0.2))
        for k in range(12)
    ]  # fmt: skip
    ((_, link),) = fit_to_step((("dp", known),), seen)
    assert link.bandwidth == pytest.approx(1e8, rel=0.15) and link.latency == pytest.approx(
        1e-3, rel=0.5
    )


def test_the_link_of_an_axis_without_messages_stays():
    links = (("dp", GUESS), ("tp", dataclasses.replace(GUESS, name="other")))
    fitted = dict(
        fit_to_step(links, played(dataclasses.replace(GUESS, latency=1e-3, bandwidth=1e8), 0.0))
    )
    assert fitted["tp"] == links[1][1] and fitted["dp"] != GUESS
    assert fit_to_step(links, []) == links


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (1e-3, 1e8), (2e-5, 5e10)])
def test_a_link_is_recovered_from_a_guess_that_is_far_off(latency, bandwidth):
    """The latency must not rise. From a guess of 5e10 B/s a small change of bandwidth has no effect on any message."""
    start = (("dp", Link("wire", latency, bandwidth)),)
    equal = [
        Observed("dp", 2, "all_gather", 10**6, "dp gather", k * 0.5, k * 0.5 + 0.1)
        for k in range(3)
    ]
    kinds = [("all_gather", "dp gather"), ("reduce_scatter", "dp reduce")]
    mixed = [
        Observed(
            "dp", 2, kinds[k % 2][0], 10**6 * (1 + k % 3), kinds[k % 2][1], k * 0.02, k * 0.2 + 0.3
        )
        for k in range(12)
    ]
    for observed in (equal, mixed):
        ((_, link),) = fit_to_step(start, observed)
        assert link.bandwidth == pytest.approx(1e7, rel=0.15)
        assert link.latency < 2 * latency
