"""Triton kernels in a step: an equation for each launch, which Triton's interpreter computes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

import ztrans as zt
from tests.support.traced import trace
from tests.support.versions import OLD
from tests.support.worlds import ALL, clone, distance, slices
from ztrans.ir.interpreter import evaluate

torch.manual_seed(0)
STATE, X = {"w": torch.randn(8, 4), "b": torch.ones(4)}, torch.randn(6, 8)
TRITON = torch.ops.higher_order.triton_kernel_wrapper_functional


@triton.jit
def scale_rows(x, w, out, inverse, n, eps, BLOCK: tl.constexpr):
    """Each row divided by its root of the mean of squares, and times `w`, as in Liger's RMS norm."""
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + k, mask=k < n, other=0.0)
    r = 1 / tl.sqrt(tl.sum(values * values) / n + eps)
    tl.store(inverse + row, r)
    tl.store(out + row * n + k, values * r * tl.load(w + k, mask=k < n), mask=k < n)


@triton.jit
def scale_rows_backward(dy, x, w, inverse, dx, dw, n, BLOCK: tl.constexpr):
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    r = tl.load(inverse + row)
    values = tl.load(x + row * n + k, mask=k < n, other=0.0)
    g = tl.load(dy + row * n + k, mask=k < n, other=0.0)
    gw = g * tl.load(w + k, mask=k < n, other=0.0)
    tl.store(dx + row * n + k, r * (gw - values * r * r * tl.sum(gw * values) / n), mask=k < n)
    tl.store(dw + row * n + k, g * values * r, mask=k < n)


@triton.jit
def add_to(x, y, n, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + k, tl.load(x + k, mask=k < n) + tl.load(y + k, mask=k < n), mask=k < n)


needs_wraps = pytest.mark.skipif(
    OLD, reason="wrap_triton of torch 2.11 refuses the kernels of Triton's interpreter"
)
WRAPS = [
    pytest.param(wrap_triton, id="wrapped", marks=needs_wraps),
    pytest.param(lambda kernel: kernel, id="raw"),
]


def norm_class(wrap):
    """An autograd.Function that launches kernels, as Liger's do."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            out, inverse, n = torch.empty_like(x), x.new_empty(x.shape[0]), x.shape[1]
            wrap(scale_rows)[(x.shape[0],)](
                x, w, out, inverse, n, 1e-6, BLOCK=triton.next_power_of_2(n), num_warps=4
            )
            ctx.save_for_backward(x, w, inverse)
            return out

        @staticmethod
        def backward(ctx, dy):
            x, w, inverse = ctx.saved_tensors
            dx, dw, n = torch.empty_like(x), torch.empty_like(x), x.shape[1]
            grid = lambda given: (given["x"].shape[0],)
            wrap(scale_rows_backward)[grid](
                dy.contiguous(), x, w, inverse, dx, dw, n, BLOCK=triton.next_power_of_2(n)
            )
            return dx, dw.sum(0)

    return Norm


@triton_op("in_a_step::total", mutates_args={})
def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, n = x.clone(), x.numel()
    wrap_triton(add_to)[(triton.cdiv(n, 16),)](out, y, n, BLOCK=16)
    return out


total.register_autograd(lambda ctx, g: (g, g))


def make(norm, add=torch.add):
    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        h = norm(x @ params["w"], params["b"])
        loss = add(h, h.tanh()).square().mean()
        grads = torch.autograd.grad(loss, [*params.values()])
        return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    return step


def dense(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


WANT, LOSS = make(dense)(clone(STATE), X)


def sharded(step, stage):
    halves = slices((X,), 2)
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ALL)(step).lower(
        STATE, *halves[0]
    )
    zt.ir.check(lowered.graph)
    return lowered, lowered.lockstep(clone(STATE), halves)[0]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_launch_is_an_equation(wrap):
    step = make(norm_class(wrap).apply)
    lowered = zt.Step.of(step).lower(STATE, X)
    launches = {e.args[0].name: e for e in lowered.graph.eqns if e.op is TRITON}
    assert {name: (e.region, e.args[0].changed) for name, e in launches.items()} == {
        "scale_rows": ("forward", ("out", "inverse")),
        "scale_rows_backward": ("backward", ("dx", "dw")),
    }
    assert "= triton(scale_rows[(6,)](n=4, eps=1e-06, BLOCK=4, num_warps=4), mm, b, " in str(
        lowered
    )
    state, loss = lowered.compile()(clone(STATE), X)
    assert distance(state, WANT) < 1e-5 and distance(loss, LOSS) < 1e-5
    for stage in (0, 3):
        assert distance(sharded(step, stage)[1], WANT) < 1e-5


@pytest.mark.parametrize("wrap", WRAPS)
def test_launches_on_fake_gpus_are_those_on_cpus(wrap):
    """Autograd needs a real GPU even for fake tensors, so this step launches the kernel of backward itself."""

    def step(state, x):
        w, b = state["w"], state["b"]
        h = x @ w
        assert h.device.type == device
        (rows, n), out, inverse = h.shape, torch.empty_like(h), h.new_empty(h.shape[0])
        wrap(scale_rows)[(rows,)](h, b, out, inverse, n, 1e-6, BLOCK=4, num_warps=4)
        dy, dh, db = out * (2 / out.numel()), torch.empty_like(h), torch.empty_like(h)
        wrap(scale_rows_backward)[(rows,)](dy, h, b, inverse, dh, db, n, BLOCK=4)
        return {"w": w - 0.1 * (x.t() @ dh), "b": b - 0.1 * db.sum(0)}, out.square().mean()

    def truth(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        loss = dense(x @ params["w"], params["b"]).square().mean()
        grads = torch.autograd.grad(loss, [*params.values()])
        return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    on_meta = {k: v.to("meta") for k, v in STATE.items()}, X.to("meta")
    texts = []
    for device in ("cpu", "cuda"):
        graph = trace(step, *on_meta, device=device).graph
        texts.append(str(graph))
    assert texts[0] == texts[1]
    assert [e.args[0].name for e in graph.eqns if e.op is TRITON] == [
        "scale_rows",
        "scale_rows_backward",
    ]
    (*state, loss), (want, value) = evaluate(graph, *STATE.values(), X), truth(STATE, X)
    assert distance(state, [*want.values()]) < 1e-5 and distance(loss, value) < 1e-5


@needs_wraps
def test_an_operator_with_kernels_is_one_equation():
    step = make(dense, total)
    lowered, state = sharded(step, 3)
    assert distance(state, WANT) < 1e-5
    ops = [e.op for e in lowered.graph.eqns]
    assert ops.count(torch.ops.in_a_step.total.default) == 1 and TRITON not in ops
    assert distance(zt.Step.of(step).lower(STATE, X).compile()(clone(STATE), X)[0], WANT) < 1e-5


def test_a_kernel_may_change_its_argument():
    def step(state, x):
        w = state["w"].clone()
        add_to[(2,)](w, state["w"], w.numel(), BLOCK=16)
        return {"w": w, "b": state["b"]}, x.mean()

    lowered = zt.Step.of(step).lower(STATE, X)
    assert torch.equal(lowered.compile()(clone(STATE), X)[0]["w"], 2 * STATE["w"])
    with pytest.raises(
        ValueError,
        match=r"(?s)triton has no sharding rule for f32\[8@dp,4\].*test_in_a_step.py:\d+.*triton_op",
    ):
        sharded(step, 3)
    assert torch.equal(sharded(step, 0)[1]["w"], 2 * STATE["w"])


CONFIGS = [
    triton.Config({"BLOCK": 8}, num_warps=2),
    triton.Config({"BLOCK": 16}),
    triton.Config({"BLOCK": 32}),
]
EVEN = {"EVEN": lambda given: given["x"].numel() % given["BLOCK"] == 0}
seen_blocks: list[int] = []


def large_blocks(configs, arguments, **options):
    """Prune configurations by the arguments, as users do."""
    kept = [config for config in configs if config.kwargs["BLOCK"] * 2 >= arguments["n"]]
    seen_blocks.extend(config.kwargs["BLOCK"] for config in kept)
    return kept


def doubled(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else k < n
    tl.store(out + k, 2 * tl.load(x + k, mask=mask), mask=mask)


plain_kernel = triton.jit(doubled)
tune = triton.autotune(
    CONFIGS, key=["n"], prune_configs_by={"early_config_prune": large_blocks}, restore_value=["out"]
)
CHOSEN = {
    "heuristics": triton.heuristics(
        {"BLOCK": lambda given: triton.next_power_of_2(given["n"]), **EVEN}
    )(plain_kernel),
    "autotune": tune(triton.heuristics(EVEN)(plain_kernel)),
    "autotune inside": triton.heuristics({"EVEN": lambda given: False})(tune(plain_kernel)),
    "autotune, wrapped": wrap_triton(tune(triton.heuristics(EVEN)(plain_kernel))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # to compile imports Inductor
@pytest.mark.parametrize("name", CHOSEN)
def test_a_kernel_whose_options_are_chosen_when_it_runs(name):
    """Nothing is timed in the interpreter: of the configurations that are not pruned, the first one runs."""

    def twice(x):
        out, n = torch.empty_like(x), x.numel()
        CHOSEN[name][lambda given: (triton.cdiv(n, given["BLOCK"]),)](x, out, n)
        return out

    class Twice(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: twice(x))
        backward = staticmethod(lambda ctx, dy: twice(dy.contiguous()))

    norm = lambda x, w: Twice.apply(x) * w
    lowered = zt.Step.of(make(norm)).lower(STATE, X)
    assert [e.region for e in lowered.graph.eqns if e.op is TRITON] == ["forward", "backward"]
    assert "= triton(doubled[...](n=24), " in str(lowered)
    want, _ = make(lambda x, w: 2 * x * w)(clone(STATE), X)
    seen_blocks.clear()
    assert distance(lowered.compile()(clone(STATE), X)[0], want) < 1e-6
    assert seen_blocks == ([16, 32] * 2 if "autotune" in name else []), "for each launch"
    assert distance(lowered.compile(backend="inductor")(clone(STATE), X)[0], want) < 1e-6
    for stage in (0, 3):
        assert distance(sharded(make(norm), stage)[1], want) < 1e-6
