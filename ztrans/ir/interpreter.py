"""The meaning of a program: its equations, one after the other, on plain tensors.

`evaluate` runs a program on one rank; `lockstep` runs all ranks of a lowered program in one
process, equation by equation, so that what eight ranks compute is known in milliseconds; the step's
own collectives (see `groups`) among them. Every transform is tested against this file; it knows
nothing of processes, streams or buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import ops
from .ambient import refuse_inside, without_autocast
from .collectives import ALL_GATHER, ALL_REDUCE, GRADIENT, PMEAN, PSUM, REDUCE_SCATTER, SHARD, WAIT, is_start
from .graph import Eqn, Graph, Split, Var, substitute, variables
from .layout import cut, localize
from .operations import called
from .printer import op_name
from .source import where
from .user_collectives import is_users

Env = dict[Var, Any]
_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


def evaluate(graph: Graph, *inputs: torch.Tensor) -> list[Any]:
    """The outputs of a program on one rank, from its flat inputs.

    >>> x, y = Var("x", torch.float32, (2,)), Var("y", torch.float32, (2,))
    >>> double = Graph("double", (x,), (Eqn(torch.ops.aten.mul.Tensor, (x, 2), (y,)),), (y,), 0)
    >>> evaluate(double, torch.tensor([1.0, 2.0]))
    [tensor([2., 4.])]
    """
    return lockstep(graph, [inputs])[0]


def coordinates(mesh: Sequence[tuple[str, int]]) -> list[dict[str, int]]:
    """Where each rank of a mesh lies, in rank order.

    >>> coordinates([("host", 2), ("dp", 2)])[2]
    {'host': 1, 'dp': 0}
    """
    axes = [axis for axis, _ in mesh]
    return [dict(zip(axes, at)) for at in itertools.product(*(range(size) for _, size in mesh))]


def lockstep(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """The outputs of every rank, from every rank's flat inputs, which are not changed.

    Raises: ValueError when the number of ranks is not that of the mesh, or the step's own collective is
        over a group that is none of its axes, or from one rank to another. TypeError inside of torch.func's
        transforms.
    """
    refuse_inside("lockstep", ranks)
    places = coordinates(graph.mesh)
    if len(ranks) != len(places):
        raise ValueError(f"lockstep: the program is for {len(places)} ranks and was given inputs for {len(ranks)}.")
    envs: list[Env] = [dict(zip(graph.inputs, inputs, strict=True)) for inputs in ranks]
    last = {v: i for i, e in enumerate(graph.eqns) for v in e.ins} | {v: -1 for v in variables(graph.outputs)}
    with torch.no_grad(), without_autocast():
        for i, eqn in enumerate(graph.eqns):
            if is_start(eqn):
                for group in _groups(places, eqn.kwargs["axis"]):
                    _collective(eqn, [envs[r] for r in group])
            elif is_users(eqn) and eqn.op is not _WAIT_TENSOR:
                for group in _groups(places, eqn.args[-1]):
                    _users_own(eqn, [envs[r] for r in group])
            else:
                for env, at in zip(envs, places):
                    _local(eqn, env, graph, at)
            for dead in {v for v in eqn.ins if last[v] == i}:
                for env in envs:
                    del env[dead]
    return [[substitute(out, env.__getitem__) for out in graph.outputs] for env in envs]


def scatter(graph: Graph, state: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Every rank's part of a full flat state."""
    ranks = []
    for at in coordinates(graph.mesh):
        parts = list(state)
        for i, v in enumerate(graph.inputs[: graph.num_state]):
            if v.split is not None:
                parts[i] = cut(parts[i], v.split, graph.axes[v.split.axis], at[v.split.axis])
        ranks.append(parts)
    return ranks


def join(graph: Graph, ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The full flat state of which the ranks hold parts: the inverse of `scatter`."""
    places = coordinates(graph.mesh)
    full = list(ranks[0][: graph.num_state])
    for i, v in enumerate(graph.inputs[: graph.num_state]):
        if v.split is not None:
            group = next(_groups(places, v.split.axis))
            full[i] = torch.cat([ranks[r][i] for r in group], v.split.dim)
    return full


def _groups(places: list[dict[str, int]], axis: str) -> Iterator[list[int]]:
    """The ranks that differ only along `axis`, each group in the order of the axis."""
    if axis not in places[0]:
        raise ValueError(f"lockstep: {axis!r} is no axis of the mesh, which has {', '.join(map(repr, places[0]))}.")
    groups: dict[tuple, list[int]] = {}
    for rank, at in enumerate(places):
        groups.setdefault(tuple((a, i) for a, i in at.items() if a != axis), []).append(rank)
    return iter(groups.values())


def _local(eqn: Eqn, env: Env, graph: Graph, at: dict[str, int]) -> None:
    read = env.__getitem__
    if eqn.op in (WAIT, _WAIT_TENSOR, GRADIENT, PMEAN, PSUM):  # marks that no transform has used mean nothing
        env[eqn.outs[0]] = env[eqn.args[0]]
    elif eqn.op is SHARD:
        split = Split(eqn.kwargs["axis"], eqn.args[1])
        env[eqn.outs[0]] = cut(env[eqn.args[0]], split, graph.axes[split.axis], at[split.axis])
    else:
        here = localize(eqn, graph.axes, at)
        out = called(here.op)(*substitute(here.args, read), **substitute(here.kwargs, read))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        outs = [x for o in outs for x in (o if isinstance(o, list) else (o,))]
        env.update((var, value) for var, value in zip(eqn.outs, outs) if var is not None)


def _collective(eqn: Eqn, envs: list[Env]) -> None:
    """One collective, on the ranks of one group."""
    for member, future in zip(eqn.ins, eqn.outs):
        parts = [env[member] for env in envs]
        wire = eqn.kwargs["dtype"]
        if wire is not None:
            parts = [p.to(wire) for p in parts]
        if eqn.op is ALL_GATHER:
            whole = torch.cat(parts, member.split.dim)
        elif eqn.op not in (REDUCE_SCATTER, ALL_REDUCE):
            raise ValueError(f"lockstep: {eqn.op} is no collective.")
        else:
            whole = ops.reduce(parts, eqn.kwargs["op"], future.dtype)
        for rank, env in enumerate(envs):
            if eqn.op is REDUCE_SCATTER:
                # clone: a part must not keep the whole alive
                env[future] = cut(whole, future.split, len(envs), rank).clone()
            else:
                env[future] = whole


def _users_own(eqn: Eqn, envs: list[Env]) -> None:
    """One of the step's own collectives, on the ranks of one group."""
    for member, out in zip(eqn.ins, eqn.outs):
        for env, value in zip(envs, _exchanged(eqn, [env[member] for env in envs])):
            env[out] = value


def _exchanged(eqn: Eqn, terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank has of `terms`, one from each rank, after one of the step's own collectives."""
    how = eqn.args[1:-1]
    kind, ranks = op_name(eqn.op).removesuffix("_coalesced"), range(len(terms))
    if kind in ("all_reduce", "reduce_scatter_tensor"):
        whole = ops.reduce(terms, {"avg": "mean"}.get(how[0], how[0]), terms[0].dtype)
        return [whole for _ in ranks] if kind == "all_reduce" else [c.clone() for c in whole.chunk(len(ranks))]
    if kind == "all_gather_into_tensor":
        return [torch.cat(terms) for _ in ranks]
    if kind == "broadcast":
        return [terms[how[0]] for _ in ranks]
    if kind == "all_to_all_single":
        sent = [term.split(how[1]) for term in terms]
        return [torch.cat([sent[r][rank] for r in ranks]) for rank in ranks]
    raise ValueError(
        f"lockstep: the step's own {kind} goes from one rank to another, and here all ranks run one program.\n"
        f"  at {where(eqn.source)}\n"
        f"Run the step on real ranks, lowered.compile() on each, or send with a collective (all_to_all, broadcast)."
    )
