"""Optimizers whose updates need whole matrices, for the tests of `owned_updates`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad_and_value

from tests.support.programs import Case

# Groups of matrices of one shape; on 2 ranks the first has one left over. One matrix is alone, and one leaf is none.
SHAPES = {"a": (12, 8), "b": (12, 8), "c": (12, 8), "d": (8, 12), "e": (8, 12), "f": (7, 5), "g": (5,)}  # fmt: skip
Update = Callable[[torch.Tensor, torch.Tensor, dict], tuple[torch.Tensor, dict]]


def muon(p, g, k):
    m = 0.9 * k["m"] + g
    x = (m.mT if m.shape[0] > m.shape[1] else m).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(2):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    x = x.mT if m.shape[0] > m.shape[1] else x
    return p - 0.02 * x.to(p.dtype), {"m": m}


def soap(p, g, k):
    """Adam in the eigenbases of two averages, which are leaves of the state; each matrix counts its own steps."""
    t = k["t"] + 1
    rows = torch.lerp(k["rows"], g @ g.mT, 0.1)
    columns = torch.lerp(k["columns"], g.mT @ g, 0.1)
    left, right = (torch.linalg.eigh(x)[1] for x in (rows, columns))
    turned = left.mT @ g @ right
    v = torch.lerp(k["v"], turned.square(), 0.1)
    change = left @ (turned / (v / (1 - 0.9**t)).sqrt().clamp(min=1e-3)) @ right.mT
    return p - 0.02 * change, {"rows": rows, "columns": columns, "v": v, "t": t}


def shampoo(p, g, k):
    """Inverse roots of two averages by Cholesky factors, which a matrix of zeros does not have."""
    rows = torch.lerp(k["rows"], g @ g.mT, 0.1)
    columns = torch.lerp(k["columns"], g.mT @ g, 0.1)
    ridge = lambda x: x + 1e-3 * x.diagonal().sum() * torch.eye(len(x))
    left, right = (torch.linalg.cholesky_ex(ridge(x))[0] for x in (rows, columns))
    y = torch.linalg.solve_triangular(left, g, upper=False)
    change = torch.linalg.solve_triangular(right, y.mT, upper=False).mT
    return p - 0.02 * change, {"rows": rows, "columns": columns}


def psgd(p, g, k):
    """A preconditioner that follows the gradient, and a step whose length depends on the norm of the whole change."""
    q = k["columns"]
    a = g @ q.mT
    q = q - 0.01 * (a.mT @ a / (a.square().sum() + 1e-6) - 0.1 * q) @ q
    change = g @ q.mT @ q
    return p * (1 - 0.01 / (1 + change.norm())) - 0.02 * change, {"columns": q}


def twice(p, g, k):
    """Two chains. What is between them reads two moments, so it runs on shards."""
    change = g @ g.mT @ g
    m = torch.addcmul(k["m"], k["v"], change)
    return p - 0.02 * m @ m.mT @ m, {"m": m, "v": k["v"]}


def twice_scaled(p, g, k):
    """The second chain also reads a scalar of the first, so they are one chain that runs on shards in between."""
    change = g @ g.mT @ g
    m = torch.addcmul(k["m"], k["v"], change)
    return p - 0.02 * (m @ m.mT @ m) / (1 + change.norm()), {"m": m, "v": k["v"]}


def ones(p):
    return {"m": torch.ones_like(p) / 8, "v": torch.ones_like(p)}


def zeros(p):
    return {"m": torch.zeros_like(p)}


def averages(*names):
    def init(p):
        rows, columns = torch.eye(p.shape[0]), torch.eye(p.shape[1])
        made = {"rows": rows, "columns": columns, "v": torch.zeros_like(p), "t": p.new_zeros(())}
        return {name: made[name] for name in names}

    return init


OPTIMIZERS: dict[str, tuple[Any, Update]] = {
    "muon": (zeros, muon),
    "soap": (averages("rows", "columns", "v", "t"), soap),
    "shampoo": (averages("rows", "columns"), shampoo),
    "psgd": (averages("columns"), psgd),
    "twice": (ones, twice),
    "twice_scaled": (ones, twice_scaled),
}


def owned_case(name: str = "muon", clipped: bool = False) -> Case:
    """A step of matrices, and a vector, with one of the optimizers."""
    init, update = OPTIMIZERS[name]

    def loss(params, x):
        terms = []
        for k, p in enumerate(params.values()):
            terms.append(
                (x[:, : p.shape[-1]] @ (p.mT if p.ndim > 1 else p)).tanh().square().mean() / (k + 1)
            )
        return torch.stack(terms).sum()

    def step(state, x):
        grads, value = grad_and_value(loss)(state["params"], x)
        if clipped:
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            grads = {key: g * (0.01 / (norm + 1e-6)).clamp(max=1.0) for key, g in grads.items()}
        params, moments = {}, {}
        for key, p in state["params"].items():
            if p.ndim == 2:
                params[key], moments[key] = update(p, grads[key], state["moments"][key])
            else:
                params[key] = p - 0.1 * grads[key]
        return {"params": params, "moments": moments}, value

    def state():
        random = torch.Generator().manual_seed(0)
        params = {key: torch.randn(s, generator=random).to(torch.get_default_dtype()) / 4 for key, s in SHAPES.items()}  # fmt: skip
        return {
            "params": params,
            "moments": {key: init(p) for key, p in params.items() if p.ndim == 2},
        }

    return Case(f"owned {name}", step, state, lambda n: (torch.randn(n, 12),))
