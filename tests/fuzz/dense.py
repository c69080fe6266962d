"""Layers that are matrix products, norms, convolutions and attention."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F

from .layer import Layer, Leaf, size


def linear(chance: Random, width: int) -> Layer:
    out = size(chance)
    return Layer(
        f"linear {width}-{out}",
        (Leaf((out, width)), Leaf((out,))),
        lambda x, ids, w, b: F.linear(x, w, b),
        out,
    )


def gated(chance: Random, width: int) -> Layer:
    out = size(chance)
    run = lambda x, ids, w: F.silu((x @ w)[:, :out]) * (x @ w)[:, out:]
    return Layer(f"gated {width}-{out}", (Leaf((width, 2 * out)),), run, out)


def low_rank(chance: Random, width: int) -> Layer:
    rank, out = chance.randint(1, 3), size(chance)
    leaves = Leaf((rank, width)), Leaf((out, rank))
    return Layer(f"low rank {width}-{rank}-{out}", leaves, lambda x, ids, a, b: x @ a.T @ b.T, out)


def tied(chance: Random, width: int) -> Layer:
    inner = size(chance)
    run = lambda x, ids, w: torch.tanh(x @ w.T) @ w + w.sum(0)
    return Layer(f"tied {width}-{inner}", (Leaf((inner, width)),), run, width)


def stacked(chance: Random, width: int) -> Layer:
    depth = chance.randint(1, 3)

    def run(x, ids, w):
        for each in w.unbind():
            x = x + torch.tanh(x @ each)
        return x

    return Layer(f"stacked {depth}x{width}", (Leaf((depth, width, width)),), run, width)


def experts(chance: Random, width: int) -> Layer:
    count, out = chance.randint(1, 4), size(chance)

    def run(x, ids, gate, w):
        weights = torch.softmax(x @ gate, -1)
        return torch.einsum("be,bi,eio->bo", weights, x, w)

    return Layer(
        f"experts {count}x{width}-{out}",
        (Leaf((width, count)), Leaf((count, width, out))),
        run,
        out,
    )


def layer_norm(chance: Random, width: int) -> Layer:
    run = lambda x, ids, w, b: F.layer_norm(x, (width,), 1 + w, b, eps=0.1)
    return Layer(f"layer norm {width}", (Leaf((width,)), Leaf((width,))), run, width)


def weight_norm(chance: Random, width: int) -> Layer:
    out = size(chance)
    run = lambda x, ids, v, g: x @ (g * v / (1 + v.norm(dim=1, keepdim=True))).T
    return Layer(f"weight norm {width}-{out}", (Leaf((out, width)), Leaf((out, 1))), run, out)


def conv1d(chance: Random, width: int) -> Layer:
    channels, kernel = chance.randint(1, 4), chance.choice([1, 3])
    mode = chance.choice(["zeros", "circular"]) if width > 1 else "zeros"

    def run(x, ids, w, b):
        padded = F.pad(
            x[:, None], (kernel // 2,) * 2, mode="circular" if mode == "circular" else "constant"
        )
        return F.conv1d(padded, w, b).flatten(1)

    return Layer(
        f"conv1d {channels} {mode}",
        (Leaf((channels, 1, kernel)), Leaf((channels,))),
        run,
        channels * width,
    )


def conv2d(chance: Random, width: int) -> Layer:
    channels, groups = 2 * chance.randint(1, 2), chance.choice([1, 2])
    groups = min(groups, channels * width // 2)  # PyTorch refuses to normalise a group of one value

    def run(x, ids, first, second, scale):
        image = F.conv2d(x[:, None, :, None], first, padding=(1, 0))
        image = F.group_norm(image, groups, 1 + scale, eps=0.1)
        return F.conv_transpose2d(image, second, groups=groups).mean(3).sum(1)

    leaves = Leaf((channels, 1, 3, 1)), Leaf((channels, 1, 1, 2)), Leaf((channels,))
    return Layer(f"conv2d {channels}/{groups}", leaves, run, width)


def attention(chance: Random, width: int) -> Layer:
    tokens, inner = chance.choice([1, 2, 3]), chance.randint(1, 4)
    fused = chance.random() < 0.5

    def run(x, ids, qkv, out):
        q, k, v = (x[:, None, :] * torch.arange(1.0, tokens + 1)[:, None] @ qkv).split(inner, 2)
        if fused:
            mixed = F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], is_causal=True
            )[:, 0]
        else:
            mixed = (
                torch.softmax(torch.baddbmm(torch.zeros(()), q, k.mT, alpha=inner**-0.5), -1) @ v
            )
        return (mixed @ out).flatten(1)

    leaves = Leaf((width, 3 * inner)), Leaf((inner, 2))
    return Layer(f"attention {tokens}x{inner}", leaves, run, 2 * tokens, once=fused)


def recurrent(chance: Random, width: int) -> Layer:
    inner = chance.randint(1, 4)

    def run(x, ids, w, u):
        h = c = x.new_zeros(x.shape[0], inner)
        for k in range(2):
            i, f, g, o = (x.roll(k, 1) @ w.T + h @ u.T).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h

    return Layer(
        f"recurrent {width}-{inner}",
        (Leaf((4 * inner, width)), Leaf((4 * inner, inner))),
        run,
        inner,
    )


LAYERS = (
    *(linear, gated, low_rank, tied, stacked, experts, layer_norm, weight_norm),
    *(conv1d, conv2d, attention, recurrent),
)
