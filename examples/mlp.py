"""Train an MLP, sharded over all ranks, by a plain train step and four transforms.

python examples/mlp.py                                        # one process
torchrun --standalone --nproc-per-node 2 examples/mlp.py      # two processes, with the same losses up to rounding
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import ztrans as zt


def init(widths: Sequence[int]) -> dict:
    """Parameters and momentum of an MLP. They are the same on every rank, as all ranks use the same seed."""
    torch.manual_seed(0)
    params = {}
    for i, (n_in, n_out) in enumerate(pairwise(widths)):
        params[f"fc{i}"] = torch.randn(n_out, n_in) / n_in**0.5
    momentum = {name: torch.zeros_like(w) for name, w in params.items()}
    return {"params": params, "momentum": momentum}


def loss_fn(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.bfloat16()
    *hidden, last = params.values()
    for w in hidden:
        x = torch.tanh(F.linear(x, w.bfloat16()))  # the state is fp32, the matmuls are bf16
    return F.mse_loss(F.linear(x, last.bfloat16()).float(), y)


def main(
    *, steps: int = 200, widths: Sequence[int] = (4, 64, 64, 1), batch: int = 256, lr=0.02
) -> list[float]:
    mesh = zt.make_mesh(dp=-1)  # all ranks under torchrun, otherwise one rank

    @zt.fuse_cast_gather()
    @zt.prefetch()
    @zt.overlap_grads()
    @zt.shard_params(mesh, axis="dp")
    def train_step(state, x, y):  # ordinary code for one device; it does not mention ranks
        grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
        momentum = {k: 0.9 * m + grads[k] for k, m in state["momentum"].items()}
        params = {k: p - lr * momentum[k] for k, p in state["params"].items()}
        return {"params": params, "momentum": momentum}, loss

    state = train_step.shard(init(widths), device=mesh.device_type)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(batch, widths[0], generator=generator)
        y = torch.sin(x).sum(1, keepdim=True)
        # Each rank takes its own rows of the batch.
        rows = [t.chunk(mesh.size())[mesh.get_rank()].to(mesh.device_type) for t in (x, y)]
        state, loss = train_step(state, *rows)
        losses.append(loss.item())
        if mesh.get_rank() == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:4d}   loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
