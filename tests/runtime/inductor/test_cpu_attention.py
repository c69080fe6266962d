"""Attention as products: as near to float64 as flash is, laid out as flash's results are, and chosen where it may be."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.programs import GPT, adam, adam_state, gpt_loss, tokens
from tests.support.worlds import clone, distance
from ztrans.runtime.inductor import cpu_attention as attention
from ztrans.runtime.inductor.fake_layouts import Strided

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor's own modules use torch.jit


def given(length: int, width: int, dtype: torch.dtype, views: bool) -> list[torch.Tensor]:
    """q, k, v and the gradient of the result, for two sequences and three heads."""
    torch.manual_seed(0)
    if views:
        qkv = torch.randn(2, length, 3, 3, width).to(dtype).permute(2, 0, 3, 1, 4)
        return [*qkv.unbind(), torch.randn(2, length, 3, width).to(dtype).transpose(1, 2)]
    return [torch.randn(2, 3, length, width).to(dtype) for _ in range(4)]


def exact(q, k, v, grad, causal: bool) -> list[torch.Tensor]:
    """Result, logarithms and gradients in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:]).tril().bool(), -torch.inf)
    out = scores.softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), grad.double())
    return [out.detach(), scores.logsumexp(-1).detach(), *grads]


def near(mine, flash, wanted) -> None:
    for x, y, z in zip(mine, flash, wanted, strict=True):
        errors = [(t.double() - z).norm() / z.norm() for t in (x, y)]
        assert errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length, width, views", [(77, 32, True), (200, 64, False), (256, 96, True), (300, 32, False)])
def test_errors_are_at_most_twice_those_of_flash(dtype, causal, length, width, views):
    q, k, v, grad = given(length, width, dtype, views)
    scale = width**-0.5
    flash = FORWARD(q, k, v, 0.0, causal)
    mine = attention.forward(q, k, v, causal, scale)
    flash = [*flash, *BACKWARD(grad, q, k, v, *flash, 0.0, causal)]
    mine = [*mine, *attention.backward(grad, q, k, v, *mine, causal, scale)]
    assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in flash]
    near(mine, flash, exact(q, k, v, grad, causal))


def test_keys_may_be_more_than_queries():
    q, *_, grad = given(70, 32, torch.float32, False)
    _, k, v, _ = given(150, 32, torch.float32, False)
    mine = attention.forward(q, k, v, False, 0.25)
    flash = FORWARD(q, k, v, scale=0.25)
    mine = [*mine, *attention.backward(grad, q, k, v, *mine, False, 0.25)]
    flash = [*flash, *BACKWARD(grad, q, k, v, *flash, 0.0, False, scale=0.25)]
    for x, y in zip(mine, flash, strict=True):
        torch.testing.assert_close(x, y)


@pytest.fixture
def chosen(monkeypatch):
    """Products are faster, whatever the clock says."""
    attention._faster.cache_clear()
    monkeypatch.setattr(attention, "time_share", lambda alternative, call: 0.0)
    yield
    attention._faster.cache_clear()


@pytest.mark.compiles
@pytest.mark.parametrize("views, dtype", [(True, torch.float32), (False, torch.bfloat16)], ids=str)
def test_compiled_it_lies_as_flash_does(chosen, views, dtype):
    q, k, v, grad = given(77, 32, dtype, views)
    flash = FORWARD(q, k, v, 0.0, True)
    every = [*flash, *BACKWARD(grad, q, k, v, *flash, 0.0, True)]
    layouts = [Strided.of(x) for x in (grad, q, k, v, *flash)]
    forward = attention.alternative(FORWARD, [*layouts[1:4], 0.0, True], {})
    backward = attention.alternative(BACKWARD, [*layouts, 0.0, True], {})
    mine = [*forward(q, k, v, 0.0, True), *backward(grad, q, k, v, *flash, 0.0, True)]
    assert [Strided.of(x) for x in mine] == [Strided.of(x) for x in every]
    near(mine, every, exact(q, k, v, grad, True))


def test_what_it_cannot_do_stays_with_flash(chosen):
    q, k, v, _ = (Strided.of(x) for x in given(8, 4, torch.float32, False))
    mask = Strided.of(torch.zeros(8, 8))
    long = Strided.of(torch.empty(64, 16, 2048, 4, device="meta"))._replace(device=torch.device("cpu"))
    assert attention.alternative(aten.mm.default, [q, k], {}) is None
    assert attention.alternative(FORWARD, [q, k, v, 0.1, True], {}) is None, "dropout"
    assert attention.alternative(FORWARD, [q, k, v], {"attn_mask": mask}) is None
    assert attention.alternative(FORWARD, [q, k._replace(shape=(2, 1, 8, 4)), v], {}) is None, "heads shared"
    assert attention.alternative(FORWARD, [q, k._replace(shape=(2, 3, 9, 4)), v, 0.0, True], {}) is None, "lengths"
    assert attention.alternative(FORWARD, [x._replace(dtype=torch.float64) for x in (q, k, v)], {}) is None
    assert attention.alternative(FORWARD, [x._replace(shape=(2, 3, 0, 4)) for x in (q, k, v)], {}) is None, "nothing"
    assert attention.alternative(FORWARD, [long] * 3, {}) is None, "a block's scores take too much memory"


@pytest.mark.compiles
def test_a_model_trains_as_it_does_eagerly(chosen):
    model = GPT(layers=2)
    loss = gpt_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    state, batch = adam_state(model)(), tokens(19, 6)(4)
    lowered, results = zt.Step.of(step).lower(state, *batch), []
    for backend in ("eager", "inductor"):
        compiled, mine, losses = lowered.compile(backend=backend), clone(state), []
        for _ in range(3):
            mine, value = compiled(mine, *batch)
            losses.append(value.clone())
        results.append((mine, losses))
    assert distance(*(r[0] for r in results), 1e-3) < 1e-5 and distance(*(r[1] for r in results), 1e-3) < 1e-5
    code = compiled._bound[0][1].program.code
    assert code.count("forward_by_products(") == code.count("backward_by_products(") == 2, "one of each a layer"
