"""Layers whose leaves have an unusual dtype, are viewed as another dtype, are rounded, are empty, or have one row."""

from __future__ import annotations

from random import Random

import torch

from .layer import Layer, Leaf, size


def packed(chance: Random, width: int) -> Layer:
    """Frozen fp64 numbers that the state stores as bytes."""
    out = size(chance)
    run = lambda x, ids, w: x @ w.view(torch.float64).T
    return Layer(
        f"packed {width}-{out}", (Leaf((out, 8 * width), torch.uint8, trained=False),), run, out
    )


def integers(chance: Random, width: int) -> Layer:
    """Frozen fp64 numbers that the state stores as integers."""
    run = lambda x, ids, w: x * w.view(torch.float64)
    return Layer(f"integers {width}", (Leaf((width,), torch.int64, trained=False),), run, width)


def signs(chance: Random, width: int) -> Layer:
    """Reads the sign bits of a trained leaf, by a view as integers."""
    out = size(chance)
    run = lambda x, ids, w: x @ torch.where(w.detach().view(torch.int64) < 0, -w, w.abs() + 0.1).T
    return Layer(f"signs {width}-{out}", (Leaf((out, width)),), run, out)


def exponents(chance: Random, width: int) -> Layer:
    """Reads the exponents of a trained leaf, from the upper 32 bits of each fp64 number."""
    out = size(chance)

    def run(x, ids, w):
        high = w.detach().view(torch.int32)[:, 1::2] >> 20
        return x @ (w * (1 + (high & 7).to(w.dtype) / 8)).T

    return Layer(f"exponents {width}-{out}", (Leaf((out, width)),), run, out)


def pairs(chance: Random, width: int) -> Layer:
    """A real leaf whose last dim holds pairs, which are viewed as complex numbers."""
    out = size(chance)
    run = lambda x, ids, w: (
        (x.to(torch.complex128) @ torch.view_as_complex(w).T).abs().add(0.1).log()
    )
    return Layer(f"pairs {width}-{out}", (Leaf((out, width, 2)),), run, out)


def wide(chance: Random, width: int) -> Layer:
    """A real leaf viewed as complex numbers, without a dim of two: neighbours in a row form a number."""
    out = size(chance)
    run = lambda x, ids, w: (
        (x.to(torch.complex128) @ w.detach().view(torch.complex128).T).real + x @ w[:, ::2].T
    )
    return Layer(f"wide {width}-{out}", (Leaf((out, 2 * width)),), run, out)


def half(chance: Random, width: int) -> Layer:
    """A leaf that is cast to half precision where it is used, so backward rounds its gradient."""
    out, narrow = size(chance), chance.choice([torch.bfloat16, torch.float16, torch.float32])
    transposed = chance.random() < 0.5

    def run(x, ids, w):
        low = w.T.to(narrow) if transposed else w.to(narrow).T
        return x @ low.to(x.dtype)

    return Layer(
        f"half {width}-{out} {str(narrow)[6:]}", (Leaf((out, width)),), run, out, rounds=True
    )


def half_bits(chance: Random, width: int) -> Layer:
    """Reads the sign bits of a leaf after it is rounded to bf16."""

    def run(x, ids, w):
        negative = w.detach().to(torch.bfloat16).view(torch.int16) < 0
        return torch.where(negative, x * w, x + w)

    return Layer(f"half bits {width}", (Leaf((width,)),), run, width)


def eighth(chance: Random, width: int) -> Layer:
    """Frozen fp8 numbers, with a trained scale for each row."""
    out, narrow = size(chance), chance.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    run = lambda x, ids, w, scale: (x @ w.to(x.dtype).T) * scale
    return Layer(
        f"eighth {width}-{out}", (Leaf((out, width), narrow, trained=False), Leaf((out,))), run, out
    )


def empty(chance: Random, width: int) -> Layer:
    """A leaf without elements, which is used and trained like any other."""
    shape = chance.choice([(0, width), (width, 0), (0,), (3, 0, 2)])

    def run(x, ids, w):
        if shape == (0, width):
            return torch.cat([x, x @ w.T], 1)
        if shape == (width, 0):
            return x + (x @ w).sum(1, keepdim=True)
        return x + w.sum()

    return Layer(f"empty {list(shape)}", (Leaf(shape),), run, width)


def one_row(chance: Random, width: int) -> Layer:
    """A leaf of one row, a leaf of one element, and a leaf without dims."""
    run = lambda x, ids, row, scale, scalar: x * row + scale * scalar
    return Layer(f"one row {width}", (Leaf((1, width)), Leaf((1,)), Leaf(())), run, width)


def overlapping(chance: Random, width: int) -> Layer:
    """A view whose rows overlap: each row starts one element after the last one."""
    run = lambda x, ids, w: x @ w.unfold(0, width, 1).T
    return Layer(f"overlapping {width}", (Leaf((2 * width - 1,)),), run, width, placed=False)


def rearranged(chance: Random, width: int) -> Layer:
    """A leaf that is read through a chain of views of many kinds."""
    out = 2 * chance.randint(1, 3)

    def run(x, ids, w):
        first, second = (
            w.view(2, out // 2, width).transpose(0, 1).reshape(out, width).split(out // 2)
        )
        return (
            x @ torch.cat([second.flip(0), first.narrow(0, 0, out // 2)]).movedim(0, 1).contiguous()
        )

    return Layer(f"rearranged {width}-{out}", (Leaf((out, width)),), run, out)


LAYERS = (
    *(packed, integers, signs, exponents, pairs, wide, half, half_bits, eighth),
    *(empty, one_row, overlapping, rearranged),
)
