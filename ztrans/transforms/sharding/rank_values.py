"""The values of the program of one rank, and the collectives that change their layouts.

The walk asks for each value in the layout that an equation reads. If the value has another layout, collectives are
added to the program, once for all equations that read the value in that layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...ir.axes import members, members_of
from ...ir.graph import (
    Eqn,
    Graph,
    Names,
    Placement,
    Provenance,
    Region,
    Role,
    Split,
    Var,
    producers,
)
from ...ir.op_facts import CAST, is_view_or_cast
from ...ir.source import Source
from ...rewrites.redistribute import Site, redistribute, reduced

Phase = tuple[int, Region]  # the number of forwards so far, and the region


def next_phase(phase: Phase, eqn: Eqn) -> Phase:
    """The phase of forward or backward after an equation. An equation of the update does not end the phase around it.

    A value that is brought in for a phase, such as a gathered parameter at stage 3, is dropped after it.
    """
    forwards, region = phase
    if eqn.region in (region, "update"):
        return phase
    return (forwards + (eqn.region == "forward"), eqn.region)


class EndOfStep(NamedTuple):
    """The reader of an output. It is in the update, and has the line that computed the output."""

    source: Source | None
    region: Region = "update"


# The reader of a value. Equations that change the layout of the value for it have its region and its line.
Reader = Eqn | EndOfStep


class RankValues:
    """The equations of the program of one rank so far, and its value for each value of the plain program.

    At stage 3, forward and backward each gather the parameters that they read, and repeat their views and casts.

    Args:
        graph: the plain program, with the ZeRO stage and the hint `regather`.
        reduce_dtype: the dtype of real gradients in messages, by default their own.

    Attributes:
        eqns: the equations.
        with_layout: values that are split over the mesh, or have a term on each rank. Each has one layout.
        without_layout: values that are whole on every rank, or vary.
        paths: the leaf that a value is computed from, for values that are gathered under its path and not their own.
        producers: the equations of the plain program, by the values that they compute.
    """

    def __init__(self, graph: Graph, reduce_dtype: torch.dtype | None = None) -> None:
        self.graph = graph
        self.reduce_dtype = reduce_dtype
        self.eqns: list[Eqn] = []
        self.producers = producers(graph.eqns)
        self.names = Names.of(graph)
        self.with_layout: dict[Var, Var] = {}
        self.without_layout: dict[Var, Var] = {}
        self.paths: dict[Var, str] = {}
        self._converted: dict[tuple[Var, Placement], Var] = {}
        # Views and casts of values that will be gathered. They are computed where they are used.
        self._deferred: dict[Var, Eqn] = {}
        # The whole value in each phase of a step: of shards, and of a deferred value of the plain program.
        self._gathered: dict[Var, dict[Phase | None, Var]] = {}
        self._phase: Phase = (0, "forward")

    def bind(self, plain: Var, value: Var) -> None:
        """Let `value` stand for `plain` of the plain program."""
        values = self.with_layout if value.layout else self.without_layout
        values[plain] = value

    def enter_phase(self, eqn: Eqn) -> None:
        self._phase = next_phase(self._phase, eqn)

    # ---- values in a layout

    def value(self, v: Var, reader: Reader) -> Var:
        """A value in its own layout."""
        return self.with_layout.get(v) or self.whole_value(v, reader)

    def in_layout(self, v: Var, to: Placement, reader: Reader) -> Var:
        """A value in the layout that an equation of the update needs."""
        value = self.value(v, reader)
        axis = value.layout[0].axis if value.layout else None
        # From one axis to another, the value becomes whole in between.
        if axis is not None and (to is None or to.axis != axis):
            value = self._convert(value, None, axis, reader)
        return value if to is None else self._convert(value, to, to.axis, reader)

    def _convert(self, value: Var, to: Placement, axis: str, reader: Reader) -> Var:
        if (value, to) not in self._converted:
            name = f"{value.name}.{'full' if to is None else 'shard'}"
            site = self.site(reader, Provenance("update", (value.name,), axis))
            eqns, self._converted[value, to] = redistribute(value, to, site, name)
            self.eqns.extend(eqns)
        return self._converted[value, to]

    def whole_value(self, v: Var, reader: Reader) -> Var:
        """The whole value on every rank, gathered at its first use; at stage 3, at its first use in each phase."""
        if v in self.without_layout:
            return self.without_layout[v]
        phase = self._phase if self.graph.zero_stage == 3 else None
        # Two values may have the same shards, which are gathered once.
        by_phase = self._gathered.setdefault(self.with_layout.get(v, v), {})
        if phase not in by_phase and v in self._deferred:
            self._compute_deferred(self._deferred[v], phase, reader, is_first=not by_phase)
        elif phase not in by_phase:
            shards = self.with_layout[v]
            path = self.paths.get(v, v.name)
            regather = self.graph.hints.regather if by_phase else None
            provenance = Provenance("param", (path,), shards.layout[0].axis, regather)
            site = self.site(reader, provenance)
            eqns, by_phase[phase] = redistribute(shards, None, site, f"{path}.full")
            self.eqns.extend(eqns)
        return by_phase[phase]

    def defer(self, eqn: Eqn) -> bool:
        """Defer `eqn` until its result is used, if it is a view or a cast of a value that will be gathered.

        Returns: Whether it was deferred.
        """
        if not is_view_or_cast(eqn):
            return False
        v = eqn.ins[0]
        is_gathered_later = v in self._deferred or v in self.with_layout
        if is_gathered_later:
            self._deferred.update(dict.fromkeys(eqn.results, eqn))
        return is_gathered_later

    def _compute_deferred(
        self, deferred: Eqn, phase: Phase | None, reader: Reader, is_first: bool
    ) -> None:
        """Compute a view or a cast of a gathered value for a reader. Only the first computation keeps its names."""
        outs = deferred.outs
        if not is_first:
            outs = tuple(None if out is None else self.renamed(out) for out in outs)
        local = deferred.with_inputs(
            lambda v: self.whole_value(v, reader), outs=outs, region=reader.region
        )
        for plain, out in zip(deferred.results, local.results):
            self._gathered.setdefault(plain, {})[phase] = out
        self.eqns.append(local)

    def renamed(self, v: Var) -> Var:
        """A value like `v` with a new name."""
        return dataclasses.replace(v, name=self.names.fresh(v.name))

    # ---- reductions

    def reduce(
        self,
        x: Var,
        out: Var,
        axes: Sequence[str],
        to: Split | None,
        reader: Reader,
        *,
        op: str,
        role: Role,
        path: str,
    ) -> None:
        """Reduce `x` over each of the `axes` to `out`.

        With `to`, the reduction over its axis comes first and scatters. If `x` is the same along that axis, it is cut
        before the reductions; if it differs along only some members of that axis, the result is whole.
        """
        # A complex gradient is sent in its own dtype: a cast to a real dtype would lose its imaginary part.
        is_real_grad = role == "grad" and not x.dtype.is_complex
        dtype = self.reduce_dtype if is_real_grad else None
        ordered_axes = list(axes)
        cut: Split | None = None
        if to is not None and to.axis in ordered_axes:
            # After the reduction that scatters, the others send only shards.
            ordered_axes.sort(key=lambda axis: axis != to.axis)
        elif to is not None and {*members(to.axis)}.isdisjoint(members_of(axes)):
            cut = to
        value = self._value_to_send(x, cut, dtype, reader)
        for axis in ordered_axes:
            split = to if to is not None and axis == to.axis else None
            name = out.name if axis == ordered_axes[-1] else f"{out.name}.{axis}"
            site = self.site(reader, Provenance(role, (path,), axis), fixed_name=out.name)
            eqns, value = reduced(value, op, split, site, name, dtype, x.dtype)
            self.eqns.extend(eqns)
        self.bind(out, value)

    def _value_to_send(
        self, x: Var, cut: Split | None, dtype: torch.dtype | None, reader: Reader
    ) -> Var:
        """The value to send for `x` in `dtype`. If `x` is a widening cast of a value of `dtype`, it is that value."""
        cast = self.producers.get(x)
        if cast is not None and cast.op is CAST and _widens(cast, dtype):
            x = cast.args[0]
        return self.in_layout(x, cut, reader)

    def site(self, reader: Reader, provenance: Provenance, fixed_name: str | None = None) -> Site:
        """The site of new equations. `fixed_name` is a name of the plain program, which their result keeps."""

        def fresh(name: str) -> str:
            return name if name == fixed_name else self.names.fresh(name)

        return Site(reader.region, reader.source, fresh, provenance)


def _widens(cast: Eqn, dtype: torch.dtype | None) -> bool:
    """Whether a cast widens a value of `dtype`, so that a cast back gives the same bits."""
    narrow = cast.args[0].dtype
    wide = cast.out.dtype
    return narrow == dtype and torch.promote_types(narrow, wide) == wide
