"""A small GPT: pre-norm blocks, causal attention, tied embedding and head."""

from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 128
    heads: int = 4
    vocab: int = 256
    sequence: int = 64


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1 = nn.LayerNorm(c.width)
        self.norm2 = nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(
            nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(
            self.qkv(self.norm1(x)), "b s (three h d) -> three b h s d", three=3, h=self.heads
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(rearrange(attended, "b h s d -> b s (h d)"))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.width)
        self.position = nn.Embedding(c.sequence, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "blocks" in name else 0.06)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)  # embedding and head are tied
