"""A step, and transforms that keep leaves in its state; the same on two processes, with checkpoints of other worlds.

torchrun --standalone --nproc-per-node 2 tests/support/kept.py FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans import ir

PARAMS = {"up": torch.linspace(-1, 1, 12).view(3, 4), "down": torch.linspace(1, -1, 4)}
X = torch.linspace(-1, 2, 18).view(6, 3)


def loss_fn(params, x):
    return (torch.tanh(x @ params["up"]) @ params["down"]).square().mean()


def train_step(state, x):
    grads, loss = grad_and_value(loss_fn)(state["params"], x)
    return {"params": {k: p - 0.1 * grads[k] for k, p in state["params"].items()}}, loss


def first_state():
    return {"params": {k: p.clone() for k, p in PARAMS.items()}}


def coarse(x):
    return (x * 8).round() / 8


@dataclass(frozen=True)
class Lag(zt.Transform):
    """Keep the parameters of the step before, and the first ones whole, and count the steps."""

    phase = 1

    def keeps(self, leaves):
        copies = [ir.Kept(path, like=path, start="copy") for path in leaves]
        first = [
            ir.Kept(f"first.{path}", like=path, start="copy", layout="whole", dtype=torch.float64)
            for path in leaves
            if path == "params.up"
        ]
        return [*copies, *first, ir.Kept("steps", like=(), dtype=torch.int64)]

    def rewrite(self, graph):
        new = ir.Rewriter(graph)
        kept = graph.kept_by(self.name)
        for leaf in graph.state:
            if leaf.name in kept:
                new.set_leaf(kept[leaf.name], leaf)
        new.set_leaf(kept["steps"], new.emit(torch.add, kept["steps"], 1, region="update"))
        return new.applied()


@dataclass(frozen=True)
class Feedback(zt.Transform):
    """Send coarse gradients. Each rank keeps what is left of its own, and adds it in the next step."""

    def keeps(self, leaves):
        return [ir.Kept(path, like=path, layout="rows") for path in leaves]

    def rewrite(self, graph):
        new = ir.Rewriter(graph)
        kept = graph.kept_by(self.name)
        for e in graph.eqns:
            if not ir.is_start(e) or ir.role(e) != "grad":
                continue
            leaf = kept[e.provenance.paths[0]]
            axis = leaf.split.axis
            own = ir.row(leaf, new.fresh_name(f"{leaf.name}.own"), axis).like(e)
            new.insert_before(e, own)
            full = new.emit(torch.add, e.ins[0], own.out)
            sent = new.emit(coarse, full)
            left = new.emit(torch.sub, full, sent)
            rows = ir.rows(left, new.fresh_name(f"{leaf.name}.new"), axis, graph.axes[axis])
            new.insert_before(e, rows.like(e))
            new.set_leaf(leaf, rows.out)
            new.replace(e, e.with_inputs(lambda v, sent=sent: sent))
        return new.applied()


def chain(*shard):
    schedules = (zt.overlap_grads(), zt.prefetch()) if shard else ()
    return zt.chain(*shard, zt.ema(0.75), Lag(), Feedback(), *schedules)


def equal(a, b) -> bool:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def on_ranks(folder: Path) -> None:
    """Train, save in between, resume, and resume what one process has saved."""
    mesh = zt.make_mesh("cpu", dp=2)
    rank = mesh.get_rank()
    x = X.chunk(2)[rank]
    step = chain(zt.shard_params(mesh, stage=3))(train_step)
    simulated = chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=3))(train_step)
    expected = simulated.init(first_state())
    lowered = simulated.lower(expected, x)

    state = step.shard(first_state())
    for i in range(4):
        if i == 2:
            zt.save(folder / "two", state).result()
            halfway = pytree.tree_map(torch.clone, expected)
        state, _ = step(state, x)
        expected, _ = lowered.lockstep(expected, [(x,) for x in X.chunk(2)])
    figures = {"lockstep": equal(step.unshard(state), expected)}

    meta = pytree.tree_map(lambda p: torch.empty_like(p, device="meta"), first_state())
    resumed = zt.load(folder / "two", meta, step)
    figures["loaded"] = equal(step.unshard(resumed), halfway)
    for _ in range(2):
        resumed, _ = step(resumed, x)
    figures["resumed"] = equal(step.unshard(resumed), expected)

    from_one = step.unshard(zt.load(folder / "one", first_state(), step))
    one = torch.load(folder / "one.pt")
    figures["ema"] = equal(from_one.kept["ema"], one["ema"])
    rows = from_one.kept["feedback"]["params.up"]
    figures["rows"] = equal(rows.sum(0), one["feedback"]["params.up"][0]) and equal(
        rows[0], rows[1]
    )
    spread = step.unshard(step.shard(one["whole"])).kept["feedback"]["params.up"]
    figures["spread"] = equal(spread, rows)
    swapped = step.ema(resumed)
    evaluate = step.eval(lambda state, x: sum(p.sum() for p in state["params"].values()))
    averages = step.unshard(resumed).kept["ema"].values()
    figures["evaluated"] = evaluate(swapped, x).item() - sum(a.sum() for a in averages).item()
    sys.stdout.write(json.dumps({"rank": rank, **figures}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_ranks(Path(sys.argv[1]))
