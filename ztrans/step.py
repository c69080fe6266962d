"""Step: a train step and the transforms applied to it.

Decorating a step appends to its tuple of transforms and never nests. Calling a step traces, lowers and compiles a
program for the arguments at the first such call, and runs it. `trace`, `lower` and `compile` do one of these at a
time (see `stages`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

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
from .tracing.arguments import Arguments, any_size, check_laid_out
from .tracing.captured import Captured
from .tracing.errors import no_state
from .tracing.trace import is_number, leaf_names, trace
from .transforms.base import Transform, appended, layout_of, mesh_of

_MANY_PROGRAMS = 8
_METHODS = "_ztrans_methods"  # the attribute of an object that holds its methods that are steps

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
State = TypeVar("State")


@dataclass(frozen=True)
class Step(Generic[P, R]):
    """A train step `fn(state, *batch) -> (state, output)` and the transforms applied to it.

    Calling it runs one step on this rank's slice of the batch; the state passed in is donated, that is updated in
    place. It has the name, docstring, signature and types of its function. Equality is that of function and
    transforms.

    A method of a class may be a step. Its `self` is read as a closure is: the numbers, strings and truth values that
    the method reads from it are constants of the program, and a change of one is traced anew; a tensor in it is an
    error, for a tensor is passed as state or with the batch.
    """

    fn: Callable[P, R]
    transforms: tuple[Transform, ...] = ()
    plan: Plan | None = dataclasses.field(default=None, repr=False)
    _cache: dict[tuple, Compiled] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    # The program whose plan the ranks agreed on, by its key without the sizes of its batch.
    _agreed: dict[tuple, Compiled] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    __name__: ClassVar[str]  # of each step, that of its function

    def __post_init__(self) -> None:
        """Take over what `functools.wraps` takes over, and the signature."""
        attributes: dict[str, Any] = {"__name__": type(self.fn).__name__, "__wrapped__": self.fn}
        attributes |= {name: getattr(self.fn, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(self.fn, name)}
        with contextlib.suppress(TypeError, ValueError):  # some functions of C have none
            attributes["__signature__"] = inspect.signature(self.fn)
        vars(self).update(attributes)

    @staticmethod
    def of(fn: Callable[P, R]) -> Step[P, R]:
        """`fn` as a step, with no transforms if it is not one yet."""
        if isinstance(fn, Step):
            return fn
        if not callable(fn):
            raise TypeError(
                f"a transform applies to a train step, a function (state, batch) -> (state, output); got {fn!r}."
            )
        return Step(fn)

    def then(self, transform: Transform) -> Step[P, R]:
        """This step with one more transform; the same one twice is once.

        Raises: ValueError when the transforms of the step do not allow it (see `appended`).
        """
        transforms = appended(self.transforms, transform)
        return self if transforms is self.transforms else Step(self.fn, transforms, self.plan)

    def __repr__(self) -> str:
        return f"Step({', '.join([self.__name__, *map(repr, self.transforms)])})"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Step[P, R]: ...

    @overload
    def __get__(self: Step[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Step[Q, R]: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Step[..., Any]:
        """The step as a method of `instance`, where a function would be one: a step of the bound function.

        The object keeps the step, and with it the programs compiled for it, as long as it lives.

        Raises: TypeError for an object without a `__dict__`, and for a class.
        """
        bind = getattr(type(self.fn), "__get__", None)
        if instance is None or bind is None:
            return self
        attributes = getattr(instance, "__dict__", None)
        if not isinstance(attributes, dict):
            raise TypeError(
                f"{self.__name__}: a step that is a method keeps its programs in its object, and {instance!r} has no "
                f"__dict__ to write to.\nAdd '__dict__' to the __slots__ of its class, or make the step a staticmethod."
            )
        method: Step[..., Any] = Step(bind(self.fn, instance, owner), self.transforms, self.plan)
        return attributes.setdefault(_METHODS, _Methods()).steps.setdefault(method, method)

    @property
    def mesh(self) -> DeviceMesh | AbstractMesh | None:
        """The mesh that the step runs on; None for a step of one process."""
        return mesh_of(self.transforms)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """The program as written, for arguments like these: real, fake or meta tensors, DTensors, numbers."""
        return self._traced(Arguments.of(self.fn, args, kwargs))

    def _traced(self, arguments: Arguments) -> Traced:
        state, batch, names = arguments
        device = self.mesh.device_type if isinstance(self.mesh, DeviceMesh) else None
        program = trace(self.fn, state, *batch, names=names, device=device, captured=self._captured)
        return Traced(program, self.transforms)

    def lower(self, *args: Any, cluster: Cluster | None = None, plan: Plan | None = None, **kwargs: Any) -> Lowered:
        """`trace(state, *batch).lower(cluster=..., plan=...)`; by default with the plan of `planned`, if it fits.

        An argument of the step that is called `cluster` or `plan` is passed by position.
        """
        return self._lowered(Arguments.of(self.fn, args, kwargs), cluster, plan)

    def _lowered(self, arguments: Arguments, cluster: Cluster | None = None, plan: Plan | None = None) -> Lowered:
        traced = self._traced(arguments)
        if plan is None and self.plan is not None:
            try:
                return traced.lower(cluster=cluster, plan=self.plan)
            except OtherProgramError as error:  # as for a last batch that is smaller
                warnings.warn(f"{error}\nThis program is planned anew.", stacklevel=3)
        return traced.lower(cluster=cluster, plan=plan)

    def planned(self, plan: Plan) -> Step[P, R]:
        """This step with a plan made before, so that it starts without planning: `step.planned(zt.Plan.load(path))`.

        A program that the plan is not for, as that of another batch shape, is planned anew, with a warning.
        """
        return Step(self.fn, self.transforms, plan)

    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Record `steps` steps, plan anew from them, record as many steps of the new plan, and keep the faster plan.

        Returns the first recording. The state is donated and advances. All ranks must call it. See `Compiled.tune`.
        """
        arguments = Arguments.of(self.fn, args, kwargs)
        key = self._key(arguments)
        tuned, measured = self._compiled(arguments).tune(*args, steps=steps, **kwargs)
        # Programs for other batch sizes follow the plan of this one, so they are lowered again.
        for outdated in [k for k in self._cache if any_size(k) == any_size(key)]:
            del self._cache[outdated]
        self._cache[key] = self._agreed[any_size(key)] = tuned
        return measured

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = Arguments.of(self.fn, args, kwargs)
        refuse_inside(self.__name__, arguments)
        return cast("R", self._compiled(arguments).run(arguments))

    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """The compiled step for arguments like these, made at the first call with such arguments.

        The sizes of the batch may differ from rank to rank and from call to call: a program for another size follows
        the plan of the first, so that all ranks send the same messages in the same order.
        """
        return self._compiled(Arguments.of(self.fn, args, kwargs))

    def _compiled(self, arguments: Arguments) -> Compiled:
        key = self._key(arguments)
        if key not in self._cache:
            self._check_laid_out(arguments.state)
            first = self._agreed.get(any_size(key))
            if first is None:
                self._cache[key] = self._agreed[any_size(key)] = self._lowered(arguments).compile()
            else:
                self._cache[key] = first.for_other_sizes(self._traced(arguments))
            if len(self._cache) > _MANY_PROGRAMS:
                leaves = pytree.tree_leaves(arguments.batch)
                shapes = [str(tuple(x.shape) if isinstance(x, torch.Tensor) else x) for x in leaves]
                warnings.warn(
                    f"{self.__name__} has been traced for {len(self._cache)} different arguments, the last one "
                    f"{', '.join(shapes)}. Every new shape is traced and compiled: pad "
                    f"batches to a few sizes. So is every new value of a number that the step reads besides its "
                    f"arguments: pass it as one. In a lifted loop these are all settings of the module and of the "
                    f"optimizer but lr: a scheduler may want cycle_momentum=False.",
                    stacklevel=3,
                )
        return self._cache[key]

    def _key(self, arguments: Arguments) -> tuple:
        return *arguments.key(), self._captured.key()

    @functools.cached_property
    def _captured(self) -> Captured:
        return Captured(self.fn)

    def _devices(self) -> DeviceMesh | None:
        """The mesh of devices that the step runs on; None for a step of one process.

        Raises: ValueError for an abstract mesh; RuntimeError for one whose process group has been destroyed.
        """
        if self.mesh is not None:
            check_runs(self.mesh)
        return self.mesh if isinstance(self.mesh, DeviceMesh) else None

    def _check_laid_out(self, state: Any) -> None:
        mesh = self._devices()
        if mesh is not None:
            paths, layouts = leaf_names(self.fn, (state,))[1], self.layouts(state)
            check_laid_out(self.__name__, mesh, paths, pytree.tree_leaves(state), layouts)

    def layouts(self, state: Any) -> list[Layout]:
        """The layout of each state leaf, in the order of the tree's leaves."""
        names = leaf_names(self.fn, (state,))[0]
        return [layout_of(self.transforms, name, leaf) for name, leaf in zip(names, pytree.tree_leaves(state))]

    def shard(self, state: State, *, source: int | None = None, device: torch.device | str | None = None) -> State:
        """Full tensors (the same on every rank), or DTensors -> DTensor leaves as this step wants them, copied.

        All ranks must call it. Without a `source` the ranks compare a digest of every leaf. With `source=0` only
        rank 0's tensors count: the others may hold meta tensors, and each leaf is sent in turn. Meta leaves without a
        source become uninitialised parts, to be filled in place (`torch.nn.init` works on them), so no rank ever
        holds the whole state.

        Raises: TypeError for a leaf that is neither a tensor nor a number; ValueError where ranks hold different
        leaves, and for another source than 0 on a mesh of several axes; RuntimeError for a half updated state.
        """
        leaves, tree = pytree.tree_flatten(state)
        paths = leaf_names(self.fn, (state,))[1]
        for path, leaf in zip(paths, leaves):
            if not isinstance(leaf, torch.Tensor) and not is_number(leaf):
                raise no_state(path, leaf)
        check_whole(leaves, "shard")
        mesh = self._devices()
        if mesh is None:
            return pytree.tree_map_only(torch.Tensor, copied, state)
        if source and mesh.ndim > 1:
            raise ValueError(
                f"shard: source={source} on a mesh of {mesh.ndim} axes; only its first rank, source=0, can be."
            )
        check_same(mesh, [axis for t in self.transforms for axis in t.axes], paths, leaves, source)
        device = torch.device(device) if device is not None else None
        laid = [
            relaid(x, layout, mesh) if isinstance(x, DTensor) else shard_leaf(x, layout, mesh, source, device)
            for x, layout in zip(leaves, self.layouts(state))
        ]
        return pytree.tree_unflatten(laid, tree)

    def unshard(self, state: State) -> State:
        """DTensor leaves -> full tensors on every rank; a collective call.

        Raises: RuntimeError for a half updated state, or when not all ranks call it.
        """
        check_whole(pytree.tree_leaves(state), "unshard")
        if isinstance(self.mesh, DeviceMesh) and self.mesh.size() > 1:
            check_runs(self.mesh)
            meet(self.mesh, Call("unshard"))
        return pytree.tree_map_only(DTensor, lambda x: x.full_tensor().clone(), state)


class _Methods:
    """The methods of one object that are steps, by themselves. A copy of the object makes its own."""

    def __init__(self) -> None:
        self.steps: dict[Step, Step] = {}

    def __reduce__(self) -> tuple:
        return _Methods, ()
