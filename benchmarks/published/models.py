"""The models of published runs as their authors write them: MPT of llm-foundry and Llama 3 of torchtitan.

    model = make_model(sizes, sequence=2048, checkpoint="block")
    step, state = make_step(model, decoupled_adamw), init(model)

Parameters are fp32 and are cast to bf16 where they are used, as under FSDP's mixed precision. Everything is on the meta
device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

aten = torch.ops.aten
Linear = partial(nn.Linear, bias=False)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. Without `hidden` it is an MPT, with it a Llama 3."""

    layers: int
    width: int
    heads: int
    vocab: int
    hidden: int = 0
    kv_heads: int = 0

    @property
    def head(self) -> int:
        return self.width // self.heads


MPT_1B = Sizes(24, 2048, 16, 50368)
MPT_7B = Sizes(32, 4096, 32, 50368)
MPT_13B = Sizes(40, 5120, 40, 50368)
MPT_30B = Sizes(48, 7168, 56, 50368)
LLAMA_8B = Sizes(32, 4096, 32, 128256, hidden=14336, kv_heads=8)


def attend(q: Tensor, k: Tensor, v: Tensor, by_cudnn: bool) -> Tensor:
    """What `F.scaled_dot_product_attention` is on a GPU, by FlashAttention-2 or by cuDNN."""
    if by_cudnn:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class MPTBlock(nn.Module):
    def __init__(self, s: Sizes, by_cudnn: bool) -> None:
        super().__init__()
        self.by_cudnn = by_cudnn
        self.head = s.head
        self.norm1, self.norm2 = (nn.LayerNorm(s.width) for _ in range(2))
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
        self.up, self.down = nn.Linear(s.width, 4 * s.width), nn.Linear(4 * s.width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        heads = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in parts)
        attended = attend(*heads, self.by_cudnn)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions, by complex products in fp32, for x of shape (batch, sequence, heads, head)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self, s: Sizes, by_cudnn: bool) -> None:
        super().__init__()
        self.by_cudnn = by_cudnn
        self.head, self.repeats = s.head, s.heads // s.kv_heads
        self.norm1, self.norm2 = RMSNorm(s.width), RMSNorm(s.width)
        self.wq, self.wo = Linear(s.width, s.width), Linear(s.width, s.width)
        self.wk, self.wv = (Linear(s.width, s.kv_heads * s.head) for _ in range(2))
        self.gate, self.up = Linear(s.width, s.hidden), Linear(s.width, s.hidden)
        self.down = Linear(s.hidden, s.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rotation), rotate(k, rotation)
        k, v = (self.repeat(t) for t in (k, v))
        attended = attend(*(t.transpose(1, 2) for t in (q, k, v)), self.by_cudnn)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def repeat(self, t: Tensor) -> Tensor:
        return t[:, :, :, None].expand(-1, -1, -1, self.repeats, -1).flatten(2, 3)


class FusedCrossEntropy(torch.autograd.Function):
    """The loss of flash-attn: one kernel reads half-precision logits, and one writes their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        total = logits.float().logsumexp(-1)
        ctx.save_for_backward(logits, targets, total)
        return (total - logits.gather(-1, targets[:, None])[:, 0].float()).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        logits, targets, total = ctx.saved_tensors
        classes = torch.arange(logits.shape[-1], device=logits.device)
        difference = (logits.float() - total[:, None]).exp() - (classes == targets[:, None]).float()
        return (difference * (grad / len(targets))).to(logits.dtype), None


class MPT(nn.Module):
    def __init__(
        self, s: Sizes, sequence: int, checkpoint: str | None, chunks: int, by_cudnn: bool
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.token, self.position = nn.Embedding(s.vocab, s.width), nn.Embedding(sequence, s.width)
        self.layers = nn.ModuleList(MPTBlock(s, by_cudnn) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = run(layer, self.checkpoint, x)
        logits = F.linear(self.norm(x), self.token.weight)
        return FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten())


class Llama(nn.Module):
    def __init__(
        self, s: Sizes, sequence: int, checkpoint: str | None, chunks: int, by_cudnn: bool
    ) -> None:
        super().__init__()
        self.checkpoint, self.head, self.chunks = checkpoint, s.head, chunks
        self.token = nn.Embedding(s.vocab, s.width)
        self.layers = nn.ModuleList(LlamaBlock(s, by_cudnn) for _ in range(s.layers))
        self.norm, self.output = RMSNorm(s.width), Linear(s.width, s.vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        rates = 500000.0 ** (-torch.arange(0, self.head, 2, device=tokens.device) / self.head)
        angles = torch.outer(places, rates)
        rotation = torch.polar(torch.ones_like(angles), angles)
        x = self.token(tokens)
        for layer in self.layers:
            x = run(layer, self.checkpoint, x, rotation)
        logits = self.output(self.norm(x)).flatten(0, 1)
        parts = zip(logits.chunk(self.chunks), targets.flatten().chunk(self.chunks))
        return sum(F.cross_entropy(a.float(), b, reduction="sum") for a, b in parts) / len(logits)


SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def selective() -> tuple:
    """torchtitan's contexts of a selective checkpoint by operation: every second product is computed again."""
    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += op is aten.mm.default
        again = op is aten.mm.default and counts[ctx.is_recompute] % 2 == 0
        saved = op in SAVED and not again
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def run(layer: nn.Module, how: str | None, *args: Tensor) -> Tensor:
    """A layer, without a checkpoint, within one ("block"), or within a selective one ("selective")."""
    if how is None:
        return layer(*args)
    more = {"context_fn": selective} if how == "selective" else {}
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **more)


def make_model(
    s: Sizes, sequence: int, checkpoint: str | None, chunks: int = 1, by_cudnn: bool = False
) -> nn.Module:
    """A model, whose loss may be computed from its logits in chunks, and its attention by cuDNN."""
    with torch.device("meta"):
        return (Llama if s.hidden else MPT)(s, sequence, checkpoint, chunks, by_cudnn)


# ---- the update, operation by operation as eager PyTorch runs it

Params = Mapping[str, Tensor]
B1, B2, LR, EPS, DECAY = 0.9, 0.95, 3e-4, 1e-8, 0.1


def foreach_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch.optim.AdamW(foreach=True), the default of torchtitan's configurations."""
    p = p * (1 - LR * DECAY)
    m = torch.lerp(m, g, 1 - B1)
    v = torch.addcmul(v * B2, g, g, value=1 - B2)
    return torch.addcdiv(p, m, v.sqrt() / 0.3 + EPS, value=-LR), m, v


def fused_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch.optim.AdamW(fused=True): the same in one kernel (see `Row.compiled`)."""
    return foreach_adamw(p, g, m, v)


def decoupled_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Composer's DecoupledAdamW with the weight decay of 0 that llm-foundry gives it."""
    m = torch.add(m * B1, g, alpha=1 - B1)
    v = torch.addcmul(v * B2, g, g, value=1 - B2)
    return torch.addcdiv(p, m, v.sqrt() / 0.3 + EPS, value=-LR), m, v


def make_step(model: nn.Module, update: Callable) -> Callable:
    """The step `(state, tokens) -> (state, loss)` with gradients clipped by their norm."""

    def loss_of(params: Params, tokens: Tensor) -> Tensor:
        half = {k: p.to(torch.bfloat16) for k, p in params.items()}
        return functional_call(model, half, (tokens[:, :-1], tokens[:, 1:]))

    def step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = loss_of(params, tokens)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        norms = [torch.linalg.vector_norm(g) for g in grads.values()]
        scale = (1.0 / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        new: dict[str, dict[str, Tensor]] = {"params": {}, "m": {}, "v": {}}
        for k, g in grads.items():
            values = update(state["params"][k], g * scale, state["m"][k], state["v"][k])
            new["params"][k], new["m"][k], new["v"][k] = values
        return new, loss.detach()

    return step


def init(model: nn.Module) -> dict:
    params = {k: p.detach() for k, p in model.named_parameters()}
    return {
        key: {k: torch.empty_like(p) for k, p in params.items()} for key in ("params", "m", "v")
    }
