"""calibrate: the machine at hand as a `Cluster`, measured in a few seconds through the mesh's own groups."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ir import collectives
from ..ir.graph import DTYPES, Partial, Split, Var
from ..planning.cluster import Cluster, Device, Link
from ..runtime.collectives import channel
from ..runtime.cuda import symmetric_start as symmetric
from ..runtime.cuda.streams import in_a_row
from ..runtime.meeting import Call, everywhere, meet
from ..runtime.mesh import check_runs
from ..runtime.process_groups import Channel
from .link_fit import Sample, fit

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_SIZES = tuple(4096 * 4**k for k in range(9))  # bytes that a rank receives: 4 KiB to 256 MiB
_LARGEST = 2**24  # between CPUs
_ROW = 2**28  # bytes, of messages of a GPU in a row
_ENOUGH = 0.1  # seconds that a message takes after which no larger one is tried
_BURST = 0.25  # seconds for which one size is tried, and for which matmuls run beside a gather


def calibrate(mesh: DeviceMesh, links: Mapping[str, str] | None = None) -> Cluster:
    """Measure this machine: matmul rates, memory bandwidth, launch overhead, and the link of every mesh axis.

    All ranks must call it, and all get the same `Cluster`: medians over ranks. From outside it cannot
    be told which axes share a wire: those whose groups reach over hosts get one link named "network",
    the others one named "local", and `links` says of single axes what to name theirs.

    Raises: ValueError for a mesh on which nothing runs, or an axis in `links` that it does not have.

    >>> from ztrans.runtime.mesh import make_mesh
    >>> cluster = calibrate(make_mesh("cpu", dp=-1))  # a mesh of one: the device alone
    >>> cluster.device.rate("f32") > 0, cluster.links
    (True, ())
    """
    check_runs(mesh)
    axes = mesh.mesh_dim_names or ()
    for axis in links or {}:
        if axis not in axes:
            raise ValueError(f"calibrate: no mesh axis {axis!r}; there are {', '.join(map(repr, axes))}.")
    on = torch.device(mesh.device_type)
    device = _device(on)
    if mesh.size() == 1:
        return Cluster(device, ())
    meet(mesh, Call("zt.calibrate"))
    wires = [_wire(axis, mesh, on) for k, axis in enumerate(axes) if mesh.size(k) > 1]
    every = everywhere((device, _host_name(), wires), mesh)
    mine = _agreed(dict(zip(mesh.mesh.flatten().tolist(), every)), links or {})
    return everywhere(mine, mesh)[0]  # a sum may differ in its last bit between machines


class _Wire(NamedTuple):
    """What one rank measured of an axis: messages, and the processor's seconds a byte and a message."""

    axis: str
    ranks: tuple[int, ...]
    samples: list[Sample]
    host: float
    call: float


def _agreed(every: Mapping[int, tuple[Device, str, list[_Wire]]], names: Mapping[str, str]) -> Cluster:
    """One cluster of what all ranks measured: medians."""
    devices, hosts, wires = zip(*every.values())
    host_of = dict(zip(every, hosts))
    rates = [(dtype, median(dict(d.flops)[dtype] for d in devices)) for dtype, _ in devices[0].flops]
    bandwidth, launch = median(d.bandwidth for d in devices), median(d.launch for d in devices)
    memory = min(d.memory / (hosts.count(host) if d.name.startswith("cpu") else 1) for d, host in zip(devices, hosts))
    found = []
    for same in zip(*wires):
        axis, ranks = same[0].axis, len(same[0].ranks)
        name = "network" if any(len({host_of[r] for r in wire.ranks}) > 1 for wire in same) else "local"
        samples = [
            row[0]._replace(seconds=median(s.seconds for s in row)) for row in zip(*(wire.samples for wire in same))
        ]
        host, call = (median(getattr(wire, each) for wire in same) for each in ("host", "call"))
        guess = Link(names.get(axis, name), 1e-4, 1e9, host=host, call=call)
        found.append((axis, fit(guess, samples, ranks)))
    return Cluster(Device(devices[0].name, tuple(rates), bandwidth, launch, memory), tuple(found))


def _host_name() -> str:
    """A host is a machine, or a network namespace of one."""
    namespace = "/proc/self/ns/net"
    return socket.gethostname() + (os.readlink(namespace) if os.path.exists(namespace) else "")


def _device(on: torch.device) -> Device:
    """This rank's processor, while the other ranks measure theirs."""
    flops = []
    for dtype in (torch.float32, torch.bfloat16):
        n, took = 256, 0.0
        while took < 5e-3 and n < 8192:
            n *= 2
            took = _seconds(_matmul(n, dtype, on), on)
        flops.append((DTYPES[dtype], 2 * n**3 / took))
    big, one = torch.ones(1 << (24 if on.type == "cpu" else 28), device=on), torch.ones(1, device=on)
    copy = torch.empty_like(big)
    bandwidth = 2 * big.nbytes / _seconds(lambda: copy.copy_(big), on)
    launch = _seconds(lambda: [torch.ops.aten.add.Tensor(one, one) for _ in range(1000)], on) / 1000
    if on.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(f"cpu, {torch.get_num_threads()} threads", tuple(flops), bandwidth, launch, memory)
    module = torch.get_device_module(on)
    return Device(module.get_device_name(), tuple(flops), bandwidth, launch, module.mem_get_info()[1])


def _matmul(n: int, dtype: torch.dtype, on: torch.device) -> Callable[[], Any]:
    a, b = (torch.ones(n, n, dtype=dtype, device=on) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _seconds(run: Callable[[], Any], on: torch.device, most: int = 7) -> float:
    """The median time of a call that is warm, in about as long as a burst."""
    taken = [_once(run, on) for _ in range(2)]
    while len(taken) <= most and sum(taken) < _BURST:
        taken.append(_once(run, on))
    return median(taken[1:])


def _once(run: Callable[[], Any], on: torch.device) -> float:
    start = time.perf_counter()
    run()
    if on.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _wire(axis: str, mesh: DeviceMesh, on: torch.device) -> _Wire:
    """Messages of all kinds and sizes over one axis, in all of its groups at once, as in a step."""
    gathers, samples, largest = channel(mesh, axis, gathers=True), [], {}
    for kind in _KINDS:
        for size in (s for s in _SIZES if on.type != "cpu" or s <= _LARGEST):
            start, received = _collective(kind, size, gathers, on)
            once = functools.partial(_message, start, size, on)
            once()
            slowest = max(everywhere(once(), mesh))  # so that all decide alike
            # Each collective waits for all ranks, so nothing else must keep them in step.
            taken = [once() for _ in range(max(3, min(15, int(_BURST / slowest))))]
            samples.append(Sample(kind, received, median(taken)))
            largest[kind] = (size, slowest)
            if slowest > _ENOUGH:
                break
    size, slowest = largest["all_gather"]
    start, received = _collective("all_gather", size * max(1, min(16, int(_BURST / slowest))), gathers, on)
    ranks = tuple(dist.get_process_group_ranks(gathers.group))
    if on.type != "cpu":
        return _Wire(axis, ranks, samples, 0.0, 0.0)  # a GPU's transfers cost its processor nothing
    host = median(_taken(start, mesh, on) for _ in range(3)) / received
    return _Wire(axis, ranks, samples, host, median(_started(gathers, on) for _ in range(15)))


def _message(start: Callable[[], Any], size: int, on: torch.device) -> float:
    """Seconds of one message; on a GPU of one of some in a row, for a step launches the next before one is over."""
    if on.type == "cpu":
        return _once(lambda: _waited(start()), on)
    row = max(2, min(16, _ROW // size))

    def run() -> None:
        for future in [start() for _ in range(row)]:
            _waited(future)

    return in_a_row(run, on, 1) / row


def _collective(kind: str, size: int, messages: Channel, on: torch.device) -> tuple[Callable[[], Any], int]:
    """A function that starts a collective in which a rank receives about `size` bytes, and how many exactly."""
    n = messages.group.size()
    ranks = {"axis": n}
    rows = n * max(1, size // 4 // (n - 1) // (2 if kind == "all_reduce" else 1))
    split = Split("axis")
    x = Var("x", torch.float32, (rows,), (split if kind == "all_gather" else Partial("axis", "sum"),))
    if kind == "all_gather":
        eqn = collectives.all_gather([x], ["y"], "axis")
    else:
        eqn = collectives.reduce([x], ["y"], "axis", "sum", split if kind == "reduce_scatter" else None)
    start = symmetric.start(eqn, ranks, {"axis": messages.group.rank()}, messages, symmetric.side_streams(on.type))
    member = torch.zeros(rows // (n if kind == "all_gather" else 1), device=on)
    return lambda: start(member)[0][0], collectives.wire_bytes(eqn, ranks)


def _waited(future: Any) -> None:
    future.work.wait()  # `future` holds what it receives into until then


def _started(gathers: Channel, on: torch.device) -> float:
    """The seconds in which the smallest message is started."""
    start, _ = _collective("all_gather", _SIZES[0], gathers, on)
    began = time.perf_counter()
    future = start()
    took = time.perf_counter() - began
    _waited(future)
    return took


def _taken(start: Callable[[], Any], mesh: DeviceMesh, on: torch.device) -> float:
    """The seconds of matmuls that a collective under way costs: of the wall clock, less what other processes took."""
    run = _matmul(256, torch.float32, on)
    clocks = (time.perf_counter, time.process_time)
    began, alone = [clock() for clock in clocks], 0
    while time.perf_counter() - began[0] < _BURST:
        _once(run, on)
        alone += 1
    each = [(clock() - at) / alone for clock, at in zip(clocks, began)]
    everywhere(None, mesh)  # all begin together
    began, beside = [clock() for clock in clocks], 0
    under_way = threading.Thread(target=_waited, args=(start(),))
    under_way.start()
    while under_way.is_alive():
        _once(run, on)
        beside += 1
    return max(0.0, min(clock() - at - beside * one for clock, at, one in zip(clocks, began, each)))
