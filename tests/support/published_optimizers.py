"""Optimizers that are not part of PyTorch, from the formulas of their papers.

Some of them need numbers of all parameters together: a step count, a weight, an estimate. Their libraries keep these in
the parameter groups, or in the optimizer. The classes here that are called `...InState` keep them, as tensors, in the
state of the first parameter instead.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.optim import Optimizer


class _Each(Optimizer):
    """An optimizer that updates one parameter after another, by `update(p, g, state, group)`."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, {"lr": lr, **self.options, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, p.grad, self.state[p], group)


def counted(state, p, *zeros):
    """Create a state of zeros at the first step, and return the number of this one."""
    if not state:
        state["step"] = 0
        state.update({name: torch.zeros_like(p) for name in zeros})
    state["step"] += 1
    return state["step"]


class Lion(_Each):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    options: ClassVar = {"betas": (0.9, 0.99), "weight_decay": 0.1}

    def update(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        counted(state, p, "exp_avg")
        direction = (beta1 * state["exp_avg"] + (1 - beta1) * g).sign()
        p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
        state["exp_avg"].mul_(beta2).add_(g, alpha=1 - beta2)


class Lamb(_Each):
    """You et al., Large Batch Optimization for Deep Learning, 2020."""

    options: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}

    def update(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        step = counted(state, p, "exp_avg", "exp_avg_sq")
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        r = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + group["eps"]) + group[
            "weight_decay"
        ] * p
        of_p, of_r = p.norm(), r.norm()
        trust = torch.where((of_p > 0) & (of_r > 0), of_p / of_r, 1.0)
        p.sub_(group["lr"] * trust * r)


class Lars(_Each):
    """You et al., Large Batch Training of Convolutional Networks, 2017."""

    options: ClassVar = {"momentum": 0.9, "weight_decay": 1e-4, "trust": 0.1}

    def update(self, p, g, state, group):
        counted(state, p, "momentum_buffer")
        of_p, of_g = p.norm(), g.norm()
        rate = group["trust"] * of_p / (of_g + group["weight_decay"] * of_p)
        rate = torch.where((of_p > 0) & (of_g > 0), rate, 1.0)
        state["momentum_buffer"].mul_(group["momentum"]).add_(
            group["lr"] * rate * (g + group["weight_decay"] * p)
        )
        p.sub_(state["momentum_buffer"])


class AdaBelief(_Each):
    """Zhuang et al., AdaBelief Optimizer, 2020."""

    options: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-8}

    def update(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        step = counted(state, p, "exp_avg", "exp_avg_var")
        m, s = state["exp_avg"], state["exp_avg_var"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        s.mul_(beta2).add_((g - m).square() + group["eps"], alpha=1 - beta2)
        p.addcdiv_(
            m / (1 - beta1**step), (s / (1 - beta2**step)).sqrt() + group["eps"], value=-group["lr"]
        )


class LaProp(_Each):
    """Ziyin et al., LaProp: Separating Momentum and Adaptivity in Adam, 2020."""

    options: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-8}

    def update(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        step = counted(state, p, "exp_avg", "exp_avg_sq")
        state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        normed = g / ((state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"])
        state["exp_avg"].mul_(beta1).add_(normed, alpha=1 - beta1)
        p.sub_(group["lr"] * state["exp_avg"] / (1 - beta1**step))


class Adan(_Each):
    """Xie et al., Adan: Adaptive Nesterov Momentum Algorithm, 2022."""

    options: ClassVar = {"betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.02}

    def update(self, p, g, state, group):
        beta1, beta2, beta3 = group["betas"]
        step = counted(state, p, "exp_avg", "exp_avg_diff", "exp_avg_sq", "before")
        change = torch.where(torch.as_tensor(step == 1), torch.zeros_like(g), g - state["before"])
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_diff"].lerp_(change, 1 - beta2)
        state["exp_avg_sq"].lerp_((g + beta2 * change).square(), 1 - beta3)
        m, d = state["exp_avg"] / (1 - beta1**step), state["exp_avg_diff"] / (1 - beta2**step)
        size = (state["exp_avg_sq"] / (1 - beta3**step)).sqrt() + group["eps"]
        p.sub_(group["lr"] * (m + beta2 * d) / size).div_(1 + group["lr"] * group["weight_decay"])
        state["before"].copy_(g)


class MADGRAD(_Each):
    """Defazio and Jelassi, Adaptivity without Compromise, 2021."""

    options: ClassVar = {"momentum": 0.9, "eps": 1e-6}

    def update(self, p, g, state, group):
        if not state:
            state.update(
                step=0, first=p.clone(), sum=torch.zeros_like(p), squares=torch.zeros_like(p)
            )
        rate = group["lr"] * (state["step"] + 1) ** 0.5
        state["step"] += 1
        state["sum"].add_(rate * g)
        state["squares"].add_(rate * g * g)
        z = state["first"] - state["sum"] / (state["squares"] ** (1 / 3) + group["eps"])
        p.lerp_(z, 1 - group["momentum"])


class Lookahead(torch.optim.AdamW):
    """Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019. The steps are counted in the groups."""

    def __init__(self, params, lr=0.01, k=5, alpha=0.5):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(k=k, alpha=alpha, lookahead_step=0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["k"] == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p.copy_(slow.lerp_(p, group["alpha"]))


class LookaheadInState(Lookahead):
    @torch.no_grad()
    def step(self, closure=None):
        params = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        before = [p.clone() for p, _ in params]
        torch.optim.AdamW.step(self)
        for (p, group), first in zip(params, before):
            slow, is_due = (
                self.state[p].setdefault("slow", first),
                self.state[p]["step"] % group["k"] == 0,
            )
            slow.copy_(torch.where(is_due, slow.lerp(p, group["alpha"]), slow))
            p.copy_(torch.where(is_due, slow, p))


class ScheduleFree(Optimizer):
    """Defazio et al., The Road Less Scheduled, 2024: AdamW. Steps and weights are counted in the groups."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.999), warmup=4):
        counts = {"k": 0, "weight_sum": 0.0, "lr_max": 0.0}
        super().__init__(params, {"lr": lr, "betas": betas, "warmup": warmup, **counts})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"] = group["k"] + 1
            rate = group["lr"] * min(1.0, k / group["warmup"])
            group["lr_max"] = max(rate, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, k, rate, weight / group["weight_sum"], group["betas"])

    def update(self, p, k, rate, share, betas):
        state, (beta1, beta2) = self.state[p], betas
        if "z" not in state:
            state.update(z=p.clone(), exp_avg_sq=torch.zeros_like(p))
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        normed = p.grad / ((state["exp_avg_sq"] / (1 - beta2**k)).sqrt() + 1e-8)
        p.lerp_(state["z"], share).add_(normed * (rate * (beta1 * (1 - share) - 1)))
        state["z"].sub_(normed * rate)


class ScheduleFreeInState(ScheduleFree):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "k" not in state:
                    state.update(
                        k=torch.zeros(()), weight_sum=torch.zeros(()), lr_max=torch.zeros(())
                    )
                state["k"] += 1
                rate = group["lr"] * (state["k"] / group["warmup"]).clamp(max=1.0)
                state["lr_max"].copy_(torch.maximum(state["lr_max"], rate))
                weight = state["lr_max"] ** 2
                state["weight_sum"] += weight
                self.update(p, state["k"], rate, weight / state["weight_sum"], group["betas"])


class Prodigy(Optimizer):
    """Mishchenko and Defazio, Prodigy, 2023. The estimate d and its numerator are in the groups."""

    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), d0=1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "d0": d0, "d": d0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["d"], group["numerator"] = (
            x.item() for x in self.update(group, group["d"], group["numerator"])
        )

    def update(self, group, d, numerator):
        """Update the parameters, and return the new estimate and its numerator."""
        (beta1, beta2), params = group["betas"], [p for p in group["params"] if p.grad is not None]
        for p in params:
            if "first" not in self.state[p]:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq", "s")}
                self.state[p].update(first=p.clone(), **zeros)
        beta3, rate = beta2**0.5, d * group["lr"]
        numerator, denominator = numerator * beta3, 0.0
        for p in params:
            state, g = self.state[p], p.grad
            numerator = numerator + d / group["d0"] * rate * (g * (state["first"] - p)).sum()
            state["exp_avg"].mul_(beta1).add_(d * (1 - beta1) * g)
            state["exp_avg_sq"].mul_(beta2).add_(d * d * (1 - beta2) * g * g)
            state["s"].mul_(beta3).add_(d / group["d0"] * rate * g)
            denominator = denominator + state["s"].abs().sum()
        estimate = numerator / denominator
        for p in params:
            state = self.state[p]
            p.sub_(rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + d * 1e-8))
        return torch.maximum(estimate, torch.as_tensor(d)), numerator


class ProdigyInState(Prodigy):
    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        shared = self.state[group["params"][0]]
        if "d" not in shared:
            shared.update(d=torch.tensor(group["d0"]), numerator=torch.zeros(()))
        d, numerator = self.update(group, shared["d"].clone(), shared["numerator"])
        shared["d"].copy_(d)
        shared["numerator"].copy_(numerator)
