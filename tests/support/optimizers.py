"""Optimizers that are not part of PyTorch, with unusual first steps and states."""

from __future__ import annotations

import math

import torch
from torch.optim import SGD, Optimizer


class RMSpropTF(Optimizer):
    """RMSprop as in TensorFlow: the average of squares starts at ones. (After timm's.)"""

    def __init__(self, params, lr=0.01, alpha=0.9, eps=1e-10, momentum=0.9):
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["square_avg"] = torch.ones_like(p)
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["step"] += 1
                square_avg, buffer = state["square_avg"], state["momentum_buffer"]
                square_avg.add_(p.grad.pow(2) - square_avg, alpha=1.0 - group["alpha"])
                average = square_avg.add(group["eps"]).sqrt_()
                buffer.mul_(group["momentum"]).addcdiv_(p.grad, average, value=group["lr"])
                p.add_(-buffer)


class Adopt(Optimizer):
    """ADOPT (Taniguchi et al., 2024): its first step only stores the square of the gradient."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = p.grad * p.grad
                    continue
                state["step"] += 1
                normed = p.grad / state["exp_avg_sq"].sqrt().clamp_(min=1e-6)
                state["exp_avg"].lerp_(normed, 1 - beta1)
                p.add_(state["exp_avg"], alpha=-group["lr"])
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)


class Counting(Optimizer):
    """Adam whose step count and bias corrections are Python numbers."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(count=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                before = state["count"]
                state["count"] += 1
                first, second = 1 - beta1 ** state["count"], 1 - beta2 ** (before + 1)
                state["m"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                rate = group["lr"] * second**0.5 / first
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)


class Reading(Optimizer):
    """A sign method. It reads its step count from a tensor by `.item()`, and keeps its averages in a list."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"], state["averages"] = (
                        torch.zeros(()),
                        [torch.zeros_like(p), torch.zeros_like(p)],
                    )
                    state["kind"] = "sign"
                state["count"].add_(1)
                fast, slow = state["averages"]
                fast.lerp_(p.grad, 1 - group["beta"])
                slow.lerp_(p.grad, 0.5 / (1 + state["count"].item()))
                p.sub_((fast + slow).sign(), alpha=group["lr"] / math.pi / state["count"].item())


class Dampened(SGD):
    """PyTorch's SGD with half of the gradient in the first step of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        fresh = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and not self.state[p]
        ]
        for p in fresh:
            p.grad.mul_(0.5)
        return super().step(closure)


class Unseen(Optimizer):
    """An optimizer that cannot be copied, because it holds a lock."""

    def __init__(self, params, lr=0.01):
        import threading

        super().__init__(params, {"lr": lr})
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("last", torch.zeros_like(p)).copy_(p.grad)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


class Stateless(Optimizer):
    """Descent without a state."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class Floored(Optimizer):
    """It divides by a number of its group, and rounds the quotient down."""

    def __init__(self, params, by=7.0):
        super().__init__(params, {"by": by})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(group["by"], rounding_mode="floor")
