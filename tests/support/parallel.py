"""Random train steps with tensor parallelism of their own, around which `shard_params` adds data parallelism.

A step is a chain of layers. It cuts some of them over axis `tp` itself, by collectives that it contains. The state
holds the weights of one tensor-parallel rank, and differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.func import grad_and_value

own = torch.ops._c10d_functional
TP = 2
WIDTH, INNER, ROWS = 4, 6, 8


def all_reduce(x):
    return own.wait_tensor(own.all_reduce(x, "sum", "tp"))


def all_gather(x):
    return own.wait_tensor(own.all_gather_into_tensor(x.contiguous(), TP, "tp"))


def reduce_scatter(x):
    return own.wait_tensor(own.reduce_scatter_tensor(x.contiguous(), "sum", TP, "tp"))


def exchange(x):
    half = [x.shape[0] // TP] * TP
    return own.wait_tensor(own.all_to_all_single(x.contiguous(), half, half, "tp"))


def dual(forward: Callable, backward: Callable) -> Callable:
    """A collective `forward` whose derivative is the collective `backward`."""

    class Dual(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return forward(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return backward(g)

    return Dual.apply


summed, copied = (
    dual(all_reduce, lambda g: copied(g)),
    dual(lambda x: x.clone(), lambda g: summed(g)),
)
gathered, scattered = (
    dual(all_gather, lambda g: scattered(g)),
    dual(reduce_scatter, lambda g: gathered(g)),
)
exchanged = dual(exchange, lambda g: exchanged(g))

LAYERS: dict[str, tuple[list[tuple[int, ...]], Callable]] = {
    "linear": ([(WIDTH, WIDTH), (WIDTH,)], lambda x, w, b: torch.tanh(F.linear(x, w, b))),
    "norm": ([(WIDTH,), (WIDTH,)], lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b)),
    "scale": ([()], lambda x, w: x * w),
    "column_row": (
        [(WIDTH, INNER), (INNER, WIDTH)],
        lambda x, up, down: x + summed(torch.relu(copied(x) @ up) @ down),
    ),
    "sequence": (
        [(WIDTH, INNER), (INNER, WIDTH)],
        lambda x, up, down: x + gathered(scattered(torch.tanh(copied(x) @ up) @ down)),
    ),
    "experts": ([(WIDTH, WIDTH)], lambda x, w: x + exchanged(torch.tanh(exchanged(x) @ w))),
}


@dataclass(frozen=True)
class Parallel:
    """A step, its state on each tensor-parallel rank, and the batch of each rank of dp."""

    step: Callable
    layers: tuple[str, ...]
    fixed: frozenset[str]

    def state(self, tp: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(tp)
        shapes = {
            f"{i}.{j}": s
            for i, name in enumerate(self.layers)
            for j, s in enumerate(LAYERS[name][0])
        }
        flat = {k: 0.5 * torch.randn(s, generator=random) for k, s in shapes.items()}
        return {
            "params": {k: v for k, v in flat.items() if k not in self.fixed},
            "m": {k: torch.zeros_like(v) for k, v in flat.items() if k not in self.fixed},
            "fixed": {k: v for k, v in flat.items() if k in self.fixed},
        }

    def batch(self, rank: int) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


@st.composite
def parallel_steps(draw) -> Parallel:
    """A random chain of layers, with or without frozen parameters, micro-batches, and gradient norms over tp."""
    layers = tuple(draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6)))
    names = [f"{i}.{j}" for i, name in enumerate(layers) for j in range(len(LAYERS[name][0]))]
    fixed = frozenset(names[1::3]) if draw(st.booleans()) else frozenset()
    return parallel(
        layers,
        fixed,
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(["none", "each", "global"])),
    )


def parallel(layers: tuple[str, ...], fixed: frozenset[str], micro: int, norms: str) -> Parallel:
    """The step of a chain of `layers`: `micro` batches, parameters in `fixed` frozen, gradients scaled by `norms`."""

    def loss(params, fixed, x):
        flat = {**params, **fixed}
        for i, name in enumerate(layers):
            shapes, f = LAYERS[name]
            x = f(x, *(flat[f"{i}.{j}"] for j in range(len(shapes))))
        return x.square().mean() + x.mean()

    def step(state, x):
        grads, total = None, 0.0
        for part in x.chunk(micro):
            g, value = grad_and_value(loss)(state["params"], state["fixed"], part)
            grads = g if grads is None else {k: grads[k] + g[k] for k in g}
            total = total + value / micro
        squares = {k: g.square().sum() for k, g in grads.items()}
        if norms == "each":
            squares = {k: all_reduce(s) for k, s in squares.items()}
        elif norms == "global":
            squares = dict.fromkeys(squares, all_reduce(torch.stack(list(squares.values())).sum()))
        scale = {k: torch.rsqrt(1 + s) if norms != "none" else 1.0 for k, s in squares.items()}
        m = {k: 0.9 * state["m"][k] + g * scale[k] for k, g in grads.items()}
        params = {k: p - 0.1 * m[k] for k, p in state["params"].items()}
        return {"params": params, "m": m, "fixed": state["fixed"]}, total

    return Parallel(step, layers, fixed)
