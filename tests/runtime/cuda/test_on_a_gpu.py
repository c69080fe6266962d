"""Steps on a GPU, if there is one, compared with the untouched loop on the same GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt
from tests.support.worlds import distance

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # of torch.jit, which Inductor imports
    pytest.mark.filterwarnings(
        "ignore:(?s).*Online softmax is disabled"
    ),  # Inductor's choice for small rows
]
STEPS = 6


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Kernels that add in the same order in every run, so that bits can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    yield
    torch.use_deterministic_algorithms(False)


def perceptron():
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def with_dropout():
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4))


def convolutions():
    layers = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *layers, nn.Linear(128, 4))


MODELS = {"perceptron": perceptron, "dropout": with_dropout, "convolutions": convolutions}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw_capturable": lambda params: torch.optim.AdamW(params, lr=0.01, capturable=True),
}


def batches(count=STEPS):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randn(8, 16, generator=draw).to(DEVICE),
            torch.randint(4, (8,), generator=draw).to(DEVICE),
        )


def loop(make_model, make_optimizer, autocast=None, rows=None):
    """A model, its optimizer, and the body of a loop. With `rows`, gradients of micro-batches of that size are kept."""
    torch.manual_seed(0)
    model = make_model().to(DEVICE)
    optimizer = make_optimizer(model.parameters())

    def loop_step(x, y):
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            parts = zip(x.split(rows), y.split(rows)) if rows else ((x, y),)
            losses = [F.cross_entropy(model(a), b) for a, b in parts]
        for loss in losses:
            (loss / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach()

    return model, optimizer, loop_step


def untouched(*args, **kwargs):
    """The parameters and buffers after some steps of an ordinary loop, and its last loss."""
    model, _, loop_step = loop(*args, **kwargs)
    torch.manual_seed(7)
    for batch in batches():
        loss = loop_step(*batch)
    return {k: v.clone() for k, v in model.state_dict().items()}, loss


def lifted(
    *args,
    backend="eager",
    cuda_graph=False,
    cast_ahead=False,
    transform=lambda step: step,
    **kwargs,
):
    """The same, of the lifted loop."""
    model, optimizer, loop_step = loop(*args, **kwargs)
    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.Step.of(transform(step))
    state = step.shard(state)
    first = next(batches(1))
    call = (
        step.lower(state, *first).compile(
            backend=backend, cuda_graph=cuda_graph, cast_ahead=cast_ahead
        )
        if cuda_graph or cast_ahead or backend != "eager"
        else step
    )
    torch.manual_seed(7)
    for batch in batches():
        state, loss = call(state, *batch)
    if cuda_graph:
        call.close()
    zt.write_back(model, optimizer, state)
    return model.state_dict(), loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_lifted_loop_is_the_untouched_one(model, optimizer):
    """Bit for bit for SGD and fused AdamW; batch norm is cuDNN's in the untouched loop, and PyTorch's own in ours.

    A capturable optimizer has the numbers of the one that is not. In the untouched loop PyTorch computes its bias
    corrections in fp32, so the two untouched loops differ, by up to 1e-5 of a parameter.
    """
    got, lifted_loss = lifted(MODELS[model], OPTIMIZERS[optimizer])
    is_exact = optimizer in ("sgd", "adamw_fused") and model != "convolutions"
    limit = 0 if is_exact else 1e-6
    peer = "adamw" if optimizer == "adamw_capturable" else optimizer
    wanted, loss = untouched(MODELS[model], OPTIMIZERS[peer])
    assert {k: d for k in wanted if not (d := distance(got[k], wanted[k])) <= limit} == {}
    assert distance(lifted_loss, loss) <= limit


FUSED = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adam_l2": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("cast_ahead", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", FUSED)
def test_an_update_that_reads_half_gradients_has_the_bits_of_the_loop(
    optimizer, dtype, cuda_graph, cast_ahead
):
    """Under autocast gradients are half, and the loop casts them to fp32 for the optimizer.

    With `cast_ahead` the update writes the half-precision weights that the next step reads.
    """
    options = {"cuda_graph": cuda_graph, "cast_ahead": cast_ahead}
    wanted, loss = untouched(perceptron, FUSED[optimizer], dtype)
    got, lifted_loss = lifted(perceptron, FUSED[optimizer], dtype, **options)
    assert {k: d for k in wanted if not (d := distance(got[k], wanted[k])) <= 0} == {}
    assert torch.equal(lifted_loss, loss)


@pytest.mark.parametrize("model", ["perceptron", "convolutions"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_captured_step_is_the_untouched_loop(model, backend):
    wanted, loss = untouched(MODELS[model], OPTIMIZERS["adamw_fused"])
    got, lifted_loss = lifted(
        MODELS[model], OPTIMIZERS["adamw_fused"], backend=backend, cuda_graph=True
    )
    limit = 0 if (backend, model) == ("eager", "perceptron") else 1e-5
    assert {k: d for k in wanted if not (d := distance(got[k], wanted[k])) <= limit} == {}
    assert distance(lifted_loss, loss) <= limit


OTHER_GRAPHS = """
import torch, ztrans as zt
torch.manual_seed(0)
state = {"w": torch.randn(4096, 64, device="cuda"), "n": torch.zeros((), device="cuda")}
batches = torch.randn(5, 8, 4096, device="cuda")
def step(state, x):
    y = x @ state["w"]
    return {"w": state["w"] - 1e-3 * x.t() @ y, "n": state["n"] + 1}, y
kept = {k: v.clone() for k, v in state.items()}
call = zt.Step.of(step).lower(state, batches[0]).compile(cuda_graph=True)
for x in batches[:2]:
    state, y = call(state, x)
other = torch.compile(lambda a: (a @ a.t()).relu(), mode="reduce-overhead")
for _ in range(3):
    other(batches[0])
torch.cuda.empty_cache()
filled = [torch.full((2**20,), 7.0, device="cuda") for _ in range(40)]
for x in batches[2:]:
    state, y = call(state, x)
torch.cuda.synchronize()
assert all(bool((f == 7).all()) for f in filled), "memory of others was written"
for x in batches:
    kept, wanted = step(kept, x)
assert torch.allclose(y, wanted, rtol=1e-4, atol=1e-3), (y - wanted).abs().max()
call.close()
print("well")
"""


def test_a_captured_step_is_not_disturbed_by_other_graphs():
    """torch.compile(mode="reduce-overhead") releases the workspaces of cuBLAS, of all streams."""
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_GRAPHS], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0 and "well" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-5000:]


def test_a_captured_step_draws_another_mask_at_each_replay():
    torch.manual_seed(0)
    step = zt.Step.of(lambda state, x: ({"n": state["n"] + 1}, F.dropout(x, 0.5)))
    state, x = {"n": torch.zeros((), device=DEVICE)}, torch.ones(256, device=DEVICE)
    call = step.lower(state, x).compile(cuda_graph=True)
    masks = []
    for _ in range(5):
        state, mask = call(state, x)
        masks.append(tuple(mask.tolist()))
    call.close()
    assert len(set(masks)) == 5 and float(state["n"]) == 5


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_micro_batches(backend, cuda_graph):
    wanted, loss = untouched(perceptron, OPTIMIZERS["adamw_fused"], rows=2)
    micro = zt.accumulate(4)
    got, lifted_loss = lifted(
        perceptron,
        OPTIMIZERS["adamw_fused"],
        backend=backend,
        cuda_graph=cuda_graph,
        transform=micro,
    )
    assert max(distance(got[k], wanted[k]) for k in wanted) <= 1e-4
    assert distance(lifted_loss, loss) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    wanted, loss = untouched(perceptron, OPTIMIZERS["adamw_fused"], autocast=dtype)
    got, lifted_loss = lifted(perceptron, OPTIMIZERS["adamw_fused"], autocast=dtype)
    assert [k for k in wanted if not torch.equal(got[k], wanted[k])] == [] and torch.equal(
        loss, lifted_loss
    )


def test_a_scaler_skips_steps_and_changes_its_scale():
    def scaled():
        torch.manual_seed(0)
        model = perceptron().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=2)

        def loop_step(x, y, factor):
            with torch.autocast(DEVICE, torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, scaler, loop_step

    factors = [
        torch.tensor(f, device=DEVICE) for f in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0)
    ]
    plain, _, scaler, plain_step = scaled()
    model, optimizer, lifted_scaler, loop_step = scaled()
    step, state = zt.lift(loop_step, model, optimizer, scaler=lifted_scaler)
    run = zt.Step.of(step)
    state = run.shard(state)
    for factor, batch in zip(factors, batches()):
        plain_step(*batch, factor)
        state, _ = run(state, *batch, factor)
    zt.write_back(model, optimizer, state, scaler=lifted_scaler)
    assert [
        k for k, v in plain.state_dict().items() if not torch.equal(v, model.state_dict()[k])
    ] == []
    assert lifted_scaler.get_scale() == scaler.get_scale() != 2.0**20


def test_the_peak_of_memory_is_as_predicted():
    model = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU()))
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def loop_step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.Step.of(step)
    state, x = step.shard(state), torch.randn(2048, 1024, device=DEVICE)
    lowered = step.lower(state, x, x)
    call = lowered.compile()
    for _ in range(2):
        state, _ = call(state, x, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state, _ = call(state, x, x)
    torch.cuda.synchronize()
    inputs = sum(
        t.nbytes for t in torch.utils._pytree.tree_leaves((state, x)) if isinstance(t, torch.Tensor)
    )
    rise, predicted = (
        torch.cuda.max_memory_allocated() - before,
        lowered.memory_analysis().peak - inputs,
    )
    assert abs(rise - predicted) <= 0.1 * predicted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_state_on_a_gpu_that_is_not_the_current_one(cuda_graph):
    """Its kernels of Triton and its graph are launched there, and the current device stays."""
    pytest.importorskip("triton")
    from tests.support.user_kernel import scaled

    def step(state, x):
        return {"w": state["w"] - 0.1 * scaled(x, state["w"]).mean(0)}, scaled(x, state["w"]).sum()

    state, x = {"w": torch.rand(64, device="cuda:1")}, torch.rand(16, 64, device="cuda:1")
    wanted = state["w"].clone()
    call = zt.Step.of(step).lower(state, x).compile(cuda_graph=cuda_graph)
    for _ in range(4):
        state, _ = call(state, x)
        wanted -= 0.1 * (x * wanted).mean(0)
    call.close()
    assert distance(state["w"], wanted) < 1e-6 and torch.cuda.current_device() == 0


def test_a_kernel_of_the_users_is_an_equation():
    pytest.importorskip("triton")
    from tests.support.user_kernel import scaled

    def step(state, x):
        return {"w": state["w"] - 0.1 * scaled(x, state["w"]).mean(0)}, scaled(x, state["w"]).sum()

    state, x = {"w": torch.rand(64, device=DEVICE)}, torch.rand(16, 64, device=DEVICE)
    wanted = state["w"] - 0.1 * (x * state["w"]).mean(0)
    for backend in ("eager", "inductor"):
        lowered = zt.Step.of(step).lower(state, x)
        assert any("triton" in str(e.op) for e in lowered.graph.eqns)
        got, _ = lowered.compile(backend=backend)({"w": state["w"].clone()}, x)
        assert distance(got["w"], wanted) < 1e-6


def test_products_of_fp8():
    """Rowwise scales, as torch._scaled_mm takes them on a GPU of capability 9.0."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of capability 9.0")

    def step(state, x):
        limit = torch.finfo(torch.float8_e4m3fn).max
        of_rows = lambda v: limit / v.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
        a, b = of_rows(x), of_rows(state["w"])
        x8, w8 = (x * a).to(torch.float8_e4m3fn), (state["w"] * b).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(
            x8, w8.t(), scale_a=1 / a, scale_b=(1 / b).t(), out_dtype=torch.bfloat16
        )
        return {"w": state["w"] * 0.5}, y

    state, x = {"w": torch.randn(64, 32, device=DEVICE)}, torch.randn(16, 32, device=DEVICE)
    _, wanted = step(state, x)
    for backend in ("eager", "inductor"):
        _, y = (
            zt.Step.of(step).lower(state, x).compile(backend=backend)({"w": state["w"].clone()}, x)
        )
        assert distance(y.float(), wanted.float()) < 1e-2


MESH_OF_ONE = """
import sys, tempfile, pathlib
import torch, torch.distributed as dist, torch.nn.functional as F
import ztrans as zt
from torch import nn
device = sys.argv[1]
mesh = zt.make_mesh(device, dp=-1)
assert zt.calibrate(mesh).device.rate("bf16") > 0
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
def loop_step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
step, state = zt.lift(loop_step, model, optimizer)
step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())(step)
state = step.shard(state)
x, y = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
state, first = step(state, x, y)
compiled = step.lower(state, x, y).compile()
assert compiled.profile(state, x, y).timeline.seconds > 0
path = pathlib.Path(tempfile.mkdtemp()) / "state"
zt.save(path, state).result()
for _ in range(3):
    state, loss = step(state, x, y)
again = zt.load(path, state, step)
for _ in range(3):
    again, same = step(again, x, y)
assert torch.equal(loss, same), (loss, same)
assert loss < first
dist.destroy_process_group()
print("well")
"""


def test_a_mesh_of_one_gpu_measures_profiles_and_saves():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-c", MESH_OF_ONE, DEVICE],
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
    )
    assert ran.returncode == 0 and "well" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-5000:]
