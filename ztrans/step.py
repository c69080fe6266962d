"""Step: a train step and the transforms applied to it.

Decorating a step appends to its tuple of transforms; steps never nest. The first call with arguments of some type
traces, lowers and compiles a program for them; every call runs it. `trace`, `lower` and `compile` do one of these at a
time (see `stages`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .calling.call import BoundCall
from .calling.trees import state_leaves, state_names
from .compiled import Compiled, Given
from .ir.ambient import no_collection, refuse_inside
from .ir.graph import Layout
from .ir.layout import AbstractMesh
from .ir.source import user_source
from .lift.lifted_state import completed
from .planning.cluster import Cluster
from .planning.plan import OtherProgramError, Plan
from .profiling.profile import Profile
from .report.progress import stage
from .report.tracebacks import ends_at_user
from .runtime.failure import check_whole
from .runtime.known_state import LastState
from .runtime.leaves import check_laid_out, copied
from .runtime.mesh import check_runs
from .runtime.sharded_state import shard_state, unshard_state
from .stages import Lowered, Traced
from .tracing.arguments import StepKey
from .tracing.captured import Captured
from .tracing.errors import warn, warn_of_many_programs
from .tracing.trace import check_state, trace
from .transforms.base import Transform, all_axes, appended, axes_of, layout_of, mesh_of, no_step

_METHODS = "_ztrans_methods"  # the attribute in which an object keeps those of its methods that are steps

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
State = TypeVar("State")


@dataclass(frozen=True)
class Step(Generic[P, R]):
    """A train step `fn(state, *batch) -> (state, output)` and the transforms applied to it.

    Calling it runs one step on this rank's slice of the batch. The state is donated: it is updated in place. A step has
    the name, docstring, signature and types of its function. Two steps are equal if their functions and transforms are.

    A method of a class may be a step. Numbers, strings and bools that it reads from `self` are constants of the
    program, as those of a closure are; if one changes, the step is traced again. A tensor in `self` is an error: pass
    it as state or with the batch.
    """

    fn: Callable[P, R]
    transforms: tuple[Transform, ...] = ()
    plan: Plan | None = dataclasses.field(default=None, repr=False)
    _cache: dict[StepKey, Compiled] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    _last: LastState = dataclasses.field(default_factory=LastState, compare=False, repr=False)

    __name__: ClassVar[str]  # each step has the name of its function

    def __post_init__(self) -> None:
        """Copy the attributes of the function that `functools.wraps` copies, and its signature."""
        attributes: dict[str, Any] = {"__name__": type(self.fn).__name__, "__wrapped__": self.fn}
        attributes |= {name: getattr(self.fn, name) for name in functools.WRAPPER_ASSIGNMENTS if hasattr(self.fn, name)}
        with contextlib.suppress(TypeError, ValueError):  # some functions written in C have no signature
            attributes["__signature__"] = inspect.signature(self.fn)
        vars(self).update(attributes)

    @staticmethod
    def of(fn: Callable[P, R]) -> Step[P, R]:
        """`fn` itself if it is a step, otherwise a step without transforms."""
        if isinstance(fn, Step):
            return fn
        if not callable(fn):
            raise no_step(fn)
        return Step(fn)

    def then(self, transform: Transform) -> Step[P, R]:
        """This step with one more transform. A transform that it already has is not added again.

        Raises: ValueError if the transforms of the step do not allow it (see `appended`).
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
        """The step as a method of `instance`: a step of the bound function.

        The object keeps that step, with its compiled programs, as long as the object lives.

        Raises: TypeError if `instance` has no `__dict__`, or is a class.
        """
        bind = getattr(type(self.fn), "__get__", None)
        if instance is None or bind is None:
            return self
        if isinstance(instance, type):
            raise TypeError(
                f"{self.__name__}: a step that is a method keeps its programs in its object, and a class keeps none.\n"
                f"Make the step a staticmethod, or a function outside of {instance.__name__}."
            )
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
        """The mesh that the step runs on, or None if it runs in one process."""
        return mesh_of(self.transforms)

    @ends_at_user
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Record the program as written, for arguments like these: real, fake or meta tensors, DTensors, numbers."""
        return self._traced(BoundCall.of(self.fn, args, kwargs))

    @no_collection()
    def _traced(self, call: BoundCall) -> Traced:
        micro = max((t.micro_batches for t in self.transforms), default=1)
        if micro > 1:
            call = call.micro_batch(self.fn, micro)
        device = self.mesh.device_type if isinstance(self.mesh, DeviceMesh) else None
        of_state = self._chosen(axes_of, call.state)
        others = pytree.tree_leaves((call.batch, call.extra))
        axes = [*of_state, *[all_axes(self.transforms, of_state)] * len(others)]
        with stage(self.__name__, "trace"):
            program = trace(self.fn, call, device=device, captured=self._captured, axes=axes)
        return Traced(program, self.transforms)

    @ends_at_user
    def lower(self, *args: Any, cluster: Cluster | None = None, plan: Plan | None = None, **kwargs: Any) -> Lowered:
        """`trace(state, *batch).lower(cluster=..., plan=...)`; the plan is by default that of `planned`, if it fits.

        Pass an argument of the step that is called `cluster` or `plan` by position.
        """
        return self._lowered(BoundCall.of(self.fn, args, kwargs), cluster, plan)

    def _lowered(self, call: BoundCall, cluster: Cluster | None = None, plan: Plan | None = None) -> Lowered:
        traced = self._traced(call)
        if plan is None and self.plan is not None:
            try:
                return traced.lower(cluster=cluster, plan=self.plan)
            except OtherProgramError as error:  # for instance for a last, smaller batch
                warn(f"{error}\nThis program is planned anew.", user_source())
        return traced.lower(cluster=cluster, plan=plan)

    def planned(self, plan: Plan) -> Step[P, R]:
        """This step with an existing plan, so that it starts without planning: `step.planned(zt.Plan.load(path))`.

        A program that the plan does not fit, such as that of another batch shape, gets a new plan, with a warning.
        """
        return Step(self.fn, self.transforms, plan)

    @ends_at_user
    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Record `steps` steps, plan again from them, record as many steps with the new plan, and keep the faster plan.

        The state is donated and advances. All ranks must call it. See `Compiled.tune`.

        Returns: The first recording.
        """
        given = Given.of(BoundCall.of(self.fn, args, kwargs), self._last)
        key = self._key(given)
        compiled = self._compiled(given, key)
        key = key._replace(captured=compiled.lowered.program.made_for)
        tuned, measured = compiled.tune(*args, steps=steps, **kwargs)
        # Programs for other batch sizes follow the plan of this one, so they are lowered again.
        for outdated in [k for k in list(self._cache) if k.any_size() == key.any_size()]:
            del self._cache[outdated]
        self._cache[key] = tuned
        return measured

    @ends_at_user
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = BoundCall.of(self.fn, args, kwargs)
        refuse_inside(self.__name__, call)
        given = Given.of(call, self._last)
        if (key := self._key(given)) not in self._cache:
            state = completed(self.fn, call.state, self.shard)
            key = self._key(given := Given.of(call._replace(state=state), self._last))
        return cast("R", self._compiled(given, key).run(given, self._last))

    @ends_at_user
    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """The compiled step for arguments like these. It is compiled when such arguments first occur.

        The sizes of the batch may differ from rank to rank and from call to call. A program for another size follows
        the plan of the first, so all ranks send the same messages in the same order.
        """
        return self._compiled(given := Given.of(BoundCall.of(self.fn, args, kwargs), self._last), self._key(given))

    def _compiled(self, given: Given, key: StepKey) -> Compiled:
        compiled = self._cache.get(key)
        if compiled is None:
            call = given.call
            self._check_laid_out(call.state)
            others = (c for k, c in list(self._cache.items()) if k.any_size() == key.any_size())
            if (first := next(others, None)) is not None:  # its plan is the one that the ranks agreed on
                compiled = first.for_other_sizes(self._traced(call))
            else:
                compiled = self._lowered(call).compile()
            # The trace may have changed what the step reads, as a module does that prepares itself in its first run.
            self._cache[key._replace(captured=compiled.lowered.program.made_for)] = compiled
            warn_of_many_programs(self.__name__, len(self._cache), pytree.tree_leaves(call.batch))
        return compiled

    def _key(self, given: Given) -> StepKey:
        return StepKey(given.state_key, given.batch_key, self._captured.key())

    @functools.cached_property
    def _captured(self) -> Captured:
        return Captured(self.fn)

    def _devices(self) -> DeviceMesh | None:
        """The mesh of devices that the step runs on, or None if it runs in one process.

        Raises: ValueError if the mesh is abstract; RuntimeError if its process group has been destroyed.
        """
        if self.mesh is not None:
            check_runs(self.mesh)
        return self.mesh if isinstance(self.mesh, DeviceMesh) else None

    def _check_laid_out(self, state: Any) -> None:
        if (mesh := self._devices()) is not None:
            paths, axes = state_names(self.fn, state)[1], self._chosen(axes_of, state)
            check_laid_out(self.__name__, mesh, axes, paths, state_leaves(state), self.layouts(state))

    def layouts(self, state: Any) -> list[Layout]:
        """The layout of each leaf of the state, in the order of the leaves in its tree."""
        return self._chosen(layout_of, state)

    def _chosen(self, choice: Callable[..., Any], state: Any) -> list[Any]:
        """What the transforms choose for each leaf of the state."""
        names = state_names(self.fn, state)[0]
        return [choice(self.transforms, name, leaf) for name, leaf in zip(names, state_leaves(state))]

    @ends_at_user
    def shard(self, state: State, *, source: int | None = None, device: torch.device | str | None = None) -> State:
        """Copy a state into DTensors in the layouts that this step needs. All ranks must call it.

        Args:
            state: DTensors, or full tensors that are the same on every rank; the ranks compare a digest of every leaf.
                Meta tensors become uninitialised parts, to be filled in place, as `torch.nn.init` does. So no rank ever
                holds the whole state.
            source: the rank whose tensors are used, and sent to the others leaf by leaf. These may hold meta tensors.
                On a mesh of several axes it is 0: the first rank along the axes that transforms use for the leaf.
            device: the device of the parts; by default that of the mesh for a meta leaf, otherwise that of the leaf.

        Raises: TypeError if a leaf is neither a tensor nor a number. ValueError if the ranks hold different leaves, or
            `source` is not 0 on a mesh of several axes. RuntimeError if the state is half updated.
        """
        leaves, paths = state_leaves(state), state_names(self.fn, state)[1]
        check_state(paths, leaves)
        check_whole(leaves, "shard")
        if (mesh := self._devices()) is None:
            return pytree.tree_map_only(torch.Tensor, copied, state)
        with stage(self.__name__, "shard"):
            return shard_state(state, mesh, paths, self.layouts(state), self._chosen(axes_of, state), source, device)

    @ends_at_user
    def unshard(self, state: State) -> State:
        """Gather a state of DTensors into full tensors on every rank. All ranks must call it.

        Raises: RuntimeError if the state is half updated, or not all ranks call it.
        """
        check_whole(state_leaves(state), "unshard")
        return unshard_state(state, self.mesh, self._chosen(axes_of, state))


class _Methods:
    """The methods of one object that are steps. A copy of the object starts without any."""

    def __init__(self) -> None:
        self.steps: dict[Step, Step] = {}

    def __reduce__(self) -> tuple:
        return _Methods, ()
