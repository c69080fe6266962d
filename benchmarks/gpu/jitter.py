"""Look for a missing wait between streams: random pauses around every packing and collective, and poisoned buffers.

NCCL launches nothing for a group of one rank. So here a double takes its place. On the lane it fills the received
buffer with NaN, pauses, and then writes what was sent. All memory that PyTorch allocates is filled with NaN too. A
step that waits where it must has the same bits as without pauses. Four steps that do not wait must have others.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ztrans.runtime.cuda.nccl import StreamedStart
from ztrans.runtime.cuda.streams import Done, Streams

from .gpt_step import Config, Ours, Task
from .nccl import CONFIG, differing

SEEDS = 20
CAPTURES = 4  # with other pauses each
CONTROL_SEEDS = 5
STEPS = 3
MOST_CYCLES = 600_000  # of a pause: 0.3 ms at 2 GHz
PAUSES = random.Random(0)


def jitter(
    device: torch.device, left: Callable[[], float] = lambda: 200.0, config: Config = CONFIG
) -> Iterator[list[dict]]:
    """Stage 3, planned for 8 ranks, with random pauses around every packing and collective, NaN in every buffer before
    it is written, and a double of NCCL that writes on the lane. The state after 3 steps is compared with that without
    pauses, for 20 seeds. Then four wrong programs, which leave out one wait each: their bits must differ.
    """
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    lines = []
    with replaced(StreamedStart, _call=poisoned):
        for line in results(Task(config, device)):
            lines.append(line)
            yield lines


def sanitizer(
    device: torch.device, left: Callable[[], float] = lambda: 100.0, config: Config = CONFIG
) -> Iterator[list[dict]]:
    """PyTorch's CUDA stream sanitizer follows every kernel, event and wait of a step of stage 3, with the double of
    NCCL. It must find nothing in two steps, and something in each program that leaves out a wait.
    """
    # The import registers callbacks for streams, events and allocations, so it comes first.
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    torch.cuda.set_device(device)
    subjects = {"as it is": contextlib.nullcontext, **CONTROLS}
    del subjects["frees packed members early"]  # the sanitizer does not see that memory is reused
    lines = []
    with replaced(StreamedStart, _call=poisoned):
        step = Ours(Task(config, device), "eager", collectives=True)
        step()
        for name, wrong in subjects.items():
            torch.cuda.synchronize()
            found = "nothing"
            try:
                with wrong(), cuda_sanitizer.dispatch:
                    for _ in range(2):
                        step()
            except CUDASanitizerErrors as errors:
                found = f"{len(errors.errors)} races"
            is_right = (found == "nothing") == (name == "as it is")
            lines.append({"what": name, "result" if is_right else "failed": f"finds {found}"})
            yield lines


def results(task: Task) -> Iterator[dict]:
    for reduce_dtype in (None, torch.bfloat16):
        for backend in ("eager", "inductor"):
            what = f"{backend}, reductions in {'bf16' if reduce_dtype else 'fp32'}"
            step = Ours(task, backend, collectives=True, reduce_dtype=reduce_dtype)
            first = leaves(step)
            truth = trained(step, first)
            with pauses():
                runs = [seeded(step, first, seed) for seed in range(SEEDS)]
            yield judged(what, truth, runs)
            runs = []
            for seed in range(CAPTURES):
                step.compiled = step.lowered.compile(backend=backend, cuda_graph=True)
                with pauses():  # those of the capture are replayed
                    runs += [seeded(step, first, seed) for _ in range(SEEDS // CAPTURES)]
                step.compiled.close()
            yield judged(f"{what}, {CAPTURES} CUDA graphs", truth, runs)
            del step
            gc.collect()
    step = Ours(task, "eager", collectives=True)
    first = leaves(step)
    truth = trained(step, first)
    for name, wrong in CONTROLS.items():
        with wrong(), pauses():
            runs = [seeded(step, first, seed) for seed in range(CONTROL_SEEDS)]
        differing_runs = sum(differing(truth, run) > 0 for run in runs)
        line = {"what": f"wrong: {name}", "runs": len(runs), "differing": differing_runs}
        key, text = ("result", "noticed") if differing_runs else ("failed", "not noticed")
        yield line | {key: text}


def judged(what: str, truth: list[torch.Tensor], runs: list[list[torch.Tensor]]) -> dict:
    differing_runs = sum(differing(truth, run) > 0 for run in runs)
    line = {"what": what, "runs": len(runs), "differing": differing_runs}
    if not all(x.isfinite().all() for x in truth):
        return line | {"failed": "the state without pauses is not finite"}
    key, text = ("failed", "bits differ") if differing_runs else ("result", "the same bits")
    return line | {key: text}


def seeded(step: Ours, first: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    PAUSES.seed(seed)
    return trained(step, first)


def leaves(step: Ours) -> list[torch.Tensor]:
    """A copy of the tensors of the state."""
    return [x.clone() for x in tensors(step)]


def tensors(step: Ours) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(step.state) if isinstance(x, torch.Tensor)]


def trained(step: Ours, first: list[torch.Tensor]) -> list[torch.Tensor]:
    """The state after some steps from the state `first`."""
    with torch.no_grad():
        for x, value in zip(tensors(step), first, strict=True):
            x.copy_(value)
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return leaves(step)


# ---- pauses, poison, and wrong waits


def poisoned(self: Any, received: list[torch.Tensor], send_buffer: list[torch.Tensor]) -> None:
    """The collective of a group of one rank, which writes late, into a buffer full of NaN."""
    for into, sent in zip(received, send_buffer):
        value = sent.reshape(-1).view(torch.uint8).clone()
        target = into.view(-1).view(torch.uint8)
        target.fill_(255)
        pause()
        target.copy_(value)


def pause() -> None:
    torch.cuda._sleep(PAUSES.randrange(MOST_CYCLES))


@contextlib.contextmanager
def pauses() -> Iterator[None]:
    """Pauses around all work of the packing stream and of the lanes; and NaN in all memory that is allocated."""
    pack, communicate = Streams.pack, Streams.communicate

    @contextlib.contextmanager
    def slow_pack(self: Streams, members: Any) -> Iterator[None]:
        with pack(self, members):
            pause()
            yield
            pause()

    @contextlib.contextmanager
    def slow_communicate(self: Streams, lane: Any) -> Iterator[None]:
        with communicate(self, lane):
            pause()
            yield
            pause()

    with replaced(Streams, pack=slow_pack, communicate=slow_communicate):
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def replaced(owner: type, **methods: Any) -> Iterator[None]:
    old = {name: owner.__dict__[name] for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, method in old.items():
            setattr(owner, name, method)


def frees_early(self: Streams) -> None:
    self.packed = None


@contextlib.contextmanager
def packs_early(self: Streams, members: Any) -> Iterator[None]:
    with self.cuda.stream(self.packing):
        yield
    self.packed = self.packing.record_event(), members


@contextlib.contextmanager
def sends_early(self: Streams, lane: Any) -> Iterator[None]:
    with self.cuda.stream(lane):
        yield


def waits_without_event(self: Done) -> None:
    self.streams.release()


CONTROLS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "frees packed members early": lambda: replaced(Streams, release=frees_early),
    "packs before compute has written": lambda: replaced(Streams, pack=packs_early),
    "sends before the packing has ended": lambda: replaced(Streams, communicate=sends_early),
    "a wait without its event": lambda: replaced(Done, wait=waits_without_event),
}
