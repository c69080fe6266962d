"""The train steps of `frontier.py`, on the meta device: a GPT and Llama-3-8B, with three kinds of checkpoints.

`around` says what is around each block: nothing, a checkpoint of the block, or a selective one that saves the results
of matrix products and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from examples.model import GPT, Config
from ztrans.ir.op_facts import op_facts

from .analysis_models import adamw, clipped, on_meta
from .llama_model import Config as Llama
from .llama_model import attention, norm, rotate, shapes

LLAMA = Llama()
Around = Callable[..., Tensor]
Made = tuple[Callable, Any, tuple]  # a step, its state, and a batch


def plain(block: Callable[..., Tensor], *args: Any) -> Tensor:
    """Nothing around a block."""
    return block(*args)


def per_block(block: Callable[..., Tensor], *args: Any) -> Tensor:
    """A checkpoint around a block."""
    return checkpoint(block, *args, use_reentrant=False)


def selective(block: Callable[..., Tensor], *args: Any) -> Tensor:
    """A checkpoint around a block that saves the results of matrix products and attention."""
    context = partial(create_selective_checkpoint_contexts, _saves_products)
    return checkpoint(block, *args, use_reentrant=False, context_fn=context)


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op_facts(op).matmul or "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Wrapped(nn.Module):
    """A block with something around it."""

    def __init__(self, block: nn.Module, around: Around) -> None:
        super().__init__()
        self.block = block
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.block, x)


def gpt(
    around: Around = plain, *, layers=10, width=1280, heads=10, vocab=256, sequence=1536, batch=4
) -> Made:
    """A GPT in bf16 autocast, with SGD and momentum."""
    model, params = on_meta(lambda: GPT(Config(layers, width, heads, vocab, sequence)))
    model.blocks = nn.ModuleList(Wrapped(block, around) for block in model.blocks)
    params = {k: p.detach() for k, p in model.named_parameters()}

    def step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        with torch.autocast("cpu", torch.bfloat16):
            logits = functional_call(model, params, tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        momentum = {k: 0.9 * m + grads[k] for k, m in state["momentum"].items()}
        new = {k: p - 0.1 * momentum[k] for k, p in state["params"].items()}
        return {"params": new, "momentum": momentum}, loss.detach()

    state = {"params": params, "momentum": {k: torch.empty_like(p) for k, p in params.items()}}
    return step, state, (torch.empty(batch, sequence + 1, dtype=torch.int64, device="meta"),)


def llama(around: Around = plain, *, layers=32, sequence=8192, batch=2, config=LLAMA) -> Made:
    """Llama-3-8B with bf16 products and clipped AdamW in fp32."""
    sizes = {k: s for k, s in shapes(config, 1).items() if _has_layer(k, layers)}
    empty = lambda: {k: torch.empty(s, device="meta") for k, s in sizes.items()}
    scalars = {"step": torch.zeros((), device="meta"), "lr": torch.full((), 3e-4, device="meta")}
    heads = lambda t: t.unflatten(-1, (-1, config.head)).transpose(1, 2)

    def block(w: dict, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = norm(x, w[f"{name}.norm1"])
        q, k, v = (heads(F.linear(y, w[f"{name}.{m}"])) for m in ("wq", "wk", "wv"))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, w[f"{name}.wo"])
        y = norm(x, w[f"{name}.norm2"])
        y = F.silu(F.linear(y, w[f"{name}.gate"])) * F.linear(y, w[f"{name}.up"])
        return x + F.linear(y, w[f"{name}.down"])

    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        w = {k: p.to(torch.bfloat16) if p.ndim > 1 else p for k, p in params.items()}
        rates = config.theta ** (
            -torch.arange(0, config.head, 2, device=tokens.device) / config.head
        )
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        angles = torch.outer(places, rates).repeat(1, 2)
        x = F.embedding(tokens[:, :-1], w["embed"])
        for i in range(layers):
            x = around(block, w, f"layer{i}", x, angles.cos(), angles.sin())
        logits = F.linear(norm(x, w["norm"]), w["head"]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = loss_fn(params, tokens)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        return adamw(state, clipped(grads)), loss.detach()

    state = {"params": empty(), "m": empty(), "v": empty(), **scalars}
    return step, state, (torch.empty(batch, sequence + 1, dtype=torch.int64, device="meta"),)


def _has_layer(name: str, layers: int) -> bool:
    return not name.startswith("layer") or int(name.partition(".")[0][5:]) < layers
