"""Layers with Fourier transforms, complex leaves and linear algebra."""

from __future__ import annotations

from random import Random

import torch

from .layer import Layer, Leaf, size


def spectral(chance: Random, width: int) -> Layer:
    """A filter: the spectrum of the input is multiplied by a complex leaf."""
    run = lambda x, ids, w: torch.fft.irfft(torch.fft.rfft(x) * w, n=width)
    return Layer(f"spectral {width}", (Leaf((width // 2 + 1,), torch.complex128),), run, width)


def complex_linear(chance: Random, width: int) -> Layer:
    out = size(chance)

    def run(x, ids, w):
        y = x.to(torch.complex128) @ w.mH
        return torch.view_as_real(y).sum(-1) + y.conj().imag

    return Layer(
        f"complex linear {width}-{out}",
        (Leaf((out, width), torch.complex128),),
        run,
        out,
        mapped=False,
    )


def transformed(chance: Random, width: int) -> Layer:
    """A product with the Fourier transform of a leaf."""
    out = size(chance)
    run = lambda x, ids, w: x @ torch.fft.fft(w, dim=chance_dim).real.T
    chance_dim = chance.choice([0, 1])
    return Layer(f"transformed {width}-{out}/{chance_dim}", (Leaf((out, width)),), run, out)


def solved(chance: Random, width: int) -> Layer:
    """A product with the inverse of a matrix, computed by `solve`."""

    def run(x, ids, w):
        return torch.linalg.solve(w @ w.T + torch.eye(width, dtype=w.dtype), x.T).T

    return Layer(f"solved {width}", (Leaf((width, width)),), run, width)


def cholesky(chance: Random, width: int) -> Layer:
    def run(x, ids, w):
        return x @ torch.linalg.cholesky(w @ w.T + torch.eye(width, dtype=w.dtype))

    return Layer(f"cholesky {width}", (Leaf((width, width)),), run, width)


def orthogonal(chance: Random, width: int) -> Layer:
    """A product with an orthogonal matrix, which comes from a matrix exponential or from a QR decomposition."""
    by_exponential = chance.random() < 0.5

    def run(x, ids, w):
        if by_exponential:
            return x @ torch.linalg.matrix_exp(w - w.T)
        return x @ torch.linalg.qr(w + 3 * torch.eye(width, dtype=w.dtype)).Q

    return Layer(
        f"orthogonal {width} {'exp' if by_exponential else 'qr'}",
        (Leaf((width, width)),),
        run,
        width,
    )


def determinant(chance: Random, width: int) -> Layer:
    """The input is scaled by the logarithm of a determinant."""

    def run(x, ids, w):
        return x * torch.linalg.slogdet(w @ w.T + torch.eye(width, dtype=w.dtype)).logabsdet.tanh()

    return Layer(f"determinant {width}", (Leaf((width, width)),), run, width)


def mixed(chance: Random, width: int) -> Layer:
    """The Fourier transform of the features. The layer has no leaf."""
    return Layer("mixed", (), lambda x, ids: torch.fft.fft(x, dim=1).real / width**0.5, width)


LAYERS = (spectral, complex_linear, transformed, solved, cholesky, orthogonal, determinant, mixed)
