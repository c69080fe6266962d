"""Layers that use function transforms themselves (vmap, jvp, grad, checkpoint), and layers that index and sort."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils.checkpoint import checkpoint

import ztrans as zt

from .layer import IDS, Layer, Leaf, size


def mapped(chance: Random, width: int) -> Layer:
    """`vmap` over the samples."""
    out = size(chance)
    run = lambda x, ids, w: vmap(lambda row: torch.tanh(w @ row) * row.sum())(x)
    return Layer(f"mapped {width}-{out}", (Leaf((out, width)),), run, out)


def mapped_leaf(chance: Random, width: int) -> Layer:
    """`vmap` over the first dim of two leaves."""
    count = chance.randint(1, 4)
    run = lambda x, ids, w, b: vmap(lambda v, c: torch.tanh(x @ v + c), out_dims=1)(w, b)
    return Layer(f"mapped leaf {count}x{width}", (Leaf((count, width)), Leaf((count,))), run, count)


def tangent(chance: Random, width: int) -> Layer:
    """A value, and its derivative in the direction of the rolled input (`jvp`)."""
    out = size(chance)

    def run(x, ids, w):
        value, change = jvp(lambda z: torch.tanh(z @ w.T), (x,), (x.roll(1, 1),))
        return value + change

    mapped = (
        width > 1
    )  # under vmap, make_fx itself takes the zero gradient of one column for a meta tensor
    return Layer(f"tangent {width}-{out}", (Leaf((out, width)),), run, out, mapped=mapped)


def leaf_tangent(chance: Random, width: int) -> Layer:
    """The derivative with respect to a leaf, in a direction that is computed from the leaf (`jvp`)."""
    run = lambda x, ids, w: jvp(lambda v: torch.tanh(x * v), (w,), (w.sin(),))[1]
    return Layer(f"leaf tangent {width}", (Leaf((width,)),), run, width)


def force(chance: Random, width: int) -> Layer:
    """The gradient of an energy with respect to the input, as in molecular models."""
    run = lambda x, ids, w: grad(lambda z: (z @ w.T).tanh().square().sum())(x)
    return Layer(f"force {width}", (Leaf((size(chance), width)),), run, width)


def jacobian(chance: Random, width: int) -> Layer:
    run = lambda x, ids, w: vmap(jacfwd(lambda row: torch.tanh(w @ row)))(x).sum(1)
    return Layer(f"jacobian {width}", (Leaf((2, width)),), run, width)


def recomputed(chance: Random, width: int) -> Layer:
    out = size(chance)
    inner = lambda x, a, b: torch.tanh(x @ a.T) @ b
    run = lambda x, ids, w, v: checkpoint(inner, x, w, v, use_reentrant=False)
    return Layer(
        f"recomputed {width}-{out}", (Leaf((3, width)), Leaf((3, out))), run, out, by_autograd=True
    )


def embedding(chance: Random, width: int) -> Layer:
    kind = chance.choice(["embedding", "one hot", "index", "gather"])

    def run(x, ids, table):
        if kind == "embedding":
            return x + F.embedding(ids, table)
        if kind == "one hot":
            return x + F.one_hot(ids, IDS).to(x.dtype) @ table
        if kind == "index":
            return x * table[ids]
        return x + table.gather(0, ids[:, None].expand(-1, width))

    mapped = kind != "one hot"  # PyTorch looks at the values of ids
    return Layer(f"{kind} {width}", (Leaf((IDS, width)),), run, width, mapped=mapped)


def scattered(chance: Random, width: int) -> Layer:
    """Features are added into the places that an index gives."""
    out = size(chance)
    by = chance.choice(["scatter_add", "index_add", "index_put", "masked"])

    def run(x, ids, w):
        places = (torch.arange(width) * 7 + 3) % out
        zeros = x.new_zeros(x.shape[0], out)
        if by == "scatter_add":
            return zeros.scatter_add(1, places.expand(x.shape[0], -1), x * w)
        if by == "index_add":
            return zeros.index_add(1, places, x * w)
        if by == "index_put":
            rows = torch.arange(x.shape[0])[:, None]
            return zeros.index_put((rows, places[None]), x * w, accumulate=True)
        return zeros + (x * w).masked_fill(places % 2 == 0, 0.5).sum(1, keepdim=True)

    return Layer(f"{by} {width}-{out}", (Leaf((width,)),), run, out)


def sorted_features(chance: Random, width: int) -> Layer:
    by = chance.choice(["sort", "cumsum", "topk", "amax", "median", "logsumexp", "take"])

    def run(x, ids, w):
        if by == "sort":
            return x.sort(1, descending=True).values * w
        if by == "cumsum":
            return (x * w).cumsum(1) / width
        if by == "take":
            return torch.take_along_dim(x * w, (x.detach().argsort(1) + 1) % width, 1)
        if by == "topk":
            return x + (x * w).topk(1, 1).values
        if by == "median":
            return x - (x * w).median(1, keepdim=True).values
        return x - getattr(x * w, by)(1, keepdim=True)

    return Layer(f"{by} {width}", (Leaf((width,)),), run, width)


def leaf_reduced(chance: Random, width: int) -> Layer:
    """A number that is computed from a leaf alone scales the input."""
    by = chance.choice(["sum", "mean", "std", "norm", "amax", "prod", "diagonal", "logsumexp"])

    def run(x, ids, w):
        if by == "prod":
            number = w.cos().prod()
        elif by == "diagonal":
            number = w.diagonal().sum()
        elif by == "logsumexp":
            number = w.logsumexp((0, 1))
        elif by == "std":
            number = w.var()
        else:
            number = getattr(w, by)()
        return x * (1 + number.tanh())

    return Layer(f"{by} of a leaf", (Leaf((size(chance) + 1, width)),), run, width)


def batch_norm(chance: Random, width: int) -> Layer:
    """Batch norm written by hand, with the statistics of the whole batch."""

    def run(x, ids, w):
        mean = zt.pmean(x.mean(0), "dp")
        spread = zt.pmean((x - mean).square().mean(0), "dp")
        return (x - mean) * torch.rsqrt(spread + 0.1) * (1 + w)

    return Layer(f"batch norm {width}", (Leaf((width,)),), run, width, together=True)


LAYERS = (
    *(mapped, mapped_leaf, tangent, leaf_tangent, force, jacobian, recomputed),
    *(embedding, scattered, sorted_features, leaf_reduced, batch_norm),
)
