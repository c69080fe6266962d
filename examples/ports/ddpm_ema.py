"""A diffusion model (Ho et al., 2020) and an average of its weights (EMA), after the trainers of lucidrains and
diffusers: two micro-batches, a clipped gradient, a schedule, and samples from the averaged weights.

What a port of such a loop changes:

- The average is a second module beside the model, in one `nn.ModuleList`. Its weights are sharded with the model's, and
  updated on the shards. A decay that grows from step to step would be an argument, as the momentum of `dino.py` is.
- The scheduler steps after the lifted step, which reads the rate of the optimizer in each call.
- Samples come through `step.eval`, because the state has the weights.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt

TIMESTEPS, EMA_DECAY = 3, 0.995
IMAGES, STEPS = 8, 4


class Unet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.time = nn.Linear(4, width)
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 4, 2, 1)
        self.norm, self.up = nn.GroupNorm(2, width), nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-math.log(100) * torch.arange(2) / 2)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.first(x)
        h = F.silu(self.norm(self.down(first) + time[:, :, None, None]))
        return self.last(torch.cat([self.up(h), first], 1))


class GaussianDiffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Unet()
        self.register_buffer("betas", torch.linspace(0.1, 0.5, TIMESTEPS))
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - self.betas, 0))

    def forward(self, images, t, noise):
        alpha = self.alphas_cumprod[t][:, None, None, None]
        noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.model(noisy, t), noise)

    @torch.no_grad()
    def sample(self, images):
        for t in reversed(range(TIMESTEPS)):
            predicted = self.model(images, torch.full((len(images),), t))
            scale = self.betas[t] / (1 - self.alphas_cumprod[t]).sqrt()
            images = (images - scale * predicted) / (1 - self.betas[t]).sqrt()
        return images


def data(rank: int, ranks: int) -> list[tuple]:
    """For each step two micro-batches: images, times, and noise."""
    batches = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        images, noise = torch.randn(2, 2, IMAGES, 1, 4, 4, generator=generator)
        t = torch.randint(TIMESTEPS, (2, IMAGES), generator=generator)
        micro_batches = zip(*(x.chunk(ranks, 1)[rank] for x in (images, t, noise)))
        batches.append(tuple(micro_batches))
    return batches


def train(data):
    diffusion = GaussianDiffusion()
    ema = copy.deepcopy(diffusion).requires_grad_(False)
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=1e-2, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 3))

    losses = []
    for batch in data:
        for images, t, noise in batch:
            loss = diffusion(images, t, noise) / len(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, param in zip(ema.parameters(), diffusion.parameters()):
                average.lerp_(param, 1 - EMA_DECAY)
        scheduler.step()
        losses.append(loss.item())

    losses.append(ema.sample(data[0][0][2]).mean().item())
    return losses, [diffusion, ema]


def train_on_ranks(data, mesh):
    diffusion = GaussianDiffusion()
    ema = copy.deepcopy(diffusion).requires_grad_(False)
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=1e-2, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 3))
    models = nn.ModuleList([diffusion, ema])

    losses = []

    def loop_step(batch):
        for images, t, noise in batch:
            loss = diffusion(images, t, noise) / len(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, param in zip(ema.parameters(), diffusion.parameters()):
                average.lerp_(param, 1 - EMA_DECAY)
        return loss

    step, state = zt.lift(loop_step, models, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    sample = step.eval(lambda noise: ema.sample(noise).mean())
    for batch in data:
        state, loss = step(state, batch)
        scheduler.step()
        losses.append(loss.item())

    losses.append(sample(state, data[0][0][2]).item())
    zt.write_back(models, optimizer, step.unshard(state))
    return losses, [diffusion, ema]
