"""A step whose rows are blocks: 16 elements of each matrix share a scale, on any number of ranks."""

import torch
from torch.func import grad_and_value

import ztrans as zt

ROW = 16
GREATEST = {8: 127.0, 4: 7.0}  # codes


def loss_fn(params, x, y):
    half = {k: w.to(torch.bfloat16) for k, w in params.items()}
    h = torch.relu(x.to(torch.bfloat16) @ half["up"].T + half["bias"])
    return (h @ half["down"].T - y).float().square().mean()


def updated(state, grads):
    m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
    params = {k: w - 0.1 * m[k] for k, w in state["params"].items()}
    return {"params": params, "m": m}


def step(state, x, y):
    grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
    return updated(state, grads), loss


def new_state():
    draw = torch.Generator().manual_seed(0)
    params = {
        "up": torch.randn(16, ROW, generator=draw) / 4,
        "bias": torch.randn(16, generator=draw) / 4,
        "down": torch.randn(6, ROW, generator=draw) / 4,
    }
    return {"params": params, "m": {k: torch.zeros_like(w) for k, w in params.items()}}


def batch(samples=24, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, ROW, generator=draw), torch.randn(samples, 6, generator=draw)


def rounded(w, bits):
    """Each row as codes and one scale, written by hand."""
    if w.ndim < 2:
        return w
    scale = w.abs().amax(-1, keepdim=True) / GREATEST[bits]
    return torch.where(scale > 0, (w * (1 / scale)).round() * scale, 0.0)


def trained(*transforms, ranks=2, steps=2, mesh=None, fn=step, **options):
    """The state and the losses after some steps in lock-step, and the program."""
    shard = zt.shard_params(mesh or zt.AbstractMesh(dp=ranks), **options)
    step = zt.chain(shard, *transforms)(fn)
    state, losses = step.init(new_state()), []
    lowered = None
    for i in range(steps):
        parts = list(zip(*(x.chunk(ranks) for x in batch(seed=i))))
        lowered = lowered or step.lower(state, *parts[0])
        state, outputs = lowered.lockstep(state, parts)
        losses.append(outputs[0])
    return state, torch.stack(losses), lowered
