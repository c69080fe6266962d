"""Reductions on two hosts of three ranks, which are one machine here. Run by torchrun on six ranks.

torchrun --standalone --nproc-per-node 6 tests/support/hierarchical.py
"""

from __future__ import annotations

import json
import re

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ztrans as zt
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.streamed import RANK, trained
from tests.support.worlds import ALL, batches, distance, slices
from ztrans.runtime import session
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.transports import StreamTransports

WORLD, LOCAL = 6, 3
SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
RUNS = [
    ("mlp_momentum", {}, DOUBLE),
    ("uneven", {"reshard": 3}, DOUBLE),
    ("gpt_adam", {"reduce_dtype": HALF}, SINGLE),
]
RUNS += [("mlp_momentum", {}, HALF), ("mlp_momentum", {"reduce_dtype": HALF}, HALF)]


def main() -> None:
    session.host_name = lambda: (f"host {RANK // LOCAL}",)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    for number, (name, options, dtype) in enumerate(RUNS):
        torch.set_default_dtype(dtype)
        case = CASES[name]
        step = zt.chain(zt.shard_params(mesh, **options), *ALL)(case.step)
        local = [slices(batch, WORLD) for batch in batches(case, 2)]
        given = step.shard(case.state()), *local[0][RANK]
        traced = step.trace(*given)
        plan = [traced.lower().plan if RANK == 0 else None]
        dist.broadcast_object_list(
            plan
        )  # six ranks would find the same plan, on the processors of one machine
        low = traced.lower(plan=plan[0])
        states = [step.shard(case.state()) for _ in range(2)]
        plain, text = trained(case, states[0], low, mesh, None)
        with Races() as cuda:
            streamed, on_gpu = trained(case, states[1], low, mesh, StreamTransports(Streams(cuda)))
        truth = [case.state()]
        for each in local if number == RANK else ():
            truth[0], _ = low.lockstep(truth[0], each)
        dist.broadcast_object_list(truth, src=number)
        # A recorded step waits for messages in threads, which then begin the second level.
        recorded, once = step.shard(case.state()), step.shard(case.state())
        low.compile().profile(recorded, *local[0][RANK], steps=1)
        low.compile()(once, *local[0][RANK])
        report = {
            "case": name,
            "dtype": str(dtype),
            "reduce_dtype": str(options.get("reduce_dtype")),
            "lockstep": distance(step.unshard(states[0]), truth[0]),
            "streamed": distance(step.unshard(states[1]), step.unshard(states[0])),
            "bitwise": all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, streamed)
            ),
            "recorded": distance(step.unshard(recorded), step.unshard(once)),
            "races": cuda.races,
            "gathers": sorted(set(re.findall(r"all_gather, .*?by=([^(]+) \(", text))),
            "ways": sorted(set(re.findall(r"reduce_scatter, .*?by=([^(]+) \(", text))),
            "on_gpu": sorted(set(re.findall(r"reduce_scatter, .*?by=([^(]+) \(", on_gpu))),
        }
        everywhere = [None] * WORLD
        dist.all_gather_object(everywhere, report)
        if RANK == 0:
            print("\n".join(map(json.dumps, everywhere)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
