"""Keep state that only the update reads, and values of forward, in the memory of the host.

The transform itself moves leaves of the state. For values of forward it writes a hint, and a plan chooses the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from ..ir.collectives import rules
from ..ir.copies import copy_to, is_copy, wait_for_copy
from ..ir.graph import Eqn, Graph, MemoryKind, Var, producers, substitute, users
from ..ir.layout import LeafSharding
from ..ir.op_facts import is_random
from ..ir.printer import first_names
from ..ir.rewriter import Rewriter, prerequisites, reordered
from ..ir.source import where as line_of
from .base import Transform, byte_count, constructor, program_shardings

Where = str | Callable[[str, torch.Tensor], bool]
_LISTED = 8  # leaves that an error lists


@constructor
def offload(
    *,
    where: Where | None = None,
    memory: int | float | Literal["auto"] | None = None,
    across_steps: bool = False,
) -> Transform:
    """Keep state leaves that only the update reads, such as moments, and values of forward in the memory of the host.

    A leaf is copied to the device during the end of backward, early enough for its update, and its new value is copied
    back during the updates that follow. The step ends when the copies back have ended.

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
            `where(path, leaf)` of the path and a meta tensor. Leaves without dims stay on the device.
        memory: the greatest number of bytes that may be live on the device, a limit on the whole step (the same as in
            `prefetch`). "auto" is the memory of the device, less a reserve, if it is known. By default all values of
            forward stay on the device.
        across_steps: let the copies of `where`'s leaves to the host continue during the forward of the next step, which
            waits for them. Until then, the values that they copy stay on the device too, within the memory limit.

    Raises: TypeError if `where` is neither of these, if both `where` and `memory` are missing, or for `across_steps`
        without `where`; ValueError if `memory` is not a number of bytes. When the step is lowered, ValueError if
        `where` matches no leaf, if forward or backward reads a leaf that it matches, if the step exceeds the limit with
        everything movable on the host, if it exceeds the cluster's `host_memory`, or for micro-batches with
        `across_steps`.

    Source: Ren et al., ZeRO-Offload, 2021; Rhu et al., vDNN, 2016; the memory kinds of JAX.

    >>> offload(where="optimizer.*.exp_avg*")
    offload(where='optimizer.*.exp_avg*')
    """
    if where is None and memory is None:
        raise TypeError(
            "offload: nothing is to be moved. Pass where='optimizer.*.exp_avg*' for state, memory='auto' for values of "
            "forward, or both."
        )
    if not isinstance(across_steps, bool):
        raise TypeError(f"offload: across_steps={across_steps!r}; it is True or False.")
    if across_steps and where is None:
        raise TypeError(
            "offload: across_steps=True is for leaves of the state, and `where` chooses none.\n"
            "Pass where='optimizer.*.exp_avg*', or leave out across_steps."
        )
    limit = byte_count("offload: memory", memory, 1, "auto") if memory is not None else None
    if where is not None and not isinstance(where, str) and not callable(where):
        raise TypeError(
            f"offload: where={where!r}; it is a pattern of paths, such as 'optimizer.*.exp_avg*', or a function "
            f"where(path, leaf) that returns a bool."
        )
    return Offload(where, limit, across_steps)


@dataclass(frozen=True)
class Offload(Transform):
    """The transform that `offload` returns."""

    where: Where | None = None
    memory: int | str | None = None
    across_steps: bool = False

    @property
    def memory_limit(self) -> int | None:
        return self.memory if isinstance(self.memory, int) else None

    def within(self, limit: int) -> Transform:
        return self if self.memory is None else dataclasses.replace(self, memory=limit)

    def leaf_sharding(self, path: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> LeafSharding:
        if not leaf.shape or self.where is None:
            return LeafSharding()
        matches = (
            fnmatchcase(path, self.where) if isinstance(self.where, str) else self.where(path, leaf)
        )
        return LeafSharding(memory="host" if matches else "device")

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
        moving = _MovingLeaves(graph)
        for v, sharding in program_shardings(graph, [self]).items():
            if sharding.memory != "device":
                moving.move(v, sharding.memory)
        if not moving.moved:
            raise _matches_none(where, graph)
        return leaf_by_leaf(moving.applied())


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
    is_fixed = rules(e).remote or is_random(e) or e.hint is not None
    return e.region == "update" and not is_fixed


def _leaf_updates(graph: Graph) -> dict[Eqn, Eqn]:
    """For each equation of the update that may move, the representative of its set (union-find).

    A set has the equations that pass values with dims to each other, so it updates one leaf.
    """
    makers = producers(graph.eqns)
    parents: dict[Eqn, Eqn] = {}

    def root(e: Eqn) -> Eqn:
        while parents[e] is not e:
            parents[e] = parents[parents[e]]
            e = parents[e]
        return e

    for e in graph.eqns:
        if not _may_move(e):
            continue
        parents[e] = e
        for v in e.ins:
            maker = makers.get(v)
            if v.shape and maker in parents:
                parents[root(maker)] = root(e)
    return {e: root(e) for e in parents}


def _places_of_updates(graph: Graph, update_of: Mapping[Eqn, Eqn]) -> dict[Eqn, int]:
    """The place of each set with a copy: its first equation that computes. Copies do not count."""
    places = {update: len(graph.eqns) for e, update in update_of.items() if is_copy(e)}
    for i, e in enumerate(graph.eqns):
        update = update_of.get(e)
        if update in places and not rules(e).copies:
            places[update] = min(places[update], i)
    return places


class _MovingLeaves:
    """The edits that move leaves of a program to another memory.

    Attributes:
        moved: for each leaf, the value in its memory that replaces it among the inputs.
        on_device: for each leaf that is read, or returned as another leaf, its copy on the device.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.new = Rewriter(graph)
        self.readers = users(graph)
        self.moved: dict[Var, Var] = {}
        self.on_device: dict[Var, Var] = {}

    def move(self, leaf: Var, kind: MemoryKind) -> None:
        """Keep a leaf in a memory, and copy it to the device before its first reader."""
        readers = self.readers.get(leaf, [])
        for e in readers:
            if e.region != "update":
                raise _is_read(leaf, e)
        self.moved[leaf] = dataclasses.replace(leaf, memory=kind)
        returned_at = [i for i, v in enumerate(self.graph.outputs) if v is leaf]
        position = self.graph.inputs.index(leaf)
        # A leaf that nothing reads stays in its memory. Only a return as another leaf needs it on the device.
        if not readers and returned_at in ([], [position]):
            return
        name = self.new.fresh_name(f"{leaf.name}.device")
        first = readers[0] if readers else None
        start = copy_to("device", self.moved[leaf], name, (leaf.name,)).like(first, "update")
        wait = wait_for_copy(start.out).like(start)
        self.new.insert_before(first, start, wait)
        self.new.replace_reads(readers, leaf, wait.out)
        self.on_device[leaf] = wait.out

    def applied(self) -> Graph:
        """The edited program, which also copies the new values of the leaves to their memories."""
        new_state = []
        for leaf, new in self.graph.leaves:
            value = self.on_device.get(new, new)
            if leaf in self.moved:
                # If the step returns another leaf here, that leaf's value on the device is copied.
                moved = self.moved[leaf]
                value = moved if new is leaf else self._copied_over(moved, value)
            new_state.append(value)
        results = substitute(self.graph.results, lambda v: self.on_device.get(v, v))
        inputs = tuple(self.moved.get(v, v) for v in self.graph.inputs)
        return self.new.applied().replace(inputs=inputs, outputs=(*new_state, *results))

    def _copied_over(self, old: Var, new: Var) -> Var:
        """The new value of a leaf in its memory, over the old one."""
        maker = self.new.makers.get(new)
        name = self.new.fresh_name(f"{new.name}.{old.memory}")
        start = copy_to(old.memory, new, name, (old.name,), over=old).like(maker, "update")
        wait = wait_for_copy(start.out).like(start)
        if maker is None:
            self.new.insert_before(None, start, wait)
        else:
            self.new.insert_after(maker, start, wait)
        return wait.out


def _matches_none(where: Where, graph: Graph) -> ValueError:
    names = [v.name for v in graph.state if v.shape]
    option = repr(where) if isinstance(where, str) else getattr(where, "__name__", repr(where))
    return ValueError(
        f"offload: where={option} matches no leaf of the state of {graph.name} that has dims.\n"
        f"These are {first_names(names, _LISTED) or 'none'}."
    )


def _is_read(leaf: Var, e: Eqn) -> ValueError:
    return ValueError(
        f"offload: {leaf.name} is read in {e.region}, and only state that the update alone reads can be on the host, "
        f"such as moments.\n  at {line_of(e.source)}\nLet `where` leave it out."
    )
