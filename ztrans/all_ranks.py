"""One step of all ranks in one process, equation by equation: what `Lowered.lockstep` runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .calling.call import BoundCall
from .ir.ambient import refuse_inside
from .ir.graph import Graph
from .ir.interpreter import coordinates, join_state, lockstep, on_rank, replica_state
from .ir.printer import counted
from .ops import narrowed
from .rewrites.across_steps import gathers_before
from .rewrites.half_copies import copies_of
from .tracing.recording import Recording


def step_of_all_ranks(
    graph: Graph, recording: Recording, state: Any, batches: Sequence[tuple | Mapping[str, Any]]
) -> tuple[Any, list[Any]]:
    """The new state and the output of each rank, of a program and its recording. `Lowered.lockstep` has the details."""
    refuse_inside(f"{graph.name}.lockstep", (state, batches))
    _check_whole_here(recording, graph.name)
    state = _as_stored(recording, graph, state)
    size = math.prod(dict(graph.mesh).values())
    if not isinstance(batches, Sequence) or len(batches) != size:
        kind = f"a {type(batches).__name__}"
        if isinstance(batches, Sequence):
            kind = counted(len(batches), "batch", "batches")
        raise ValueError(
            f"{graph.name}.lockstep: {kind} for the {size} ranks of the mesh.\n"
            f"Pass a list with the batch arguments of each rank: [(x0, y0), (x1, y1), ...]."
        )
    num_state = graph.num_state
    ranks = []
    for rank, place in enumerate(coordinates(graph.mesh, graph.joint)):
        own_state = replica_state(graph, state, place)
        inputs = inputs_of_rank(recording, graph.name, rank, own_state, batches[rank])
        leaves = [x.contiguous() for x in inputs[:num_state]]
        own = on_rank(graph, leaves, place)
        ranks.append([*own, *inputs[num_state:], *copies_of(graph, own)])
    # There is no step before this one, so it also runs the gathers that such a step would have started.
    if graph.carried:
        gathered = lockstep(gathers_before(graph), ranks)
        ranks = [leaves + futures for leaves, futures in zip(ranks, gathered)]
    results = lockstep(graph, ranks)

    new_leaves = join_state(graph, results)
    tree = recording.tree_of_results(graph.added)
    # The last results are copies of leaves and futures for the next step.
    end = num_state + len(graph.results) - len(graph.hidden)
    outputs = []
    for result in results:
        new_state, output = pytree.tree_unflatten([*new_leaves, *result[num_state:end]], tree)
        outputs.append(output)
    return new_state, outputs


def inputs_of_rank(
    recording: Recording, step: str, rank: int, state: Any, batch: tuple | Mapping[str, Any]
) -> list[torch.Tensor]:
    """The inputs of the program on a rank that has this batch.

    Raises: TypeError if the program was not traced for them.
    """
    name = f"{step}.lockstep"
    function = recording.function
    if isinstance(batch, Mapping):
        call = BoundCall.of(function, (state,), batch)
    elif isinstance(batch, tuple | list):
        call = BoundCall.of(function, (state, *batch), {})
    else:
        raise TypeError(
            f"{name}: the batch of rank {rank} is a {type(batch).__name__}.\n"
            f"Pass its arguments as a tuple, (x,), or as a dict by name."
        )
    recording.check_fits(call, f"{name}, rank {rank}")
    return recording.local_inputs(call).tensors


def _as_stored(recording: Recording, graph: Graph, state: Any) -> Any:
    """A state in which leaves that the program stores in another dtype than the step computes have that dtype."""
    leaves, tree = pytree.tree_flatten(state)
    for i, (computed, stored) in enumerate(zip(recording.graph.state, graph.state)):
        x = leaves[i] if i < len(leaves) else None
        if isinstance(x, torch.Tensor) and x.dtype == computed.dtype:
            leaves[i] = narrowed(x, stored.dtype)
    return pytree.tree_unflatten(leaves, tree)


def _check_whole_here(recording: Recording, name: str) -> None:
    """Raises: ValueError if the step itself divides an input, because other ranks hold the other parts."""
    for user_sharding, path in zip(recording.user_shardings, recording.paths_of_inputs):
        if user_sharding is not None:
            raise ValueError(
                f"{name}.lockstep: {path} is a DTensor over {', '.join(map(repr, user_sharding.axes))}, and this "
                f"process has only its own part of it.\nRun the step on real ranks: lowered.compile() on each."
            )
