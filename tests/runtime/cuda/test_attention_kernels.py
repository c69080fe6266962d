"""Attention by the fastest kernel: the program is rewritten as a clock says, and computes the same attention."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ztrans as zt
from tests.support.worlds import distance
from ztrans import compiled
from ztrans.ir.graph import Var
from ztrans.ir.keep_on_host import keep_on_host, values_for_backward
from ztrans.ir.operations import compute
from ztrans.runtime.cuda import attention_kernels
from ztrans.runtime.cuda.attention_kernels import (
    INFINITY,
    KERNELS,
    Attention,
    Kernel,
    between_projections,
    check_attention,
    fastest_attention,
    random_inputs,
)

aten = torch.ops.aten
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
FORWARD_OPS = [kernel.forward for kernel in KERNELS]
BACKWARD = [kernel.backward for kernel in KERNELS]
FORWARD = {  # without dropout
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, scale=0.5
    ),
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, scale=0.5
    ),
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True, scale=0.5
    ),
}
X = (2, 6, 8)


def lowered(attend, checkpointed=False, layers=2):
    """A step on meta tensors, so that PyTorch traces kernels of a GPU."""

    def layer(x, w):
        q, k, v = (x @ w).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        return x + attend(q, k, v)[0].transpose(1, 2).reshape(X)

    def run(layer, x, w):
        if not checkpointed:
            return layer(x, w)
        return torch.utils.checkpoint.checkpoint(layer, x, w, use_reentrant=False)

    def step(state, x):
        weights = [w.detach().requires_grad_() for w in state]
        for w in weights:
            x = run(layer, x, w)
        loss = x.square().mean()
        grads = torch.autograd.grad(loss, weights)
        return [w - 0.1 * g for w, g in zip(state, grads)], loss

    state = [torch.empty(8, 24, device="meta") for _ in range(layers)]
    return zt.Step.of(step).lower(state, torch.empty(X, device="meta"))


def clock(**milliseconds):
    return lambda kernel, attention: milliseconds.get(kernel.name, INFINITY) / 1e3


def kernels(graph) -> list[str]:
    names = []
    for e in graph.eqns:
        for kernel in KERNELS:
            names += [kernel.name] if e.op in (kernel.forward, kernel.backward) else []
    return names


def dense(q, k, v, scale):
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def evaluated(graph, *inputs):
    """Run a program on the CPU, with attention in plain torch, whose arguments are read by name."""
    values = dict(zip(graph.inputs, inputs))
    for e in graph.eqns:
        kernel = next((k for k in KERNELS if e.op in (k.forward, k.backward)), None)
        if kernel is None:
            results = compute(e, values)
        else:
            declared = e.op._schema.arguments
            arguments = {a.name: x for a, x in zip(declared, e.args)} | dict(e.kwargs)
            arguments = {
                key: values[x] if isinstance(x, Var) else x for key, x in arguments.items()
            }
            results = attention_of(kernel, e, arguments)
        values.update((v, x) for v, x in zip(e.outs, results) if v is not None)
    return [values[v] for v in graph.outputs]


def attention_of(kernel, e, arguments):
    assert (
        arguments["is_causal"] is True
        and arguments["dropout_p"] == 0.0
        and arguments["scale"] == 0.5
    )
    q, k, v = (arguments[name].detach().requires_grad_() for name in ("query", "key", "value"))
    with torch.enable_grad():
        out = dense(q, k, v, arguments["scale"])
    if e.op is kernel.forward:
        # Values that only this kernel's backward may get.
        marks = [
            torch.full(x.shape, float(hash((kernel.name, i)) % 97)) if x is not None else None
            for i, x in enumerate(e.outs)
        ]
        return [out.detach(), *marks[1:]]
    assert torch.allclose(arguments["out"], out.detach())
    marked = {"logsumexp": 1, "philox_seed": kernel.seed, "philox_offset": kernel.offset}
    for name, place in marked.items():
        assert (arguments[name] == float(hash((kernel.name, place)) % 97)).all(), name
    assert arguments.get("max_q", 6) == arguments.get("max_k", 6) == 6
    grads = torch.autograd.grad(
        out, (q, k, v), arguments.get("grad_out", arguments.get("grad_out_"))
    )
    return [*grads, None]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("fastest", BY_NAME)
@pytest.mark.parametrize("traced", FORWARD)
def test_all_attention_by_the_fastest_kernel(traced, fastest, checkpointed):
    """The values stay what they are, and each backward reads what its own forward has saved."""
    before = lowered(FORWARD[traced], checkpointed).graph
    after = fastest_attention(before, clock(**{traced: 2.0, fastest: 1.0}))
    count = 6 if checkpointed else 4
    assert kernels(before) == [traced] * count and kernels(after) == [fastest] * count
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(v.shape, generator=draw) for v in before.inputs]
    results = [evaluated(graph, *inputs) for graph in (before, after)]
    assert distance(*results) < 1e-5
    assert "causal attention of 2x2x6x4: " in str(after) and f"{fastest} 1.00 ms" in str(after)


@pytest.mark.parametrize("fastest", BY_NAME)
@pytest.mark.parametrize("traced", FORWARD)
def test_backward_reads_what_was_moved_or_recomputed_for_it(traced, fastest):
    low = lowered(FORWARD[traced]).graph
    moved = {v for e in low.eqns if e.op in FORWARD_OPS for v in (*e.ins[:3], e.outs[0])}
    before = keep_on_host(low, moved & values_for_backward(low))
    after = fastest_attention(before, clock(**{traced: 2.0, fastest: 1.0}))
    assert set(kernels(after)) == {fastest}
    read = [bound_by_name(e) for graph in (before, after) for e in graph.eqns if e.op in BACKWARD]
    assert read[:2] == read[2:]
    assert all(values["out"].name.endswith(".device") for values in read)


def bound_by_name(e):
    values = {a.name: x for a, x in zip(e.op._schema.arguments, e.args)}
    return {name: values[name] for name in ("query", "key", "value", "out")}


def test_attention_whose_logsumexp_is_moved_stays_with_a_note():
    low = lowered(FORWARD["flash"], layers=1).graph
    (logsumexp,) = (e.outs[1] for e in low.eqns if e.op is BY_NAME["flash"].forward)
    before = keep_on_host(low, {logsumexp})
    after = fastest_attention(before, clock(flash=2.0, cudnn=1.0))
    assert after.eqns == before.eqns
    assert after.notes[-1].endswith(
        f"attention of 2x2x6x4: flash, because {logsumexp.name} is on the host meanwhile"
    )


def test_timing_draws_no_random_numbers_of_the_user():
    attention = Attention((2, 2, 6, 4), (2, 2, 6, 4), torch.float32, True, None, True)
    before = torch.get_rng_state()
    q, k, v = random_inputs(attention, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert q.shape == k.shape == v.shape == (2, 2, 6, 4) and q.requires_grad
    assert not q.is_contiguous() and not torch.equal(q, k)


def test_a_kernel_that_is_hardly_faster_is_not_taken():
    before = lowered(FORWARD["flash"]).graph
    after = fastest_attention(before, clock(flash=1.0, cudnn=0.99))
    assert after.eqns == before.eqns and after.notes[-1].endswith("flash 1.00 ms, cudnn 990.00 us")


def test_each_attention_is_timed_once():
    asked = []

    def counting(kernel, attention):
        asked.append((kernel.name, attention))
        return 1.0

    fastest_attention(lowered(FORWARD["flash"], layers=3).graph, counting)
    assert [name for name, _ in asked] == ["flash", "cudnn", "efficient"]
    attention = asked[0][1]
    assert (attention.shape, attention.is_causal, attention.scale) == ((2, 2, 6, 4), True, 0.5)
    assert attention.differentiated and attention.dtype == torch.float32


OTHERS = {
    "dropout": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True),
    "a bias": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, q.new_empty(2, 2, 6, 6), True, 0.0
    ),
    "fewer keys' heads": lambda q, k, v: aten._scaled_dot_product_flash_attention(
        q, k[:, :1], v[:, :1], 0.0, True
    ),
    "a causal mask and fewer keys": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k[:, :, :4], v[:, :, :4], None, True, 0.0, True
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_stays(name):
    graph = lowered(OTHERS[name]).graph
    assert fastest_attention(graph, clock(cudnn=1.0)) is graph


def test_attention_stays_where_as_strided_reads_what_follows_from_it():
    """A kernel with other strides would give it other elements, without an error."""

    def step(state, x):
        out = FORWARD["flash"](x, x, x)[0]
        return state, (2 * out).as_strided((2, 6), (48, 8))

    graph = zt.Step.of(step).lower([], torch.empty(2, 2, 6, 4, device="meta")).graph
    after = fastest_attention(graph, clock(flash=2.0, cudnn=1.0))
    assert after.eqns == graph.eqns
    assert after.notes[-1].endswith(
        "attention of 2x2x6x4: flash, because as_strided reads what follows from it"
    )


class HeadsApart:
    """The kernel for CPUs, whose output has the positions of a head next to each other."""

    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    _schema = op._schema

    def __call__(self, *args, **kwargs):
        out, *rest = self.op(*args, **kwargs)
        return out.contiguous(), *rest


def test_the_time_of_a_kernel_has_the_copies_that_its_strides_cost():
    attention = Attention((2, 3, 64, 8), (2, 3, 64, 8), torch.float32, True, None, False)
    inputs = random_inputs(attention, "cpu")
    copied = []
    for forward in (HeadsApart.op, HeadsApart()):
        kernel = Kernel("double", forward, None, seed=0, offset=0)
        with Copies() as copies:
            (out,) = between_projections(kernel, attention, inputs)
        assert out.shape == (2, 64, 3, 8) and out.is_contiguous()
        copied.append(copies.count)
    assert copied[1] - copied[0] == 2, "one in the double, and one that its strides cost"


class Copies(TorchDispatchMode):
    """Counts the copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_result_that_others_read_stays():
    """Its form is that of this kernel."""

    def step(state, x):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(x, x, x, 0.0, True)
        return state, (out, logsumexp)

    graph = zt.Step.of(step).lower([], torch.empty(2, 2, 6, 4, device="meta")).graph
    assert kernels(fastest_attention(graph, clock(flash=2.0, cudnn=1.0))) == ["flash"]


def test_the_option_asks_the_clock(monkeypatch):
    """compile(attention="fastest") rewrites the program when it is bound."""
    program = lowered(FORWARD["flash"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiled, "seconds_by_events", clock(flash=2.0, cudnn=1.0))
    run = program.compile(attention="fastest")
    assert repr(run).endswith("attention='fastest')")
    state = [torch.empty(8, 24, device="meta") for _ in range(2)]
    bound = run._bind([*state, torch.empty(X, device="meta")], state)
    assert set(kernels(bound.lowered.graph)) == {"cudnn"} and set(kernels(program.graph)) == {
        "flash"
    }


def test_what_cannot_be_timed(monkeypatch):
    program = lowered(FORWARD["flash"])
    with pytest.raises(
        ValueError, match="unknown attention 'slowest'; there are 'traced' and 'fastest'"
    ):
        program.compile(attention="slowest")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match="times kernels on a CUDA device, and torch sees none here"
    ):
        program.compile(attention="fastest")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mesh = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(attention_kernels, "DeviceMesh", SimpleNamespace)
    with pytest.raises(ValueError, match="for a single rank, and this mesh has 2"):
        check_attention("fastest", mesh)
