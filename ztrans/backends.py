"""Make the code of a program for the devices of its inputs: rewrites that they need, and what runs it.

The backend "eager" runs a program operation by operation, "inductor" in compiled kernels. A runner may capture this
code as a CUDA graph, or carry gathers from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .calling.inputs import device_of
from .ir.graph import Graph
from .rewrites.number_operands import with_number_operands
from .running_order import fused_within_peak, with_grouped_updates
from .runtime.carried import CarryingExecutable
from .runtime.cuda.graph_capture import Capture, check_values, placed, with_rates
from .runtime.cuda.half_gradients import half_gradients, inputs_on_gpu
from .runtime.cuda.half_weights import HalfWeights, half_copies, with_half_weights
from .runtime.cuda.stored_updates import stored_updates
from .runtime.executable import Executable, executable, step_executable
from .runtime.failure import Writes
from .runtime.inductor import backend as inductor
from .runtime.inductor.compiler import check_compiler
from .runtime.runner import Runner
from .runtime.watch import Watcher


class Backend(NamedTuple):
    """A way to make the code of a program.

    Attributes:
        executable: makes the code from a program, the mesh, example inputs, and a function to call before the code
            first writes the state. Returns the program in the order in which it runs, and its executable.
        fuses: whether the backend makes its own kernels of elementwise operations. Then `half_gradients` drops only the
            casts of matrix products, and `half_weights` lets these kernels also write the copies in half precision.
        check: raises an error where the backend cannot work.
    """

    executable: Callable[
        [Graph, DeviceMesh | None, Sequence[torch.Tensor], Callable[[], None] | None],
        tuple[Graph, Executable],
    ]
    fuses: bool
    check: Callable[[], None]


def make_runner(
    graph: Graph,
    mesh: DeviceMesh | None,
    local: Sequence[torch.Tensor],
    backend: Backend,
    cuda_graph: bool,
    cast_ahead: bool,
    writes: Writes,
    watcher: Watcher | None,
) -> tuple[Runner, Sequence[HalfWeights]]:
    """What runs a program on the device of these inputs, and the copies of parameters that it takes and returns too."""
    half_weights = [half_copies(graph, local)] if graph.hidden else []
    for copies in half_weights:
        local = copies.inserted(local)
    # A scalar in fp64 may be a learning rate, and fused optimizers on a GPU read it only in fp32.
    has_rates = any(x.is_cuda and x.dtype == torch.float64 and not x.ndim for x in local)
    if has_rates or cuda_graph:
        graph = with_rates(graph)
    on_gpu = inputs_on_gpu(graph, local)
    graph = stored_updates(graph, on_gpu)
    graph = half_gradients(graph, on_gpu, of_products=backend.fuses)
    if cast_ahead:
        graph, on_device = with_half_weights(graph, local, backend.fuses)
        if on_device is not None:
            local = on_device.inserted(local)
            half_weights.append(on_device)
    if cuda_graph:
        check_values(graph)
        local = placed(graph, local)

    def compile_program(
        program: Graph, example: Sequence[torch.Tensor]
    ) -> tuple[Graph, Executable]:
        on_write = writes.begin if changed_leaves(program) else None
        return backend.executable(program, mesh, example, on_write)

    code = step_executable(graph, mesh, local, compile_program)
    runner: Runner = code
    if cuda_graph:
        has_failed = lambda: watcher is not None and watcher.failure != ""
        runner = Capture(code, code.graph, on_write=writes.begin, has_failed=has_failed)
    elif mesh is not None and code.graph.carried:
        runner = CarryingExecutable(code, code.graph, mesh)
    return runner, half_weights


def changed_leaves(graph: Graph) -> list[int]:
    """The positions of the leaves of the state that a program changes."""
    return [i for i, (old, new) in enumerate(graph.leaves) if new is not old]


def _eager(
    graph: Graph,
    mesh: DeviceMesh | None,
    local: Sequence[torch.Tensor],
    on_write: Callable[[], None] | None,
) -> tuple[Graph, Executable]:
    """A program with equal updates next to each other, and its executable, which runs operation by operation."""
    on_host = [v for v, x in zip(graph.inputs, local) if not x.ndim and x.is_cpu]
    graph, groups = with_grouped_updates(with_number_operands(graph, on_host))
    return graph, executable(graph, mesh, on_write, groups, device_of(local))


def _inductor(
    graph: Graph,
    mesh: DeviceMesh | None,
    local: Sequence[torch.Tensor],
    on_write: Callable[[], None] | None,
) -> tuple[Graph, Executable]:
    """A program with the equations of each kernel next to each other, and its executable, which runs the kernels."""
    graph, groups = fused_within_peak(graph)
    return graph, inductor.executable(graph, groups, mesh, local, on_write)


BACKENDS: Mapping[str, Backend] = {
    "eager": Backend(_eager, fuses=False, check=lambda: None),
    "inductor": Backend(_inductor, fuses=True, check=check_compiler),
}
