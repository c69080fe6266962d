"""The seconds of operations: thin matmuls, causal attention, launches, and power."""

import dataclasses

import pytest
import torch

import ztrans as zt
from ztrans.ir.graph import Graph
from ztrans.planning.devices import CPU, DEVICES, H100, H100_96GB_500W
from ztrans.planning.roofline import arithmetic_seconds, queue_seconds, roofline_seconds

GPUS = [name for name in DEVICES if name != "cpu"]
BF16 = torch.bfloat16


def graph_of(f, *shapes, dtype=BF16) -> Graph:
    """The program of a step that returns f of tensors of these shapes."""
    inputs = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return zt.Step.of(lambda state, *args: (state, f(*args))).lower(torch.zeros(1), *inputs).graph


def product(rows, inner, columns, device=H100) -> float:
    graph = graph_of(torch.mm, (rows, inner), (inner, columns))
    return arithmetic_seconds(graph.eqns[-1], graph, device)


@pytest.mark.parametrize("name", GPUS)
def test_a_thin_product_is_slower_for_each_operation(name):
    device = DEVICES[name]
    square, *thin = (
        product(*sizes, device) / (sizes[0] * sizes[1] * sizes[2])
        for sizes in ((4096, 4096, 4096), (64, 4096, 4096), (4096, 64, 4096), (4096, 4096, 64))
    )
    assert min(thin) > 1.5 * square


def test_a_product_takes_as_long_as_one_whose_sizes_are_greater_by_the_edge():
    bare = dataclasses.replace(H100, edge=0.0)
    assert product(64, 128, 256) == pytest.approx(product(64 + 128, 128 + 128, 256 + 128, bare))


def test_a_larger_product_never_takes_less():
    sizes = (1, 16, 100, 1024, 4096)
    for other in (64, 2048):
        for order in (lambda n, m: (n, m, m), lambda n, m: (m, n, m), lambda n, m: (m, m, n)):
            took = [product(*order(n, other)) for n in sizes]
            assert took == sorted(took)


def test_a_product_with_a_vector_is_bound_by_memory():
    graph = graph_of(torch.mm, (1, 8192), (8192, 8192))
    assert roofline_seconds(graph.eqns[-1], graph, H100) > arithmetic_seconds(
        graph.eqns[-1], graph, H100
    )


def test_batched_products_and_addmm_have_edges_too():
    one = product(64, 64, 64)
    many = graph_of(torch.bmm, (8, 64, 64), (8, 64, 64))
    assert arithmetic_seconds(many.eqns[-1], many, H100) == pytest.approx(8 * one)
    added = graph_of(torch.addmm, (64,), (64, 64), (64, 64))
    assert arithmetic_seconds(added.eqns[-1], added, H100) == pytest.approx(one)


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# FlashAttention-2 on an H100 SXM5, TFLOP/s: figures 5 and 6 of the FlashAttention-3 paper.
MEASURED = {
    ("forward", "causal", 64): (180, 229, 262, 284, 295, 299),
    ("forward", "causal", 128): (191, 260, 298, 319, 333, 335),
    ("forward", "causal", 256): (208, 251, 278, 293, 297, 298),
    ("forward", "full", 64): (282, 306, 318, 321, 322, 324),
    ("forward", "full", 128): (309, 350, 362, 368, 370, 370),
    ("forward", "full", 256): (275, 313, 321, 323, 324, 326),
    ("backward", "full", 64): (198, 238, 264, 279, 287, 291),
    ("backward", "full", 128): (214, 260, 291, 310, 318, 322),
}
# The same of cuDNN.
BY_CUDNN = {
    ("forward", True): (315, 410, 484, 518, 529, 539),
    ("backward", False): (305, 408, 465, 499, 518, 516),
}


def flash(q, k, v, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


def cudnn(q, k, v, causal):
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q, k, v, None, True, 0.0, causal)[0]


def efficient(q, k, v, causal):
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, None, True, 0.0, causal)[0]


def attention_seconds(
    direction: str, length: int, width: int, causal: bool, dtype=BF16, kernel=flash
) -> float:
    def attend(q, k, v):
        q.requires_grad_()
        seen = kernel(q, k, v, causal)
        if direction == "forward":
            return seen
        return torch.autograd.grad(seen, q, torch.ones_like(seen))[0]

    graph = graph_of(attend, *[(1, 8, length, width)] * 3, dtype=dtype)
    *_, eqn = (e for e in graph.eqns if "attention" in str(e.op))
    return arithmetic_seconds(eqn, graph, H100)


@pytest.mark.parametrize("direction, mask, width", MEASURED)
def test_attention_is_as_fast_as_measured(direction, mask, width):
    """Within 13% for each length, width of heads, direction and mask."""
    causal = mask == "causal"
    products = 2 if direction == "forward" else 5
    for length, tera in zip(LENGTHS, MEASURED[direction, mask, width]):
        operations = products * 2 * 8 * length * length * width * (0.5 if causal else 1)
        seconds = attention_seconds(direction, length, width, causal)
        assert operations / seconds / 1e12 == pytest.approx(tera, rel=0.13)


@pytest.mark.parametrize("direction, causal", BY_CUDNN)
def test_attention_by_cudnn_is_as_fast_as_measured(direction, causal):
    """From 1,024 tokens on. Shorter sequences are 16% slower in backward than the model has them."""
    products = (2 if direction == "forward" else 5) * (0.5 if causal else 1)
    for length, tera in list(zip(LENGTHS, BY_CUDNN[direction, causal]))[1:]:
        seconds = attention_seconds(direction, length, 128, causal, kernel=cudnn)
        operations = products * 2 * 8 * length * length * 128
        assert operations / seconds / 1e12 == pytest.approx(tera, rel=0.13)


def test_memory_efficient_attention_is_half_as_fast():
    slow, fast = (
        attention_seconds("forward", 4096, 128, True, kernel=each) for each in (efficient, flash)
    )
    assert slow == pytest.approx(2 * fast)


def test_attention_without_tensor_cores_is_as_slow_as_other_products():
    operations = 2 * 2 * 8 * 1024 * 1024 * 128
    seconds = attention_seconds("forward", 1024, 128, causal=False, dtype=torch.float32)
    assert seconds == pytest.approx(operations / H100.rate("f32"))


def test_a_gpu_runs_a_kernel_while_its_host_launches_the_next_and_a_cpu_does_not():
    assert queue_seconds(H100, 1, 0.0) == H100.launch_overhead
    assert queue_seconds(H100, 1, 1.0) == 1.0 + H100.kernel_gap
    assert queue_seconds(H100, 0, 1.0) == 1.0
    assert queue_seconds(CPU, 3, 1.0) == 1.0 + 3 * CPU.kernel_gap


def test_a_power_limit_lowers_the_clock_and_not_the_memory():
    limited = H100.with_power(0.5)
    assert limited.bandwidth == H100.bandwidth
    assert limited.rate("bf16") / H100.rate("bf16") == pytest.approx(0.5 ** (1 / 3))
    assert H100.with_power(1.0) == H100
    assert H100_96GB_500W.rate("bf16") < H100.rate("bf16")
