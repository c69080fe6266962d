"""Leaves without elements, and shards without elements. Their update terminates and equals the plain step's."""

import functools
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import ztrans as zt
from tests.support.versions import OLD
from tests.support.worlds import ALL, default_dtype, distance, slices
from ztrans.ir.collectives import is_start


@pytest.fixture(autouse=True)
def _time_limit():
    """DTensor's rule for a view of a tensor without elements can loop for ever, so each test has 20 processor seconds."""

    def give_up(*_):
        raise TimeoutError("more than 20 processor seconds for a few equations")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def leaves(shape):
    torch.manual_seed(0)
    return {"w": torch.randn(shape), "v": torch.randn(5)}


@functools.cache
def traced(update, shape):
    """A step that updates a leaf of `shape`, and its program for two rows."""

    def step(state, x):
        loss = lambda p: (p["w"].square().sum() + p["w"].sum() + p["v"].sum()) * x.mean()
        grads, value = grad_and_value(loss)(state)
        return {"w": update(state["w"], grads["w"]), "v": state["v"] - grads["v"]}, value

    return step, zt.Step.of(step).trace(leaves(shape), torch.rand(2, 3))


def stepped(update, shape, ranks, stage=3):
    """Take one step on a leaf of `shape`, sharded and plain. Returns the distance of the results, and the program."""
    with default_dtype(torch.float64):
        step, program = traced(update, shape)
        state, x = leaves(shape), torch.rand(2 * ranks, 3)
        wanted, _ = step(state, x)
        shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage)
        lowered = program.with_transforms((shard, *ALL)).lower()
        zt.ir.check(lowered.graph)
        got, _ = lowered.lockstep(state, slices((x,), ranks))
    return distance(got, wanted), lowered.graph


EMPTY = {
    "flatten": lambda p, g: p - 0.1 * g.flatten().view(p.shape),
    "view": lambda p, g: (p.view(-1) - 0.1 * g.reshape(-1)).view(p.shape),
    "split": lambda p, g: torch.cat([a - 0.1 * b for a, b in zip(p.split(2), g.split(2))]),
    "chunk": lambda p, g: torch.cat([a - 0.1 * b for a, b in zip(p.chunk(2), g.chunk(2))]),
    "norm": lambda p, g: p - g / (1 + g.norm()),
    "transpose": lambda p, g: p - g.transpose(0, 1).contiguous().transpose(0, 1),
    "product": lambda p, g: p - (p @ p.mT) @ g,
    "elementwise": lambda p, g: p - 0.1 * g,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("update", EMPTY.values(), ids=EMPTY)
def test_a_leaf_without_elements_is_updated_without_messages(update, shape):
    if update is EMPTY["transpose"] or update is EMPTY["product"]:
        shape = shape if len(shape) > 1 else (0, 4)
    if update is EMPTY["split"] and shape[0] == 0 and OLD:
        pytest.skip(
            "torch 2.11 cannot split a fake tensor along a dim of size 0: `split_sizes[-1]` of an empty list"
        )
    error, graph = stepped(update, shape, 3)
    assert error == 0
    assert not any(
        is_start(e) and e.region == "update" and all(v.numel == 0 for v in e.ins)
        for e in graph.eqns
    )


FAIL_ON_NOTHING = {
    "norm of negative order": lambda p, g: p - g / torch.linalg.vector_norm(g, -1),
    "norm of negative order by rows": lambda p, g: (
        p - g / torch.linalg.vector_norm(g, -2, dim=1, keepdim=True)
    ),
    "least": lambda p, g: p - g / (3 + torch.linalg.vector_norm(g, -float("inf"))),
    "rfft": lambda p, g: p - torch.fft.irfft(torch.fft.rfft(g, dim=-1), n=p.shape[-1], dim=-1),
    "fft": lambda p, g: p - torch.fft.fft(g, dim=-1).real,
    "instance_norm": lambda p, g: (
        p - F.instance_norm(g[None, :, :, None] if g.ndim == 2 else g[None])[0].reshape(p.shape)
    ),
    "greatest": lambda p, g: p - g / (3 + g.amax().abs()),
    "argmax": lambda p, g: p - g / (1 + g.argmax(1, keepdim=True)),
    "median": lambda p, g: p - g.median(),
    "mean": lambda p, g: p - g.mean(),
    "std": lambda p, g: p - g.std(),
    "logsumexp": lambda p, g: p - g.logsumexp(0),
    "softmax": lambda p, g: p - g.softmax(1),
    "layer_norm": lambda p, g: p - F.layer_norm(g, g.shape[1:]),
    "all": lambda p, g: torch.where((g > -9).all(), p - g, p),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows, ranks", [(1, 2), (4, 3), (4, 5), (4, 6)])
@pytest.mark.parametrize("update", FAIL_ON_NOTHING.values(), ids=FAIL_ON_NOTHING)
def test_operations_that_fail_on_an_empty_shard_run_on_whole_values(update, rows, ranks):
    """On shards they would fail on the last ranks alone, and only when the program runs.

    Of four rows, three ranks have 2, 2 and 0; of five and six ranks, one and two have none.
    """
    error, _ = stepped(update, (rows, 6), ranks)
    assert error <= 1e-12


SUMS = {
    "elementwise": lambda p, g: torch.where(p > 0, p - 0.1 * g, p.lerp(g, 0.1)).to(p.dtype),
    "sum": lambda p, g: p - 0.1 * g / (1 + g.square().sum()),
    "norm": lambda p, g: p - g / (1 + torch.linalg.vector_norm(g, 3)),
    "product": lambda p, g: p - g @ g.T @ g,
    "views": lambda p, g: p - g.view(-1, 3, 2).transpose(1, 2).reshape(p.shape).clone(),
}


@pytest.mark.parametrize("update", SUMS.values(), ids=SUMS)
def test_operations_that_work_on_an_empty_shard_stay_on_shards(update):
    error, graph = stepped(update, (2, 6), 3, stage=2)
    assert error <= 1e-12
    gathers = [
        e for e in graph.eqns if is_start(e) and e.op.name == "all_gather" and e.region == "update"
    ]
    assert not gathers or update in (SUMS["product"], SUMS["views"]), gathers
