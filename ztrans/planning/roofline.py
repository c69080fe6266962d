"""How many seconds of the compute queue an operation takes.

A kernel takes as long as its arithmetic, or as its bytes, whichever is longer. Three things make it slower than the
data sheet. Products of thin matrices are slower for each operation, because their edges do not fill the tiles of a
matmul: a product takes as long as one whose three sizes are greater by `Device.edge`. Kernels that compute while they
stream reach less of the memory's bandwidth than copies (`Device.streaming`). And a kernel never takes less than its
host needs to launch the next one (`Device.launch_overhead`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ir.graph import DTYPES, Eqn, Graph, Var
from ..ir.layout import local_shape
from ..ir.op_facts import arguments_by_name, is_matmul
from ..ir.printer import op_name
from .cost import flops, memory_traffic
from .devices import Device

aten = torch.ops.aten
# The number of the first of the two matrices among the arguments of a product.
_FIRST_MATRIX = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}


def queue_seconds(device: Device, kernels: int, seconds: float) -> float:
    """The seconds that kernels take of the compute queue if their work takes `seconds`.

    A CPU first calls a kernel and then runs it. A GPU runs one while its host launches the next ones.

    >>> from .devices import CPU, H100
    >>> queue_seconds(CPU, 1, 1e-3) > 1e-3, queue_seconds(H100, 1, 1e-9) == H100.launch_overhead
    (True, True)
    """
    return max(kernels * device.launch_overhead, kernels * device.kernel_gap + seconds)


def roofline_seconds(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds that the kernels of an equation run: as long as their arithmetic takes, or their bytes."""
    moved = memory_traffic(e, graph)
    return max(arithmetic_seconds(e, graph, device), memory_seconds(moved, device))


def memory_seconds(moved: float, device: Device) -> float:
    """The seconds in which a kernel that is no copy reads and writes so many bytes."""
    return moved / (device.bandwidth * device.streaming)


def arithmetic_seconds(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds of an equation if its bytes took none."""
    operations = float(flops(e, graph))
    sizes = _product(e, graph)
    if sizes is not None and device.edge:
        operations *= math.prod(1 + device.edge / size for size in sizes)
    rate = device.rate(rate_name(e))
    if is_matmul(e) and "attention" in op_name(e.op):
        # FLOP counters count all scores, and causal kernels compute half of them.
        share = 0.5 if _is_causal(e) else 1.0
        return share * operations / dict(device.flops).get("attention", rate)
    return operations / rate


def _product(e: Eqn, graph: Graph) -> tuple[int, int, int] | None:
    """The rows, columns and inner size of a product of matrices, on the first rank."""
    first = _FIRST_MATRIX.get(_packet(e))
    if first is None:
        return None
    left, right = e.args[first : first + 2]
    if not isinstance(left, Var) or not isinstance(right, Var):
        return None
    first_rank = dict.fromkeys(graph.axes, 0)
    *_, rows, inner = local_shape(left, graph.axes, first_rank)
    columns = local_shape(right, graph.axes, first_rank)[-1]
    return (rows, columns, inner) if rows and columns and inner else None


def _packet(e: Eqn) -> Any:
    """The operation of an equation, without its overload."""
    return getattr(e.op, "overloadpacket", e.op)


def _is_causal(e: Eqn) -> bool:
    """Whether attention computes the lower half of its scores only."""
    if not hasattr(e.op, "_schema"):
        return False  # a higher-order operator, whose functions mask the scores
    return bool(arguments_by_name(e.op, e.args, e.kwargs).get("is_causal"))


def rate_name(e: Eqn) -> str:
    """The name of an operation's rate: the dtype of its result, or "tf32" if PyTorch runs this product in TF32."""
    if _packet(e) is aten._scaled_mm:
        return "f8e4m3"
    dtype = next((DTYPES.get(o.dtype, "f32") for o in e.results), "f32")
    if dtype != "f32" or not is_matmul(e):
        return dtype

    # The user's settings when the step is planned decide.
    if "convolution" in op_name(e.op):
        # The class that replaces this module at import has the attribute, and mypy reads the module.
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    else:
        precision = torch.backends.cuda.matmul.fp32_precision
    return "tf32" if precision == "tf32" else "f32"
