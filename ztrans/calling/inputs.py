"""Inputs: the flat tensors of a call on this rank, and whether a step may overwrite its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.graph import Graph, Var
from ..ir.layout import UserSharding, as_tensor
from ..ir.micro_batches import full_shape
from .call import BoundCall, StepFunction
from .errors import no_state
from .signature import Constant, Leaf, Signature, Surroundings, is_number


class Inputs(NamedTuple):
    """The inputs of a program in a call."""

    leaves: Sequence[Any]  # as the caller passed them; at least the state
    tensors: list[torch.Tensor]  # what this rank holds of each


def local_inputs(
    graph: Graph,
    made_for: Signature,
    axes: Sequence[tuple[str, ...]],
    user_shardings: Sequence[UserSharding | None],
    call: BoundCall,
    function: StepFunction,
    caller: str | None = None,
) -> Inputs:
    """The inputs of a program in a call, and this rank's part of each as a tensor.

    Args:
        graph: the program.
        made_for: the signature that it was traced for.
        axes: for each input, the mesh axes over which transforms distribute it.
        owns: for each input, how the step itself divides it.
        call, function: the call, and its step function.
        caller: the name of the call in errors, by default the name of the program.

    Raises: TypeError for arguments of another structure, shape or dtype, for other constants, and
        for an input that the step divides in another way.
    """
    name = caller or graph.name
    leaves = _traced_leaves(name, made_for, call, function)
    tensors: list[torch.Tensor] = []
    for v, user_sharding, leaf_axes, x in zip(
        graph.inputs, user_shardings, axes, leaves, strict=True
    ):
        sharding = UserSharding.of(x, leaf_axes)
        shape = shape_of(x)
        expected_shape = user_sharding.shape if user_sharding else full_shape(graph, v)
        tensor = local_part(x) if len(tensors) < graph.num_state else read_argument(x)
        if user_sharding != sharding or shape != expected_shape or v.dtype != tensor.dtype:
            expected = dataclasses.replace(v, shape=expected_shape)
            got = Var("", tensor.dtype, shape).type
            raise TypeError(
                f"{name}: compiled for {expected}{user_sharding or ''}, called with {got}{sharding or ''}.\n"
                f"Lower the step for such arguments, or call the step itself, which compiles a program for each size."
            )
        tensors.append(tensor)
    return Inputs(leaves, tensors)


def _traced_leaves(name: str, made_for: Signature, call: BoundCall, function: StepFunction) -> list:
    """The leaves of a call that are inputs of the program.

    Raises: TypeError if the tree or a constant is another one than in the trace.
    """
    leaves, tree = pytree.tree_flatten(call.tree())
    if (tree, call.names) != (made_for.tree, made_for.names):
        raise TypeError(
            f"{name}: {_structures(made_for, Signature.of(call, function))}.\n"
            f"Lower the step for such arguments, or call the step itself, which compiles a program for each structure."
        )
    traced = []
    for i, (leaf, x) in enumerate(zip(made_for.leaves, leaves)):
        if isinstance(leaf.value, Constant):
            if leaf != Leaf.of(x, i < made_for.num_state):
                path = made_for.paths[i]
                raise TypeError(
                    f"{name}: compiled for {path}={leaf.value.value!r}, called with {x!r}."
                )
        else:
            traced.append(x)
    return traced


def _structures(made_for: Signature, present: Signature) -> str:
    """How the structure of a call differs from the structure that its program was traced for."""
    new = present.paths_missing_in(made_for)
    lost = made_for.paths_missing_in(present)
    changes = []
    if new:
        changes.append(f"called with {', '.join(new[:4])}, which it was compiled without")
    if lost:
        changes.append(f"called without {', '.join(lost[:4])}, which it was compiled with")
    if not changes:
        return f"compiled for arguments {made_for.tree}, called with {present.tree}"
    return "; ".join(changes)


def check_surroundings(name: str, made_for: Signature, present: Surroundings) -> None:
    """Check that nothing besides its arguments that a program is specialised on has changed.

    Raises: TypeError that says what has changed.
    """
    if present != made_for.surroundings:
        changes = made_for.surroundings.changes(present)
        lines = "".join(f"  * {change}\n" for change in changes[:4])
        raise TypeError(
            f"{name}: what the step reads besides its arguments has changed since it was traced:\n{lines}"
            f"Lower it again, or call the step itself, which is then traced again."
        )


def check_state(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises: TypeError if a leaf of the state is neither a tensor nor a number."""
    for path, x in zip(paths, leaves):
        if not isinstance(x, torch.Tensor) and not is_number(x):
            raise no_state(path, x)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of a tensor, before the step itself divides it, or of a number."""
    return tuple(getattr(leaf, "shape", ()))


def read_argument(x: Any) -> torch.Tensor:
    """This rank's part of an argument, computed if the tensor is conjugated or negated lazily."""
    return local_part(x).resolve_conj().resolve_neg()


def local_part(x: Any) -> torch.Tensor:
    """This rank's part of an argument: of a DTensor its local tensor, a number as a tensor."""
    x = x.to_local() if isinstance(x, DTensor) else as_tensor(x)
    return x.detach() if x.requires_grad else x


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that a step may overwrite its state: its leaves are contiguous and share no memory.

    Raises: TypeError that names the leaf, or the two inputs that share memory.
    """
    for v, x in zip(graph.inputs[: graph.num_state], inputs):
        if x.is_conj() or x.is_neg():
            raise TypeError(
                _donated(graph, f"{v.name} is conjugated or negated only when it is read")
            )
        if not x.is_contiguous():
            raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
    for i, j in overlapping(inputs):
        if min(i, j) < graph.num_state:
            raise TypeError(
                _donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory")
            )


def _donated(graph: Graph, reason: str) -> str:
    return (
        f"{graph.name}: {reason}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )


def span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the one after its last byte."""
    start = x.data_ptr()
    size = x.numel()
    if size and not x.is_contiguous():
        size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
    return start, start + size * x.itemsize


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """For each tensor that shares memory with one that begins before it: their positions."""
    spans = [(*span(x), i) for i, x in enumerate(tensors) if x.numel()]
    farthest = 0  # the end of the memory of the tensors so far
    last = 0  # the position of the tensor that ends there
    for start, end, i in sorted(spans):
        if start < farthest:
            yield last, i
        if end > farthest:
            farthest = end
            last = i
