"""calibrate: measure this machine as a `Cluster`, in a few seconds, with the process groups of a mesh."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir import collectives
from ..ir.axes import joint_axis, members, with_joint_sizes
from ..ir.graph import DTYPES, Partial, Split, Var
from ..planning.cluster import Cluster, Device, Link
from ..runtime.agreement import agree_on_call, everywhere
from ..runtime.collectives import Future, channel
from ..runtime.cuda.streams import back_to_back_seconds
from ..runtime.cuda.symmetric_start import side_streams, start
from ..runtime.mesh import check_runs
from ..runtime.process_groups import Channel, host_name
from .link_fit import Sample, fit

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_SIZES = tuple(
    4096 * 4**k for k in range(9)
)  # bytes that a rank receives in a message: 4 KiB to 256 MiB
_LARGEST = 2**24  # bytes of the largest message between CPUs
_SERIES = 2**28  # bytes of a back-to-back series of messages on a GPU
_ENOUGH = 0.1  # seconds; after a message that takes this long, no larger one is timed
_BURST = 0.25  # seconds for which one size is timed, and for which matmuls run during a gather

StartMessage = Callable[[], Future]


def calibrate(
    mesh: DeviceMesh, links: Mapping[str, str] | None = None, joint: Sequence[Sequence[str]] = ()
) -> Cluster:
    """Measure this machine: matmul rates, memory bandwidth, launch overhead, and the link of every mesh axis.

    All ranks must call it. All get the same `Cluster`, which has medians over the ranks. No measurement shows which
    axes share a wire. So all axes whose groups span several hosts get a link named "network", and all others one named
    "local".

    Args:
        mesh: the mesh, whose process groups send the messages.
        links: gives the link of an axis another name, and those of the joint axes that it is the first of.
        joint: axes that act as one, as in `shard_params(axis=("dp", "cp"))`, to be measured too: [("dp", "cp")]. The
            link of a joint axis that is not measured is the slowest one of its axes.

    Raises: ValueError if the mesh is abstract, or `links` or `joint` name an axis that the mesh does not have.

    >>> from ztrans.runtime.mesh import make_mesh
    >>> cluster = calibrate(make_mesh("cpu", dp=-1))  # a mesh of one: the device alone
    >>> cluster.device.rate("f32") > 0, cluster.links
    (True, ())
    """
    check_runs(mesh)
    axes = mesh.mesh_dim_names or ()
    for axis in (*(links or {}), *itertools.chain(*joint)):
        if axis not in axes:
            raise ValueError(
                f"calibrate: no mesh axis {axis!r}; there are {', '.join(map(repr, axes))}."
            )
    sizes = with_joint_sizes(
        dict(zip(axes, mesh.shape)), [joint_axis(names, axes) for names in joint]
    )
    on = torch.device(mesh.device_type)
    device = _device(on)
    if mesh.size() == 1:
        return Cluster(device, ())
    agree_on_call(mesh, "zt.calibrate")
    wires = [_measure_axis(axis, mesh, on) for axis, size in sizes.items() if size > 1]
    by_rank = dict(
        zip(mesh.mesh.flatten().tolist(), everywhere(_Measured(device, host_name(), wires), mesh))
    )
    alone = [
        (axis, Link("local", 0.0, math.inf)) for axis, size in sizes.items() if size == 1
    ]  # joint ones ask for it
    mine = Cluster(
        _agreed_device(list(by_rank.values())), (*_agreed_links(by_rank, links or {}), *alone)
    )
    return everywhere(mine, mesh)[0]  # the last bit of a sum may differ between machines


class _Wire(NamedTuple):
    """The measurements of one rank for one axis."""

    axis: str
    ranks: tuple[int, ...]
    samples: list[Sample]
    host: float  # seconds of the processor for each byte
    call: float  # seconds of the processor for each message


class _Measured(NamedTuple):
    """All measurements of one rank: its processor, the name of its host, and its mesh axes."""

    device: Device
    host: tuple[str, ...]
    wires: list[_Wire]


def _agreed_links(
    by_rank: Mapping[int, _Measured], names: Mapping[str, str]
) -> list[tuple[str, Link]]:
    """The link of each axis, from the measurements of all ranks."""
    host_of = {rank: measured.host for rank, measured in by_rank.items()}
    links = []
    for same_axis in zip(*(measured.wires for measured in by_rank.values())):
        is_network = any(len({host_of[rank] for rank in wire.ranks}) > 1 for wire in same_axis)
        axis, ranks = same_axis[0].axis, len(same_axis[0].ranks)
        samples = [
            messages[0]._replace(seconds=median(s.seconds for s in messages))
            for messages in zip(*(wire.samples for wire in same_axis))
        ]
        host, call = (
            median(wire.host for wire in same_axis),
            median(wire.call for wire in same_axis),
        )
        name = next(
            (names[a] for a in members(axis) if a in names), "network" if is_network else "local"
        )
        guess = Link(name, 1e-4, 1e9, host=host, call=call)
        links.append((axis, fit(guess, samples, ranks)))
    return links


def _agreed_device(every: list[_Measured]) -> Device:
    """The median over the processors of all ranks. CPU ranks of one host share its memory."""
    devices, hosts = [measured.device for measured in every], [measured.host for measured in every]
    rates = [
        (dtype, median(dict(d.flops)[dtype] for d in devices)) for dtype, _ in devices[0].flops
    ]
    bandwidth, launch = median(d.bandwidth for d in devices), median(d.launch for d in devices)
    memory = min(
        d.memory / (hosts.count(host) if d.name.startswith("cpu") else 1)
        for d, host in zip(devices, hosts)
    )
    return Device(devices[0].name, tuple(rates), bandwidth, launch, memory, gloo=devices[0].gloo)


def _device(on: torch.device) -> Device:
    """Measure this rank's processor, while the other ranks measure theirs."""
    flops = []
    for dtype in (torch.float32, torch.bfloat16):
        n, took = 256, 0.0
        while took < 5e-3 and n < 8192:
            n *= 2
            took = _median_seconds(_matmul(n, dtype, on), on)
        flops.append((DTYPES[dtype], 2 * n**3 / took))
    big, scalar = (
        torch.ones(1 << (24 if on.type == "cpu" else 28), device=on),
        torch.ones(1, device=on),
    )
    copy = torch.empty_like(big)
    bandwidth = 2 * big.nbytes / _median_seconds(lambda: copy.copy_(big), on)
    launches = lambda: [torch.ops.aten.add.Tensor(scalar, scalar) for _ in range(1000)]
    launch = _median_seconds(launches, on) / 1000
    if on.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(
            f"cpu, {torch.get_num_threads()} threads",
            tuple(flops),
            bandwidth,
            launch,
            memory,
            gloo=True,
        )
    module = torch.get_device_module(on)
    return Device(
        module.get_device_name(), tuple(flops), bandwidth, launch, module.mem_get_info()[1]
    )


def _matmul(n: int, dtype: torch.dtype, on: torch.device) -> Callable[[], object]:
    a, b = (torch.ones(n, n, dtype=dtype, device=on) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _median_seconds(run: Callable[[], object], on: torch.device) -> float:
    """The median duration of a call, after a warm-up, over at most seven calls in about `_BURST` seconds."""
    taken = [_seconds(run, on) for _ in range(2)]
    while len(taken) <= 7 and sum(taken) < _BURST:
        taken.append(_seconds(run, on))
    return median(taken[1:])


def _seconds(run: Callable[[], object], on: torch.device) -> float:
    start = time.perf_counter()
    run()
    if on.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _measure_axis(axis: str, mesh: DeviceMesh, on: torch.device) -> _Wire:
    """Time messages of all kinds and sizes over one axis, in all of its groups at once, as in a step."""
    gathers = channel(mesh, axis, gathers=True)
    samples: list[Sample] = []
    largest: dict[
        str, tuple[int, float]
    ] = {}  # for each kind, bytes and seconds of the largest message that was timed
    for kind in _KINDS:
        for size in (s for s in _SIZES if on.type != "cpu" or s <= _LARGEST):
            start_message, received = _collective(kind, size, gathers, on)
            time_message = functools.partial(_message_seconds, start_message, size, on)
            time_message()
            slowest = max(
                everywhere(time_message(), mesh)
            )  # over all ranks, so that all take the same decisions
            # Each collective waits for all ranks, so they need no other synchronisation.
            taken = [time_message() for _ in range(max(3, min(15, int(_BURST / slowest))))]
            samples.append(Sample(kind, received, median(taken)))
            largest[kind] = (size, slowest)
            if slowest > _ENOUGH:
                break
    ranks = tuple(dist.get_process_group_ranks(gathers.group))
    if on.type != "cpu":
        return _Wire(
            axis, ranks, samples, 0.0, 0.0
        )  # transfers of a GPU take no time of its processor
    size, slowest = largest["all_gather"]
    start_message, received = _collective(
        "all_gather", size * max(1, min(16, int(_BURST / slowest))), gathers, on
    )
    host = median(_compute_lost(start_message, mesh, on) for _ in range(3)) / received
    return _Wire(axis, ranks, samples, host, median(_start_seconds(gathers, on) for _ in range(15)))


def _message_seconds(start_message: StartMessage, size: int, on: torch.device) -> float:
    """The seconds of one message.

    On a GPU it is one of a back-to-back series, because a step also launches a message before the last one is done.
    """
    if on.type == "cpu":
        return _seconds(lambda: _wait(start_message()), on)
    count = max(2, min(16, _SERIES // size))

    def series() -> None:
        for future in [start_message() for _ in range(count)]:
            _wait(future)

    return back_to_back_seconds(series, on, 1) / count


def _collective(
    kind: str, size: int, messages: Channel, on: torch.device
) -> tuple[StartMessage, int]:
    """A function that starts a collective in which a rank receives about `size` bytes, and the exact number."""
    n = messages.group.size()
    ranks = {"axis": n}
    rows = n * max(1, size // 4 // (n - 1) // (2 if kind == "all_reduce" else 1))
    split = Split("axis")
    x = Var(
        "x", torch.float32, (rows,), (split if kind == "all_gather" else Partial("axis", "sum"),)
    )
    if kind == "all_gather":
        eqn = collectives.all_gather([x], ["y"], "axis")
    else:
        eqn = collectives.reduce(
            [x], ["y"], "axis", "sum", split if kind == "reduce_scatter" else None
        )
    module: Any = start(
        eqn, ranks, {"axis": messages.group.rank()}, messages, side_streams(on.type)
    )
    member = torch.zeros(rows // (n if kind == "all_gather" else 1), device=on)
    return lambda: module(member)[0].future, collectives.rules(eqn).wire_bytes(eqn, ranks)


def _wait(future: Future) -> None:
    """Wait for the bytes of a message. Until then `future` keeps the receive buffer alive."""
    if future.work is not None:
        future.work.wait()


def _start_seconds(gathers: Channel, on: torch.device) -> float:
    """The seconds that it takes to start the smallest message."""
    start_message, _ = _collective("all_gather", _SIZES[0], gathers, on)
    began = time.perf_counter()
    future = start_message()
    took = time.perf_counter() - began
    _wait(future)
    return took


def _compute_lost(start_message: StartMessage, mesh: DeviceMesh, on: torch.device) -> float:
    """The seconds of compute that a collective takes from matmuls which run at the same time.

    The loss is measured by the wall clock, which also counts the time of other processes, and by the clock of this
    process. The smaller of the two counts.
    """
    run = _matmul(256, torch.float32, on)
    clocks = (time.perf_counter, time.process_time)
    began, alone = [clock() for clock in clocks], 0
    while time.perf_counter() - began[0] < _BURST:
        _seconds(run, on)
        alone += 1
    each = [(clock() - at) / alone for clock, at in zip(clocks, began)]
    everywhere(None, mesh)  # all ranks begin together
    began, during = [clock() for clock in clocks], 0
    thread = threading.Thread(target=_wait, args=(start_message(),))
    thread.start()
    while thread.is_alive():
        _seconds(run, on)
        during += 1
    lost = (clock() - at - during * usual for clock, at, usual in zip(clocks, began, each))
    return max(0.0, min(lost))
