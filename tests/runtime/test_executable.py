"""Compiled steps compute what the untouched functions compute, call after call, whatever is done with their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.runtime.executable import step_executable


def check_bits(fn, state, *batches):
    """Check that a compiled step and the function itself return the same bits at every call; results are then changed."""
    bits = lambda x: x.flatten().contiguous().view(torch.uint8).tolist()
    copied = lambda tree: pytree.tree_map_only(torch.Tensor, torch.clone, tree)
    step, own, theirs = zt.Step.of(fn), copied(state), copied(state)
    for batch in batches:
        own, output = step(own, *batch)
        theirs, wanted = fn(theirs, *batch)
        for a, b in zip(
            pytree.tree_leaves((own, output)), pytree.tree_leaves((theirs, wanted)), strict=True
        ):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert bits(a) == bits(b), (a, b)
        for x in pytree.tree_leaves(output):
            x.add_(1)  # which no later call may see


def sum_before_its_argument_changes(state, x):
    h = x * 2
    total = h.sum(0, keepdim=True)
    changed = h * 3  # written over h
    return state, (total.view(-1) + 1, changed)


def sum_of_a_scalar(state, x):
    return state, (x.sum() * 2).sum(0, keepdim=True).view(()) + 1


def nothing_to_squeeze(state, x):
    h = (x * 2).view(4, 3, 2)
    return state, (h.squeeze(-1).view(-1), h.squeeze(-1).view(-1) + 1)


def parts_that_are_written(state, x):
    h = x * 2
    first, second = torch.unsafe_split(h, 2)
    first.mul_(3)
    second.view(-1)[0] = 7
    return state, h


def a_constant(state, x):
    return state, (torch.zeros(3), torch.arange(2.0), torch.tensor([1.0, 2.0]), x * torch.zeros(()))


def numbers_of_other_types(state, x):
    n = state["count"]
    return state, (n * 1, n * 1.0, n * True, n + 2, n + 2.0)


def signs_of_zero(state, x):
    a, b = state["count"] * 0.0, state["count"] * -0.0
    return {**state, "v": 1 / (state["v"] * 0.0), "w": 1 / (state["w"] * -0.0)}, (1 / a, 1 / b)


def leaves_that_change_places(state, x):
    return {**state, "v": state["w"], "w": state["v"] * 2}, x.sum()


def strided(state, x):
    return state, (x[1:].as_strided((2,), (1,)) * 2, x.as_strided((2, 2), (6, 1)) * 2)


def strided_from_an_offset(state, x):
    """The offset counts from the beginning of the storage, not of the view."""
    return state, (
        x[1:].as_strided((2,), (1,), 3) * 2,
        x.as_strided((2,), (1,), 3) * 2,
        (x * 2)[1:].as_strided((2,), (1,), 3),
    )


def frames(state, x):
    return state, torch.view_as_real(
        torch.stft(x.flatten(), 4, 2, window=torch.ones(4), center=False, return_complex=True)
    )


def a_constant_of_a_branch(state, x):
    chosen = torch.cond(x.sum() > 1e9, lambda a: a.sin(), lambda a: torch.zeros(4, 6), (x,))
    return state, chosen + 1


PROGRAMS = [
    a_constant_of_a_branch,
    sum_before_its_argument_changes, sum_of_a_scalar, nothing_to_squeeze, parts_that_are_written, a_constant,
    numbers_of_other_types, signs_of_zero, leaves_that_change_places, strided, strided_from_an_offset, frames,
]  # fmt: skip


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_step_has_the_bits_of_its_function(fn):
    state = {"count": torch.tensor(3), "v": torch.ones(3), "w": torch.ones(3)}
    batches = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(k)),) for k in range(3)]
    check_bits(fn, state, *batches)


@pytest.mark.parametrize("fn", [strided, frames], ids=lambda fn: fn.__name__)
def test_a_batch_may_be_a_part_of_a_larger_tensor(fn):
    """In which it begins elsewhere than in the one that was traced."""
    many = torch.randn(3, 5, 6)
    check_bits(fn, {}, *[(x[1:],) for x in many])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.compiles)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_step_may_return_constants_of_any_kind(backend):
    constants = [
        0.5,
        float("inf"),
        None,
        "text",
        torch.float16,
        np.float64(0.1),
        range(3),
    ]
    run = (
        zt.Step.of(lambda state, x: (state, [x.sum(), *constants]))
        .lower({}, torch.ones(2))
        .compile(backend=backend)
    )
    for _ in range(2):
        (_, *got) = run({}, torch.ones(2))[1]
        assert repr(got) == repr(constants)


def test_names_of_arguments_are_no_names_of_the_code():
    """Also where two leaves have one name but for dots."""
    state = {"block_1": {"weight": torch.ones(2)}, "block": {"1": {"weight": torch.zeros(2)}}}

    def step(state, self, torch, device, inf):
        first, second = state["block_1"]["weight"], state["block"]["1"]["weight"]
        return {
            "block_1": {"weight": first + self},
            "block": {"1": {"weight": second + torch}},
        }, device * inf

    check_bits(step, state, *[[torch.full((2,), float(k)) for k in range(4)]] * 2)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_kernel_does_not_write_over_a_constant():
    """Which is computed once, and read by every step."""

    def scaled(state, x):
        weights = torch.linspace(0, 1, 6) * 2 + 1
        return state, (x @ weights, weights.sin() * 2)

    step = zt.Step.of(scaled).lower({}, torch.ones(4, 6)).compile(backend="inductor")
    _, first = step({}, torch.ones(4, 6))
    for _ in range(2):
        assert all(map(torch.equal, step({}, torch.ones(4, 6))[1], first))


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "bias", [lambda b: b[:, 0], lambda b: b[0, :1].expand(512)], ids=["a column", "one number"]
)
def test_a_bias_with_strides_is_read_as_such(bias):
    step = lambda state, x: (state, torch.nn.functional.linear(x, state["w"], bias(state["b"])))
    state, x = {"w": torch.randn(512, 768), "b": torch.randn(512, 3)}, torch.randn(512, 768)
    compiled = zt.Step.of(step).lower(state, x).compile(backend="inductor")
    torch.testing.assert_close(compiled(state, x)[1], step(state, x)[1], rtol=1e-4, atol=1e-3)


def test_an_output_is_no_memory_of_the_batch():
    """A loader may fill the same memory with the next batch."""

    def step(state, x):
        kept = torch.empty_like(x)
        kept.copy_(x)
        return state, (kept, x[1:])

    run, x = zt.Step.of(step), torch.ones(3)
    _, outputs = run({"w": torch.zeros(1)}, x)
    x.zero_()
    assert [y.tolist() for y in outputs] == [[1, 1, 1], [1, 1]]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.compiles)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_an_operation_that_fails_names_the_users_line(backend):
    def step(state, ids):
        rows = torch.nn.functional.embedding(ids, state["w"])  # this line
        return state, rows.sum() * 2

    run = (
        zt.Step.of(step).lower({"w": torch.ones(3, 2)}, torch.tensor([1])).compile(backend=backend)
    )
    with pytest.raises((IndexError, RuntimeError)) as e:
        run({"w": torch.ones(3, 2)}, torch.tensor([3]))
    line = next(
        k
        for k, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# this line" in text
    )
    assert any(f"{Path(__file__).name}:{line} in " in note for note in e.value.__notes__)


def test_micro_batches_are_on_the_gpu_of_any_of_their_inputs():
    """The first leaf of the state may be on the host."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x @ w).square().mean(), [w])
        m = state["m"] + gradient
        return {"m": m, "w": w.detach() - m}, ()

    state = {"m": torch.zeros(4, 4), "w": torch.zeros(4, 4)}
    moved = zt.chain(zt.accumulate(2), zt.offload(where="m", at_least=0))(step)
    graph = moved.lower(state, torch.ones(2, 4)).graph
    examples = {}

    def take(part, inputs):
        examples.update(zip(part.inputs, inputs, strict=True))
        return part, None

    with FakeTensorMode():
        on_gpu = [torch.empty(4, 4, device="cuda"), torch.empty(2, 4, device="cuda")]
        step_executable(graph, None, [torch.zeros(4, 4), *on_gpu], take)
    sums = set(examples) - set(graph.inputs)
    assert sums and {examples[v].device.type for v in sums} == {"cuda"}
