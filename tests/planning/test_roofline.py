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


def attention_seconds(causal: bool) -> float:
    def attend(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]

    graph = graph_of(attend, *[(1, 8, 1024, 128)] * 3)
    (eqn,) = (e for e in graph.eqns if "attention" in str(e.op))
    return arithmetic_seconds(eqn, graph, H100)


def test_attention_has_a_rate_of_its_own_and_computes_half_of_the_scores_if_it_is_causal():
    operations = 4 * 8 * 1024 * 1024 * 128
    assert attention_seconds(False) == pytest.approx(operations / dict(H100.flops)["attention"])
    assert attention_seconds(True) == pytest.approx(attention_seconds(False) / 2)


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
