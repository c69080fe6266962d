"""Checks that need several processes. Run by torchrun; prints one line of JSON for each check.

torchrun --standalone --nproc-per-node 2 tests/support/ranks.py two
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.peers.memory import Peak, lent
from tests.support import context_parallel, dtensors, experts, fp8
from tests.support.in_place import as_plain
from tests.support.on_host import on_host
from tests.support.owned import owned_case
from tests.support.programs import CASES, Case, adam, adam_state, mlp, regression, square_loss
from tests.support.tuning import tuned
from tests.support.worlds import (
    ALL,
    batches,
    default_dtype,
    distance,
    lower_traced,
    on_ranks,
    plain,
    sharded,
    slices,
)
from ztrans.runtime.channels import Channel

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def report(check: str, rank: int = 0, **figures) -> None:
    if rank == RANK:
        sys.stdout.write(
            json.dumps({"check": check, **figures}) + "\n"
        )  # in one call, as other ranks print too
        sys.stdout.flush()


def train(case, mesh, stage, steps=3, **options):
    """The full state and this rank's last output after `steps` steps."""
    transforms = zt.shard_params(mesh, stage=stage, **options), *ALL
    step, compiled = zt.chain(*transforms)(case.step), on_ranks(case, WORLD, *transforms).compile()
    state = step.shard(case.state())
    for batch in batches(case, steps):
        state, output = compiled(state, *slices(batch, WORLD)[RANK])
    return step.unshard(state), output


STAGES = (0, 1, 2, 3)
# Stages by program, on two ranks. In lock-step every program runs at every stage (tests/laws/test_equivalence.py), so
# here each kind of message is sent once: of uneven parts at each stage, in half precision, of norms, in the update, in
# several passes, in fp32. MORE_ON_TWO has the other stages of these programs.
TWO = {
    "uneven": STAGES,
    "cast_inside": (1, 3),
    "gpt_adam": (2,),
    "clipped": (3,),
    "muon": (1,),
    "accumulation": (2,),
    "sam": (3,),
    "autocast": (0,),
}
MORE_ON_TWO = {
    "cast_inside": (0, 2),
    "gpt_adam": (0, 1, 3),
    "clipped": (1,),
    "muon": (3,),
    "accumulation": (3,),
    "sam": (2,),
    "adamw_fused": (0, 3),
    "autocast": (3,),
}
# On two hosts with two ranks each.
FOUR = {"mlp_momentum": (0, 1), "uneven": (2, 3)}
MORE_ON_FOUR = {"mlp_momentum": (2, 3)}


def equals_lockstep_and_plain(mesh, stages_by_name, **options) -> None:
    for name, stages in stages_by_name.items():
        dtype = torch.float32 if name in ("autocast", "cast_outside") else torch.float64
        with default_dtype(dtype):
            truth, _ = plain(CASES[name], 3)
            for stage in stages:
                full, output = train(CASES[name], mesh, stage, **options)
                if (
                    stage % WORLD != RANK
                ):  # all ranks hold the full state, so each compares some of the stages
                    continue
                lockstep_state, outputs, _ = sharded(
                    CASES[name], WORLD, stage, 3, mesh=mesh, **options
                )
                pairs = zip(pytree.tree_leaves(full), pytree.tree_leaves(lockstep_state))
                bits = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
                report("equal", RANK, case=name, stage=stage, bitwise=bits, lockstep=distance(full, lockstep_state),
                       plain=distance(full, truth), output=distance(output, outputs[-1][RANK]))  # fmt: skip


@contextlib.contextmanager
def counted():
    """Counts the bytes that this rank receives, by the purpose of the channel."""
    counts, original = Counter(), Channel.exchange

    def exchange(self, pieces, into, ranks=None, tag=None):
        counts[self.purpose] += sum(x.nbytes for r, x in enumerate(into) if r != self.group.rank())
        return original(self, pieces, into, ranks, tag)

    Channel.exchange = exchange
    try:
        yield counts
    finally:
        Channel.exchange = original


def micro_batches(mesh) -> None:
    """Steps in micro-batches on real ranks, against those in lock-step."""
    case = CASES["mlp_momentum"]
    for stage in (0, 1, 3):
        on = lambda mesh, stage=stage: zt.chain(
            zt.accumulate(3), zt.shard_params(mesh, stage=stage), *ALL
        )(case.step)
        step, abstract = on(mesh), on(zt.AbstractMesh(dp=WORLD))
        state, expected = step.shard(case.state()), case.state()
        lowered = abstract.lower(expected, *slices(batches(case, 1)[0], WORLD)[0])
        for batch in batches(case, 2):
            parts = slices(batch, WORLD)
            state, output = step(state, *parts[RANK])
            expected, outputs = lowered.lockstep(expected, parts)
        pairs = zip(pytree.tree_leaves(step.unshard(state)), pytree.tree_leaves(expected))
        bits = all(torch.equal(a, b) for a, b in pairs) and torch.equal(output, outputs[RANK])
        report("micro_batches", stage=stage, bitwise=bits)


def cast_to_half() -> Case:
    """An MLP whose parameters are all cast to bf16 at the start of the loss."""
    model = mlp(8, 16, 4)
    inner = square_loss(model)

    def step(state, batch):
        x, y = (part.to(torch.bfloat16) for part in batch)

        def loss(params):
            return inner({k: p.to(torch.bfloat16) for k, p in params.items()}, x, y)

        grads, value = grad_and_value(loss)(state["params"])
        return adam(state, grads), value

    return Case("cast_to_half", step, adam_state(model), regression(8, 4))


def wire_bytes(mesh) -> None:
    case = cast_to_half()
    for stage in (1, 3):  # at stage 2 the gathers are those of stage 1
        measured, predicted = {}, {}
        for fused, transforms in ((False, ALL[:2]), (True, ALL)):
            chain = zt.shard_params(mesh, stage=stage, reshard="always"), *transforms
            lowered = on_ranks(case, WORLD, *chain)
            compiled, state = lowered.compile(), zt.chain(*chain)(case.step).shard(case.state())
            part = slices(batches(case, 1)[0], WORLD)[RANK]
            state, _ = compiled(state, *part)  # the ranks agree on the program in the first call
            with counted() as counts:
                compiled(state, *part)
            measured[fused] = counts["gathers"]
            predicted[fused] = lowered.cost_analysis().over("dp", "param")
        report(
            "wire",
            stage=stage,
            plain=measured[False],
            fused=measured[True],
            predicted=predicted[True],
        )


def narrow() -> Case:
    """A program in fp32 with uneven parts, and leaves of one row, whose parts are empty on the second rank."""
    model = mlp(7, 33, 1)
    loss = square_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    return Case("narrow", step, adam_state(model), regression(7, 1), samples=12)


def codes_on_two() -> None:
    dp, both = zt.make_mesh("cpu", dp=2), zt.make_mesh("cpu", dp=1, replicas=2)
    early = zt.overlap_grads(), zt.prefetch(across_steps=True)
    replicas = {"stage": 2, "axis": "dp", "replicate_axis": "replicas"}
    kept = (
        zt.quantize_gathers(4, 16, where="params.*", of="differences"),
        zt.quantize_grads(4, 16, rotate=4, where="params.*", error_feedback=True),
    )
    codes("stage 1", dp, {"stage": 1}, *ALL, *both_ways(8))
    codes("stage 3", dp, {"stage": 3}, *ALL, *both_ways(4))
    codes("early", dp, {"stage": 3, "reshard": "always"}, *early, *both_ways(8))
    codes("replicas", both, replicas, *ALL, zt.accumulate(2), *both_ways(4))
    codes("kept", dp, {"stage": 2}, *ALL, *kept)


def both_ways(bits: int) -> tuple[zt.Transform, ...]:
    return zt.quantize_gathers(bits, 16, where="*"), zt.quantize_grads(bits, 16, where="*")


def codes(name: str, mesh, options, *transforms) -> None:
    """Messages in codes of 8 and 4 bits, and what is kept for them, on real ranks and in lock-step."""
    with default_dtype(torch.float32):
        case = narrow()

        def on(mesh):
            return zt.chain(zt.shard_params(mesh, **options), *transforms)(case.step)

        abstract = zt.AbstractMesh(**dict(zip(mesh.mesh_dim_names, mesh.shape)))
        step, state = on(mesh), case.state()
        expected = on(abstract).init(case.state())
        lowered = on(abstract).lower(expected, *slices(batches(case, 1)[0], WORLD)[0])
        state = step.shard(state)
        for number, batch in enumerate(batches(case, 3)):
            parts = slices(batch, WORLD)
            with counted() as counts:
                state, output = step(state, *parts[RANK])
            if number == 0:  # gathers of the next step, which may be under way, start again
                state = step.shard(step.unshard(state))
            expected, outputs = lowered.lockstep(expected, parts)
        pairs = zip(pytree.tree_leaves(step.unshard(state)), pytree.tree_leaves(expected))
        bits = all(torch.equal(a, b) for a, b in pairs) and torch.equal(output, outputs[RANK])
        cost = lowered.cost_analysis()
        report("codes", chain=name, bitwise=bits, received=counts["gathers"] + counts["reductions"],
               predicted=cost.wire_bytes, gathered=counts["gathers"], predicted_gathers=cost.over(role="param"))  # fmt: skip


def owned(mesh) -> None:
    """Matrices that are updated by one rank each, against every rank updating all, in processes."""
    case = owned_case()
    results, received = {}, {}
    for name, transforms in {"all": ALL, "owned": (*ALL, zt.owned_updates())}.items():
        step = zt.chain(zt.shard_params(mesh), *transforms)(case.step)
        state = step.shard(case.state())
        for batch in batches(case, 3):
            with counted() as counts:
                state, _ = step(state, *slices(batch, WORLD)[RANK])
        results[name], received[name] = step.unshard(state), sum(counts.values())
    pairs = zip(*map(pytree.tree_leaves, results.values()))
    report("owned", bitwise=all(torch.equal(a, b) for a, b in pairs), received=received)


def disagreement(mesh) -> None:
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    try:
        step(state, *case.batch(4 + RANK))
        report("disagree", error="")
    except RuntimeError as error:
        errors = [None] * WORLD
        dist.all_gather_object(errors, str(error))
        report("disagree", error=errors)


def sharding(mesh) -> None:
    case = CASES["clipped"]
    step = zt.shard_params(mesh)(case.step)
    whole = case.state()
    mine = (
        whole if RANK == 0 else pytree.tree_map(lambda x: torch.empty_like(x, device="meta"), whole)
    )
    scattered = step.unshard(step.shard(mine, source=0))
    report("source", distance=distance(scattered, whole))

    replicated = zt.shard_params(mesh, stage=0)(case.step).shard(whole)
    cut = step.shard(replicated)
    placed = all(
        x.placements == y.placements
        for x, y in zip(*map(pytree.tree_leaves, (cut, step.shard(whole))))
    )
    compiled, batch = (
        step.lower(whole, *slices(batches(case, 1)[0], WORLD)[RANK]).compile(),
        batches(case, 1)[0],
    )
    errors = []
    for wrong in (whole, replicated):
        try:
            compiled(wrong, *slices(batch, WORLD)[RANK])
        except TypeError as error:
            errors.append(str(error).splitlines()[0])
    report("laid_out", distance=distance(step.unshard(cut), whole), placed=placed, errors=errors)

    meta = pytree.tree_map(lambda x: torch.empty_like(x, device="meta"), whole)
    state = step.shard(meta)
    torch.manual_seed(0)
    for leaf in pytree.tree_leaves(state["params"]):
        torch.nn.init.normal_(leaf)
    for tree in (state["m"], state["v"], state["step"]):
        pytree.tree_map(torch.nn.init.zeros_, tree)
    state, output = step(state, *slices(batches(case, 1)[0], WORLD)[RANK])
    local = sum(x.to_local().numel() for x in pytree.tree_leaves(state))
    total = sum(x.numel() for x in pytree.tree_leaves(state))
    report("meta", finite=bool(torch.isfinite(output["loss"])), share=local / total)

    before = step.unshard(state)
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    loaded = pytree.tree_map(lambda x: torch.zeros_like(x), state)
    dcp.load(loaded, checkpoint_id=folder[0])
    kinds = all(isinstance(x, DTensor) for x in pytree.tree_leaves(state))
    report("checkpoint", distance=distance(step.unshard(loaded), before), dtensors=kinds)


class Summed(torch.autograd.Function):
    """The sum over tensor-parallel ranks. Each rank computes the same loss from it, so its gradient is passed on."""

    @staticmethod
    def forward(ctx, x, mesh):
        return funcol.all_reduce(x, "sum", (mesh, 1))

    @staticmethod
    def backward(ctx, g):
        return g, None


def tensor_parallel(mesh) -> None:
    """The step contains collectives over tp, and `shard_params` shards it over dp."""
    torch.manual_seed(0)
    up, down = torch.randn(6, 8), torch.randn(8, 5)
    data = [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(3)]

    def step(state, x, y, combine=lambda h: Summed.apply(h, mesh)):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        loss = (combine(torch.relu(x @ params["up"]) @ params["down"]) - y).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(state.items(), grads)}, loss.detach()

    truth = {"up": up, "down": down}
    for x, y in data:
        truth, _ = step(truth, x, y, combine=lambda h: h)
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    sharded_step = zt.chain(zt.shard_params(mesh), *ALL)(step)
    state = sharded_step.shard({"up": up.chunk(2, 1)[tp], "down": down.chunk(2, 0)[tp]})
    for x, y in data:
        state, _ = sharded_step(state, x.chunk(2)[dp], y.chunk(2)[dp])
    full = sharded_step.unshard(state)
    mine = {"up": truth["up"].chunk(2, 1)[tp], "down": truth["down"].chunk(2, 0)[tp]}
    is_named = "all_reduce(mm_1, sum, tp)" in str(
        sharded_step.lower(state, *(t.chunk(2)[dp] for t in data[0]))
    )
    report("tensor_parallel", distance=distance(full, mine), named=is_named)


def memory(mesh) -> None:
    """State and peak by stage, as predicted and as malloc counts them, for a model that is large enough to measure."""
    model = mlp(*[1024] * 9)
    loss = square_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    whole = adam_state(model)()
    case = Case("memory", step, lambda: whole, regression(1024, 1024), samples=8 * WORLD)
    batch = slices(batches(case, 1)[0], WORLD)[0]
    for stage in (0, 1, 2, 3):
        little = zt.overlap_grads(max_in_flight=8 << 20), zt.prefetch(max_in_flight=8 << 20)
        transforms = zt.shard_params(mesh, stage=stage, reshard="always"), *little
        stepped = zt.chain(*transforms)(step)
        compiled = on_ranks(case, WORLD, *transforms).compile()
        base = lent()
        state = stepped.shard(whole)
        held = lent() - base
        homes = [x.to_local().data_ptr() for x in pytree.tree_leaves(state)]
        state, _ = compiled(state, *batch)
        dist.barrier()
        time.sleep(0.1)  # until buffers that the other rank was still receiving from are freed
        before = lent()
        with Peak() as peak:
            for _ in range(3):
                state, _ = compiled(state, *batch)
        predicted = compiled.lowered.memory_analysis()
        kept = homes == [x.to_local().data_ptr() for x in pytree.tree_leaves(state)]
        report(
            "memory",
            stage=stage,
            state=predicted.state,
            held=held,
            predicted=predicted.peak - predicted.state,
            peak=peak.bytes - before,
            kept=kept,
        )
        del state, stepped, compiled


@contextlib.contextmanager
def messages():
    """Records the messages that are sent, in order: bytes, and the purpose of the channel."""
    sent, original = [], Channel.exchange

    def exchange(self, pieces, into, ranks=None, tag=None):
        sent.extend(
            (x.nbytes, self.purpose) for r, x in enumerate(pieces) if r != self.group.rank()
        )
        return original(self, pieces, into, ranks, tag)

    Channel.exchange = exchange
    try:
        yield sent
    finally:
        Channel.exchange = original


def inductor() -> None:
    """Both backends compute the same state, and send the same messages."""
    mesh = zt.make_mesh("cpu", dp=2)
    for name, stages in {"adamw_fused": (0, 3), "uneven": (3,), "cast_inside": (3,)}.items():
        case = CASES[name]
        for stage in stages:
            transforms = zt.shard_params(mesh, stage=stage), *ALL
            step, lowered = zt.chain(*transforms)(case.step), on_ranks(case, WORLD, *transforms)
            data = [slices(batch, WORLD)[RANK] for batch in batches(case, 3)]
            results = []
            for backend in ("eager", "inductor"):
                state = step.shard(case.state())
                compiled = lowered.compile(backend=backend)
                state, _ = compiled(state, *data[0])
                with messages() as sent:
                    for batch in data[1:]:
                        state, _ = compiled(state, *batch)
                results.append((step.unshard(state), sent))
            (state, wanted), (mine, sent) = results
            by_rank = [None] * WORLD
            dist.all_gather_object(by_rank, pytree.tree_leaves(mine))
            equal = all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*by_rank)
            )
            report("inductor", case=name, stage=stage, distance=distance(mine, state, 1e-3), sent=sent,
                   wanted=wanted, equal=equal)  # fmt: skip


def two() -> None:
    mesh = zt.make_mesh("cpu", dp=2)
    dist.new_group(
        [0]
    )  # a user's group of one rank: later groups must not depend on how many groups a rank has
    equals_lockstep_and_plain(mesh, TWO)
    wire_bytes(mesh)
    micro_batches(mesh)
    fp8.on_processes(mesh, report)
    codes_on_two()
    disagreement(mesh)
    sharding(mesh)
    as_plain(mesh, report)
    tuned(mesh, report)
    on_host(mesh, report)
    owned(mesh)
    memory(mesh)


def tuning() -> None:
    tuned(zt.make_mesh("cpu", dp=2), report)


def pipeline() -> None:
    """Two stages of a pipeline, each a program of its own on a part of the world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    case, mine = CASES[("mlp_momentum", "uneven")[stage]], mesh["dp"]
    step = zt.chain(zt.shard_params(mine), *ALL)(case.step)
    cluster = zt.calibrate(mine)
    state, (first, *data) = (
        step.shard(case.state()),
        [slices(batch, 2)[rank] for batch in batches(case, 4)],
    )
    compiled = step.lower(state, *first, cluster=cluster).compile()
    compiled, _ = compiled.tune(
        state, *first, steps=1
    )  # takes two steps with the first batch, one for each plan
    for batch in data:
        state, _ = compiled(state, *batch)
    truth = case.state()
    for batch in (batches(case, 4)[0], *batches(case, 4)):
        truth, _ = case.step(truth, *batch)
    report(
        "pipeline",
        RANK,
        stage=stage,
        distance=distance(step.unshard(state), truth),
        axes=len(cluster.links),
    )


def mixture_of_experts(mesh) -> None:
    """Experts on the ranks of ep, as tensors of each rank or as DTensors, and everything else over dp and ep."""
    ep, data, truth = mesh["ep"], experts.batches(3), experts.state()
    for x in data:
        truth, value = experts.make_step()(truth, x)
    exchange = lambda x: funcol.all_to_all_single_autograd(x.contiguous(), [1, 1], [1, 1], ep)
    options = {
        "axis": lambda path, leaf: "dp" if experts.is_expert(path) else ("dp", "ep"),
        "dim": experts.inner,
    }
    mine = [x.chunk(WORLD)[RANK] for x in data]
    with_tensors = experts.make_step(exchange, 2)
    with_dtensors = experts.with_dtensors(with_tensors)
    traced = zt.Step.of(with_dtensors).trace(experts.divided(experts.state(), ep), mine[0])
    for stage, as_dtensors in ((0, True), (3, True), (3, False)):
        shard = zt.shard_params(mesh, stage=stage, **options)
        if as_dtensors:
            step = zt.chain(shard, *ALL)(with_dtensors)
            run = lower_traced(traced, step).compile()
            state = step.shard(experts.divided(experts.state(), ep))
        else:
            run = step = zt.chain(shard, *ALL)(with_tensors)
            state = step.shard(experts.of_rank(experts.state(), mesh.get_local_rank("ep"), 2))
        for x in mine:
            state, loss = run(state, x)
        full = step.unshard(state)
        wanted = truth if as_dtensors else experts.of_rank(truth, mesh.get_local_rank("ep"), 2)
        report(
            "mixture", RANK, stage=stage, state=distance(full, wanted), loss=distance(loss, value)
        )
        if stage and as_dtensors:
            folder = [tempfile.mkdtemp() if RANK == 0 else None]
            dist.broadcast_object_list(folder)
            zt.save(f"{folder[0]}/saved", state).result()
            anew = zt.shard_params(init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)))(
                experts.make_step()
            )
            loaded = anew.unshard(zt.load(f"{folder[0]}/saved", anew.shard(experts.state()), anew))
            report("mixture saved", distance=distance(loaded, full))


class Ring(torch.autograd.Function):
    """Every rank of a group gets the tensor of the rank before it, and its gradient goes back."""

    @staticmethod
    def forward(ctx, x, mesh, step):
        ctx.mesh, ctx.step = mesh, step
        to = [(rank + step) % mesh.size() for rank in range(mesh.size())]
        return funcol.permute_tensor(x.flatten(), to, mesh).view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return Ring.apply(g, ctx.mesh, -ctx.step), None, None


def attention_over(mesh) -> None:
    """Sequences over cp: an all_gather of keys and values, and a ring."""
    cp, data, truth = mesh["cp"], context_parallel.batches(3), context_parallel.state()
    for batch in data:
        truth, value = context_parallel.plain_step(truth, *batch)
    ways = {
        "gathered": context_parallel.gathered(
            lambda x: funcol.all_gather_tensor_autograd(x.contiguous(), 1, cp)
        ),
        "ring": context_parallel.ring(lambda x: Ring.apply(x, cp, 1), 2),
    }
    for way, attention in ways.items():
        step = zt.chain(zt.shard_params(mesh, axis=("dp", "cp")), *ALL)(
            context_parallel.make_step(attention)
        )
        state = step.shard(context_parallel.state())
        for batch in data:
            state, loss = step(state, *context_parallel.part(batch, *mesh.get_coordinate()))
        report(
            "attention",
            RANK,
            way=way,
            state=distance(step.unshard(state), truth),
            loss=distance(loss, value),
        )


def four() -> None:
    hosts = zt.make_mesh("cpu", host=2, dp=2)
    pipeline()
    dist.new_group([0, 1, 2])
    equals_lockstep_and_plain(hosts, FOUR, replicate_axis="host")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    equals_lockstep_and_plain(mesh, {"uneven": (1, 3)}, axis=("dp", "cp"), reshard=2)
    attention_over(mesh)
    mixture_of_experts(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(mesh)
    dtensors.parallelized(mesh, report)
    dtensors.lifted(mesh, report)
    in_parts = zt.quantize_gathers(4, 16, where="params.*", of="differences", inside="dp")
    codes("in parts", hosts, {"stage": 3, "axis": ("host", "dp")}, *ALL, in_parts)


def more_on_two() -> None:
    equals_lockstep_and_plain(zt.make_mesh("cpu", dp=2), MORE_ON_TWO)


def more_on_four() -> None:
    mesh = zt.make_mesh("cpu", host=2, dp=2)
    equals_lockstep_and_plain(mesh, MORE_ON_FOUR, replicate_axis="host")


CHECKS = {
    "two": two,
    "four": four,
    "tuning": tuning,
    "inductor": inductor,
    "more_on_two": more_on_two,
    "more_on_four": more_on_four,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CHECKS[sys.argv[1]]()
    dist.destroy_process_group()
