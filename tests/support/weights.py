"""Weights of several ranks: exported, loaded, and streamed, with the peaks of each rank.

torchrun --standalone --nproc-per-node 4 tests/support/weights.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.live_bytes import LiveBytes
from tests.support.llama_weights import SMALL, shapes
from ztrans.runtime.channels import LostRank
from ztrans.runtime.checkpoints import export as exports
from ztrans.runtime.session import session_of

RANK = int(os.environ.get("RANK", 0))


def report(check: str, **figures) -> None:
    sys.stdout.write(json.dumps({"check": check, "rank": RANK, **figures}) + "\n")
    sys.stdout.flush()


def whole() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes(**SMALL).items()}


def train_step(state, x):
    return {"params": {k: p - 1 for k, p in state["params"].items()}}, x.sum()


def locals_of(state) -> list[torch.Tensor]:
    return [x.to_local() for x in pytree.tree_leaves(state)]


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files_of_others(folder: Path) -> Path:
    """Two files and their index, as another program writes them."""
    names = list(whole())
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    if RANK == 0:
        folder.mkdir()
        for file, part in parts.items():
            save_file({name: whole()[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    return folder


def loaded(folder: Path, step) -> dict:
    """A state that is filled from files, after a shard of meta tensors."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes(**SMALL).items()}
    state = step.shard({"params": meta})
    parts = locals_of(state)
    with LiveBytes(parts) as memory:
        same_state = zt.load_weights(state, folder)
    full = step.unshard(state)["params"]
    report(
        "loaded",
        equal=same(full, whole()) and same_state is state,
        peak=memory.peak,
    )
    return state


def exported(folder: Path, state) -> None:
    parts = locals_of(state)
    largest = max(x.numel() * 4 for x in whole().values())
    for name, options in {
        "one": {},
        "many": {"max_file_bytes": 60_000},
        "half": {"max_file_bytes": 60_000, "dtype": torch.bfloat16},
    }.items():
        with LiveBytes(parts) as memory:
            written = zt.export(folder / name, state, **options)
        read = {}
        for file in sorted(written.glob("*.safetensors")):
            read |= load_file(file)
        wanted = {k: x.to(options.get("dtype", x.dtype)) for k, x in whole().items()}
        report(
            "exported",
            name=name,
            equal=same(dict(sorted(read.items())), dict(sorted(wanted.items()))),
            files=sorted(file.name for file in written.iterdir()),
            peak=memory.peak,
            largest=largest,
        )
        dist.barrier()


def failed_export(folder: Path, state) -> None:
    """Rank 1 cannot write its file, and later rank 2 is interrupted."""
    before = {file.name: file.stat().st_mtime_ns for file in (folder / "many").iterdir()}
    full = OSError(28, "No space left on device")
    broken = mock.patch.object(exports.os, "fsync", side_effect=full if RANK == 1 else None)
    try:
        with broken:
            zt.export(folder / "many", state, max_file_bytes=60_000)
        raise AssertionError
    except (OSError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    interrupt = mock.patch.object(exports, "whole_leaves", side_effect=KeyboardInterrupt)
    interrupted = ""
    try:
        with interrupt if RANK == 2 else contextlib.nullcontext():
            zt.export(folder / "many", state, max_file_bytes=60_000)
    except (KeyboardInterrupt, LostRank) as error:
        interrupted = f"{type(error).__name__}: {error}"
    dist.barrier()  # the first rank deletes the new folder
    after = {file.name: file.stat().st_mtime_ns for file in (folder / "many").iterdir()}
    others = [path.name for path in folder.iterdir() if ".ztrans-" in path.name]
    report("failed", text=text, interrupted=interrupted, intact=before == after, others=others)
    dist.barrier()


def streamed(state) -> None:
    parts = locals_of(state)
    values = whole()
    sent: dict = {}
    largest = max(x.numel() * 4 for x in whole().values())
    with LiveBytes([*parts, *values.values()]) as memory:
        for name, x in zt.stream_weights(state, to=1, bucket_bytes=1):
            assert torch.equal(x, values[name])
            del x
    for _ in zt.stream_weights(state, to=1, since=sent):
        pass
    everywhere = dict(zt.stream_weights(state, dtype=torch.bfloat16))
    with torch.no_grad():
        if RANK == 2:  # its part alone
            state["params"]["model.norm.weight"].to_local().add_(1)
    changed = [name for name, _ in zt.stream_weights(state, to=1, since=sent)]
    again = [name for name, _ in zt.stream_weights(state, to=1, since=sent)]
    wanted = {name: x.bfloat16() for name, x in whole().items()}
    report(
        "streamed",
        sent=len(sent) == len(wanted),
        everywhere=same(everywhere, wanted),
        changed=changed,
        again=again,
        peak=memory.peak,
        largest=largest,
    )
    stopped = ""
    try:
        for _ in zt.stream_weights(state, bucket_bytes=1):
            if RANK == 0:
                break
    except RuntimeError as error:
        stopped = f"{type(error).__name__}: {error}"
    report("stopped", text=stopped, after=len(dict(zt.stream_weights(state))) == len(wanted))


def divided(folder: Path) -> None:
    """Leaves that the step itself divides over an axis, and copies over the other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    random = torch.Generator().manual_seed(0)
    full = {name: torch.randn(6, 10, generator=random) for name in ("rows", "columns", "copies")}
    cuts = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    params = {k: distribute_tensor(x, tp, [cuts[k]], src_data_rank=None) for k, x in full.items()}
    state = zt.shard_params(mesh, axis="dp")(train_step).shard({"params": params})
    one_host = dict(zt.stream_weights(state))
    read = load_file(zt.export(folder / "divided", state) / "model.safetensors")
    blank = {name: torch.zeros_like(x) for name, x in state["params"].items()}
    filled = zt.load_weights(blank, folder / "divided")
    session = session_of(mesh)
    session._host_names = {rank: (f"host {rank // 2}",) for rank in range(4)}
    two_hosts = dict(zt.stream_weights(filled))
    report(
        "divided", equal=[same(x, full) for x in (one_host, dict(sorted(read.items())), two_hosts)]
    )


def different_copies(folder: Path) -> None:
    """Leaves of which ranks that seem to hold copies have other values: only one of them would be written."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = zt.shard_params(mesh, axis="dp")(train_step)
    state = step.shard({"params": {"w": torch.full((4, 2), float(mesh.get_local_rank("tp")))}})
    texts = []
    for call in (lambda weights: zt.export(folder / "copies", weights), zt.stream_weights):
        try:
            call(state)
        except ValueError as error:
            texts.append(str(error))
    report("copies", texts=texts, exists=(folder / "copies").exists())


def wrong(folder: Path, state) -> None:
    texts = []
    for call in (
        lambda: zt.stream_weights(state, to=RANK),
        lambda: zt.load_weights(state, folder / ("one" if RANK else "many")),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    report("wrong", texts=texts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    mesh = zt.make_mesh("cpu", dp=4)
    step = zt.shard_params(mesh)(train_step)
    state = loaded(files_of_others(folder / "others"), step)
    exported(folder, state)
    failed_export(folder, state)
    wrong(folder, state)
    streamed(state)
    divided(folder)
    different_copies(folder)
    dist.destroy_process_group()
