"""MAML (Finn et al., 2017) by torch.func: the loss of a task after a few steps of its own, and the gradient of it.

What a port of such a loop changes: nothing but the call. Each rank has some of the tasks of a batch. `vmap` runs their
inner steps, so the inner gradients belong to a task, and are not averaged over the ranks. That of the mean loss is.

In a loop over the tasks, without `vmap`, the parameters of a task must vary from rank to rank as its samples do, or
their gradients are averaged as that of any loss: `params = zt.pvary(params, x_support)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import ztrans as zt

INNER_LR, INNER_STEPS = 0.1, 2
TASKS, SHOTS, STEPS = 4, 5, 4


def data(rank: int, ranks: int) -> list[tuple]:
    """For each step some tasks: sine waves of other amplitudes and phases, each with points to adapt to and to test."""
    batches = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        x = 5 * torch.rand(2, TASKS, SHOTS, 1, generator=generator)
        amplitude, phase = torch.rand(2, TASKS, 1, 1, generator=generator)
        y = (0.1 + amplitude) * torch.sin(x + 3 * phase)
        batches.append(tuple(t.chunk(ranks)[rank] for t in (*x, *y)))
    return batches


def train(data):
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_on(params, x, y):
        return F.mse_loss(functional_call(model, params, (x,)), y)

    def loss_of_task(x_support, x_query, y_support, y_query):
        params = dict(model.named_parameters())
        for _ in range(INNER_STEPS):
            grads = grad(loss_on)(params, x_support, y_support)
            params = {name: p - INNER_LR * grads[name] for name, p in params.items()}
        return loss_on(params, x_query, y_query)

    losses = []
    for tasks in data:
        loss = vmap(loss_of_task)(*tasks).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return losses, [model]


def train_on_ranks(data, mesh):
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_on(params, x, y):
        return F.mse_loss(functional_call(model, params, (x,)), y)

    def loss_of_task(x_support, x_query, y_support, y_query):
        params = dict(model.named_parameters())
        for _ in range(INNER_STEPS):
            grads = grad(loss_on)(params, x_support, y_support)
            params = {name: p - INNER_LR * grads[name] for name, p in params.items()}
        return loss_on(params, x_query, y_query)

    losses = []

    def loop_step(*tasks):
        loss = vmap(loss_of_task)(*tasks).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    for tasks in data:
        state, loss = step(state, *tasks)
        losses.append(loss.item())

    zt.write_back(model, optimizer, step.unshard(state))
    return losses, [model]
