"""Run by torchrun on two ranks: programs on streams that are not there, beside the same programs without.

torchrun --standalone --nproc-per-node 2 tests/streamed.py
"""

from __future__ import annotations

import json
import os

import torch
from programs import CASES
from races import Races
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from worlds import ALL, batches, slices

import ztrans as zt
from ztrans.arguments import flat
from ztrans.execute import bind, to_fx
from ztrans.streams import Streams

RANK = int(os.environ.get("RANK", 0))
OPTIONS = [(name, {}) for name in ("gpt_adam", "autocast", "accumulation", "uneven", "muon")]
OPTIONS.append(("uneven", {"reduce_dtype": torch.bfloat16}))


def trained(case, step, low, mesh, streams) -> list[torch.Tensor]:
    """The state on this rank after two steps."""
    run = bind(low.graph, to_fx(low.graph, mesh, True, streams=streams))
    state = step.shard(case.state())
    for batch in batches(case, 2):
        _, local = flat(low.program, low.graph, state, slices(batch, 2)[RANK])
        run(local)
    return [x.to_local() if hasattr(x, "to_local") else x for x in pytree.tree_leaves(state)]


def main() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name, options in OPTIONS:
        for stage in (0, 1, 2, 3):
            case = CASES[name]
            step = zt.chain(zt.shard_params(mesh, stage=stage, **options), *ALL)(case.step)
            low = step.lower(step.shard(case.state()), *slices(batches(case, 1)[0], 2)[RANK])
            with Races() as cuda:
                streamed = trained(case, step, low, mesh, Streams(cuda))
            plain = trained(case, step, low, mesh, None)
            same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, streamed))
            if RANK == 0:
                print(json.dumps({"case": name, "stage": stage, "bitwise": same, "races": cuda.races}), flush=True)


if __name__ == "__main__":
    main()
