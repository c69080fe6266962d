"""A GPT on two hosts whose parameters and gradients are sent as codes: seconds, bytes and peaks, by the planner.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.fewer_bytes    # from the project's root; a minute or two

The GPT of `peers` in bf16 at stage 3, one rank on each host. Its device computes the step in 0.517 s, as one core
of the hosts of `netlab` did, and is otherwise the `cpu` of `zt.cluster`. Values have shapes only; times are
simulated, with the seconds that codes take. Without a limit, a plan takes 5% more memory than the program in its
written order. Writes benchmarks/results/fewer_bytes.md. Fails if a row misses its figure of `MOST`.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import sys
import time
from datetime import date
from typing import Any, NamedTuple

import torch
from torch.func import functional_call

import ztrans as zt
from ztrans.planning.cluster import LINKS, Link
from ztrans.planning.devices import CPU, Device
from ztrans.planning.durations import equation_seconds
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from ..peers.model import Config, Task, adamw, loss_of

PAGE = RESULTS / "fewer_bytes.md"
COMPUTE = 0.517  # seconds of the step without messages
GATHERS, BOTH = (zt.quantize_gathers(),), (zt.quantize_gathers(), zt.quantize_grads())
AUTO = zt.quantize_gathers("auto"), zt.quantize_grads("auto")
FORMATS: dict[str, tuple[zt.Transform, ...]] = {
    "bf16": (),
    "i8 gathers": GATHERS,
    "i8 gathers and gradients": BOTH,
    "i8 gathers, i4 gradients": (*GATHERS, zt.quantize_grads(4)),
    "i4 gathers and gradients": (zt.quantize_gathers(4), zt.quantize_grads(4)),
    'bits="auto"': AUTO,
}


class Case(NamedTuple):
    """A link between the hosts, and whether backward gathers every parameter again."""

    mbit: int
    reshard: Any

    def __str__(self) -> str:
        again = 'reshard="always"' if self.reshard == "always" else "free to keep values"
        return f"{self.mbit:,} Mbit/s, {again}"


CASES = Case(200, "auto"), Case(200, "always"), Case(1000, "auto"), Case(1000, "always")
# The most that a row may take, of the seconds and of the peak of the row with bf16.
MOST = {
    (CASES[1], "i8 gathers and gradients"): (0.60, 1.02),
    (CASES[3], "i8 gathers and gradients"): (None, 1.02),
    (CASES[0], 'bits="auto"'): (0.60, None),
    (CASES[2], 'bits="auto"'): (1.02, None),
    (CASES[3], 'bits="auto"'): (1.02, None),
}


def program() -> Traced:
    """The training step as written, in bf16."""
    task = Task(Config(), ranks=2, rank=0, bf16=True)
    model = task.model()
    optimizer = adamw(model.parameters())

    def loop_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        half = {name: p.bfloat16() for name, p in model.named_parameters()}
        loss = loss_of(functional_call(model, half, (x,)), y)
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    return zt.chain()(step).trace(state, *task.batch())


def device(written: Traced) -> Device:
    """A CPU whose products are so fast that it computes the step in `COMPUTE` seconds."""
    alone = zt.shard_params(zt.AbstractMesh(dp=1))
    slowest = zt.cluster(CPU, dp="ethernet-1g")
    graph = dataclasses.replace(written, transforms=(alone,)).lower(cluster=slowest).graph
    low, high = 1.0, 100.0
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        cluster = dataclasses.replace(slowest, device=CPU.with_clock(middle))
        if sum(equation_seconds(graph, cluster)) > COMPUTE:
            low = middle
        else:
            high = middle
    return CPU.with_clock(high)


def link(mbit: int) -> Link:
    ethernet = LINKS["ethernet-1g"]
    return dataclasses.replace(
        ethernet, name=f"{mbit} Mbit/s", bandwidth=ethernet.bandwidth * mbit / 1000
    )


def lowered(
    written: Traced, case: Case, formats: tuple[zt.Transform, ...], core: Device
) -> Lowered:
    shard = zt.shard_params(
        zt.AbstractMesh(dp=2), reshard=case.reshard, reduce_dtype=torch.bfloat16, outputs="local"
    )
    transforms = (shard, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather(), *formats)
    machines = zt.cluster(core, dp=link(case.mbit))
    return dataclasses.replace(written, transforms=transforms).lower(cluster=machines)


def chosen(low: Lowered) -> str:
    """The formats in which parameters and gradients are sent."""
    texts = []
    for (_, role), traffic in low.plan.traffic:
        if role in ("param", "grad"):
            formats = " and ".join(wire for wire, _ in traffic.coded) or "bf16"
            texts.append(f"{role} {formats}")
    return ", ".join(texts)


COLUMNS = [
    "link",
    "sent as",
    "step s",
    "of bf16",
    "bound s",
    "compute s",
    "received MiB",
    "peak MiB",
    "of bf16",
]


def rows(written: Traced, core: Device) -> tuple[list[list[str]], list[str]]:
    """The rows of the table, and the figures that are missed."""
    lines, wrong = [], []
    for case in CASES:
        first: tuple[float, int] | None = None
        for name, formats in FORMATS.items():
            low = lowered(written, case, formats, core)
            timeline, peak = low.timeline(), low.memory_analysis().peak
            first = first or (timeline.seconds, peak)
            shares = timeline.seconds / first[0], peak / first[1]
            bound = timeline.bound[0] if timeline.bound else 0.0
            line = [
                str(case),
                f"{name}: {chosen(low)}" if formats is AUTO else name,
                f"{timeline.seconds:.3f}",
                f"{shares[0]:.3f}",
                f"{bound:.3f}",
                f"{timeline.compute:.3f}",
                f"{low.cost_analysis().wire_bytes / 2**20:.1f}",
                f"{peak / 2**20:.1f}",
                f"{shares[1]:.3f}",
            ]
            print(f"| {' | '.join(line)} |", flush=True)
            lines.append(line)
            for share, most, of in zip(
                shares, MOST.get((case, name), (None, None)), ("seconds", "peak")
            ):
                if most is not None and share > most:
                    wrong.append(
                        f"{case}, {name}: {share:.3f} of the {of} of bf16, more than {most}"
                    )
    return lines, wrong


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    begin = time.process_time()
    written = program()
    lines, wrong = rows(written, device(written))
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.process_time() - begin
    table = [COLUMNS, ["---"] * len(COLUMNS), *lines]
    text = [
        "# A GPT of 12 million parameters on two hosts, sent as codes",
        "",
        f"{where}. Simulated; all programs took {seconds:.0f} s of one core.",
        "",
        *(f"| {' | '.join(line)} |" for line in table),
        "",
    ]
    PAGE.write_text("\n".join(text))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
