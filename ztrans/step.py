"""A train step and the transforms applied to it.

Decorating a step appends to its tuple of transforms; steps never nest. The first call with a new signature traces,
lowers and compiles a program, and all calls with that signature run it. `trace`, `lower` and `compiled` stop after the
stage that they name, and run nothing (see `stages`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .calling.call import BoundCall, StepFunction
from .calling.global_state import no_collection
from .calling.inputs import check_state
from .calling.signature import Signature, Surroundings
from .compiled import Compiled
from .eager_step import is_eager, run_eagerly
from .ir.ambient import refuse_anomaly_mode, refuse_inside, refuse_under_compile
from .ir.layout import AbstractMesh, LeafSharding
from .ir.source import user_source
from .planning.cluster import Cluster
from .planning.limit import DoesNotFit
from .planning.place_copies import HostIsFull
from .planning.plan import Plan
from .planning.realise import OtherProgramError, OverLimitError
from .profiling.check_finite import NonFinite
from .profiling.tuning import Tuning
from .program_cache import ProgramCache
from .report.progress import stage
from .report.tracebacks import ends_at_user
from .runtime import stop
from .runtime.agreement import say_failure, step_of
from .runtime.failure import check_ended
from .runtime.mesh import check_runs
from .runtime.session import leave_if_cut_off, session_of
from .runtime.state import check_laid_out, check_stored, copied_state, shard_state, unshard_state
from .stages import Lowered, Traced
from .step_state import StepState
from .tracing.errors import warn, warn_of_many_programs
from .tracing.recording import Recording
from .tracing.trace import trace
from .transforms.base import (
    Transform,
    all_axes,
    appended,
    mesh_of,
    micro_batches_of,
    no_step,
)

# With more programs than this, a warning says that the step is traced too often.
_MANY_PROGRAMS = 8

P = ParamSpec("P")
R = TypeVar("R")
State = TypeVar("State")


@dataclass(frozen=True)
class Step(Generic[P, R]):
    """A train step `fn(state, *batch) -> (state, output)` and the transforms applied to it.

    A call runs one step on this rank's slice of the batch. The state is donated: it is updated in place. A step has the
    name, docstring, signature and types of its function. Two steps are equal if their functions, transforms and plans
    are equal.

    A bound method may be a step: `self.step = zt.chain(...)(self.train)`. Numbers, strings and bools that it reads from
    `self` are constants of the program, as in a closure, and the step is traced again when one of them changes. Reading
    a tensor from `self` is an error: pass it as state or with the batch.
    """

    fn: Callable[P, R]
    transforms: tuple[Transform, ...] = ()
    plan: Plan | None = dataclasses.field(default=None, repr=False)
    _cache: ProgramCache = dataclasses.field(
        default_factory=ProgramCache, compare=False, repr=False
    )

    # Each step has the name of its function.
    __name__: ClassVar[str]

    def __post_init__(self) -> None:
        """Copy the function's signature, and the attributes that `functools.wraps` copies."""
        attributes: dict[str, Any] = {"__name__": type(self.fn).__name__, "__wrapped__": self.fn}
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.fn, name):
                attributes[name] = getattr(self.fn, name)
        attributes["__signature__"] = inspect.signature(self.fn)
        vars(self).update(attributes)

    @staticmethod
    def of(fn: Callable[P, R]) -> Step[P, R]:
        """`fn` itself if it is a step, otherwise a step without transforms."""
        if isinstance(fn, Step):
            return fn
        if not callable(fn) or isinstance(fn, nn.Module):
            raise no_step(fn)
        return Step(fn)

    def then(self, transform: Transform) -> Step[P, R]:
        """This step with one more transform. A transform that it already has is not added twice.

        Raises: ValueError if the transforms of the step do not allow it (see `appended`).
        """
        transforms = appended(self.transforms, transform)
        return self if transforms is self.transforms else Step(self.fn, transforms, self.plan)

    def __repr__(self) -> str:
        return f"Step({', '.join([self.__name__, *map(repr, self.transforms)])})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a decorated function by name, and other steps by function, transforms and plan, without programs."""
        holder: Any = sys.modules.get(self.__module__)
        qualified_name = vars(self).get("__qualname__", "")
        for name in qualified_name.split("."):
            holder = getattr(holder, name, None)
        if holder is self:
            return qualified_name
        return Step, (self.fn, self.transforms, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step[P, R]:
        """A step of the copied function, such as the method of a copied object, without programs."""
        return Step(copy.deepcopy(self.fn, memo), self.transforms, self.plan)

    def __get__(self, instance: object | None, owner: type | None = None) -> Step[P, R]:
        """The step itself: looked up on an object, it does not become a bound method.

        Raises: TypeError if it is looked up on an object whose class has it as a method.
        """
        if instance is not None and hasattr(type(self.fn), "__get__"):
            raise TypeError(
                f"{self.__name__}: a step does not become a method of {type(instance).__name__}, because it has "
                f"programs, and each object would need its own.\n"
                f"Apply the transforms to the bound method, in __init__: self.step = zt.chain(...)(self."
                f"{self.__name__}). Or make the step a staticmethod."
            )
        return self

    @property
    def mesh(self) -> DeviceMesh | AbstractMesh | None:
        """The mesh that the step runs on; None if it runs in one process."""
        return mesh_of(self.transforms)

    @property
    def stop_requested(self) -> bool:
        """Whether any rank has been asked to stop, by `zt.request_stop()` or a signal of `zt.stop_on`.

        It becomes true after the same step on all ranks, and stays true: save there, and leave the loop. On GPUs it
        becomes true one step later, because no step waits for other hosts.
        """
        if not isinstance(self.mesh, DeviceMesh):
            return stop.is_requested()
        session = session_of(self.mesh)
        return stop.is_requested() if session.is_alone else session.stop_requested

    @ends_at_user
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Record the program as written, for arguments like these: real, fake or meta tensors, DTensors, numbers."""
        return self._trace_call(self._call(args, kwargs))

    def _trace_call(self, call: BoundCall) -> Traced:
        record = functools.partial(self._record_call, call)
        recording = record(micro_batches_of(self.transforms))
        return Traced(recording, self.transforms, record)

    @no_collection()
    def _record_call(self, call: BoundCall, micro: int) -> Recording:
        """The program of a call, for one of `micro` micro-batches."""
        device = self.mesh.device_type if isinstance(self.mesh, DeviceMesh) else None
        # Each leaf of the state has axes of its own. All other leaves are distributed over all axes.
        shardings = self.leaf_shardings(call.state)
        over_all_axes = LeafSharding(all_axes(self.transforms, shardings))
        shardings += [over_all_axes for _ in pytree.tree_leaves((call.batch, call.extra))]
        with stage(self.__name__, "trace"):
            recording = trace(
                self.fn,
                call,
                self._function,
                micro=micro,
                device=device,
                shardings=shardings,
            )
        graph = recording.graph.replace(kept=self._state.kept_in(call.state))
        return dataclasses.replace(recording, graph=graph)

    @ends_at_user
    def lower(
        self, *args: Any, cluster: Cluster | None = None, plan: Plan | None = None, **kwargs: Any
    ) -> Lowered:
        """`trace(state, *batch).lower(cluster=..., plan=...)`. The default plan is that from `with_plan`, if it fits.

        If the step itself has an argument named `cluster` or `plan`, pass it by position.
        """
        return self._lower_call(self._call(args, kwargs), cluster, plan)

    def _lower_call(
        self, call: BoundCall, cluster: Cluster | None = None, plan: Plan | None = None
    ) -> Lowered:
        traced = self._trace_call(call)
        if plan is None and self.plan is not None:
            try:
                return traced.lower(cluster=cluster, plan=self.plan)
            except (OtherProgramError, OverLimitError, DoesNotFit, HostIsFull) as error:
                # The plan may be for another batch size, for instance.
                warn(f"{error}\nThis program is planned again.", user_source())
        return traced.lower(cluster=cluster, plan=plan)

    def with_plan(self, plan: Plan) -> Step[P, R]:
        """This step with an existing plan, which saves planning at the start: `step.with_plan(zt.Plan.load(path))`.

        If the plan does not fit a program, for instance because of another batch shape, that program gets a new plan,
        with a warning.

        Raises: TypeError for anything else than a plan, such as its path.
        """
        if not isinstance(plan, Plan):
            raise TypeError(
                f"with_plan: {type(plan).__name__} is not a Plan. Read one from a file, zt.Plan.load(path), or take "
                f"lowered.plan."
            )
        return Step(self.fn, self.transforms, plan)

    @ends_at_user
    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> Tuning:
        """Record `steps` steps, plan from the measured times, record `steps` more, and keep the faster plan.

        The state is donated and advances. All ranks must call it. See `Compiled.tune`.

        Returns: Both plans as they were measured. Printing them says which one is kept, how much faster it is, and
            where they differ.
        """
        compiled = self._program_on_all_ranks(*self._call_and_signature(args, kwargs))
        tuned, tuning = compiled.tune(*args, steps=steps, **kwargs)
        # Programs for other batch sizes follow the plan of this one, so they are lowered again.
        self._cache.add(tuned)
        self._cache.remove_other_sizes(tuned.lowered.recording.signature)
        return tuning

    @ends_at_user
    def check_finite(self, *args: P.args, **kwargs: P.kwargs) -> NonFinite | None:
        """Find the first value that is not finite and reaches the results of a step. See `Compiled.check_finite`."""
        compiled = self._program_on_all_ranks(*self._call_and_signature(args, kwargs))
        return compiled.check_finite(*args, **kwargs)

    def eval(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `evaluate(state, *batch) -> output`, which runs `fn` on the weights of a state of this step.

        It runs on the same ranks, with the same layouts and within the same limit of memory, without gradients and
        without a copy of the state, which stays unchanged. All ranks must call it. Make it once, before the loop: each
        `evaluate` has programs of its own.

        Args:
            fn: of a lifted step, a function of the batch that uses the module; otherwise a function of state and batch.
                It may compute a loss, or generate. Its output is treated like the output of a step.

        Raises: TraceError at the first call if `fn` changes the state, as batch norms in training mode do.

        >>> from torch import nn
        >>> import ztrans as zt
        >>> model = nn.Linear(2, 1)
        >>> lifted, state = zt.lift(lambda x: model(x).sum(), model)
        >>> evaluate = zt.Step.of(lifted).eval(model)
        >>> evaluate(state, torch.ones(3, 2)).shape
        torch.Size([3, 1])
        """
        extra = self._function.extra
        function = _unchanging(fn) if extra is None else extra.evaluation(fn)
        name = getattr(fn, "__name__", "")
        function.__name__ = name if name.isidentifier() else "evaluate"  # a module, or a lambda
        # An evaluation takes its batch whole: micro-batches are for the memory of backward.
        step = Step(function, tuple(t for t in self.transforms if t.micro_batches == 1))

        @functools.wraps(fn)
        def evaluate(state: Any, *batch: Any, **options: Any) -> Any:
            _, output = step(state, *batch, **options)
            return output

        return evaluate

    def retrace(self) -> None:
        """Forget all programs of this step, so that the next call traces it again."""
        self._cache.clear()

    @ends_at_user
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_under_compile(self.__name__)
        function = self._function
        call = BoundCall.of(function, args, kwargs)
        refuse_inside(self.__name__, call)
        if is_eager():
            return cast("R", self._run_eagerly(self._with_kept(call)))
        refuse_anomaly_mode(self.__name__)
        surroundings = Surroundings.of(function)
        try:
            # In a loop most calls are like the last one. A guard recognises them without computing a signature.
            match = self._cache.match(call, surroundings)
            if match is not None:
                compiled, inputs = match
                return cast("R", compiled.run_guarded(call, inputs))
            call = self._with_kept(call)
            signature = Signature.of(call, function, surroundings)
            compiled = self._cache.get(signature) or self._program_on_all_ranks(call, signature)
            return cast("R", compiled.run(call, surroundings))
        except BaseException as error:
            leave_if_cut_off(self.mesh, step_of(self.__name__), error)
            raise

    def _run_eagerly(self, call: BoundCall) -> tuple[Any, Any]:
        """Run the function of the step in place of a program (see `eager_step`)."""
        self._check_laid_out(call.state)
        _, paths = self._state.names(call.state)
        shardings = self.leaf_shardings(call.state)
        mesh = self._device_mesh()
        return run_eagerly(self.__name__, self.fn, call, self.transforms, mesh, paths, shardings)

    @ends_at_user
    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """The compiled step for arguments like these, compiled when such arguments first occur.

        The sizes of the batch may differ from rank to rank and from call to call. A program for another size follows
        the plan of the first, so all ranks send the same messages in the same order.
        """
        return self._program(*self._call_and_signature(args, kwargs))

    def _call_and_signature(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[BoundCall, Signature]:
        """A call of the step, and its signature under the current global state."""
        call = self._call(args, kwargs)
        return call, Signature.of(call, self._function)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> BoundCall:
        """A call of the step, whose state has the leaves that its transforms keep."""
        return self._with_kept(BoundCall.of(self._function, args, kwargs))

    def _with_kept(self, call: BoundCall) -> BoundCall:
        return self._state.completed(call, self.mesh)

    def _program_on_all_ranks(self, call: BoundCall, signature: Signature) -> Compiled:
        """The program for a call that all ranks make. If this rank fails to make it, the other ranks learn why."""
        try:
            return self._program(call, signature)
        except Exception as error:
            if isinstance(self.mesh, DeviceMesh):
                say_failure(self.mesh, self.__name__, error)
            raise

    def _program(self, call: BoundCall, signature: Signature) -> Compiled:
        """The program for a call, from the cache if it is there."""
        compiled = self._cache.get(signature)
        if compiled is not None:
            return compiled
        self._check_laid_out(call.state)
        compiled = self._new_program(call, self._cache.of_any_size(signature))
        compiled = dataclasses.replace(compiled, changes=self._cache.changes(compiled))
        self._cache.add(compiled, signature)
        if len(self._cache) > _MANY_PROGRAMS:
            warn_of_many_programs(self.__name__, len(self._cache), self._cache.last_change())
        return compiled

    def _new_program(self, call: BoundCall, leader: Compiled | None) -> Compiled:
        """A new program. It follows the plan of `leader`, a program for another batch size, if there is one."""
        if leader is not None:
            return leader.for_other_sizes(self._trace_call(call))
        return self._lower_call(call).compile()

    @property
    def _function(self) -> StepFunction:
        return self._cache.function(self.fn)

    def _device_mesh(self) -> DeviceMesh | None:
        """The mesh of devices that the step runs on; None if it runs in one process.

        Raises: ValueError if the mesh is abstract; RuntimeError if its process group has been destroyed.
        """
        if self.mesh is not None:
            check_runs(self.mesh)
        return self.mesh if isinstance(self.mesh, DeviceMesh) else None

    def _check_laid_out(self, state: Any) -> None:
        mesh = self._device_mesh()
        leaves = pytree.tree_leaves(state)
        _, paths = self._state.names(state)
        shardings = self.leaf_shardings(state)
        if mesh is not None:
            check_laid_out(self.__name__, mesh, paths, leaves, shardings)
        check_stored(self.__name__, paths, leaves, shardings)

    @property
    def _state(self) -> StepState:
        return StepState(self.__name__, self._function, self.transforms)

    def leaf_shardings(self, state: Any) -> list[LeafSharding]:
        """How each leaf of a state lies on the mesh between steps, in the order of the leaves in its tree."""
        return self._state.shardings(state)

    @ends_at_user
    def init(self, state: Any) -> Any:
        """Add the leaves that the transforms of this step keep, such as averages of `zt.ema`, with their first values.

        The step then takes and returns `(state, kept)`, where `kept` is a dict by transform and path, as `(output,
        added)` has what transforms add to the output. The state of a lifted loop, which is a dict, gets a key for each
        transform instead, here or in its first step. If no transform keeps a leaf, the state is returned as it is.

        `shard` starts those that a state lacks, so a loop that shards its state need not call this. Here all of them
        start, again if the state has them: call it after you have written to the parameters yourself. The leaves of
        `state` are not copied; new ones lie on the ranks as those do, and all ranks must call it.

        Source: `init` of optax.

        >>> import ztrans as zt
        >>> step = zt.ema(0.9)(lambda state, x: ({"params": state["params"] - x}, None))
        >>> step.init({"params": torch.ones(2)}).kept
        {'ema': {'params': tensor([1., 1.])}}
        """
        return self._state.started(state, self.mesh)

    @ends_at_user
    def ema(self, state: Any) -> Any:
        """Exchange the parameters of a state and their averages (`zt.ema`): `evaluate(step.ema(state), *batch)`.

        The averages are then where the parameters were, whole or sharded as they are, for `step.eval(fn)`, `zt.export`
        or `zt.write_back`. Nothing is copied or sent, so both states share their memory, and `step.ema` of the result
        is the first state again. Train with that one.

        Raises: ValueError if the step has no `zt.ema`; TypeError if the state has no averages.

        Source: `swap_weights` of TensorFlow Addons' moving average.
        """
        return self._state.exchanged(state, "ema")

    @ends_at_user
    def shard(
        self, state: State, *, source: int | None = None, device: torch.device | str | None = None
    ) -> State:
        """Copy a state into DTensors with the layouts and in the memory that this step needs. All ranks must call it.

        Args:
            state: DTensors, or full tensors with the same values on every rank; the ranks compare a digest of every
                leaf. Meta tensors become parts filled with NaN, to be initialized in place, for instance by
                `torch.nn.init`, so no rank ever holds the whole state. A step refuses parts that were never written.
                The moments and step counts that `lift` returns get their values here. Of a lifted step, the module and
                the optimizers give up their values, which the parts hold now: `zt.write_back` returns them.
            source: the rank whose tensors are sent to the other ranks leaf by leaf. The others may hold meta tensors.
                On a mesh of several axes it must be 0: the first rank along the axes that transforms use for the leaf.
            device: the device of the parts; by default the device of the leaf, or of the mesh for a meta leaf.

        Raises: TypeError if a leaf is neither a tensor nor a number. ValueError if the ranks hold different leaves, or
            `source` is not 0 on a mesh of several axes. RuntimeError if the state is half updated.
        """
        state = self._state.paired(state)
        leaves = pytree.tree_leaves(state)
        _, paths = self._state.names(state)
        check_state(paths, leaves)
        check_ended(leaves, "shard")
        mesh = self._device_mesh()
        if mesh is None:
            parts = copied_state(state, self.leaf_shardings(state))
        else:
            with stage(self.__name__, "shard"):
                parts = shard_state(state, mesh, paths, self.leaf_shardings(state), source, device)
        if self._function.extra is not None:
            self._function.extra.after_shard()
        return self._state.started(parts, mesh, only_missing=True)

    @ends_at_user
    def unshard(self, state: State) -> State:
        """Gather a state of DTensors into full tensors on every rank. All ranks must call it.

        The result is a copy, which later steps do not change. It has what transforms keep too, such as the errors of
        all ranks, so that `shard` makes the same state from it; `unshard(state.state)` leaves that out. Along an
        `independent_axis` each rank gets the values of its own replica. PyTorch's own process groups gather the leaves:
        if a rank is interrupted meanwhile, the others wait until its process ends or the groups time out.

        Raises: RuntimeError if the state is half updated, or not all ranks call it.
        """
        state = self._state.paired(state)
        check_ended(pytree.tree_leaves(state), "unshard")
        return unshard_state(state, self.mesh, self.leaf_shardings(state))


def _unchanging(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of state and batch as a step that returns the state unchanged, without gradients."""

    @functools.wraps(fn)
    @torch.no_grad()
    def step(state: Any, *batch: Any, **options: Any) -> Any:
        return state, fn(state, *batch, **options)

    return step
