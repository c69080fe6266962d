"""Emit equations, and replace in-place writes to tensors and views by equations that compute new values.

A `Storage` holds the current value of its base tensor. Each tensor of the step is an `Alias`: a storage, and the views
that lead from the base to the tensor. A read of a tensor applies its views to the new base, if the storage has changed
since the last read. A write applies the inverses of the views, which gives the new value of the base.

    y = x[0]; write y1 to y   -->   x1 = select_scatter(x, y1, 0)

The parts of one split do not overlap, so a write to one part leaves the values of the others valid. Recurrent cells
write to each of their gates in place, and the gates are such parts.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.graph import Eqn, Names, Var, substitute
from ..ir.op_facts import CAST, op_facts
from ..ir.printer import op_name
from ..ir.source import Source, where
from ..ir.structure import structure
from .errors import TraceError
from .regions import Fact

aten = torch.ops.aten
_SHAPES = ("view", "_unsafe_view", "squeeze", "unsqueeze")
_SPLITS = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
# The inverses of views of all elements of the base.
_INVERSES = {
    "t": aten.t.default,
    "transpose": aten.transpose.int,
    "view_as_real": aten.view_as_complex.default,
    "view_as_complex": aten.view_as_real.default,
    "_conj_physical": aten._conj_physical.default,
    "neg": aten.neg.default,
}
# The inverses of views of some elements of the base.
_SCATTERS = {
    "slice": aten.slice_scatter.default,
    "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
    "as_strided": aten.as_strided_scatter.default,
}


@dataclass(frozen=True)
class View:
    """A view of a base tensor: result `number` of `op(base, *args, **kwargs)`."""

    op: Any
    args: tuple
    kwargs: dict
    number: int = 0

    @property
    def name(self) -> str:
        return self.op._schema.name.removeprefix("aten::")

    def dim(self, position: int) -> int:
        """The dim of the view: the argument at this position, or by name, or 0 if it is left out."""
        return self.args[position] if len(self.args) > position else self.kwargs.get("dim", 0)


@dataclass
class Storage:
    """The memory of a tensor and its views.

    Attributes:
        value: the current value of the base tensor.
        writes: for each write so far, the views that lead from the base to the written tensor.
        written_at: the user's line of the last write.
    """

    value: Var
    writes: list[tuple[View, ...]] = field(default_factory=list)
    written_at: Source | None = None

    @property
    def version(self) -> int:
        """The number of writes so far."""
        return len(self.writes)


@dataclass
class Alias:
    """A tensor of the traced step: views of a storage. `value` was read at version `seen_version` of the storage."""

    storage: Storage
    views: tuple[View, ...] = ()
    seen_version: int = 0
    value: Var | None = None

    @staticmethod
    def of(results: Any) -> Any:
        """New tensors, each with a storage of its own, for the results of an equation."""
        if isinstance(results, tuple):
            return [Alias.of(v) for v in results]
        return None if results is None else Alias(Storage(results), value=results)


@dataclass
class Builder:
    """Builds the equations of a program, and tracks the storages of its tensors.

    Attributes:
        names: the names of values so far, which gives each new value its own.
        strides: the strides of each value in the trace, which views depend on.
        eqns: the equations so far.
        facts: the facts of the trace about each equation.
        scalars: the results of arithmetic on scalars, by operation and arguments.
        metas: the results of operations on meta tensors, by operation and types of arguments.
        source: the user's line of the operation that is being imported.
        fact: the facts about that operation.
    """

    names: Names
    strides: dict[Var, tuple[int, ...]]
    eqns: list[Eqn] = field(default_factory=list)
    facts: dict[Eqn, Fact] = field(default_factory=dict)
    scalars: dict[Hashable, Any] = field(default_factory=dict)
    metas: dict[Hashable, Any] = field(default_factory=dict)
    source: Source | None = None
    fact: Fact = field(default_factory=Fact)

    def meta(self, var: Var) -> torch.Tensor:
        """A meta tensor with the shape, dtype and strides of a value."""
        return torch.empty_strided(var.shape, self.strides[var], dtype=var.dtype, device="meta")

    def on_meta(self, op: Any, args: Sequence, kwargs: dict) -> Any:
        """The results of `op` on meta tensors. They are cached: an optimizer asks the same for many parameters."""
        call = Eqn(op, tuple(args), (), kwargs)
        key = structure(call, lambda v: (v.dtype, v.shape, self.strides[v]))
        if key not in self.metas:
            self.metas[key] = op(*substitute(args, self.meta), **substitute(kwargs, self.meta))
        return self.metas[key]

    def emit(
        self, op: Any, args: Sequence, kwargs: dict | None = None, like: Any = None, name: str = ""
    ) -> Any:
        """Add the equation of `op`, and return its results.

        The results have the types of the tensors `like`; without `like`, `op` runs on meta tensors to find them.
        Arithmetic on scalars alone, which an optimizer repeats for every parameter, has one equation. So have literal
        scalars.
        """
        kwargs = kwargs or {}
        key = _scalar_key(op, args, kwargs)
        if key in self.scalars:
            return self.scalars[key]
        if like is None:
            like = self.on_meta(op, args, kwargs)

        label = name or op_name(op)
        leaves = pytree.tree_leaves(like)
        outs: list[Var | None] = []
        for i, x in enumerate(leaves):
            # A result that is not a tensor, such as a gradient that nobody asked for, has no variable.
            if not isinstance(x, torch.Tensor):
                outs.append(None)
                continue
            numbered = label if len(leaves) == 1 else f"{label}.{i}"
            out = Var(self.names.fresh(numbered), x.dtype, tuple(x.shape))
            self.strides[out] = x.stride()
            outs.append(out)

        demand = self.fact.demand
        eqn = Eqn(op, tuple(args), tuple(outs), kwargs, source=self.source, demand=demand)
        self.eqns.append(eqn)
        self.facts[eqn] = self.fact
        if key is not None:
            self.scalars[key] = outs[0]
        return tuple(outs) if isinstance(like, (tuple, list)) else outs[0]

    def read(self, x: Any) -> Any:
        """The current value of a traced tensor. Its views are applied again if a write may have changed it."""
        if isinstance(x, (list, tuple)):
            return [self.read(item) for item in x]
        if not isinstance(x, Alias):
            return x
        changes = x.storage.writes[x.seen_version :]
        if x.value is None or not all(_are_disjoint(x.views, views) for views in changes):
            value = x.storage.value
            for view in x.views:
                value = self.view(value, view)
            x.value = value
        x.seen_version = x.storage.version
        return x.value

    def write(self, x: Alias, value: Var) -> None:
        """Give `x` a new value, and update the base of its storage."""
        storage = x.storage
        old = self.read(x)

        # The value that each view is applied to: the base of the storage first.
        bases = [storage.value]
        for view in x.views[:-1]:
            bases.append(self.view(bases[-1], view))
        # The inverses lead back, from the tensor to the base.
        new = value
        for base, view in zip(reversed(bases), reversed(x.views)):
            new = self.unview(base, view, new)

        storage.value = self.with_order_of(new, storage.value)
        storage.writes.append(x.views)
        storage.written_at = self.source
        # If the memory order differs, the next read applies the views to the new base. Gaps do not matter.
        if self._has_order_of(value, old):
            x.value = value if x.views else storage.value
            x.seen_version = storage.version

    def _has_order_of(self, value: Var, old: Var) -> bool:
        """Whether a value has the strides of `old`, or the strides that `old` would have without gaps."""
        if self.strides[value] == self.strides[old]:
            return True
        dense = _dense(old.shape, self.strides[old])
        shape = old.shape
        return _effective_strides(shape, self.strides[value]) == _effective_strides(shape, dense)

    def with_order_of(self, value: Var, old: Var) -> Var:
        """`value` in the memory order of `old`, so that every view of `old` also applies to it."""
        if self._has_order_of(value, old):
            return value
        if self.meta(old).is_contiguous():
            return self.contiguous(value)
        return self.emit(aten.copy.default, (old, value))

    def contiguous(self, value: Var) -> Var:
        return self.emit(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})

    def view(self, base: Var, view: View) -> Var:
        out = self.emit(view.op, (base, *view.args), view.kwargs)
        return out[view.number] if isinstance(out, tuple) else out

    def unview(self, base: Var, view: View, new: Var) -> Var:
        """`base` with the elements of the view replaced by `new`.

        Raises: TraceError for a view without an inverse.
        """
        name = view.name
        # Views of all elements.
        if view.op is aten.view.dtype:
            return self.emit(view.op, (new, base.dtype))
        if name in _SHAPES:
            flat = new if self.meta(new).is_contiguous() else self.contiguous(new)
            return self.emit(aten.view.default, (flat, list(base.shape)))
        if name in _INVERSES:
            return self.emit(_INVERSES[name], (new, *view.args))
        if name == "permute":
            return self.emit(aten.permute.default, (new, inverse_order(view.args[0])))
        if name == "expand" and base.shape == new.shape:
            return new

        # Views of some elements.
        if name in _SCATTERS:
            return self.emit(_SCATTERS[name], (base, new, *view.args), view.kwargs)
        if name == "unbind":
            return self.emit(aten.select_scatter.default, (base, new, view.dim(0), view.number))
        if name in _SPLITS:
            dim = view.dim(1)
            start = _start(view.args[0], view.number)
            end = start + new.shape[dim]
            return self.emit(aten.slice_scatter.default, (base, new, dim, start, end))
        raise TraceError(
            f"trace: a tensor is changed in place through its view `{name}`, which has no functional form.\n"
            f"  at {where(self.source)}\nChange the tensor itself, or compute a new one."
        )


def _are_disjoint(first: Sequence[View], second: Sequence[View]) -> bool:
    """Whether two tensors of one storage are different parts of one split, or views of different parts."""
    for a, b in zip(first, second):
        if a != b:
            is_same_split = (a.op, a.args, a.kwargs) == (b.op, b.args, b.kwargs)
            return is_same_split and a.number != b.number
    return False


@functools.cache
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with the same memory order and no gaps."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _effective_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of dims with more than one element. Other strides have no effect."""
    return [stride for size, stride in zip(shape, strides) if size > 1]


def _scalar_key(op: Any, args: Sequence, kwargs: dict) -> Hashable | None:
    """The key of a scalar that an operation computes from scalars and numbers; None for other operations."""
    is_literal = op is aten.full.default and args[0] == []
    if is_literal or _is_arithmetic(op, args):
        return structure(Eqn(op, tuple(args), (), kwargs), lambda v: v)
    return None


def _is_arithmetic(op: Any, args: Sequence) -> bool:
    """Whether an operation computes a scalar elementwise from scalar tensors, at least one, and numbers."""
    facts = op_facts(op)
    is_elementwise = facts.pointwise or op is CAST
    if facts.random or not is_elementwise:
        return False
    has_tensor = False
    for x in args:
        if isinstance(x, Var):
            has_tensor = True
            if x.shape:
                return False
        elif type(x) not in (int, float):
            return False
    return has_tensor


def inverse_order(dims: Sequence[int]) -> list[int]:
    """The order of dims that undoes a permutation.

    >>> inverse_order([1, -1, 0])
    [2, 0, 1]
    """
    order = [dim % len(dims) for dim in dims]
    return [order.index(dim) for dim in range(len(order))]


def _start(sizes: int | Sequence[int], index: int) -> int:
    """The first row of part `index` of a split into parts of these sizes; one number is the size of every part."""
    return sizes * index if isinstance(sizes, int) else sum(sizes[:index])
