"""The loop of docs/launch.md on several ranks: whole, up to a signal, and resumed. Prints a line of JSON for each rank.

torchrun --standalone --nproc-per-node 2 tests/support/resumed_loop.py FOLDER [resumed]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

import ztrans as zt
from tests.test_docs import ROOT, blocks

RANK = int(os.environ.get("RANK", 0))
STEPS = 12


class Samples(Dataset):
    """24 samples. Rank 1 gets a signal when it has read some of them."""

    def __init__(self, signal_after: int | None = None) -> None:
        self.signal_after, self.read = signal_after, 0
        self.x = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if RANK == 1 and self.read == self.signal_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.x[index], self.x[index, :1]


def loop():
    """The function `train` of the page."""
    (block,) = (x for x in blocks(ROOT / "docs/launch.md") if "def train(folder" in x.text)
    namespace: dict = {}
    exec(block.text, namespace)
    return namespace["train"]


def bits(state) -> str:
    """The bits of a state, as text."""
    leaves = [torch.as_tensor(x).numpy().tobytes() for x in pytree.tree_leaves(state)]
    return b"".join(leaves).hex()


def others(folder: Path) -> dict:
    """Values that differ from rank to rank, and extras that only some ranks have."""
    step = zt.shard_params(zt.make_mesh("cpu", dp=-1))(lambda state: (state, None))
    state = step.shard({"w": torch.ones(4)})
    zt.save(folder / "c", state, extras={"rank": RANK, "all": [5]}).result()
    extras = {"rank": None, "all": None}
    zt.load(folder / "c", state, step, extras=extras)
    try:
        zt.save(folder / "d", state, extras={"all": 1, f"only {RANK}": 1})
        error = ""
    except RuntimeError as unlike:
        error = str(unlike)
    return {"extras": extras, "error": error}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train = loop()
    if "resumed" in sys.argv:
        state, losses = train(folder / "b", Samples(), STEPS)
        kept = sorted(path.name for path in (folder / "b").iterdir())
        row = {"rest": losses, "state": bits(state), "draws": torch.rand(3).tolist(), "kept": kept}
        row |= others(folder)
    else:
        state, losses = train(folder / "a", Samples(), STEPS)
        row = {"whole": losses, "state": bits(state), "draws": torch.rand(3).tolist()}
        _, row["first"] = train(folder / "b", Samples(signal_after=4 * 5), STEPS)
    sys.stdout.write(json.dumps(row) + "\n")
    dist.destroy_process_group()
