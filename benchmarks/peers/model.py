"""The model, the batch and the optimizer of all subjects: a GPT, random tokens, AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 384
    heads: int = 4
    vocab: int = 2048
    sequence: int = 256
    batch: int = 4  # sequences for each rank in a step


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Task:
    """The training task of one rank. If `rank` is None, it has the batches of all ranks."""

    config: Config
    ranks: int
    rank: int | None = None
    bf16: bool = False

    def model(self) -> GPT:
        """The model, with the same weights on every rank."""
        torch.manual_seed(0)
        return GPT(self.config)

    def batch(self) -> tuple[Tensor, Tensor]:
        """This rank's tokens, and for each the token that follows it."""
        shape = self.ranks, self.config.batch, self.config.sequence + 1
        tokens = torch.randint(self.config.vocab, shape, generator=torch.Generator().manual_seed(1))
        tokens = tokens.flatten(0, 1) if self.rank is None else tokens[self.rank]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# Adam's update does not depend on the scale of the gradient, except through eps. This eps is large enough that a wrong
# scale changes the loss.
LR, EPS = 1e-3, 1e-6


def adamw(params: Iterable[nn.Parameter], fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, eps=EPS, fused=fused)
