"""The seconds of the compute queue that an operation takes.

A kernel takes as long as its arithmetic or its bytes, whichever is longer. Three things make it slower than the data
sheet. Products of thin matrices are slower for each operation, because their edges do not fill the tiles of a matmul: a
product takes as long as one with all three sizes larger by `Device.edge`. Kernels that compute while they stream reach
less of the memory's bandwidth than copies (`Device.streaming`). And a kernel never takes less time than its host needs
to launch the next one (`Device.launch_overhead`).

Fused attention in half precision has a rate for forward and one for backward, for heads of 128 and long sequences. It
takes as long as if each query attended to a few more keys, and heads of other widths reach a share of the rate. The
model is within 13% of each measurement of FlashAttention-2 on an H100 in figures 5 and 6 of the FlashAttention-3 paper
(512 to 16,384 tokens, heads of 64, 128 and 256).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..ir.graph import DTYPES, Eqn, Graph, Var
from ..ir.layout import local_shape
from ..ir.op_facts import is_matmul
from ..ir.printer import op_name
from ..ir.wire_format import ARRIVED
from .cost import memory_traffic
from .devices import Device
from .flops import Attention, attention_of, flops

aten = torch.ops.aten
# The index of the first of the two matrices among the arguments of a product.
_FIRST_MATRIX = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}
# Attention takes as long as if each query attended to this many more keys: the kernel first fills its pipeline. At the
# diagonal of a causal mask it computes whole tiles, half of each in vain, and its blocks end at different times.
_KEYS_TO_START_FORWARD = 75
_KEYS_TO_START_BACKWARD = 240
_KEYS_AT_THE_DIAGONAL = 90
# The share of the rate that heads of these widths reach. Heads of 256 spill registers.
_HEAD_WIDTHS = (0, 64, 128, 256)
_WIDTH_SHARES = (0.0, 0.9, 1.0, 0.88)
# Memory-efficient attention is half as fast as FlashAttention-2, as its paper says of xformers' kernel.
_EFFICIENT = 0.5


def queue_seconds(device: Device, kernels: int, seconds: float) -> float:
    """The seconds of the compute queue for kernels whose work takes `seconds`.

    A CPU calls a kernel, then runs it. A GPU runs one kernel while its host launches the next ones.

    >>> from .devices import CPU, H100
    >>> queue_seconds(CPU, 1, 1e-3) > 1e-3, queue_seconds(H100, 1, 1e-9) == H100.launch_overhead
    (True, True)
    """
    return max(kernels * device.launch_overhead, kernels * device.kernel_gap + seconds)


def roofline_seconds(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds that the kernels of an equation run: the longer of their arithmetic and their bytes."""
    bytes_moved = memory_traffic(e, graph)
    if e.op is ARRIVED:  # it encodes and decodes
        return device.coding * bytes_moved / device.bandwidth
    return max(arithmetic_seconds(e, graph, device), memory_seconds(bytes_moved, device))


def memory_seconds(bytes_moved: float, device: Device) -> float:
    """The seconds in which a kernel other than a copy reads and writes `bytes_moved` bytes."""
    return bytes_moved / (device.bandwidth * device.streaming)


def arithmetic_seconds(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds of an equation's arithmetic alone."""
    operations = float(flops(e, graph))
    rate = device.rate(rate_name(e))
    attention = attention_of(e, graph)
    if attention is not None and operations:
        if rate_name(e) in ("f16", "bf16"):
            rate = _attention_rate(op_name(e.op), attention, device, rate)
        return operations / rate
    sizes = _product(e, graph)
    if sizes is not None and device.edge:
        operations *= math.prod(1 + device.edge / size for size in sizes)
    return operations / rate


def _attention_rate(name: str, attention: Attention, device: Device, matmul_rate: float) -> float:
    """The FLOP/s of an operation of fused attention in half precision.

    >>> from .devices import CPU, H100
    >>> layer = Attention(32 * 8192, 4096.0, 128, 128, causal=True, backward=False)
    >>> flash, cudnn = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
    >>> 300e12 < _attention_rate(flash, layer, H100, 6e14) < 340e12 < _attention_rate(cudnn, layer, H100, 6e14)
    True
    >>> _attention_rate(flash, layer, CPU, 1e11)
    100000000000.0
    """
    rates = dict(device.flops)
    names = ["attention"]
    if attention.backward:
        names.insert(0, "attention backward")
    if "cudnn" in name:
        names = [*(f"cudnn {each}" for each in names), *names]
    rate = next((rates[each] for each in names if each in rates), None)
    if rate is None:
        return matmul_rate
    if "efficient" in name:
        rate *= _EFFICIENT
    return rate * attention_share(attention)


def attention_share(attention: Attention) -> float:
    """The share of the rate of fused attention that a call reaches, by its length and the width of its heads.

    >>> attention_share(Attention(1024, 1e6, 128, 128, causal=False, backward=False)) > 0.99
    True
    """
    more_keys = _KEYS_TO_START_BACKWARD if attention.backward else _KEYS_TO_START_FORWARD
    if attention.causal:
        more_keys += _KEYS_AT_THE_DIAGONAL
    share_of_width = float(np.interp(attention.width, _HEAD_WIDTHS, _WIDTH_SHARES))
    return share_of_width * attention.keys / (attention.keys + more_keys)


def _product(e: Eqn, graph: Graph) -> tuple[int, int, int] | None:
    """The rows, columns and inner size of a product of matrices on the first rank; None for any other equation."""
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


def rate_name(e: Eqn) -> str:
    """The name of an operation's rate: the dtype of its result, or "tf32" if PyTorch runs this product in TF32."""
    if _packet(e) is aten._scaled_mm:
        return "f8e4m3"
    dtype = next((DTYPES.get(o.dtype, "f32") for o in e.results), "f32")
    if dtype != "f32" or not is_matmul(e):
        return dtype

    # PyTorch's settings when the step is planned decide.
    if "convolution" in op_name(e.op):
        # The class that replaces this module at import has the attribute, and mypy reads the module.
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    else:
        precision = torch.backends.cuda.matmul.fp32_precision
    return "tf32" if precision == "tf32" else "f32"
