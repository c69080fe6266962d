"""Several NCCL ranks on one GPU: sharded steps are compared with lockstep, with FSDP2, and after failures.

    python -m benchmarks.gpu.two_ranks                   # every scenario
    python -m benchmarks.gpu.two_ranks --device cpu      # the same over gloo

NCCL refuses two ranks on one GPU if they are on the same host, which it recognises by NCCL_HOSTID. Here each rank has
another NCCL_HOSTID, so the ranks are hosts that share a card and talk over sockets. The kernels of NCCL, several
communicators, graph capture, and the end of groups are the real ones. Processes take turns on the card, so the times
mean nothing.

A scenario has a process for each rank. Rank 0 prints its results, one line of JSON for each. On GPUs the scenarios of
`ENDINGS` end all processes; how they end, and with which text, is their result.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 80.0  # the most that one scenario may take
STEPS = 3
HALF_ROUNDING = 5e-2  # the same where sums are rounded to bf16 in other places
ROUNDING = 1e-5  # the relative distance allowed where sums have another order
REPLAYS = 60
TIMEOUT = 20  # seconds: the time-out of the process group where a rank is killed
SHARED_CARD = {  # how NCCL runs several ranks on one card
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMMMEM": "CUDA",
}


class Ending(NamedTuple):
    """How the ranks of a scenario end on GPUs: the codes of the last one and of the others, and what these print."""

    last: tuple[int, ...]
    others: tuple[int, ...]
    text: str


# A rank that launches a message while the connection is lost is ended by PyTorch, which raises in a destructor.
ENDED = 1, -signal.SIGKILL
ENDED_OR_ABORTED = (*ENDED, -signal.SIGABRT)
KILLED = Ending((-signal.SIGKILL,), ENDED_OR_ABORTED, "has ended without a word: it was killed")
ENDINGS = {
    "an exception": Ending((1,), ENDED, "with ValueError: planted"),
    "an exception beside Inductor": Ending((1,), ENDED, "with ValueError: planted"),
    "a refused replay": Ending((1,), ENDED, "refused a step of"),
    "a disagreement": Ending(ENDED, ENDED, "did not do the same"),
    "a rank leaves": Ending((1,), ENDED, "by sys.exit"),
    "a rank is killed": KILLED,
    "a rank is killed in a step": KILLED,
    "a rank is killed between replays": KILLED,
}


# ---- the parent: it starts the ranks of a scenario, and collects what rank 0 prints


def two_ranks(
    device: Any, left: Callable[[], float] = lambda: 300.0, only: tuple[str, ...] = ()
) -> Iterator[list[dict]]:
    """Real NCCL with 2 and 4 ranks on one card, over sockets. Stages 0 to 3 are compared with lockstep on the same
    card, bit for bit in fp32 and in bf16 (on 4 ranks NCCL adds in another order than lockstep, so the figure is the
    relative distance). FSDP2 runs beside them. Then batches of another size on one rank, accumulation, CUDA graphs,
    an exception on one rank, and a rank that is killed.
    """
    lines: list[dict] = []
    for name, ranks in SCENARIOS.items():
        if only and name not in only:
            continue
        if left() < 15:
            lines.append({"scenario": name, "failed": "not run: the time was over"})
        else:
            lines += outcome(name, ranks, str(device).split(":")[0], min(SECONDS, left()))
        yield lines


def outcome(
    name: str, ranks: int, device: str, seconds: float, shares_card: bool = True
) -> list[dict]:
    """The results of one scenario. Each rank has a card of its own unless `shares_card`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "SCENARIO_SECONDS": str(seconds),
        }
        if shares_card:
            variables |= SHARED_CARD | {"SHARES_CARD": "1", "NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-m", "benchmarks.gpu.two_ranks"]
        command += ["--scenario", name, "--device", device]
        environment = {**os.environ, **variables}
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if name in ENDINGS else None,
                text=True,
            )
        )
    end = time.monotonic() + seconds
    lines = []
    endings = []
    outputs = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            ending = f"rank {rank} ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ending = f"rank {rank} was still running after {seconds:.0f} s"
        outputs.append(output)
        if name in ENDINGS:
            print(output, file=sys.stderr)
        if rank == 0:
            lines = [
                {"scenario": name, "ranks": ranks} | json.loads(line)
                for line in output.splitlines()
                if line.startswith("{")
            ]
        expected = expected_codes(name, device, is_last=rank == ranks - 1)
        if process.returncode not in expected:
            endings.append(ending)
    if name in ENDINGS and device == "cuda" and not endings:
        codes = [process.returncode for process in processes]
        lines.append({"scenario": name, "ranks": ranks} | said(name, outputs[:-1], codes[:-1]))
    if endings:
        lines.append({"scenario": name, "ranks": ranks, "failed": "; ".join(endings)})
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return lines


def expected_codes(name: str, device: str, is_last: bool) -> tuple[int, ...]:
    """The codes with which a rank of a scenario may end."""
    if name in ENDINGS and device == "cuda":
        return ENDINGS[name].last if is_last else ENDINGS[name].others
    dies = name.startswith("a rank is killed") and is_last
    return (-signal.SIGKILL,) if dies else (0,)


def said(name: str, outputs: list[str], codes: list[int]) -> dict[str, str]:
    """Whether the ranks that were ended have printed the text of the first failure."""
    results = []
    for output, code in zip(outputs, codes):
        line = next((x for x in output.splitlines() if x.startswith("ztrans: rank")), "")
        if code == -signal.SIGABRT:
            line = "PyTorch has aborted it"
        elif ENDINGS[name].text not in output:
            return {"what": "the other ranks", "failed": f"no {ENDINGS[name].text!r}: {line}"}
        results.append(line or "its own error")
    return {"what": "the other ranks", "result": "; ".join(results)[:300]}


# ---- the ranks


def report(what: str, result: str, is_right: bool = True, **figures: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        line = {"what": what, "result" if is_right else "failed": result} | figures
        print(json.dumps(line), flush=True)


def report_distance(what: str, apart: float, most: float = 0.0, **figures: Any) -> None:
    """Report how far a state is from that of lockstep, and whether that is too far."""
    result = "bits of lockstep" if apart == 0 else f"differs by {apart:.1e}"
    report(what, result, apart <= most, **figures)


class World:
    """A mesh of all ranks, a small GPT, its batches, and a loop that trains it."""

    def __init__(self, device: str, **sizes: int) -> None:
        import torch
        import torch.distributed as dist

        import ztrans as zt

        from ..peers.model import GPT, Config

        torch.manual_seed(0)
        self.device = device
        self.mesh = zt.make_mesh(device, **(sizes or {"dp": -1}))
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.config = Config(layers=2, width=64, heads=4, vocab=256, sequence=32, batch=4)
        self.new_model = lambda: GPT(self.config)

    def model(self) -> Any:
        import torch

        torch.manual_seed(0)
        return self.new_model().to(self.device)

    def batches(self, step: int, samples: int | None = None) -> list[tuple]:
        """The batch of each rank in one step."""
        import torch

        source = torch.Generator().manual_seed(100 + step)
        shape = samples or self.config.batch, self.config.sequence + 1
        batches = []
        for _ in range(self.ranks):
            tokens = torch.randint(self.config.vocab, shape, generator=source).to(self.device)
            batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return batches

    def loop(self, model: Any, optimizer: Any, autocast: bool = False) -> Callable:
        def loop_step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = self.loss(model, x, y, autocast)
            loss.backward()
            optimizer.step()
            return loss

        return loop_step

    def loss(self, model: Any, x: Any, y: Any, autocast: bool = False) -> Any:
        import torch

        from ..peers.model import loss_of

        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            logits = model(x)
        return loss_of(logits, y)

    def lifted(self, autocast: bool = False) -> tuple[Callable, Any]:
        import torch

        import ztrans as zt

        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
        return zt.lift(self.loop(model, optimizer, autocast), model, optimizer)

    def step(self, *transforms: Any, autocast: bool = False, **options: Any) -> tuple[Any, Any]:
        """The sharded step, and the whole state."""
        import ztrans as zt

        step, state = self.lifted(autocast)
        passes = (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
        return zt.chain(*transforms, zt.shard_params(self.mesh, **options), *passes)(step), state


def compared(world: World, what: str, passes: tuple = (), steps: int = STEPS, **how: Any) -> None:
    """Run steps on all ranks, and the same steps in lockstep on rank 0's GPU. Report how far the states differ."""
    options = {key: how.pop(key) for key in ("backend", "cuda_graph") if key in how}
    if world.device == "cpu":
        options.pop("cuda_graph", None)
    pause = how.pop("pause", False)
    most = how.pop("most", 0.0)
    step, state = world.step(*passes, **how)
    whole = clone(state)
    local = step.shard(state)
    lowered = step.lower(local, *world.batches(0)[world.rank])
    compiled = lowered.compile(**options)
    losses = []
    for k in range(steps):
        if pause:
            time.sleep(random.Random(k * 16 + world.rank).random() * 0.01)
        local, loss = compiled(local, *world.batches(k)[world.rank])
        losses.append(loss.detach().clone())
        whole, _ = lowered.lockstep(whole, world.batches(k))
    got = step.unshard(local)
    report_distance(what, distance(got, whole), most, steps=steps, loss=losses[-1].item())
    compiled.close()


def clone(state: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), state)


def distance(first: Any, second: Any) -> float:
    """The largest relative distance of a leaf; infinite if one side alone has a number that is not finite."""
    import torch
    from torch.utils import _pytree as pytree

    worst = 0.0
    for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        a, b = torch.as_tensor(a).double().cpu(), torch.as_tensor(b).double().cpu()
        if torch.equal(a, b):
            continue
        apart = ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def stages(device: str) -> None:
    world = World(device)
    for stage in range(4):
        compared(world, f"stage {stage}, fp32", stage=stage)
    transports(world)


def half_precision(device: str) -> None:
    import torch

    world = World(device)
    for stage in (1, 3):
        compared(
            world,
            f"stage {stage}, autocast, reductions in bf16",
            stage=stage,
            autocast=True,
            reduce_dtype=torch.bfloat16,
        )
    compared(world, "stage 3, autocast", stage=3, autocast=True)


def compiled_by_inductor(device: str) -> None:
    compared(World(device), "stage 3, inductor", stage=3, backend="inductor", most=ROUNDING)


def captured(device: str) -> None:
    """The step is replayed while the hosts of the ranks sleep at random."""
    world = World(device)
    for stage in (1, 3):
        compared(
            world,
            f"stage {stage}, CUDA graph, {REPLAYS} steps with random pauses",
            stage=stage,
            steps=REPLAYS,
            pause=True,
            cuda_graph=True,
        )


def transports(world: World, expected: str = "", **how: Any) -> list[str]:
    """Report what carries the collectives of stage 3, as the program prints it, and whether `expected` is among it.

    The ranks decide that when they first run a step with such messages, so this is called after one.
    """
    from ztrans.runtime.codegen import to_fx

    step, state = world.step(**{"stage": 3, **how})
    local = step.shard(state)
    lowered = step.lower(local, *world.batches(0)[world.rank])
    text = str(to_fx(lowered.graph, world.mesh))
    parts = text.split("by=")[1:]
    ways = sorted({part.splitlines()[0].split("]")[0] for part in parts})
    is_right = world.device == "cpu" or any(way.startswith(expected) for way in ways)
    report("transports of stage 3", "; ".join(ways), is_right)
    return ways


def symmetric(device: str) -> None:
    """All messages that its kernels can carry go through symmetric memory, although it is no faster on one card."""
    import math

    import torch

    import ztrans as zt
    from ztrans.runtime.cuda.symmetric import CudaSource, SymmetricMemory, Times

    def trial(self: Any, buffer: Any, kind: Any, from_all: Any) -> Times:
        return Times(1e-6 if kind.has_kernel else math.inf, 2e-6, kind.nbytes)

    SymmetricMemory.trial = trial
    if "SHARES_CARD" in os.environ:  # a card has no link to itself
        CudaSource.check_links = lambda self, devices: None
    world = World(device)
    half = {"stage": 3, "autocast": True, "reduce_dtype": torch.bfloat16}
    compared(world, "symmetric memory, stage 3, fp32", stage=3)
    transports(world, "symmetric all_gather")
    compared(world, "symmetric memory, stage 3, reductions in bf16", **half)
    compared(world, "symmetric memory, accumulate(2)", (zt.accumulate(2),), **half)
    compared(
        world,
        f"symmetric memory, CUDA graph, {REPLAYS} steps with random pauses",
        steps=REPLAYS,
        pause=True,
        cuda_graph=True,
        **half,
    )
    other_sizes(device)


def copied(device: str) -> None:
    """Copy engines carry all gathers, and all reductions of half precision, through symmetric memory."""
    import math

    import torch

    from ztrans.runtime.cuda.symmetric import CudaSource, SymmetricMemory, Times

    def trial(self: Any, buffer: Any, kind: Any, from_all: Any) -> Times:
        return Times(math.inf, 2e-6, kind.nbytes, 1e-6)

    SymmetricMemory.trial = trial
    if "SHARES_CARD" in os.environ:
        CudaSource.check_links = lambda self, devices: None
    world = World(device)
    half = {"stage": 3, "autocast": True, "reduce_dtype": torch.bfloat16}
    compared(world, "copies, stage 3, fp32", stage=3)
    transports(world, "copied all_gather")
    compared(
        world,
        f"copies, CUDA graph, {REPLAYS} steps with random pauses",
        steps=REPLAYS,
        pause=True,
        cuda_graph=True,
        **half,
    )
    transports(world, "copied reduce_scatter", **half)


def two_hosts(device: str) -> None:
    """Two ranks count as one host, so half precision is reduced hierarchically, which rounds the sums of hosts."""
    import torch

    from ztrans.runtime import session

    rank = int(os.environ["RANK"])
    session.host_name = lambda: (f"host {rank // 2}",)
    world = World(device)
    half = {"stage": 3, "autocast": True, "reduce_dtype": torch.bfloat16}
    compared(world, "hierarchical, stage 3", most=HALF_ROUNDING, **half)
    transports(world, "nccl hierarchical all_to_all", **half)
    what = "hierarchical, CUDA graph, 12 steps with random pauses"
    options = {"steps": 12, "pause": True, "cuda_graph": True}
    compared(world, what, most=HALF_ROUNDING, **options, **half)


def four(device: str) -> None:
    world = World(device)
    for stage in (1, 3):
        # NCCL adds the terms of 4 ranks in another order than lockstep.
        compared(world, f"stage {stage}, fp32", stage=stage, most=ROUNDING)


def hybrid(device: str) -> None:
    world = World(device, replica=2, dp=2)
    compared(
        world, "stage 3 inside 2 x 2", stage=3, axis="dp", replicate_axis="replica", most=ROUNDING
    )


def other_sizes(device: str) -> None:
    """Rank 0 has a smaller batch in the second step. The truth is the mean of the gradients, by hand."""
    import torch
    import torch.distributed as dist

    world = World(device)
    step, state = world.step(stage=3, outputs="local")
    local = step.shard(state)
    model = world.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    for k in range(4):
        samples = 2 if k == 1 and world.rank == 0 else None
        x, y = world.batches(k, samples)[world.rank]
        local, _ = step(local, x, y)
        optimizer.zero_grad()
        world.loss(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world.ranks
        optimizer.step()
    apart = distance(step.unshard(local)["params"], dict(model.named_parameters()))
    result = f"differs from data parallelism by hand by {apart:.1e}"
    report("4 steps, the second with 2 samples on rank 0, 4 on rank 1", result, apart <= ROUNDING)


def memory_of_nccl(device: str) -> None:
    """The memory of the GPU that is taken outside of PyTorch's allocator: by communicators, and by steps after that."""
    import torch

    from ztrans.runtime.session import session_of

    def outside() -> float:
        if device == "cpu":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / 2**20

    world = World(device)
    session = session_of(world.mesh)
    session.channel(None, "ranks")
    for purpose in ("gathers", "reductions"):
        before = outside()
        session.channel("dp", purpose)
        report(f"opening the communicator of {purpose}", "taken", MiB=round(outside() - before))
    before = outside()
    compared(world, "steps after that", stage=3)
    report("steps after that", "taken", MiB=round(outside() - before))


def micro_batches(device: str) -> None:
    import ztrans as zt

    world = World(device)
    compared(world, "stage 2, accumulate(2)", (zt.accumulate(2),), stage=2)


def beside_fsdp2(device: str) -> None:
    """FSDP2 with the same model, batches and optimizer: the losses of all steps are compared."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    world = World(device)
    step, state = world.step(stage=3)
    local = step.shard(state)
    compiled = step.lower(local, *world.batches(0)[world.rank]).compile()
    model = world.model()
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    loop_step = world.loop(model, optimizer)
    worst = 0.0
    for k in range(6):
        batch = world.batches(k)[world.rank]
        local, loss = compiled(local, *batch)
        theirs = loop_step(*batch).detach()
        dist.all_reduce(theirs)
        theirs /= world.ranks
        worst = max(worst, abs(loss.item() / theirs.item() - 1))
    result = f"largest relative difference {worst:.1e}"
    report("losses of 6 steps beside FSDP2", result, worst <= ROUNDING)
    compiled.close()


def ways(device: str) -> None:
    """What carries the messages where the ranks choose by their own trial. Between GPUs that NVLink joins, not NCCL."""
    import torch

    from ztrans.ops.symmetric import has_native_atomics

    world = World(device)
    compared(world, "ways, stage 3, fp32", stage=3)
    linked = device == "cuda" and "SHARES_CARD" not in os.environ
    if linked:
        linked = all(has_native_atomics(0, k) for k in range(1, torch.cuda.device_count()))
    only_nccl = all(way.startswith("nccl") for way in transports(world))
    report(
        "ways", "NCCL alone" if only_nccl else "others", not (linked and only_nccl), linked=linked
    )


def an_exception(device: str, **options: Any) -> None:
    """Rank 1 raises in the middle of a step. On GPUs all ranks end; on CPUs they make a new state and go on."""
    import torch.distributed as dist

    from ztrans.runtime import collectives

    world = World(device)
    step, state = world.step(stage=3)
    whole = clone(state)
    local = step.shard(clone(whole))
    lowered = step.lower(local, *world.batches(0)[world.rank])
    compiled = lowered.compile(**options)
    local, _ = compiled(local, *world.batches(0)[world.rank])
    begin = time.monotonic()
    forward = collectives.Start.__call__
    error = "none"
    calls = []

    def fails(self: Any, *members: Any) -> Any:
        calls.append(1)
        if world.rank == 1 and len(calls) == 3:
            raise ValueError("planted")
        return forward(self, *members)

    collectives.Start.__call__ = fails
    try:
        for k in range(1, 200):
            local, loss = compiled(local, *world.batches(k)[world.rank])
            loss.item()
    except Exception as caught:
        if device == "cuda":
            raise
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0][:120]}"
    finally:
        collectives.Start.__call__ = forward
    took = time.monotonic() - begin
    errors: list = [None] * world.ranks
    is_right = world.rank == 1 or error.startswith("LostRank")
    report("rank 0 while rank 1 raises", error, is_right, seconds=round(took, 1))
    local = step.shard(clone(whole))
    for k in range(STEPS):
        local, _ = compiled(local, *world.batches(k)[world.rank])
        whole, _ = lowered.lockstep(whole, world.batches(k))
    dist.all_gather_object(errors, error)
    apart = distance(step.unshard(local), whole)
    report_distance(f"{STEPS} steps after it, with a new state", apart, errors=errors)
    compiled.close()


def an_exception_beside_inductor(device: str) -> None:
    """The same while kernels of Inductor are launched, whose own launcher would keep Python's lock."""
    an_exception(device, backend="inductor")


def a_refused_replay(device: str) -> None:
    """A captured step, an eager evaluation, replays; then rank 1 passes another state. All ranks end."""
    world = World(device)
    step, state = world.step(stage=3)
    local = step.shard(state)
    captured = {"cuda_graph": True} if device == "cuda" else {}
    compiled = step.lower(local, *world.batches(0)[world.rank]).compile(**captured)
    for k in range(5):
        local, _ = compiled(local, *world.batches(k)[world.rank])
        if k == 3:
            world.loss(world.model(), *world.batches(k)[world.rank])
    report("replays beside an evaluation", "went on")
    if device == "cpu":
        return
    other = clone(local) if world.rank == 1 else local
    for k in range(5, 200):
        other, loss = compiled(other, *world.batches(k)[world.rank])
        loss.item()


def a_leave(device: str) -> None:
    """The last rank ends its program by sys.exit after two steps, and the others go on."""
    world = World(device)
    step, state = world.step(stage=3)
    local = step.shard(state)
    compiled = step.lower(local, *world.batches(0)[world.rank]).compile()
    for k in range(200):
        if k == 2 and world.rank == world.ranks - 1 and device == "cuda":
            sys.exit(1)
        local, loss = compiled(local, *world.batches(k)[world.rank])
        loss.item()
        if device == "cpu" and k == 3:
            return


def a_disagreement(device: str) -> None:
    """Rank 1 calls a step with another static argument, so it sends fewer messages. Both learn of it.

    On GPUs rank 0 has launched a gather that has no partner, so all ranks end; on CPUs they go on.
    """
    import torch
    import torch.distributed as dist

    import ztrans as zt

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT))
    mesh = zt.make_mesh(device, dp=-1)
    rank = dist.get_rank()

    def two_layers(state: dict, x: torch.Tensor, both: bool) -> tuple[dict, torch.Tensor]:
        params = {key: value.detach().requires_grad_() for key, value in state.items()}
        y = x @ params["first"]
        if both:
            y = y.relu() @ params["second"]
        loss = y.square().mean()
        used = ["first", "second"] if both else ["first"]
        grads = torch.autograd.grad(loss, [params[key] for key in used])
        moved = {key: state[key] - 0.1 * grad for key, grad in zip(used, grads)}
        return state | moved, loss.detach()

    torch.manual_seed(0)
    whole = {key: torch.randn(64, 64, device=device) / 8 for key in ("first", "second")}
    x = torch.ones(8, 64, device=device) * (1 + rank)
    step = zt.shard_params(mesh, stage=3)(two_layers)
    local = step.shard(clone(whole))
    for both in (True, False):
        local, _ = step(local, x, both)
    began = time.monotonic()
    error = "none"
    try:
        local, _ = step(local, x, rank == 0)
        local, _ = step(local, x, True)
    except Exception as caught:
        if device == "cuda":
            raise
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0][:160]}"
    took = time.monotonic() - began
    expected = "RuntimeError: a step of two_layers: the ranks of the mesh do not do the same"
    is_right = error.startswith(expected) and took < TIMEOUT
    report("ranks that call one step in two ways", error, is_right, seconds=round(took, 1))
    local = step.shard(clone(whole))
    lowered = step.lower(local, x, True)
    for _ in range(STEPS):
        local, _ = step(local, x, True)
        rows = [
            (torch.ones(8, 64, device=device) * (1 + r), True) for r in range(dist.get_world_size())
        ]
        whole, _ = lowered.lockstep(whole, rows)
    report_distance(
        f"{STEPS} steps after it, with a new state", distance(step.unshard(local), whole)
    )


def a_kill(device: str) -> None:
    """The last rank is killed before its second step. How long do the others take to raise?"""
    killed(device)


def a_kill_inside(device: str) -> None:
    """The last rank is killed in the middle of a step, after the first messages have started."""
    from ztrans.runtime import collectives

    forward = collectives.Start.__call__
    starts = []

    def dies(self: Any, *members: Any) -> Any:
        starts.append(1)
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and len(starts) == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *members)

    collectives.Start.__call__ = dies
    killed(device, steps_before=10)


def a_kill_of_a_captured_step(device: str) -> None:
    """The last rank is killed between two replays of a CUDA graph."""
    killed(device, steps_before=5, cuda_graph=device == "cuda")


def killed(device: str, steps_before: int = 1, cuda_graph: bool = False) -> None:
    """Run steps. The last rank kills itself after `steps_before` of them, if it was not killed before."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT))
    world = World(device)
    step, state = world.step(stage=3)
    local = step.shard(state)
    options = {"cuda_graph": True} if cuda_graph else {}
    compiled = step.lower(local, *world.batches(0)[world.rank]).compile(**options)
    error = "none"
    began = time.monotonic()
    try:
        for k in range(steps_before + 4):
            if k == steps_before and world.rank == world.ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            local, loss = compiled(local, *world.batches(k)[world.rank])
            loss.item()
    except Exception as caught:
        if device == "cuda":
            raise
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0][:160]}"
    took = time.monotonic() - began
    is_right = error.startswith("LostRank") and took < TIMEOUT + 15
    report("rank 0 after the other rank was killed", error, is_right, seconds=round(took, 1))
    sys.stdout.flush()
    os._exit(0)


RUNS: dict[str, Callable[[str], None]] = {
    "stages": stages,
    "half precision": half_precision,
    "CUDA graphs": captured,
    "FSDP2": beside_fsdp2,
    "batches of other sizes": other_sizes,
    "accumulation": micro_batches,
    "inductor": compiled_by_inductor,
    "symmetric memory": symmetric,
    "copies": copied,
    "ways": ways,
    "memory of NCCL": memory_of_nccl,
    "four ranks": four,
    "hybrid": hybrid,
    "two hosts": two_hosts,
    "an exception": an_exception,
    "an exception beside Inductor": an_exception_beside_inductor,
    "a refused replay": a_refused_replay,
    "a rank leaves": a_leave,
    "a disagreement": a_disagreement,
    "a rank is killed": a_kill,
    "a rank is killed in a step": a_kill_inside,
    "a rank is killed between replays": a_kill_of_a_captured_step,
}
OF_FOUR = ("four ranks", "hybrid", "two hosts")
SCENARIOS = {name: 4 if name in OF_FOUR else 2 for name in RUNS}


def run_rank(name: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    # Where each thread waits, shortly before the parent ends a rank that does not end by itself.
    faulthandler.dump_traceback_later(0.9 * float(os.environ["SCENARIO_SECONDS"]))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        RUNS[name](device)
    except BaseException as error:
        traceback.print_exc()
        if name in ENDINGS and device == "cuda":  # as expected: it ends as a program of a user does
            sys.exit(error.code if isinstance(error, SystemExit) else 1)
        if os.environ["RANK"] == "0":
            first = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {first[0] if first else ''}"
            print(json.dumps({"failed": text[:300]}), flush=True)
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scenario", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=[])
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    if args.scenario:
        run_rank(args.scenario, args.device)
        return
    end = time.monotonic() + args.seconds
    *_, lines = two_ranks(args.device, lambda: end - time.monotonic(), tuple(args.only))
    Path(os.environ.get("OUT", ".")).joinpath("gpu_two_ranks.json").write_text(
        json.dumps(lines, indent=1)
    )
    sys.exit(any("failed" in line for line in lines))


if __name__ == "__main__":
    main()
