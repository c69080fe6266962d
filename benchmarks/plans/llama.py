"""Llama-3-8B on 128 ranks: one step as it is written, after PyTorch's own passes, and as ztrans plans it.

    python -m benchmarks.plans.llama                                   # minutes, nearly all of them PyTorch's passes
    python -m benchmarks.plans.llama --layers 4 --sequence 8192        # a look

The step (`llama_model.py`) has tensor parallelism over tp=8 written by hand and is sharded over dp=16 by
`shard_params`; forward, backward, clipping and AdamW are one program. "In its memory" is within the peak of the column
before it. The last column is the same step with tensor parallelism by `parallelize_module` (`llama_dtensor.py`). No GPU
and no second process: ranks are fake, values have shapes only. Times are simulated, for all programs by the same cost
model (`ztrans.planning.simulate`, H100s with NVLink for tp and one InfiniBand NIC each for dp). Writes
benchmarks/results/llama.md and .json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import time
from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from ztrans.ir.collectives import ALL_GATHER, is_start
from ztrans.ir.graph import Eqn, Graph, producers, users
from ztrans.ir.op_facts import is_matmul, is_view_or_cast
from ztrans.ir.user_collectives import is_user_collective
from ztrans.planning.cluster import Cluster, cluster
from ztrans.planning.cost import memory
from ztrans.planning.formulate import formulate
from ztrans.planning.make_plan import SLACK
from ztrans.planning.simulate import simulate
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.bound import bound
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from . import llama_dtensor
from .llama_model import Config, init, make_step
from .torch_passes import torch_passes

DP, TP = 16, 8
GRADIENTS = "PyTorch, gradients only"
IN_ITS_MEMORY = "ztrans, in its memory"
DTENSORS = "ztrans, parallelize_module"
PREFETCH = (
    200,
    50,
    10,
)  # matmuls that PyTorch's scheduler may look ahead: its default, and smaller


def fake_mesh() -> DeviceMesh:
    """128 ranks of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=DP * TP, store=FakeStore())
    return init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))


def trace(config: Config, sequence: int, mesh: DeviceMesh) -> Traced:
    tokens = torch.empty(1, sequence + 1, dtype=torch.int64, device="meta")
    return zt.shard_params(mesh, axis="dp")(make_step(config, mesh)).trace(
        init(config, TP), tokens, 0
    )


def trace_dtensors(config: Config, sequence: int, mesh: DeviceMesh) -> Traced:
    """The same step, tensor parallel by `parallelize_module`."""
    with torch.device("meta"):
        model = llama_dtensor.parallel(llama_dtensor.Llama(config), mesh["tp"])
        tokens = torch.empty(1, sequence + 1, dtype=torch.int64)
    return zt.shard_params(mesh, axis="dp")(llama_dtensor.make_step(model)).trace(
        llama_dtensor.init(model), tokens
    )


def lower(traced: Traced, cluster: Cluster, *transforms) -> Lowered:
    transforms = (*traced.transforms, *transforms, zt.fuse_cast_gather())
    return dataclasses.replace(traced, transforms=transforms).lower(cluster=cluster)


# ---- the program with no overlap at all


def is_gradient(e: Eqn) -> bool:
    return is_start(e) and e.provenance.role == "grad"


def unscheduled(graph: Graph) -> Graph:
    """Each gradient reduced where it is born, each parameter gathered where it is used, each waited for at once."""
    maker, used = producers(graph.eqns), users(graph)
    after: dict[Eqn, list[Eqn]] = {}
    for start in filter(is_gradient, graph.eqns):
        (v,), chain = start.ins, [start, *used[start.outs[0]]]
        while len(used[v]) == 1 and is_view_or_cast(maker[v]):
            chain.insert(0, maker[v])
            v = maker[v].ins[0]
        after.setdefault(maker[v], []).extend(chain)
    moved = {e for chain in after.values() for e in chain}
    kept = (e for e in graph.eqns if e not in moved)
    return graph.replace(eqns=tuple(x for e in kept for x in (e, *after.get(e, ()))))


# ---- counts


def members(e: Eqn) -> int:
    """The number of collectives in a bucket."""
    return max(len(e.outs), len(e.provenance.paths))


def longest_run(graph: Graph, plain: Graph) -> int:
    """The most matmuls between two starts of gradient reductions, of those between reductions in `plain`."""
    at = [i for i, e in enumerate(plain.eqns) if is_gradient(e)]
    among = {e.outs for e in plain.eqns[at[0] : at[-1]] if is_matmul(e)}
    longest = run = 0
    for e in graph.eqns:
        run = 0 if is_gradient(e) else run + (e.outs in among)
        longest = max(longest, run)
    return longest


def across_norms(gathers: list[Eqn], plain: Graph) -> int:
    """Buckets with matrices from both sides of a norm."""
    part, stretch = {}, 0
    for e in (e for e in plain.eqns if e.op is ALL_GATHER and e.provenance.role == "param"):
        (path,) = e.provenance.paths
        is_norm = len(e.ins[0].shape) == 1
        stretch += is_norm
        part.setdefault(path, -1 if is_norm else stretch)
    return sum(len({part[p] for p in e.provenance.paths} - {-1}) > 1 for e in gathers)


def figures(graph: Graph, plain: Graph, cluster: Cluster) -> dict[str, float]:
    """The figures of a program in the table."""
    starts = [e for e in graph.eqns if is_start(e)]
    gathers = [e for e in starts if e.op is ALL_GATHER and e.provenance.role == "param"]
    grads = [e for e in starts if is_gradient(e)]
    line, peak = simulate(graph, cluster), memory(graph).peak
    exposed: dict[str, float] = {}
    for (lane, role), s in line.exposed.items():
        kind = (
            "tp"
            if lane.startswith("tp")
            else {"param": "gathers", "grad": "reductions"}.get(role, "other")
        )
        exposed[kind] = exposed.get(kind, 0.0) + 1e3 * s
    return {
        "gathers": len(gathers),
        "gathered": sum(map(members, gathers)),
        "buckets across a norm": across_norms(gathers, plain),
        "reductions": len(grads),
        "reduced": sum(map(members, grads)),
        "reductions in a bucket": sum(members(e) for e in grads if members(e) > 1),
        "tp all-reduces": sum(
            is_user_collective(e) and "all_reduce" in str(e.op) for e in graph.eqns
        ),
        "matmuls between reductions": longest_run(graph, plain),
        "peak GiB": peak / 2**30,
        "step ms": 1e3 * line.seconds,
        "compute ms": 1e3 * line.compute,
        **{
            f"exposed {k} ms": exposed.get(k, 0.0) for k in ("gathers", "reductions", "tp", "other")
        },
        "exposed ms": sum(exposed.values()),
    }


# ---- the three sides


def best_of_torch(
    plain: Graph, mesh: DeviceMesh, cluster: Cluster, update: bool
) -> tuple[dict, str]:
    """The figures of PyTorch's passes with the best look-ahead, and a note about it."""
    tried = []
    for distance in PREFETCH:
        result = torch_passes(plain, mesh, cluster, update, max_compute_pre_fetch=distance)
        row = {**figures(result.graph, plain, cluster), "passes s": result.seconds}
        tried.append((bool(result.error), row["step ms"], distance, row, result.error))
    failed, _, distance, best, error = min(tried, key=lambda t: t[:2])
    lost = [str(d) for bad, _, d, _, _ in tried if bad]
    note = (
        f"look-ahead {distance} matmuls"
        if not failed
        else f"bucketed only, as its scheduler ends in {error!r}"
    )
    return best, note + (f"; with {', '.join(lost)} it fails" if lost and not failed else "")


class Planned(NamedTuple):
    """A step without overlap, and as ztrans plans it; the seconds of its trace, and the figures of its plan."""

    plain: Graph
    traced: Traced
    lowered: Lowered
    tracing: float
    figures: dict


def planned_step(
    make_trace: Callable[[Config, int, DeviceMesh], Traced], machines: Cluster, *step: Any
) -> Planned:
    """Trace a step, whose arguments are those of `make_trace`, and plan it."""
    start = time.perf_counter()
    traced = make_trace(*step)
    tracing = time.perf_counter() - start
    plain = unscheduled(lower(traced, machines).graph)
    lowered, row = planned_within("auto", traced, plain, machines)
    return Planned(plain, traced, lowered, tracing, row)


def planned_within(
    limit: int | str, traced: Traced, plain: Graph, machines: Cluster
) -> tuple[Lowered, dict]:
    """A step as ztrans plans it within a limit of memory, and its figures."""
    start = time.perf_counter()
    schedules = zt.delay_weight_grads(), zt.overlap_grads(), zt.prefetch(memory=limit)
    lowered = lower(traced, machines, *schedules)
    planning = time.perf_counter() - start
    return lowered, {**figures(lowered.graph, plain, machines), "passes s": planning}


def measure(config: Config, sequence: int, mesh: DeviceMesh) -> dict:
    """All figures for one sequence length."""
    machines = cluster("h100", dp="infiniband", tp="nvlink4")
    by_hand = planned_step(trace, machines, config, sequence, mesh)
    by_module = planned_step(trace_dtensors, machines, config, sequence, mesh)
    plain, planned, tracing = by_hand.plain, by_hand.lowered, by_hand.tracing
    rows = {
        "unscheduled": figures(plain, plain, machines),
        "ztrans": by_hand.figures,
        DTENSORS: by_module.figures,
    }
    notes = {
        "ztrans": "; ".join(planned.plan.notes),
        DTENSORS: f"traced in {by_module.tracing:.1f} s",
    }
    for name, update in (("PyTorch, whole step", True), (GRADIENTS, False)):
        rows[name], notes[name] = best_of_torch(plain, mesh, machines, update)
    its_memory = int(rows[GRADIENTS]["peak GiB"] * 2**30)
    _, rows[IN_ITS_MEMORY] = planned_within(its_memory, by_hand.traced, plain, machines)
    program = skeleton(planned.unordered)
    least = bound(formulate(program, machines, (1 + SLACK) * memory(plain).peak))
    least_in_its_memory = bound(formulate(program, machines, its_memory))
    return {
        "sequence": sequence, "trace s": tracing, "equations": len(plain.eqns), "rows": rows, "notes": notes,
        "least ms": 1e3 * least.seconds, "binds": least.binds,
        "least ms in its memory": 1e3 * least_in_its_memory.seconds,
    }  # fmt: skip


# ---- text


def table(measured: dict) -> str:
    rows = measured["rows"]
    names = ["unscheduled", "PyTorch, whole step", GRADIENTS, IN_ITS_MEMORY, "ztrans", DTENSORS]
    plain = rows["unscheduled"]

    def cell(row: dict, key: str) -> str:
        if key not in row:
            return ""
        if key == "peak GiB":
            return f"{row[key]:.2f} ({100 * (row[key] / plain[key] - 1):+.1f}%)"
        if key in ("gathers", "reductions"):
            return f"{row[key]} of {row['gathered' if key == 'gathers' else 'reduced']}"
        return f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key])

    keys = [k for k in {**plain, "passes s": 0} if k not in ("gathered", "reduced")]
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    lines += [f"| {key} | {' | '.join(cell(rows[n], key) for n in names)} |" for key in keys]
    notes = [f"- {name}: {note}." for name, note in measured["notes"].items() if note]
    head = (
        f"## Sequence {measured['sequence']}\n\n{measured['equations']} equations, traced in "
        f"{measured['trace s']:.1f} s. With these operations in this order and {100 * SLACK:.0f}% more memory, no "
        f"placement of gathers and reductions takes less than {measured['least ms']:.1f} ms, for {measured['binds']}. "
        f"In PyTorch's memory none takes less than {measured['least ms in its memory']:.1f} ms.\n"
    )
    return "\n".join([head, *lines, "", *notes, ""])


def main(layers: int, sequences: list[int]) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    mesh = fake_mesh()
    results = [measure(Config(layers=layers), s, mesh) for s in sequences]
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    text = "\n".join(
        [f"# Llama-3-8B, {layers} layers, dp={DP}, tp={TP}\n\n{where}.\n", *map(table, results)]
    )
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "llama.md").write_text(text)
    (RESULTS / "llama.json").write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--sequence", type=int, nargs="+", default=[8192, 2048])
    args = parser.parse_args()
    main(args.layers, args.sequence)
