"""Keep leaves of the state, and values of forward, in the memory of the host.

The transform itself moves leaves of the state. For values of forward it writes a hint, and a plan chooses the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import rules
from ..ir.copies import copy_to, is_copy, wait_for_copy
from ..ir.dependencies import components
from ..ir.graph import Eqn, Graph, MemoryKind, Var, producers
from ..ir.layout import LeafSharding
from ..ir.op_facts import is_random
from ..ir.printer import format_bytes
from ..ir.rewriter import Rewriter, prerequisites, reordered
from ..rewrites.erase import erase_marks, erase_trivial
from .base import (
    Transform,
    Where,
    byte_count,
    check_where,
    constructor,
    matches,
    matches_none,
    program_shardings,
)
from .stored_leaves import StoredLeaves
from .waiting_gradients import gradients_on_host


@constructor
def offload(
    *,
    where: Where | None = None,
    memory: int | float | Literal["auto"] | None = None,
    gradients: bool = False,
    across_steps: bool = False,
    at_least: int | float = 1 << 20,
) -> Transform:
    """Keep leaves of the state, such as moments and parameters, and values of forward in the memory of the host.

    Forward, backward and the update each copy the leaves that they read to the device, early enough for the first
    equation that reads them; a leaf that is sharded is copied before it is gathered. The new value is copied back
    during the updates that follow. The step ends when the copies back have ended.

    With `memory`, the step also copies values of forward to the host once they are computed, and back early enough for
    backward: as many as the limit requires, and first those that wait the longest. With `remat(memory=...)` one plan
    decides whether to keep, recompute or move each value. It moves the values that are expensive to recompute, as far
    as compute hides the copies. No bit of a step changes.

    On CUDA devices a leaf on the host is a pinned tensor on the CPU: `step.shard(state)` puts it there, and `zt.load`
    reads it there. Call `torch.cuda.synchronize(device)` before you read or write it yourself. On CPUs it is a tensor
    like any other, and `lowered.memory_analysis()` counts it separately.

    Rewrites:
        m1 = lerp(m, g)                          m' = wait(to_device(m)); m1 = lerp(m', g)
        w1 = sub(w, m1)                    -->   w1 = sub(w, m1)
        return w1, m1                            m1' = wait(to_host(m1, over=m)); return w1, m1'

    Args:
        where: the leaves to move. A pattern for `fnmatch` of their paths, such as "optimizer.*.exp_avg*"; or a function
            `where(path, leaf)` of the path and a meta tensor. "*" moves the whole state. Leaves without dims stay on
            the device.
        memory: the greatest number of bytes that may be live on the device, a limit on the whole step (the same as in
            `prefetch`). "auto" is the memory of the device, less a reserve, if it is known. By default all values of
            forward stay on the device.
        gradients: let gradients wait on the host for an update that needs all of them, as clipping by their norm does.
            Without it they wait on the device. What needs one gradient alone, such as its norm, is computed before.
        across_steps: let the copies of `where`'s leaves to the host continue during the forward of the next step, which
            waits for them. Until then, the values that they copy stay on the device too, within the memory limit.
        at_least: the least size in bytes of a leaf that moves. A copy of a smaller one takes longer to start than it is
            worth.

    Raises: TypeError if `where` is neither of these, if both `where` and `memory` are missing, or for `gradients` or
        `across_steps` without `where`; ValueError if `memory` or `at_least` is not a number of bytes. When the step is
        lowered, ValueError if `where` matches no leaf that is large enough, if the step exceeds the limit with
        everything movable on the host, if it exceeds the cluster's `host_memory`, or for micro-batches with
        `across_steps`.

    Source: Ren et al., ZeRO-Offload, 2021; Rajbhandari et al., ZeRO-Infinity, 2021; Rhu et al., vDNN, 2016; the memory
        kinds of JAX.

    >>> offload(where="optimizer.*.exp_avg*")
    offload(where='optimizer.*.exp_avg*')
    """
    if where is None and memory is None:
        raise TypeError(
            "offload: nothing is to be moved. Pass where='optimizer.*.exp_avg*' for state, memory='auto' for values of "
            "forward, or both."
        )
    for option, value in (("gradients", gradients), ("across_steps", across_steps)):
        if not isinstance(value, bool):
            raise TypeError(f"offload: {option}={value!r}; it is True or False.")
        if value and where is None:
            raise TypeError(
                f"offload: {option}=True is for leaves of the state, and `where` chooses none.\n"
                f"Pass where='optimizer.*.exp_avg*', or leave out {option}."
            )
    limit = byte_count("offload: memory", memory, 1, "auto") if memory is not None else None
    if where is not None:
        check_where("offload", where, "optimizer.*.exp_avg*")
    least = byte_count("offload: at_least", at_least, 0)
    return Offload(where, limit, gradients, across_steps, least)


@dataclass(frozen=True)
class Offload(Transform):
    """The transform that `offload` returns."""

    where: Where | None = None
    memory: int | str | None = None
    gradients: bool = False
    across_steps: bool = False
    at_least: int = 1 << 20

    # After the transforms that decide what forward reads, such as the dtype in which a leaf is gathered.
    phase: ClassVar[float] = 3

    @property
    def memory_limit(self) -> int | None:
        return self.memory if isinstance(self.memory, int) else None

    def within(self, limit: int) -> Transform:
        return self if self.memory is None else dataclasses.replace(self, memory=limit)

    def leaf_sharding(self, path: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> LeafSharding:
        if not leaf.shape or self.where is None or leaf.nbytes < self.at_least:
            return LeafSharding()
        return LeafSharding(memory="host" if matches(self.where, path, leaf) else "device")

    def rewrite(self, graph: Graph) -> Graph:
        if self.memory is not None:
            graph = graph.with_hints(offload=True)
        if self.across_steps:
            if graph.micro > 1:
                raise ValueError(
                    f"offload: across_steps=True, and {graph.name} has {graph.micro} micro-batches. Forward runs once "
                    f"for each of them, and the copies of the step before could go on under the first one only.\n"
                    f"Leave out accumulate, or across_steps."
                )
            graph = graph.with_hints(carry_copies=True)
        return graph if self.where is None else self._with_moved_leaves(graph, self.where)

    def _with_moved_leaves(self, graph: Graph, where: Where) -> Graph:
        memory_of: dict[Var, MemoryKind] = {}
        for v, sharding in program_shardings(graph, [self]).items():
            if sharding.memory != "device":
                memory_of[v] = sharding.memory
        if not memory_of:
            least = format_bytes(self.at_least)
            movable = [v for v in graph.state if v.shape and v.nbytes >= self.at_least]
            condition = f" of {graph.name} that has dims and at least {least}"
            advice = " For smaller ones, pass at_least=0."
            raise matches_none("offload", where, movable, condition, advice)
        # A mark reads a leaf only to name it.
        stored = {v: dataclasses.replace(v, memory=kind) for v, kind in memory_of.items()}
        graph = StoredLeaves(erase_marks(graph), stored, _brought_in, _taken_out).program()
        if self.gradients:
            # On one rank a reduction would hide the cast of a gradient.
            graph = gradients_on_host(erase_trivial(graph), self.at_least)
        return leaf_by_leaf(graph)


def leaf_by_leaf(graph: Graph) -> Graph:
    """Group the equations of the update by the leaf of another memory that they update.

    An optimizer may compute all first moments, then all second moments, and so on. Then all of them would be on the
    device at once. Scalars of the update, such as a bias correction that every leaf reads, are computed before the
    first leaf, if they can be.
    """
    update_of = _leaf_updates(graph)
    places = _places_of_updates(graph, update_of)
    if not places:
        return graph
    needs = prerequisites(graph)
    first_place = min(i for i, e in enumerate(graph.eqns) if update_of.get(e) in places)
    # An equation is sorted by its place. At one place scalars come first.
    keys: dict[Eqn, tuple[int, bool]] = {}
    for i, e in enumerate(graph.eqns):
        update = update_of.get(e)
        place = i
        follows_scalars = True
        if update in places:
            place = places[update]
        elif update is not None and not any(v.shape for v in e.results):
            follows_scalars = False
            earliest = max((keys[maker][0] for maker in needs[e]), default=-1)
            place = min(max(earliest, first_place), i)
        keys[e] = (place, follows_scalars)
    return reordered(graph, keys.__getitem__, needs)


def _may_move(e: Eqn) -> bool:
    # A gradient leaves where it is computed.
    leaves = is_copy(e) and e.out.memory != "device" and "over" not in e.kwargs
    is_fixed = rules(e).remote or is_random(e) or e.hint is not None
    return e.region == "update" and not (is_fixed or leaves)


def _leaf_updates(graph: Graph) -> dict[Eqn, Eqn]:
    """For each equation of the update that may move, the equation that stands for its set.

    A set has the equations that pass values with dims to each other, so it updates one leaf.
    """
    makers = producers(graph.eqns)
    movable: set[Eqn] = set()
    pairs: list[tuple[Eqn, Eqn]] = []
    for e in graph.eqns:
        if _may_move(e):
            movable.add(e)
            pairs.append((e, e))
            pairs += ((makers[v], e) for v in e.ins if v.shape and makers.get(v) in movable)
    return components(pairs)


def _places_of_updates(graph: Graph, update_of: Mapping[Eqn, Eqn]) -> dict[Eqn, int]:
    """The place of each set with a copy: its first equation that computes. Copies do not count."""
    places = {update: len(graph.eqns) for e, update in update_of.items() if is_copy(e)}
    for i, e in enumerate(graph.eqns):
        update = update_of.get(e)
        if update in places and not rules(e).copies:
            places[update] = min(places[update], i)
    return places


def _brought_in(new: Rewriter, leaf: Var, stored: Var) -> list[Eqn]:
    """The copy of a leaf to the device, before it is read there."""
    start = copy_to("device", stored, new.fresh_name(f"{leaf.name}.device"), (leaf.name,))
    return [start, wait_for_copy(start.out)]


def _taken_out(new: Rewriter, value: Var, stored: Var) -> list[Eqn]:
    """The copy of a new value to the memory of its leaf, over the old one."""
    name = new.fresh_name(f"{value.name}.{stored.memory}")
    start = copy_to(stored.memory, value, name, (stored.name,), over=stored)
    return [start, wait_for_copy(start.out)]
