"""Clusters: the shipped profiles, the errors of wrong names and missing links, and calibration on one rank."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.collectives import ALL_GATHER, REDUCE_SCATTER, reduce
from ztrans.ir.graph import Eqn, Graph, Partial, Provenance, Split, Var
from ztrans.ir.op_facts import is_matmul
from ztrans.planning.cluster import LINKS, Device, Link, default_cluster, default_device
from ztrans.planning.devices import A100, CPU, DEVICES, H100, H200
from ztrans.planning.durations import (
    equation_seconds,
    messages,
    product_share,
    signature,
    transfers,
)
from ztrans.planning.formulate import formulate
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.problem import Wire

INF = float("inf")


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_plausible(name):
    device = zt.cluster(name).device
    assert zt.cluster(name.upper()).device is device is DEVICES[name]
    assert (
        device.rate("bf16") > 1e10
        and device.bandwidth >= 1e10
        and 1e-6 <= device.kernel_gap <= 1e-5
    )
    assert device.rate("i64") == device.rate("f32"), "a dtype without a figure counts as f32"


@pytest.fixture
def precision():
    """Sets the precision that PyTorch allows for fp32 products; the old one is restored after the test."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


def product_seconds(f, *shapes) -> float:
    """The seconds of the only product or convolution in the program of `f`, on an H100 without launch costs."""
    bare = dataclasses.replace(H100, kernel_gap=0.0, launch_overhead=0.0, edge=0.0, bandwidth=INF)
    program = zt.Step.of(lambda state, *args: (state, f(*args))).lower(
        torch.zeros(1), *(torch.empty(s, device="meta") for s in shapes)
    )
    return max(equation_seconds(program.graph, zt.cluster(bare)))


def test_durations_are_measured_for_the_largest_part_of_a_cut_value():
    x, y = (Var(name, torch.float32, (5, 4), (Split("dp"),)) for name in "xy")
    relu = Eqn(torch.ops.aten.relu.default, (x,), (y,))
    graph = Graph("f", (x,), (relu,), (y,), 1, mesh=(("dp", 2),))
    assert signature(relu, graph) == "relu(f32[3, 4])"


@pytest.mark.parametrize("asked, rate", [("highest", "f32"), ("high", "tf32"), ("medium", "tf32")])
def test_fp32_products_run_in_tf32_if_pytorch_may_use_it(precision, asked, rate):
    precision(asked)
    assert product_seconds(torch.mm, (1024, 1024), (1024, 1024)) == pytest.approx(
        2 * 1024**3 / H100.rate(rate)
    )
    assert product_seconds(
        lambda a, b: a.bfloat16() @ b.bfloat16(), (1024, 1024), (1024, 1024)
    ) == pytest.approx(2 * 1024**3 / H100.rate("bf16"))


@pytest.mark.parametrize("allowed, rate", [(True, "tf32"), (False, "f32")])
def test_convolutions_run_in_tf32_if_cudnn_may_use_it(precision, allowed, rate):
    precision("highest")
    torch.backends.cudnn.allow_tf32 = allowed
    took = product_seconds(torch.conv2d, (8, 64, 32, 32), (64, 64, 3, 3))
    assert took == pytest.approx(2 * 8 * 64 * 64 * 9 * 30 * 30 / H100.rate(rate))


def test_the_newer_setting_of_precision_counts_too(precision):
    """Where `torch.backends.cuda.matmul.fp32_precision` is set, `torch.get_float32_matmul_precision()` may raise."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    took = product_seconds(torch.mm, (1024, 1024), (1024, 1024))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert took == pytest.approx(2 * 1024**3 / H100.rate("tf32"))


@pytest.mark.parametrize("name", ["h100", "h200", "a100"])
def test_tf32_is_a_rate_of_its_own(name):
    """Tensor cores compute fp32 products only as TF32. Plain fp32 is about seven times slower."""
    device = zt.cluster(name).device
    assert (
        5 < device.rate("tf32") / device.rate("f32") < 10
        and device.rate("bf16") / device.rate("tf32") < 2.1
    )
    assert CPU.rate("tf32") == CPU.rate("f32"), (
        "without a figure of its own, TF32 is as fast as f32"
    )


def test_newer_devices_and_links_are_faster():
    assert H200.bandwidth > H100.bandwidth > A100.bandwidth > CPU.bandwidth
    assert H100.rate("bf16") > A100.rate("bf16") and H200.memory > H100.memory
    speeds = [
        LINKS[name].bandwidth
        for name in (
            "nvlink4",
            "nvlink3",
            "infiniband-rail",
            "infiniband",
            "ethernet-100g",
            "ethernet-10g",
            "ethernet-1g",
        )
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_seconds_of_a_link():
    """Each rank beyond two adds a hop of latency; an all_reduce counts twice. Each kind has its own bandwidth."""
    link = Link("wire", 1e-3, 1e6, hop=1e-4, efficiency=(("all_reduce", 0.5),))
    assert link.seconds("all_gather", 1e6, 4) == pytest.approx((1.3e-3, 1.0))
    assert link.seconds("all_reduce", 1e6, 4) == pytest.approx((1.6e-3, 2.0))


def test_an_all_reduce_of_few_bytes_goes_by_a_tree_and_one_of_many_by_a_ring():
    link = Link("wire", 1e-5, 1e9, hop=1e-6, tree=0.9)
    ring, tree = link.ways("all_reduce", 1e3, 64)
    assert ring == pytest.approx((1e-5 + 2 * 63e-6, 1e-6))
    assert tree == pytest.approx((1e-5 + 2 * 6e-6, 1e-6 / 0.9))
    crossing = 2 * (63e-6 - 6e-6) / (1 / 0.9 - 1) * 1e9
    for share, way in ((0.99, 1), (1.01, 0)):
        received = share * crossing
        ways = link.ways("all_reduce", received, 64)
        assert link.seconds("all_reduce", received, 64) == ways[way]
    assert len(link.ways("all_gather", 1e3, 64)) == len(link.ways("reduce_scatter", 1e3, 64)) == 1
    assert len(dataclasses.replace(link, tree=0.0).ways("all_reduce", 1e3, 64)) == 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_more_bytes_and_more_ranks_never_take_less(kind):
    for link in (*LINKS.values(), zt.by_host(8, "nvlink4", "infiniband")):
        by_size = [sum(link.seconds(kind, 10.0**n, 64)) for n in range(10)]
        by_ranks = [sum(link.seconds(kind, 1e6, 2**n)) for n in range(1, 11)]
        assert by_size == sorted(by_size) and by_ranks == sorted(by_ranks)


def test_hops_inside_of_a_host_are_those_of_its_link():
    inside, between = LINKS["nvlink4"], LINKS["infiniband"]
    link = zt.by_host(8, inside, between)
    one_host, _ = link.seconds("all_gather", 1e6, 8)
    assert one_host == inside.seconds("all_gather", 1e6, 8)[0]
    two_hosts, _ = link.seconds("all_gather", 1e6, 16)
    assert two_hosts == pytest.approx(between.latency + between.hop + 14 * inside.hop)
    flat = dataclasses.replace(link, inside=None)  # as the link of a joint axis
    assert flat.seconds("all_gather", 1e6, 16)[0] == between.seconds("all_gather", 1e6, 16)[0]
    _, (tree, _) = link.ways("all_reduce", 1e6, 64)
    assert tree == pytest.approx(between.latency + 2 * (3 * between.hop + 7 * inside.hop))


def test_the_planner_takes_the_same_way_as_the_simulation():
    link = Link("wire", 1e-4, 1e9, hop=1e-5, tree=0.9)
    wire = Wire(
        "dp reduce",
        "wire",
        *link.ways("all_reduce", 1, 64)[0],
        tree=link.ways("all_reduce", 1, 64)[1],
    )
    for size in (10**3, 10**6, 10**9):
        assert wire.travel(size) == pytest.approx(link.seconds("all_reduce", size, 64))
    assert wire.least_latency == pytest.approx(1e-4 + 2 * 6e-5)


def test_measured_seconds_are_replaced_by_newer_ones():
    base = zt.cluster("cpu", dp="ethernet-1g").with_measured({"mm": 1.0})
    assert dict(base.with_measured({"mm": 2.0, "add": 3.0}).measured) == {"mm": 2.0, "add": 3.0}
    assert hash(base) == hash(zt.cluster("cpu", dp="ethernet-1g").with_measured({"mm": 1.0}))


def test_without_a_cluster_one_is_assumed():
    assert default_cluster(default_device("cpu"), {"dp": 2}) == zt.cluster("cpu", dp="ethernet-1g")
    assert default_cluster(default_device("cuda"), {"dp": 2, "tp": 4}) == zt.cluster(
        "h100", dp="infiniband", tp="infiniband"
    )


MINE = Device("mine", (("f32", 1.0),), 1.0, 1.0)


@pytest.mark.parametrize("make, message", [
    (lambda: zt.cluster("b300"), "cluster: no profile of device 'b300'; there are h100, h200, a100, cpu, "
     "h100_96gb_500w, b200, mi300x, rtx4090."),
    (lambda: zt.cluster("h100", dp="string"),
     "cluster: no profile of link 'string' for axis 'dp'; there are nvlink4, nvlink3, infiniband, infiniband-rail, "
     "ethernet-1g, ethernet-10g, ethernet-100g."),
    (lambda: zt.cluster(MINE, dp=Link("w", 1e-3, 0.0)),
     "cluster: Link(name='w', latency=0.001, bandwidth=0.0, hop=0.0, efficiency=(), byte_overhead=0.0, overhead=0.0, unpack=()) for axis 'dp': "
     "bandwidth must be positive, latency not negative."),
    (lambda: zt.cluster(MINE, dp=Link("w", -1.0, 1.0)),
     "cluster: Link(name='w', latency=-1.0, bandwidth=1.0, hop=0.0, efficiency=(), byte_overhead=0.0, overhead=0.0, unpack=()) for axis 'dp': "
     "bandwidth must be positive, latency not negative."),
    (lambda: zt.cluster("h100", host_link="string"),
     "cluster: no profile of link 'string' to the host; there are pcie4, pcie5, c2c, memory."),
    (lambda: zt.cluster("h100", tp="nvlink4").link("dp"),
     "cluster: no link for mesh axis 'dp'; it knows 'tp'.\n"
     "Say what it crosses: zt.cluster('h100', dp='infiniband'), or measure it with zt.calibrate(mesh)."),
    (lambda: zt.cluster(MINE).link("dp"),
     "cluster: no link for mesh axis 'dp'; it knows none.\n"
     "Say what it crosses: zt.cluster(device, dp='infiniband'), or measure it with zt.calibrate(mesh)."),
])  # fmt: skip
def test_wrong_clusters_are_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("missing", ["dp", "host"])
def test_every_axis_that_is_communicated_over_needs_a_link(missing):
    shard = zt.shard_params(zt.AbstractMesh(host=2, dp=2), replicate_axis="host")
    links = {axis: "infiniband" for axis in ("host", "dp") if axis != missing}
    with pytest.raises(ValueError, match=f"cluster: no link for mesh axis '{missing}'; it knows '"):
        on_ranks(
            CASES["mlp_momentum"],
            4,
            shard,
            zt.overlap_grads(),
            zt.prefetch(),
            cluster=zt.cluster("h100", **links),
        )


def test_a_timeline_needs_a_link_too():
    lowered = on_ranks(CASES["mlp_momentum"], 2, zt.shard_params(zt.AbstractMesh(dp=2)))
    with pytest.raises(ValueError, match="cluster: no link for mesh axis 'dp'; it knows none"):
        lowered.timeline(zt.cluster("cpu"))
    fast = lowered.timeline(zt.cluster("cpu", dp=Link("w", 1e-6, 1e12)))
    slow = lowered.timeline(zt.cluster("cpu", dp=Link("w", 1e-6, 1e3)))
    assert slow.seconds > fast.seconds


def test_the_cost_of_unpacking_counts_for_every_message_of_its_kind():
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    lowered = on_ranks(CASES["mlp_momentum"], 2, shard, zt.overlap_grads(), zt.prefetch())
    cluster = zt.cluster("cpu", dp=Link("w", 1e-6, 1e6))
    slow = zt.cluster("cpu", dp=Link("w", 1e-6, 1e6, unpack=(("reduce_scatter", 1e-3),)))
    s = skeleton(lowered.unordered)
    problem = formulate(s, slow, INF)
    assert {problem.wires[r.key].unpack for r in problem.reductions} == {1e-3}
    assert {problem.wires[g.key].unpack for g in problem.gathers} == {0.0}
    reduced = sum(r.wire for r in problem.reductions)
    assert lowered.cost_analysis().over(role="grad") == reduced > 0
    took = sum(equation_seconds(lowered.graph, slow)) - sum(
        equation_seconds(lowered.graph, cluster)
    )
    assert took == pytest.approx(1e-3 * reduced, rel=0.01)


def test_calibrate_refuses_an_abstract_mesh():
    with pytest.raises(ValueError, match=r"AbstractMesh\(dp=2\) has no devices"):
        zt.calibrate(zt.AbstractMesh(dp=2))


def test_calibrate_measures_the_device_on_one_rank():
    mesh = zt.make_mesh("cpu", dp=1)
    try:
        cluster = zt.calibrate(mesh)
    finally:
        torch.distributed.destroy_process_group()
    assert cluster.links == () and cluster.device.name.startswith("cpu, ")
    assert 1e8 < cluster.device.rate("f32") < 1e14 and 1e8 < cluster.device.bandwidth < 1e13
    assert (
        1e-8 < cluster.device.kernel_gap < 1e-3
        and dataclasses.asdict(cluster.device)["memory"] > 1e8
        and 0.1 < cluster.device.coding < 100
    )


BF16, F32 = torch.bfloat16, torch.float32
TWO_HOSTS = zt.cluster("h100", dp=zt.by_host(8, "nvlink4", "infiniband"))
ON_CPUS = zt.cluster("cpu", dp=zt.by_host(2, "ethernet-10g", "ethernet-1g"))


def reduced(dtype, wire=None, rows=32):
    g = Var("g", dtype, (rows, 3), (Partial("dp", "sum"),))
    return reduce(
        [g], ["f"], "dp", "mean", Split("dp"), wire, provenance=Provenance("grad", ("w",), "dp")
    )


def charged(cluster, eqn, ranks, fast):
    """The bytes that a message takes of its link, by its route; the link inside a host is `fast` times as fast."""
    by = cluster.route(eqn, {"dp": ranks})
    whole = 32 * 3 * (eqn.kwargs["dtype"] or eqn.ins[0].dtype).itemsize
    received = whole * (ranks - 1) / ranks
    # A ring sends inside of hosts and between them at once; the two levels of a hierarchical exchange follow one another, or have a lane each.
    weight = cluster.charge_factor(eqn, {"dp": ranks})
    charged = by.between + by.inside / fast
    if by.way == "ring":
        charged = max(by.between, by.inside / fast)
    elif cluster.has_two_lanes(eqn, {"dp": ranks}):
        charged = by.between
    assert weight * received == pytest.approx(charged)
    assert cluster.charge_factor_inside(eqn, {"dp": ranks}) * received == pytest.approx(by.inside)
    return by.inside / whole, by.between / whole


@pytest.mark.parametrize("eqn, inside, between", [
    (reduced(BF16), 7 / 8, 2 / 16),  # the sums of hosts in fp32
    (reduced(F32, BF16), 7 / 8, 1 / 16),
    (reduced(F32), 15 / 16 * 7 / 8, 15 / 16 / 8),  # the ring of NCCL: a host receives 15/16
])  # fmt: skip
def test_a_reduction_takes_of_its_link_what_is_sent_between_hosts(eqn, inside, between):
    fast = LINKS["nvlink4"].bandwidth / LINKS["infiniband"].bandwidth
    assert charged(TWO_HOSTS, eqn, 16, fast) == (pytest.approx(inside), pytest.approx(between))


def test_on_one_host_a_message_takes_the_seconds_of_the_link_inside():
    within = TWO_HOSTS.charge_factor(reduced(BF16), {"dp": 8})
    assert within == pytest.approx(LINKS["infiniband"].bandwidth / LINKS["nvlink4"].bandwidth)
    assert zt.cluster("h100", dp="infiniband").charge_factor(reduced(BF16), {"dp": 8}) == 1


def test_the_first_level_is_a_message_for_several_hosts():
    """Three exchanges of the terms for four hosts, as the memory of a plain exchange has room for."""
    graph = SimpleNamespace(axes={"dp": 32})
    first, second = transfers(reduced(BF16), graph, TWO_HOSTS)
    assert first.latency == 3 * LINKS["nvlink4"].seconds("reduce_scatter", 1, 8)[0]
    assert second.latency == LINKS["infiniband"].seconds("reduce_scatter", 1, 4)[0]


def test_a_measured_link_between_hosts_has_a_first_level_too():
    shard = zt.shard_params(zt.AbstractMesh(dp=4), reduce_dtype=BF16)
    lowered = on_ranks(CASES["mlp_momentum"], 4, shard)
    measured = dataclasses.replace(LINKS["infiniband"], includes_packing=True)
    cluster = zt.cluster("h100", dp=zt.by_host(2, "nvlink4", measured))
    levels = {e.op.name: message.inside for e, message, _ in messages(lowered.graph, cluster)}
    assert levels["reduce_scatter"].link == "nvlink4" and levels["all_gather"] is None


def test_hosts_of_an_axis_are_not_those_of_a_joint_axis():
    cluster = zt.cluster("h100", dp=zt.by_host(8, "nvlink4", "infiniband"), cp="nvlink4")
    assert (cluster.link("dp*cp").name, cluster.link("dp*cp").inside) == ("infiniband", None)


def sharded_over_two_hosts(cluster):
    shard = zt.shard_params(zt.AbstractMesh(dp=4))
    return on_ranks(
        CASES["mlp_momentum"], 4, shard, zt.overlap_grads(), zt.prefetch(), cluster=cluster
    )


def test_the_plan_says_which_way_reductions_go_and_the_simulation_charges_it():
    low = sharded_over_two_hosts(ON_CPUS)
    flat = zt.cluster("cpu", dp="ethernet-1g")
    way = "hierarchical exchange (sums inside each of 2 hosts first: 25% of the bytes come from other hosts, not 50%)"
    assert [note for note in low.plan.notes if " over dp: " in note] == [
        "all_gather over dp: hierarchical exchange (parts go to one rank of each of 2 hosts first: 25% of the bytes "
        "come from other hosts, not 50%)",
        f"reduce_scatter over dp: {way}",
        "all_reduce over dp: ring (gloo reduces f32 on the way)",
    ]
    assert not [note for note in sharded_over_two_hosts(flat).plan.notes if " over dp: " in note]
    sent = {
        c: {e: m for e, m, _ in messages(low.graph, c) if e.op is REDUCE_SCATTER}
        for c in (ON_CPUS, flat)
    }
    slow, fast = (LINKS[f"ethernet-{rate}g"].bandwidth for rate in (1, 10))
    assert sent[flat]
    for e, message in sent[flat].items():
        share = sent[ON_CPUS][e].seconds / message.seconds
        assert share == pytest.approx((1 / 4 + 1 / 2 * slow / fast) / (3 / 4)), (
            "of the whole value, by the bytes received"
        )
        assert sent[ON_CPUS][e].link == message.link
        fewer = 2 * (LINKS["ethernet-1g"].hop - LINKS["ethernet-10g"].hop)
        assert sent[ON_CPUS][e].latency == pytest.approx(message.latency - fewer), (
            "two of three hops are inside of a host"
        )


def test_the_planner_charges_what_the_simulation_charges():
    low = sharded_over_two_hosts(ON_CPUS)
    problem = formulate(skeleton(low.unordered), ON_CPUS, INF)
    planned = [
        (e, m, moved)
        for e, m, moved in messages(low.graph, ON_CPUS)
        # The gathers of parts among neighbours are levers, which this problem does not have.
        if e.op in (ALL_GATHER, REDUCE_SCATTER) and e.kwargs["axis"] == "dp"
    ]
    assert {e.op for e, _, _ in planned} == {ALL_GATHER, REDUCE_SCATTER}
    for e, message, moved in planned:
        paces = [wire.pace for key, wire in problem.wires.items() if key[0] is e.op]
        assert paces == pytest.approx([message.seconds / moved] * len(paces))


@pytest.mark.parametrize("make, message", [
    (lambda: zt.by_host(0, "nvlink4", "infiniband"), "by_host: a host has at least one rank, not 0."),
    (lambda: zt.by_host(8, "bus", "infiniband"),
     "by_host: no profile of link 'bus' inside a host; there are nvlink4, nvlink3, infiniband, infiniband-rail, "
     "ethernet-1g, ethernet-10g, ethernet-100g."),
    (lambda: zt.by_host(8, "nvlink4", "rail"),
     "by_host: no profile of link 'rail' between hosts; there are nvlink4, nvlink3, infiniband, infiniband-rail, "
     "ethernet-1g, ethernet-10g, ethernet-100g."),
    (lambda: zt.by_host(8, Link("bus", 1e-6, 0.0), "infiniband"),
     f"by_host: {Link('bus', 1e-6, 0.0)} inside a host: bandwidth must be positive, latency not negative."),
])  # fmt: skip
def test_wrong_hosts_are_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_what_carries_a_message_decides_what_products_lose():
    """As measured beside NCCL's blocks, a kernel for symmetric memory, and copy engines; gloo's messages take compute."""
    lost = {}
    for carrier in ("nccl", "kernel", "copies"):
        link = dataclasses.replace(LINKS["nvlink4"], carried_by=(("all_gather", carrier),))
        lost[carrier] = zt.cluster("h200", dp=link).lost_beside("dp", "all_gather")
        assert zt.cluster("h200", dp=link).lost_beside("dp", "reduce_scatter") == 0.30
    assert lost == {"nccl": 0.30, "kernel": 0.38, "copies": 0.07}
    assert zt.cluster("cpu", dp="ethernet-1g").lost_beside("dp", "all_gather") == 0.0


def test_only_products_lose_to_messages():
    """Kernels that wait for memory lose bandwidth instead."""
    x = torch.zeros(64, 64)

    def step(state, x):
        return state, (x @ x).exp()

    graph = zt.Step(step).trace(torch.zeros(1), x).graph
    seconds = [3.0 if is_matmul(e) else 1.0 for e in graph.eqns]
    assert [e.region for e in graph.eqns] == ["forward"] * 2
    assert product_share(graph, seconds) == 0.75


def test_the_products_of_gpu_md_take_what_was_measured():
    """Five products of 8,192 tokens and width 2,048, four times, took 5.96 ms on an H200 (`contention`)."""
    tokens, width = 8192, 2048
    sizes = [(tokens, width, 3 * width), (tokens, width, width), (tokens, width, 4 * width)]
    sizes += [(tokens, 4 * width, width), (width, tokens, 4 * width)]
    took = 0.0
    for rows, inner, columns in sizes:
        a, b = (
            torch.zeros(s, dtype=torch.bfloat16, device="meta")
            for s in ((rows, inner), (inner, columns))
        )
        step = zt.Step.of(lambda state, a, b: (state, a @ b))
        graph = step.trace(torch.zeros(1, device="meta"), a, b).graph
        took += 4 * sum(equation_seconds(graph, zt.cluster("h200")))
    assert took == pytest.approx(5.96e-3, rel=0.02)


def test_only_gloo_takes_compute_for_each_byte():
    """NCCL's messages take a share of the SMs instead; a GPU on Ethernet does not pay for both."""
    assert zt.cluster("cpu", dp="ethernet-10g").link("dp").byte_overhead > 0
    assert zt.cluster("h100", dp="ethernet-10g").link("dp").byte_overhead == 0
    two_levels = zt.cluster("h100", dp=zt.by_host(8, "ethernet-10g", "ethernet-1g")).link("dp")
    assert two_levels.byte_overhead == two_levels.inside.byte_overhead == 0
