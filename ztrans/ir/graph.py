"""The staged graph: an explicitly typed, functional, straight-line program.

    graph  ::=  inputs eqn* outputs          eqn  ::=  var, ... = op(arg, ..., key=arg)
    var    ::=  name: dtype[shape]           arg  ::=  var | literal | list of args

A `Var` is bound once. Its shape is global; its layout says how it lies over the mesh:
`f32[32@dp,16]` is split along dim 0, `f32[]{sum@dp}` is a sum whose terms lie on the ranks of dp,
`f32[4,16]` is whole on every rank, and `f32[4,16]!` is a future: started, not yet waited for.
Everything here is frozen; a pass is a function from a `Graph` to another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .source import Source

Region = Literal["forward", "backward", "update"]
DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Dim `dim` is cut over mesh axis `axis`, in rank order (see `layout.chunk`)."""

    axis: str
    dim: int = 0


@dataclass(frozen=True)
class Partial:
    """Each rank of `axis` holds one term; the value is their `op` (sum, mean, max, min, norm2...)."""

    axis: str
    op: str


Layout = tuple[Split | Partial, ...]


@dataclass(frozen=True, eq=False)
class Var:
    """A value of the program: stable name, dtype, global shape, layout over the mesh."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout = ()
    future: bool = False

    @property
    def type(self) -> str:
        """The type as text.

        >>> Var("w", torch.float32, (32, 16), (Split("dp"),)).type
        'f32[32@dp,16]'
        """
        split = {s.dim: s.axis for s in self.layout if isinstance(s, Split)}
        dims = ",".join(f"{n}@{split[d]}" if d in split else str(n) for d, n in enumerate(self.shape))
        partial = "".join(f"{{{p.op}@{p.axis}}}" for p in self.layout if isinstance(p, Partial))
        return f"{DTYPES.get(self.dtype, str(self.dtype))}[{dims}]{partial}{'!' if self.future else ''}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def split(self) -> Split | None:
        """How the value is cut over the mesh, if it is."""
        return next((s for s in self.layout if isinstance(s, Split)), None)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation of ours, beside the ATen ones (see `collectives`)."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Provenance:
    """Why a collective exists: its role, the state leaves it serves, its mesh axis; `again` says that it gathers
    what an earlier one gathered: that value may be kept instead ("auto"), or must have been dropped ("always")."""

    role: Literal["param", "grad", "pmean", "state", "output", "update", "user"]
    paths: tuple[str, ...]
    axis: str
    again: Literal["auto", "always"] | None = None


@dataclass(frozen=True)
class Order:
    """A scheduling hint, solved by `schedule` and the plan: `birth` moves an equation to where its inputs
    are born; `gather` lets a collective start early, `reduce` lets one be waited for late, in buckets
    and within the limits given here, all in bytes but `between`, in matmuls."""

    place: Literal["birth", "gather", "reduce"]
    in_flight: int | None = None
    bucket: int | None = None
    between: int | None = None
    update: Literal["eager", "last"] = "eager"


@dataclass(frozen=True, eq=False)
class Eqn:
    """One equation: `outs = op(*args, **kwargs)`, with what is known about where it came from."""

    op: torch._ops.OpOverload | Primitive
    args: tuple
    outs: tuple[Var | None, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    region: Region = "forward"
    source: Source | None = None
    order: Order | None = None
    provenance: Provenance | None = None

    @functools.cached_property
    def ins(self) -> tuple[Var, ...]:
        """The variables read, in order, repeats included."""
        return (*variables(self.args), *variables(self.kwargs))

    @functools.cached_property
    def results(self) -> tuple[Var, ...]:
        """The variables bound, in order; `outs` also has None for results that are no tensors."""
        return tuple(out for out in self.outs if out is not None)

    @property
    def out(self) -> Var:
        """The variable bound by an equation that binds one, or the first of several."""
        return self.results[0]

    def replace(self, **changes: Any) -> Eqn:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: the first `num_state` inputs are the train state, and so are the outputs.

    `batch` holds the inputs that differ from rank to rank. `mesh` names axes and sizes. With `writes_last`
    the program writes its state only when every collective is done, and forward and backward with it. `budget`
    are the bytes that may be live on a rank, if `prefetch(memory=...)` was asked. `notes` say what a transform did
    that its name does not say.
    """

    name: str
    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Any, ...]
    num_state: int
    batch: frozenset[Var] = frozenset()
    mesh: tuple[tuple[str, int], ...] = ()
    history: tuple[str, ...] = ()
    writes_last: bool = False
    budget: int | None = None
    notes: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Graph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.mesh)

    def __str__(self) -> str:
        from .printer import program  # it prints graphs, so it imports this module

        return program(self)

    def __repr__(self) -> str:
        return f"Graph({self.name}, {len(self.inputs)} inputs, {len(self.eqns)} equations)"


class Names:
    """Unique names: `fresh("mm")` is `mm`, then `mm_1`, `mm_2`..."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._count: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        unique = name
        while unique in self._taken:
            self._count[name] = self._count.get(name, 0) + 1
            unique = f"{name}_{self._count[name]}"
        self._taken.add(unique)
        return unique


def variables(tree: Any) -> Iterator[Var]:
    """Every `Var` in nested lists, tuples and dicts."""
    if isinstance(tree, Var):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from variables(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from variables(item)


def substitute(tree: Any, read: Callable[[Var], Any]) -> Any:
    """`tree` with every `Var` replaced by `read(var)`."""
    if isinstance(tree, Var):
        return read(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([substitute(item, read) for item in tree])
    if isinstance(tree, Mapping):
        return {key: substitute(item, read) for key, item in tree.items()}
    return tree


def producers(eqns: Iterable[Eqn]) -> dict[Var, Eqn]:
    """Which equation binds each variable."""
    return {out: eqn for eqn in eqns for out in eqn.outs if out is not None}


def users(graph: Graph) -> dict[Var, list[Eqn]]:
    """Which equations read each variable, in program order, each once."""
    found: dict[Var, list[Eqn]] = {}
    for eqn in graph.eqns:
        for var in dict.fromkeys(eqn.ins):
            found.setdefault(var, []).append(eqn)
    return found


@functools.cache
def is_random(op: Any) -> bool:
    """Whether `op` draws random numbers: an effect, kept in order and never duplicated."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def dce(graph: Graph) -> Graph:
    """Drop the equations whose results nobody reads; random draws stay, for their effect."""
    live = set(variables(graph.outputs))
    kept = []
    for eqn in reversed(graph.eqns):
        if is_random(eqn.op) or any(out in live for out in eqn.outs):
            kept.append(eqn)
            live.update(eqn.ins)
    return graph.replace(eqns=tuple(reversed(kept)))


def rename(graph: Graph, alias: Mapping[Var, Any]) -> Graph:
    """Read `alias[v]` wherever the program reads `v`, following chains."""

    def read(var: Var) -> Any:
        while isinstance(var, Var) and var in alias:
            var = alias[var]
        return var

    def renamed(e: Eqn) -> Eqn:
        if not any(v in alias for v in e.ins):
            return e
        return e.replace(args=substitute(e.args, read), kwargs=substitute(e.kwargs, read))

    return graph.replace(eqns=tuple(map(renamed, graph.eqns)), outputs=substitute(graph.outputs, read))
