"""The train steps that `analyses.py` plans and simulates. They are on the meta device: nothing is computed.

A `Model` is a step, its state and a batch. All models but `lora` keep optimizer state for every leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from examples.model import GPT, Config


@dataclass(frozen=True)
class Model:
    """A step `(state, *batch) -> (state, loss)`; `trains` says whether it trains every leaf."""

    make: Callable[[], tuple[Callable, Any, tuple]]
    trains: bool = True


def adamw(state: dict, grads: dict, b1=0.9, b2=0.95, eps=1e-8, decay=0.1) -> dict:
    step = state["step"] + 1
    fix1, fix2 = 1 - b1**step, 1 - b2**step
    m = {k: b1 * m + (1 - b1) * grads[k] for k, m in state["m"].items()}
    v = {k: b2 * v + (1 - b2) * grads[k] ** 2 for k, v in state["v"].items()}
    ratio = {k: m[k] / fix1 / ((v[k] / fix2).sqrt() + eps) for k in m}
    params = {k: p - state["lr"] * (ratio[k] + decay * p) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "step": step, "lr": state["lr"]}


def adamw_state(params: dict) -> dict:
    zeros = lambda: {k: torch.empty_like(p) for k, p in params.items()}
    return {
        "params": params,
        "m": zeros(),
        "v": zeros(),
        "step": torch.tensor(0.0),
        "lr": torch.tensor(1e-3),
    }


def clipped(grads: dict) -> dict:
    """Gradients clipped by their global norm."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])
    )
    return {k: g * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for k, g in grads.items()}


def shapes(**leaves: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        name.replace("_", "."): torch.empty(shape, device="meta") for name, shape in leaves.items()
    }


def on_meta(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict]:
    with torch.device("meta"):
        module = make()
    return module, {k: p.detach() for k, p in module.named_parameters()}


def gpt(
    layers: int,
    width: int,
    sequence: int,
    batch: int,
    *,
    bf16=True,
    heads=16,
    vocab=256,
    clip=False,
    micro=1,
):
    """The GPT of the examples with AdamW. With `clip`, gradients are clipped; with `micro`, they are accumulated."""
    model, params = on_meta(lambda: GPT(Config(layers, width, heads, vocab, sequence)))

    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = functional_call(model, params, tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        total = None
        for part in tokens.chunk(micro):
            grads, loss = grad_and_value(loss_fn)(state["params"], part)
            total = grads if total is None else {k: total[k] + g for k, g in grads.items()}
        return adamw(state, clipped(total) if clip else total), loss

    return (
        step,
        adamw_state(params),
        (torch.empty(batch, sequence + 1, dtype=torch.int64, device="meta"),),
    )


def mlp(widths: list[int], batch: int, thin: bool = False):
    """Linear layers and SGD with momentum. With `thin`, each layer is scaled by a leaf of one to five rows."""
    layers = list(pairwise(widths))
    leaves = {f"w_{i}": (b, a) for i, (a, b) in enumerate(layers)} | {
        f"b_{i}": (b,) for i, (_, b) in enumerate(layers)
    }
    thins = {f"t_{i}": (1 + i % 5, b) for i, (_, b) in enumerate(layers)} if thin else {}
    params = shapes(**leaves, **thins)

    def loss_fn(params: dict, x: Tensor, y: Tensor) -> Tensor:
        for i in range(len(layers)):
            x = F.relu(F.linear(x, params[f"w.{i}"], params[f"b.{i}"]))
            x = x * params[f"t.{i}"].sum(0) if thin else x
        return F.mse_loss(x, y)

    def step(state: dict, x: Tensor, y: Tensor) -> tuple[dict, Tensor]:
        grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
        m = {k: 0.9 * m + grads[k] for k, m in state["m"].items()}
        return {"params": {k: p - 0.1 * m[k] for k, p in state["params"].items()}, "m": m}, loss

    state = {"params": params, "m": {k: torch.empty_like(p) for k, p in params.items()}}
    return (
        step,
        state,
        (
            torch.empty(batch, widths[0], device="meta"),
            torch.empty(batch, widths[-1], device="meta"),
        ),
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(F.relu(self.norm1(x))))))


def convolutions(channels: int, blocks: int, batch: int, size: int):
    """Residual blocks of convolutions and group norms, with AdamW."""
    head = lambda: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    body = lambda: (
        nn.Conv2d(3, channels, 3, padding=1),
        *(Residual(channels) for _ in range(blocks)),
    )
    model, params = on_meta(lambda: nn.Sequential(*body(), *head()))

    def step(state: dict, x: Tensor, y: Tensor) -> tuple[dict, Tensor]:
        loss_fn = lambda params: F.cross_entropy(functional_call(model, params, (x,)), y)
        grads, loss = grad_and_value(loss_fn)(state["params"])
        return adamw(state, grads), loss

    x = torch.empty(batch, 3, size, size, device="meta")
    return step, adamw_state(params), (x, torch.empty(batch, dtype=torch.int64, device="meta"))


def experts(count: int, width: int, hidden: int, tokens: int, layers: int):
    """Mixtures of experts with dense routing: all experts of a layer in one leaf of `count` rows."""
    layer = {"gate": (width, count), "up": (count, width, hidden), "down": (count, hidden, width)}
    params = shapes(
        **{f"{i}_{name}": shape for i in range(layers) for name, shape in layer.items()}
    )

    def loss_fn(params: dict, x: Tensor) -> Tensor:
        for i in range(layers):
            gate = torch.softmax(x @ params[f"{i}.gate"], -1)
            h = torch.einsum("bi,eio->beo", x, params[f"{i}.up"]).relu()
            x = x + torch.einsum("beo,eoi,be->bi", h, params[f"{i}.down"], gate)
        return x.square().mean()

    def step(state: dict, x: Tensor) -> tuple[dict, Tensor]:
        grads, loss = grad_and_value(loss_fn)(state["params"], x)
        return adamw(state, grads), loss

    return step, adamw_state(params), (torch.empty(tokens, width, device="meta"),)


def lora(layers: int, width: int, batch: int, rank: int = 8):
    """LoRA: adapters on a frozen base, with SGD."""
    adapter = {"a": (rank, width), "b": (width, rank)}
    base = shapes(**{f"{i}": (width, width) for i in range(layers)})
    adapters = shapes(
        **{f"{i}_{name}": shape for i in range(layers) for name, shape in adapter.items()}
    )

    def step(state: dict, x: Tensor) -> tuple[dict, Tensor]:
        def loss_fn(adapters: dict) -> Tensor:
            h = x
            for i in range(layers):
                h = torch.tanh(
                    h @ state["base"][f"{i}"].T + h @ adapters[f"{i}.a"].T @ adapters[f"{i}.b"].T
                )
            return h.square().mean()

        grads, loss = grad_and_value(loss_fn)(state["adapters"])
        new = {k: p - 0.1 * grads[k] for k, p in state["adapters"].items()}
        return {"base": state["base"], "adapters": new}, loss

    return step, {"base": base, "adapters": adapters}, (torch.empty(batch, width, device="meta"),)


MODELS = {
    "GPT 2 x 128, fp32": Model(lambda: gpt(2, 128, 64, 4, bf16=False, heads=4)),
    "GPT 6 x 512, fp32": Model(lambda: gpt(6, 512, 512, 4, bf16=False, heads=8)),
    "GPT 6 x 1024, bf16": Model(lambda: gpt(6, 1024, 1024, 2)),
    "GPT 12 x 2048, bf16": Model(lambda: gpt(12, 2048, 2048, 4)),
    "GPT 24 x 2048, bf16": Model(lambda: gpt(24, 2048, 2048, 4)),
    "GPT 4 x 1024, clipped": Model(lambda: gpt(4, 1024, 1024, 2, vocab=8192, clip=True)),
    "GPT 4 x 512, two micro-batches": Model(lambda: gpt(4, 512, 512, 4, heads=8, micro=2)),
    "MLP 8 x 4096": Model(lambda: mlp([4096] * 9, 512)),
    "MLP, uneven and thin leaves": Model(
        lambda: mlp([300, 1000, 700, 900, 1100, 5], 64, thin=True)
    ),
    "convolutions 8 x 256": Model(lambda: convolutions(256, 8, 32, 32)),
    "experts 4 x 8": Model(lambda: experts(8, 512, 1024, 512, 4)),
    "LoRA 8 x 2048": Model(lambda: lora(8, 2048, 2048), trains=False),
}
