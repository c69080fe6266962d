"""PyTorch's global state around a call: autocast, default dtype, torch.func transforms, another trace."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import ztrans as zt
from tests.support.worlds import default_dtype

# Inductor's own modules, and those of forward-mode differentiation, use torch.jit.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:torch")
    for kind in ("DeprecationWarning", "FutureWarning")
]
W, X = torch.linspace(0, 3, 64).view(8, 8), torch.linspace(-1, 5, 32).view(4, 8)


def guarded(state, x):
    """A step that switches the caller's autocast off for one matrix product."""
    y = x @ state
    with torch.autocast("cpu", enabled=False):
        return state, (y.float() @ state).sum()


def plain(state, x):
    return state, (x @ state).sum()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.compiles)])
def test_a_program_is_cast_once(backend):
    """The program holds the casts that autocast added during the trace. When it runs, autocast adds no more."""
    for step in (guarded, plain):
        with torch.autocast("cpu", torch.bfloat16):
            want = step(W, X)[1]
            lowered = zt.Step.of(step).lower(W, X)
            assert torch.equal(lowered.compile(backend=backend)(W.clone(), X)[1], want)
            assert torch.equal(lowered.lockstep(W, [(X,)])[1][0], want)
            assert torch.equal(zt.ir.evaluate(lowered.graph, W, X)[1], want)


def test_a_change_of_autocast_or_default_dtype_is_traced_anew():
    def zeros(state, x):
        return state, (x @ state).sum() + torch.zeros(())

    run = zt.Step.of(zeros)
    compiled = run.lower(W, X).compile()
    for k, around in enumerate([lambda: torch.autocast("cpu", enabled=False), lambda: torch.autocast("cpu", torch.bfloat16),
                                lambda: torch.autocast("cpu", torch.float16), lambda: default_dtype(torch.float64)]):  # fmt: skip
        with around():
            want = zeros(W, X)[1]
            got = run(W.clone(), X)[1]
            assert torch.equal(got, want) and got.dtype == want.dtype
            if k:
                with pytest.raises(
                    TypeError,
                    match=r"(autocast on cpu was off|default dtype was torch.float32) and is torch",
                ):
                    compiled(W.clone(), X)
    assert len(run._cache) == 4
    assert torch.equal(run(W.clone(), X)[1], zeros(W, X)[1]) and len(run._cache) == 4


TRANSFORMS = {
    "grad": lambda f: grad(f)(X),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "vmap": lambda f: vmap(f)(X.expand(3, 4, 8)),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_program_inside_of_torch_func_is_refused(kind):
    """Without this check the result would be zeros, or an obscure error of PyTorch."""
    run = zt.Step.of(plain)
    lowered = run.lower(W, X)
    calls = {
        "plain": lambda x: run(W.clone(), x)[1],
        "plain ": lambda x: lowered.compile()(W.clone(), x)[1],
        "plain.lockstep": lambda x: lowered.lockstep(W, [(x,)])[1][0],
        "lockstep": lambda x: zt.ir.evaluate(lowered.graph, W, x)[1],
        "trace: plain": lambda x: run.trace(W, x),
    }
    for name, call in calls.items():
        with pytest.raises(
            TypeError,
            match=rf"^{name.strip()}: called inside torch.func.{kind}.*\nApply torch.func.{kind} inside",
        ):
            TRANSFORMS[kind](call)


def test_dual_tensors_are_refused():
    run = zt.Step.of(plain)
    with forward_ad.dual_level():
        run(W.clone(), X)
        with pytest.raises(TypeError, match="plain: called with a dual tensor"):
            run(W.clone(), forward_ad.make_dual(X, X))


def test_a_step_inside_of_a_step_is_refused():
    inner = zt.Step.of(plain)
    with pytest.raises(
        TypeError, match=r"plain: called while another step is traced\.\nCall the function"
    ):
        zt.Step.of(lambda s, x: (s, inner(s, x)[1])).trace(W, X)
    got = zt.Step.of(lambda s, x: (s, inner.fn(s, x)[1]))(W.clone(), X)[1]
    assert torch.equal(got, plain(W, X)[1])
