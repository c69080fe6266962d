"""A mixture of experts whose experts live on the ranks of axis `ep`, and the same program in one process.

Every token goes to one expert. With a capacity of all tokens none is dropped, so it does not matter how they are cut
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.ir.graph import Graph
from ztrans.ir.interpreter import coordinates, lockstep, split_state

EXPERTS, WIDTH, INNER = 4, 6, 10


def is_expert(path: str, leaf: Any = None) -> bool:
    return path.rpartition(".")[2] in ("up", "down")


def inner(path: str, leaf: Any) -> int:
    """The dim along which to cut a leaf: that of experts is not the first."""
    return 1 if is_expert(path) else 0


def state(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Parameters and momenta, with all experts."""
    random = torch.Generator().manual_seed(0)
    shapes = {"dense": (WIDTH, WIDTH), "router": (WIDTH, EXPERTS), "bias": (WIDTH,),
              "up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH)}  # fmt: skip
    params = {
        k: (torch.randn(s, generator=random, dtype=torch.float64) / 2).to(dtype)
        for k, s in shapes.items()
    }
    return {"params": params, "m": {k: torch.zeros_like(p) for k, p in params.items()}}


def batches(steps: int, rows: int = 16, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, WIDTH, generator=random, dtype=torch.float64).to(dtype)
        for _ in range(steps)
    ]


def routed(
    x: torch.Tensor, logits: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each token at its expert, [token, expert, place], and the weight of what that returns."""
    weight, expert = torch.softmax(logits, -1).max(-1)
    chosen = (expert[:, None] == torch.arange(EXPERTS)).to(x.dtype)
    place = (chosen.cumsum(0) - 1)[..., None] == torch.arange(capacity)
    return chosen[..., None] * place.to(x.dtype), weight


def loss(
    params: dict[str, torch.Tensor],
    x: torch.Tensor,
    exchange: Callable = lambda x: x,
    ranks: int = 1,
) -> torch.Tensor:
    """The loss of one rank's tokens; `exchange` sends row r of its argument to rank r of `ep`, which has that many."""
    h = torch.tanh(x @ params["dense"] + params["bias"])
    places, weight = routed(h, h @ params["router"], len(x))
    sent = torch.einsum("nec,nd->ecd", places, h).reshape(ranks, EXPERTS // ranks, len(x), WIDTH)
    mine = exchange(sent).transpose(0, 1).reshape(EXPERTS // ranks, ranks * len(x), WIDTH)
    out = torch.relu(mine @ params["up"]) @ params["down"]
    back = exchange(out.reshape(EXPERTS // ranks, ranks, len(x), WIDTH).transpose(0, 1))
    y = torch.einsum("nec,ecd->nd", places, back.reshape(EXPERTS, len(x), WIDTH))
    return (h + y * weight[:, None] - x.roll(1, 1)).square().mean()


def make_step(exchange: Callable = lambda x: x, ranks: int = 1) -> Callable:
    """A train step with momentum; gradients are clipped by their norm over all experts."""

    def step(state, x):
        leaves = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        value = loss(leaves, x, exchange, ranks)
        grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        squares = {k: g.square().sum() for k, g in grads.items()}
        dense = sum(s for k, s in squares.items() if not is_expert(k))
        experts = zt.psum(sum(s for k, s in squares.items() if is_expert(k)), "ep")
        scale = 1 / (1 + (dense + experts).sqrt())
        m = {k: 0.9 * m + grads[k] * scale for k, m in state["m"].items()}
        return {
            "params": {k: p - 0.5 * m[k] for k, p in state["params"].items()},
            "m": m,
        }, value.detach()

    return step


def of_rank(full: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The state of one rank of `ep`: its experts, and everything else."""
    cut = lambda tree: {k: x.chunk(ranks)[rank] if is_expert(k) else x for k, x in tree.items()}
    return {k: cut(tree) for k, tree in full.items()}


def divided(full: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """The full state with its experts as DTensors on `mesh`."""
    cut = lambda tree: {
        k: distribute_tensor(x, mesh, [Shard(0)]) if is_expert(k) else x for k, x in tree.items()
    }
    return {k: cut(tree) for k, tree in full.items()}


def with_dtensors(step: Callable) -> Callable:
    """A step of `make_step` for a state with DTensors, whose local parts it uses."""

    def wrapped(state, x):
        local = pytree.tree_map_only(DTensor, DTensor.to_local, state)
        new, value = step(local, x)
        again = lambda p, old: (
            DTensor.from_local(p, old.device_mesh, old.placements)
            if isinstance(old, DTensor)
            else p
        )
        return pytree.tree_map(again, new, state), value

    return wrapped


def trained(
    graph: Graph, full: dict[str, Any], data: list[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The full state after a step for each batch on all ranks of a program, and the losses of the last step."""
    places, ranks = coordinates(graph.mesh, graph.joint), graph.axes["ep"]
    of_ep = [split_state(graph, pytree.tree_leaves(of_rank(full, e, ranks))) for e in range(ranks)]
    states = [of_ep[at["ep"]][rank] for rank, at in enumerate(places)]
    for x in data:
        outs = lockstep(graph, [[*s, part] for s, part in zip(states, x.chunk(len(places)))])
        states = [out[: graph.num_state] for out in outs]
    leaves = []
    for i, v in enumerate(graph.state):
        has = lambda at, e, v=v: at["ep"] == e or not is_expert(v.name)
        parts = [
            _joined(v, [s[i] for s, at in zip(states, places) if has(at, e)]) for e in range(ranks)
        ]
        leaves.append(torch.cat(parts) if is_expert(v.name) else parts[0])
    return pytree.tree_unflatten(leaves, pytree.tree_structure(full)), [out[-1] for out in outs]


def _joined(v: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """A leaf from the parts of the ranks that hold the same; a leaf that is not cut must be equal on all of them."""
    if v.split is not None:
        whole = torch.cat(parts, v.split.dim)
        return whole.narrow(v.split.dim, 0, v.shape[v.split.dim])
    assert all(torch.equal(parts[0], part) for part in parts), v
    return parts[0]
