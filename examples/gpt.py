"""Train a GPT on bytes of the standard library's source, sharded over all ranks.

python examples/gpt.py                                        # one process
torchrun --standalone --nproc-per-node 2 examples/gpt.py      # two processes, with the same losses up to rounding
python examples/gpt.py --bf16                                 # matmuls and gathers in bf16
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from model import GPT, Config
from text import draw, stdlib_bytes
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import ztrans as zt


def adamw(state: dict, grads: dict, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, warmup=20) -> dict:
    """One step of AdamW, with a learning rate that rises over the first steps."""
    step = state["step"] + 1
    lr = state["lr"] * (step / warmup).clamp(max=1)
    fix1 = 1 - b1**step
    fix2 = 1 - b2**step
    m = {k: b1 * m + (1 - b1) * grads[k] for k, m in state["m"].items()}
    v = {k: b2 * v + (1 - b2) * grads[k] ** 2 for k, v in state["v"].items()}
    ratio = {k: m[k] / fix1 / ((v[k] / fix2).sqrt() + eps) for k in m}
    params = {k: p - lr * (ratio[k] + decay * p) for k, p in state["params"].items()}
    return {"params": params, "m": m, "v": v, "step": step, "lr": state["lr"]}


def init(model: nn.Module, lr: float) -> dict:
    """The first state: the parameters of a model, and the moments of AdamW."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    numbers = {"step": torch.tensor(0.0), "lr": torch.tensor(lr)}
    return {"params": params, "m": zeros, "v": zeros, **numbers}


def make_step(model: nn.Module, *, bf16: bool = False, device: str = "cpu") -> Callable:
    """The plain train step: ordinary code for one device."""

    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = functional_call(model, params, tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        grads, loss = grad_and_value(loss_fn)(state["params"], tokens)
        return adamw(state, grads), loss

    return train_step


def main(config: Config | None = None, *, steps=100, batch=16, lr=2e-3, bf16=False) -> list[float]:
    config = config or Config()
    mesh = zt.make_mesh(dp=-1)
    fsdp = zt.chain(
        zt.shard_params(mesh, axis="dp"), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    )
    torch.manual_seed(0)
    model = GPT(config)
    step = fsdp(make_step(model, bf16=bf16, device=mesh.device_type))
    state = step.shard(init(model, lr), device=mesh.device_type)
    text = stdlib_bytes()
    losses = []
    for i in range(steps):
        # Each rank takes its own rows of the batch.
        tokens = draw(text, i, batch, config.sequence).chunk(mesh.size())[mesh.get_rank()]
        state, loss = step(state, tokens.to(mesh.device_type))
        losses.append(loss.item())
        if mesh.get_rank() == 0 and (i % 10 == 0 or i == steps - 1):
            print(f"step {i:4d}   loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(bf16="--bf16" in sys.argv)
