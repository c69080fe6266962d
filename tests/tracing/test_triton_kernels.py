"""Which arguments a Triton kernel changes, according to its source. Nothing is compiled, and no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import ztrans as zt
from ztrans.tracing.triton_kernels import changed_arguments

triton = pytest.importorskip("triton", reason="kernels need Triton")
tl = triton.language
library = ModuleType("library")  # a user's module of kernels


def offsets(x, out, n):
    k = tl.arange(0, 16)
    here, there = out + k, x + k
    here += n
    tl.store(here, tl.load(there, mask=k < n), mask=k < n)


def scattered(x, index, out):
    """What is loaded says where, but is not written."""
    k = tl.load(index + tl.arange(0, 16))
    tl.store(value=tl.load(x + k), pointer=out + k)


def counted(x, count, total):
    tl.atomic_add(count, 1)
    pointer: tl.tensor = total
    tl.atomic_max(pointer + tl.program_id(0), tl.load(x))


def blocks(x, out):
    block = tl.make_block_ptr(
        base=out, shape=(16,), strides=(1,), offsets=(0,), block_shape=(16,), order=(0,)
    )
    for _ in range(2):
        block = tl.advance(block, (8,))
    tl.store(block, tl.load(x))


def described(x, out):
    target = tl.make_tensor_descriptor(out, shape=[16], strides=[1], block_shape=[16])
    target.store([0], tl.load(x))


def helped(x, out):
    offsets(x, out, 16)


def helped_by_a_module(x, out):
    library.write(out, tl.load(x))


def helped_by_a_name_like_that_of_a_store(x, out):
    library.store_rows(tl.load(x), out)


def computes(x, out):
    tl.store(out, triton.language.math.exp(tl.load(x)).to(x.dtype))


def reads(x, out):
    tl.sum(tl.load(x + out))


def loops(x, a, b):
    for p in (a, b):
        tl.store(p, tl.load(x))


def comprehends(x, out, a, b):
    tl.store(out, tl.load(x))
    [tl.store(p, tl.load(x)) for p in (a, b)]


def comprehends_pointers(x, a, b):
    pointers = [p + 1 for p in (a, b)]
    tl.store(pointers[0], tl.load(x))


def names_in_a_condition(x, out):
    if (p := out + 1) is not None:
        tl.store(p, tl.load(x))


def unpacks(x, out, n):
    *_rest, p = n, n, out
    tl.store(p, tl.load(x))


def stores_by_an_older_name(x, out):
    tl._experimental_descriptor_store(out, tl.load(x), [0])


def assembles(x, out):
    tl.inline_asm_elementwise(
        "st.global.f32 [$1], $2;", "=r,l,f", [out, 1.0], dtype=tl.int32, is_pure=False, pack=1
    )


def assembles_purely(x, out, y):
    v = tl.inline_asm_elementwise("", "", [y], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out, v + tl.load(x))


def binds_otherwise(x, out):
    match out:
        case p:
            tl.store(p, tl.load(x))


def calls_a_lambda(x, out):
    (lambda p: tl.store(p, tl.load(x)))(out)


@pytest.mark.parametrize(
    ("kernel", "changed"),
    [
        (loops, {"a", "b"}),
        (comprehends, {"out", "a", "b"}),
        (comprehends_pointers, {"a", "b"}),
        (names_in_a_condition, {"out"}),
        (unpacks, {"out", "n"}),
        (stores_by_an_older_name, {"out"}),
        (assembles, {"out"}),
        (assembles_purely, {"out"}),
        (binds_otherwise, {"x", "out"}),
        (calls_a_lambda, {"x", "out"}),
        (offsets, {"out", "n"}),
        (scattered, {"out"}),
        (counted, {"count", "total"}),
        (blocks, {"out"}),
        (described, {"out"}),
        (helped, {"x", "out"}),
        (helped_by_a_module, {"out"}),
        (helped_by_a_name_like_that_of_a_store, {"out"}),
        (computes, {"out"}),
        (reads, set()),
    ],
)
def test_writes(kernel, changed):
    assert changed_arguments(kernel) == changed


@triton.jit
def doubled(x, out, n, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + k, 2 * tl.load(x + k, mask=k < n), mask=k < n)


tuned = triton.autotune([triton.Config({"BLOCK": n}) for n in (16, 32)], key=["n"])(doubled)
blocked = triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n"])})(doubled)


@triton.jit
def summed(x, n, BLOCK: tl.constexpr):
    tl.sum(tl.load(x + tl.arange(0, BLOCK)))


def launching(kernel):
    def step(state, x):
        y = torch.empty_like(x)
        arguments = (x,) if kernel is summed else (x, y)
        options = {} if kernel in (tuned, blocked) else {"BLOCK": 16}
        kernel[lambda given: (triton.cdiv(given["n"], given["BLOCK"]),)](
            *arguments, x.numel(), **options
        )
        return state, y.mean()

    return step


def test_a_kernel_is_traced_and_costed_without_a_gpu():
    lowered = zt.Step.of(launching(doubled)).lower(torch.ones(()), torch.ones(6, 8))
    text = [line.split("#")[0].strip() for line in str(lowered).split("\n") if "triton(" in line]
    assert text == ["triton: f32[6,8] = triton(doubled[(3,)](n=48, BLOCK=16), x, empty_like)"]
    assert lowered.cost_analysis().bytes >= 3 * 48 * 4
    traced = zt.Step.of(launching(doubled)).trace(
        torch.ones((), device="meta"), torch.ones(6, 8, device="meta")
    )
    assert "triton(doubled" in str(traced)


@pytest.mark.parametrize("kernel", [tuned, blocked])
def test_a_kernel_whose_options_are_chosen_when_it_runs_is_one_equation(kernel):
    for device in ("cpu", "meta"):
        traced = zt.Step.of(launching(kernel)).trace(
            torch.ones((), device=device), torch.ones(6, 8, device=device)
        )
        assert str(traced).count("= triton(doubled[...](n=48), x, empty_like)") == 1


@pytest.mark.parametrize("kernel", [doubled, tuned, blocked])
def test_a_kernel_that_was_compiled_for_a_gpu_does_not_run_on_cpus(kernel):
    compiled = zt.Step.of(launching(kernel)).lower(torch.ones(()), torch.ones(6, 8)).compile()
    message = rf"(?s)kernel doubled was compiled for a GPU.*{Path(__file__).name}:\d+ in doubled.*set TRITON_INTERPRET=1"
    with pytest.raises(RuntimeError, match=message):
        compiled(torch.ones(()), torch.ones(6, 8))


def test_a_kernel_that_writes_nothing_is_refused():
    with pytest.raises(
        ValueError,
        match=rf"(?s)kernel summed writes into none.*{Path(__file__).name}:\d+.*custom_op",
    ):
        zt.Step.of(launching(summed)).trace(torch.ones(()), torch.ones(16))
