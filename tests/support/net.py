"""The step whose programs are the golden files, which have its line numbers. Two bf16 matmuls, SGD with momentum."""

import torch
from torch.func import grad_and_value

import ztrans as zt


def loss(params, x, y):
    half = {k: p.to(torch.bfloat16) for k, p in params.items()}
    h = torch.relu(x.to(torch.bfloat16) @ half["up"].T)
    return (h @ half["down"].T - y).float().square().mean()


def step(state, batch):
    grads, value = grad_and_value(loss)(state["params"], *batch)
    m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
    params = {k: p - state["lr"] * m[k] for k, p in state["params"].items()}
    return {"params": params, "m": m, "lr": state["lr"]}, value


def accumulate(state, batch):
    """Two micro-batches, one update."""
    total = None
    for x, y in zip(*(t.chunk(2) for t in batch)):
        grads, value = grad_and_value(loss)(state["params"], x, y)
        total = grads if total is None else {k: total[k] + g for k, g in grads.items()}
    params = {k: p - state["lr"] * total[k] for k, p in state["params"].items()}
    return {**state, "params": params}, value


def lower(*transforms, fn=step, mesh=None, **options):
    """The step lowered for two ranks, with `shard_params(**options)` and then `transforms`."""
    params = {"up": torch.zeros(16, 8), "down": torch.zeros(6, 16)}
    state = {"params": params, "m": {k: torch.zeros_like(p) for k, p in params.items()}, "lr": 0.1}
    shard = zt.shard_params(mesh or zt.AbstractMesh(dp=2), **options)
    return zt.chain(shard, *transforms)(fn).lower(state, (torch.zeros(4, 8), torch.zeros(4, 6)))
