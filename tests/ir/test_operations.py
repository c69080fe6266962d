"""Views of values whose strides differ from the trace.

Operations on fake tensors do not always predict the strides of the real result. A program must take views all the same.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ztrans as zt
from ztrans.ir import operations

# Inductor's own modules use torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
aten = torch.ops.aten
X = torch.linspace(-2, 2, 120).view(4, 5, 6)


def normed(x):
    return F.batch_norm(x, None, None, training=True)


def layer_normed(x):
    return F.layer_norm(x, x.shape[1:], torch.ones(x.shape[1:]))


# With a transposed argument the result of these, or of their derivatives, has other strides than in the trace
# (torch 2.13, on a CPU).
OPERATIONS = {
    "batch_norm": normed,
    "layer_norm": layer_normed,
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "logit": lambda x: torch.logit(x.sigmoid()),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1, reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, x.detach() + 1, reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() + 1, reduction="none"),
    "floor_divide": lambda x: torch.floor_divide(x.detach(), 0.3) + x,
    "copysign": lambda x: torch.copysign(x, torch.tensor(-1.0)),
    "xlogy": lambda x: torch.xlogy(x, torch.arange(1.0, 5.0)[:, None, None]),
}

COMPILED = ("batch_norm", "layer_norm", "log_softmax", "xlogy")  # each takes a second to compile


def flat(y):
    """All elements of `y` in two orders. The strides decide which of the two is a view."""
    return torch.cat([y.reshape(-1), y.transpose(1, 2).reshape(-1)])


def step_of(operation):
    def step(state, x):
        w = state["w"].detach().requires_grad_()
        y = torch.tanh(flat(operation((x * w).transpose(1, 2)))) * 2
        loss = (y * torch.linspace(0, 1, len(y))).sum()
        (g,) = torch.autograd.grad(loss, [w])
        return {
            "w": state["w"] - 0.1 * flat(g.transpose(1, 2))[: w.numel()].view(w.shape)
        }, y.detach()

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager") for name in OPERATIONS),
        *(pytest.param(name, "inductor", marks=pytest.mark.compiles) for name in COMPILED),
        *(
            pytest.param(name, "inductor", marks=[pytest.mark.compiles, pytest.mark.exhaustive])
            for name in OPERATIONS
            if name not in COMPILED
        ),
    ],
)
def test_strides_may_differ_from_the_trace(name, backend):
    """As in batch norm over the middle axis (PatchTST has one), and in other operations."""
    step, state = step_of(OPERATIONS[name]), {"w": torch.linspace(1, 2, 120).view(4, 5, 6)}
    (want, y), lowered = step(state, X), zt.Step.of(step).lower(state, X)
    new, output = lowered.compile(backend=backend)({"w": state["w"].clone()}, X)
    lockstep_new, (lockstep_output,) = lowered.lockstep(state, [(X,)])
    if backend == "eager":
        assert torch.equal(new["w"], want["w"]) and torch.equal(output, y)
    else:
        assert torch.allclose(new["w"], want["w"], atol=1e-5) and torch.allclose(
            output, y, atol=1e-5
        )
    assert torch.equal(lockstep_new["w"], want["w"]) and torch.equal(lockstep_output, y)


def test_fake_strides_do_differ_from_real_ones():
    """Otherwise the tests above would prove nothing."""
    with FakeTensorMode() as mode:
        fake = normed(mode.from_tensor(X).transpose(1, 2)).stride()
    assert fake != normed(X.transpose(1, 2)).stride()


def test_such_a_value_can_be_viewed_as_another_dtype_and_as_complex():
    def step(state, x):
        y = normed(x.transpose(1, 2))
        pairs = torch.view_as_complex(y.transpose(1, 2).contiguous().view(4, 5, 3, 2))
        return state, (
            y.transpose(1, 2).contiguous().view(torch.float64),
            pairs,
            y.contiguous().view(torch.int16),
        )

    want = step(torch.zeros(1), X)[1]
    for got in (
        zt.Step.of(step)(torch.zeros(1), X)[1],
        zt.Step.of(step).lower(torch.zeros(1), X).lockstep(torch.zeros(1), [(X,)])[1][0],
    ):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("draw", [
    lambda x: x.bernoulli_(0.3), lambda x: x.random_(2, 9), lambda x: x.random_(9), lambda x: x.uniform_(), lambda x: x.normal_(),
])  # fmt: skip
def test_numbers_are_drawn_in_the_memory_order_of_the_argument(draw):
    """As in-place draws are, and the program has their functional forms."""

    def step(state, x):
        return state, draw(torch.empty_like(x))

    for x in (X, X.transpose(0, 2)):
        torch.manual_seed(0)
        want = draw(torch.empty_like(x))
        torch.manual_seed(0)
        assert torch.equal(zt.Step(step)({"w": torch.zeros(1)}, x)[1], want)


@pytest.mark.parametrize("needed", [True, False])
def test_collectives_get_contiguous_arguments_where_torch_needs_them(monkeypatch, needed):
    """That of torch 2.11 does; nothing else is copied."""
    monkeypatch.setattr(operations, "_NEED_CONTIGUOUS", needed)
    functional = torch.ops._c10d_functional
    for op in (aten.relu.default, functional.wait_tensor.default):
        assert operations.stride_safe.__wrapped__(op) is op
    for op in (functional.all_reduce.default, functional.all_gather_into_tensor_coalesced.default):
        assert (operations.stride_safe.__wrapped__(op) is op) != needed
