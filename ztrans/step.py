"""A train step and the transforms applied to it.

Decorating a step appends to its tuple of transforms; steps never nest. The first call with some signature traces,
lowers and compiles a program for it, and all calls with that signature run it. `trace`, `lower` and `compiled` do so up
to the stage that they name, and run nothing (see `stages`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from .calling.call import BoundCall, StepFunction
from .calling.global_state import no_collection
from .calling.inputs import Inputs, check_state
from .calling.signature import Signature, Surroundings
from .calling.trees import leaf_names
from .compiled import Compiled
from .ir.ambient import refuse_inside, refuse_under_compile
from .ir.dependencies import grouped
from .ir.graph import Layout, MemoryKind
from .ir.layout import AbstractMesh
from .ir.source import user_source
from .planning.cluster import Cluster
from .planning.limit import DoesNotFit
from .planning.place_copies import HostIsFull
from .planning.plan import Plan
from .planning.realise import OtherProgramError, OverLimitError
from .profiling.profile import Profile
from .report.progress import stage
from .report.tracebacks import ends_at_user
from .runtime import stop
from .runtime.agreement import say_failure, step_of
from .runtime.failure import check_ended, quit_if_cut_off
from .runtime.mesh import check_runs
from .runtime.process_groups import process_groups
from .runtime.state import check_laid_out, copied_state, shard_state, unshard_state
from .stages import Lowered, Traced
from .tracing.errors import warn, warn_of_many_programs
from .tracing.recording import Recording
from .tracing.trace import trace
from .transforms.base import (
    Transform,
    all_axes,
    appended,
    axes_of,
    layout_of,
    memory_of,
    mesh_of,
    micro_batches_of,
    no_step,
)

# A step with more programs is traced too often.
_MANY_PROGRAMS = 8
# The most programs that a step keeps. A program takes about 4 KB for each equation.
MOST_PROGRAMS = 64

P = ParamSpec("P")
R = TypeVar("R")
State = TypeVar("State")


@dataclass(eq=False)
class _CachedProgram:
    """An entry of the cache.

    Attributes:
        compiled: the program.
        sizeless: its signature without the sizes of the batch, which a family of programs has in common.
        number: its place in the order of addition.
        last_use: the time of its last use, counted in uses of all programs.
    """

    compiled: Compiled
    sizeless: Signature
    number: int
    last_use: int


class ProgramCache:
    """The programs of a step by their signatures, at most `MOST_PROGRAMS`.

    Programs that differ in the sizes of the batch alone are a family. The ranks have agreed on the plan of its oldest
    member, and the other members follow that plan, so the cache removes the least recently used of the others first.
    Only if there are more than `MOST_PROGRAMS` families does it remove the oldest ones, the same on all ranks.

    A search begins with the program that was added or looked up last: a loop seldom goes back to an older one.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[Signature, _CachedProgram] = OrderedDict()
        self._uses = 0
        self._added = 0
        # The signature after a trace, by that of the call that was traced.
        self._after_trace: dict[Signature, Signature] = {}
        self._function: StepFunction | None = None

    def __len__(self) -> int:
        return len(self._programs)

    def values(self) -> list[Compiled]:
        """The programs, the one that was added or looked up last at the end."""
        return [cached.compiled for cached in self._programs.values()]

    def function(self, fn: Callable) -> StepFunction:
        """What is known of `fn`, the function of the step."""
        if self._function is None:
            self._function = StepFunction(fn)
        return self._function

    def match(self, call: BoundCall, surroundings: Surroundings) -> tuple[Compiled, Inputs] | None:
        """The program whose last call is like this one, and the inputs of this call; None if no program matches."""
        for cached in reversed(self._programs.values()):
            inputs = cached.compiled.binding.match(call, surroundings)
            if inputs is not None:
                self._uses += 1
                cached.last_use = self._uses
                return cached.compiled, inputs
        return None

    def get(self, signature: Signature) -> Compiled | None:
        """The program for a signature, which is about to run; None if there is none.

        A program that has not run, and follows no plan on which the ranks have agreed, is forgotten if one for another
        batch size has run meanwhile. The ranks have agreed on the plan of that one, and this rank may be the only one
        with a batch of this size.
        """
        signature = self._after_trace.get(signature, signature)
        cached = self._programs.get(signature)
        if cached is None:
            return None
        if not (cached.compiled.is_bound or cached.compiled.agreed):
            of_other_size = self.of_any_size(signature)
            if of_other_size is not None and of_other_size.is_bound:
                del self._programs[signature]
                return None
        self._uses += 1
        cached.last_use = self._uses
        # In one call: an interrupt between a removal and an insertion would leave this rank without the program.
        self._programs.move_to_end(signature)
        return cached.compiled

    def of_any_size(self, signature: Signature) -> Compiled | None:
        """A program for a signature that differs in the sizes of the batch alone; one that has run if there is one."""
        sizeless = signature.without_sizes()
        found = None
        for cached in self._programs.values():
            if cached.sizeless == sizeless:
                if cached.compiled.is_bound:
                    return cached.compiled
                found = found or cached.compiled
        return found

    def add(self, compiled: Compiled, signature_before: Signature | None = None) -> Compiled:
        """Add a program under its signature, without its earlier stages. Returns it as it was added.

        A trace may change what the step reads, and the program is the same before and after (see `purity`). So
        `signature_before`, that of the call before its trace, also leads to the program.
        """
        compiled = compiled.without_stages()
        signature = compiled.lowered.recording.signature
        self._uses += 1
        self._added += 1
        sizeless = signature.without_sizes()
        self._programs[signature] = _CachedProgram(compiled, sizeless, self._added, self._uses)
        if signature_before is not None and signature_before != signature:
            self._after_trace[signature_before] = signature
        if len(self._programs) > MOST_PROGRAMS:
            self._remove_oldest()
        return compiled

    def _remove_oldest(self) -> None:
        """Remove programs until at most `MOST_PROGRAMS` are left."""
        in_order = sorted(self._programs.items(), key=lambda item: item[1].number)
        families = grouped((cached.sizeless, signature) for signature, cached in in_order)
        for sizeless in list(families)[:-MOST_PROGRAMS]:
            for signature in families.pop(sizeless):
                del self._programs[signature]

        followers = [signature for _, *others in families.values() for signature in others]
        followers.sort(key=lambda signature: self._programs[signature].last_use)
        for signature in followers[: len(self._programs) - MOST_PROGRAMS]:
            del self._programs[signature]
        self._after_trace = {k: v for k, v in self._after_trace.items() if v in self._programs}

    def remove_any_size(self, signature: Signature) -> None:
        """Forget the programs for a signature and for others that differ in the sizes of the batch alone."""
        sizeless = signature.without_sizes()
        others = {k: v for k, v in self._programs.items() if v.sizeless != sizeless}
        self._programs = OrderedDict(others)

    def changes(self, compiled: Compiled) -> tuple[str, ...]:
        """How the signature of a new program differs from the signature of the last one that ran, in words."""
        for signature, cached in reversed(self._programs.items()):
            if cached.compiled.is_bound:
                return tuple(signature.changes(compiled.lowered.recording.signature))
        return ()

    def last_change(self) -> list[str]:
        """How the signatures of the last two programs differ, in words. The last one has just been added."""
        *_, before, newest = self._programs
        return before.changes(newest)

    def clear(self) -> None:
        """Forget all programs, and where the step reads values."""
        self._programs.clear()
        self._after_trace.clear()
        self._function = None


@dataclass(frozen=True)
class Step(Generic[P, R]):
    """A train step `fn(state, *batch) -> (state, output)` and the transforms applied to it.

    Calling it runs one step on this rank's slice of the batch. The state is donated: it is updated in place. A step has
    the name, docstring, signature and types of its function. Two steps are equal if their functions, transforms and
    plans are.

    A method of an object may be a step: `self.step = zt.chain(...)(self.train)`. Numbers, strings and bools that it
    reads from `self` are constants of the program, as in a closure. If one changes, the step is traced again. A tensor
    in `self` is an error: pass it as state or with the batch.
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
        """Copy the attributes of the function that `functools.wraps` copies, and its signature."""
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

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a decorated function by its name, other steps by function, transforms and plan. Programs stay here."""
        named: Any = sys.modules.get(self.__module__)
        qualified_name = vars(self).get("__qualname__", "")
        for name in qualified_name.split("."):
            named = getattr(named, name, None)
        if named is self:
            return qualified_name
        return Step, (self.fn, self.transforms, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step[P, R]:
        """A step of the copied function, such as the method of a copied object, without programs."""
        return Step(copy.deepcopy(self.fn, memo), self.transforms, self.plan)

    def __get__(self, instance: object | None, owner: type | None = None) -> Step[P, R]:
        """The step itself, which is not bound to an object.

        Raises: TypeError if it is taken from an object whose class has it as a method.
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
        """The mesh that the step runs on, or None if it runs in one process."""
        return mesh_of(self.transforms)

    @property
    def stop_requested(self) -> bool:
        """Whether a rank has been asked to stop, by `zt.request_stop()` or a signal of `zt.stop_on`.

        On all ranks it becomes true after the same step: save there, and leave the loop. It stays true. On GPUs it
        becomes true one step later, because no step waits for other hosts.
        """
        if not isinstance(self.mesh, DeviceMesh):
            return stop.is_requested()
        groups = process_groups(self.mesh)
        return stop.is_requested() if groups.is_alone else groups.stop_requested

    @ends_at_user
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """Record the program as written, for arguments like these: real, fake or meta tensors, DTensors, numbers."""
        return self._traced(BoundCall.of(self._function, args, kwargs))

    def _traced(self, call: BoundCall) -> Traced:
        trace_again = functools.partial(self._recorded, call)
        recording = trace_again(micro_batches_of(self.transforms))
        return Traced(recording, self.transforms, trace_again)

    @no_collection()
    def _recorded(self, call: BoundCall, micro: int) -> Recording:
        """The program of a call, for one of `micro` micro-batches."""
        device = self.mesh.device_type if isinstance(self.mesh, DeviceMesh) else None
        # The leaves of the state have axes of their own. Every other leaf is distributed over all of them.
        axes = self._chosen(axes_of, call.state)
        every_axis = all_axes(self.transforms, axes)
        axes += [every_axis for _ in pytree.tree_leaves((call.batch, call.extra))]
        with stage(self.__name__, "trace"):
            return trace(
                self.fn,
                call,
                self._function,
                micro=micro,
                device=device,
                axes=axes,
                memories=self.memories(call.state),
            )

    @ends_at_user
    def lower(
        self, *args: Any, cluster: Cluster | None = None, plan: Plan | None = None, **kwargs: Any
    ) -> Lowered:
        """`trace(state, *batch).lower(cluster=..., plan=...)`; the default plan is that of `with_plan`, if it fits.

        Pass an argument of the step that is called `cluster` or `plan` by position.
        """
        return self._lowered(BoundCall.of(self._function, args, kwargs), cluster, plan)

    def _lowered(
        self, call: BoundCall, cluster: Cluster | None = None, plan: Plan | None = None
    ) -> Lowered:
        traced = self._traced(call)
        if plan is None and self.plan is not None:
            try:
                return traced.lower(cluster=cluster, plan=self.plan)
            except (OtherProgramError, OverLimitError, DoesNotFit, HostIsFull) as error:
                # For instance, the plan is for another batch size.
                warn(f"{error}\nThis program is planned again.", user_source())
        return traced.lower(cluster=cluster, plan=plan)

    def with_plan(self, plan: Plan) -> Step[P, R]:
        """This step with an existing plan, so that it starts without planning: `step.with_plan(zt.Plan.load(path))`.

        A program that the plan does not fit, for instance for another batch shape, gets a new plan, with a warning.
        """
        return Step(self.fn, self.transforms, plan)

    @ends_at_user
    def tune(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Record `steps` steps, plan again from them, record as many steps with the new plan, and keep the faster plan.

        The state is donated and advances. All ranks must call it. See `Compiled.tune`.

        Returns: The first profile.
        """
        compiled = self._compiled_on_all_ranks(*self._call_and_signature(args, kwargs))
        tuned, measured = compiled.tune(*args, steps=steps, **kwargs)
        # Programs for other batch sizes follow the plan of this one, so they are lowered again.
        self._cache.remove_any_size(tuned.lowered.recording.signature)
        self._cache.add(tuned)
        return measured

    def retrace(self) -> None:
        """Forget all programs of this step. The next call traces it again."""
        self._cache.clear()

    @ends_at_user
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_under_compile(self.__name__)
        call = BoundCall.of(self._function, args, kwargs)
        refuse_inside(self.__name__, call)
        surroundings = Surroundings.of(self._function)
        try:
            # In a loop most calls are like the last one, and are recognised without a signature.
            match = self._cache.match(call, surroundings)
            if match is not None:
                compiled, inputs = match
                return cast("R", compiled.run_guarded(call, inputs))
            signature = Signature.of(call, self._function, surroundings)
            compiled = self._cache.get(signature) or self._compiled_on_all_ranks(call, signature)
            return cast("R", compiled.run(call, surroundings))
        except BaseException as error:
            quit_if_cut_off(self.mesh, step_of(self.__name__), error)
            raise

    @ends_at_user
    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> Compiled:
        """The compiled step for arguments like these. It is compiled when such arguments first occur.

        The sizes of the batch may differ from rank to rank and from call to call. A program for another size follows
        the plan of the first, so all ranks send the same messages in the same order.
        """
        return self._compiled(*self._call_and_signature(args, kwargs))

    def _call_and_signature(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[BoundCall, Signature]:
        """A call of the step, and its signature here and now."""
        call = BoundCall.of(self._function, args, kwargs)
        return call, Signature.of(call, self._function)

    def _compiled_on_all_ranks(self, call: BoundCall, signature: Signature) -> Compiled:
        """The compiled step for a call that all ranks make. If this rank can make no program, the others learn why."""
        try:
            return self._compiled(call, signature)
        except Exception as error:
            if isinstance(self.mesh, DeviceMesh):
                say_failure(process_groups(self.mesh), self.__name__, error)
            raise

    def _compiled(self, call: BoundCall, signature: Signature) -> Compiled:
        compiled = self._cache.get(signature)
        if compiled is not None:
            return compiled
        self._check_laid_out(call.state)
        compiled = self._built(call, self._cache.of_any_size(signature))
        compiled = dataclasses.replace(compiled, changes=self._cache.changes(compiled))
        compiled = self._cache.add(compiled, signature)
        if len(self._cache) > _MANY_PROGRAMS:
            warn_of_many_programs(self.__name__, len(self._cache), self._cache.last_change())
        return compiled

    def _built(self, call: BoundCall, of_other_size: Compiled | None) -> Compiled:
        """A new program. It follows one for another size, whose plan is the one that the ranks agreed on."""
        if of_other_size is not None:
            return of_other_size.for_other_sizes(self._traced(call))
        return self._lowered(call).compile()

    @property
    def _function(self) -> StepFunction:
        return self._cache.function(self.fn)

    def _devices(self) -> DeviceMesh | None:
        """The mesh of devices that the step runs on, or None if it runs in one process.

        Raises: ValueError if the mesh is abstract; RuntimeError if its process group has been destroyed.
        """
        if self.mesh is not None:
            check_runs(self.mesh)
        return self.mesh if isinstance(self.mesh, DeviceMesh) else None

    def _check_laid_out(self, state: Any) -> None:
        mesh = self._devices()
        if mesh is None:
            return
        leaves = pytree.tree_leaves(state)
        paths = self._state_names(state)[1]
        axes = self._chosen(axes_of, state)
        check_laid_out(self.__name__, mesh, axes, paths, leaves, self.layouts(state))

    def _state_names(self, state: Any) -> tuple[list[str], list[str]]:
        """For each leaf of a state, its short name, and its path in messages."""
        return leaf_names(self._function.parameters(1), (state,))

    def layouts(self, state: Any) -> list[Layout]:
        """The layout of each leaf of the state, in the order of the leaves in its tree."""
        return self._chosen(layout_of, state)

    def memories(self, state: Any) -> list[MemoryKind]:
        """The memory in which each leaf of the state is kept, in the order of the leaves in its tree."""
        return self._chosen(memory_of, state)

    def _chosen(self, choice: Callable[..., Any], state: Any) -> list[Any]:
        """What the transforms choose for each leaf of the state."""
        names, _ = self._state_names(state)
        leaves = pytree.tree_leaves(state)
        return [choice(self.transforms, name, leaf) for name, leaf in zip(names, leaves)]

    @ends_at_user
    def shard(
        self, state: State, *, source: int | None = None, device: torch.device | str | None = None
    ) -> State:
        """Copy a state into DTensors in the layouts, and the memory, that this step needs. All ranks must call it.

        Args:
            state: DTensors, or full tensors that are the same on every rank; the ranks compare a digest of every leaf.
                Meta tensors become parts filled with NaN, to be written in place, for instance by `torch.nn.init`. So
                no rank ever holds the whole state. A step refuses parts that nobody has written to. The moments and
                step counts that `lift` returns get their values here.
            source: the rank whose tensors are used, and sent to the others leaf by leaf. These may hold meta tensors.
                On a mesh of several axes it is 0: the first rank along the axes that transforms use for the leaf.
            device: the device of the parts; by default the device of the leaf, or of the mesh for a meta leaf.

        Raises: TypeError if a leaf is neither a tensor nor a number. ValueError if the ranks hold different leaves, or
            `source` is not 0 on a mesh of several axes. RuntimeError if the state is half updated.
        """
        leaves = pytree.tree_leaves(state)
        paths = self._state_names(state)[1]
        check_state(paths, leaves)
        check_ended(leaves, "shard")
        mesh = self._devices()
        if mesh is None:
            return copied_state(state, self.memories(state))
        with stage(self.__name__, "shard"):
            return shard_state(
                state,
                mesh,
                paths,
                self.layouts(state),
                self._chosen(axes_of, state),
                source,
                device,
                self.memories(state),
            )

    @ends_at_user
    def unshard(self, state: State) -> State:
        """Gather a state of DTensors into full tensors on every rank. All ranks must call it.

        The result is a copy, which later steps do not change. Leaves are gathered by PyTorch's own groups: if a rank is
        interrupted meanwhile, the others wait until its process ends or these groups time out.

        Raises: RuntimeError if the state is half updated, or not all ranks call it.
        """
        check_ended(pytree.tree_leaves(state), "unshard")
        return unshard_state(state, self.mesh, self._chosen(axes_of, state))
