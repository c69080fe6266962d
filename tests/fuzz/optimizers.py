"""Optimizers written by hand. Each has the state that it keeps for one leaf, and the update of that leaf.

None of them magnifies rounding errors: where a gradient is zero up to rounding, so is the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

Kept = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Optimizer:
    """`update(p, g, kept, step)` returns the new leaf and its new optimizer state; `step` counts from one.

    complex: the update works on complex leaves as they are. Otherwise it is given a view as pairs of real numbers.
    """

    name: str
    init: Callable[[torch.Tensor], Kept]
    update: Callable[..., tuple[torch.Tensor, Kept]]
    complex: bool = False

    def first(self, p: torch.Tensor) -> Kept:
        return self.init(self._seen(p))

    def apply(
        self, p: torch.Tensor, g: torch.Tensor, kept: Kept, step: torch.Tensor
    ) -> tuple[torch.Tensor, Kept]:
        new, kept = self.update(self._seen(p), self._seen(g), kept, step)
        return (torch.view_as_complex(new) if p.is_complex() and not self.complex else new), kept

    def _seen(self, p: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(p) if p.is_complex() and not self.complex else p


def _zeros(*names: str) -> Callable[[torch.Tensor], Kept]:
    return lambda p: {name: torch.zeros_like(p) for name in names}


def sgd(chance: Random) -> Optimizer:
    rate = chance.choice([0.1, 0.01])
    return Optimizer("sgd", _zeros(), lambda p, g, k, t: (p - rate * g, k), complex=True)


def nesterov(chance: Random) -> Optimizer:
    decay = chance.choice([0.0, 0.1])

    def update(p, g, k, t):
        g = g + decay * p
        m = 0.9 * k["m"] + g
        return p - 0.05 * (g + 0.9 * m), {"m": m}

    return Optimizer("nesterov", _zeros("m"), update, complex=True)


def adam(chance: Random) -> Optimizer:
    """Adam, AMSGrad (with `greatest`) and AdamW (with `decay`)."""
    greatest, decay = chance.random() < 0.3, chance.choice([0.0, 0.1])

    def update(p, g, k, t):
        m, v = torch.lerp(k["m"], g, 0.1), k["v"].mul(0.95).addcmul(g, g, value=0.05)
        top = torch.maximum(k["top"], v)
        scale = 0.02 * torch.sqrt(1 - 0.95**t) / (1 - 0.9**t)
        return p * (1 - 0.02 * decay) - scale * m / ((top if greatest else v).sqrt() + 1e-2), {
            "m": m,
            "v": v,
            "top": top,
        }

    return Optimizer("adam", _zeros("m", "v", "top"), update)


def rmsprop(chance: Random) -> Optimizer:
    """Centred RMSprop, computed in place on copies."""

    def update(p, g, k, t):
        v, m, p = k["v"].clone(), k["m"].clone(), p.clone()
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        m.lerp_(g, 0.1)
        p.addcdiv_(g, (v - m * m).clamp_(min=0).add_(1e-2).sqrt_(), value=-0.02)
        return p, {"v": v, "m": m}

    return Optimizer("rmsprop", _zeros("v", "m"), update)


def adagrad(chance: Random) -> Optimizer:
    update = lambda p, g, k, t: (
        p - 0.1 * g * (k["s"] + g * g + 0.1).rsqrt(),
        {"s": k["s"] + g * g},
    )
    return Optimizer("adagrad", _zeros("s"), update)


def adadelta(chance: Random) -> Optimizer:
    def update(p, g, k, t):
        s = 0.9 * k["s"] + 0.1 * g.square()
        change = g * ((k["d"] + 0.01) / (s + 0.01)).sqrt()
        return p - 0.1 * change, {"s": s, "d": 0.9 * k["d"] + 0.1 * change.square()}

    return Optimizer("adadelta", _zeros("s", "d"), update)


def lion(chance: Random) -> Optimizer:
    """Lion with a steep tanh in place of the sign, so that a rounding error cannot flip the update."""
    update = lambda p, g, k, t: (
        p - 0.01 * torch.tanh(100 * torch.lerp(k["m"], g, 0.1)),
        {"m": torch.lerp(k["m"], g, 0.01)},
    )
    return Optimizer("lion", _zeros("m"), update)


def lamb(chance: Random) -> Optimizer:
    """LAMB: the update of each leaf is scaled by the ratio of two norms, of the leaf and of its momentum."""
    order = chance.choice([1, 2, 3, float("inf")])

    def update(p, g, k, t):
        m = torch.lerp(k["m"], g, 0.1)
        p_norm = torch.linalg.vector_norm(p, order) if p.numel() else p.new_zeros(())
        m_norm = torch.linalg.vector_norm(m, order) if p.numel() else p.new_zeros(())
        return p - 0.05 * m * torch.where(p_norm > 0.1, p_norm / (m_norm + 0.1), 1.0), {"m": m}

    return Optimizer(f"lamb {order}", _zeros("m"), update)


def adafactor(chance: Random) -> Optimizer:
    """Adafactor: the second moments of a matrix are estimated from the averages of its rows and of its columns."""

    def init(p):
        if p.ndim < 2:
            return {"v": torch.zeros_like(p)}
        return {
            "rows": p.new_zeros(p.shape[:-1]),
            "columns": p.new_zeros((*p.shape[:-2], p.shape[-1])),
        }

    def update(p, g, k, t):
        square = g * g + 1e-3
        if p.ndim < 2 or not p.numel():
            return p - 0.05 * g / (square.sqrt() + 0.1), k
        rows, columns = (
            torch.lerp(k["rows"], square.mean(-1), 0.1),
            torch.lerp(k["columns"], square.mean(-2), 0.1),
        )
        v = rows[..., None] * columns[..., None, :] / rows.mean(-1, keepdim=True)[..., None]
        change = g / (v.sqrt() + 0.1)
        return p - 0.05 * change / torch.clamp(change.square().mean().sqrt(), min=1.0), {
            "rows": rows,
            "columns": columns,
        }

    return Optimizer("adafactor", init, update)


def muon(chance: Random) -> Optimizer:
    """Muon: the update is made orthogonal by a few steps of the Newton-Schulz iteration."""
    steps = chance.randint(1, 4)

    def update(p, g, k, t):
        m = 0.9 * k["m"] + g
        if p.ndim != 2:
            return p - 0.05 * m, {"m": m}
        x = m.mT if m.shape[0] > m.shape[1] else m
        x = x / (x.norm() + 0.1)
        for _ in range(steps):
            a = x @ x.mT
            x = 1.5 * x - 0.5 * a @ x
        return p - 0.05 * (x.mT if m.shape[0] > m.shape[1] else x), {"m": m}

    return Optimizer(f"muon {steps}", _zeros("m"), update)


def preconditioned(chance: Random) -> Optimizer:
    """As Shampoo: both sides of a gradient are multiplied by inverse covariances, computed by Newton's iteration."""

    def init(p):
        if p.ndim != 2:
            return {}
        rows, columns = (torch.eye(n, dtype=p.dtype) for n in p.shape)
        return {"rows": rows, "columns": columns}

    def inverse(a):
        eye = torch.eye(a.shape[0], dtype=a.dtype)
        x = eye / (a.diagonal().sum() + 0.1)
        for _ in range(3):
            x = x @ (2 * eye - a @ x)
        return x

    def update(p, g, k, t):
        if p.ndim != 2:
            return p - 0.05 * g, k
        rows, columns = (
            torch.lerp(k["rows"], g @ g.mT, 0.1),
            torch.lerp(k["columns"], g.mT @ g, 0.1),
        )
        return p - 0.05 * inverse(rows) @ g @ inverse(columns), {"rows": rows, "columns": columns}

    return Optimizer("preconditioned", init, update)


def yogi(chance: Random) -> Optimizer:
    def update(p, g, k, t):
        square = g.square()
        v = k["v"] + 0.05 * torch.tanh(100 * (square - k["v"])) * square
        return p - 0.02 * g / (v.abs().sqrt() + 0.1), {"v": v}

    return Optimizer("yogi", _zeros("v"), update)


def adan(chance: Random) -> Optimizer:
    """Adan: the update also uses the difference to the gradient of the last step."""

    def update(p, g, k, t):
        d = torch.where(t > 1, g - k["g"], torch.zeros_like(g))
        m, v = torch.lerp(k["m"], g, 0.1), torch.lerp(k["v"], d, 0.1)
        n = torch.lerp(k["n"], (g + 0.9 * d).square(), 0.1)
        return p - 0.02 * (m + 0.9 * v) / (n.sqrt() + 0.1), {"g": g, "m": m, "v": v, "n": n}

    return Optimizer("adan", _zeros("g", "m", "v", "n"), update)


def schedule_free(chance: Random) -> Optimizer:
    """Schedule-free SGD: the leaf is a mean of a fast sequence and the average of that sequence."""

    def update(p, g, k, t):
        fast = k["z"] + p * 0 - 0.05 * g if chance_copies else k["z"] - 0.05 * g
        slow = torch.lerp(k["x"], fast, 1 / t)
        return 0.9 * slow + 0.1 * fast, {"z": fast, "x": slow}

    chance_copies = chance.random() < 0.5
    return Optimizer(
        "schedule free", lambda p: {"z": p.clone(), "x": p.clone()}, update, complex=False
    )


def eight_bit(chance: Random) -> Optimizer:
    """SGD with its momentum in eight bits (or bf16), and one scale for the whole leaf."""
    narrow = chance.choice([torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])

    def update(p, g, k, t):
        m = 0.9 * k["m"].to(p.dtype) * k["scale"] + g
        scale = m.square().sum().sqrt() / 64 + 0.1
        return p - 0.05 * m, {"m": (m / scale).to(narrow), "scale": scale}

    init = lambda p: {"m": torch.zeros_like(p, dtype=narrow), "scale": p.new_ones(())}
    return Optimizer(f"eight bit {str(narrow)[6:]}", init, update)


def centralised(chance: Random) -> Optimizer:
    """Gradient centralisation: the mean is subtracted, and each row is divided by one plus its norm."""

    def update(p, g, k, t):
        if p.ndim and p.numel():
            g = g - g.mean(tuple(range(1, p.ndim)) or 0, keepdim=True)
            g = g / (1 + g.norm(dim=-1, keepdim=True))
        return p - 0.05 * g, k

    return Optimizer("centralised", _zeros(), update)


def harmonic(chance: Random) -> Optimizer:
    """The rate of a leaf depends on a reduction of its gradient: a norm, the maximum, the median, a scan and others."""
    by = chance.choice(["harmonic", "amax", "median", "std", "softmax", "cumsum", "sort"])

    def update(p, g, k, t):
        if not p.numel() or not p.ndim:
            return p - 0.05 * g, k
        size = g.abs() + 0.1
        if by == "harmonic":
            size = torch.linalg.vector_norm(size, -1)
        elif by in ("amax", "median"):
            size = getattr(size, by)() if by == "amax" else size.flatten().median()
        elif by == "std":
            size = 0.1 + size.var(unbiased=False)
        else:
            size = (
                size.softmax(-1)
                if by == "softmax"
                else size.cumsum(-1)
                if by == "cumsum"
                else size.sort(-1).values
            )
        return p - 0.05 * g / (1 + size), k

    return Optimizer(by, _zeros(), update)


def frequencies(chance: Random) -> Optimizer:
    """The gradient is filtered by a Fourier transform along its last dim."""

    def update(p, g, k, t):
        if not p.numel() or not p.ndim:
            return p - 0.05 * g, k
        spectrum = torch.fft.rfft(g, dim=-1)
        return p - 0.05 * torch.fft.irfft(spectrum * 0.5, n=p.shape[-1], dim=-1), k

    return Optimizer("frequencies", _zeros(), update)


def flattened(chance: Random) -> Optimizer:
    """The gradient is flattened and cut into blocks, and each block is divided by one plus its norm."""
    size = chance.randint(1, 4)

    def update(p, g, k, t):
        flat = g.reshape(-1)
        parts = [x / (1 + x.norm()) for x in flat.split(size)]
        return p - 0.05 * torch.cat(parts).view(p.shape), k

    return Optimizer(f"blocks of {size}", _zeros(), update)


OPTIMIZERS = (
    *(sgd, nesterov, adam, rmsprop, adagrad, adadelta, lion, lamb, adafactor, muon, preconditioned),
    *(yogi, adan, schedule_free, eight_bit, centralised, harmonic, frequencies, flattened),
)
