"""A mixture of experts over two axes: experts over the ranks of `ep`, and their hidden dim over the ranks of `tp`.

The dense layers are cut over `tp` by `parallelize_module`, and routed as in `experts`. A model that is not cut is the
same program in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

from tests.support.experts import EXPERTS, INNER, WIDTH, routed


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class Experts(nn.Module):
    """Two matrices for each expert, applied to the tokens of each: [expert, token, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ local(self.up)) @ local(self.down)


class ExpertTensorParallel(ParallelStyle):
    """Cuts experts over a mesh of `ep` and `tp`. Tokens are whole on each rank of `tp`, before and after."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        tp = mesh["tp"]

        def whole(module: nn.Module, args: tuple) -> torch.Tensor:
            tokens = DTensor.from_local(args[0], tp, [Replicate()], run_check=False)
            return tokens.to_local(grad_placements=[Partial()])

        def summed(module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
            return (
                DTensor.from_local(out, tp, [Partial()], run_check=False)
                .redistribute(tp, [Replicate()])
                .to_local()
            )

        for name, inner in (("up", 2), ("down", 1)):
            cut = distribute_tensor(
                getattr(module, name).detach(), mesh, [Shard(0), Shard(inner)], src_data_rank=None
            )
            setattr(module, name, nn.Parameter(cut))
        module.register_forward_pre_hook(whole)
        module.register_forward_hook(summed)
        return module


class Mixture(nn.Module):
    """A dense layer, and experts of which every token goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.widen, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.exchange, self.ranks = (lambda x: x), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale + self.narrow(torch.tanh(self.widen(x * self.scale)))
        places, weight = routed(h, self.router(h), len(x))
        sent = torch.einsum("nec,nd->ecd", places, h).reshape(
            self.ranks, EXPERTS // self.ranks, len(x), WIDTH
        )
        mine = (
            self.exchange(sent)
            .transpose(0, 1)
            .reshape(EXPERTS // self.ranks, self.ranks * len(x), WIDTH)
        )
        out = self.experts(mine).reshape(EXPERTS // self.ranks, self.ranks, len(x), WIDTH)
        y = torch.einsum(
            "nec,ecd->nd",
            places,
            self.exchange(out.transpose(0, 1)).reshape(EXPERTS, len(x), WIDTH),
        )
        return h + y * weight[:, None]


def model() -> Mixture:
    """A model with the same weights in every call."""
    torch.manual_seed(0)
    return Mixture().double()


def parallel(model: Mixture, mesh: DeviceMesh) -> Mixture:
    """The model over the axes `ep` and `tp` of a mesh; its scale and router stay whole."""
    plan = {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    parallelize_module(model, mesh["ep", "tp"], {"experts": ExpertTensorParallel()})
    ep = mesh["ep"]
    model.ranks = ep.size()
    ones = [1] * model.ranks
    model.exchange = lambda x: funcol.all_to_all_single_autograd(x.contiguous(), ones, ones, ep)
    return model


def init(model: nn.Module) -> dict[str, Any]:
    params = {k: p.detach() for k, p in model.named_parameters()}
    return {"params": params, "m": {k: torch.zeros_like(p) for k, p in params.items()}}


def make_step(model: nn.Module) -> Callable:
    """A train step with momentum; gradients are clipped by their norm over all parts."""

    def step(state, x):
        leaves = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        value = (functional_call(model, leaves, (x,)) - x.roll(1, 1)).square().mean()
        grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        scale = 1 / (1 + _square(grads.values()).sqrt())
        m = {k: 0.9 * m + grads[k] * scale for k, m in state["m"].items()}
        return {
            "params": {k: p - 0.5 * m[k] for k, p in state["params"].items()},
            "m": m,
        }, value.detach()

    return step


def _square(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
    return torch.stack([whole(g.square().sum()) for g in grads]).sum()
