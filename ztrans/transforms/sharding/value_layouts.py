"""Value layouts: the layout that each value of a plain program has in the program of one rank, and changes of layout.

Every value has one layout on the mesh, over one axis. If equations need it in another layout, collectives change the
layout, once for all of them. Forward and backward need whole values; at stage 3, each of the two gathers them anew, and
computes their views and casts anew. The update needs parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...ir.graph import Eqn, Graph, Names, Partial, Provenance, Split, Var, producers
from ...ir.op_facts import CAST, is_view_or_cast
from ...ir.reshard import Site, redistribute, reduced

if TYPE_CHECKING:  # it walks over programs by means of this module
    from ..shard_params import ShardParams


class Values:
    """The values of the program of one rank, and its equations so far.

    `placed` and `local` map values of the plain program to values of the program of one rank. `placed` has those that
    are split over the mesh or in terms; `local` has those that are whole or vary. An equation that changes a layout has
    the region and the line of the equation that needs the change.
    """

    def __init__(self, graph: Graph, options: ShardParams) -> None:
        self.opt = options
        self.eqns: list[Eqn] = []
        self.producers = producers(graph.eqns)
        self.names = Names(v.name for v in (*graph.inputs, *self.producers))
        self.placed: dict[Var, Var] = {}
        self.local: dict[Var, Var] = {}
        self._laid: dict[tuple[Var, Split | Partial | None], Var] = {}
        self._lazy: dict[
            Var, Eqn
        ] = {}  # views and casts of gathered values, computed where they are used
        self._whole: dict[
            Var, dict[tuple | None, Var]
        ] = {}  # for each value, its whole values by phase
        self._phase = (0, "forward")

    def bind(self, old: Var, new: Var) -> None:
        """Let `new` be the value of the program of one rank that stands for `old` of the plain program."""
        (self.placed if new.layout else self.local)[old] = new

    def advance(self, eqn: Eqn) -> None:
        """Count the forwards and backwards: at stage 3, a gathered parameter is dropped after each of them."""
        count, region = self._phase
        if eqn.region not in (region, "update"):
            self._phase = (count + (eqn.region == "forward"), eqn.region)

    def value(self, v: Var, eqn: Eqn) -> Var:
        """A value in the layout that it has."""
        return self.placed.get(v) or self.whole(v, eqn)

    def laid(self, v: Var, to: Split | Partial | None, eqn: Eqn) -> Var:
        """A value in the layout that an equation of the update needs. The layout changes once for all equations."""
        value = self.value(v, eqn)
        held = next((p.axis for p in value.layout), None)
        if to is not None and held not in (
            None,
            to.axis,
        ):  # shards over one axis become shards over another
            value, held = self._relaid(value, None, held, eqn), None
        axis = held or (to.axis if to is not None else None)
        return value if axis is None else self._relaid(value, to, axis, eqn)

    def _relaid(self, value: Var, to: Split | Partial | None, axis: str, eqn: Eqn) -> Var:
        if (value, to) not in self._laid:
            name = f"{value.name}.{'full' if to is None else 'shard'}"
            site = self._site(eqn, "update", value.name, axis)
            more, self._laid[value, to] = redistribute(value, to, axis, site, name)
            self.eqns.extend(more)
        return self._laid[value, to]

    def defer(self, eqn: Eqn) -> bool:
        """Defer `eqn` until its result is used, if it is a view or a cast of a value that will be gathered.

        Returns: Whether it was deferred.
        """
        v = eqn.ins[0] if is_view_or_cast(eqn) else None
        waits = v in self._lazy or v in self.placed
        if waits:
            self._lazy.update((out, eqn) for out in eqn.results)
        return waits

    def whole(self, v: Var, eqn: Eqn) -> Var:
        """A value whole on every rank, gathered at its first use; at stage 3, at its first use in each phase."""
        if v in self.local:
            return self.local[v]
        phase = self._phase if self.opt.stage == 3 else None
        known = self._whole.setdefault(v, {})
        if phase not in known and v in self._lazy:
            self._make(self._lazy[v], phase, eqn, first=not known)
        elif phase not in known:
            axis = self.placed[v].layout[0].axis
            site = self._site(
                eqn, "param", v.name, axis, regather=self.opt.reshard if known else None
            )
            more, known[phase] = redistribute(self.placed[v], None, axis, site, f"{v.name}.full")
            self.eqns.extend(more)
        return known[phase]

    def _make(self, lazy: Eqn, phase: tuple | None, eqn: Eqn, first: bool) -> None:
        """Compute a view or a cast of a gathered value for `eqn`; the first computation keeps its name."""
        renamed = lambda out: (
            out if first else dataclasses.replace(out, name=self.names.fresh(out.name))
        )
        outs = tuple(out and renamed(out) for out in lazy.outs)
        copy = lazy.reading(lambda v: self.whole(v, eqn), outs=outs, region=eqn.region)
        for old, new in zip(lazy.results, copy.results):
            self._whole.setdefault(old, {})[phase] = new
        self.eqns.append(copy)

    def reduce(
        self, eqn: Eqn, x: Var, out: Var, over: Sequence[str], to: Split | None, role, path, op: str
    ) -> None:
        """Reduce `x` over each of the axes `over` to `out`; with `to`, the reduction over its axis scatters it."""
        # A complex gradient is sent in its own dtype: a cast to a real dtype would lose its imaginary part.
        dtype = self.opt.reduce_dtype if role == "grad" and not x.dtype.is_complex else None
        # If a gradient was cast to a wider dtype and would be sent in its former one, send the value before the cast.
        cast = self.producers.get(x)
        narrow = cast is not None and cast.op is CAST and cast.args[0].dtype == dtype
        sent = cast.args[0] if cast is not None and narrow else x
        value = self.local[sent] if sent in self.local else self.laid(sent, None, eqn)
        for axis in over:
            split = to if to is not None and axis == to.axis else None
            name = out.name if axis == over[-1] else f"{out.name}.{axis}"
            site = self._site(eqn, role, path, axis, keep=out.name)
            more, value = reduced(value, op, split, axis, site, name, dtype, x.dtype)
            self.eqns.extend(more)
        self.bind(out, value)

    def _site(
        self, eqn: Eqn, role, path: str, axis: str, keep: str | None = None, regather=None
    ) -> Site:
        fresh = lambda name: name if name == keep else self.names.fresh(name)
        return Site(eqn.region, eqn.source, fresh, Provenance(role, (path,), axis, regather))
