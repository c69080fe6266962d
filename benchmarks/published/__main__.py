"""Published runs of others, simulated with their own schedules, beside what they measured.

    python -m benchmarks.published                        # all rows: three minutes on one core
    python -m benchmarks.published --rows torchtitan      # the rows whose name contains a text; writes nothing

Each step is written as its authors wrote it (`published_models.py`), FSDP orders it (`published_schedule.py`), and what
was compiled runs in fused kernels (`published_fusion.py`); the planner of ztrans has no part in it. Nothing was fitted
to any of these runs. Writes benchmarks/results/published.md and .json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date

import torch

import ztrans as zt
from ztrans.ir.graph import Eqn, Graph, dce
from ztrans.planning.cluster import LINKS, Cluster, Link
from ztrans.planning.devices import DEVICES, Device
from ztrans.planning.simulate import timeline_of
from ztrans.report.event import COMPUTE
from ztrans.report.timeline import Timeline
from ztrans.rewrites.erase import erase_marks, erase_trivial
from ztrans.transforms.base import rewritten

from .. import RESULTS
from .fusion import fused_seconds
from .memory import reserved_bytes
from .models import (
    LLAMA_8B,
    MPT_1B,
    MPT_7B,
    MPT_13B,
    MPT_30B,
    Sizes,
    decoupled_adamw,
    foreach_adamw,
    fused_adamw,
    init,
    make_model,
    make_step,
)
from .schedule import by_fsdp, copied_bytes

GIB = 2**30
NEAR = 0.15  # how far from the measurement a row may be
LAYERS = (2, 4)  # that are simulated; the others are like those in the middle
LOSS = ("FusedCrossEntropy",)  # one kernel forward and one backward, written by hand
BLOCKS = ("LlamaBlock", "RMSNorm", "rotate")  # torchtitan compiles each block, and nothing else


@dataclass(frozen=True)
class Row:
    """A published run, and what was measured: tokens a second of one GPU, and the peak in GiB where it is known."""

    name: str
    source: str
    sizes: Sizes
    device: str
    gpus: int
    sequence: int
    batch: int  # of a micro-batch
    tokens: float
    peak: float | None = None
    micro: int = 1
    checkpoint: str | None = None
    update: Callable = decoupled_adamw
    compiled: tuple[str, ...] = LOSS  # the functions and classes whose operations are compiled
    chunks: int = 1  # of the loss
    fsdp: int = 1  # FSDP1 or FSDP2
    attention: str = (
        "flash"  # the kernel: flash (FlashAttention-2), cudnn, or triton (FlashAttention in Triton)
    )

    @property
    def seconds(self) -> float:
        """The measured seconds of a step."""
        return self.micro * self.batch * self.sequence / self.tokens

    def is_compiled(self, e: Eqn) -> bool:
        return e.source is not None and e.source.function.split(".")[0] in self.compiled


def foundry(name: str, sizes: Sizes, sequence: int, batch: int, tokens: float, **more) -> Row:
    """A row of llm-foundry's tables of October 2023: 8 H100s unless `more` says otherwise.

    They ran with `attn_impl: triton`, the default of its `submit_benchmarks.py` then, and flash-attn 1.0.9.
    """
    settings = {"device": "h100", "gpus": 8, "attention": "triton", **more}
    return Row(
        name, "llm-foundry", sizes, sequence=sequence, batch=batch, tokens=tokens, **settings
    )


def titan(name: str, source: str, batch: int, tokens: float, peak: float, **more) -> Row:
    """A row of Llama 3 8B on Meta's hosts of 8 H100s with 96 GB and 500 W."""
    settings = {"gpus": 8, "compiled": (), **more}
    return Row(
        name, source, LLAMA_8B, "h100_96gb_500w", sequence=8192, batch=batch, tokens=tokens, peak=peak,
        checkpoint="selective", update=foreach_adamw, fsdp=2, **settings,
    )  # fmt: skip


def forge(name: str, gpus: int, tokens: float) -> Row:
    """A row of Llama 3 8B on one host of 4 H200s, compiled, of April 2026, by the attention of cuDNN."""
    return Row(
        name, "KempnerForge", LLAMA_8B, "h200", gpus, sequence=4096, batch=4, tokens=tokens, micro=2,
        checkpoint="block", update=fused_adamw, compiled=(*BLOCKS, "fused_adamw"), fsdp=2, attention="cudnn",
    )  # fmt: skip


BLOCK = {"checkpoint": "block"}
A100 = {"device": "a100", "micro": 3}
ROWS = [
    foundry("MPT 1B", MPT_1B, 2048, 14, 45455),
    foundry("MPT 7B", MPT_7B, 2048, 6, 10643),
    foundry("MPT 13B", MPT_13B, 2048, 2, 4792),
    foundry("MPT 7B, 8,192 tokens", MPT_7B, 8192, 8, 6935, micro=2, **BLOCK),
    foundry("MPT 7B, 32,768 tokens", MPT_7B, 32768, 2, 3318, micro=2, **BLOCK),
    foundry("MPT 7B, 65,536 tokens", MPT_7B, 65536, 1, 1956, micro=2, **BLOCK),
    foundry("MPT 30B", MPT_30B, 2048, 3, 2002, micro=21, **BLOCK),
    foundry("MPT 13B, A100", MPT_13B, 2048, 2, 2262, **A100),
    foundry("MPT 13B, 2 hosts", MPT_13B, 2048, 2, 4767, gpus=16),
    foundry("MPT 13B, 8 hosts", MPT_13B, 2048, 2, 4800, gpus=64),
    foundry("MPT 1B, 8 hosts", MPT_1B, 2048, 20, 44402, gpus=64),
    titan("Llama 3.1 8B, eager", "torchtitan 2024-12", 2, 5762, 82.4),
    titan("Llama 3.1 8B, compiled", "torchtitan 2024-12", 2, 6667, 77.0, compiled=BLOCKS),
    titan("Llama 3.1 8B, eager, 16 hosts", "torchtitan 2024-12", 2, 5605, 67.0, gpus=128),
    titan("Llama 3.1 8B, compiled, 16 hosts", "torchtitan 2024-12", 2, 6514, 62.0, gpus=128, compiled=BLOCKS),
    titan("Llama 3 8B, loss whole", "torchtitan #996", 1, 5957, 49.58),
    titan("Llama 3 8B, loss in 8 chunks", "torchtitan #996", 1, 5957, 42.26, chunks=8),
    titan("Llama 3 8B, compiled", "torchao", 1, 6150, 47.65, compiled=BLOCKS),
    forge("Llama 3 8B, compiled, 2 H200s", 2, 18728 / 2),
    forge("Llama 3 8B, compiled, 4 H200s", 4, 38983 / 4),
]  # fmt: skip

# Pairs of rows, the slower one first.
ORDER = [
    ("Llama 3.1 8B, eager", "Llama 3.1 8B, compiled"),
    ("Llama 3.1 8B, eager, 16 hosts", "Llama 3.1 8B, compiled, 16 hosts"),
    ("Llama 3.1 8B, eager, 16 hosts", "Llama 3.1 8B, eager"),
    ("MPT 7B, 65,536 tokens", "MPT 7B, 32,768 tokens"),
    ("MPT 7B, 32,768 tokens", "MPT 7B, 8,192 tokens"),
    ("MPT 7B, 8,192 tokens", "MPT 7B"),
    ("MPT 13B, A100", "MPT 13B"),
    ("Llama 3 8B, compiled, 2 H200s", "Llama 3 8B, compiled, 4 H200s"),
]

FAR = """\
- MPT on two and eight hosts, and MPT 30B: FSDP1 handles gradients as one flat tensor. Autograd joins the gradients of a
  block, FSDP divides them before they are sent and casts them after, which reads and writes 8 bytes for each parameter
  and micro-batch in half precision, and more in fp32. The simulated schedule packs them once. For the 30B model and its
  21 micro-batches this is 3% of the step. No publication says what the rest of the difference is.
- All rows of 2023 are simulated too fast, by 3 to 20%, and those of 2024 to 2026 are within 12%: the simulation has
  no jitter between ranks, no garbage collection and no loader.
- torchtitan on 16 hosts: for want of jitter between hosts, the shorter update makes up for the network.
"""

NOT_SIMULATED = [
    (
        "torchao and torchtitan with float8",
        "parameters that are gathered in float8 are tensor subclasses there, which the leaves of a state may not be",
    ),
    (
        "torchtitan, FSDP with CP",
        "ring attention over a sharded sequence: the step has no such operation",
    ),
    ("torchtitan, 70B, FSDP 32 x TP 8", "it runs in float8, and asynchronous TP splits matmuls"),
    ("torchtitan, 405B, PP 8", "a program has no pipeline stages"),
    (
        "NeMo-RL, Qwen3-0.6B, optimizer on the host",
        "Adam runs on the CPU; a program has one processor",
    ),
]


def link_of(row: Row) -> Link:
    """NVLink inside a host, and a NIC for each GPU between hosts. NCCL sums fp32 on the way, without a kernel more."""
    inside = dataclasses.replace(
        LINKS["nvlink3" if row.device == "a100" else "nvlink4"], unpack=(("reduce_scatter", 0.0),)
    )
    if row.gpus <= 8:
        return inside
    between = dataclasses.replace(LINKS["infiniband"], unpack=inside.unpack)
    return zt.by_host(8, inside, between)


def programs(row: Row, cluster: Cluster) -> tuple[Graph, ...]:
    """The step of a micro-batch with a few of its layers, and with a few more."""
    return tuple(program(row, cluster, layers) for layers in LAYERS)


def program(row: Row, cluster: Cluster, layers: int) -> Graph:
    """The step of a micro-batch with so many layers, in the order of FSDP."""
    sizes = dataclasses.replace(row.sizes, layers=layers)
    by_cudnn = row.attention == "cudnn"
    model = make_model(sizes, row.sequence, row.checkpoint, row.chunks, by_cudnn)
    tokens = torch.empty(row.batch, row.sequence + 1, dtype=torch.int64, device="meta")
    shard = zt.shard_params(zt.AbstractMesh(dp=row.gpus), axis="dp", reduce_dtype=torch.float32)
    chain = zt.chain(shard, zt.overlap_grads(update="last"), zt.prefetch(), zt.fuse_cast_gather())
    traced = chain(make_step(model, row.update)).trace(init(model), tokens)
    graph = traced.graph
    for transform in sorted(traced.transforms, key=lambda t: t.phase):
        graph = rewritten(graph, transform)
    return by_fsdp(dce(erase_trivial(erase_marks(graph))), cluster, row.fsdp)


# FlashAttention-2 is 1.3 to 2.5 times as fast as FlashAttention in Triton (its paper, section 4.1); the mean of the two
# in logarithms is 1.8.
OF_TRITON = 1 / 1.8


def cluster_of(row: Row) -> Cluster:
    """The machine of a row."""
    device = DEVICES[row.device]
    if row.attention == "triton":
        device = with_slower_attention(device, OF_TRITON)
    return zt.cluster(device, dp=link_of(row))


def with_slower_attention(device: Device, share: float) -> Device:
    """A device whose fused attention reaches a share of its rate."""
    rates = {}
    for name, rate in device.flops:
        rates[name] = rate * share if "attention" in name else rate
    return dataclasses.replace(device, flops=tuple(rates.items()))


def of_all_layers(row: Row, few: float, more: float) -> float:
    """A figure of all layers, from those of a few and of a few more: the layers in the middle are alike."""
    return few + (more - few) / (LAYERS[1] - LAYERS[0]) * (row.sizes.layers - LAYERS[0])


def step_seconds(row: Row, graph: Graph, cluster: Cluster) -> float:
    """The seconds of a step with the layers of a program. All micro-batches but the last run without the update."""
    line = timeline_of(graph, cluster, fused_seconds(graph, cluster, row.is_compiled))
    copies = copied_bytes(graph, row.fsdp) / cluster.device.bandwidth
    update = in_update(line)
    return row.micro * (line.seconds - update + copies) + update


def simulated(row: Row, graphs: Iterable[Graph], cluster: Cluster) -> float:
    """The seconds of a step."""
    return of_all_layers(row, *(step_seconds(row, graph, cluster) for graph in graphs))


def reserved(row: Row, graphs: Iterable[Graph]) -> float | None:
    """The GiB that PyTorch's allocator reserves, if they were measured."""
    if row.peak is None:
        return None
    return of_all_layers(row, *(reserved_bytes(graph, row.is_compiled) for graph in graphs)) / GIB


def in_update(line: Timeline) -> float:
    """The seconds of the update."""
    events = (e for e in line.events if e.lane == COMPUTE and e.eqn.region == "update")
    return sum(e.seconds for e in events)


def measure(rows: Iterable[Row]) -> list[dict]:
    results = []
    made: dict[
        Row, tuple[Graph, ...]
    ] = {}  # rows that only measure something else, or compile, share programs
    for row in rows:
        cluster = cluster_of(row)
        key = dataclasses.replace(
            row, name="", source="", tokens=0, peak=None, micro=1, compiled=()
        )
        if key not in made:
            made[key] = programs(row, cluster)
        results.append({
            "name": row.name, "source": row.source,
            "measured": {"seconds": row.seconds, "peak GiB": row.peak},
            "simulated": {
                "seconds": simulated(row, made[key], cluster), "peak GiB": reserved(row, made[key]),
            },
            "device": cluster.device.name, "gpus": row.gpus,
            "batch": f"{row.micro} x {row.batch} x {row.sequence}", "checkpoint": row.checkpoint or "none",
        })  # fmt: skip
        print(line_of(results[-1]), flush=True)
    return results


# ---- text


def ratio(result: dict, key: str) -> float | None:
    measured = result["measured"][key]
    return None if measured is None else result["simulated"][key] / measured


def line_of(result: dict) -> str:
    """A row of the table. Ratios that are too far from 1 are bold."""
    cells = [
        f"{result['name']} ({result['source']})", result["device"], str(result["gpus"]), result["batch"],
        result["checkpoint"],
    ]  # fmt: skip
    for key, digits in (("seconds", 3), ("peak GiB", 1)):
        measured = result["measured"][key]
        for value in (measured, result["simulated"][key]):
            cells.append("" if value is None else f"{value:.{digits}f}")
        share = ratio(result, key)
        text = "" if share is None else f"{share:.2f}"
        cells += [f"**{text}**" if share is not None and abs(share - 1) > NEAR else text]
    return f"| {' | '.join(cells)} |"


def order(results: Sequence[dict]) -> list[str]:
    """For each pair of rows whether the simulation has the same order of tokens a second."""
    rows = {row.name: row for row in ROWS}
    took = {result["name"]: result["simulated"]["seconds"] for result in results}
    lines = []
    for slower, faster in ORDER:
        if slower in took and faster in took:
            measured = rows[faster].tokens / rows[slower].tokens
            tokens = [
                r.micro * r.batch * r.sequence / took[r.name] for r in (rows[faster], rows[slower])
            ]
            lines.append(f"| {slower} | {faster} | {measured:.2f} | {tokens[0] / tokens[1]:.2f} |")
    return lines


HEAD = """\
# Published runs, simulated

{where}. `python -m benchmarks.published` writes this page.

Each row is a run that others have published, simulated by the cost model with the schedule of FSDP: a message for each
block, one gather ahead, one reduction at a time, the update last. The planner has no part in it. Two programs, with 2
and with 4 layers, give the figures of a layer in the middle, and so of all layers.

Nothing was fitted to any run: all figures of devices and links have a source in `ztrans/planning/devices.py` and
`cluster.py`. Ratios are simulated over measured; those further than 15% from 1 are bold. Peaks were measured as the
bytes that PyTorch's allocator had reserved, and are simulated by a model of it.
"""

COLUMNS = {
    "run": "---", "GPU": "---", "GPUs": "--:", "micro-batches x batch x tokens": "---", "checkpoint": "---",
    "measured s": "--:", "simulated s": "--:", "ratio": "--:", "measured GiB": "--:", "simulated GiB": "--:",
    "ratio of peaks": "--:",
}  # fmt: skip


def text(results: Sequence[dict]) -> str:
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    head = HEAD.format(where=where)
    table = [
        f"| {' | '.join(COLUMNS)} |",
        f"|{'|'.join(COLUMNS.values())}|",
        *map(line_of, results),
    ]
    return "\n".join([
        head, *table, "", "## Order", "",
        "Tokens a second of the second run, divided by those of the first.", "",
        "| first | second | measured | simulated |", "|---|---|--:|--:|", *order(results), "",
        "## What is off, and why", "", FAR,
        "## Not simulated", "", "| run | why |", "|---|---|",
        *(f"| {name} | {why} |" for name, why in NOT_SIMULATED), "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = measure(row for row in ROWS if args.rows in f"{row.name} {row.source}")
    if not args.rows:
        (RESULTS / "published.md").write_text(text(results))
        (RESULTS / "published.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
