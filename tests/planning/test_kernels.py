"""The seconds of kernels: thin matmuls, causal attention, launches, power, and kernels that a compiler fuses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import ztrans as zt
from ztrans.ir.graph import Graph
from ztrans.planning.cost import launches, traffic
from ztrans.planning.devices import CPU, DEVICES, H100, H100_96GB_500W
from ztrans.planning.fusion import kernels
from ztrans.planning.kernels import launched, operation_seconds, roofline
from ztrans.planning.simulate import seconds, simulate

GPUS = [name for name in DEVICES if name != "cpu"]
BF16 = torch.bfloat16


def graph_of(f, *shapes, dtype=BF16) -> Graph:
    """The program of a step that returns f of tensors of these shapes."""
    inputs = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return zt.Step.of(lambda state, *args: (state, f(*args))).lower(torch.zeros(1), *inputs).graph


def product(rows, inner, columns, device=H100) -> float:
    graph = graph_of(torch.mm, (rows, inner), (inner, columns))
    return operation_seconds(graph.eqns[-1], graph, device)


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
    assert roofline(graph.eqns[-1], graph, H100) > operation_seconds(graph.eqns[-1], graph, H100)


def test_batched_products_and_addmm_have_edges_too():
    one = product(64, 64, 64)
    many = graph_of(torch.bmm, (8, 64, 64), (8, 64, 64))
    assert operation_seconds(many.eqns[-1], many, H100) == pytest.approx(8 * one)
    added = graph_of(torch.addmm, (64,), (64, 64), (64, 64))
    assert operation_seconds(added.eqns[-1], added, H100) == pytest.approx(one)


def attention_seconds(causal: bool) -> float:
    def attend(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]

    graph = graph_of(attend, *[(1, 8, 1024, 128)] * 3)
    (eqn,) = (e for e in graph.eqns if "attention" in str(e.op))
    return operation_seconds(eqn, graph, H100)


def test_attention_has_a_rate_of_its_own_and_computes_half_of_the_scores_if_it_is_causal():
    operations = 4 * 8 * 1024 * 1024 * 128
    assert attention_seconds(False) == pytest.approx(operations / dict(H100.flops)["attention"])
    assert attention_seconds(True) == pytest.approx(attention_seconds(False) / 2)


def test_a_gpu_runs_a_kernel_while_its_host_launches_the_next_and_a_cpu_does_not():
    assert launched(H100, 1, 0.0) == H100.dispatch
    assert launched(H100, 1, 1.0) == 1.0 + H100.launch
    assert launched(H100, 0, 1.0) == 1.0
    assert launched(CPU, 3, 1.0) == 1.0 + 3 * CPU.launch


def test_a_power_limit_lowers_the_clock_and_not_the_memory():
    limited = H100.with_power(0.5)
    assert limited.bandwidth == H100.bandwidth
    assert limited.rate("bf16") / H100.rate("bf16") == pytest.approx(0.5 ** (1 / 3))
    assert H100.with_power(1.0) == H100
    assert H100_96GB_500W.rate("bf16") < H100.rate("bf16")


# What a compiler fuses.


def chain(x, w):
    """Three elementwise operations, a product, and two more."""
    y = (x + 1).sin() * 2
    z = y @ w
    return (z.exp() + y).sum(-1)


def fused(f, *shapes):
    graph = graph_of(f, *shapes)
    return graph, kernels(graph, lambda e: True)


def test_a_compiler_fuses_what_no_product_separates():
    graph, every = fused(chain, (64, 64), (64, 64))
    size = 64 * 64 * 2
    before, after = sorted(every, key=lambda kernel: graph.eqns.index(kernel.eqns[0]))
    assert [str(e.op).split(".")[1] for e in before.eqns] == ["add", "sin", "mul"]
    assert [str(e.op).split(".")[1] for e in after.eqns] == ["exp", "add", "sum"]
    assert before.traffic == 2 * size, "it reads x and writes y"
    assert after.traffic == 2 * size + 64 * 2, "it reads z and y, and writes the sums"
    assert len(before.inside) == 2 and len(after.inside) == 2


def test_nothing_is_fused_that_is_not_compiled():
    graph = graph_of(chain, (64, 64), (64, 64))
    assert kernels(graph, lambda e: False) == []
    assert seconds(graph, zt.cluster("h100")) == seconds(graph, zt.cluster("h100"), [])


def test_a_value_that_only_one_later_kernel_reads_is_made_there():
    def masked(x, w, mask):
        return (x @ w) * (mask > 0)

    _, (kernel,) = fused(masked, (64, 64), (64, 64), (64, 64))
    assert [str(e.op).split(".")[1] for e in kernel.eqns] == ["gt", "mul"]
    assert kernel.traffic == 3 * 64 * 64 * 2, (
        "it reads the product and the mask, and writes the result"
    )


def test_no_path_leaves_a_kernel_and_returns_to_it():
    def crossing(x, w):
        a = x.sin()
        b = a @ w
        return (a + b).cos() + a

    _, every = fused(crossing, (64, 64), (64, 64))
    assert sorted(len(kernel.eqns) for kernel in every) == [1, 3]


def test_compiled_steps_take_less_time_and_memory():
    def loss(x, w):
        return F.gelu((x.float() * 2).to(BF16) @ w).float().square().mean()

    graph = graph_of(loss, (8192, 4096), (4096, 4096))
    machine = zt.cluster("h100")
    eager, compiled = simulate(graph, machine), simulate(graph, machine, lambda e: True)
    assert compiled.seconds < eager.seconds and compiled.peak < eager.peak
    moved = sum(traffic(e, graph) for e in graph.eqns if launches(graph)[e].kernels)
    assert sum(k.traffic for k in kernels(graph, lambda e: True)) < moved
