"""The speeds of devices and links, on which a schedule depends.

A `Device` computes (see `devices`). A `Link` has a latency and a bandwidth; a link between hosts also has the link
inside each host. A `Cluster` has the link of each mesh axis, and says by which route a collective goes between hosts,
and how many bytes it charges its link with. It may also have measured durations of operations, which replace the
roofline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.axes import members, neighbour_count, neighbours, whole_axis
from ..ir.collectives import kind_named, rules
from ..ir.graph import Eqn, MemoryKind
from ..ir.routes import HIERARCHICAL, RING, Hosts, Route, route_of
from .devices import CPU, DEVICES, H100, Device


@dataclass(frozen=True)
class Link:
    """The link through which one rank sends and receives.

    The overheads are seconds in which compute stands still for a message (the `o` and `O` of LogGP).
    """

    name: str
    latency: float  # seconds for each message
    bandwidth: float  # bytes/s
    hop: float = 0.0  # seconds that each further rank of the ring adds to a message
    efficiency: tuple[tuple[str, float], ...] = ()  # (kind of collective, factor of the bandwidth)
    byte_overhead: float = 0.0  # seconds of compute for each byte that gloo sends
    overhead: float = 0.0  # seconds of compute for each message that is sent
    # (kind, seconds of compute for each byte that has arrived)
    unpack: tuple[tuple[str, float], ...] = ()
    # Whether the figures were measured, and include the time to pack messages, on GPUs also to unpack them.
    includes_packing: bool = dataclasses.field(default=False, repr=False)
    # Set by `by_host`: the link between the ranks of one host, and their number. They are neighbours on the axis.
    inside: Link | None = dataclasses.field(default=None, repr=False)
    local: int = dataclasses.field(default=1, repr=False)
    # For a link to a host: the number of devices that share it and copy at the same time.
    shared: int = dataclasses.field(default=1, repr=False)
    # The share of a ring's bandwidth that a tree reaches; 0 if no all_reduce goes by a tree.
    tree: float = dataclasses.field(default=0.0, repr=False)
    # (kind of collective, its carrier: a "kernel" through symmetric memory, or "copies"). NCCL carries all other kinds
    # on GPUs.
    carried_by: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)

    def seconds(self, kind: str, received: float, ranks: int) -> tuple[float, float]:
        """The latency of a collective over `ranks`, and the time to move its `received` bytes.

        An all_reduce goes by ring or by tree, whichever is faster. A tree is faster for few bytes on many ranks.

        >>> Link("wire", latency=1e-3, bandwidth=1e6).seconds("all_gather", 5e5, 2)
        (0.001, 0.5)
        """
        return min(self.ways(kind, received, ranks), key=sum)

    def ways(self, kind: str, received: float, ranks: int) -> list[tuple[float, float]]:
        """The latency and transfer time of a collective: by ring, and for an all_reduce by tree, if the link has one.

        In a ring, bytes pass all other ranks, hop by hop, and twice in an all_reduce. A tree joins hosts in pairs, up
        and down, and the ranks of each host in a chain.
        """
        hosts = ranks  # without `by_host`, each rank counts as a host of its own
        latency = self.latency
        ring_inside = 0.0  # seconds of the hops inside hosts
        chain_inside = 0.0
        if self.inside is not None:
            hosts = -(-ranks // self.local)
            latency = self.latency if hosts > 1 else self.inside.latency
            ring_inside = self.inside.hop * (ranks - hosts)
            chain_inside = self.inside.hop * (min(ranks, self.local) - 1)

        transfer = received / (self.bandwidth * dict(self.efficiency).get(kind, 1.0))
        ring = self.hop * (hosts - 1) + ring_inside
        crossings = kind_named(kind).crossings
        ways = [(latency + crossings * ring, transfer)]
        if self.tree and crossings == 2:
            levels = math.ceil(math.log2(max(hosts, 1)))
            tree = self.hop * levels + chain_inside
            ways.append((latency + 2 * tree, transfer / self.tree))
        return ways


# Latency and hop are those of NCCL's ring with the simple protocol (`baseLat` and `hwLat` of its tuning.cc, and the
# launch). Bandwidth is what a rank receives in a large ring (nccl-tests): 0.8 of NVLink, 0.9 of a NIC. NCCL gives a
# tree 0.92 of the bandwidth of a ring.
_TREE = 0.92
LINKS = {
    "nvlink4": Link("nvlink4", 10e-6, 360e9, 2e-6),
    "nvlink3": Link("nvlink3", 10e-6, 230e9, 2e-6),
    "infiniband": Link("infiniband", 20e-6, 45e9, 3e-6, tree=_TREE),
    # Eight NICs a host, used by a whole ring.
    "infiniband-rail": Link("infiniband-rail", 30e-6, 180e9, 2e-6, tree=_TREE),
    "ethernet-1g": Link("ethernet-1g", 3e-4, 0.117e9, 5e-5, byte_overhead=5e-10),
    "ethernet-10g": Link("ethernet-10g", 2e-4, 1.1e9, 3e-5, byte_overhead=5e-10),
    "ethernet-100g": Link("ethernet-100g", 1e-4, 9e9, 2e-5),
}
# Between the memories of a device and its host, in each direction. A copy takes no compute time.
HOST_LINKS = {
    "pcie4": Link("pcie4", 10e-6, 25e9),
    "pcie5": Link("pcie5", 10e-6, 50e9),
    "c2c": Link("c2c", 5e-6, 350e9),
    "memory": Link("memory", 5e-6, 5e9),
}


@dataclass(frozen=True)
class MemoryTier:
    """A memory beside the device, where values wait.

    Attributes:
        capacity: the bytes that each device may use there.
        link: the link between it and the memory of the device, in each direction.
    """

    capacity: float
    link: Link

    def copy_seconds(self, size: int) -> tuple[float, float]:
        """The latency of a copy of `size` bytes to or from the device, and the time to move them.

        >>> MemoryTier(1e12, dataclasses.replace(HOST_LINKS["pcie5"], shared=2)).copy_seconds(50_000_000)
        (1e-05, 0.002)
        """
        return self.link.latency, size * self.link.shared / self.link.bandwidth


@dataclass(frozen=True)
class Cluster:
    """The device of every rank, and the link of every mesh axis.

    Attributes:
        device: the processor of every rank.
        links: (mesh axis, its link).
        measured: (`durations.signature` of an operation, its seconds), which replace the roofline.
        host_link: the link between the memories of a device and its host; None for the default link of the device.
        host_memory: the bytes of host memory that each device may use.

    >>> cluster("h100", dp="infiniband", tp="nvlink4").link("dp").name
    'infiniband'
    """

    device: Device
    links: tuple[tuple[str, Link], ...]
    measured: tuple[tuple[str, float], ...] = dataclasses.field(default=(), repr=False)
    host_link: Link | None = dataclasses.field(default=None, repr=False)
    host_memory: float = dataclasses.field(default=float("inf"), repr=False)

    @property
    def tiers(self) -> dict[MemoryKind, MemoryTier]:
        """The memories beside the device.

        >>> cluster("h100").tiers["host"].link.name
        'pcie5'
        """
        host_link = self.host_link or HOST_LINKS[self.device.host_link]
        return {"host": MemoryTier(self.host_memory, host_link)}

    def link(self, axis: str) -> Link:
        """The link that collectives over `axis` cross.

        Raises: ValueError if the axis has none.
        """
        links = dict(self.links)
        if axis in links:
            return links[axis]

        # Neighbours on one host use the link inside it.
        count = neighbour_count(axis)
        if count is not None:
            link = self.link(whole_axis(axis))
            if link.inside is not None and link.local % count == 0:
                return link.inside
            return link

        # A message to all ranks of a joint axis also crosses its slowest link.
        if len(members(axis)) > 1:
            slowest = min(map(self.link, members(axis)), key=lambda link: link.bandwidth)
            return dataclasses.replace(slowest, inside=None)

        known_axes = ", ".join(map(repr, links)) or "none"
        shipped = [repr(name) for name, device in DEVICES.items() if device == self.device]
        device = shipped[0] if shipped else "device"
        raise ValueError(
            f"cluster: no link for mesh axis {axis!r}; it knows {known_axes}.\n"
            f"Say what it crosses: zt.cluster({device}, {axis}='infiniband'), or measure it with zt.calibrate(mesh)."
        )

    def lost_beside(self, axis: str, kind: str) -> float:
        """The share of its speed that a product loses while a message over `axis` is under way.

        >>> cluster("h100", dp="nvlink4").lost_beside("dp", "all_gather")
        0.3
        """
        carrier = dict(self.link(axis).carried_by).get(kind, "nccl")
        return dict(self.device.lost_beside).get(carrier, 0.0)

    @property
    def links_with_neighbours(self) -> dict[str, Link]:
        """The link of every axis; for an axis over several hosts, also the link of the neighbours on one host."""
        links = dict(self.links)
        for axis, link in self.links:
            if link.inside is not None:
                links[neighbours(axis, link.local)] = link.inside
        return links

    def neighbours(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The neighbours of each axis over several hosts: its ranks on one host, such as "dp/8"."""
        links = self.links_with_neighbours
        hosts = []
        for axis, ranks in sizes.items():
            local = links[axis].local if axis in links else 1
            if 1 < local < ranks and ranks % local == 0 and neighbours(axis, local) in links:
                hosts.append(neighbours(axis, local))
        return tuple(hosts)

    def route(self, eqn: Eqn, sizes: Mapping[str, int]) -> Route | None:
        """The route of a collective between hosts, with its bytes; None if the link was not made by `by_host`."""
        link = self.link(eqn.kwargs["axis"])
        if link.inside is None:
            return None
        ranks = sizes[eqn.kwargs["axis"]]
        hosts = Hosts(ranks, -(-ranks // link.local), ranks % link.local == 0)
        return route_of(eqn, sizes, hosts, self.device.gloo)

    def charge_factor(self, eqn: Eqn, sizes: Mapping[str, int]) -> float:
        """The bytes that a collective charges its link with, for each byte that a rank receives by `rules`.

        It is 1 unless the axis spans several hosts (`by_host`). Then bytes between hosts count as they are, and bytes
        inside a host count as the bytes that the link would send in the same time. A ring sends both at once, so the
        larger number counts; other routes send one after the other, so the sum counts. If each level of a hierarchical
        collective has a lane of its own, only the bytes between hosts count here.
        """
        route = self.route(eqn, sizes)
        link = self.link(eqn.kwargs["axis"])
        received = rules(eqn).wire_bytes(eqn, sizes)
        if route is None or link.inside is None or not received:
            return 1.0

        if self.has_two_lanes(eqn, sizes):
            return route.between / received
        inside = route.inside * link.bandwidth / link.inside.bandwidth
        charged = max(route.between, inside) if route.way == RING else route.between + inside
        return charged / received

    def charge_factor_inside(self, eqn: Eqn, sizes: Mapping[str, int]) -> float:
        """As `charge_factor`, for the link inside a host of a hierarchical collective."""
        route = self.route(eqn, sizes)
        return route.inside / rules(eqn).wire_bytes(eqn, sizes) if route is not None else 0.0

    def has_two_lanes(self, eqn: Eqn, sizes: Mapping[str, int]) -> bool:
        """Whether a collective is hierarchical and each level has a lane of its own, as on GPUs."""
        route = self.route(eqn, sizes)
        return route is not None and route.way == HIERARCHICAL and not self.device.gloo

    def with_measured(self, seconds: Mapping[str, float]) -> Cluster:
        """This cluster with measured durations of operations in seconds, by `durations.signature`."""
        measured = {**dict(self.measured), **seconds}
        return dataclasses.replace(self, measured=tuple(sorted(measured.items())))


def cluster(
    device: str | Device,
    *,
    host_link: str | Link | None = None,
    host_memory: float = float("inf"),
    **links: str | Link,
) -> Cluster:
    """Build a cluster from profiles that ztrans ships, or from a `Device` and `Link`s of your own.

    Args:
        device: h100, h200, a100, cpu, h100_96gb_500w, b200, mi300x or rtx4090.
        host_link: the link between the memories of a device and its host: pcie4, pcie5 or c2c; by default the usual one
            of the device. For two devices that share a link, as behind one PCIe switch, pass a `Link` with `shared=2`.
        host_memory: the bytes of host memory that each device may use.
        links: the link of every mesh axis: nvlink4, nvlink3, infiniband (one NIC for each GPU), infiniband-rail,
            ethernet-1g, ethernet-10g or ethernet-100g.

    Raises: ValueError if a name has no profile, a bandwidth is not positive, or a latency is negative.

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
        profile = _profile(link, "cluster", f"for axis {axis!r}")
        profiles[axis] = profile if chosen.gloo else _without_byte_overhead(profile)
    to_host = None
    if host_link is not None:
        to_host = _profile(host_link, "cluster", "to the host", HOST_LINKS)
    return Cluster(chosen, tuple(profiles.items()), host_link=to_host, host_memory=host_memory)


def by_host(local: int, inside: str | Link, between: str | Link) -> Link:
    """The link of a mesh axis over several hosts, with `local` consecutive ranks on each.

    Args:
        local: the number of ranks on one host.
        inside: the link between the ranks of a host, or the name of a shipped one.
        between: a rank's share of the link between hosts, or the name of a shipped one.

    Raises: ValueError if a name has no profile, a bandwidth is not positive, a latency is negative, or `local` is
        below 1.

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
    """A `Link` as given, or the shipped link of that name. Its figures are checked."""
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


def _without_byte_overhead(link: Link) -> Link:
    """The link as NCCL uses it: its threads on the host move the bytes, and compute loses only a share of the SMs."""
    inside = link.inside and _without_byte_overhead(link.inside)
    return dataclasses.replace(link, byte_overhead=0.0, inside=inside)


def default_device(device_type: str, memory: float | None = None) -> Device:
    """The device to plan with if the user names none: a CPU, or an H100, with `memory` bytes if they are known."""
    if device_type == "cpu":
        return CPU
    return H100 if memory is None else dataclasses.replace(H100, memory=memory)


def default_cluster(device: Device, axes: Mapping[str, int]) -> Cluster:
    """The cluster to plan with if the user names none: GPUs on InfiniBand, or CPUs on Ethernet."""
    link = "ethernet-1g" if device.gloo else "infiniband"
    links: dict[str, Any] = {whole_axis(axis): link for axis in axes}
    return cluster(device, **links)
