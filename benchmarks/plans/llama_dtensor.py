"""The train step of `llama_model.py` as PyTorch's users write it: a module, tensor parallel by `parallelize_module`.

    model = parallel(Llama(config), mesh)                # mesh has an axis tp
    step, state = make_step(model), init(model)
    state, loss = step(state, tokens)

Weights, casts, loss, clipping and AdamW are those of `llama_model.py`; the collectives come from DTensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.func import functional_call

from .llama_model import Config, adamw, attention, norm, rotate


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight)


class Attention(nn.Module):
    def __init__(self, config: Config, attend: Callable) -> None:
        super().__init__()
        self.head, self.attend = config.head, attend
        inner, outer = config.width, config.kv_heads * config.head
        self.wq, self.wo = nn.Linear(inner, inner, bias=False), nn.Linear(inner, inner, bias=False)
        self.wk, self.wv = nn.Linear(inner, outer, bias=False), nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config, attend: Callable) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config.width), Norm(config.width)
        self.attention, self.feed = Attention(config, attend), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, config: Config, attend: Callable = attention) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm, self.out = Norm(config.width), nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        config = self.config
        rates = config.theta ** (
            -torch.arange(0, config.head, 2, device=tokens.device) / config.head
        )
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates).repeat(
            1, 2
        )
        x, cos, sin = self.embed(tokens), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.out(self.norm(x)).float()


def parallel(model: Llama, mesh: DeviceMesh, source: int | None = None) -> Llama:
    """The model with its matrices over `mesh`, an axis of tensor parallelism. Its norms stay whole.

    `source` is the rank whose weights are used; None where all ranks have the same.
    """
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed.gate", "feed.up")
    block = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    block |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.wo", "feed.down")}
    # The gradients of their inputs are summed before they are reduced.
    for name, layouts in {"attention": (Replicate(), None, None), "feed": (Replicate(),)}.items():
        block[f"layers.*.{name}"] = PrepareModuleInput(
            input_layouts=layouts, desired_input_layouts=layouts
        )
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), **block, "out": logits}
    return parallelize_module(model, mesh, plan, src_data_rank=source)


def init(model: nn.Module) -> dict:
    """The state before the first step."""
    zeros = lambda: {
        k: torch.zeros_like(p, requires_grad=False) for k, p in model.named_parameters()
    }
    params = {k: p.detach() for k, p in model.named_parameters()}
    return {"params": params, "m": zeros(), "v": zeros(), "step": torch.zeros(())}


def clip(grads: dict, limit: float = 1.0) -> dict:
    """By the global norm; matrices are DTensors, norms are not."""
    total = lambda gs: (
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gs])) ** 2
    )
    split = [g for g in grads.values() if isinstance(g, DTensor)]
    square = total([g for g in grads.values() if not isinstance(g, DTensor)])
    if split:
        square = square + total(split).full_tensor()
    scale = (limit / square.sqrt()).clamp(max=1.0)
    return {k: g * scale for k, g in grads.items()}


def make_step(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable:
    """The step `(state, tokens) -> (state, loss)`; matrices are cast to `dtype` for forward and backward."""

    def train_step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        weights = {k: p.to(dtype) if p.ndim > 1 else p for k, p in params.items()}
        with loss_parallel():
            logits = functional_call(model, weights, (tokens[:, :-1],))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        return adamw(state, clip(grads)), loss.detach()

    return train_step
