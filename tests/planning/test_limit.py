"""The limit of a step's memory: who names it, and what a device has."""

import dataclasses
import functools

import pytest
import torch
from torch.func import grad

import ztrans as zt
from tests.support.worlds import lower_traced
from ztrans.planning import make_plan
from ztrans.planning.devices import GPU_RESERVE, H100
from ztrans.planning.limit import DoesNotFit
from ztrans.planning.solver.search import EFFORT, WITHOUT_SEARCH, solve
from ztrans.runtime import mesh as device_mesh
from ztrans.transforms.base import Transform

W = 64
PEAK = 1 << 20  # far above what the step below needs


def loss(params, x):
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


def step(params, x):
    grads = grad(loss)(params, x)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, None


STATE = {k: torch.zeros(W, W) for k in "abc"}
BATCH = torch.zeros(8, W)


@functools.cache
def traced():
    return zt.Step.of(step).trace(STATE, BATCH)


def lower(*transforms, stage=3, **how):
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
    return lower_traced(traced(), zt.chain(shard, zt.overlap_grads(), *transforms)(step), **how)


@dataclasses.dataclass(frozen=True, repr=False)
class _Within(Transform):
    """A transform that names the limit."""

    memory: int

    @property
    def memory_limit(self) -> int:
        return self.memory

    def rewrite(self, graph):
        return graph


def test_all_transforms_name_one_limit():
    with pytest.raises(ValueError) as caught:
        lower(_Within(2048), zt.prefetch(memory=1024))
    assert str(caught.value) == (
        "prefetch: prefetch(memory=1024) and within(memory=2048) are two limits of one step.\n"
        "Give both the same limit, or leave one of them out."
    )
    same = lower(_Within(PEAK), zt.prefetch(memory=PEAK))
    assert (same.unordered.hints.memory_limit, same.unordered.hints.limit_option) == (
        PEAK,
        f"within(memory={PEAK})",
    )
    for transforms in [
        (_Within(PEAK), zt.prefetch()),
        (zt.prefetch(memory=PEAK),),
        (_Within(PEAK),),
    ]:
        assert lower(*transforms).unordered.hints.memory_limit == PEAK, (
            "whoever names it, it is the limit"
        )


def test_the_limit_is_the_memory_of_the_device_less_its_reserve():
    assert lower().unordered.hints.memory_limit == H100.limit == H100.memory - GPU_RESERVE
    h200 = lower(zt.prefetch(), cluster=zt.cluster("h200", dp="nvlink4"))
    assert (
        h200.unordered.hints.memory_limit == int(139.8 * (1 << 30)) - GPU_RESERVE
        and h200.unordered.hints.limit_option == ""
    )
    assert h200.replan(zt.cluster("h100", dp="nvlink4")).unordered.hints.memory_limit == H100.limit
    named = lower(zt.prefetch(memory=PEAK)).replan(zt.cluster("h200", dp="nvlink4"))
    assert named.unordered.hints.memory_limit == PEAK
    assert (
        lower(
            zt.prefetch(), cluster=zt.cluster("cpu", dp="ethernet-1g")
        ).unordered.hints.memory_limit
        is None
    )


def test_a_step_without_a_mesh_has_the_memory_of_its_gpu():
    assert zt.chain(zt.remat())(step).lower(STATE, BATCH).unordered.hints.memory_limit is None, (
        "it is on a CPU"
    )
    meta = {k: w.to("meta") for k, w in STATE.items()}
    assert (
        zt.chain(zt.remat())(step).lower(meta, BATCH.to("meta")).unordered.hints.memory_limit
        == H100.limit
    )


def test_the_memory_of_a_gpu_counts_in_whole_gibibytes(monkeypatch):
    class Module:
        @staticmethod
        def mem_get_info():
            return 0, (79 << 30) + 12345

    assert device_mesh.device_memory("cpu") is None
    assert torch.accelerator.is_available() or device_mesh.device_memory("cuda") is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert device_mesh.device_memory("cuda") == 79 << 30


def small(bytes_of_memory: int, reserve: int = 1024):
    """A cluster of GPUs with this much memory."""
    gpu = dataclasses.replace(H100, name="small", memory=bytes_of_memory, reserve=reserve)
    return zt.cluster(gpu, dp="nvlink4")


def test_what_does_not_fit_the_device_is_an_error():
    fits = lower().memory_analysis().peak
    assert lower(cluster=small(fits + 1024)).memory_analysis().peak <= fits
    with pytest.raises(ValueError) as caught:
        lower(cluster=small(40_000))
    first, *holders, advice = str(caught.value).splitlines()
    needs = int(first.split("any order tried: ")[1].split()[0])
    assert first == (
        f"small: 38.06 KiB, its memory without the reserve of 1.00 KiB, is less than the step needs in any order tried: "
        f"{needs} bytes ({needs / 1024:.2f} KiB) at {__file__}:30 in step."
    )
    assert len(holders) == 5
    assert advice == (
        "Take a smaller batch or another device: lower(cluster=zt.cluster(...)). If you know that more may be live, name "
        "the limit: zt.prefetch(memory=...)."
    )
    assert (
        lower(zt.prefetch(memory=PEAK), cluster=small(40_000))
        .plan.notes[-1]
        .endswith("and the device (small) has 39.06 KiB")
    )


def test_a_step_that_needs_far_more_than_its_limit_is_refused_without_a_search(monkeypatch):
    """The search takes about a second, and an error with ways to fit asks for many plans."""
    efforts = []

    def counted(problem, effort):
        efforts.append(effort)
        return solve(problem, effort)

    monkeypatch.setattr(make_plan, "solve", counted)
    fits = lower(zt.prefetch(memory=PEAK)).memory_analysis().peak
    assert efforts == [EFFORT]
    with pytest.raises(DoesNotFit) as caught:
        lower(zt.prefetch(memory=fits // 4))
    assert efforts[1] == WITHOUT_SEARCH
    assert fits // 4 < caught.value.least.peak


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.97, 1.0, 1.09])
def test_micro_batches_fit_where_an_order_of_them_fits(share):
    """Sums of gradients and the batches of other micro-batches are in the limit before messages are."""
    state = {f"w{k}": torch.zeros(256, 256, device="meta") for k in range(4)}
    batch = torch.zeros(128, 256, device="meta")
    shard = zt.shard_params(zt.AbstractMesh(dp=2))

    def lowered(*transforms):
        chain = zt.chain(shard, *transforms, zt.accumulate(2))
        return chain(step).lower(state, batch, cluster=zt.cluster("h100", dp="infiniband"))

    as_written = lowered()
    limit = int(share * as_written.memory_analysis().peak)
    planned = lowered(zt.overlap_grads(), zt.prefetch(memory=limit))
    assert planned.memory_analysis().peak <= limit
    assert planned.plan.update == "eager"
    assert planned.timeline().seconds < 0.8 * as_written.timeline().seconds
