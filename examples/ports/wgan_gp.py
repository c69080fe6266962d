"""WGAN-GP (Gulrajani et al., 2017), as PyTorch-GAN writes it: the generator learns in every second step of the critic.

What a port of such a loop changes:

- Generator and critic go into one module, and both optimizers into one list.
- Whether the generator learns is a bool among the arguments, so there is a program for each case. The critic's loss
  leaves gradients in the generator; the loop resets them in every step, and so does the program.

The draws, which the loop makes itself, are part of the batch here, so that ranks and one process have the same. A batch
norm in the generator would use the statistics of each rank's images, as with DDP.
"""

from __future__ import annotations

import torch
from torch import autograd, nn

import ztrans as zt

LATENT, LAMBDA_GP, N_CRITIC = 3, 10, 2
IMAGES, STEPS = 8, 5


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(LATENT, 8), nn.LayerNorm(8), nn.LeakyReLU(0.2), nn.Linear(8, 16)
        self.model = nn.Sequential(*layers, nn.Tanh())

    def forward(self, z):
        return self.model(z).view(-1, 1, 4, 4)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, images):
        return self.model(images.flatten(1))


def compute_gradient_penalty(discriminator, real_samples, fake_samples, alpha):
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    d_interpolates = discriminator(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
    )[0]
    return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def data(rank: int, ranks: int) -> list[tuple]:
    """For each step: real images, the latents of false ones, and the places between them."""
    batches = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        real_imgs = torch.randn(IMAGES, 1, 4, 4, generator=generator)
        z = torch.randn(IMAGES, LATENT, generator=generator)
        alpha = torch.rand(IMAGES, 1, 1, 1, generator=generator)
        batches.append(tuple(x.chunk(ranks)[rank] for x in (real_imgs, z, alpha)))
    return batches


def train(data):
    generator, discriminator = Generator(), Discriminator()
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))

    losses = []
    for i, (real_imgs, z, alpha) in enumerate(data):
        optimizer_D.zero_grad()
        fake_imgs = generator(z)
        real_validity = discriminator(real_imgs)
        fake_validity = discriminator(fake_imgs)
        gradient_penalty = compute_gradient_penalty(
            discriminator, real_imgs.data, fake_imgs.data, alpha
        )
        d_loss = -real_validity.mean() + fake_validity.mean() + LAMBDA_GP * gradient_penalty
        d_loss.backward()
        optimizer_D.step()

        optimizer_G.zero_grad()
        if i % N_CRITIC == 0:
            g_loss = -discriminator(generator(z)).mean()
            g_loss.backward()
            optimizer_G.step()

        losses.append(d_loss.item())

    return losses, [generator, discriminator]


def train_on_ranks(data, mesh):
    generator, discriminator = Generator(), Discriminator()
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    models = nn.ModuleList([generator, discriminator])

    losses = []

    def loop_step(real_imgs, z, alpha, train_generator):
        optimizer_D.zero_grad()
        fake_imgs = generator(z)
        real_validity = discriminator(real_imgs)
        fake_validity = discriminator(fake_imgs)
        gradient_penalty = compute_gradient_penalty(
            discriminator, real_imgs.data, fake_imgs.data, alpha
        )
        d_loss = -real_validity.mean() + fake_validity.mean() + LAMBDA_GP * gradient_penalty
        d_loss.backward()
        optimizer_D.step()

        optimizer_G.zero_grad()
        if train_generator:
            g_loss = -discriminator(generator(z)).mean()
            g_loss.backward()
            optimizer_G.step()
        return d_loss

    step, state = zt.lift(loop_step, models, [optimizer_G, optimizer_D])
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    for i, batch in enumerate(data):
        state, d_loss = step(state, *batch, i % N_CRITIC == 0)
        losses.append(d_loss.item())

    zt.write_back(models, [optimizer_G, optimizer_D], step.unshard(state))
    return losses, [generator, discriminator]
