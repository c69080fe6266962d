"""Train steps of many kinds, on which the laws are tested. Each is an ordinary program for one device.

A `Case` is a step, its first state, and a global batch that splits over the ranks. Together the steps
use every way to take gradients: torch.func, torch.autograd.grad, .backward(), torch.optim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.optim.adamw import adamw as torch_adamw

import ztrans as zt


@dataclass(frozen=True)
class Case:
    name: str
    step: Callable
    state: Callable[[], Any]
    batch: Callable[[int], tuple]  # draws a global batch with this number of samples
    samples: int = 24  # splits over 1, 2, 3, 4 and 8 ranks


def params_of(module: nn.Module) -> dict[str, torch.Tensor]:
    torch.default_generator.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return {k: p.detach().to(torch.get_default_dtype()) for k, p in module.named_parameters()}


def zeros(params: dict) -> dict:
    return {k: torch.zeros_like(p) for k, p in params.items()}


def regression(features: int, out: int) -> Callable[[int], tuple]:
    def batch(n: int) -> tuple:
        return ((torch.randn(n, features), torch.randn(n, out)),)

    return batch


def sgd(params: dict, grads: dict, lr: Any = 0.05) -> dict:
    return {k: p - lr * grads[k] for k, p in params.items()}


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def square_loss(module: nn.Module) -> Callable:
    def loss(params, x, y):
        return F.mse_loss(functional_call(module, params, (x,)), y)

    return loss


# ---- SGD with momentum, lr and step in the state


def mlp_momentum() -> Case:
    model = mlp(6, 16, 16, 4)
    loss = square_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
        lr = state["lr"] / (1 + 0.1 * state["step"])
        params = {k: p - lr * m[k] for k, p in state["params"].items()}
        return {"params": params, "m": m, "lr": state["lr"], "step": state["step"] + 1}, value

    def state():
        params = params_of(model)
        return {"params": params, "m": zeros(params), "lr": 0.05, "step": 0}

    return Case("mlp_momentum", step, state, regression(6, 4))


# ---- GPT with tied embeddings


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            h.view(b, t, self.heads, -1).transpose(1, 2)
            for h in self.qkv(self.norm1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self, vocab: int = 19, width: int = 8, heads: int = 2, layers: int = 2, sequence: int = 6
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def tokens(vocab: int, sequence: int) -> Callable[[int], tuple]:
    def batch(n: int) -> tuple:
        return ((torch.randint(0, vocab, (n, sequence)), torch.randint(0, vocab, (n, sequence))),)

    return batch


def gpt_loss(model: nn.Module) -> Callable:
    def loss(params, ids, targets):
        logits = functional_call(model, params, (ids,))
        return F.cross_entropy(
            logits.flatten(0, 1).float()
            if logits.dtype == torch.bfloat16
            else logits.flatten(0, 1),
            targets.flatten(),
        )

    return loss


def adam_state(model: nn.Module) -> Callable[[], Any]:
    def state():
        params = params_of(model)
        step = torch.zeros((), dtype=torch.get_default_dtype())
        return {"params": params, "m": zeros(params), "v": zeros(params), "step": step}

    return state


def adam(state: dict, grads: dict, lr: float = 1e-2) -> dict:
    step = state["step"] + 1
    m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.95 * state["v"][k] + 0.05 * g * g for k, g in grads.items()}
    scale = lr * torch.sqrt(1 - 0.95**step) / (1 - 0.9**step)
    params = {
        k: p * (1 - lr * 0.1) - scale * m[k] / (v[k].sqrt() + 1e-3)
        for k, p in state["params"].items()
    }
    return {"params": params, "m": m, "v": v, "step": step}


def gpt_adam(layers: int = 1) -> Case:
    model = GPT(layers=layers)
    loss = gpt_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    return Case("gpt_adam", step, adam_state(model), tokens(19, 6))


# ---- torch.optim, every way of running AdamW


def adamw_with(**how: bool) -> Case:
    model = mlp(5, 7, 3)
    loss = square_loss(model)

    def step(state, batch):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        value = loss(params, *batch)
        value.backward()
        columns = [
            list(c.values())
            for c in (params, {k: p.grad for k, p in params.items()}, state["m"], state["v"])
        ]
        with torch.no_grad():
            torch_adamw(
                *columns, [], list(state["steps"].values()), amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-2,
                weight_decay=0.1, eps=1e-3, maximize=False, capturable=False, differentiable=False, **how,
            )  # fmt: skip
        return {**state, "params": {k: p.detach() for k, p in params.items()}}, value.detach()

    def state():
        params = params_of(model)
        steps = {k: torch.zeros((), dtype=torch.get_default_dtype()) for k in params}
        return {"params": params, "m": zeros(params), "v": zeros(params), "steps": steps}

    name = next((k for k, v in how.items() if v), "single")
    return Case(f"adamw_{name}", step, state, regression(5, 3))


# ---- convolutions, recurrence, experts, adapters


class ConvNet(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 5, 3, stride=2)
        self.norm = nn.BatchNorm2d(6) if norm else nn.GroupNorm(2, 6)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


def images(n: int) -> tuple:
    return ((torch.randn(n, 2, 6, 6), torch.randint(0, 3, (n,))),)


def conv_groupnorm() -> Case:
    model = ConvNet(norm=False)

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads)}, value

    return Case("conv_groupnorm", step, lambda: {"params": params_of(model)}, images)


def batch_norm_mean() -> Case:
    """Batch norm written by hand, with statistics averaged over the axis, so that it equals one device."""

    def forward(params, stats, x, y):
        h = F.conv2d(x, params["conv"], padding=1)
        mean = zt.pmean(h.mean((0, 2, 3)), "dp")
        var = zt.pmean((h - mean[:, None, None]).square().mean((0, 2, 3)), "dp")
        h = (
            (h - mean[:, None, None])
            * torch.rsqrt(var + 1e-3)[:, None, None]
            * params["scale"][:, None, None]
        )
        value = F.cross_entropy(F.relu(h).mean((2, 3)) @ params["head"], y)
        new = {
            "mean": 0.9 * stats["mean"] + 0.1 * mean.detach(),
            "var": 0.9 * stats["var"] + 0.1 * var.detach(),
        }
        return value, new

    def step(state, batch):
        (grads, (value, stats)) = grad_and_value(forward, has_aux=True)(
            state["params"], state["stats"], *batch
        )
        return {"params": sgd(state["params"], grads), "stats": stats}, value

    def state():
        torch.default_generator.manual_seed(0)
        params = {
            "conv": torch.randn(6, 2, 3, 3) * 0.3,
            "scale": torch.ones(6),
            "head": torch.randn(6, 3) * 0.3,
        }
        return {"params": params, "stats": {"mean": torch.zeros(6), "var": torch.ones(6)}}

    return Case("batch_norm_mean", step, state, images)


def lstm() -> Case:
    cell, head = nn.LSTMCell(4, 6), nn.Linear(6, 2)
    model = nn.ModuleDict({"cell": cell, "head": head})

    def loss(params, x, y):
        h = c = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            own = {k.removeprefix("cell."): p for k, p in params.items() if k.startswith("cell.")}
            h, c = functional_call(cell, own, (x[:, t], (h, c)))
        return F.mse_loss(h @ params["head.weight"].T + params["head.bias"], y)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads)}, value

    return Case(
        "lstm",
        step,
        lambda: {"params": params_of(model)},
        lambda n: ((torch.randn(n, 3, 4), torch.randn(n, 2)),),
    )


def mixture() -> Case:
    """Mixture of experts with dense routing: all experts of a layer in one tensor."""

    def loss(params, x, y):
        gate = torch.softmax(x @ params["gate"], -1)
        h = torch.einsum("bi,eio->beo", x, params["up"]).relu()
        return F.mse_loss(torch.einsum("beo,eoi,be->bi", h, params["down"], gate), y)

    def step(state, batch):
        leaves = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        value = loss(leaves, *batch)
        grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        return {"params": sgd(state["params"], grads)}, value.detach()

    def state():
        torch.default_generator.manual_seed(0)
        return {
            "params": {
                "gate": torch.randn(5, 4) * 0.3,
                "up": torch.randn(4, 5, 7) * 0.3,
                "down": torch.randn(4, 7, 5) * 0.3,
            }
        }

    return Case("mixture", step, state, regression(5, 5))


def lora() -> Case:
    """LoRA: adapters on a frozen base. The base is gathered, but it has no gradient to reduce."""
    model = mlp(6, 12, 4)

    def step(state, batch):
        def loss(adapters):
            x = batch[0]
            for i in ("0", "2"):
                w, b = state["base"][f"{i}.weight"], state["base"][f"{i}.bias"]
                x = F.linear(x, w, b) + x @ adapters[f"{i}.a"].T @ adapters[f"{i}.b"].T
                x = torch.tanh(x) if i == "0" else x
            return F.mse_loss(x, batch[1])

        grads, value = grad_and_value(loss)(state["adapters"])
        return {"base": state["base"], "adapters": sgd(state["adapters"], grads, 0.2)}, value

    def state():
        base = params_of(model)
        adapters = {}
        for i in ("0", "2"):
            out, inner = base[f"{i}.weight"].shape
            adapters[f"{i}.a"], adapters[f"{i}.b"] = (
                torch.randn(2, inner) * 0.3,
                torch.randn(out, 2) * 0.3,
            )
        return {"base": base, "adapters": adapters}

    return Case("lora", step, state, regression(6, 4))


def uneven() -> Case:
    """Dims that no number of ranks divides, parameters with fewer rows than ranks, a scalar and an empty parameter."""

    def loss(params, x, y):
        h = torch.tanh(x @ params["a"].T + params["tiny"].sum() + params["scalar"])
        return F.mse_loss(h @ params["b"] * params["one"], y) + params["empty"].sum()

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads)}, value

    def state():
        torch.default_generator.manual_seed(0)
        params = {
            "a": torch.randn(7, 5),
            "b": torch.randn(7, 3),
            "tiny": torch.randn(2),
            "one": torch.randn(1),
        }
        return {"params": {**params, "scalar": torch.randn(()), "empty": torch.zeros(0, 4)}}

    return Case("uneven", step, state, regression(5, 3))


# ---- optimizers that mix elements


def muon() -> Case:
    """Momentum orthogonalised by Newton-Schulz iterations: matmuls in the update."""
    model = mlp(6, 12, 8, 4)
    loss = square_loss(model)

    def orthogonal(g):
        x = g / (g.norm() + 1e-7)
        for _ in range(3):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
        params = {
            k: p - 0.02 * (orthogonal(m[k]) if p.ndim == 2 else m[k])
            for k, p in state["params"].items()
        }
        return {"params": params, "m": m}, value

    def state():
        params = params_of(model)
        return {"params": params, "m": zeros(params)}

    return Case("muon", step, state, regression(6, 4))


def clipped() -> Case:
    """Clipping by the global norm, as torch.nn.utils writes it."""
    model = mlp(6, 16, 4)
    loss = square_loss(model)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])
        )
        scale = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
        return adam(state, {k: g * scale for k, g in grads.items()}), {"loss": value, "norm": norm}

    return Case("clipped", step, adam_state(model), regression(6, 4))


def loss_scaled() -> Case:
    """Dynamic loss scaling: a step with a gradient that is not finite is skipped. Every third step has one."""
    model = mlp(6, 16, 4)
    loss = square_loss(model)

    def step(state, batch):
        spoilt = torch.where(state["step"] % 3 == 1, float("inf"), 1.0)
        scaled = lambda p, x, y: loss(p, x, y) * state["scale"] * spoilt
        grads = grad(scaled)(state["params"], *batch)
        finite = torch.stack([torch.isfinite(g).all() for g in grads.values()]).all()
        wrong = torch.stack([(~torch.isfinite(g)).any() for g in grads.values()]).any()
        params = {
            k: torch.where(finite, p - 0.05 * grads[k] / state["scale"], p)
            for k, p in state["params"].items()
        }
        scale = torch.where(wrong, state["scale"] / 2, state["scale"])
        signs = torch.stack([torch.sign(p).prod() for p in params.values()])
        return {"params": params, "scale": scale, "step": state["step"] + 1}, {
            "finite": finite.float(),
            "signs": signs,
        }

    def state():
        return {"params": params_of(model), "scale": torch.tensor(8.0), "step": torch.tensor(0)}

    return Case("loss_scaled", step, state, regression(6, 4))


def accumulation() -> Case:
    """Gradient accumulation by .backward() over micro-batches, then SGD in place."""
    model = mlp(6, 12, 4)
    loss = square_loss(model)

    def step(state, batch):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        total = 0.0
        for x, y in zip(*(t.chunk(3) for t in batch)):
            value = loss(params, x, y) / 3
            value.backward()
            total = total + value.detach()
        with torch.no_grad():
            for p in params.values():
                p -= 0.05 * p.grad
        return {"params": {k: p.detach() for k, p in params.items()}}, total

    return Case(
        "accumulation", step, lambda: {"params": params_of(model)}, regression(6, 4), samples=72
    )


# ---- several gradients in one step


def sam() -> Case:
    """Sharpness-aware minimisation: two gradients with an update between them."""
    model = mlp(6, 12, 4)
    loss = square_loss(model)

    def step(state, batch):
        first = grad(loss)(state["params"], *batch)
        norm = torch.sqrt(sum(g.square().sum() for g in first.values()))
        ahead = {k: p + 0.05 * first[k] / (norm + 1e-9) for k, p in state["params"].items()}
        grads, value = grad_and_value(loss)(ahead, *batch)
        return {"params": sgd(state["params"], grads)}, value

    return Case("sam", step, lambda: {"params": params_of(model)}, regression(6, 4))


def penalty() -> Case:
    """A gradient penalty: the gradient with respect to the inputs, differentiated again."""
    model = mlp(6, 12, 1)

    def step(state, batch):
        def loss(params, x, y):
            def score(x):
                return functional_call(model, params, (x,)).sum()

            gx = grad(score)(x)
            return (
                F.mse_loss(functional_call(model, params, (x,)), y)
                + (gx.square().sum(1) - 1).square().mean()
            )

        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads)}, value

    return Case("penalty", step, lambda: {"params": params_of(model)}, regression(6, 1))


def weight_penalty() -> Case:
    """The squared norm of the parameters' own gradient, differentiated again."""
    model = mlp(4, 8, 2)
    loss = square_loss(model)

    def step(state, batch):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        value = loss(params, *batch)
        inner = torch.autograd.grad(value, list(params.values()), create_graph=True)
        total = value + 0.1 * sum(g.square().sum() for g in inner)
        grads = dict(zip(params, torch.autograd.grad(total, list(params.values()))))
        return {"params": sgd(state["params"], grads)}, total.detach()

    return Case("weight_penalty", step, lambda: {"params": params_of(model)}, regression(4, 2))


def per_sample() -> Case:
    """Per-sample gradients, each clipped, then averaged by the user."""
    model = mlp(6, 12, 4)

    def step(state, batch):
        def loss(params, x, y):
            return F.mse_loss(functional_call(model, params, (x,)), y)

        each = vmap(grad(loss), (None, 0, 0))(state["params"], *batch)
        norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each.values()))
        scale = torch.clamp(0.5 / (norms + 1e-6), max=1.0)
        mean = {k: torch.einsum("b,b...->...", scale, g) / len(scale) for k, g in each.items()}
        return {"params": sgd(state["params"], zt.pmean(mean, "dp"))}, norms.mean()

    return Case("per_sample", step, lambda: {"params": params_of(model)}, regression(6, 4))


def token_weighted() -> Case:
    """A mean over the unmasked tokens, whose number differs from rank to rank: a psum divided by a psum."""
    model = GPT(layers=1)

    def step(state, batch):
        def loss(params, ids, targets):
            logits = functional_call(model, params, (ids,))
            each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            mask = (targets.flatten() % 3 != 0).to(each.dtype)
            return zt.psum((each * mask).sum(), "dp") / zt.psum(mask.sum(), "dp")

        grads, value = grad_and_value(loss)(state["params"], *batch)
        return {"params": sgd(state["params"], grads)}, value

    return Case("token_weighted", step, lambda: {"params": params_of(model)}, tokens(19, 6))


def weight_norm() -> Case:
    """Weights that are computed from two parameters inside the loss, and a regulariser on one of the two."""

    def loss(params, x, y):
        v = params["v"]
        w = params["g"] * v / v.norm(dim=1, keepdim=True)
        return F.mse_loss(x @ w.T, y) + 0.01 * v.square().sum()

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        ema = {k: 0.9 * state["ema"][k] + 0.1 * p for k, p in state["params"].items()}
        return {"params": sgd(state["params"], grads), "ema": ema}, value

    def state():
        torch.default_generator.manual_seed(0)
        params = {"v": torch.randn(8, 6), "g": torch.ones(8, 1)}
        return {"params": params, "ema": zeros(params)}

    return Case("weight_norm", step, state, regression(6, 8))


def complex_weights() -> Case:
    """Complex weights with real second moments, so that forward, backward and update have conjugates."""

    def loss(params, x, y):
        spectrum = torch.fft.rfft(x) @ params["filter"] * params["gain"].conj()
        return F.mse_loss(torch.fft.irfft(spectrum, n=6) + params["shift"].imag, y)

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads.items()}
        v = {k: 0.95 * state["v"][k] + 0.05 * (g * g.conj()).real for k, g in grads.items()}
        params = {k: p - 0.01 * m[k] / (v[k].sqrt() + 1e-3) for k, p in state["params"].items()}
        return {"params": params, "m": m, "v": v}, value

    def state():
        torch.default_generator.manual_seed(0)
        dtype = torch.complex(*torch.zeros(2)).dtype
        params = {
            k: torch.randn(*shape, dtype=dtype)
            for k, shape in {"filter": (4, 4), "gain": (4,), "shift": (6,)}.items()
        }
        return {
            "params": params,
            "m": zeros(params),
            "v": {k: p.abs() * 0 for k, p in params.items()},
        }

    return Case("complex_weights", step, state, regression(6, 6))


def cast_outside() -> Case:
    """Parameters are cast to bf16 outside of the loss, so gradients are taken for the copies, and are in bf16."""
    model = mlp(8, 16, 4)

    def loss(params, x, y):
        return F.mse_loss(
            functional_call(model, params, (x.to(torch.bfloat16),)).float(), y.float()
        )

    def step(state, batch):
        half = {k: p.to(torch.bfloat16) for k, p in state["params"].items()}
        grads, value = grad_and_value(loss)(half, *batch)
        params = {k: p - 0.05 * grads[k].to(p.dtype) for k, p in state["params"].items()}
        return {"params": params}, value

    return Case("cast_outside", step, lambda: {"params": params_of(model)}, regression(8, 4))


def autocast() -> Case:
    """A GPT under autocast in bf16."""
    model = GPT(width=16, layers=1)

    def loss(params, ids, targets):
        with torch.autocast("cpu", torch.bfloat16):
            logits = functional_call(model, params, (ids,))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(state, batch):
        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    return Case("autocast", step, adam_state(model), tokens(19, 6))


def cast_inside() -> Case:
    """A GPT whose parameters are all cast to bf16 at the start of the loss."""
    model = GPT(width=16, layers=1)
    inner = gpt_loss(model)

    def step(state, batch):
        def loss(params, ids, targets):
            return inner({k: p.to(torch.bfloat16) for k, p in params.items()}, ids, targets)

        grads, value = grad_and_value(loss)(state["params"], *batch)
        return adam(state, grads), value

    return Case("cast_inside", step, adam_state(model), tokens(19, 6))


EXACT = [
    mlp_momentum(), gpt_adam(), adamw_with(fused=True, foreach=False), adamw_with(foreach=True, fused=False),
    adamw_with(foreach=False, fused=False), conv_groupnorm(), batch_norm_mean(), lstm(), mixture(), lora(),
    uneven(), muon(), clipped(), loss_scaled(), accumulation(), sam(), penalty(), weight_penalty(), per_sample(),
    token_weighted(), weight_norm(), complex_weights(),
]  # fmt: skip
HALF = [autocast(), cast_outside(), cast_inside()]
CASES = {case.name: case for case in EXACT + HALF}
