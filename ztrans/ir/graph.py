"""The program of a train step as data: an explicitly typed, functional, straight-line graph.

    graph  ::=  inputs eqn* outputs          eqn  ::=  var, ... = op(arg, ..., key=arg)
    var    ::=  name: dtype[shape]           arg  ::=  var | literal | list of args

A pass is a function from one frozen `Graph` to another. A `Var` is bound once. Its shape is global, and its layout says
which part of it each rank holds:

    f32[32@dp,16]     split along dim 0 over the ranks of dp
    f32[32@dp/8,16]   split along dim 0 over each 8 neighbours of dp
    f32[]{sum@dp}     one term of a sum on each rank of dp
    f32[4]{own@host}  a leaf of the state that has a value for each rank of host, which are replicas that train apart
    f32[4,16]         whole on every rank
    f32[4,16]!        a future: the result of a collective that has started and must still be waited for
    f32<host>[4,16]   in the memory of the host, where no operation can read it (see `copies`)
    f32<host>[4,16]!  a leaf of the state that the previous step is still copying there (see `carried_copies`)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from .axes import with_joint_sizes
from .cached_analysis import cached_on_graph
from .nested import ATOMS, instances
from .op_facts import is_random
from .source import Source

if TYPE_CHECKING:  # `rules` imports this module, because rules take equations
    from .rules import Rules

Region = Literal["forward", "backward", "update"]
# The memories that hold values; all but the device are tiers of `planning.cluster`.
MemoryKind = Literal["device", "host"]
# The use of a collective or a copy; `report/palette.py` has a colour for each.
Role = Literal["param", "grad", "pmean", "state", "output", "update", "offload"]
DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128", torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Dim `dim` is split over the ranks of mesh axis `axis`, in rank order (see `layout.chunk`)."""

    axis: str
    dim: int = 0


@dataclass(frozen=True)
class Partial:
    """Each rank of `axis` holds one term; the value is the `op` of all terms: sum, mean, max, min, norm2.0, ..."""

    axis: str
    op: str


Placement = Split | Partial | None  # over one mesh axis; None: whole on every rank
Layout = tuple[Split | Partial, ...]


@dataclass(frozen=True, eq=False)
class Var:
    """A value of the program: its stable name, dtype, global shape, layout over the mesh, and memory.

    A leaf of the state also has the axes along which each rank has its own value (see `LeafSharding.independent`).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout = ()
    future: bool = False
    memory: MemoryKind = "device"
    own: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        """The type as text.

        >>> Var("w", torch.float32, (32, 16), (Split("dp"),)).type
        'f32[32@dp,16]'
        """
        dims = [str(n) for n in self.shape]
        terms = ""
        for p in self.layout:
            if isinstance(p, Split):
                dims[p.dim] = f"{self.shape[p.dim]}@{p.axis}"
            else:
                terms += f"{{{p.op}@{p.axis}}}"
        terms += "".join(f"{{own@{axis}}}" for axis in self.own)

        dtype = DTYPES.get(self.dtype, str(self.dtype))
        memory = "" if self.memory == "device" else f"<{self.memory}>"
        not_awaited = "!" if self.future else ""
        return f"{dtype}{memory}[{','.join(dims)}]{terms}{not_awaited}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole value."""
        return self.numel * self.dtype.itemsize

    @property
    def split(self) -> Split | None:
        """The first split of the value over the mesh, or None."""
        return next((s for s in self.layout if isinstance(s, Split)), None)

    @property
    def base_name(self) -> str:
        """The name without the quote at the end of a future's name."""
        return self.name.removesuffix("'")

    def is_like(self, other: Var) -> bool:
        """Whether another value has the same dtype, shape, layout and memory."""
        mine = (self.dtype, self.shape, self.layout, self.memory)
        return mine == (other.dtype, other.shape, other.layout, other.memory)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


def value_of_future(future: Var) -> Var:
    """The value that a wait for `future` binds."""
    return dataclasses.replace(future, name=future.base_name, future=False)


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation that PyTorch does not have, and its rules (see `rules`)."""

    name: str
    rules: Rules

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Provenance:
    """Why a collective exists: its role, the leaves of the state that it serves, and its mesh axis.

    A copy between two memories has the role "offload", and the other memory than the device's as its axis.

    A gather has a `regather` if an earlier gather has brought the same value. With "auto" a plan may keep the earlier
    value instead, or a part of it on each rank. With "always" the earlier value must be dropped. With a number, that
    many neighbours keep one part each, and gather the value again among themselves.
    """

    role: Role
    paths: tuple[str, ...]
    axis: str
    regather: Literal["auto", "always"] | int | None = None


# What a selective checkpoint of the step requires for the results of an equation. A preference is not a demand.
Demand = Literal["save", "recompute", "host"]

# Where a plan may move an equation.
# "birth": up, right after its last argument.
# "gather": the start of a gather, up.
# "reduce": the start of a reduction, to any place after its last argument, and the wait for it, down.
Move = Literal["birth", "gather", "reduce"]


@dataclass(frozen=True)
class Hints:
    """What transforms ask of the plan. Each transform sets its own fields, so their order does not matter.

    Attributes:
        memory_limit: the most bytes that may be live on a rank; None for no limit.
        limit_option: the option that asks for this limit, such as "prefetch(memory=100)"; "" if the limit is the memory
            of the device.
        gathers_in_flight, reductions_in_flight: the most bytes that have started and are not yet waited for.
        bucket: the most bytes in a bucket of reductions.
        matmuls_between: the most matmuls between the starts of two reductions.
        update: "eager" runs updates as soon as they can run. With "last" the program writes its state only after
            forward, backward and every collective.
        recompute_at_least: the least bytes of a value that a plan may recompute in backward; None forbids it.
        regather: how values are gathered again (see `Provenance`).
        offload: whether values of forward may wait for backward on the host, so that the step fits its limit.
        across_steps: whether the first gathers of the next step start in the update of this one.
        carry_copies: whether copies of the new state to the host may continue during the next step.
        notes: what a transform did not do, and why; `Lowered.summary` prints them.
    """

    memory_limit: int | None = None
    limit_option: str = ""
    gathers_in_flight: int | None = None
    reductions_in_flight: int | None = None
    bucket: int | None = None
    matmuls_between: int | None = None
    update: Literal["eager", "last"] | None = None
    recompute_at_least: int | None = None
    regather: Literal["auto", "always"] | int = "auto"
    offload: bool = False
    across_steps: bool = False
    carry_copies: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Eqn:
    """One equation, `outs = op(*args, **kwargs)`, with its region and the user's line.

    Attributes:
        op, args, kwargs, outs: the operation, what it reads, and what it binds.
        hint: where a plan may move it.
        provenance: why it exists, if it is a collective or a copy that a transform placed.
        demand: what a selective checkpoint around it requires for its results.
        repeats: the equation of forward that this one of backward runs again (see `recompute`).
    """

    op: torch._ops.OpOverload | Primitive
    args: tuple
    outs: tuple[Var | None, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    region: Region = "forward"
    source: Source | None = None
    hint: Move | None = None
    provenance: Provenance | None = None
    demand: Demand | None = None
    repeats: Eqn | None = None

    @functools.cached_property
    def ins(self) -> tuple[Var, ...]:
        """The variables that it reads, in order, with duplicates."""
        return (*variables(self.args), *variables(self.kwargs))

    @functools.cached_property
    def results(self) -> tuple[Var, ...]:
        """The variables that it binds, in order. `outs` also has a None for each result that it does not bind."""
        return tuple(out for out in self.outs if out is not None)

    @property
    def out(self) -> Var:
        """The variable that it binds, or the first of several."""
        return self.results[0]

    replace = dataclasses.replace

    def like(self, other: Eqn | None, region: Region | None = None) -> Eqn:
        """This equation with the region and the user's line of another one; with `region`, only with its line.

        None has no line: it stands for the maker of an input.
        """
        if other is None:
            return self.replace(region=region or self.region)
        return self.replace(region=region or other.region, source=other.source)

    def with_inputs(self, value_of: Callable[[Var], Any], **changes: Any) -> Eqn:
        """The equation that reads `value_of(v)` instead of each variable `v`, with other changes."""
        args = substitute(self.args, value_of)
        kwargs = substitute(self.kwargs, value_of)
        if args is self.args and kwargs is self.kwargs and not changes:
            return self
        return self.replace(args=args, kwargs=kwargs, **changes)


@dataclass(frozen=True)
class Kept:
    """A leaf that a transform adds to the state, and keeps from step to step, such as an average of a parameter.

    In programs and files it is called by the name of its transform and its path, `ema.params.fc1.weight`.

    Attributes:
        path: its path below the name of its transform.
        like: the path of the leaf of the state whose shape, dtype and axes it has; or a shape, of a leaf that is whole.
        start: its first value: zeros, or a copy of the leaf that it is like.
        layout: how it lies on the mesh: cut like its leaf; whole on every rank; or with a row like the leaf for each
            rank, `f32[4@dp,32,16]`, which ranks read by `ir.row`. Rows are terms of a sum, and begin as zeros: on
            another number of ranks they go on as equal parts of that sum. In int8 they are floats (`ops.moments`).
        dtype: another dtype than that of its leaf; of a shape, by default fp32.
        axis: if its leaf is cut over several axes, the one of them over which it is cut, and whole along the others.
        transform: the name of its transform, which `Step` fills in.
    """

    path: str
    like: str | tuple[int, ...]
    start: Literal["zeros", "copy"] = "zeros"
    layout: Literal["like", "whole", "rows"] = "like"
    dtype: torch.dtype | None = None
    axis: str | None = None
    transform: str = ""

    @property
    def name(self) -> str:
        """Its name in programs and checkpoints.

        >>> Kept("w", like="params.w", transform="ema").name
        'ema.w'
        """
        return f"{self.transform}.{self.path}"


@dataclass(frozen=True, eq=False)
class Graph:
    """A program. Its inputs and outputs are flat, in groups that follow each other:

        inputs     state, then arguments, then carried_inputs
        outputs    new_state, then results, then carried_outputs

    Attributes:
        num_state: the number of leaves of the state, old and new.
        batch: the arguments that differ from rank to rank.
        mesh: the axes of the mesh and their sizes.
        joint: the names of joint axes, and of neighbours on an axis (see `axes`).
        leaf_shapes: the shapes of the state leaves before the step itself divides them.
        hints: what transforms ask of the plan.
        zero_stage: the ZeRO stage, if there is one.
        micro: the number of micro-batches; the program is written for one of them (see `micro_batches`).
        donated: arguments that the program may overwrite, each with the result that replaces it.
        carried: the number of futures of gathers that pass from step to step (see `across_steps`).
        hidden: for each of the last arguments, which the caller does not pass, the position of the leaf of the state
            that it is a copy of. The last results are the copies of the new leaves (see `half_copies`).
        transforms: the transforms that were applied, in order.
        added: the names of the outputs that transforms added.
        kept: the leaves that transforms added to the state, after the leaves of the user's state.
    """

    name: str
    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Any, ...]
    num_state: int
    batch: frozenset[Var] = frozenset()
    mesh: tuple[tuple[str, int], ...] = ()
    joint: tuple[str, ...] = ()
    leaf_shapes: tuple[tuple[int, ...], ...] = ()
    transforms: tuple[str, ...] = ()
    hints: Hints = Hints()
    zero_stage: int | None = None
    micro: int = 1
    donated: tuple[tuple[Var, Var], ...] = ()
    carried: int = 0
    hidden: tuple[int, ...] = ()
    added: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()

    replace = dataclasses.replace

    def with_hints(self, **changes: Any) -> Graph:
        """This program with other hints."""
        return self.replace(hints=dataclasses.replace(self.hints, **changes))

    def with_memory_limit(self, limit: int, transform: str) -> Graph:
        """This program with a limit of live bytes that the transform of this name asks for.

        The limit holds for the whole step, so all transforms that ask for one must ask for the same.

        Raises: ValueError if an earlier transform asks for another limit.
        """
        option = f"{transform}(memory={limit})"
        if self.hints.limit_option and self.hints.memory_limit != limit:
            raise ValueError(
                f"{transform}: {option} and {self.hints.limit_option} are two limits of one step.\n"
                f"Give both the same limit, or leave one of them out."
            )
        return self.with_hints(memory_limit=limit, limit_option=self.hints.limit_option or option)

    @functools.cached_property
    def axes(self) -> dict[str, int]:
        """The size of each axis of the mesh, of each joint axis, and of each set of neighbours."""
        return with_joint_sizes(dict(self.mesh), self.joint)

    def with_leaves(self, leaves: Iterable[tuple[Var, Var]]) -> Graph:
        """This program with more leaves of the state, after the others: their old and new values."""
        old, new = zip(*leaves)
        shapes = self.leaf_shapes and (*self.leaf_shapes, *(v.shape for v in old))
        return self.replace(
            inputs=(*self.state, *old, *self.inputs[self.num_state :]),
            outputs=(*self.new_state, *new, *self.outputs[self.num_state :]),
            num_state=self.num_state + len(old),
            leaf_shapes=shapes,
        )

    @property
    def state(self) -> tuple[Var, ...]:
        """The leaves of the state before the step."""
        return self.inputs[: self.num_state]

    @property
    def new_state(self) -> tuple[Var, ...]:
        """The leaves of the state after the step."""
        return self.outputs[: self.num_state]

    @functools.cached_property
    def leaves(self) -> tuple[tuple[Var, Var], ...]:
        """Each leaf of the state before and after the step."""
        return tuple(zip(self.state, self.new_state))

    def kept_by(self, transform: str) -> dict[str, Var]:
        """The leaves that the transform of this name keeps, before the step, by their paths below its name."""
        by_name = {v.name: v for v in self.state}
        return {kept.path: by_name[kept.name] for kept in self.kept if kept.transform == transform}

    @property
    def arguments(self) -> tuple[Var, ...]:
        """The inputs after the state and before the carried futures: the batch, and numbers."""
        return self.inputs[self.num_state : len(self.inputs) - self.carried]

    @property
    def results(self) -> tuple[Any, ...]:
        """The outputs after the state and before the carried futures."""
        return self.outputs[self.num_state : len(self.outputs) - self.carried]

    @property
    def hidden_inputs(self) -> tuple[Var, ...]:
        """The copies of leaves that the program takes from the step before."""
        return self.arguments[len(self.arguments) - len(self.hidden) :]

    @property
    def hidden_outputs(self) -> tuple[Var, ...]:
        """The copies of leaves that the program returns for the next step."""
        return self.results[len(self.results) - len(self.hidden) :]

    @property
    def carried_inputs(self) -> tuple[Var, ...]:
        """The futures of gathers that the previous step started."""
        return self.inputs[len(self.inputs) - self.carried :]

    @property
    def carried_outputs(self) -> tuple[Var, ...]:
        """The futures of gathers that this step starts for the next one."""
        return self.outputs[len(self.outputs) - self.carried :]

    @functools.cached_property
    def carried_futures(self) -> dict[Var, Var]:
        """The futures that the step returns, each with the input that receives it in the next step.

        They are the futures of carried gathers, and leaves of the state that are being copied to the host.
        """
        futures = {}
        for old, new in self.leaves:
            if isinstance(new, Var) and new.future:
                futures[new] = old
        futures.update(zip(self.carried_outputs, self.carried_inputs))
        return futures

    def __str__(self) -> str:
        from .printer import program

        return program(self)

    def __repr__(self) -> str:
        from .printer import counted

        inputs, eqns = counted(len(self.inputs), "input"), counted(len(self.eqns), "equation")
        return f"Graph({self.name}, {inputs}, {eqns})"


class Names:
    """Unique names: `fresh("mm")` is `mm`, then `mm_1`, `mm_2`..."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = set(used)
        self._count: dict[str, int] = {}

    @classmethod
    def of(cls, graph: Graph) -> Names:
        """The names of a program."""
        return cls(v.name for v in (*graph.inputs, *producers(graph.eqns)))

    def fresh(self, name: str) -> str:
        unique = name
        while unique in self._used:
            self._count[name] = self._count.get(name, 0) + 1
            unique = f"{name}_{self._count[name]}"
        self._used.add(unique)
        return unique


def variables(tree: Any) -> list[Var]:
    """Every `Var` in nested lists, tuples and dicts, in order."""
    return instances(tree, Var)


def substitute(tree: Any, value_of: Callable[[Var], Any]) -> Any:
    """`tree` with every `Var` replaced by `value_of(var)`; `tree` itself if nothing changes."""
    if isinstance(tree, Var):
        return value_of(tree)
    if type(tree) in ATOMS:
        return tree
    if isinstance(tree, (tuple, list)):
        items = [substitute(x, value_of) for x in tree]
        return tree if all(map(operator.is_, items, tree)) else type(tree)(items)
    if isinstance(tree, Mapping):
        by_key = {key: substitute(x, value_of) for key, x in tree.items()}
        return tree if all(map(operator.is_, by_key.values(), tree.values())) else by_key
    return tree


def producers(eqns: Iterable[Eqn]) -> dict[Var, Eqn]:
    """The equation that binds each variable."""
    makers = {}
    for eqn in eqns:
        for out in eqn.results:
            makers[out] = eqn
    return makers


@cached_on_graph
def users(graph: Graph) -> Mapping[Var, Sequence[Eqn]]:
    """The equations that read each variable, in program order, each once. The result is cached: do not change it."""
    readers: dict[Var, list[Eqn]] = {}
    for eqn in graph.eqns:
        for var in dict.fromkeys(eqn.ins):
            readers.setdefault(var, []).append(eqn)
    return readers


def used_once(graph: Graph) -> dict[Var, Eqn]:
    """The values that a single equation reads and that are not outputs, each with the equation that binds it."""
    makers = producers(graph.eqns)
    outputs = set(variables(graph.outputs))
    single_use: dict[Var, Eqn] = {}
    for v, readers in users(graph).items():
        if len(readers) == 1 and v in makers and v not in outputs:
            single_use[v] = makers[v]
    return single_use


@cached_on_graph
def dce(graph: Graph, has_effect: Callable[[Eqn], bool] = is_random) -> Graph:
    """Drop the equations whose results are never read, unless they have an effect. By default random draws have one."""
    live = set(variables(graph.outputs))
    eqns = []
    for eqn in reversed(graph.eqns):
        is_read = not live.isdisjoint(eqn.results)
        if is_read or has_effect(eqn):
            eqns.append(eqn)
            live.update(eqn.ins)
    return graph.replace(eqns=tuple(reversed(eqns)))


def rename(graph: Graph, alias: Mapping[Var, Any]) -> Graph:
    """Let the program read `alias[v]` wherever it reads `v`. An alias of an alias is followed to its end."""

    def end_of_alias(var: Var) -> Any:
        while isinstance(var, Var) and var in alias:
            var = alias[var]
        return var

    eqns = []
    for e in graph.eqns:
        reads_alias = not alias.keys().isdisjoint(e.ins)
        eqns.append(e.with_inputs(end_of_alias) if reads_alias else e)
    return graph.replace(eqns=tuple(eqns), outputs=substitute(graph.outputs, end_of_alias))
