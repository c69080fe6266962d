"""Steps that divide their state themselves, as DTensors, on every rank of a mesh in one process.

The programs of such ranks may differ in numbers, such as the first row of a rank's part of an embedding. So each rank
traces its own program, in a fake world of which it is the only process, and the programs run in lock-step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, debug
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.plans import llama_dtensor
from benchmarks.plans.llama_model import Config
from tests.support.worlds import ALL, distance, lower_traced
from ztrans.ir.axes import members
from ztrans.ir.collectives import rules
from ztrans.ir.dependencies import grouped
from ztrans.ir.graph import Graph, Split, Var, substitute
from ztrans.ir.interpreter import coordinates
from ztrans.ir.layout import localize

T = TypeVar("T")
CONFIG = Config(layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocab=40)


def on_ranks(ranks: Iterable[int], build: Callable[[DeviceMesh], T], **sizes: int) -> list[T]:
    """What `build(mesh)` returns on these ranks of a mesh of these axes."""
    results = []
    for rank in ranks:
        dist.init_process_group(
            "fake", rank=rank, world_size=math.prod(sizes.values()), store=FakeStore()
        )
        try:
            debug._clear_sharding_prop_cache()  # its entries name the process groups of the rank before
            results.append(
                build(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
            )
        finally:
            dist.destroy_process_group()
    return results


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def llama() -> llama_dtensor.Llama:
    """A small model, with the same weights in every call."""
    torch.manual_seed(0)
    return llama_dtensor.Llama(CONFIG, attend)


def tokens(steps: int, rows: int = 4) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(CONFIG.vocab, (rows, 9), generator=random) for _ in range(steps)]


def local_leaves(state: Any) -> list[torch.Tensor]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in pytree.tree_leaves(state)]


def lockstep(graphs: Sequence[Graph], inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """As `ztrans.ir.interpreter.lockstep`, for programs of equal names whose numbers may differ from rank to rank."""
    names = [[[v.name for v in e.results] for e in graph.eqns] for graph in graphs]
    assert names == names[:1] * len(names)
    first, places = graphs[0], coordinates(graphs[0].mesh, graphs[0].joint)
    assert {rules(e).axis(e) for graph in graphs for e in graph.eqns} <= {None, *first.axes}
    values: list[dict[Var, Any]] = [dict(zip(first.inputs, mine, strict=True)) for mine in inputs]
    by_name = {v.name: v for v in (*first.inputs, *(v for e in first.eqns for v in e.results))}
    own = lambda v: by_name[v.name]
    for eqns in zip(*(graph.eqns for graph in graphs)):
        of_rank = [
            eqns[0].replace(args=substitute(e.args, own), kwargs=substitute(e.kwargs, own))
            for e in eqns
        ]
        for group in grouped(
            (_others(at, rules(eqns[0]).axis(eqns[0])), rank) for rank, at in enumerate(places)
        ).values():
            localized = [localize(of_rank[rank], first.axes, places[rank]) for rank in group]
            for rank, outs in zip(
                group, rules(eqns[0]).meaning(localized, [values[rank] for rank in group])
            ):
                values[rank].update((v, x) for v, x in zip(eqns[0].outs, outs) if v is not None)
    return [[substitute(out, env.__getitem__) for out in first.outputs] for env in values]


def _others(at: dict[str, int], axis: str | None) -> tuple:
    """The place of a rank along the other axes; if each rank computes alone, its whole place."""
    own = members(axis) if axis else ()
    return tuple((a, i) for a, i in at.items() if a not in own and len(members(a)) == 1)


def joined(
    program: zt.stages.Lowered, ranks: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The whole leaves of the state, from the local tensors of all ranks."""
    places, leaves = coordinates(program.graph.mesh), []
    for i, v in enumerate(program.graph.state):
        own = program.recording.user_shardings[i]
        cuts = [(s.axis, s.dim) for s in v.layout if isinstance(s, Split)]
        cuts += (
            [(a, p.dim) for a, p in zip(own.axes, own.placements) if isinstance(p, Shard)]
            if own
            else []
        )
        parts = {tuple(at.items()): ranks[rank][i] for rank, at in enumerate(places)}
        for axis, dim in cuts:  # the cut of the transform first, because it was made last
            together = grouped(
                (tuple((a, n) for a, n in at if a not in members(axis)), x)
                for at, x in parts.items()
            )
            parts = {at: torch.cat(xs, dim) for at, xs in together.items()}
        first, *others = parts.values()
        assert all(torch.equal(first, x) for x in others), (
            f"{v.name} differs between ranks that hold the same of it"
        )
        leaves.append(first)
    return leaves


def parallelized(mesh: DeviceMesh, report: Callable[..., None]) -> None:
    """The small Llama on the ranks of `mesh`. All stages with and without buckets run in lock-step."""
    dp = mesh.get_local_rank("dp")
    truth, plain_loss = _trained(llama())
    make_model = lambda: llama_dtensor.parallel(llama(), mesh["tp"], source=0)
    data = [batch.chunk(2)[dp] for batch in tokens(3)]
    plain = llama_dtensor.make_step(make_model(), torch.float32)
    traced = zt.Step.of(plain).trace(llama_dtensor.init(make_model()), data[0])
    for stage, transforms in ((0, ()), (3, ALL)):
        step = zt.chain(zt.shard_params(mesh, stage=stage), *transforms)(plain)
        compiled = lower_traced(traced, step).compile()
        state = step.shard(llama_dtensor.init(make_model()))
        for batch in data:
            state, loss = compiled(state, batch)
        full = step.unshard(state)
        report("parallelized", stage=stage, bucketed=bool(transforms), state=distance(full, truth),
               loss=distance(loss, plain_loss), rows=len(state["params"]["out.weight"].to_local()))  # fmt: skip


def _trained(model: nn.Module) -> tuple[Any, torch.Tensor]:
    """The state and the loss after three steps in one process."""
    step, state = llama_dtensor.make_step(model, torch.float32), llama_dtensor.init(model)
    for batch in tokens(3):
        state, loss = step(state, batch)
    return state, loss


def norm_mlp() -> nn.Module:
    """A model whose parts over tp=2 are not cut evenly over dp=2."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh, source: int | None = 0) -> nn.Module:
    """`norm_mlp` with its rows over `mesh` before and after the matrices; its output is a DTensor."""
    rows = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    columns = ColwiseParallel(input_layouts=Shard(0))
    output = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, rows)
    return parallelize_module(
        model,
        mesh,
        {"0": SequenceParallel(sequence_dim=0), "1": columns, "3": output},
        src_data_rank=source,
    )


def loop_of(model: nn.Module) -> tuple[Callable, torch.optim.Optimizer]:
    """An ordinary loop step, with clipping, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return loop, optimizer


def lifted(mesh: DeviceMesh, report: Callable[..., None]) -> None:
    """A lifted loop on a sequence-parallel module, whose state is written back to the module."""
    data = list(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1)))
    plain, model = norm_mlp(), sequence_parallel(norm_mlp(), mesh["tp"])
    loop, _ = loop_of(plain)
    losses = [loop(x).detach() for x in data]
    loop, optimizer = loop_of(model)
    step, state = zt.lift(loop, model, optimizer)
    step = zt.chain(zt.shard_params(mesh), *ALL)(step)
    state = step.shard(state)
    for x in data:
        state, loss = step(state, x.chunk(2)[mesh.get_local_rank("dp")])
    zt.write_back(model, optimizer, step.unshard(state))
    full = [p.full_tensor() for p in model.parameters()]
    report(
        "lifted", state=distance(full, list(plain.parameters())), loss=distance(loss, losses[-1])
    )
