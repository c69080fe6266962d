"""Train the loops of this folder as they are, and their ports, and compare them; print a line for each.

torchrun --standalone --nproc-per-node 2 examples/ports/compare.py
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import sys
from types import ModuleType

import torch
import torch.distributed as dist

import ztrans as zt

PORTS = ("sac", "td3", "wgan_gp", "ddpm_ema", "dino", "word_language_model", "maml")
# Lines that get data: a loop over batches, an environment that steps, a batch that is drawn.
_LOADS_DATA = re.compile(r"for .* in .*:|data\.step\(.*|.* = data\.sample\(\)")


def changed_lines(port: ModuleType) -> list[str]:
    """The lines in which the body of a port differs from that of its loop, except for empty ones and data loading.

    Lines that follow each other and are replaced count as the larger number of them.
    """
    before, after = (
        [line.strip() for line in inspect.getsource(function).splitlines()[1:]]
        for function in (port.train, port.train_on_ranks)
    )
    is_counted = lambda line: line and not _LOADS_DATA.fullmatch(line)
    changed = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            old, new = filter(is_counted, before[i:i_end]), filter(is_counted, after[j:j_end])
            changed += max(list(old), list(new), key=len)
    return changed


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two tensors, relative to the largest entry."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def compare(port: ModuleType, mesh) -> dict:
    """Train a loop on the whole batch, and its port on the ranks of a mesh. All ranks have the figures."""
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)
    losses, models = port.train(port.data(0, 1))
    torch.manual_seed(0)
    new_losses, new_models = port.train_on_ranks(port.data(rank, ranks), mesh)
    weights = []
    for model, new_model in zip(models, new_models, strict=True):
        for key, x in model.state_dict().items():
            weights.append(distance(new_model.state_dict()[key], x))
    return {
        "port": port.__name__,
        "changed_lines": len(changed_lines(port)),
        "losses": [float(f"{loss:.4g}") for loss in losses],
        "losses_apart": distance(torch.tensor(new_losses), torch.tensor(losses)),
        "weights_apart": max(weights),
    }


def main(names: tuple[str, ...] = PORTS) -> None:
    # Rounding of fp64 is so small that a difference of the computation shows.
    torch.set_default_dtype(torch.float64)
    mesh = zt.make_mesh("cpu", dp=-1)
    for name in names:
        row = compare(importlib.import_module(name), mesh)
        if mesh.get_rank() == 0:
            sys.stdout.write(json.dumps(row) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or PORTS)
