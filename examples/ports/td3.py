"""TD3 (Fujimoto et al., 2018), as CleanRL writes it: two critics, three targets, and a policy that learns in every
second step.

What a port of such a loop changes:

- All networks go into one module, targets too: they are part of the state, and sharded like the rest.
- The body of the loop becomes a function of the batch. Whether the policy learns is a bool among its arguments, so
  there is a program for each case; `global_step` itself would be a tensor there.
- The policy acts through `step.eval`, because the state has its weights. Each rank has environments of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt

GAMMA, TAU, POLICY_NOISE, NOISE_CLIP, POLICY_FREQUENCY = 0.99, 0.05, 0.2, 0.5, 2
MASSES, STEPS = 8, 5


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_mu = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, obs):
        return torch.tanh(self.fc_mu(F.relu(self.fc1(obs))))


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, obs, action):
        return self.fc2(F.relu(self.fc1(torch.cat([obs, action], 1)))).view(-1)


class Replay:
    """Point masses that a policy pushes towards the origin, and a buffer of what happened to them.

    Each rank has some of the masses, and draws for all of them: so the ranks see together what one process sees.
    """

    def __init__(self, masses: slice = slice(None)):
        self.masses = masses
        self.generator = torch.Generator().manual_seed(0)
        self.obs = self.noise(4)
        self.buffer = []
        self.step(self.noise(2))

    def noise(self, width):
        return torch.randn(MASSES, width, generator=self.generator)[self.masses]

    def step(self, actions):
        place, speed = self.obs.chunk(2, 1)
        next_obs = torch.cat([place + 0.1 * speed, speed + 0.1 * actions], 1)
        rewards = -next_obs.square().sum(1)
        self.buffer.append((self.obs, actions, next_obs, rewards))
        self.obs = next_obs

    def sample(self):
        """A step of the past, and the noise that smooths the target policy."""
        k = int(torch.randint(len(self.buffer), (), generator=self.generator))
        return *self.buffer[k], self.noise(2)


def data(rank: int, ranks: int) -> Replay:
    part = MASSES // ranks
    return Replay(slice(rank * part, (rank + 1) * part))


def train(data):
    actor, target_actor = Actor(), Actor()
    qf1, qf2, qf1_target, qf2_target = QNetwork(), QNetwork(), QNetwork(), QNetwork()
    target_actor.load_state_dict(actor.state_dict())
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)

    losses = []
    for global_step in range(STEPS):
        obs, actions, next_obs, rewards, noise = data.sample()
        with torch.no_grad():
            clipped_noise = (noise * POLICY_NOISE).clamp(-NOISE_CLIP, NOISE_CLIP)
            next_actions = (target_actor(next_obs) + clipped_noise).clamp(-1, 1)
            qf1_next = qf1_target(next_obs, next_actions)
            qf2_next = qf2_target(next_obs, next_actions)
            next_q_value = rewards + GAMMA * torch.min(qf1_next, qf2_next)

        qf1_loss = F.mse_loss(qf1(obs, actions), next_q_value)
        qf2_loss = F.mse_loss(qf2(obs, actions), next_q_value)
        qf_loss = qf1_loss + qf2_loss

        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        if global_step % POLICY_FREQUENCY == 0:
            actor_loss = -qf1(obs, actor(obs)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

            for param, target_param in zip(actor.parameters(), target_actor.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
            for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
            for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)

        losses.append(qf_loss.item())
        with torch.no_grad():
            data.step(actor(data.obs))

    return losses, [actor, target_actor, qf1, qf2, qf1_target, qf2_target]


def train_on_ranks(data, mesh):
    actor, target_actor = Actor(), Actor()
    qf1, qf2, qf1_target, qf2_target = QNetwork(), QNetwork(), QNetwork(), QNetwork()
    target_actor.load_state_dict(actor.state_dict())
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    models = nn.ModuleList([actor, target_actor, qf1, qf2, qf1_target, qf2_target])

    losses = []

    def update(obs, actions, next_obs, rewards, noise, update_policy):
        with torch.no_grad():
            clipped_noise = (noise * POLICY_NOISE).clamp(-NOISE_CLIP, NOISE_CLIP)
            next_actions = (target_actor(next_obs) + clipped_noise).clamp(-1, 1)
            qf1_next = qf1_target(next_obs, next_actions)
            qf2_next = qf2_target(next_obs, next_actions)
            next_q_value = rewards + GAMMA * torch.min(qf1_next, qf2_next)

        qf1_loss = F.mse_loss(qf1(obs, actions), next_q_value)
        qf2_loss = F.mse_loss(qf2(obs, actions), next_q_value)
        qf_loss = qf1_loss + qf2_loss

        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        if update_policy:
            actor_loss = -qf1(obs, actor(obs)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

            for param, target_param in zip(actor.parameters(), target_actor.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
            for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
            for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
        return qf_loss

    step, state = zt.lift(update, models, [q_optimizer, actor_optimizer])
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    act = step.eval(actor.forward)
    for global_step in range(STEPS):
        state, qf_loss = step(state, *data.sample(), global_step % POLICY_FREQUENCY == 0)
        losses.append(qf_loss.item())
        with torch.no_grad():
            data.step(act(state, data.obs))

    zt.write_back(models, [q_optimizer, actor_optimizer], step.unshard(state))
    return losses, [actor, target_actor, qf1, qf2, qf1_target, qf2_target]
