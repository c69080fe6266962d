"""Train a model on hosts that send each other its parameters in every 20th step only (DiLoCo).

Each process stands for a host. It trains a replica with AdamW on data of its own. An outer optimizer, SGD with Nesterov
momentum, moves the parameters that all share by the mean of what the hosts have moved theirs.

python examples/diloco.py                                       # one host, so nothing is sent
torchrun --standalone --nproc-per-node 2 examples/diloco.py     # two hosts
"""

import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt


def main(*, steps: int = 200, h: int = 20, parts: int = 1, width: int = 64) -> list[float]:
    mesh = zt.make_mesh("cpu", host=-1, dp=1)  # a host of several ranks has them along dp
    torch.manual_seed(0)  # all hosts begin from the same parameters
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop_step(x, y):  # ordinary code for one device; it mentions neither ranks nor hosts
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(zt.shard_params(mesh, independent_axis="host"), zt.overlap_grads())(step)
    local = zt.local_steps(step, h, zt.nesterov(lr=0.7, momentum=0.9), parts)
    state = local.inner.shard(local.init(state))
    test_loss = local.inner.eval(lambda x, y: F.mse_loss(model(x), y))

    def batch(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        return x, torch.sin(x).sum(1, keepdim=True)

    losses = []
    host = mesh.get_local_rank("host")
    for i in range(steps):
        # The last step averages all parameters, so that all hosts end with one model.
        step = local.sync if i == steps - 1 else local.at(i)
        state, _ = step(state, *batch(1 + i * mesh.size() + host, 64))
        if i % 20 == 19 or i == steps - 1:
            losses.append(test_loss(state, *batch(0, 1024)).item())
            if host == 0:
                print(f"step {i:4d}   loss {losses[-1]:.4f}")
    zt.write_back(model, optimizer, local.inner.unshard(state)["state"])
    return losses


if __name__ == "__main__":
    main()
