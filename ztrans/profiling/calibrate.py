"""Measure this machine as a `Cluster`, in a few seconds, with the process groups of a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import ops
from ..ir.axes import groups_along, neighbours
from ..ir.collectives import COLLECTIVES, Start
from ..ir.graph import DTYPES
from ..ir.layout import local_shape
from ..ir.printer import counted
from ..ir.routes import common, hosts_of
from ..planning.cluster import Cluster, Link
from ..planning.devices import GPU, Device
from ..planning.flops import Attention
from ..planning.roofline import attention_share
from ..runtime.agreement import agree_on_call, everywhere, from_first
from ..runtime.channels import Channel
from ..runtime.collectives import Future, channel
from ..runtime.communicators import host_name
from ..runtime.cuda.nccl import StreamedStart
from ..runtime.cuda.streams import back_to_back_seconds
from ..runtime.mesh import check_runs
from ..runtime.transports import Transports, transports_of
from .link_fit import Sample, fit

# The carrier of a message, by the name of its transport. NCCL carries all other messages.
_CARRIERS = {"symmetric": "kernel", "copied": "copies"}
# The bytes that a rank receives: 4 KiB to 256 MiB.
_SIZES = tuple(4096 * 4**k for k in range(9))
# The most bytes between CPUs: 16 MiB.
_LARGEST = 2**24
# The bytes of a back-to-back series of messages on a GPU.
_SERIES = 2**28
# No larger message is timed after one that takes longer than this, in seconds.
_ENOUGH = 0.1
# The seconds spent on timing one size, and on running matmuls during a gather.
_BURST = 0.25

StartMessage = Callable[[], Future]


def calibrate(mesh: DeviceMesh) -> Cluster:
    """Measure this machine: rates of products and attention, memory bandwidth, launches, and the link of every axis.

    All ranks must call it. All get the same `Cluster`, as measured by the first rank. No measurement shows which axes
    share a wire. So all axes whose groups span several hosts get a link named "network", and all others one named
    "local". If each host has several neighbours on an axis, the link between these is measured too.

    Args:
        mesh: the mesh, whose process groups send the messages.

    Raises: ValueError if the mesh is abstract.

    >>> from ztrans.runtime.mesh import make_mesh
    >>> cluster = calibrate(make_mesh("cpu", dp=-1))  # a mesh of one: the device alone
    >>> cluster.device.rate("f32") > 0, cluster.links
    (True, ())
    """
    check_runs(mesh)
    axes = mesh.mesh_dim_names or ()
    device = torch.device(mesh.device_type)
    if mesh.size() == 1:
        return Cluster(_measure_device(device, 1), ())

    agree_on_call(mesh, "zt.calibrate")
    hosts = dict(zip(mesh.mesh.flatten().tolist(), everywhere(host_name(), mesh)))
    axis_links: list[tuple[str, Link]] = []
    for axis, size in zip(axes, mesh.shape):
        if size == 1:
            # A joint axis may have members of one rank, whose link costs nothing.
            axis_links.append((axis, Link("local", 0.0, math.inf)))
            continue
        axis_links += _measure_links(axis, mesh, device, hosts)

    ranks_on_host = list(hosts.values()).count(hosts[dist.get_rank()])
    cluster = Cluster(_measure_device(device, ranks_on_host), tuple(axis_links))
    return from_first(cluster, mesh)


def _link_name(axis: str, mesh: DeviceMesh, hosts: Mapping[int, tuple[str, ...]]) -> str:
    """The name of the link of an axis: "network" if a group of the axis spans several hosts, else "local"."""
    for group in groups_along(mesh.mesh, mesh.mesh_dim_names or (), [axis]):
        hosts_of_group = {hosts[rank] for rank in group}
        if len(hosts_of_group) > 1:
            return "network"
    return "local"


def _measure_links(
    axis: str,
    mesh: DeviceMesh,
    device: torch.device,
    hosts: Mapping[int, tuple[str, ...]],
) -> list[tuple[str, Link]]:
    """The link of an axis, and the link between the neighbours on a host if the axis has more ranks than these."""
    local = _neighbours_on_host(axis, mesh, hosts)
    link = _measure_link(_link_name(axis, mesh, hosts), axis, mesh, device)
    links = [(axis, dataclasses.replace(link, local=local))]
    if 1 < local < channel(mesh, axis, "gather").group.size():
        inside = neighbours(axis, local)
        links.append((inside, _measure_link("local", inside, mesh, device)))
    return links


def _neighbours_on_host(axis: str, mesh: DeviceMesh, hosts: Mapping[int, tuple[str, ...]]) -> int:
    """The number of neighbours on an axis that each host has; 1 if hosts have different numbers."""
    by_group = []
    for group in groups_along(mesh.mesh, mesh.mesh_dim_names or (), [axis]):
        by_group.append(hosts_of([hosts[rank] for rank in group]))
    on_hosts = common(by_group)
    return on_hosts.local if on_hosts.even else 1


def _measure_device(device: torch.device, ranks_on_host: int) -> Device:
    """Measure this rank's processor, while the other ranks measure theirs.

    The `ranks_on_host` share the host's memory if they run on CPUs.
    """
    flops = _measure_rates(device)
    # More elements than fit in the caches.
    elements = 1 << (24 if device.type == "cpu" else 28)
    big = torch.ones(elements, device=device)
    copy = torch.empty_like(big)
    bandwidth = 2 * big.nbytes / _median_seconds(lambda: copy.copy_(big), device)
    coding = _times_of_a_copy(big[: elements // 4].view(1, -1), bandwidth, device)

    scalar = torch.ones(1, device=device)

    def launch_many() -> None:
        for _ in range(1000):
            torch.ops.aten.add.Tensor(scalar, scalar)

    launch = _median_seconds(launch_many, device) / 1000
    if device.type == "cpu":
        name = f"cpu, {counted(torch.get_num_threads(), 'thread')}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_on_host
        return Device(name, flops, bandwidth, launch, memory, gloo=True, coding=coding)

    module = torch.get_device_module(device)
    # Adding one element takes the host longer than the GPU, so the loop has measured the host.
    return dataclasses.replace(
        GPU,
        name=module.get_device_name(),
        flops=flops,
        bandwidth=bandwidth,
        memory=module.mem_get_info()[1],
        launch_overhead=launch,
        coding=coding,
    )


def _times_of_a_copy(rows: torch.Tensor, bandwidth: float, device: torch.device) -> float:
    """How many times as long as copies encoding and decoding take, for each byte that is read and written.

    The codes have 8 bits, in blocks of 256. Those of 4 bits take about as long for each element.
    """
    codes = ops.encode(rows, 8, 256)
    decoded = torch.empty_like(rows)

    def encode_and_decode() -> None:
        ops.encode(rows, 8, 256, out=codes)
        ops.decode(codes, rows.shape[1], rows.dtype, 8, 256, out=decoded)

    traffic = 2 * (rows.nbytes + codes.nbytes)
    return _median_seconds(encode_and_decode, device) * bandwidth / traffic


def _measure_rates(device: torch.device) -> tuple[tuple[str, float], ...]:
    """The FLOP/s of this processor, by the names of `Device.flops`.

    According to data sheets, tensor cores compute TF32 at half the rate of bf16, and fp8 at twice that rate.
    """
    rates = {}
    with _without_tf32():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            rates[DTYPES[dtype]] = _product_rate(dtype, device)
    if device.type == "cpu":
        return tuple(rates.items())  # on a CPU, attention is as fast as other products

    rates["tf32"] = 0.5 * rates["bf16"]
    rates["f8e4m3"] = 2 * rates["bf16"]
    forward, backward = _attention_rates(4096, device)
    rates["attention"] = forward
    rates["attention backward"] = backward
    return tuple(rates.items())


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute fp32 products in fp32, whatever the user has set."""
    settings = torch.backends.cuda.matmul
    user_precision = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = user_precision


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """The FLOP/s of a product that is large enough to take 5 ms."""
    n = 256
    seconds = 0.0
    while seconds < 5e-3 and n < 8192:
        n *= 2
        seconds = _median_seconds(_matmul(n, dtype, device), device)
    return 2 * n**3 / seconds


def _attention_rates(tokens: int, device: torch.device) -> tuple[float, float]:
    """The FLOP/s of causal attention in bf16 with heads of 128, forward and backward, with the kernel PyTorch chooses.

    The rates hold for long sequences: each is the measured one divided by the share of it that this number of tokens
    reaches (`attention_share`).
    """
    heads, width = 32, 128
    shape = (1, heads, tokens, width)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    forward_seconds = _median_seconds(attend, device)
    for x in (q, k, v):
        x.requires_grad_()
    attended = attend()
    gradient = torch.ones_like(attended)

    def differentiate() -> object:
        return torch.autograd.grad(attended, (q, k, v), gradient, retain_graph=True)

    backward_seconds = _median_seconds(differentiate, device)
    rates = []
    for seconds, backward in ((forward_seconds, False), (backward_seconds, True)):
        work = Attention(heads * tokens, tokens / 2, width, width, True, backward)
        rates.append(work.flops / seconds / attention_share(work))
    return rates[0], rates[1]


def _matmul(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a = torch.ones(n, n, dtype=dtype, device=device)
    b = torch.ones_like(a)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median duration of a call, after a warm-up, over at most seven calls in about `_BURST` seconds."""
    _seconds(run, device)
    durations = [_seconds(run, device)]
    while len(durations) < 7 and sum(durations) < _BURST:
        durations.append(_seconds(run, device))
    return median(durations)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def _measure_link(name: str, axis: str, mesh: DeviceMesh, device: torch.device) -> Link:
    """Time messages of all kinds and sizes over one axis, in all of its groups at once, as in a step."""
    queue = channel(mesh, axis, "gather")  # it carries all kinds here
    on_cpu = device.type == "cpu"
    transports = transports_of(mesh)
    samples: list[Sample] = []
    carriers: dict[str, str] = {}  # by kind, for the largest messages
    gather_seconds_per_byte = 0.0
    for kind, collective in COLLECTIVES.items():
        for size in _SIZES:
            if on_cpu and size > _LARGEST:
                break
            start_message, received, carrier = _started(collective, size, queue, mesh, transports)
            carriers[kind] = carrier
            time_message = functools.partial(_message_seconds, start_message, size, device)
            time_message()  # a warm-up
            # The time of the slowest rank, so that all ranks take the same decisions.
            slowest = max(everywhere(time_message(), mesh))
            # Each collective waits for all ranks, so they need no other synchronisation.
            count = max(3, min(15, int(_BURST / slowest)))
            durations = [time_message() for _ in range(count)]
            samples.append(Sample(kind, received, median(durations)))
            if kind == "all_gather":
                gather_seconds_per_byte = slowest / size
            if slowest > _ENOUGH:
                break

    guess = Link(name, 1e-4, 1e9, includes_packing=True, carried_by=tuple(carriers.items()))
    if on_cpu:
        # Messages of gloo take compute. A gather of a quarter of a second shows how much.
        size = min(16 * _LARGEST, max(_SIZES[0], int(_BURST / gather_seconds_per_byte)))
        gather = COLLECTIVES["all_gather"]
        start_message, received, _ = _started(gather, size, queue, mesh, transports)
        byte_overhead = (
            median(_compute_lost(start_message, mesh, device) for _ in range(3)) / received
        )
        overhead = median(_start_seconds(queue, mesh) for _ in range(15))
        guess = Link(name, 1e-4, 1e9, byte_overhead=byte_overhead, overhead=overhead)
    return fit(guess, samples, queue.group.size())


def _message_seconds(start_message: StartMessage, size: int, device: torch.device) -> float:
    """The seconds of one message.

    On a GPU it is one of a back-to-back series, because a step too launches a message before the last one is done.
    """
    if device.type == "cpu":
        return _seconds(lambda: _wait(start_message()), device)
    count = max(2, min(16, _SERIES // size))

    def series() -> None:
        for future in [start_message() for _ in range(count)]:
            _wait(future)

    return back_to_back_seconds(series, device, 1) / count


def _started(
    collective: Start, size: int, queue: Channel, mesh: DeviceMesh, transports: Transports
) -> tuple[StartMessage, int, str]:
    """A function that starts a collective, the bytes that a rank receives (about `size`), and the carrier."""
    n = queue.group.size()
    sizes = {"axis": n}
    rank = {"axis": queue.group.rank()}
    elements = n * max(1, size // 4 // (n - 1) // collective.kind.crossings)
    eqn = collective.example("axis", elements)
    member = torch.zeros(local_shape(eqn.ins[0], sizes, rank), device=mesh.device_type)
    transports.reserve(mesh, [(queue, eqn, sizes, 1)])
    module: Any = transports.start_module(eqn, sizes, rank, queue, lanes=1)
    carrier = "nccl"
    if isinstance(module, StreamedStart):
        carrier = _CARRIERS.get(module.transport.way, carrier)
    received = collective.wire_bytes(eqn, sizes)
    return lambda: module(member)[0].future, received, carrier


def _wait(future: Future) -> None:
    """Wait for the bytes of a message. Until then `future` keeps the receive buffer alive."""
    if future.work is not None:
        future.work.wait()


def _start_seconds(queue: Channel, mesh: DeviceMesh) -> float:
    """The seconds a CPU needs to start the smallest message."""
    start_message, *_ = _started(COLLECTIVES["all_gather"], _SIZES[0], queue, mesh, Transports())
    begin = time.perf_counter()
    future = start_message()
    seconds = time.perf_counter() - begin
    _wait(future)
    return seconds


def _compute_lost(start_message: StartMessage, mesh: DeviceMesh, device: torch.device) -> float:
    """The seconds of compute that a collective takes from matmuls that run at the same time.

    The loss is measured by the wall clock, which also counts other processes, and by the clock of this process. The
    result is the smaller of the two.
    """
    run = _matmul(256, torch.float32, device)

    def run_while(is_running: Callable[[], bool]) -> tuple[int, float, float]:
        """The number of matmuls, at least one, and the seconds that they take by both clocks."""
        begin = time.perf_counter()
        begin_process = time.process_time()
        _seconds(run, device)
        count = 1
        while is_running():
            _seconds(run, device)
            count += 1
        return count, time.perf_counter() - begin, time.process_time() - begin_process

    end = time.perf_counter() + _BURST
    # The matmuls and their seconds without the message.
    usual_count, usual_wall, usual_process = run_while(lambda: time.perf_counter() < end)

    # All ranks begin together.
    everywhere(None, mesh)
    thread = threading.Thread(target=_wait, args=(start_message(),))
    thread.start()
    count, wall, process = run_while(thread.is_alive)
    share = count / usual_count
    return max(0.0, min(wall - share * usual_wall, process - share * usual_process))
