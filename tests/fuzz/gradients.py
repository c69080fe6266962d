"""The ways in which a random program takes its gradients: torch.func, autograd, `.backward()`, vmap."""

from __future__ import annotations

import torch
from torch.func import grad, grad_and_value, vjp, vmap

import ztrans as zt

from .programs import Program, Tensors


def gradient(
    program: Program, trained: Tensors, fixed: Tensors, x: torch.Tensor, ids: torch.Tensor
) -> tuple[Tensors, torch.Tensor]:
    """The gradients and the loss of these samples, computed in the program's style."""
    if program.pattern == "squared":
        return _squared(program, trained, fixed, x, ids)
    ways = {"func": _func, "vjp": _vjp, "each": _each, "autograd": _autograd, "backward": _backward}
    return ways[program.style](program, trained, fixed, x, ids)


def _func(program, trained, fixed, x, ids):
    return grad_and_value(program.loss)(trained, fixed, x, ids)


def _vjp(program, trained, fixed, x, ids):
    value, pull = vjp(lambda p: program.loss(p, fixed, x, ids), trained)
    return pull(torch.ones_like(value))[0], value


def _each(program, trained, fixed, x, ids):
    """One gradient for each sample; the program averages them itself."""
    sample_loss = lambda p, row, number: program.loss(p, fixed, row[None], number[None])
    sample_grads = vmap(grad(sample_loss), (None, 0, 0))(trained, x, ids)
    return zt.pmean({k: g.mean(0) for k, g in sample_grads.items()}, "dp"), program.loss(
        trained, fixed, x, ids
    )


def _autograd(program, trained, fixed, x, ids):
    leaves = _leaves(trained)
    value = program.loss(leaves, fixed, x, ids)
    return _given(
        leaves, torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
    ), value.detach()


def _backward(program, trained, fixed, x, ids):
    leaves = _leaves(trained)
    value = program.loss(leaves, fixed, x, ids)
    value.backward()
    return _given(leaves, [p.grad for p in leaves.values()]), value.detach()


def _squared(program, trained, fixed, x, ids):
    """The gradient of the loss plus the square of its gradient (a gradient penalty)."""
    leaves = _leaves(trained)
    value = program.loss(leaves, fixed, x, ids)
    inner = torch.autograd.grad(value, [*leaves.values()], create_graph=True, allow_unused=True)
    total = value + 0.1 * sum((g * g.conj()).real.sum() for g in inner if g is not None)
    return _given(
        leaves, torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    ), total.detach()


def _leaves(trained: Tensors) -> Tensors:
    return {k: p.detach().requires_grad_() for k, p in trained.items()}


def _given(leaves: Tensors, grads) -> Tensors:
    """The gradients by name, with zeros for a leaf that has none."""
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(leaves.items(), grads)}
