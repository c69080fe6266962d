"""Which equations a compiler makes one kernel of, for the published runs that were compiled."""

import torch
import torch.nn.functional as F

import ztrans as zt
from benchmarks.published.fusion import fused_kernels, fused_seconds
from ztrans.ir.graph import Graph
from ztrans.planning.cost import launches, memory_traffic
from ztrans.planning.durations import equation_seconds

BF16 = torch.bfloat16


def graph_of(f, *shapes) -> Graph:
    """The program of a step that returns f of tensors of these shapes."""
    inputs = (torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
    return zt.Step.of(lambda state, *args: (state, f(*args))).lower(torch.zeros(1), *inputs).graph


def chain(x, w):
    """Three elementwise operations, a product, and two more."""
    y = (x + 1).sin() * 2
    z = y @ w
    return (z.exp() + y).sum(-1)


def fused(f, *shapes):
    graph = graph_of(f, *shapes)
    return graph, fused_kernels(graph, lambda e: True)


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
    assert fused_kernels(graph, lambda e: False) == []
    machine = zt.cluster("h100")
    assert fused_seconds(graph, machine, lambda e: False) == list(equation_seconds(graph, machine))


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


def test_compiled_steps_take_less_time_and_move_less():
    def loss(x, w):
        return F.gelu((x.float() * 2).to(BF16) @ w).float().square().mean()

    graph = graph_of(loss, (8192, 4096), (4096, 4096))
    machine = zt.cluster("h100")
    assert sum(fused_seconds(graph, machine, lambda e: True)) < sum(
        equation_seconds(graph, machine)
    )
    moved = sum(memory_traffic(e, graph) for e in graph.eqns if launches(graph)[e].kernels)
    assert sum(k.traffic for k in fused_kernels(graph, lambda e: True)) < moved
