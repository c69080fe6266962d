"""The scheduling problems by which `ablations.py` weighs the changes of the planner's search.

They are the steps of `plan_cases.py`, Llama-3-8B with and without tensor parallelism, the GPT of
`benchmarks.peers` on two hosts, and small models of `analyses.py`. Programs have shapes only, and costs are
those of shipped clusters.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from tests.support.evaluate import evaluate
from tests.support.synthetic import fsdp2, seven
from ztrans.planning.cost import memory
from ztrans.planning.make_plan import SLACK, problem_within
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.problem import Problem

from ..peers.inductor import lifted
from ..peers.model import Config as GPT
from .analysis_models import MODELS
from .llama_model import Config, init, make_step
from .plan_cases import LANES

MESHES = ((16, 8), (64, 1), (64, 8))  # dp and tp of Llama
SEQUENCES = (8192, 2048)

SMALL = (  # models and ranks
    ("MLP 8 x 4096", 512),
    ("experts 4 x 8", 64),
    ("experts 4 x 8", 512),
    ("GPT 4 x 1024, clipped", 64),
)

Subject = tuple[str, Problem]  # the name of a step and its budget, and its problem


def subjects() -> Iterator[Subject]:
    """All steps, each within several budgets."""
    logging.disable(logging.WARNING)
    yield from chains()
    yield from gpt()
    for dp, tp in MESHES:
        yield from llama(dp, tp)
    for model, ranks in SMALL:
        yield from small(model, ranks)


def chains() -> Iterator[Subject]:
    """Seven chains of layers in two layouts of lanes; FSDP2's peak, more memory, no limit."""
    for lanes in LANES.values():
        for case in seven(lanes):
            peak = evaluate(case.problem, fsdp2(case)).peak
            for name, budget in (
                ("its peak", peak),
                ("more", peak + case.more),
                ("no limit", float("inf")),
            ):
                queues = "one queue" if len(set(lanes)) == 1 else "two queues"
                yield f"{case.name}, {queues}, {name}", replace(case.problem, memory=budget)


def gpt() -> Iterator[Subject]:
    """The GPT of the benchmark in fp32 at stage 3, on two hosts with links of 1 Gbit/s."""
    lowered, _, _ = lifted(GPT(), ranks=2)
    dist.destroy_process_group()
    yield from budgets("GPT, 2 hosts, 1 Gbit/s", lowered.unordered, lowered.cluster)


def small(model: str, ranks: int) -> Iterator[Subject]:
    """A small model on H100s at stage 3."""
    step, state, batch = MODELS[model].make()
    machines = zt.cluster("h100", dp="infiniband")
    schedules = zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=ranks)), *schedules)(step)
    lowered = sharded.lower(state, *batch, cluster=machines)
    yield from budgets(f"{model}, {ranks} ranks", lowered.unordered, machines)


def llama(dp: int, tp: int) -> Iterator[Subject]:
    """Llama-3-8B on H100s, as in `llama.py`; ranks are fake."""
    dist.init_process_group("fake", rank=0, world_size=dp * tp, store=FakeStore())
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    machines = zt.cluster("h100", dp="infiniband", tp="nvlink4")
    schedules = zt.delay_weight_grads(), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    for sequence in SEQUENCES:
        tokens = torch.empty(1, sequence + 1, dtype=torch.int64, device="meta")
        traced = zt.shard_params(mesh, axis="dp")(make_step(Config(), mesh)).trace(
            init(Config(), tp), tokens, 0
        )
        lowered = dataclasses.replace(traced, transforms=(*traced.transforms, *schedules)).lower(
            cluster=machines
        )
        yield from budgets(
            f"Llama, dp={dp}, tp={tp}, sequence {sequence}", lowered.unordered, machines
        )
    dist.destroy_process_group()


def budgets(name: str, hinted: zt.ir.Graph, cluster: zt.Cluster) -> Iterator[Subject]:
    """A program within the memory of "auto", and within the peak of its own order."""
    s, peak = skeleton(hinted), memory(hinted).peak
    for budget, within in ((int(peak * (1 + SLACK)), "auto"), (peak, "its own peak")):
        yield f"{name}, {within}", problem_within(s, cluster, budget)[0]
