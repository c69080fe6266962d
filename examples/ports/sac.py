"""SAC (Haarnoja et al., 2018), as CleanRL writes it: two critics, their targets, and a temperature that is learned.

What a port of such a loop changes:

- All networks go into one module. So does the temperature, which the loop has as a loose tensor: what an optimizer
  trains must be a parameter of the module.
- The loop reads the temperature as a Python number, by `.item()`. A program would always have the number of its trace,
  so the port detaches it, and computes with the tensor.

The draws of the policy, which the loop makes itself, are part of the batch here, so that ranks and one process have the
same. The transitions are given; `td3.py` also acts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

import ztrans as zt

GAMMA, TAU, LOG_STD_MIN, LOG_STD_MAX, TARGET_ENTROPY = 0.99, 0.05, -5, 2, -2
TRANSITIONS, STEPS = 8, 4


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def get_action(self, obs, noise):
        h = F.relu(self.fc1(obs))
        mean, log_std = self.fc_mean(h), torch.tanh(self.fc_logstd(h))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        x_t = mean + log_std.exp() * noise
        action = torch.tanh(x_t)
        log_prob = Normal(mean, log_std.exp()).log_prob(x_t)
        log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1)


class SoftQNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, obs, action):
        return self.fc2(F.relu(self.fc1(torch.cat([obs, action], 1)))).view(-1)


def data(rank: int, ranks: int) -> list[tuple]:
    """For each step: observations, actions, next observations, rewards, and the draws of three actions."""
    batches = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        widths = 4, 2, 4, 1, 2, 2, 2
        columns = torch.randn(TRANSITIONS, sum(widths), generator=generator).split(widths, 1)
        batches.append(tuple(x.chunk(ranks)[rank] for x in columns))
    return batches


def train(data):
    actor = Actor()
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork() for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)

    losses = []
    for obs, actions, next_obs, rewards, next_noise, noise, new_noise in data:
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_actions, next_log_pi = actor.get_action(next_obs, next_noise)
            qf1_next = qf1_target(next_obs, next_actions)
            qf2_next = qf2_target(next_obs, next_actions)
            min_qf_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
            next_q_value = rewards.flatten() + GAMMA * min_qf_next

        qf1_loss = F.mse_loss(qf1(obs, actions), next_q_value)
        qf2_loss = F.mse_loss(qf2(obs, actions), next_q_value)
        qf_loss = qf1_loss + qf2_loss
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        pi, log_pi = actor.get_action(obs, noise)
        min_qf_pi = torch.min(qf1(obs, pi), qf2(obs, pi))
        actor_loss = (alpha * log_pi - min_qf_pi).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            _, log_pi = actor.get_action(obs, new_noise)
        alpha_loss = (-log_alpha.exp() * (log_pi + TARGET_ENTROPY)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()

        for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
            target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
        for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
            target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
        losses.append(qf_loss.item())

    return losses, [actor, qf1, qf2, qf1_target, qf2_target, nn.ParameterList([log_alpha])]


def train_on_ranks(data, mesh):
    actor = Actor()
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork() for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    log_alpha = nn.Parameter(torch.zeros(1))
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)
    models = nn.ModuleList([actor, qf1, qf2, qf1_target, qf2_target, nn.ParameterList([log_alpha])])

    losses = []

    def update(obs, actions, next_obs, rewards, next_noise, noise, new_noise):
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, next_log_pi = actor.get_action(next_obs, next_noise)
            qf1_next = qf1_target(next_obs, next_actions)
            qf2_next = qf2_target(next_obs, next_actions)
            min_qf_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
            next_q_value = rewards.flatten() + GAMMA * min_qf_next

        qf1_loss = F.mse_loss(qf1(obs, actions), next_q_value)
        qf2_loss = F.mse_loss(qf2(obs, actions), next_q_value)
        qf_loss = qf1_loss + qf2_loss
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        pi, log_pi = actor.get_action(obs, noise)
        min_qf_pi = torch.min(qf1(obs, pi), qf2(obs, pi))
        actor_loss = (alpha * log_pi - min_qf_pi).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            _, log_pi = actor.get_action(obs, new_noise)
        alpha_loss = (-log_alpha.exp() * (log_pi + TARGET_ENTROPY)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()

        for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
            target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
        for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
            target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
        return qf_loss

    step, state = zt.lift(update, models, [q_optimizer, actor_optimizer, a_optimizer])
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    for batch in data:
        state, qf_loss = step(state, *batch)
        losses.append(qf_loss.item())

    zt.write_back(models, [q_optimizer, actor_optimizer, a_optimizer], step.unshard(state))
    return losses, [actor, qf1, qf2, qf1_target, qf2_target, nn.ParameterList([log_alpha])]
