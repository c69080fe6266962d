"""DINO (Caron et al., 2021), as its authors write it: a student learns from a teacher, an average of the student.

What a port of such a loop changes:

- Student, teacher and loss go into one module. The loss has a buffer, the centre of the teacher's outputs. It depends
  on the batch, so ztrans averages it over the ranks; the authors' version for several GPUs calls `all_reduce` there.
- The schedules give numbers and a bool. They are arguments, and the bool has a program for each of its values.
- The gradient of each parameter is clipped by its own norm. The authors do so by an `if`; a program needs a minimum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import ztrans as zt

CLIP_GRAD, STUDENT_TEMP, CENTER_MOMENTUM = 0.3, 1.0, 0.9
IMAGES, STEPS = 8, 4
TEACHER_TEMPS, MOMENTA = [0.2, 0.3, 0.4, 0.5], [0.9, 0.95, 0.98, 1.0]
FREEZE_LAST_LAYER = [True, False, False, False]


class Network(nn.Module):
    """A backbone for images of any size, and a head whose last layer has rows of norm 1."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 2, stride=2)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        self.last_layer = weight_norm(nn.Linear(4, 6, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, crops):
        """The outputs of all crops, one crop after another."""
        features = torch.cat([F.gelu(self.backbone(crop)).mean((2, 3)) for crop in crops])
        return self.last_layer(F.normalize(self.mlp(features), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, student_output, teacher_output, crops, teacher_temp):
        student_out = (student_output / STUDENT_TEMP).chunk(crops)
        teacher_out = F.softmax((teacher_output - self.center) / teacher_temp, dim=-1)
        terms = []
        for iq, q in enumerate(teacher_out.detach().chunk(2)):
            for v, student in enumerate(student_out):
                if v != iq:
                    terms.append(torch.sum(-q * F.log_softmax(student, dim=-1), dim=-1).mean())
        self.update_center(teacher_output)
        return sum(terms) / len(terms)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = teacher_output.mean(0, keepdim=True)
        self.center = self.center * CENTER_MOMENTUM + batch_center * (1 - CENTER_MOMENTUM)


def data(rank: int, ranks: int) -> list[list[torch.Tensor]]:
    """For each step three crops of some images, two large and one small."""
    batches = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        crops = [torch.randn(IMAGES, 3, size, size, generator=generator) for size in (8, 8, 4)]
        batches.append([crop.chunk(ranks)[rank] for crop in crops])
    return batches


def train(data):
    student, teacher, dino_loss = Network(), Network(), DINOLoss()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.04)

    losses = []
    for images, temp, m, freeze in zip(data, TEACHER_TEMPS, MOMENTA, FREEZE_LAST_LAYER):
        teacher_output = teacher(images[:2])
        student_output = student(images)
        loss = dino_loss(student_output, teacher_output, len(images), temp)

        optimizer.zero_grad()
        loss.backward()
        for name, p in student.named_parameters():
            if p.grad is not None:
                clip_coef = CLIP_GRAD / (p.grad.data.norm(2) + 1e-6)
                if clip_coef < 1:
                    p.grad.data.mul_(clip_coef)
            if freeze and "last_layer" in name:
                p.grad = None
        optimizer.step()

        with torch.no_grad():
            for param_q, param_k in zip(student.parameters(), teacher.parameters()):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        losses.append(loss.item())

    return losses, [student, teacher, dino_loss]


def train_on_ranks(data, mesh):
    student, teacher, dino_loss = Network(), Network(), DINOLoss()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.04)
    models = nn.ModuleList([student, teacher, dino_loss])

    losses = []

    def loop_step(images, temp, m, freeze):
        teacher_output = teacher(images[:2])
        student_output = student(images)
        loss = dino_loss(student_output, teacher_output, len(images), temp)

        optimizer.zero_grad()
        loss.backward()
        for name, p in student.named_parameters():
            if p.grad is not None:
                clip_coef = CLIP_GRAD / (p.grad.data.norm(2) + 1e-6)
                p.grad.data.mul_(clip_coef.clamp(max=1))
            if freeze and "last_layer" in name:
                p.grad = None
        optimizer.step()

        with torch.no_grad():
            for param_q, param_k in zip(student.parameters(), teacher.parameters()):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        return loss

    step, state = zt.lift(loop_step, models, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    for batch in zip(data, TEACHER_TEMPS, MOMENTA, FREEZE_LAST_LAYER):
        state, loss = step(state, *batch)
        losses.append(loss.item())

    zt.write_back(models, optimizer, step.unshard(state))
    return losses, [student, teacher, dino_loss]
