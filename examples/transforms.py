"""Transforms of one's own: compressed gradients, gradient norms, every second parameter kept, and Lookahead.

Each is a frozen dataclass with a `rewrite`, and each obeys the laws: `zt.testing.check_laws` checks them below.
docs/write-a-transform.md explains the parts.

    python examples/transforms.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.func import grad_and_value

import ztrans as zt
from ztrans import ir


@dataclass(frozen=True)
class CompressGradients(zt.Transform):
    """Send gradients in fewer bits. Terms are still summed in the dtype of the gradient."""

    dtype: torch.dtype = torch.bfloat16

    def rewrite(self, graph: ir.Graph) -> ir.Graph:
        return graph.replace(eqns=tuple(map(self._compressed, graph.eqns)))

    def _compressed(self, e: ir.Eqn) -> ir.Eqn:
        if ir.role(e) != "grad":
            return e
        return e.replace(kwargs={**e.kwargs, "dtype": self.dtype})


@dataclass(frozen=True)
class GradientNorms(zt.Transform):
    """Return the norm of every gradient, as an output after that of the step.

    It rewrites the program as it was traced (phase 1), in which a gradient is one value with a mark. `shard_params`
    then shards the norms like any other equation of the update.
    """

    phase: ClassVar[float] = 1

    def rewrite(self, graph: ir.Graph) -> ir.Graph:
        new = ir.Rewriter(graph)
        for e in graph.eqns:
            if e.op is ir.GRADIENT:
                name = f"norm of {e.args[1].name}"
                new.add_output(new.emit(torch.linalg.vector_norm, e.out, name=name))
        return new.applied()


@dataclass(frozen=True)
class KeepEverySecond(zt.Transform):
    """At stage 3, keep every second parameter from forward to backward, instead of gathering it again."""

    def rewrite(self, graph: ir.Graph) -> ir.Graph:
        in_forward: dict[ir.Var, ir.Var] = {}  # the gathered value of each shard
        regathers: list[tuple[ir.Var, ir.Var]] = []  # a value of backward, and that of forward
        for wait, paired in ir.pair(graph).waits.items():
            if ir.role(paired.start) != "param":
                continue
            shard = paired.start.ins[paired.member]
            if paired.start.provenance.regather and shard in in_forward:
                regathers.append((wait.out, in_forward[shard]))
            else:
                in_forward[shard] = wait.out
        # Backward reads the values of forward, so nothing reads those gathers, and `dce` drops them.
        return ir.dce(ir.rename(graph, dict(regathers[::2])))


@dataclass(frozen=True)
class Lookahead(zt.Transform):
    """After every `k` steps, move slow weights towards the parameters, and the parameters back to them (Zhang 2019).

    Slow weights and the number of steps are leaves of the state that this transform keeps.
    """

    k: int = 5
    alpha: float = 0.5
    phase: ClassVar[int] = 1

    def keeps(self, leaves):
        params = [path for path in leaves if path.startswith("params.")]
        slow = [ir.Kept(path, like=path, start="copy") for path in params]
        return [*slow, ir.Kept("steps", like=(), dtype=torch.int64)]

    def rewrite(self, graph: ir.Graph) -> ir.Graph:
        new = ir.Rewriter(graph)
        slow = graph.kept_by(self.name)
        steps = new.emit(torch.add, slow["steps"], 1, region="update")
        new.set_leaf(slow["steps"], steps)
        for leaf, fast in graph.leaves:
            if leaf.name in slow and fast is not leaf:
                moved = new.emit(self.moved, slow[leaf.name], fast, steps, region="update")
                for kept, value in zip((slow[leaf.name], leaf), moved):
                    new.set_leaf(kept, value)
        return new.applied()

    def moved(self, slow, fast, steps):
        is_last = steps % self.k == 0
        slow = torch.where(is_last, torch.lerp(slow, fast, self.alpha), slow)
        return slow, torch.where(is_last, slow, fast)


# ---- a step to try them on


def loss_fn(params, x, y):
    h = torch.relu(x @ params["up"])
    return ((torch.relu(h @ params["middle"]) @ params["down"]) - y).square().mean()


def train_step(state, x, y):
    grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
    m = {k: 0.9 * state["m"][k] + g for k, g in grads.items()}
    params = {k: p - 0.1 * m[k] for k, p in state["params"].items()}
    return {"params": params, "m": m}, loss


def first_state() -> dict:
    torch.manual_seed(0)
    params = {
        "up": torch.randn(16, 64) / 4,
        "middle": torch.randn(64, 64) / 8,
        "down": torch.randn(64, 8) / 8,
    }
    momentum = {k: torch.zeros_like(p) for k, p in params.items()}
    return {"params": params, "m": momentum}


def main() -> dict[str, float]:
    """Check the laws of the transforms, and return the norms of the gradients of one step."""
    batch = torch.randn(12, 16), torch.randn(12, 8)
    zt.testing.check_laws(CompressGradients(), train_step, first_state(), batch, tolerance=1e-2)
    zt.testing.check_laws(GradientNorms(), train_step, first_state(), batch)
    zt.testing.check_laws(KeepEverySecond(), train_step, first_state(), batch)
    zt.testing.check_laws(
        Lookahead(), train_step, first_state(), batch
    )  # the first step moves nothing

    mesh = zt.AbstractMesh(dp=2)
    with_norms = zt.chain(zt.shard_params(mesh), GradientNorms(), zt.accumulate(2))
    x, y = batch
    slices = list(zip(x.chunk(2), y.chunk(2)))  # of each rank
    lowered = with_norms(train_step).lower(first_state(), *slices[0])
    _, outputs = lowered.lockstep(first_state(), slices)
    loss, norms = outputs[0]
    print(f"loss {loss.item():.4f}")
    for name, norm in norms.items():
        print(f"{name} {norm.item():.4f}")
    return {name: norm.item() for name, norm in norms.items()}


if __name__ == "__main__":
    main()
