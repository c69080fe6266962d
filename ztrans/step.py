"""Step: a train step and the transforms applied to it.

Decorating appends to a tuple of transforms and never nests. Calling a step traces, lowers and
compiles what the arguments need, once, and runs it; `trace`, `lower` and `compile` do the same one
at a time (see `stages`).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .compiled import Compiled
from .ir.ambient import refuse_inside
from .ir.graph import Layout
from .ir.layout import AbstractMesh, copied, relaid, shard_leaf
from .planning.cluster import Cluster
from .planning.plan import OtherProgramError, Plan
from .profiling.profile import Profile
from .runtime.failure import check_whole
from .runtime.meeting import Call, meet
from .runtime.mesh import check_runs
from .runtime.replicas import check_same
from .stages import Lowered, Traced
from .tracing.arguments import check_laid_out
from .tracing.captured import Captured
from .tracing.errors import no_state
from .tracing.trace import Abstract, is_number, leaf_names, trace
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
    plan: Plan | None = dataclasses.field(default=None, repr=False)
    _cache: dict[tuple, Compiled] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    # By what a program is made for besides the sizes of its batch: the program whose plan the ranks agreed on.
    _agreed: dict[tuple, Compiled] = dataclasses.field(default_factory=dict, compare=False, repr=False)

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
            raise TypeError(
                f"a transform applies to a train step, a function (state, batch) -> (state, output); got {fn!r}."
            )
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
                    f"{transform.name}: applied twice with different options, {have!r} and {transform!r}.\n"
                    f"Keep one of them."
                )
        before = [t.name for t in self.transforms if not t.as_written]
        if transform.name == "shard_params" and before:
            raise ValueError(
                f"shard_params: applied after {', '.join(before)}, which work on the program "
                f"that it makes.\nApply it first: as the innermost decorator, or first in zt.chain(...)."
            )
        return Step(self.fn, (*self.transforms, transform), self.plan)

    def __repr__(self) -> str:
        return f"Step({', '.join([self.__name__, *map(repr, self.transforms)])})"

    @property
    def mesh(self) -> DeviceMesh | AbstractMesh | None:
        return next((t.mesh for t in self.transforms if hasattr(t, "mesh")), None)

    def trace(self, state: Any, *batch: Any) -> Traced:
        """The program as written, for arguments like these: real, fake or meta tensors, DTensors, numbers."""
        device = self.mesh.device_type if isinstance(self.mesh, DeviceMesh) else None
        return Traced(trace(self.fn, state, *batch, device=device, captured=self._captured), self.transforms)

    def lower(self, state: Any, *batch: Any, cluster: Cluster | None = None, plan: Plan | None = None) -> Lowered:
        """`trace(state, *batch).lower(cluster=..., plan=...)`; by default with the plan of `planned`, if it fits."""
        traced = self.trace(state, *batch)
        if plan is None and self.plan is not None:
            try:
                return traced.lower(cluster=cluster, plan=self.plan)
            except OtherProgramError as error:  # as for a last batch that is smaller
                planned = traced.lower(cluster=cluster)
                warnings.warn(f"{error}\nThis program was planned anew.", stacklevel=2)
                return planned
        return traced.lower(cluster=cluster, plan=plan)

    def planned(self, plan: Plan) -> Step:
        """This step with a plan made before, so that it starts without planning: `step.planned(zt.Plan.load(path))`.

        A program that the plan is not for, as that of another batch shape, is planned anew, with a warning.
        """
        return Step(self.fn, self.transforms, plan)

    def tune(self, state: Any, *batch: Any, steps: int = 3) -> Profile:
        """Record `steps` steps, plan again from what was measured, record as many, and go on with the faster plan.

        Returns what was recorded first. The state is donated and advances. All ranks must call it. See
        `Compiled.tune`.
        """
        key = self._key(state, batch)
        tuned, measured = self.compiled(state, *batch).tune(state, *batch, steps=steps)
        # Programs for other batch sizes follow the plan of this one, so they are lowered again.
        for other in [k for k in self._cache if _any_size(k) == _any_size(key)]:
            del self._cache[other]
        self._cache[key] = self._agreed[_any_size(key)] = tuned
        return measured

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Any]:
        refuse_inside(self.__name__, (state, batch))
        return self.compiled(state, *batch).run(state, batch)

    def compiled(self, state: Any, *batch: Any) -> Compiled:
        """The compiled step for arguments like these, made at the first call with such arguments.

        The sizes of the batch may differ from rank to rank and from call to call: a program for another size follows
        the plan of the first, so that all ranks send the same messages in the same order.
        """
        key = self._key(state, batch)
        if key not in self._cache:
            self._check_laid_out(state)
            first = self._agreed.get(_any_size(key))
            if first is None:
                self._cache[key] = self._agreed[_any_size(key)] = self.lower(state, *batch).compile()
            else:
                self._cache[key] = first.for_other_sizes(self.trace(state, *batch))
            if len(self._cache) > _MANY_PROGRAMS:
                warnings.warn(
                    f"{self.__name__} has been traced for {len(self._cache)} different arguments, the last one "
                    f"{', '.join(str(a) for a in _shapes(batch))}. Every new shape is traced and compiled: pad "
                    f"batches to a few sizes. So is every new value of a number that the step reads besides its "
                    f"arguments: pass it as one. In a lifted loop these are all settings of the module and of the "
                    f"optimizer but lr: a scheduler may want cycle_momentum=False.",
                    stacklevel=3,
                )
        return self._cache[key]

    def _key(self, state: Any, batch: tuple) -> tuple:
        return *_signature(state, batch), self._captured.key()

    @functools.cached_property
    def _captured(self) -> Captured:
        return Captured(self.fn)

    def _check_laid_out(self, state: Any) -> None:
        if self.mesh is not None:
            check_runs(self.mesh)
            paths, layouts = leaf_names(self.fn, (state,))[1], self.layouts(state)
            check_laid_out(self.__name__, self.mesh, paths, pytree.tree_leaves(state), layouts)

    def layouts(self, state: Any) -> list[Layout]:
        """Where each state leaf lives, in the order of the tree's leaves."""
        paths = leaf_names(self.fn, (state,))[0]
        found: list[Layout] = []
        for path, leaf in zip(paths, pytree.tree_leaves(state)):
            layout: Layout = ()
            if isinstance(leaf, torch.Tensor):
                meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                layout = next(
                    (x for t in self.transforms if (x := t.layout(path, tuple(leaf.shape), meta)) is not None),
                    (),
                )
            found.append(layout)
        return found

    def shard(self, state: Any, *, source: int | None = None, device: torch.device | str | None = None) -> Any:
        """Full tensors (the same on every rank), or DTensors -> DTensor leaves as this step wants them, copied.

        All ranks must call it. Without a `source` the ranks compare a digest of every leaf. With `source=0` only
        rank 0's tensors count: the others may hold meta tensors, and each leaf is sent in turn. Meta leaves without a
        source become uninitialised parts, to be filled in place (`torch.nn.init` works on them), so no rank ever
        holds the whole state.

        Raises: TypeError for a leaf that is neither a tensor nor a number; ValueError where ranks hold different
        leaves, and for another source than 0 on a mesh of several axes; RuntimeError for a half updated state.
        """
        mesh = self.mesh
        leaves, tree = pytree.tree_flatten(state)
        paths = leaf_names(self.fn, (state,))[1]
        for path, leaf in zip(paths, leaves):
            if not isinstance(leaf, torch.Tensor) and not is_number(leaf):
                raise no_state(path, leaf)
        check_whole(leaves, "shard")
        if mesh is None:
            return pytree.tree_map_only(torch.Tensor, copied, state)
        check_runs(mesh)
        if source and mesh.ndim > 1:
            raise ValueError(
                f"shard: source={source} on a mesh of {mesh.ndim} axes; only its first rank, source=0, can be."
            )
        if isinstance(mesh, DeviceMesh):
            check_same(mesh, [axis for t in self.transforms for axis in t.axes], paths, leaves, source)
        device = torch.device(device) if device is not None else None
        laid = [
            relaid(x, layout, mesh) if isinstance(x, DTensor) else shard_leaf(x, layout, mesh, source, device)
            for x, layout in zip(leaves, self.layouts(state))
        ]
        return pytree.tree_unflatten(laid, tree)

    def unshard(self, state: Any) -> Any:
        """DTensor leaves -> full tensors on every rank; a collective call.

        Raises: RuntimeError for a half updated state, or when not all ranks call it.
        """
        check_whole(pytree.tree_leaves(state), "unshard")
        if isinstance(self.mesh, DeviceMesh) and self.mesh.size() > 1:
            check_runs(self.mesh)
            meet(self.mesh, Call("unshard"))
        return pytree.tree_map_only(DTensor, lambda x: x.full_tensor().clone(), state)


def _signature(state: Any, batch: tuple) -> tuple:
    leaves, tree = pytree.tree_flatten((state, *batch))
    num_state = len(pytree.tree_leaves(state))
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
    return tree, num_state, described


def _any_size(key: tuple) -> tuple:
    """The key of a program without the sizes of its batch."""
    tree, num_state, described, *rest = key
    rough = tuple(
        (len(x.shape), x.dtype, x.device, *more) if isinstance(x, Abstract) and i >= num_state else (x, *more)
        for i, (x, *more) in enumerate(described)
    )
    return tree, num_state, rough, *rest


def _shapes(batch: tuple) -> list:
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(batch)]
