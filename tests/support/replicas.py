"""Replicas that train apart on two hosts of two ranks: saved, resumed and synchronized. Prints a line of JSON a rank.

torchrun --standalone --nproc-per-node 4 tests/support/replicas.py STAGE
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.worlds import distance
from tests.transforms.test_independent_axis import batches, local_step, state

RANK = int(os.environ.get("RANK", 0))


def bits(tree) -> str:
    """The bits of full tensors, as text."""
    return b"".join(x.numpy().tobytes() for x in pytree.tree_leaves(tree)).hex()


def shared_folder() -> Path:
    folders = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", host=2, dp=-1)
    shard = zt.shard_params(mesh, stage=int(sys.argv[1]), independent_axis="host")
    step = zt.chain(shard, zt.overlap_grads())(local_step)
    folder = shared_folder()
    current = step.shard(state())
    for xs in batches(2):
        current, _ = step(current, xs[RANK], False)
    zt.save(folder / "apart", current).result()
    for xs in batches(3):
        current, _ = step(current, xs[RANK], False)
    went_on = bits(step.unshard(current))

    resumed = zt.load(folder / "apart", state(), step)
    for xs in batches(3):
        resumed, _ = step(resumed, xs[RANK], False)
    row = {"rank": RANK, "went_on": went_on, "resumed": bits(step.unshard(resumed))}
    eager = zt.load(folder / "apart", state(), step)
    with zt.eager():
        for xs in batches(3):
            eager, _ = step(eager, xs[RANK], False)
    row["eager"] = distance(step.unshard(eager)["params"], step.unshard(resumed)["params"])

    up = dcp.FileSystemReader(folder / "apart").read_metadata().state_dict_metadata["params.up"]
    row["shape"] = list(up.size)
    mine = step.unshard(current)["params"]["up"]
    of_all = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(of_all, mine)
    row["differ"] = not torch.equal(of_all[0], of_all[-1])

    plain = zt.shard_params(mesh, axis=("host", "dp"))(local_step)
    row["apart"] = []
    for refused in (
        lambda: plain.shard(current),
        lambda: zt.export(folder / "weights", current["params"]),
    ):
        try:
            refused()
        except (RuntimeError, ValueError) as error:
            row["apart"].append(str(error))

    current, _ = step(current, batches(1)[0][RANK], True)
    mine = step.unshard(current)["params"]["up"]
    dist.all_gather(of_all, mine)
    row["synchronized"] = all(torch.equal(x, mine) for x in of_all)

    together = plain.unshard(plain.shard({"params": current["params"]}))
    row["together"] = torch.equal(together["params"]["up"], mine)
    zt.export(folder / "weights", current["params"])
    read = zt.load_weights({"up": torch.empty(6, 5), "down": torch.empty(5)}, folder / "weights")
    row["exported"] = torch.equal(read["up"], mine)
    again = step.shard(current)  # replicas stay apart
    row["again"] = bits(step.unshard(again)) == bits(step.unshard(current))
    zt.save(folder / "plain", plain.shard(state())).result()
    begun = step.unshard(zt.load(folder / "plain", state(), step))
    row["from_plain"] = torch.equal(begun["params"]["up"], state()["params"]["up"])
    try:
        zt.load(folder / "apart", state(), plain)
    except ValueError as error:
        row["other"] = str(error)
    sys.stdout.write(json.dumps(row) + "\n")
    dist.destroy_process_group()
