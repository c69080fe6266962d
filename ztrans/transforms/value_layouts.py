"""Value layouts: where each value of a plain program is in the program of one rank, and how it gets elsewhere.

A value lies on the mesh in one layout. Where an equation wants another it is moved there once: whole
for forward and backward (at stage 3 once for each, with its views and casts), in parts for the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Literal, Protocol

import torch

from ..ir.graph import Eqn, Graph, Layout, Names, Partial, Provenance, Split, Var, producers, substitute
from ..ir.operations import is_view_or_cast
from ..ir.reshard import Site, redistribute, reduced

_CAST = torch.ops.aten._to_copy.default


class Options(Protocol):
    """What is asked of `shard_params`."""

    axis: str
    stage: int
    reshard: Literal["auto", "always"]
    replicate_axis: str | None
    reduce_dtype: torch.dtype | None
    outputs: str

    def layout(self, path: str, shape: tuple[int, ...], leaf: torch.Tensor) -> Layout: ...


class Values:
    """`placed` holds values as they lie on the mesh, `local` whole ones and those that vary. Equations that
    move values join `eqns`, at the region and line of the equation for which they do."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.opt, self.axis = options, options.axis
        self.axes = [a for a in (options.axis, options.replicate_axis) if a]
        self.eqns: list[Eqn] = []
        self.names = Names([v.name for v in graph.inputs] + [o.name for e in graph.eqns for o in e.outs if o])
        self.producers = producers(graph.eqns)
        self.placed: dict[Var, Var] = {}
        self.local: dict[Var, Var] = {}
        self._laid: dict[tuple[Var, Split | Partial | None], Var] = {}
        self._lazy: dict[Var, Eqn] = {}  # views and casts of gathered values, made where they are used
        self._whole: dict[Var, dict[tuple | None, Var]] = {}  # by phase
        self._phase = (0, "forward")

    def bind(self, old: Var, new: Var) -> None:
        """`old` of the plain program is `new` in that of one rank."""
        (self.placed if new.layout else self.local)[old] = new

    def same(self, out: Var, v: Var, eqn: Eqn) -> None:
        """`out` is `v`, wherever that lies."""
        self.bind(out, self.value(v, eqn))

    def advance(self, eqn: Eqn) -> None:
        """Count passes: what is gathered for one forward or backward is dropped after it (stage 3)."""
        count, region = self._phase
        if eqn.region not in (region, "update"):
            self._phase = (count + (eqn.region == "forward"), eqn.region)

    def value(self, v: Var, eqn: Eqn) -> Var:
        """A value as it lies on the mesh."""
        return self.placed.get(v) or self.whole(v, eqn)

    def laid(self, v: Var, to: Split | Partial | None, eqn: Eqn) -> Var:
        """A value in the layout that an update equation wants; moved once, whoever asks."""
        value = self.value(v, eqn)
        if (value, to) not in self._laid:
            name = f"{value.name}.{'full' if to is None else 'shard'}"
            site = self._site(eqn, "update", value.name)
            more, self._laid[value, to] = redistribute(value, to, self.axis, site, name)
            self.eqns.extend(more)
        return self._laid[value, to]

    def defer(self, eqn: Eqn) -> bool:
        """Whether `eqn` can wait until what it makes is used: a view or a cast of what is to be gathered."""
        v = eqn.ins[0] if is_view_or_cast(eqn) else None
        waits = v in self._lazy or (v in self.placed and v not in self.local)
        if waits:
            self._lazy.update((out, eqn) for out in eqn.outs)
        return waits

    def whole(self, v: Var, eqn: Eqn) -> Var:
        """A value whole on every rank, gathered where it is used, in each phase (stage 3)."""
        if v in self.local:
            return self.local[v]
        phase = self._phase if self.opt.stage == 3 else None
        known = self._whole.setdefault(v, {})
        if phase not in known and v in self._lazy:
            self._make(self._lazy[v], phase, eqn, first=not known)
        elif phase not in known:
            again = self.opt.reshard if known else None
            site = self._site(eqn, "param", v.name, again=again)
            more, known[phase] = redistribute(self.placed[v], None, self.axis, site, f"{v.name}.full")
            self.eqns.extend(more)
        return known[phase]

    def _make(self, lazy: Eqn, phase: tuple | None, eqn: Eqn, first: bool) -> None:
        """Make a view or a cast of a gathered value for `eqn`; the first time under its own name."""
        args, kwargs = (substitute(x, lambda v: self.whole(v, eqn)) for x in (lazy.args, lazy.kwargs))
        outs = tuple(o if first else dataclasses.replace(o, name=self.names.fresh(o.name)) for o in lazy.outs)
        for old, new in zip(lazy.outs, outs):
            self._whole.setdefault(old, {})[phase] = new
        self.eqns.append(lazy.replace(args=args, kwargs=kwargs, outs=outs, region=eqn.region))

    def reduce(self, eqn: Eqn, x: Var, out: Var, over: Set[str], to: Split | None, role, path: str, op: str) -> None:
        """`out` = `x` reduced over the axes `over`: scattered over the sharded one first, where it is to be split."""
        # A complex gradient crosses as it is: cast to a real dtype it would lose its imaginary part.
        dtype = self.opt.reduce_dtype if role == "grad" and not x.dtype.is_complex else None
        # A gradient widened only now, and to be rounded to what it was for the wire, goes as it was.
        made = self.producers.get(x)
        narrow = made is not None and made.op is _CAST and made.args[0].dtype == dtype
        value = self.local[made.args[0] if narrow else x]
        ordered = [a for a in self.axes if a in over]
        for axis in ordered:
            split = to if axis == self.axis else None
            name = out.name if axis == ordered[-1] else f"{out.name}.{axis}"
            site = self._site(eqn, role, path, axis, keep=out.name)
            more, value = reduced(value, op, split, axis, site, name, dtype, x.dtype)
            self.eqns.extend(more)
        self.bind(out, value)

    def _site(self, eqn: Eqn, role, path: str, axis: str | None = None, keep: str | None = None, again=None) -> Site:
        fresh = lambda name: name if name == keep else self.names.fresh(name)
        return Site(eqn.region, eqn.source, fresh, Provenance(role, (path,), axis or self.axis, again))
