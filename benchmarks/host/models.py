"""Models whose steps show what the host costs: from a few small operations to GPT-2 with a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A GPT, as GPT-2 is built; its output layer shares the embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocab, width),
            nn.Parameter(torch.zeros(length, width)),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


class Recurrent(nn.Module):
    """A language model with a recurrent layer, `nn.LSTM` or `nn.GRU`."""

    def __init__(self, kind: type[nn.RNNBase], width: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.layer = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(ids))[0]).flatten(0, 1)


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.skip = (
            nn.Conv2d(inside, out, 1, stride, bias=False)
            if (inside, stride) != (out, 1)
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.skip(x))


def resnet() -> nn.Module:
    """A ResNet of 18 layers for images of 8 x 8."""
    sizes = [
        (16, 16, 1),
        (16, 16, 1),
        (16, 32, 2),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 64, 1),
        (64, 64, 1),
    ]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*stem, *(Residual(*size) for size in sizes), *pool)


@dataclass(frozen=True)
class Model:
    """A model, and a batch for one rank: inputs and the classes to predict."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    layers: tuple[type, ...]  # the modules that FSDP2 shards one by one


def ids(vocab: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(vocab, (1, length)), torch.randint(vocab, (length,)))


MODELS = (
    Model(
        "MLP, 4 layers of 64",
        lambda: nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10)
        ),
        lambda: (torch.randn(16, 64), torch.randint(10, (16,))),
        (nn.Linear,),
    ),
    Model("GPT, 10 layers of 48", lambda: GPT(10, 48, 4, 64, 16), ids(64, 16), (Block,)),
    Model(
        "ResNet, 18 layers",
        resnet,
        lambda: (torch.randn(2, 3, 8, 8), torch.randint(10, (2,))),
        (Residual,),
    ),
    Model("GPT-2, 124 M, batch 1", lambda: GPT(12, 768, 12, 50257, 32), ids(50257, 32), (Block,)),
)
# Of one rank only: FSDP2 does not shard a recurrent layer, which keeps its weights in a list too.
RECURRENT = (
    Model("LSTM of 128", lambda: Recurrent(nn.LSTM, 128, 64), ids(64, 64), (nn.LSTM,)),
    Model("GRU of 128", lambda: Recurrent(nn.GRU, 128, 64), ids(64, 64), (nn.GRU,)),
)
