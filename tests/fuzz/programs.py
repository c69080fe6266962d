"""Programs: a random model, how its gradients are taken, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import ztrans as zt

from . import dense, nested, spectral, views
from .layer import IDS, Layer
from .optimizers import OPTIMIZERS, Optimizer

Tensors = dict[str, torch.Tensor]
LAYERS = (*dense.LAYERS, *views.LAYERS, *spectral.LAYERS, *nested.LAYERS)
STYLES = ("func", "autograd", "backward", "vjp", "each")  # see gradients.py
PATTERNS = ("once", "once", "once", "ahead", "alternating", "squared")  # see steps.py


@dataclass(frozen=True)
class Program:
    """A train step on `samples` samples a rank, drawn from a seed."""

    seed: int
    width: int
    layers: tuple[Layer, ...]
    frozen: frozenset[str]
    style: str
    pattern: str
    micro: int
    samples: int
    clipped: bool
    decayed: bool
    averaged: bool
    counted: bool
    weighted: bool
    in_place: bool
    optimizer: Optimizer

    @staticmethod
    def draw(seed: int, chance: Random) -> Program:
        width = first = chance.randint(1, 9)
        layers: list[Layer] = []
        while not any(leaf.trained for layer in layers for leaf in layer.leaves) or chance.random() < 0.6:
            layer = chance.choice(LAYERS)(chance, width)
            if not any(_without_truth(layer, other) for other in layers):
                layers.append(layer)
                width = layer.out
        names = [f"{i}.{j}" for i, layer in enumerate(layers) for j, leaf in enumerate(layer.leaves) if leaf.trained]
        frozen = {name for name in names[1:] if chance.random() < 0.15}
        style, pattern = chance.choice(STYLES), chance.choice(PATTERNS)
        if style == "each" and any(layer.together or layer.rounds or not (layer.mapped and layer.placed) for layer in layers):
            style = "func"
        if pattern == "alternating" and not all(layer.placed for layer in layers):
            pattern = "once"
        if any(layer.by_autograd for layer in layers) and style != "backward":
            style = "autograd"
        if style == "each" or (pattern == "squared" and any(layer.once or layer.rounds for layer in layers)):
            pattern = "once"
        micro = chance.choice([1, 1, 1, 2, 3])
        return Program(
            seed, first, tuple(layers), frozenset(frozen), style, pattern, micro,
            samples=micro * chance.randint(1, 3), clipped=chance.random() < 0.3, decayed=chance.random() < 0.3,
            averaged=chance.random() < 0.2, counted=chance.random() < 0.5,
            weighted=chance.random() < 0.1 and style != "each" and not any(layer.rounds for layer in layers),
            in_place=chance.random() < 0.2, optimizer=chance.choice(OPTIMIZERS)(chance),
        )  # fmt: skip

    @property
    def name(self) -> str:
        what = ", ".join(layer.name for layer in self.layers)
        flags = [name for name in ("clipped", "decayed", "averaged", "counted", "weighted", "in_place") if getattr(self, name)]
        return " | ".join([what, self.optimizer.name, f"{self.style} {self.pattern} x{self.micro}", *flags])

    @property
    def rounds(self) -> bool:
        """Whether ranks round their gradients apart, so that the whole batch has another one."""
        return any(layer.rounds for layer in self.layers)

    @property
    def together(self) -> bool:
        """Whether no rank alone has the gradient: statistics, gradients of samples, a gradient of a gradient."""
        shared = self.style == "each" or self.pattern == "squared" or self.weighted
        return shared or any(layer.together for layer in self.layers)

    def leaves(self, trained: bool) -> Tensors:
        made = {}
        for i, layer in enumerate(self.layers):
            for j, leaf in enumerate(layer.leaves):
                value, name = leaf.made(), f"{i}.{j}"
                if (leaf.trained and name not in self.frozen) == trained:
                    made[name] = value
        return made

    def state(self) -> dict[str, Any]:
        """The first state; the count is a Python number in half of the programs."""
        torch.manual_seed(self.seed)
        params = self.leaves(trained=True)
        torch.manual_seed(self.seed)
        state = {"params": params, "fixed": self.leaves(trained=False)}
        state["kept"] = {name: self.optimizer.first(p) for name, p in params.items()}
        state["step"] = 0 if self.counted else torch.zeros(())
        return state | ({"average": {k: p.clone() for k, p in params.items()}} if self.averaged else {})

    def batch(self, ranks: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch of one step."""
        torch.manual_seed(1000 * step + self.seed + 1)
        count = ranks * self.samples
        return torch.randn(count, self.width), torch.randint(0, IDS, (count,))

    def loss(self, trained: Tensors, fixed: Tensors, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A mean over samples, weighted where samples count differently, and a term of the leaves alone."""
        leaves = {**trained, **fixed}
        for i, layer in enumerate(self.layers):
            y = layer.run(x, ids, *(leaves[f"{i}.{j}"] for j in range(len(layer.leaves))))
            x = y / (1 + y.abs())
        each = x.square().sum(1) + x.sin().mean(1)
        if self.weighted:
            weights = 0.5 + ids.to(x.dtype)
            value = zt.psum((each * weights).sum(), "dp") / zt.psum(weights.sum(), "dp")
        else:
            value = each.mean()
        if self.decayed:
            value = value + 0.01 * sum((p * p.conj()).real.sum() for p in trained.values())
        return value


def _without_truth(layer: Layer, other: Layer) -> bool:
    """Whether nobody can say by hand what both compute: one rounds on each rank, the other is of all ranks."""
    return (layer.rounds and other.together) or (layer.together and other.rounds)
