"""The staged graph: an explicitly typed, functional, straight-line program.

    graph  ::=  inputs eqn* outputs          eqn  ::=  var, ... = op(arg, ..., key=arg)
    var    ::=  name: dtype[shape]           arg  ::=  var | literal | list of args

A `Var` is bound once. Its shape is global, and its layout says which part of it each rank holds:
`f32[32@dp,16]` is split along dim 0 over the ranks of dp, `f32[]{sum@dp}` is a sum of one term on each rank of dp,
`f32[4,16]` is whole on every rank, and `f32[4,16]!` is a future, which was started and not yet waited for.
Everything here is frozen. A pass is a function from one `Graph` to another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from .relations import grouped
from .source import Source

if TYPE_CHECKING:  # the rules of primitives are about equations, so their module imports this one
    from .collectives.interface import Rules

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
        """The first split of the value over the mesh; None if it has none."""
        return next((s for s in self.layout if isinstance(s, Split)), None)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation of ztrans, which is none of PyTorch's, and its rules (see `collectives`)."""

    name: str
    rules: Rules

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Provenance:
    """Why a collective exists: its role, the state leaves that it serves, and its mesh axis.

    `again` marks a gather of a value that an earlier one gathered. With "auto" a plan may keep the earlier value
    instead; with "always" the earlier value must be dropped.
    """

    role: Literal["param", "grad", "pmean", "state", "output", "update", "user"]
    paths: tuple[str, ...]
    axis: str
    again: Literal["auto", "always"] | None = None


@dataclass(frozen=True)
class Order:
    """A scheduling hint, which planning follows.

    Attributes:
        place: "birth" moves an equation right after the last of its arguments is computed. "gather" lets a collective
            start early. "reduce" lets the wait for a collective come late.
        in_flight: bytes that may be started and not yet waited for.
        bucket: bytes that a bucket may hold.
        between: matmuls that may run between two starts.
        update: whether updates run as soon as they can, or last.
    """

    place: Literal["birth", "gather", "reduce"]
    in_flight: int | None = None
    bucket: int | None = None
    between: int | None = None
    update: Literal["eager", "last"] = "eager"


@dataclass(frozen=True, eq=False)
class Eqn:
    """One equation, `outs = op(*args, **kwargs)`, and where it came from."""

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
    """A program. Its first `num_state` inputs are the train state, and its first `num_state` outputs are the new state.

    Attributes:
        batch: the inputs that differ from rank to rank.
        mesh: the axes of the mesh and their sizes.
        history: the transforms that were applied.
        writes_last: whether the program writes its state only after every collective, forward and backward.
        budget: the bytes that may be live on a rank, where `prefetch(memory=...)` set them.
        notes: what a transform did beyond what its name says.
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

    def _repr_html_(self) -> str:
        from .printer import html  # as above

        return html(self)

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
    """By variable, the equation that binds it."""
    return {out: eqn for eqn in eqns for out in eqn.results}


def users(graph: Graph) -> dict[Var, list[Eqn]]:
    """By variable, the equations that read it, in program order, each once."""
    return grouped((var, eqn) for eqn in graph.eqns for var in dict.fromkeys(eqn.ins))


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
