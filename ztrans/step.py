"""Step, Traced, Lowered, Compiled: one object, three faces, as `jax.stages`.

A `Step` is a train step and a tuple of transforms. Decorating appends to the tuple; calling traces,
lowers and compiles what the arguments need, once, and runs it. `trace`, `lower` and `compile` do
the same one at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .collectives import erase_marks, erase_trivial
from .cost import Cost, Memory, cost, memory
from .evaluate import join, lockstep, scatter
from .execute import executable
from .graph import Graph, Layout, dce
from .layout import AbstractMesh, placements, shard_leaf
from .schedule import schedule
from .trace import Abstract, Program, global_leaf, leaf_names, no_collection, trace
from .transforms.base import Chain, Transform

_MANY_PROGRAMS = 8


@dataclass(frozen=True)
class Step:
    """A train step `fn(state, *batch) -> (state, output)` and the transforms applied to it.

    Calling it runs one step on this rank's slice of the batch; the state passed in is donated, that
    is updated in place. Equality is that of function and transforms.
    """

    fn: Callable
    transforms: tuple[Transform, ...] = ()
    _cache: dict = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def __wrapped__(self) -> Callable:
        return self.fn

    @staticmethod
    def of(fn: Callable | Step) -> Step:
        """`fn` as a step, with no transforms if it is not one yet."""
        if isinstance(fn, Step):
            return fn
        if not callable(fn):
            raise TypeError(f"a transform applies to a train step, a function (state, batch) -> (state, output); got {fn!r}.")
        return Step(fn)

    def then(self, transform: Transform) -> Step:
        """This step with one more transform; the same one twice is once.

        Raises: ValueError when it is there with other options, or is shard_params and not the first.
        """
        if isinstance(transform, Chain):
            return transform(self)
        for have in self.transforms:
            if have == transform:
                return self
            if type(have) is type(transform):
                raise ValueError(
                    f"{transform.name}: applied twice with different options, {have!r} and {transform!r}.\nKeep one of them."
                )
        if transform.name == "shard_params" and self.transforms:
            raise ValueError(
                f"shard_params: applied after {', '.join(t.name for t in self.transforms)}, which work on the program "
                f"that it makes.\nApply it first: as the innermost decorator, or first in zt.chain(...)."
            )
        return Step(self.fn, (*self.transforms, transform))

    def __repr__(self) -> str:
        return f"Step({', '.join([self.__name__, *map(repr, self.transforms)])})"

    @property
    def mesh(self) -> DeviceMesh | AbstractMesh | None:
        return next((t.mesh for t in self.transforms if hasattr(t, "mesh")), None)

    def trace(self, state: Any, *batch: Any) -> Traced:
        """The program as written, for arguments like these (real, meta or DTensor leaves): forward, backward, update."""
        state, batch = pytree.tree_map(global_leaf, state), pytree.tree_map(global_leaf, batch)
        return Traced(trace(self.fn, state, *batch), self.transforms)

    def lower(self, state: Any, *batch: Any) -> Lowered:
        """`trace(state, *batch).lower()`."""
        return self.trace(state, *batch).lower()

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        return self.compiled(state, *batch)(state, *batch)

    def compiled(self, state: Any, *batch: Any) -> Compiled:
        """The compiled step for arguments like these, made at the first call with such arguments."""
        key = _signature(state, batch)
        if key not in self._cache:
            _check_laid_out(self, state)
            self._cache[key] = self.lower(state, *batch).compile()
            if len(self._cache) > _MANY_PROGRAMS:
                warnings.warn(
                    f"{self.__name__} has been traced for {len(self._cache)} different arguments, the last one "
                    f"{', '.join(str(a) for a in _shapes(batch))}. Every new shape is traced and compiled anew: pad "
                    f"batches to a few sizes.",
                    stacklevel=3,
                )
        return self._cache[key]

    def layouts(self, state: Any) -> list[Layout]:
        """Where each state leaf lives, in the order of the tree's leaves."""
        paths = leaf_names(self.fn, (state,))[0]
        found: list[Layout] = []
        for path, leaf in zip(paths, pytree.tree_leaves(state)):
            layout: Layout = ()
            if isinstance(leaf, torch.Tensor):
                meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                layout = next((x for t in self.transforms if (x := t.layout(path, tuple(leaf.shape), meta)) is not None), ())
            found.append(layout)
        return found

    def shard(self, state: Any, *, source: int | None = None, device: torch.device | str | None = None) -> Any:
        """Full tensors (the same on every rank) -> DTensor leaves laid out for this step, each a fresh copy of this rank's part.

        With `source=0` only rank 0's tensors count: the others may hold meta tensors, and each leaf
        is sent in turn. Meta leaves without a source become uninitialised parts, to be filled in
        place (`torch.nn.init` works on them), so no rank ever holds the whole state.
        """
        mesh = self.mesh
        if mesh is None:
            return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), state)
        _check_mesh(mesh)
        leaves, tree = pytree.tree_flatten(state)
        device = torch.device(device) if device is not None else None
        laid = [
            x if isinstance(x, DTensor) else shard_leaf(x, layout, mesh, source, device)
            for x, layout in zip(leaves, self.layouts(state))
        ]
        return pytree.tree_unflatten(laid, tree)

    def unshard(self, state: Any) -> Any:
        """DTensor leaves -> full tensors on every rank; a collective call."""
        return pytree.tree_map_only(DTensor, lambda x: x.full_tensor().clone(), state)


@dataclass(frozen=True)
class Traced:
    """A step's program as written, before any transform, as `jax.stages.Traced`."""

    program: Program
    transforms: tuple[Transform, ...]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @no_collection()
    def lower(self) -> Lowered:
        """The per-rank program: transforms applied, collectives placed, order fixed."""
        graph = self.graph
        history = [("trace", graph)]
        for transform in self.transforms:
            graph = transform.rewrite(graph)
            graph = graph.replace(history=(*graph.history, repr(transform)))
            history.append((transform.name, graph))
        graph = schedule(dce(erase_trivial(erase_marks(graph))))
        history.append(("lower", graph))
        mesh = next((t.mesh for t in self.transforms if hasattr(t, "mesh")), None)
        return Lowered(graph, tuple(history), self.program, mesh)

    def __str__(self) -> str:
        return str(self.graph)


@dataclass(frozen=True)
class Lowered:
    """The program of one rank, ready to compile, as `jax.stages.Lowered`."""

    graph: Graph
    history: tuple[tuple[str, Graph], ...]
    program: Program
    mesh: DeviceMesh | AbstractMesh | None

    def __str__(self) -> str:
        return str(self.graph)

    def __repr__(self) -> str:
        return f"Lowered({self.graph!r})"

    def cost_analysis(self) -> Cost:
        """FLOPs, bytes of memory traffic, and wire bytes by axis and role, on one rank."""
        return cost(self.graph)

    def memory_analysis(self) -> Memory:
        """Live bytes over the program, its peak, and the values and lines that hold it."""
        return memory(self.graph)

    def lockstep(self, state: Any, batches: Sequence[tuple]) -> tuple[Any, list[Any]]:
        """Run one step of all ranks in this process, equation by equation, from the full state.

        `batches` holds each rank's batch arguments. Returns the full new state and each rank's output;
        nothing is updated in place. No process group is needed, so it runs under an AbstractMesh.
        """
        graph, program = self.graph, self.program
        static = {i for i, _ in program.static}
        flat = [[_local(x) for i, x in enumerate(pytree.tree_leaves((state, *b))) if i not in static] for b in batches]
        n = graph.num_state
        ranks = [part + leaves[n:] for part, leaves in zip(scatter(graph, flat[0][:n]), flat, strict=True)]
        outs = lockstep(graph, ranks)
        full = join(graph, outs)
        results = [pytree.tree_unflatten([*full, *out[n:]], program.out_tree) for out in outs]
        return results[0][0], [output for _, output in results]

    def compile(self, *, backend: str = "eager") -> Compiled:
        """A callable program on this rank's devices. Backend "eager" runs it operation by operation."""
        if backend != "eager":
            raise ValueError(f"compile: unknown backend {backend!r}; there is 'eager'.")
        if self.mesh is not None:
            _check_mesh(self.mesh)
        return Compiled(self, executable(self.graph, self.mesh))


@dataclass(frozen=True)
class Compiled:
    """A program bound to this rank: callable, no longer transformable, as `jax.stages.Compiled`."""

    lowered: Lowered
    run: Callable
    _agreed: list = dataclasses.field(default_factory=list, compare=False, repr=False)

    def as_text(self) -> str:
        """The program that runs."""
        return str(self.lowered)

    def __str__(self) -> str:
        return self.as_text()

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        if not self._agreed:
            agree(self.lowered)
            self._agreed.append(True)
        program = self.lowered.program
        leaves, tree = pytree.tree_flatten((state, *batch))
        if tree != program.in_tree:
            raise TypeError(f"{self.lowered.graph.name}: compiled for arguments {program.in_tree}, called with {tree}.")
        static = {i for i, _ in program.static}
        flat = [x for i, x in enumerate(leaves) if i not in static]
        outputs = self.run([_local(x) for x in flat])
        n = self.lowered.graph.num_state
        for i, old in enumerate(flat[:n]):  # the same DTensor objects, whose storage now holds the new state
            outputs[i] = old if isinstance(old, torch.Tensor) else outputs[i]
        return pytree.tree_unflatten(outputs, program.out_tree)


def _local(x: Any) -> torch.Tensor:
    if isinstance(x, DTensor):
        return x.to_local()
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
    return x.detach()


def _signature(state: Any, batch: tuple) -> tuple:
    leaves, tree = pytree.tree_flatten((state, *batch))
    num_state = len(pytree.tree_leaves(state))
    described = tuple(
        (Abstract.of(x, i < num_state), x.placements if isinstance(x, DTensor) else None, getattr(x, "requires_grad", None))
        for i, x in enumerate(leaves)
    )
    return tree, described


def _shapes(batch: tuple) -> list:
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(batch)]


def _check_mesh(mesh: DeviceMesh | AbstractMesh) -> None:
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{mesh} has no devices: it can be traced, lowered, printed and costed, not run.\n"
            f"Run under a DeviceMesh: zt.make_mesh({', '.join(f'{a}={n}' for a, n in mesh.axes)}) under torchrun."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: the mesh's has been destroyed, or was never there.\n"
            "Start the script with torchrun and make the mesh with zt.make_mesh(...) or init_device_mesh(...)."
        )


def _check_laid_out(step: Step, state: Any) -> None:
    """State must lie as shard_params wants it: on this mesh, cut in this way."""
    mesh = step.mesh
    if mesh is None:
        return
    _check_mesh(mesh)
    names, paths = leaf_names(step.fn, (state,))
    wrong = []
    for path, leaf, layout in zip(paths, pytree.tree_leaves(state), step.layouts(state)):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim or isinstance(leaf, DTensor)):
            want = placements(layout, mesh)
            if not isinstance(leaf, DTensor):
                wrong.append(f"{path}: expected a DTensor {list(leaf.shape)} laid out {want}, got a full tensor")
            elif leaf.device_mesh != mesh:
                wrong.append(f"{path}: lies on another mesh, {leaf.device_mesh}")
            elif list(leaf.placements) != want:
                wrong.append(f"{path}: expected the layout {want}, got {list(leaf.placements)}")
    if wrong:
        total = len(pytree.tree_leaves(state))
        raise TypeError(
            f"shard_params: {step.__name__} was called with state that is not laid out "
            f"for it. {len(wrong)} of {total} leaves, including:\n"
            + "".join(f"  * {line}\n" for line in wrong[:3])
            + "Call `state = train_step.shard(state)` once, before the loop."
        )


def agree(lowered: Lowered) -> None:
    """Compare a hash of the program over all ranks, so that a disagreement is an error and not a hang.

    Raises: RuntimeError naming the ranks that differ.
    """
    if not isinstance(lowered.mesh, DeviceMesh) or lowered.mesh.size() == 1:
        return
    digest = hashlib.sha256(str(lowered).encode()).digest()[:8]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(lowered.mesh.device_type)
    every = mine.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(every, mine)
    differ = [rank for rank, value in enumerate(every.tolist()) if value != every[0].item()]
    if differ:
        inputs = ", ".join(repr(v) for v in lowered.graph.inputs[lowered.graph.num_state :])
        raise RuntimeError(
            f"{lowered.graph.name}: ranks {differ} lowered another program than rank 0 did.\n"
            f"On rank {dist.get_rank()} its batch is {inputs}; every rank must pass the same shapes and "
            f"take the same branches. Compare print(step.lower(state, batch)) of two ranks."
        )
