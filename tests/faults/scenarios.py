"""Scenarios in which ranks of a mesh fail or disagree. Each rank prints its reports, one line of JSON for each.

Each rank runs `python tests/faults/scenarios.py SCENARIO`, in the environment that torchrun sets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans import compiled, stages
from ztrans.calling.leaf_records import check_whole
from ztrans.ir.collectives import ALL_GATHER, WAIT
from ztrans.runtime import agreement, session, stop
from ztrans.runtime.agreement import agree, agree_on_call
from ztrans.runtime.channels import Channel, LostRank
from ztrans.runtime.checkpoints import load as load_module
from ztrans.runtime.checkpoints.save import FolderWriter
from ztrans.runtime.session import session_of

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TIMEOUT = datetime.timedelta(seconds=6)  # of the user's group
WIDTH, LAYERS = 24, 4


def report(name: str, **fields) -> None:
    sys.stdout.write(json.dumps({"name": name, **fields}) + "\n")
    sys.stdout.flush()


def start() -> torch.distributed.device_mesh.DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))


# ---- a step


def params() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = {f"w{i}": (WIDTH, WIDTH) for i in range(LAYERS)} | {
        f"b{i}": (WIDTH,) for i in range(LAYERS)
    }
    return {name: 0.3 * torch.randn(shape, generator=source) for name, shape in shapes.items()}


def loss_of(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        x = torch.tanh(F.linear(x, weights[f"w{i}"], weights[f"b{i}"]))
    # With a batch of one sample this reshape is a view, not a copy, so the program has different equations.
    return F.mse_loss(x.transpose(0, 1).reshape(-1), y.transpose(0, 1).reshape(-1))


def updated(state: dict, grads: dict) -> dict:
    moments = {k: 0.9 * state["m"][k] + grads[k] for k in grads}
    weights = {k: p - 0.05 * moments[k] for k, p in state["params"].items()}
    return {"params": weights, "m": moments}


def train_step(state: dict, x: torch.Tensor, y: torch.Tensor) -> tuple[dict, torch.Tensor]:
    grads, value = grad_and_value(loss_of)(state["params"], x, y)
    return updated(state, grads), value


def sized_step(
    state: dict, x: torch.Tensor, y: torch.Tensor, rate: float, own: bool = True
) -> tuple[dict, torch.Tensor]:
    """A step whose update depends on a number, and on the sizes of its batch, and of that of all ranks."""
    grads, value = grad_and_value(loss_of)(state["params"], x, y)
    weights = {k: p - rate * grads[k] for k, p in state["params"].items()}
    all_rows, rows = zt.psum(torch.tensor(float(len(x)))), len(x) if own else 0
    return {"params": weights, "seen": state["seen"] + all_rows, "own": state["own"] + rows}, (
        value,
        torch.tensor(len(x)),
    )


def first_state() -> dict:
    return {"params": params(), "m": {k: torch.zeros_like(p) for k, p in params().items()}}


def transformed(mesh, stage: int, update: str = "eager", step: Callable = train_step) -> zt.Step:
    shard = zt.shard_params(mesh, stage=stage, outputs="local")
    return zt.chain(shard, zt.overlap_grads(update=update), zt.prefetch(), zt.fuse_cast_gather())(
        step
    )


def batch(step: int, rank: int, samples: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, WIDTH, generator=source), torch.randn(
        samples, WIDTH, generator=source
    )


def distance(a, b) -> float:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


def copied(state):
    return pytree.tree_map(
        lambda x: x.to_local().clone() if hasattr(x, "to_local") else x.clone(), state
    )


def same(a, b) -> bool:
    return all(map(torch.equal, pytree.tree_leaves(a), pytree.tree_leaves(b)))


# ---- faults


class Armed:
    """Calls `fault` on this rank at the `at`-th exchange, counted from now, on the channels for `purpose`."""

    def __init__(self, fault: Callable[[], None], at: int, purpose: str) -> None:
        self.fault, self.left, self.purpose, self.original = fault, at, purpose, Channel.exchange

    def __enter__(self) -> None:
        armed = self

        def exchange(channel, pieces, into, ranks=None, tag=None):
            if channel.purpose == armed.purpose:
                armed.left -= 1
                if armed.left == 0:
                    armed.fault()
            return armed.original(channel, pieces, into, ranks, tag)

        Channel.exchange = exchange

    def __exit__(self, *_) -> None:
        Channel.exchange = self.original


def interrupt() -> None:
    raise KeyboardInterrupt


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory is left (simulated)")


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def failed(run: Callable[[], object]) -> dict:
    """The error that a call raises, its notes, and the seconds until it is raised."""
    began = time.monotonic()
    try:
        run()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "notes": notes,
            "after": time.monotonic() - began,
        }
    return {"kind": "", "text": "", "notes": [], "after": time.monotonic() - began}


# ---- scenarios in which no rank ends early


def uneven(*stages: int) -> None:
    """The batch size differs between ranks and steps; the result is compared with data parallelism written by hand."""
    torch.set_default_dtype(torch.float64)
    mesh, steps = start(), 50
    sizes = [
        [random.Random(100 * k + r).choice([1, 2, 3, 7]) for r in range(WORLD)]
        for k in range(steps)
    ]
    sizes[-1] = [3, *[1] * (WORLD - 1)]  # the last small batch
    truth = first_state()
    for k in range(steps):
        grads = [
            grad_and_value(loss_of)(truth["params"], *batch(k, r, sizes[k][r]))[0]
            for r in range(WORLD)
        ]
        truth = updated(
            truth, {name: sum(g[name] for g in grads) / WORLD for name in truth["params"]}
        )
    for stage in stages:
        step = transformed(mesh, stage)
        state = step.shard(first_state())
        for k in range(steps):
            state, _ = step(state, *batch(k, RANK, sizes[k][RANK]))
        plans = {compiled.lowered.plan.digest for compiled in step._cache.values()}
        texts = {str(compiled.lowered) for compiled in step._cache.values()}
        report(
            f"uneven {stage}",
            distance=distance(step.unshard(state), truth),
            programs=len(texts),
            plans=len(plans),
        )


def disagreements() -> None:
    """Ranks call different steps or methods, and then the same ones again."""
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    state, _ = step(state, *batch(0, RANK))

    report("ended", **failed(lambda: step(state, *batch(1, RANK)) if RANK else step.unshard(state)))

    def flagged(state, x, y, decay):
        grads, value = grad_and_value(loss_of)(state["params"], x, y)
        grads = {k: g + 0.1 * state["params"][k] if decay else g for k, g in grads.items()}
        return updated(state, grads), value

    def fewer(state, x, y, all_layers):
        weights = (
            state["params"]
            if all_layers
            else {k: v for k, v in state["params"].items() if k != "b0"}
        )
        rest = {} if all_layers else {"b0": state["params"]["b0"]}
        grads, value = grad_and_value(lambda w: loss_of({**w, **rest}, x, y))(weights)
        whole = {
            k: grads[k] if k in grads else torch.zeros_like(p) for k, p in state["params"].items()
        }
        return updated(state, whole), value

    for name, function in (("update", flagged), ("messages", fewer)):
        branch = transformed(mesh, 3, step=function)
        report(name, **failed(lambda branch=branch: branch(state, *batch(1, RANK), RANK != 1)))
    branch = transformed(mesh, 3, step=fewer)
    state, _ = branch(state, *batch(1, RANK), True)
    report("known", **failed(lambda: branch(state, *batch(2, RANK), RANK != 1)))

    for stage in (0, 3):
        sized = transformed(mesh, stage, step=sized_step)
        seen = sized.shard({"params": params(), "seen": torch.zeros(()), "own": torch.zeros(())})
        seen, _ = sized(seen, *batch(0, RANK, 4), 0.1)
        for what, samples, rate in (("size", 4 - RANK, 0.1), ("number", 4, 0.1 + RANK)):
            report(
                f"{what} {stage}",
                **failed(functools.partial(sized, seen, *batch(1, RANK, samples), rate)),
            )
        seen, _ = sized(seen, *batch(3, RANK, 4), 0.2)
        for samples in (4, 4 - RANK):
            seen, _ = sized(seen, *batch(3, RANK, samples), 0.2, own=False)
        report(f"seen {stage}", rows=sized.unshard(seen)["seen"].item())

    renamed = transformed(mesh, 3, step=lambda state, x, y: train_step(state, x, y))
    report("names", **failed(lambda: (renamed if RANK else step)(state, *batch(2, RANK))))
    state, _ = step(state, *batch(2, RANK))  # no rank has sent anything, so all can go on
    report("goes on", whole=bool(torch.isfinite(step.unshard(state)["params"]["w0"]).all()))

    def logits(state, x, y):
        return state, zt.pmean(x @ state["params"]["w0"])

    mean = zt.shard_params(mesh)(logits)
    report("outputs", **failed(lambda: mean(state, *batch(3, RANK, 2 + RANK))))


def late() -> None:
    """As on GPUs, where no rank waits for the answer about a step before it launches the step."""
    mesh = start()
    agree_on_call(mesh, "a call that opens the connections")
    if RANK:
        time.sleep(3)
    ask = functools.partial(agree, session_of(mesh), "a step", 0, lambda values: "", launches=True)
    report("asked", **failed(ask))
    session_of(mesh).read_pending()
    session_of(mesh).launches_first = True
    sized = transformed(mesh, 3, step=sized_step)
    first = {"params": params(), "seen": torch.zeros(()), "own": torch.zeros(())}
    seen = sized.shard(first)
    seen, _ = sized(seen, *batch(0, RANK, 4), 0.1)
    report("number", **failed(lambda: sized(seen, *batch(1, RANK, 4), 0.1 + RANK)))
    report("next", **failed(lambda: sized(seen, *batch(2, RANK, 4), 0.1)))
    seen = sized.shard(first)
    for k in range(3):
        seen, _ = sized(seen, *batch(k, RANK, 4), 0.1)
    report("goes on", rows=sized.unshard(seen)["seen"].item())


def waits_apart() -> None:
    """Two hosts of two ranks. The ranks of a host wait for two gathers in different orders."""
    session.host_name = lambda: (f"host {RANK // 2}",)
    mesh = start()
    step = zt.shard_params(mesh)(train_step)
    state = step.shard(first_state())
    lowered = step.lower(state, *batch(0, RANK))
    report("waits", **failed(lambda: waiting_apart(lowered).compile()(state, *batch(0, RANK))))
    report("goes on", **failed(lambda: lowered.compile()(state, *batch(0, RANK))))


def waiting_apart(lowered: zt.stages.Lowered) -> zt.stages.Lowered:
    """The program with the first two gathers at its beginning; odd ranks wait for the second one first."""
    graph = lowered.graph
    starts = [e for e in graph.eqns if e.op is ALL_GATHER][:2]
    waits = [e for e in graph.eqns if e.op is WAIT and e.ins[0] in (s.out for s in starts)]
    first = [*starts, *(reversed(waits) if RANK % 2 else waits)]
    rest = [e for e in graph.eqns if e not in first]
    graph = zt.ir.check(graph.replace(eqns=(*first, *rest)))
    return dataclasses.replace(lowered, graph=graph)


def starts_apart() -> None:
    """Ranks pass different first states to `shard`."""
    mesh = start()
    for stage in (0, 3):
        step, seeded = transformed(mesh, stage), first_state()
        seeded["params"]["w2"] += 0.1 * RANK
        report(f"seeds {stage}", **failed(lambda step=step, seeded=seeded: step.shard(seeded)))
        state = step.shard(seeded, source=0)
        report(f"source {stage}", distance=distance(step.unshard(state), first_state()))
    reshaped = first_state()
    reshaped["params"]["w1"] = torch.zeros(WIDTH + RANK, WIDTH)
    report("shapes", **failed(lambda: transformed(mesh, 3).shard(reshaped, source=0)))
    fewer = first_state()
    if RANK:
        del fewer["m"]["b3"]
    report("leaves", **failed(lambda: transformed(mesh, 3).shard(fewer)))
    meta = first_state() if RANK == 0 else pytree.tree_map(lambda x: x.to("meta"), first_state())
    report("meta", **failed(lambda: transformed(mesh, 3).shard(meta)))


def threads() -> None:
    """A second thread takes a step on the mesh while the first thread is in one."""
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    state, _ = step(state, *batch(0, RANK))
    second_state, errors = step.shard(first_state()), []

    def take_step() -> None:
        errors.append(failed(lambda: step(second_state, *batch(1, RANK))))

    def run_second_thread() -> None:
        thread = threading.Thread(target=take_step)
        thread.start()
        thread.join()

    with Armed(run_second_thread, 2, "gathers"):
        state, _ = step(state, *batch(1, RANK))
    report("threads", **errors[0])
    state, _ = step(state, *batch(2, RANK))
    report("goes on", whole=bool(torch.isfinite(step.unshard(state)["params"]["w0"]).all()))


def forked() -> None:
    """The rank forks a child process, which ends, as the workers of a data loader do."""
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    for k in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        state, _ = step(state, *batch(k, RANK))
    report("forked", whole=bool(torch.isfinite(step.unshard(state)["params"]["w0"]).all()))


def resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as sizes:
        resident = int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    count = lambda folder: len(os.listdir(f"/proc/self/{folder}"))
    return {"descriptors": count("fd"), "threads": count("task"), "resident": resident}


def steady() -> None:
    """Takes a thousand steps, then destroys the process group and creates a new one, six times.

    One store serves all groups, because another process may take a port between two of them.
    """
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, WORLD, is_master=RANK == 0, multi_tenant=True, timeout=TIMEOUT)
    DTensor.from_local(torch.zeros(2), start(), [Shard(0)], run_check=False)
    dist.destroy_process_group()  # torch never frees the first group that a DTensor has used, so it is not measured
    for times in range(7):
        step = transformed(restart(store, times), 3)
        state = step.shard(first_state())
        for k in range(1000 if times == 0 else 2):
            state, _ = step(state, *batch(k, RANK))
            if k in (99, 999):
                report(f"after {k + 1}", **resources())
        report(f"group {times}", **resources())
        dist.destroy_process_group()
        if times == 0:
            report("called", **failed(lambda step=step, state=state: step(state, *batch(0, RANK))))
        del step, state


def restart(store: dist.Store, times: int) -> torch.distributed.device_mesh.DeviceMesh:
    """A new process group and its mesh. `times` counts them, since each needs keys of its own."""
    keys = dist.PrefixStore(f"group {times}", store)
    dist.init_process_group("gloo", store=keys, rank=RANK, world_size=WORLD, timeout=TIMEOUT)
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))


# ---- scenarios in which a rank fails


def one_fails(fault: Callable[[], None], stage: int, update: str, purpose: str, at: int) -> None:
    """Rank 1 fails in its third step. Every rank reports its error, its state, and the errors of the next calls."""
    mesh = start()
    step = transformed(mesh, stage, update)
    state = step.shard(first_state())
    for k in range(2):
        state, _ = step(state, *batch(k, RANK))
    before = copied(state)
    if RANK == 1:
        with Armed(fault, at, purpose):
            report("failed", **failed(lambda: step(state, *batch(2, RANK))))
    else:
        report("failed", **failed(lambda: step(state, *batch(2, RANK))))
    whole = same(copied(state), before)
    report("then", whole=whole, **failed(lambda: zt.Step.of(train_step).unshard(state)))
    report("shard", **failed(lambda: zt.Step.of(train_step).shard(state)))
    report("next", **failed(lambda: step(state, *batch(3, RANK))))


def last(fault: Callable[[], None]) -> Callable[[], None]:
    return lambda: one_fails(fault, 3, "last", "reductions", 1)


def eager(fault: Callable[[], None], stage: int) -> Callable[[], None]:
    """The fault happens at the last reduction of the step, when the last layers have already been updated."""

    def run() -> None:
        step, cluster = (
            transformed(zt.AbstractMesh(dp=WORLD), stage),
            zt.cluster("cpu", dp="ethernet-1g"),
        )
        lowered = step.lower(
            first_state(), *batch(0, 0), cluster=cluster
        )  # as a mesh of CPUs is planned for
        reductions = [
            e for e in lowered.graph.eqns if e.op.name in ("all_reduce", "reduce_scatter")
        ]
        one_fails(fault, stage, "eager", "reductions", len(reductions))

    return run


def cannot_compile() -> None:
    """Rank 1 cannot compile the program of its first step. It can when both ranks try again."""
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    make_runner = compiled.make_runner

    def without_compiler(*_):
        raise RuntimeError("the kernel does not compile")

    if RANK == 1:
        compiled.make_runner = without_compiler
    report("failed", **failed(lambda: step(state, *batch(0, RANK))))
    compiled.make_runner = make_runner
    report("goes on", **failed(lambda: step(state, *batch(0, RANK))))


def has_no_program() -> None:
    """Rank 1 has no program for its call: the first one needs more than its limit, later ones have a wrong batch."""
    mesh = start()
    small = zt.chain(zt.shard_params(mesh), zt.prefetch(memory=10_000 if RANK else 10**9))
    step = zt.shard_params(mesh)(train_step)
    state = step.shard(first_state())
    stages.ways_to_fit = lambda *_: []  # looking for them takes seconds
    report("limit", **failed(lambda: small(train_step)(state, *batch(0, RANK))))
    report("goes on", **failed(lambda: step(state, *batch(0, RANK))))
    x, y = batch(1, RANK)
    wrong = x[:, 1:] if RANK else x
    report("batch", **failed(lambda: step(state, wrong, y)))
    report("goes on too", **failed(lambda: step(state, x, y)))
    report("everywhere", **failed(lambda: step(state, x[:, 1:], y)))
    session_of(mesh).launches_first = True
    report("launched", **failed(lambda: step(state, wrong, y)))


def ends_early() -> None:
    """Rank 1 runs out of data and ends its program normally; the other ranks take one more step."""
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    for k in range(3 if RANK == 1 else 4):
        error = failed(lambda k=k: step(state, *batch(k, RANK)))
    report("last step", **error)


def interrupted_between_messages() -> None:
    """Rank 0 is interrupted after it has posted a receive, before it has sent its record, and resets its connections.

    Rank 1 gets no time meanwhile, so it begins to send when its connection has already been reset.
    """
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    state, _ = step(state, *batch(0, RANK))
    pids = from_every_rank(os.getpid())
    exchange = Channel.exchange

    def interrupted(channel, pieces, into, ranks=None, tag=None):
        time.sleep(0.3)  # rank 1 waits for its messages
        os.kill(pids[1], signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGCONT)).start()
        channel.group.recv([into[1]], 1, next(channel.tags))
        time.sleep(0.1)
        reset_connections_at_their_end()
        raise KeyboardInterrupt

    Channel.exchange = interrupted if RANK == 0 else exchange
    report("failed", **failed(lambda: step(state, *batch(1, RANK))))
    time.sleep(1)


def reset_connections_at_their_end() -> None:
    """When a connection of this process is closed, its peer gets a reset, as when messages have not been read."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def in_a_part() -> None:
    """Steps fail on a mesh that is a part of the world; the rank outside takes no part."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    store = dist.group.WORLD.get_group_store()
    if RANK == WORLD - 1:
        store.wait(["done"], datetime.timedelta(seconds=60))
        return
    mesh = DeviceMesh("cpu", torch.arange(WORLD - 1), mesh_dim_names=("dp",))
    step = transformed(mesh, 3, "last")
    state = step.shard(first_state())
    for k in range(3):
        state, _ = step(state, *batch(k, RANK))
        with Armed(out_of_memory if RANK else lambda: None, 1, "gathers"):
            report(f"failed {k}", **failed(functools.partial(step, state, *batch(k, RANK))))
    report("goes on", **failed(lambda: step(state, *batch(3, RANK))))
    if RANK == 0:
        store.set("done", "")


def interrupted_in_step(step: zt.Step, state: dict, data: tuple, after: float) -> dict:
    """The error of a step that a signal handler interrupts `after` so many seconds.

    A signal that arrives before or after the step raises nothing.
    """

    def raise_in_step(_, frame):
        while frame is not None:
            if frame.f_code is zt.Step.__call__.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    signal.signal(signal.SIGALRM, raise_in_step)
    gc.disable()  # an exception in a callback of the garbage collector would be lost
    signal.setitimer(signal.ITIMER_REAL, after)
    error = failed(lambda: step(state, *data))
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
    return error


def from_every_rank(value: object) -> list:
    """The values of all ranks, through the user's own group."""
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def at_second_try(run: Callable[[], object]) -> object:
    """A rank that had ended its step before another one was interrupted learns that in its next call."""
    try:
        return run()
    except LostRank:
        return run()


def interrupts(shots: int) -> Callable[[], None]:
    """In each round, a random rank is interrupted at a random moment of a step, of its agreement too."""

    def run() -> None:
        mesh = start()
        source = random.Random(shots)
        steps = [transformed(mesh, 3, update) for update in ("eager", "last")]
        state, truth = steps[0].shard(first_state()), first_state()
        for step in steps:
            for _ in range(4):
                began = time.monotonic()
                state, _ = step(state, *batch(0, RANK))
        takes = max(from_every_rank(time.monotonic() - began))
        counts = {"interrupted": 0, "torn": 0, "told": 0, "slow": 0, "wrong": 0}
        for k in range(shots):
            step, victim = steps[k % 2], source.randrange(WORLD)
            after = max(1e-4, takes * source.uniform(0, 1.5))
            state = at_second_try(lambda step=step, truth=truth: step.shard(truth))
            old = copied(state)
            mean = [torch.cat(parts) for parts in zip(*(batch(k, r) for r in range(WORLD)))]
            new, _ = train_step(truth, *mean)
            dist.barrier()
            if victim == RANK:
                error = interrupted_in_step(step, state, batch(k, RANK), after)
            else:
                error = failed(lambda step=step, state=state, k=k: step(state, *batch(k, RANK)))
            errors = from_every_rank(error)
            torn = failed(lambda state=state: check_whole(pytree.tree_leaves(state), "step"))[
                "text"
            ]
            new_parts = copied(at_second_try(lambda step=step, new=new: step.shard(new)))
            is_new = distance(copied(state), new_parts) < 1e-5
            is_old = same(copied(state), old)
            ended = all(not error["kind"] for error in errors)
            counts["interrupted"] += errors[victim]["kind"] == "KeyboardInterrupt"
            counts["torn"] += bool(torn)
            counts["told"] += error["kind"] == "LostRank" and "KeyboardInterrupt" in error["text"]
            counts["slow"] += error["after"] > 0.9 * TIMEOUT.total_seconds()
            counts["wrong"] += not (is_new if ended else is_new or is_old or torn)
            if error["kind"] and error["kind"] not in ("LostRank", "KeyboardInterrupt"):
                report(f"other {k}", **error)
            truth = new if ended else truth
        report("interrupts", **counts)

    return run


def other_batches() -> None:
    """The batch of rank 1 has another key, or the same ones in another order, or needs a gradient."""
    mesh = start()

    def keyed(state, data):
        return train_step(state, data["x"], data["y"])

    step = transformed(mesh, 3, step=keyed)
    state = step.shard(first_state())
    x, y = batch(0, RANK)
    state, _ = step(state, {"x": x, "y": y})
    wrong = {
        "key": {"x": x, "y": y, "mask": x},
        "order": {"y": y, "x": x},
        "gradient": {"x": x.clone().requires_grad_(), "y": y},
    }
    for name, data in wrong.items():
        mine = data if RANK == 1 else {"x": x, "y": y}
        report(name, **failed(lambda mine=mine: step(state, mine)))
        report(f"after {name}", **failed(lambda: step(state, {"x": x, "y": y})))


def many_ranks() -> None:
    """More ranks than one round of records reaches: they run different versions; one makes another call, one stops."""
    mesh = start()
    versions = agreement._versions
    if RANK == WORLD - 1:
        agreement._versions = lambda: versions().replace("torch 2", "torch 1")
    report("versions", **failed(lambda: agree_on_call(mesh, "first")))
    agreement._versions = versions
    report("same", **failed(lambda: agree_on_call(mesh, "first")))
    report("calls", **failed(lambda: agree_on_call(mesh, "second" if RANK == 7 else "other")))
    report("goes on", **failed(lambda: agree_on_call(mesh, "third")))
    if RANK == WORLD // 2:
        zt.request_stop()
    before = session_of(mesh).stop_requested
    agree_on_call(mesh, "fourth")
    report("stops", before=before, after=session_of(mesh).stop_requested)


def stops() -> None:
    """In each round a rank gets a signal at a random moment, and both ranks leave their loop."""
    called = []
    signal.signal(signal.SIGALRM, lambda *_: called.append("before"))
    zt.stop_on(signal.SIGALRM, signal.SIGTERM)
    mesh = start()
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    state, _ = step(state, *batch(0, RANK))
    source = random.Random(0)
    taken = []
    for k in range(20):
        seconds = source.uniform(0.001, 0.1)
        if k % WORLD == RANK:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        steps = 0
        while not step.stop_requested:
            state, _ = step(state, *batch(0, RANK))
            steps += 1
        taken.append(steps)
        dist.barrier()
        stop._requested.clear()  # the rounds stand for processes of their own
        session_of(mesh).stop_requested = False
    report("stops", taken=taken, called=len(called))


class Done:
    """The event of a step that a GPU has ended."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


def as_on_gpus() -> None:
    """Rank 1 fails in a step that the host of rank 0 launches; then it calls the step again."""
    session.ends_together = lambda device_type: True
    torch.Event = Done
    mesh = start()
    session_of(mesh).launches_first = True
    step = transformed(mesh, 3)
    state = step.shard(first_state())
    state, _ = step(state, *batch(0, RANK))
    if RANK == 1:
        with Armed(out_of_memory, 1, "gathers"):
            report("failed", **failed(lambda: step(state, *batch(1, RANK))))
        report("then", **failed(lambda: step(state, *batch(1, RANK))))
        report("saved", **failed(lambda: zt.save("never", state)))
        os._exit(0)
    report("launches", launched=session_of(mesh).watcher.in_flight.launched)
    step(state, *batch(1, RANK))
    report("went on")


def killed_while_saving() -> None:
    """Rank 1 is killed before it writes its part of a second save."""
    step = transformed(start(), 3)
    state, folder = step.shard(first_state()), [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"
    zt.save(path, state).result()
    before = step.unshard(state)
    state, _ = step(state, *batch(0, RANK))
    if RANK == 1:
        FolderWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = failed(zt.save(path, state).result)
    report("save", whole=same(zt.load(path, first_state(), train_step), before), **error)
    shutil.rmtree(folder[0])


def failed_saves() -> None:
    """Rank 1 cannot copy its part of a save; it writes another part too late, and one elsewhere; its file is damaged;
    it finds no checkpoint; the ranks load different checkpoints."""

    def filled(value: float) -> dict[str, torch.Tensor]:
        return step.shard({"w": torch.full((8, 4), value)})

    def rows(path: Path) -> list[float]:
        return zt.load(path, {"w": torch.zeros(8, 4)}, train_step)["w"][:, 0].tolist()

    def without_memory(*_) -> None:
        raise MemoryError("no memory is left on the host (simulated)")

    def write_late(*arguments) -> object:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return write_data(*arguments)

    def write_elsewhere(writer: FolderWriter, *arguments) -> object:
        results = write_data(writer, *arguments)
        (writer.unfinished / "__1_0.distcp").unlink()  # as the first rank sees it
        return results

    warnings.simplefilter("ignore")
    step = zt.shard_params(start(), stage=3)(train_step)
    folder = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"
    stage, write_data = FolderWriter.stage, FolderWriter.write_data
    if RANK == 1:
        FolderWriter.stage = without_memory
    report("copied", **failed(lambda: zt.save(path, filled(1.0)).result()))
    FolderWriter.stage = stage
    zt.save(path, filled(2.0)).result()
    report("after a copy", rows=rows(path))
    if RANK == 1:
        FolderWriter.write_data = write_late
    report("late", **failed(lambda: zt.save(path, filled(3.0)).result()))
    FolderWriter.write_data = write_data
    dist.barrier()
    zt.save(path, filled(4.0)).result()
    report("after a late one", rows=rows(path))
    if RANK == 1:
        FolderWriter.write_data = write_elsewhere
    report("elsewhere", **failed(lambda: zt.save(path, filled(4.5)).result()))
    FolderWriter.write_data = write_data
    report("after one elsewhere", rows=rows(path))
    dist.barrier()
    if RANK == 1:
        written = bytearray((path / "__1_0.distcp").read_bytes())
        written[len(written) // 2] ^= 1
        (path / "__1_0.distcp").write_bytes(written)
    dist.barrier()
    like = {"w": torch.zeros(8, 4)}
    report("flipped", **failed(lambda: zt.load(path, like, step)))
    complete_folder = load_module._complete_folder
    if RANK == 1:  # as if its disk were another one
        load_module._complete_folder = lambda _: complete_folder(path / "nowhere")
    report("absent", **failed(lambda: zt.load(path, like, step)))
    load_module._complete_folder = complete_folder
    other = Path(folder[0]) / "other"
    zt.save(other, filled(5.0)).result()
    if RANK == 1:  # as if the folder of rank 1 were on another file system
        load_module._complete_folder = lambda path: other
    report("load", **failed(lambda: zt.load(path, like, step)))
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder[0])


SCENARIOS: dict[str, Callable[[], None]] = {
    "uneven": functools.partial(uneven, 0, 3),
    "uneven_1_2": functools.partial(uneven, 1, 2),
    "disagreements": disagreements,
    "starts_apart": starts_apart,
    "waits_apart": waits_apart,
    "late": late,
    "threads": threads,
    "forked": forked,
    "steady": steady,
    "cannot_compile": cannot_compile,
    "has_no_program": has_no_program,
    "ends_early": ends_early,
    "killed": eager(signalled(signal.SIGKILL), 0),
    "stopped": eager(signalled(signal.SIGSTOP), 3),
    "interrupted": eager(interrupt, 0),
    "interrupted_last": last(interrupt),
    "interrupts": interrupts(20),
    "interrupts_200": interrupts(200),
    "interrupted_between_messages": interrupted_between_messages,
    "other_batches": other_batches,
    "many_ranks": many_ranks,
    "stops": stops,
    "memory": eager(out_of_memory, 3),
    "as_on_gpus": as_on_gpus,
    "in_a_part": in_a_part,
    "killed_last": last(signalled(signal.SIGKILL)),
    "killed_while_saving": killed_while_saving,
    "failed_saves": failed_saves,
}


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
