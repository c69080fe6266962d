"""Attention on a CPU as products of matrices, where that takes less time than PyTorch's flash kernels.

Forward goes block by block over the queries, and backward over the keys. Each block computes only the scores that it
needs, so no matrix of all queries by all keys is ever held. Inductor fuses the operations between the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..codegen import fused
from .cpu_matmul import GAIN, time_share
from .fake_layouts import Strided

aten = torch.ops.aten
BLOCKS = 4  # at most, because each of them is compiled
_SMALLEST = 64  # rows of a block, at least
_BYTES = 2**25  # of a block's scores, at most; larger ones stay with flash


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [batch, heads, length, width]. Returns it, and the fp32 logarithms of the sums of exponentials."""
    shape, (q, k, v) = q.shape, (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    wide, keys = q.float(), k.float().transpose(1, 2)  # a product in half precision would round the scores
    outs, logs = [], []
    for a, b in _blocks(q.shape[1]):
        end = b if causal else k.shape[1]
        s = torch.bmm(wide[:, a:b], keys[:, :, :end]) * scale
        if causal:
            s = torch.where(_causal_mask(b - a, end, a, q.device), s, -math.inf)
        most = s.amax(-1, keepdim=True)
        p = (s - most).exp()
        total = p.sum(-1, keepdim=True)
        outs.append((torch.bmm(p.to(v.dtype), v[:, :end]) / total).to(v.dtype))
        logs.append(most + total.log())
    return torch.cat(outs, 1).view(shape), torch.cat(logs, 1).view(shape[:3])


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v, given that of the result."""
    shapes = [x.shape for x in (q, k, v)]
    grad, q, k, v, out = (x.reshape(-1, *x.shape[2:]) for x in (grad, q, k, v, out))
    wide, keys, log = q.float(), k.float().transpose(1, 2), log.reshape(*q.shape[:2], 1)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    dqs, dks, dvs = [], [], []
    rest = None  # the part of dq to which later blocks of keys still add
    for a, b in _blocks(k.shape[1]):
        start = a if causal else 0
        p = (torch.bmm(wide[:, start:], keys[:, :, a:b]) * scale - log[:, start:]).exp()
        if causal:
            p = torch.where(_causal_mask(p.shape[1], b - a, 0, q.device), p, 0.0)
        dp = torch.bmm(grad[:, start:], v[:, a:b].transpose(1, 2))
        ds = (p * (dp - delta[:, start:]) * scale).to(q.dtype)
        dvs.append(torch.bmm(p.to(q.dtype).transpose(1, 2), grad[:, start:]))
        dks.append(torch.bmm(ds.transpose(1, 2), q[:, start:]))
        term = torch.bmm(ds, k[:, a:b]).float()
        rest = term if rest is None else rest + term
        if causal:
            dqs.append(rest[:, : b - a])
            rest = rest[:, b - a :]
    dq = torch.cat(dqs, 1) if rest is None or causal else rest
    grads = dq.to(q.dtype), torch.cat(dks, 1), torch.cat(dvs, 1)
    return tuple(x.view(shape) for x, shape in zip(grads, shapes))


def _blocks(length: int) -> list[tuple[int, int]]:
    """The first row of each block, and the row after its last."""
    size = max(_SMALLEST, -(-length // BLOCKS))
    return [(a, min(a + size, length)) for a in range(0, length, size)]


def _causal_mask(queries: int, keys: int, first: int, device: torch.device) -> torch.Tensor:
    """bool[queries, keys]: which keys each query attends to, where row 0 is query number `first`."""
    rows, columns = (torch.arange(n, dtype=torch.int32, device=device) for n in (queries, keys))
    return rows[:, None] + first >= columns


_BY_PRODUCTS: dict[Any, Callable[..., Sequence[torch.Tensor]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
}


def alternative(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable | None:
    """A function that computes attention `op` by products on tensors of these layouts, if it is faster; else None."""
    if op not in _BY_PRODUCTS:
        return None
    named = {a.name: a.default_value for a in op._schema.arguments} | dict(kwargs)
    named |= dict(zip(named, args))
    q, k, v, causal, scale = (named[name] for name in ("query", "key", "value", "is_causal", "scale"))
    layouts = tuple(x for x in args if isinstance(x, Strided))
    tensors = sum(str(a.type) == "Tensor" for a in op._schema.arguments)
    plain = not named["dropout_p"] and named["attn_mask"] is None and len(layouts) == tensors
    if not plain or any(0 in x.shape for x in layouts) or not _applies(q, k, v, causal):
        return None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _faster(op, layouts, causal, scale, torch.get_num_threads())


def _applies(q: Strided, k: Strided, v: Strided, causal: bool) -> bool:
    known = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and (q.shape[2] == k.shape[2] or not causal)
    longest = max(b - a for x in (q, k) for a, b in _blocks(x.shape[2]))
    return known and alike and 4 * math.prod(q.shape[:2]) * longest * max(q.shape[2], k.shape[2]) <= _BYTES


@functools.cache
def _faster(op: Callable, layouts: tuple[Strided, ...], causal: bool, scale: float, threads: int) -> Callable | None:
    """`op` by products, compiled and timed. None if it takes as long, or returns results of another layout.

    Cached by the number of `threads` too.
    """
    results = [Strided.of(x) for x in _flash(op, [x.empty().fill_(0.5) for x in layouts], causal, scale)]

    def compute(*args: torch.Tensor) -> list[torch.Tensor]:
        return [_in_memory_order(x, y.stride) for x, y in zip(_BY_PRODUCTS[op](*args, causal, scale), results)]

    kernel = fused(compute, lambda: [x.empty() for x in layouts])

    def by_products(*args: Any, **_: Any) -> Sequence[torch.Tensor]:
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        return kernel([layout.conform(x) for x, layout in zip(tensors, layouts)])

    by_products.__name__ = f"{_BY_PRODUCTS[op].__name__}_by_products"
    with torch.no_grad():
        args = [x.empty().fill_(0.5) for x in layouts]
        if [Strided.of(x) for x in by_products(*args)] != results:
            return None
        share = time_share(lambda: by_products(*args), lambda: _flash(op, args, causal, scale))
    return by_products if share < GAIN else None


def _flash(op: Callable, args: Sequence[torch.Tensor], causal: bool, scale: float) -> Sequence[torch.Tensor]:
    return op(*args, 0.0, causal, scale=scale)


def _in_memory_order(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values, dense, with their dims in the order in memory that `stride` has."""
    order = sorted(range(x.ndim), key=lambda d: (-stride[d], -x.shape[d]))
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
