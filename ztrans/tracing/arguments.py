"""The arguments of a step: how they are passed, what this rank holds of them, and which of them it may write to."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.graph import Graph, Layout, Var
from ..ir.layout import AbstractMesh, placements
from .trace import Abstract, Program


class Arguments(NamedTuple):
    """The arguments of one call of a step, in the order of its parameters, however the caller passed them.

    The last `len(names)` values of `batch` are passed by name: those of keyword-only parameters, and of parameters
    that follow one whose default was kept. A default that is kept is not an argument: the step reads it as it reads
    a global.
    """

    state: Any
    batch: tuple
    names: tuple[str, ...] = ()

    @staticmethod
    def of(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of `fn(*args, **kwargs)`: equal calls give equal arguments.

        Raises: TypeError as Python does, where `fn` does not take such arguments.

        >>> def step(state, x, scale=1.0): ...
        >>> Arguments.of(step, ("s",), {"x": 2})
        Arguments(state='s', batch=(2,), names=())
        >>> Arguments.of(step, ("s", 2), {"rate": 3})
        Traceback (most recent call last):
            ...
        TypeError: step() got an unexpected keyword argument 'rate'
        """
        if kwargs or not args:
            try:
                bound = inspect.signature(fn).bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{getattr(fn, '__name__', type(fn).__name__)}() {error}") from None
            args, kwargs = bound.args, dict(sorted(bound.kwargs.items()))
        if not args:
            raise TypeError(f"{getattr(fn, '__name__', type(fn).__name__)}() takes a state as its first argument.")
        return Arguments(args[0], (*args[1:], *kwargs.values()), tuple(kwargs))

    def leaves(self) -> tuple[list, pytree.TreeSpec]:
        """All leaves, those of the state first, and the tree that they come from."""
        return pytree.tree_flatten((self.state, *self.batch))

    def key(self) -> tuple:
        """The properties of these arguments that a program is specialised on."""
        leaves, tree = self.leaves()
        num_state = len(pytree.tree_leaves(self.state))
        # A number in the state comes back as a tensor; in the batch it is something else: it does not vary.
        described = tuple(
            (
                Abstract.of(x, i < num_state),
                x.placements if isinstance(x, DTensor) else None,
                i < num_state or isinstance(x, torch.Tensor),
                isinstance(x, torch.Tensor) and x.requires_grad,
            )
            for i, x in enumerate(leaves)
        )
        return tree, self.names, num_state, described


def any_size(key: tuple) -> tuple:
    """A key that starts with that of `Arguments`, without the sizes of the batch."""
    tree, names, num_state, described, *rest = key
    sizeless = tuple(
        (len(x.shape), x.dtype, x.device, *more) if isinstance(x, Abstract) and i >= num_state else (x, *more)
        for i, (x, *more) in enumerate(described)
    )
    return tree, names, num_state, sizeless, *rest


def traced_leaves(program: Program, name: str, arguments: Arguments) -> list:
    """The leaves of a call that are inputs of the program.

    Raises: TypeError where the others are not what the program was traced for.
    """
    leaves, tree = arguments.leaves()
    if (tree, arguments.names) != (program.in_tree, program.names):
        compiled, called = _listed(program.in_tree, program.names), _listed(tree, arguments.names)
        raise TypeError(f"{name}: compiled for arguments {compiled}, called with {called}.")
    for i, value in program.static:
        if leaves[i] != value:
            raise TypeError(f"{name}: compiled for {program.paths[i]}={value!r}, called with {leaves[i]!r}.")
    static = {i for i, _ in program.static}
    return [x for i, x in enumerate(leaves) if i not in static]


def _listed(tree: pytree.TreeSpec, names: tuple[str, ...]) -> str:
    return f"{tree}, the last by name: {', '.join(names)}" if names else str(tree)


def check_captured(program: Program, name: str) -> None:
    """Raises: TypeError where what the step reads besides its arguments is not what it was traced for."""
    now = program.captured.key()
    if now != program.made_for:
        changes = program.captured.changes(program.made_for, now)
        raise TypeError(
            f"{name}: what the step reads besides its arguments has changed since it was traced:\n"
            + "".join(f"  * {change}\n" for change in changes[:4])
            + "Lower it again, or call the step itself, which is then traced anew."
        )


def flat(
    program: Program, graph: Graph, mesh: DeviceMesh | AbstractMesh | None, arguments: Arguments
) -> tuple[list, list[torch.Tensor]]:
    """The leaves of a call that are inputs of the program, and the tensors that this rank holds of them.

    Raises: TypeError where they are not what the program was compiled for.
    """
    leaves = traced_leaves(program, graph.name, arguments)
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:  # a single rank holds all of a leaf, whatever its layout
        layouts = [v.layout for v in graph.inputs[: graph.num_state]]
        check_laid_out(graph.name, mesh, program.paths, leaves, layouts, lowered=True)
    local = [local_part(x) for x in leaves]
    # A program reads memory, and a lazily conjugated or negated tensor is not what its memory holds.
    local[graph.num_state :] = [x.resolve_conj().resolve_neg() for x in local[graph.num_state :]]
    for v, x, y in zip(graph.inputs, leaves, local, strict=True):
        if v.shape != tuple(getattr(x, "shape", ())) or v.dtype != y.dtype:
            got = Var("", y.dtype, tuple(getattr(x, "shape", ()))).type
            raise TypeError(f"{graph.name}: compiled for {v}, called with {got}.")
    return leaves, local


def check_laid_out(
    name: str,
    mesh: DeviceMesh,
    paths: Sequence[str],
    leaves: Sequence[Any],
    layouts: Sequence[Layout],
    lowered: bool = False,
) -> None:
    """Check that each leaf of the state is on this mesh and cut as its layout says.

    Leaves beyond the last of `layouts` are not state. Layouts of a lowered program say nothing about axes of size 1.

    Raises: TypeError that names the first leaves for which this is not so.
    """
    wanted = {layout: placements(layout, mesh) for layout in set(layouts)}
    wrong = []
    for path, leaf, layout in zip(paths, leaves, layouts):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim or isinstance(leaf, DTensor)):
            want = wanted[layout]
            if not isinstance(leaf, DTensor):
                wrong.append(f"{path}: expected a DTensor {list(leaf.shape)} laid out {want}, got a full tensor")
            elif leaf.device_mesh != mesh:
                wrong.append(f"{path}: lies on another mesh, {leaf.device_mesh}")
            elif any(p != w and (n > 1 or not lowered) for n, p, w in zip(mesh.shape, leaf.placements, want)):
                wrong.append(f"{path}: expected the layout {want}, got {list(leaf.placements)}")
    if wrong:
        raise TypeError(
            f"{name} was called with state that is not laid out for it. "
            f"{len(wrong)} of {len(layouts)} leaves, including:\n"
            + "".join(f"  * {line}\n" for line in wrong[:3])
            + "Call `state = train_step.shard(state)` once, before the loop."
        )


def local_part(x: Any) -> torch.Tensor:
    """This rank's part of an argument: the local tensor of a DTensor; a number as a tensor."""
    if isinstance(x, DTensor):
        x = x.to_local()
    elif not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.int64 if isinstance(x, Integral) else torch.float64)
    return x.detach() if x.requires_grad else x


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check that a step may write its state in place: each leaf is contiguous and shares memory with no other input.

    Raises: TypeError that names the leaf, or the two inputs that share memory.
    """
    for v, x in zip(graph.inputs[: graph.num_state], inputs):
        if x.is_conj() or x.is_neg():
            raise TypeError(_donated(graph, f"{v.name} is conjugated or negated only when it is read"))
        if not x.is_contiguous():
            raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
    for i, j in overlapping(inputs):
        if min(i, j) < graph.num_state:
            raise TypeError(_donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory"))


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """The positions of tensors that lie in the same memory, pair by pair."""
    spans = []
    for i, x in enumerate(tensors):
        size = x.numel()
        if size and not x.is_contiguous():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if size:
            spans.append((x.data_ptr(), x.data_ptr() + size * x.itemsize, i))
    spans.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end:
            yield i, j


def _donated(graph: Graph, reason: str) -> str:
    return (
        f"{graph.name}: {reason}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )
