"""Train a GPT on bytes of the standard library's source, sharded over all ranks.

    python examples/gpt.py                                        # one process
    torchrun --standalone --nproc-per-node 2 examples/gpt.py      # two: the same losses but for rounding
    python examples/gpt.py --bf16                                 # matmuls and gathers in bf16
"""

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import ztrans as zt


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
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.norm1(x)), "b s (three h d) -> three b h s d", three=3, h=self.heads)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(rearrange(seen, "b h s d -> b s (h d)"))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c.vocab, c.width), nn.Embedding(c.sequence, c.width)
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


def adamw(state: dict, grads: dict, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, warmup=20) -> dict:
    step = state["step"] + 1
    lr, fix1, fix2 = state["lr"] * (step / warmup).clamp(max=1), 1 - b1**step, 1 - b2**step
    m = {k: b1 * m + (1 - b1) * grads[k] for k, m in state["m"].items()}
    v = {k: b2 * v + (1 - b2) * grads[k] ** 2 for k, v in state["v"].items()}
    ratio = {k: m[k] / fix1 / ((v[k] / fix2).sqrt() + eps) for k in m}
    params = {k: p - lr * (ratio[k] + decay * p) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "step": step, "lr": state["lr"]}


def init(model: nn.Module, lr: float) -> dict:
    params = {k: p.detach() for k, p in model.named_parameters()}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    return {"params": params, "m": zeros, "v": zeros, "step": torch.tensor(0.0), "lr": torch.tensor(lr)}


def make_step(model: nn.Module, *, bf16: bool = False, device: str = "cpu") -> Callable:
    """The plain train step, ordinary code for one device."""

    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = functional_call(model, params, tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        grads, loss = grad_and_value(loss_fn)(state["params"], tokens)
        return adamw(state, grads), loss

    return train_step


def stdlib_bytes(limit: int = 4 << 20) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[:limit]), dtype=torch.uint8)


def draw(text: Tensor, step: int, batch: int, sequence: int) -> Tensor:
    """The global batch of a step: the same on every rank, which then takes its own rows."""
    starts = torch.randint(len(text) - sequence, (batch, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(sequence + 1)].long()


def main(config: Config = Config(), *, steps=100, batch=16, lr=2e-3, bf16=False) -> list[float]:
    mesh = zt.make_mesh(dp=-1)
    fsdp = zt.chain(zt.shard_params(mesh, axis="dp"), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
    torch.manual_seed(0)
    model = GPT(config)
    step = fsdp(make_step(model, bf16=bf16, device=mesh.device_type))
    state = step.shard(init(model, lr), device=mesh.device_type)
    text, losses = stdlib_bytes(), []
    for i in range(steps):
        tokens = draw(text, i, batch, config.sequence).chunk(mesh.size())[mesh.get_rank()]
        state, loss = step(state, tokens.to(mesh.device_type))
        losses.append(loss.item())
        if mesh.get_rank() == 0 and (i % 10 == 0 or i == steps - 1):
            print(f"step {i:4d}   loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(bf16="--bf16" in sys.argv)
