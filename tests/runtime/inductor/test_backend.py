"""`compile(backend="inductor")` computes what the eager backend computes, with few kernels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.processes import run_ranks
from tests.support.programs import CASES, GPT, adam, adam_state, gpt_loss, tokens
from tests.support.worlds import batches, clone, distance, on_ranks
from ztrans.planning.durations import signature
from ztrans.runtime.inductor import backend as inductor
from ztrans.runtime.inductor.backend import KernelCall
from ztrans.runtime.inductor.compiler import Strided, fused


def both(lowered, state, data) -> list:
    """The final state, the outputs and the compiled step of the eager backend, and of Inductor."""
    results = []
    for backend in ("eager", "inductor"):
        compiled, mine, outputs = lowered.compile(backend=backend), clone(state), []
        torch.manual_seed(7)
        for batch in data:
            mine, output = compiled(mine, *batch)
            outputs.append(pytree.tree_map_only(torch.Tensor, torch.clone, output))
        results.append((mine, outputs, compiled))
    return results


pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch"
    ),  # Inductor's own modules use torch.jit
]
COMPILED = ("adamw_fused", "autocast")
# Each of them takes up to half a minute to compile.
MORE_COMPILED = ("mlp_momentum", "gpt_adam", "lstm", "conv_groupnorm", "muon", "cast_inside")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*COMPILED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_COMPILED)],
)
def test_steps_compute_what_the_eager_backend_does(name):
    """To 1e-5 in fp32: a fused sum has another order, and a product may use another library."""
    case = CASES[name]
    (state, outputs, _), (mine, mines, _) = both(on_ranks(case, 1), case.state(), batches(case, 3))
    half = name in ("autocast", "cast_inside", "cast_outside")
    assert distance(mine, state, 1e-3) < (2e-2 if half else 1e-5)
    assert distance(mines, outputs, 1e-3) < (2e-2 if half else 1e-5)


def as_they_are(function, like, donated=(), deterministic=False):
    """In place of `compiler.fused`: PyTorch runs the kernel, and then destroys the arguments that are donated to it."""

    def kernel(args):
        results = function(*args)
        kept = {x.untyped_storage().data_ptr() for x in results}
        for k in donated:
            if args[k].untyped_storage().data_ptr() not in kept:
                args[k].fill_(torch.nan if args[k].is_floating_point() else 1)
        return results

    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(CASES))
def test_kernels_destroy_nothing_that_is_read(name, monkeypatch):
    """What is written over state, donated and left out is chosen before Inductor compiles a kernel."""
    monkeypatch.setattr(inductor, "fused", as_they_are)
    case = CASES[name]
    (state, outputs, _), (mine, mines, _) = both(on_ranks(case, 1), case.state(), batches(case, 3))
    assert distance(mine, state, 1e-3) < 1e-5 and distance(mines, outputs, 1e-3) < 1e-5


def drop(state, x):
    """A step with a random draw between fused equations, an output that is a view of the state, and Adam's update."""
    w = state["w"].detach().requires_grad_()
    h = F.dropout(F.gelu(torch.cat([x @ w]).sin() + 1), 0.5).cos()
    (g,) = torch.autograd.grad(h.square().mean(), w)
    m = state["m"].lerp(g, 0.1)
    v = state["v"] * 0.9 + 0.1 * g * g
    return {"w": w.detach() - 0.1 * m / (v.sqrt() + 1e-3), "m": m, "v": v}, (
        h.detach().sum(),
        state["m"].t(),
    )


def of(*shape: int) -> dict:
    return {"w": torch.randn(*shape), "m": torch.zeros(*shape), "v": torch.zeros(*shape)}


def test_random_draws_are_equal_and_the_state_is_updated_in_place():
    data = [(torch.randn(8, 16),) for _ in range(3)]
    lowered = zt.Step.of(drop).lower(of(16, 32), *data[0])
    (state, outputs, _), (mine, mines, compiled) = both(lowered, of(16, 32), data)
    assert distance(mine, state) < 1e-5 and distance(mines, outputs) < 1e-5
    homes = [x.data_ptr() for x in mine.values()]
    held, before = compiled(mine, *data[0])[1][1], mine["m"].clone()
    assert [x.data_ptr() for x in mine.values()] == homes
    program = compiled.binding.local_program.runner.executable.program
    kernels = [node.target for node in program.graph.nodes if isinstance(node.target, KernelCall)]
    written = [k for kernel in kernels for k in kernel.destinations if k is not None]
    assert len(written) == 2, "kernels overwrite w and v, but not m, which is an output"
    assert not torch.equal(held.t(), before), (
        "the next step does not write into an output of this one"
    )


def test_the_strides_of_a_batch_may_change_between_calls():
    compiled = zt.Step.of(drop).lower(of(4, 8), torch.randn(2, 4)).compile(backend="inductor")
    x, results = torch.randn(2, 4), []
    for batch in (x, x.t().contiguous().t()):
        torch.manual_seed(0)
        state = of(4, 8)
        results.append(compiled(state, batch)[0])
    assert distance(*results) < 1e-6


def deep(layers: int):
    """A GPT of equal layers: lowered, compiled, its state, and its batch."""
    model = GPT(layers=layers)
    loss = gpt_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    state, batch = adam_state(model)(), tokens(19, 6)(24)  # with the kernels of the case gpt_adam
    lowered = zt.Step.of(step).lower(state, *batch)
    compiled = lowered.compile(backend="inductor")
    compiled(state, *batch)
    return lowered, compiled, state, batch


def layouts(*tensors: torch.Tensor) -> list[Strided]:
    return [Strided.of(x) for x in tensors]


@pytest.fixture(scope="module")
def two_layers():
    return deep(2)


def test_equal_layers_are_compiled_once(two_layers):
    few, more = (
        [*compiled.binding.local_program.runner.executable.last.kernels]
        for _, compiled, *_ in (two_layers, deep(4))
    )
    assert few == more


def test_the_program_that_runs_is_printed_and_profiled(two_layers):
    lowered, compiled, state, batch = two_layers
    measured = compiled.profile(state, *batch, steps=2)
    end = 0.0
    for event in measured.timeline.events:
        assert event.start == pytest.approx(end), "equations follow each other without a gap"
        end = event.start + event.seconds
    assert 0 < end <= measured.timeline.seconds
    run = compiled.binding.local_program.lowered.graph
    assert set(run.eqns) == set(lowered.graph.eqns) and str(run) == compiled.as_text() != str(
        lowered
    )
    assert {signature(e, run) for e in run.eqns} == set(measured.seconds_by_signature)


def test_a_kernel_overwrites_only_donated_arguments():
    """One function is compiled for three sets of donated arguments. Each needs a kernel of its own."""
    kernels = [
        fused(lambda x, y: [x * y + 1], layouts(torch.empty(64), torch.empty(64)), d)
        for d in ([], [1], [0])
    ]
    for kernel, over in zip(kernels, (None, 1, 0)):
        given = [torch.full((64,), 2.0), torch.full((64,), 3.0)]
        (result,) = kernel(list(given))
        assert torch.equal(result, torch.full((64,), 7.0))
        assert [x.data_ptr() == result.data_ptr() for x in given] == [over == 0, over == 1]


def test_a_value_of_another_shape_than_its_fake_implementation_returns_is_refused():
    layout = Strided.of(torch.empty(4))
    call = KernelCall(lambda args: args, [None], [layout])
    with pytest.raises(
        RuntimeError,
        match=r"shape \[1\], and \[4\] in the traced program.\nThe fake implementation",
    ):
        call(torch.ones(1))


def test_no_result_of_a_kernel_shares_memory_with_an_argument():
    """Not even a result that equals the argument: later kernels may overwrite either of them."""
    aten = torch.ops.aten

    def same(x, h):
        wide, cast = h.float(), x.bfloat16().float()
        return [
            x * aten.ones_like(x),
            x + aten.zeros_like(x),
            aten.clone(x),
            x / 1,
            cast,
            wide.bfloat16(),
            wide + 0,
        ]

    x, h = torch.randn(64), torch.randn(64).bfloat16()
    results = fused(same, layouts(torch.empty(64), torch.empty(64, dtype=torch.bfloat16)))([x, h])
    assert len({v.data_ptr() for v in (x, h, *results)}) == 2 + len(results)


def alone(a):
    h = a @ a
    return a @ (h.sin() + 1)


def returned(a):
    h = a @ a
    return a @ (h.sin() + 1), h


def in_part(a):
    h = a @ a
    return a @ (h.sin() + 1) + h[:1]


def turned(a):
    """A kernel reads `h` and a view of it, and another operation reads that view too."""
    h = a @ a
    t = h.t()
    b = a @ t
    return a @ (h * 2 + t.sin()) + b


@pytest.mark.parametrize(
    "function, donates", [(alone, True), (returned, False), (in_part, False), (turned, False)]
)
def test_an_argument_is_donated_if_nothing_else_reads_its_memory(function, donates):
    step = lambda state, a: (state, function(a))
    a = torch.randn(65, 65) / 8
    compiled = zt.Step.of(step).lower(torch.ones(1), a).compile(backend="inductor")
    for x, y in zip(
        pytree.tree_leaves(compiled(torch.ones(1), a)[1]), pytree.tree_leaves(function(a))
    ):
        torch.testing.assert_close(x, y)
    first = next(iter(compiled.binding.local_program.runner.executable.last.kernels))
    _, _, donated, _ = first
    assert donated == ((0,) if donates else ())


def test_a_loss_and_its_gradient_need_no_buffer_of_zeros():
    """A scatter into zeros is fused as a comparison with the index."""
    aten = torch.ops.aten

    def grads(logits, target, unit):
        log = aten._log_softmax(logits, 1, False)
        loss, weight = aten.nll_loss_forward(log, target, None, 1, -100)
        scattered = aten.nll_loss_backward(unit, log, target, None, 1, -100, weight)
        return [loss, aten._log_softmax_backward_data(scattered, log, 1, torch.float32)]

    logits, target, unit = torch.randn(64, 512), torch.randint(512, (64,)), torch.ones(())
    target[3] = -100
    kernel = fused(
        grads, layouts(torch.empty(64, 512), torch.empty(64, dtype=torch.int64), torch.empty(()))
    )
    for a, b in zip(kernel([logits, target, unit]), grads(logits, target, unit)):
        torch.testing.assert_close(a, b)
    code = Path(kernel.current_callable.__globals__["__file__"]).read_text()
    assert code.count("empty_strided_cpu((64, 512)") == 1


def test_the_fused_rms_norm_of_gpus_joins_a_kernel():
    """On a CPU, PyTorch records other operations for an RMS norm, so the test calls the fused one directly."""
    aten = torch.ops.aten

    def both_ways(x, w, grad):
        y, scale = aten._fused_rms_norm(x, [8], w, 1e-6)
        return [y.cos(), *aten._fused_rms_norm_backward(grad, x, [8], scale, w, [True, True])]

    x, w, grad = (
        torch.randn(4, 8, requires_grad=True),
        torch.rand(8, requires_grad=True),
        torch.randn(4, 8),
    )
    y = F.rms_norm(x, (8,), w, 1e-6)
    wanted = [y.cos(), *torch.autograd.grad(y, (x, w), grad)]
    kernel = fused(both_ways, layouts(torch.empty(4, 8), torch.empty(8), torch.empty(4, 8)))
    for a, b in zip(kernel([x.detach(), w.detach(), grad]), wanted, strict=True):
        torch.testing.assert_close(a, b.detach())


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return run_ranks(2, "ranks.py", "inductor")


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_two_ranks_compute_what_they_do_eagerly(two):
    figures = [f for f in two if f["check"] == "inductor"]
    assert len(figures) == 4
    for f in figures:
        assert f["distance"] < (2e-2 if f["case"] == "cast_inside" else 1e-5), f
        assert f["sent"] == f["wanted"], "the same messages in the same order"
        assert f["equal"], "replicas are equal to the bit"


def test_statistics_of_a_layer_norm_under_autocast_are_read_in_their_own_dtype():
    """On a CPU they are fp32, and fake tensors say bf16. Read as bf16, their bits are other numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loop_step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    x = torch.randn(32, 8)
    lowered = zt.Step.of(step).lower(state, x)
    results = [lowered.compile(backend=b)(clone(state), x)[0] for b in ("eager", "inductor")]
    for path, before in state["params"].items():
        changes = [result["params"][path] - before for result in results]
        torch.testing.assert_close(*changes, rtol=0.02, atol=float(0.02 * changes[0].abs().max()))
