"""Causal attention whose sequence is cut over the ranks of axis `cp`, written in the step in two ways.

Every rank has the positions of its tokens in the batch, so all ranks run one program.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

HEADS, WIDTH, TOKENS = 2, 8, 12


def state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        k: torch.randn(WIDTH, WIDTH, generator=random, dtype=torch.float64) / 2
        for k in ("q", "k", "v", "o")
    }


def batches(steps: int, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences, and the position of each token."""
    random = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, TOKENS, WIDTH, generator=random, dtype=torch.float64)
    return [(draw(), torch.arange(TOKENS).expand(rows, TOKENS)) for _ in range(steps)]


def part(
    batch: tuple[torch.Tensor, ...], dp: int, cp: int, ranks: tuple[int, int] = (2, 2)
) -> tuple[torch.Tensor, ...]:
    """The tokens of one rank: some rows, and of these some positions."""
    return tuple(x.chunk(ranks[0])[dp].chunk(ranks[1], 1)[cp].contiguous() for x in batch)


def gathered(gather: Callable) -> Callable:
    """Attention to keys and values that `gather` brings from all ranks, along dim 1."""

    def attention(q, k, v, positions):
        keys, values, at = gather(k), gather(v), gather(positions)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(
            positions[:, None, :, None] < at[:, None, None, :], float("-inf")
        )
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)

    return attention


def ring(shift: Callable, ranks: int) -> Callable:
    """Attention to the keys and values of one rank after the other; `shift` brings those of the rank before."""

    def attention(q, k, v, positions):
        at, terms = positions, []
        for hop in range(ranks):
            if hop:
                k, v, at = shift(k), shift(v), shift(at)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(positions[:, None, :, None] < at[:, None, None, :], -1e9)
            most = scores.amax(-1, keepdim=True)
            weights = (scores - most).exp()
            terms.append(
                (most, weights.sum(-1, keepdim=True), torch.einsum("bhqk,bkhd->bhqd", weights, v))
            )
        top = torch.stack([most for most, _, _ in terms]).amax(0)
        total = sum((most - top).exp() * weight for most, weight, _ in terms)
        return (sum((most - top).exp() * value for most, _, value in terms) / total).transpose(1, 2)

    return attention


def make_step(attention: Callable) -> Callable:
    """A train step of one layer of attention, with SGD."""

    def step(state, x, positions):
        w = {k: p.detach().requires_grad_() for k, p in state.items()}
        q, k, v = ((x @ w[name]).unflatten(-1, (HEADS, -1)) for name in "qkv")
        loss = (attention(q, k, v, positions).flatten(2) @ w["o"] - x).square().mean()
        grads = torch.autograd.grad(loss, list(w.values()))
        return {k: p - 0.5 * g for (k, p), g in zip(state.items(), grads)}, loss.detach()

    return step


plain_step = make_step(gathered(lambda x: x))
