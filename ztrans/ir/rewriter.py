"""Rewrite a program: insert, replace, drop and reorder equations, and let them read other values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from .dependencies import sorted_by
from .emit import Recorded, record, written
from .graph import Eqn, Graph, Names, Region, Var, producers, rename, substitute, users, variables
from .marks import GRADIENT
from .op_facts import is_random


class _Place(NamedTuple):
    """Where a value is bound: beside an equation of the original program, or at its end.

    Attributes:
        anchor: that equation; None for the end.
        is_after: whether the value is bound by `anchor` or after it, or else before it.
        maker: the equation that binds it; None for an input.
    """

    anchor: Eqn | None
    is_after: bool
    maker: Eqn | None


class Rewriter:
    """A list of edits of a program, which `applied` makes in one pass.

    All edits refer to equations and values of the original program, and `emit` also reads values that were inserted.

    >>> import torch
    >>> from ztrans import ir
    >>> x, y = (Var(name, torch.float32, (2,)) for name in "xy")
    >>> relu = Eqn(torch.ops.aten.relu.default, (x,), (y,))
    >>> new = Rewriter(Graph("f", (x,), (relu,), (y,), 0))
    >>> new.replace_value(x, new.emit(lambda x: -x / 2, x, name="half"))
    >>> [ir.equation(e) for e in new.applied().eqns]
    ['neg: f32[2] = neg(x)', 'half: f32[2] = div(neg, 2)', 'y: f32[2] = relu(half)']

    Attributes:
        graph: the original program.
        makers: the equation that binds each of its values.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = producers(graph.eqns)
        self._names = Names.of(graph)
        self._before: dict[Eqn | None, list[Eqn]] = {}
        self._after: dict[Eqn, list[Eqn]] = {}
        self._replacements: dict[Eqn, tuple[Eqn, ...]] = {}
        self._new_reads: dict[Eqn, dict[Var, Var]] = {}
        self._aliases: dict[Var, Any] = {}
        self._new_outputs: dict[Var, Var] = {}
        self._added: list[Var] = []
        self._new_leaves: dict[Var, Var] = {}
        self._places: dict[Var, _Place] = {}  # of inserted values
        self._recorded: dict[Hashable, Recorded] = {}

    def fresh_name(self, name: str) -> str:
        """A name that the program does not have: `name`, with a number if necessary."""
        return self._names.fresh(name)

    def fresh(self, v: Var, suffix: str = "", **changes: Any) -> Var:
        """A new value like `v`, named after `v` with a suffix, and with other changes."""
        return dataclasses.replace(v, name=self.fresh_name(f"{v.name}{suffix}"), **changes)

    def emit(self, fn: Callable, *args: Any, region: Region | None = None, name: str = "") -> Any:
        """Insert the equations that compute `fn(*args)`, right after the last of the values that they read.

        They have the region and the user's line of the equation that computes that value. What is computed from a
        gradient belongs to the update. A function that closes over nothing is traced once for equal types of values.

        Args:
            fn: a function of tensors that returns new tensors (see `ir.emit`).
            args: values, in lists and dicts too, and constants; no keywords.
            region: another region.
            name: the name of the result; several results are numbered.

        Returns: The results of `fn`, with a `Var` in place of each tensor.

        Raises: ValueError if `fn` cannot become equations (see `ir.emit`).
        """
        last = max(map(self._place, variables(args)), key=self._position, default=self._start)
        if region is None and last.maker is not None and last.maker.op is GRADIENT:
            region = "update"
        recorded = self._record(fn, args)
        axes = self.graph.axes
        eqns, results = written(recorded, args, self._names, axes, last.maker, region, name)
        if last.is_after and last.anchor is not None:
            self.insert_after(last.anchor, *eqns)
        else:
            self.insert_before(last.anchor, *eqns)
        return results

    def insert_before(self, eqn: Eqn | None, *new: Eqn) -> None:
        """Insert equations before another one. With None they are inserted at the end of the program."""
        self._before.setdefault(eqn, []).extend(new)
        self._note(eqn, False, new)

    def insert_after(self, eqn: Eqn, *new: Eqn) -> None:
        """Insert equations after another one."""
        self._after.setdefault(eqn, []).extend(new)
        self._note(eqn, True, new)

    def replace(self, eqn: Eqn, *new: Eqn) -> None:
        """Replace an equation by others."""
        self._replacements[eqn] = new
        self._note(eqn, True, new)

    def drop(self, eqn: Eqn) -> None:
        """Remove an equation."""
        self._replacements[eqn] = ()

    def replace_reads(self, readers: Iterable[Eqn], old: Var, new: Var) -> None:
        """Let these equations read `new` instead of `old`.

        Raises: TypeError if `new` is not one value.
        """
        if not isinstance(new, Var):
            raise TypeError(
                f"{old.name} is to be replaced by a {type(new).__name__}, and one Var takes its place: unpack what "
                f"emit returned, or take `out` of an equation."
            )
        for eqn in readers:
            self._new_reads.setdefault(eqn, {})[old] = new

    def replace_value(self, old: Var, new: Var) -> None:
        """Let all equations of the original program, and its outputs, read `new` instead of `old`.

        A reader that stands before `new` moves behind it, such as what an earlier transform emitted.
        """
        self.replace_reads(users(self.graph).get(old, ()), old, new)
        self._new_outputs[old] = new

    def add_output(self, v: Var) -> None:
        """Return `v` beside the output of the step, under its name: the step returns (state, (output, {name: v}))."""
        self._added.append(v)

    def set_leaf(self, leaf: Var, new: Var) -> None:
        """Let `new` be the value of a leaf of the state after the step."""
        self._new_leaves[leaf] = new

    def alias(self, old: Var, new: Any) -> None:
        """Let the whole program read `new` instead of `old`, including inserted equations and outputs.

        So nothing may compute `new` from `old`. `replace_value` lets inserted equations read the old value.
        """
        self._aliases[old] = new

    def applied(self) -> Graph:
        """The program with all edits, and with its old inputs."""
        eqns: list[Eqn] = []
        for e in self.graph.eqns:
            eqns += self._before.get(e, ())
            for replacement in self._replacements.get(e, (e,)):
                eqns.append(self._with_new_reads(replacement, e))
            eqns += self._after.get(e, ())
        eqns += self._before.get(None, ())
        outputs = list(substitute(self.graph.outputs, lambda v: self._new_outputs.get(v, v)))
        for i, leaf in enumerate(self.graph.state):
            outputs[i] = self._new_leaves.get(leaf, outputs[i])
        graph = self.graph.replace(
            eqns=tuple(eqns),
            outputs=(*outputs, *self._added),
            added=(*self.graph.added, *(v.name for v in self._added)),
        )
        graph = _behind_what_they_read(graph)
        return rename(graph, self._aliases) if self._aliases else graph

    def _with_new_reads(self, replacement: Eqn, e: Eqn) -> Eqn:
        """The equation that stands where `e` was, with the new reads of `e`."""
        new_reads = self._new_reads.get(e)
        if new_reads is None:
            return replacement
        return replacement.with_inputs(lambda v: new_reads.get(v, v))

    # ---- places of values

    def _note(self, anchor: Eqn | None, is_after: bool, new: Iterable[Eqn]) -> None:
        """Keep the places of the values that inserted equations bind."""
        for e in new:
            for v in e.results:
                self._places[v] = _Place(anchor, is_after, e)

    def _place(self, v: Var) -> _Place:
        if v in self._places:
            return self._places[v]
        maker = self.makers.get(v)
        return self._start if maker is None else _Place(maker, True, maker)

    @property
    def _start(self) -> _Place:
        """The place of the inputs."""
        return _Place(self.graph.eqns[0] if self.graph.eqns else None, False, None)

    def _position(self, place: _Place) -> tuple[int, bool]:
        end = len(self.graph.eqns)
        return (end if place.anchor is None else self._positions[place.anchor]), place.is_after

    @functools.cached_property
    def _positions(self) -> dict[Eqn, int]:
        return {e: i for i, e in enumerate(self.graph.eqns)}

    def _record(self, fn: Callable, args: Sequence[Any]) -> Recorded:
        if getattr(fn, "__closure__", None):  # what it closes over may change between two calls
            return record(fn, args)
        leaves, tree = pytree.tree_flatten(args)
        types: list[Hashable] = []
        for x in leaves:
            is_value = isinstance(x, Var)
            types.append((x.dtype, x.shape, x.future, x.memory) if is_value else (type(x), x))
        key = (fn, tree, *types)
        if key not in self._recorded:
            self._recorded[key] = record(fn, args)
        return self._recorded[key]


def _behind_what_they_read(graph: Graph) -> Graph:
    """The program with each equation behind the values that it reads. Random draws keep their order."""
    bound = set(graph.inputs)
    for e in graph.eqns:
        if not bound.issuperset(e.ins):
            break
        bound.update(e.results)
    else:
        return graph
    needs = prerequisites(graph)
    for earlier, later in itertools.pairwise(filter(is_random, graph.eqns)):
        needs[later].append(earlier)
    return reordered(graph, lambda e: 0, needs)


def prerequisites(graph: Graph) -> dict[Eqn, list[Eqn]]:
    """For each equation, the equations that compute its arguments."""
    makers = producers(graph.eqns)
    return {e: [makers[v] for v in e.ins if v in makers] for e in graph.eqns}


def reordered(
    graph: Graph, key: Callable[[Eqn], Any], needs: Mapping[Eqn, Sequence[Eqn]] | None = None
) -> Graph:
    """The program with its equations sorted by `key`, as far as each can follow the equations that it needs.

    Args:
        graph: the program.
        key: the sort key. Equations with equal keys keep their order.
        needs: for each equation, the equations that must run before it; by default its `prerequisites`.

    >>> import torch
    >>> x, y, z = (Var(name, torch.float32, (2,)) for name in "xyz")
    >>> eqns = tuple(Eqn(torch.ops.aten.neg.default, (x,), (out,)) for out in (y, z))
    >>> graph = reordered(Graph("f", (x,), eqns, (y, z), 0), lambda e: e.out is y)
    >>> [e.out.name for e in graph.eqns]
    ['z', 'y']
    """
    position = {e: i for i, e in enumerate(graph.eqns)}
    order = sorted_by(lambda e: (key(e), position[e]), needs or prerequisites(graph))
    return graph.replace(eqns=tuple(order))
