"""Local steps on two hosts of a rank: saved, resumed, synchronized, and left by a rank. Prints a line of JSON a rank.

torchrun --standalone --nproc-per-node 2 tests/support/local_ranks.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.worlds import ALL
from tests.test_local_steps import batches, first_state, momentum_step

RANK = int(os.environ.get("RANK", 0))


def shared_folder() -> Path:
    folders = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def lifted(mesh, row: dict) -> None:
    """A lifted loop is evaluated on the weights of its replica, and written back to the module."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step, first = zt.lift(loop_of(model, optimizer), model, optimizer)
    step = zt.shard_params(mesh, independent_axis="host")(step)
    inner, _, init = zt.local_steps(step, 10, zt.nesterov(0.7))
    evaluate = inner.eval(lambda x: model(x).sum())
    state = inner.shard(init(first))
    state, _ = inner(state, batches(1)[0][RANK])
    x = batches(2)[1][0]
    row["evaluated"] = evaluate(state, x).item()
    zt.write_back(model, optimizer, inner.unshard(state)["state"])
    with torch.no_grad():
        mine = model(x).sum()
    both = [torch.empty(()) for _ in range(2)]
    dist.all_gather(both, mine)
    row["by_module"] = both[RANK].item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", host=-1, dp=1)
    step = zt.chain(zt.shard_params(mesh, independent_axis="host"), *ALL)(momentum_step)
    local = zt.local_steps(step, 4, zt.nesterov(0.7), parts=2)
    inner, sync, init = local
    folder = shared_folder()

    def train(state: dict, start: int, end: int) -> dict:
        for i, xs in enumerate(batches(end)[start:], start):
            state, _ = local.at(i)(state, xs[RANK])
        return state

    def bits(state: dict) -> dict:
        return pytree.tree_map(torch.Tensor.tolist, inner.unshard(state))

    row: dict = {"rank": RANK}
    state = train(inner.shard(init(first_state())), 0, 5)
    zt.save(folder / "local", state).result()
    state = train(state, 5, 9)
    row["went_on"] = bits(state)
    resumed = zt.load(folder / "local", init(first_state()), inner)
    row["resumed"] = bits(train(resumed, 5, 9))
    state, _ = sync(state, batches(1)[0][RANK])
    row["synchronized"] = bits(state)
    lifted(mesh, row)

    if RANK == 0:
        began = time.monotonic()
        try:
            sync(state, batches(1)[0][RANK])
        except Exception as error:
            row["lost"] = {"kind": type(error).__name__, "text": str(error)}
            row["lost"]["after"] = time.monotonic() - began
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    os._exit(0)
