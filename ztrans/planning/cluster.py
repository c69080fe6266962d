"""cluster: the speeds of the machines that a schedule depends on.

A `Device` has matmul rates by dtype, a memory bandwidth, and the time to launch an operation. A `Link` has a latency
and a bandwidth. A `Cluster` says which link each mesh axis crosses. It may also hold measured durations of the
operations of a program, which are then used instead of the roofline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.axes import all_neighbours, members, neighbour_count, neighbours
from ..ir.collectives import rules
from ..ir.graph import Eqn
from ..ir.routes import TWO_LEVELS, Hosts, Route, route_of

# The multiprocessors that a message takes. NCCL's rings have so many blocks, as traces of steps on 8 GPUs show; what
# products lose beside them is what `benchmarks/gpu.py --only contention` measures.
TAKEN = 24

# Bytes in a GPU's memory besides the live ones of a step: the CUDA context with its kernels, the workspaces of cuBLAS
# and cuDNN, NCCL's buffers, and what PyTorch's allocator rounds up or cannot fill.
GPU_RESERVE = 4e9


@dataclass(frozen=True)
class Device:
    """The processor of one rank.

    The rate "tf32" is for fp32 products that PyTorch runs in TF32; "f32" is for all other fp32 products. PyTorch runs
    matmuls in TF32 if torch.get_float32_matmul_precision() is "high" or "medium" when the step is planned (by default
    it is not), and convolutions if torch.backends.cudnn.allow_tf32 is set (by default it is).
    """

    name: str
    flops: tuple[tuple[str, float], ...]  # (dtype, FLOP/s of matmuls)
    bandwidth: float  # bytes/s of memory
    launch: float  # seconds to launch a kernel
    memory: float = float("inf")  # bytes
    call: float = 1e-6  # seconds of the host for a call that launches no kernel, such as a view
    reserve: float = GPU_RESERVE  # bytes of the memory that a step may not have live
    # Whether gloo carries its collectives, not NCCL. Compute then packs and unpacks them; a GPU does so beside compute.
    gloo: bool = dataclasses.field(default=False, repr=False)
    host: str = "pcie5"  # the name of the link between its memory and that of its host
    # The share of the processor that a message takes while its bytes move.
    taken: float = dataclasses.field(default=0.0, repr=False)

    @property
    def limit(self) -> int | None:
        """The bytes that a step may have live, or None if that is not known.

        The memory of a CPU is shared with everything else on the host, so it is no limit.

        >>> H100.limit == H100.memory - GPU_RESERVE, CPU.limit
        (True, None)
        """
        if self.gloo or self.memory == float("inf"):
            return None
        return int(self.memory - self.reserve)

    def rate(self, dtype: str) -> float:
        """The FLOP/s of matmuls in `dtype`; for a dtype without a rate, those of f32.

        >>> H100.rate("bf16") > H100.rate("tf32") > H100.rate("f32") == H100.rate("i64")
        True
        """
        rates = dict(self.flops)
        return rates.get(dtype, rates["f32"])


@dataclass(frozen=True)
class Link:
    """The link through which one rank sends and receives."""

    name: str
    latency: float  # seconds for each message
    bandwidth: float  # bytes/s
    hop: float = 0.0  # more seconds for each message, for each further rank of the ring
    efficiency: tuple[tuple[str, float], ...] = ()  # (kind of collective, factor of the bandwidth)
    host: float = 0.0  # seconds of compute for each byte that is sent
    call: float = 0.0  # seconds of compute for each message that is sent
    # (kind, seconds of compute for each byte that has arrived)
    unpack: tuple[tuple[str, float], ...] = ()
    # Whether these figures, which were measured, have the time to pack messages, and on GPUs also to unpack them.
    whole: bool = dataclasses.field(default=False, repr=False)
    # With `by_host`: the link between the ranks of one host, and how many they are. They are neighbours on the axis.
    inside: Link | None = dataclasses.field(default=None, repr=False)
    local: int = dataclasses.field(default=1, repr=False)
    # Of a link to a host: the devices that share it, and copy at the same time.
    shared: int = dataclasses.field(default=1, repr=False)

    def seconds(self, kind: str, received: float, ranks: int) -> tuple[float, float]:
        """The latency of a collective over `ranks`, and the time in which its `received` bytes move.

        >>> Link("wire", latency=1e-3, bandwidth=1e6).seconds("all_gather", 5e5, 2)
        (0.001, 0.5)
        """
        latency = self.latency + self.hop * (ranks - 1) * (2 if kind == "all_reduce" else 1)
        return latency, received / (self.bandwidth * dict(self.efficiency).get(kind, 1.0))


# FLOP/s as large matmuls reach them, about 70% of the dense figure of the data sheet; bandwidth as a copy reaches it.
H100 = Device(
    "H100",
    (
        ("bf16", 690e12),
        ("f16", 690e12),
        ("tf32", 350e12),
        ("f32", 47e12),
        ("f64", 47e12),
        ("f8e4m3", 1380e12),
    ),
    2.9e12,
    4e-6,
    80e9,
    taken=TAKEN / 132,
)
H200 = dataclasses.replace(H100, name="H200", bandwidth=4.1e12, memory=141e9)
A100_RATES = (("bf16", 220e12), ("f16", 220e12), ("tf32", 110e12), ("f32", 14e12), ("f64", 14e12))
A100 = Device("A100", A100_RATES, 1.7e12, 4e-6, 80e9, host="pcie4", taken=TAKEN / 108)
CPU = Device(
    "one CPU core",
    (("f32", 1.0e11), ("f64", 5e10), ("bf16", 2.5e10)),
    1.0e10,
    5e-6,
    gloo=True,
    host="memory",
)

# Latency and hop as in NCCL's ring with the simple protocol; bandwidth as a rank receives in a large ring.
LINKS = {
    "nvlink4": Link("nvlink4", 10e-6, 360e9, 2e-6),
    "nvlink3": Link("nvlink3", 10e-6, 230e9, 2e-6),
    "infiniband": Link("infiniband", 20e-6, 45e9, 3e-6),
    # Eight NICs a host, used by a whole ring.
    "infiniband-rail": Link("infiniband-rail", 30e-6, 180e9, 2e-6),
    "ethernet-1g": Link("ethernet-1g", 3e-4, 0.117e9, 5e-5, host=5e-10),
    "ethernet-10g": Link("ethernet-10g", 2e-4, 1.1e9, 3e-5, host=5e-10),
    "ethernet-100g": Link("ethernet-100g", 1e-4, 9e9, 2e-5),
}
# Between the memories of a device and its host, in each direction. A copy takes no time of compute.
HOST_LINKS = {
    "pcie4": Link("pcie4", 10e-6, 25e9),
    "pcie5": Link("pcie5", 10e-6, 50e9),
    "c2c": Link("c2c", 5e-6, 350e9),
    "memory": Link("memory", 5e-6, 5e9),
}
DEVICES = {"h100": H100, "h200": H200, "a100": A100, "cpu": CPU}


@dataclass(frozen=True)
class Cluster:
    """The device of every rank, and the link of every mesh axis.

    `measured` has the durations of operations in seconds, by `simulate.signature`; they are used instead of the
    roofline. `host` is the link between the memory of a device and that of its host, by default that of the device, and
    `host_memory` is the share of a device in the memory of the host, in bytes.

    >>> cluster("h100", dp="infiniband", tp="nvlink4").link("dp").name
    'infiniband'
    """

    device: Device
    links: tuple[tuple[str, Link], ...]
    measured: tuple[tuple[str, float], ...] = dataclasses.field(default=(), repr=False)
    host: Link | None = dataclasses.field(default=None, repr=False)
    host_memory: float = dataclasses.field(default=float("inf"), repr=False)

    @property
    def host_link(self) -> Link:
        """The link between the memory of a device and that of its host."""
        return self.host or HOST_LINKS[self.device.host]

    def copy_seconds(self, size: int) -> tuple[float, float]:
        """The latency of a copy of `size` bytes to the host or from it, and the time in which they move.

        >>> shared = dataclasses.replace(HOST_LINKS["pcie5"], shared=2)
        >>> cluster("h100", host_link=shared).copy_seconds(50_000_000)
        (1e-05, 0.002)
        """
        link = self.host_link
        return link.latency, size * link.shared / link.bandwidth

    def link(self, axis: str) -> Link:
        """The link that collectives over `axis` cross.

        Raises: ValueError if the axis has none.
        """
        links = dict(self.links)
        if axis in links:
            return links[axis]
        count = neighbour_count(axis)
        if count is not None:
            link = self.link(all_neighbours(axis))
            is_in_host = link.local % count == 0
            return link.inside if link.inside is not None and is_in_host else link
        if len(members(axis)) > 1:
            # A message to all ranks of a joint axis also crosses its slowest link.
            slowest = min(map(self.link, members(axis)), key=lambda link: link.bandwidth)
            return dataclasses.replace(slowest, inside=None)
        known_axes = ", ".join(map(repr, links)) or "none"
        shipped = [repr(name) for name, device in DEVICES.items() if device == self.device]
        device = shipped[0] if shipped else "device"
        raise ValueError(
            f"cluster: no link for mesh axis {axis!r}; it knows {known_axes}.\n"
            f"Say what it crosses: zt.cluster({device}, {axis}='infiniband'), or measure it with zt.calibrate(mesh)."
        )

    @property
    def links_with_neighbours(self) -> dict[str, Link]:
        """The link of every axis, and of the neighbours on each host of an axis over several."""
        links = dict(self.links)
        for axis, link in self.links:
            if link.inside is not None:
                links[neighbours(axis, link.local)] = link.inside
        return links

    def neighbours(self, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The axes over several hosts, and how many of its ranks each host has, which are neighbours on it."""
        links = self.links_with_neighbours
        found = []
        for axis, ranks in sizes.items():
            local = links[axis].local if axis in links else 1
            if 1 < local < ranks and ranks % local == 0 and neighbours(axis, local) in links:
                found.append((axis, local))
        return tuple(found)

    def route(self, eqn: Eqn, sizes: Mapping[str, int]) -> Route | None:
        """The way of a collective equation between hosts, and the bytes that it sends; None without `by_host`."""
        link = self.link(eqn.kwargs["axis"])
        if link.inside is None:
            return None
        ranks = sizes[eqn.kwargs["axis"]]
        hosts = Hosts(ranks, -(-ranks // link.local), ranks % link.local == 0)
        return route_of(eqn, sizes, hosts, self.device.gloo)

    def weight(self, eqn: Eqn, sizes: Mapping[str, int]) -> float:
        """The factor from the bytes that a rank receives, by `rules`, to the bytes that its link is charged with.

        It is 1 unless the axis lies over several hosts (`by_host`). Then bytes between hosts take the link, and those
        inside a host count as the bytes that the link would send in the same time, unless they are a level of their
        own.
        """
        route = self.route(eqn, sizes)
        link = self.link(eqn.kwargs["axis"])
        received = rules(eqn).wire_bytes(eqn, sizes)
        if route is None or link.inside is None or not received:
            return 1.0
        if self.has_two_lanes(eqn, sizes):
            return route.between / received
        return (route.between + route.inside * link.bandwidth / link.inside.bandwidth) / received

    def weight_inside(self, eqn: Eqn, sizes: Mapping[str, int]) -> float:
        """The same factor for the link inside a host, of a collective in two levels."""
        route = self.route(eqn, sizes)
        return route.inside / rules(eqn).wire_bytes(eqn, sizes) if route is not None else 0.0

    def has_two_lanes(self, eqn: Eqn, sizes: Mapping[str, int]) -> bool:
        """Whether a collective has two levels, each with a lane of its own, as on GPUs."""
        route = self.route(eqn, sizes)
        return route is not None and route.way == TWO_LEVELS and not self.device.gloo

    def with_measured(self, seconds: Mapping[str, float]) -> Cluster:
        """This cluster with measured durations of operations in seconds, by `simulate.signature`."""
        return dataclasses.replace(
            self, measured=tuple(sorted({**dict(self.measured), **seconds}.items()))
        )


def cluster(
    device: str | Device,
    *,
    host_link: str | Link | None = None,
    host_memory: float = float("inf"),
    **links: str | Link,
) -> Cluster:
    """Build a cluster from profiles that ztrans ships, or from a `Device` and `Link`s of your own.

    Args:
        device: h100, h200, a100 or cpu.
        host_link: the link between the memory of a device and that of its host: pcie4, pcie5 or c2c; by default that of
            the device. If devices share it, such as two behind one PCIe switch, it is a `Link` with `shared=2`.
        host_memory: the bytes of the memory of a host that each of its devices may use.
        links: the link of every mesh axis: nvlink4, nvlink3, infiniband (one NIC for each GPU), infiniband-rail,
            ethernet-1g, ethernet-10g or ethernet-100g.

    Raises: ValueError if there is no profile of that name, if a bandwidth is not positive or a latency is negative.

    >>> cluster("cpu", dp="ethernet-1g").device.name
    'one CPU core'
    """
    if isinstance(device, str) and device.lower() not in DEVICES:
        raise ValueError(
            f"cluster: no profile of device {device!r}; there are {', '.join(DEVICES)}."
        )
    chosen = DEVICES[device.lower()] if isinstance(device, str) else device
    profiles = {}
    for axis, link in links.items():
        profiles[axis] = _profile(link, "cluster", f"for axis {axis!r}")
    host = None if host_link is None else _profile(host_link, "cluster", "to the host", HOST_LINKS)
    return Cluster(chosen, tuple(profiles.items()), host=host, host_memory=host_memory)


def by_host(local: int, inside: str | Link, between: str | Link) -> Link:
    """The link of a mesh axis over several hosts, each of which has `local` of its ranks, one after the other.

    Args:
        local: the ranks of one host.
        inside: the link between the ranks of a host, or the name of a shipped one.
        between: a rank's share of the link between hosts, or the name of a shipped one.

    Raises: ValueError if there is no profile of that name, if a bandwidth is not positive or a latency is negative, or
        if `local` is below 1.

    >>> cluster("h100", dp=by_host(8, "nvlink4", "infiniband")).link("dp").name
    'infiniband'
    """
    if local < 1:
        raise ValueError(f"by_host: a host has at least one rank, not {local}.")
    wire = _profile(between, "by_host", "between hosts")
    bus = _profile(inside, "by_host", "inside a host")
    return dataclasses.replace(wire, inside=bus, local=local)


def _profile(
    link: str | Link, caller: str, where: str, profiles: Mapping[str, Link] = LINKS
) -> Link:
    if isinstance(link, str) and link not in profiles:
        raise ValueError(
            f"{caller}: no profile of link {link!r} {where}; there are {', '.join(profiles)}."
        )
    link = profiles[link] if isinstance(link, str) else link
    if not link.bandwidth > 0 or link.latency < 0:
        raise ValueError(
            f"{caller}: {link} {where}: bandwidth must be positive, latency not negative."
        )
    return link


def default_device(device_type: str, memory: float | None = None) -> Device:
    """The device to plan with if none is named: an H100 with this memory, by default its own, or a CPU."""
    if device_type == "cpu":
        return CPU
    return H100 if memory is None else dataclasses.replace(H100, memory=memory)


def default_cluster(device: Device, axes: Mapping[str, int]) -> Cluster:
    """The cluster of a device to plan with if none is named: GPUs on InfiniBand, or CPUs on Ethernet."""
    link = "ethernet-1g" if device.gloo else "infiniband"
    links: dict[str, Any] = dict.fromkeys(map(all_neighbours, axes), link)
    return cluster(device, **links)
