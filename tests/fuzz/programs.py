"""`Program`: a random model, the way in which its gradients are taken, and its optimizer."""

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
    """A random train step, which is determined by a seed. Each rank has `samples` samples."""

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
        while (
            not any(leaf.trained for layer in layers for leaf in layer.leaves)
            or chance.random() < 0.6
        ):
            layer = chance.choice(LAYERS)(chance, width)
            if not any(_without_truth(layer, earlier) for earlier in layers):
                layers.append(layer)
                width = layer.out
        names = [
            f"{i}.{j}"
            for i, layer in enumerate(layers)
            for j, leaf in enumerate(layer.leaves)
            if leaf.trained
        ]
        frozen = {name for name in names[1:] if chance.random() < 0.15}
        style, pattern = chance.choice(STYLES), chance.choice(PATTERNS)
        if style == "each" and any(
            layer.together or layer.rounds or not (layer.mapped and layer.placed)
            for layer in layers
        ):
            style = "func"
        if pattern == "alternating" and not all(layer.placed for layer in layers):
            pattern = "once"
        if any(layer.by_autograd for layer in layers) and style != "backward":
            style = "autograd"
        if style == "each" or (
            pattern == "squared" and any(layer.once or layer.rounds for layer in layers)
        ):
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
        layers = ", ".join(layer.name for layer in self.layers)
        flags = [
            name
            for name in ("clipped", "decayed", "averaged", "counted", "weighted", "in_place")
            if getattr(self, name)
        ]
        return " | ".join(
            [layers, self.optimizer.name, f"{self.style} {self.pattern} x{self.micro}", *flags]
        )

    @property
    def rounds(self) -> bool:
        """Whether each rank rounds its own gradients, so that their mean differs from the whole batch's gradient."""
        return any(layer.rounds for layer in self.layers)

    @property
    def together(self) -> bool:
        """Whether a rank cannot compute its gradient alone: batch statistics, per-sample or second gradients."""
        shared = self.style == "each" or self.pattern == "squared" or self.weighted
        return shared or any(layer.together for layer in self.layers)

    def leaves(self, trained: bool) -> Tensors:
        leaves = {}
        for i, layer in enumerate(self.layers):
            for j, leaf in enumerate(layer.leaves):
                value, name = leaf.draw(), f"{i}.{j}"
                if (leaf.trained and name not in self.frozen) == trained:
                    leaves[name] = value
        return leaves

    def state(self) -> dict[str, Any]:
        """The first state. In half of the programs the step count is a Python number."""
        torch.default_generator.manual_seed(self.seed)
        params = self.leaves(trained=True)
        torch.default_generator.manual_seed(self.seed)
        state = {"params": params, "fixed": self.leaves(trained=False)}
        state["kept"] = {name: self.optimizer.first(p) for name, p in params.items()}
        state["step"] = 0 if self.counted else torch.zeros(())
        return state | (
            {"average": {k: p.clone() for k, p in params.items()}} if self.averaged else {}
        )

    def batch(self, ranks: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of one step, for all ranks together."""
        torch.default_generator.manual_seed(1000 * step + self.seed + 1)
        count = ranks * self.samples
        return torch.randn(count, self.width), torch.randint(0, IDS, (count,))

    def loss(
        self, trained: Tensors, fixed: Tensors, x: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """A mean over the samples, weighted if `weighted` is set, plus a weight decay if `decayed` is set."""
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


def _without_truth(a: Layer, b: Layer) -> bool:
    """Whether no reference result exists for a program with both layers: one rounds per rank, one spans all ranks."""
    return (a.rounds and b.together) or (a.together and b.rounds)
