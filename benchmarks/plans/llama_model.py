"""A train step of Llama 3 on one rank of a tensor-parallel group, as a user writes it: Megatron's f and g by hand.

    step = make_step(config, mesh)                       # mesh has an axis tp; the step knows no other
    state, loss = step(init(config, tp=8), tokens, first)

Every matrix is this rank's eighth of it: columns of wq, wk, wv, gate and up, rows of wo and down, rows of
the vocabulary. Master weights are fp32, matrices are cast to bf16 inside the loss, norms stay fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


@dataclass(frozen=True)
class Config:
    """Llama-3-8B by default."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    theta: float = 500000.0

    @property
    def head(self) -> int:
        return self.width // self.heads


class Enter(torch.autograd.Function):
    """Megatron's f, in front of column-parallel matrices: their input's gradient is a sum over tp."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return funcol.all_reduce(grad, "sum", (ctx.mesh, 1)), None


class Leave(torch.autograd.Function):
    """Megatron's g, behind row-parallel matrices: their output is a sum over tp."""

    @staticmethod
    def forward(ctx, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return funcol.all_reduce(x, "sum", (mesh, 1))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad, None


def shapes(config: Config, tp: int) -> dict[str, tuple[int, ...]]:
    """One rank's part of every parameter, output features first."""
    w, kv, hidden, vocab = (
        n // tp for n in (config.width, config.kv_heads * config.head, config.hidden, config.vocab)
    )
    layer = {
        "norm1": (config.width,), "wq": (w, config.width), "wk": (kv, config.width), "wv": (kv, config.width),
        "wo": (config.width, w), "norm2": (config.width,), "gate": (hidden, config.width),
        "up": (hidden, config.width), "down": (config.width, hidden),
    }  # fmt: skip
    layers = {
        f"layer{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()
    }
    ends = {"norm": (config.width,), "head": (vocab, config.width)}
    return {"embed": (vocab, config.width), **layers, **ends}


def init(config: Config, tp: int) -> dict:
    """State without values."""
    empty = lambda: {k: torch.empty(s, device="meta") for k, s in shapes(config, tp).items()}
    return {"params": empty(), "m": empty(), "v": empty(), "step": torch.zeros((), device="meta")}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, for x of shape (batch, heads, sequence, head)."""
    a, b = x.chunk(2, -1)
    return (x.float() * cos + torch.cat([-b, a], -1).float() * sin).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What `F.scaled_dot_product_attention` is on a GPU; the number of heads of k and v divides that of q."""
    k, v = (
        t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).flatten(1, 2) for t in (k, v)
    )
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def adamw(state: dict, grads: dict, lr=3e-4, b1=0.9, b2=0.95, eps=1e-8, decay=0.1) -> dict:
    step = state["step"] + 1
    m = {k: b1 * m + (1 - b1) * grads[k] for k, m in state["m"].items()}
    v = {k: b2 * v + (1 - b2) * grads[k] ** 2 for k, v in state["v"].items()}
    fix1, fix2 = 1 - b1**step, 1 - b2**step
    ratio = {k: m[k] / fix1 / ((v[k] / fix2).sqrt() + eps) for k in m}
    params = {k: p - lr * (ratio[k] + decay * p) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "step": step}


def momentum(state: dict, grads: dict, lr=3e-4, decay=0.9) -> tuple[dict, dict]:
    """SGD with momentum: the new parameters and moments."""
    m = {k: decay * m + grads[k] for k, m in state["m"].items()}
    return {k: p - lr * m[k] for k, p in state["params"].items()}, m


def sgd(state: dict, grads: dict) -> dict:
    params, m = momentum(state, grads)
    return {"params": params, "m": m}


def muon(state: dict, grads: dict, lr=3e-4) -> dict:
    """Muon, as torch.optim.Muon computes it, for the matrices of layers; SGD with momentum for the others."""
    params, m = momentum(state, grads)
    for k, p in state["params"].items():
        if p.ndim == 2 and k.startswith("layer"):
            params[k] = (
                p - lr * orthogonal(m[k].bfloat16()) * max(1, p.shape[0] / p.shape[1]) ** 0.5
            )
    return {"params": params, "m": m}


def orthogonal(g: Tensor) -> Tensor:
    """Five steps of a Newton-Schulz iteration."""
    x = g.mT if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if g.shape[0] > g.shape[1] else x


def make_step(
    config: Config, mesh: DeviceMesh, clips: bool = True, update: Callable = adamw
) -> Callable:
    """The step `(state, tokens, first) -> (state, loss)`; `first` is the first row of this rank's vocabulary.

    With `clips`, gradients are clipped by their global norm.
    """

    def embed(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
        row = tokens - first
        mine = (row >= 0) & (row < weight.shape[0])
        return Leave.apply(
            F.embedding(row.clamp(0, weight.shape[0] - 1), weight) * mine[..., None], mesh
        )

    def block(w: dict, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = lambda t: t.unflatten(-1, (-1, config.head)).transpose(1, 2)
        y = Enter.apply(norm(x, w[f"{name}.norm1"]), mesh)
        q, k, v = (heads(F.linear(y, w[f"{name}.{m}"])) for m in ("wq", "wk", "wv"))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2)
        x = x + Leave.apply(F.linear(y, w[f"{name}.wo"]), mesh)
        y = Enter.apply(norm(x, w[f"{name}.norm2"]), mesh)
        y = F.silu(F.linear(y, w[f"{name}.gate"])) * F.linear(y, w[f"{name}.up"])
        return x + Leave.apply(F.linear(y, w[f"{name}.down"]), mesh)

    def cross_entropy(logits: Tensor, targets: Tensor, first: int) -> Tensor:
        """Of logits whose columns are spread over tp."""
        top = funcol.all_reduce(logits.detach().amax(-1), "max", (mesh, 1))
        logits = logits - top[..., None]
        row = targets - first
        mine = (row >= 0) & (row < logits.shape[-1])
        hit = logits.gather(-1, row.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * mine
        return (Leave.apply(logits.exp().sum(-1), mesh).log() - Leave.apply(hit, mesh)).mean()

    def loss_fn(params: dict, tokens: Tensor, first: int) -> Tensor:
        w = {k: p.to(torch.bfloat16) if p.ndim > 1 else p for k, p in params.items()}
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        rates = config.theta ** (
            -torch.arange(0, config.head, 2, device=tokens.device) / config.head
        )
        angles = torch.outer(torch.arange(inputs.shape[1], device=tokens.device), rates).repeat(
            1, 2
        )
        cos, sin = angles.cos(), angles.sin()
        x = embed(w["embed"], inputs, first)
        for i in range(config.layers):
            x = block(w, f"layer{i}", x, cos, sin)
        x = Enter.apply(norm(x, w["norm"]), mesh)
        return cross_entropy(F.linear(x, w["head"]).float(), targets, first)

    def clip(grads: dict, limit: float = 1.0) -> dict:
        """By the global norm: matrices are spread over tp, norms are the same on all its ranks."""
        total = lambda gs: (
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gs])) ** 2
        )
        mine = total([g for g in grads.values() if g.ndim > 1])
        same = total([g for g in grads.values() if g.ndim == 1])
        scale = (limit / (funcol.all_reduce(mine, "sum", (mesh, 1)) + same).sqrt()).clamp(max=1.0)
        return {k: g * scale for k, g in grads.items()}

    def train_step(state: dict, tokens: Tensor, first: int) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = loss_fn(params, tokens, first)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        return update(state, clip(grads) if clips else grads), loss.detach()

    return train_step
