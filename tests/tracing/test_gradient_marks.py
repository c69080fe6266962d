"""A mark of a gradient leaves its value connected, also under vmap: gradients of gradients are those of PyTorch."""

import pytest
import torch
from torch.func import grad, hessian, vmap

import ztrans as zt
from ztrans.tracing.errors import ReadsValueError, TraceError


def loss(w, x):
    return torch.tanh(x @ w).square().mean()


def after_a_step(w, x):
    return loss(w - 0.1 * grad(loss)(w, x), x)


def learning_to_learn(state, x):
    return state, grad(lambda w: vmap(after_a_step, (None, 0))(w, x).mean())(state)


def learning_to_learn_by_backward(state, x):
    w = state.detach().requires_grad_()
    vmap(after_a_step, (None, 0))(w, x).mean().backward()
    return state, w.grad


def penalty_of_gradients(state, x):
    w = state.detach().requires_grad_()
    vmap(grad(loss), (None, 0))(w, x).square().sum().backward()
    return state, w.grad


def second_derivatives(state, x):
    return state, hessian(loss)(state, x[0])


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # forward mode compiles rules with torch.jit
@pytest.mark.parametrize(
    "step",
    [learning_to_learn, learning_to_learn_by_backward, penalty_of_gradients, second_derivatives],
)
def test_gradients_of_gradients_are_those_of_the_plain_function(step):
    state, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(
        zt.Step.of(step)(state.clone(), x)[1], step(state, x)[1], rtol=1e-12, atol=1e-12
    )


def test_a_write_into_a_view_with_a_transposed_factor():
    """Autograd reads such a gradient by `as_strided`, with the strides that it had in the trace."""

    def written(w, factor, x):
        z = x @ w
        z[0] = 0.0
        return (torch.stack([z * torch.sigmoid(factor.t()), z]) ** 2).sum()

    step = lambda state, x: (state, grad(written)(state["w"], state["factor"], x))
    state = {
        "w": torch.randn(2, 3, dtype=torch.float64),
        "factor": torch.randn(3, 4, dtype=torch.float64),
    }
    x = torch.randn(4, 2, dtype=torch.float64)
    wanted = step(state, x)[1]
    torch.testing.assert_close(zt.Step.of(step)(state, x)[1], wanted)


def failing_hook(message):
    """A step with a hook in its backward that fails with this text."""

    def hook(gradient):
        raise RuntimeError(message)

    def step(state, x):
        w = state.detach().requires_grad_()
        y = x @ w
        y.register_hook(hook)
        y.sum().backward()
        return state - w.grad, y.sum()

    return step


@pytest.mark.parametrize("message", ["trace: no luck", "lift: no luck", "no setup_context"])
def test_the_text_of_an_error_changes_nothing(message):
    """Any error in a function of PyTorch gets the user's line, and the advice does not depend on its words."""
    with pytest.raises(RuntimeError) as e:
        zt.Step.of(failing_hook(message)).trace(torch.ones(3, 3), torch.ones(2, 3))
    text = str(e.value)
    assert text.startswith(f"trace: step: backward failed: {message}\n  at {__file__}:")
    assert "call its function: step.fn(state, ...)" in text


def test_an_error_of_ours_is_told_by_its_class():
    def reads(state, x):
        return state, float(x.sum())

    with pytest.raises(ReadsValueError, match="reads a tensor's value"):
        zt.Step.of(reads).trace(torch.ones(3), torch.ones(3))
    with pytest.raises(TraceError) as e:
        zt.Step.of(reads).trace(torch.ones(3), torch.ones(3))
    assert isinstance(e.value, ValueError)
