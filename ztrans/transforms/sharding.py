"""The walk that makes a plain program the program of one rank: what `shard_params` does to each equation.

Forward and backward equations read whole values, gathered where they are used. Update equations
run on parts. A gradient is reduced at its mark. Outputs are laid out as their inputs were.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import torch

from ..collectives import GRADIENT, PMEAN, PSUM
from ..graph import (
    Eqn,
    Graph,
    Layout,
    Names,
    Provenance,
    Split,
    Var,
    is_random,
    is_view_or_cast,
    producers,
    substitute,
    users,
)  # fmt: skip
from ..groups import is_users, on_parts
from ..pretty import op_name
from ..redistribute import Site, on_axis, redistribute, reduced
from ..rules import NoRule, rule
from ..source import where
from ..varying import varying

_CAST = torch.ops.aten._to_copy.default


class Options(Protocol):
    """What the walk asks of `shard_params`."""

    axis: str
    stage: int
    reshard: str
    replicate_axis: str | None
    reduce_dtype: torch.dtype | None
    outputs: str

    def layout(self, path: str, shape: tuple[int, ...], leaf: torch.Tensor) -> Layout: ...


class Sharding:
    """One walk over the program. `placed` holds values as they lie on the mesh, `local` whole ones
    and those that vary; an invariant value may be in both."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph, self.opt, self.axis = graph, options, options.axis
        self.axes = [a for a in (options.axis, options.replicate_axis) if a]
        self.over = varying(graph, self.axes)
        self.eqns: list[Eqn] = []
        self.names = Names([v.name for v in graph.inputs] + [o.name for e in graph.eqns for o in e.outs if o])
        self.local: dict[Var, Var] = {}
        self.placed: dict[Var, Var] = {}
        self.lazy: dict[Var, Eqn] = {}  # views and casts of gathered values, made where they are used
        self.made: dict[tuple[Var, Any], Var] = {}  # whole values by phase
        self.gathered: set[Var] = set()
        self.phase: tuple[int, str] = (0, "forward")

    def run(self) -> Graph:
        inputs = [self.input(v, i < self.graph.num_state) for i, v in enumerate(self.graph.inputs)]
        for eqn in self.graph.eqns:
            self.advance(eqn)
            if is_random(eqn.op) and eqn.region == "update" and not self.varies(eqn):
                self.check_draw(eqn)
            if eqn.op is GRADIENT:
                self.gradient(eqn)
            elif eqn.op in (PMEAN, PSUM):
                self.explicit(eqn)
            elif eqn.region == "update" and any(v in self.placed for v in eqn.ins) and not self.varies(eqn):
                self.on_shards(eqn)
            else:
                self.on_whole(eqn)
        outputs = [self.output(i, out) for i, out in enumerate(self.graph.outputs)]
        batch = frozenset(self.local[v] for v in self.graph.batch)
        return self.graph.replace(inputs=tuple(inputs), eqns=tuple(self.eqns), outputs=tuple(outputs), batch=batch)

    # ---- equations

    def input(self, v: Var, is_state: bool) -> Var:
        layout = ()
        if is_state:
            layout = self.layout(v)
        new = dataclasses.replace(v, layout=layout)
        (self.placed if layout else self.local)[v] = new
        return new

    def layout(self, v: Var) -> Layout:
        if self.graph.axes[self.axis] == 1:
            return ()  # a part of one is the whole
        return self.opt.layout(v.name, v.shape, torch.empty(v.shape, dtype=v.dtype, device="meta"))

    def advance(self, eqn: Eqn) -> None:
        """Count passes: what is gathered for one forward or backward is dropped after it (stage 3)."""
        count, region = self.phase
        if eqn.region != region and eqn.region != "update":
            self.phase = (count + (eqn.region == "forward"), eqn.region)

    def varies(self, eqn: Eqn) -> bool:
        return any(v in self.over for v in eqn.ins)

    def on_whole(self, eqn: Eqn) -> None:
        """Forward, backward, and what varies: on whole values, as written."""
        if is_view_or_cast(eqn) and not self.varies(eqn) and self.is_gathered(eqn.ins[0]):
            self.lazy.update((out, eqn) for out in eqn.outs)  # a parameter is not used until this is
            return
        args, kwargs = (substitute(x, lambda v: self.whole(v, eqn)) for x in (eqn.args, eqn.kwargs))
        self.eqns.append(eqn.replace(args=args, kwargs=kwargs))
        self.local.update((out, out) for out in eqn.outs if out is not None)

    def is_gathered(self, v: Var) -> bool:
        return v in self.lazy or (v in self.placed and v not in self.local)

    def check_draw(self, eqn: Eqn) -> None:
        """A random draw of the update is good when each rank draws for its own part, and nobody else for it."""
        many = any(self.graph.axes[a] > 1 for a in self.axes)
        if many and (self.opt.replicate_axis or not any(v in self.placed for v in eqn.ins)):
            raise self.unreduced(
                eqn, f"a random draw ({op_name(eqn.op)}) in the update, of a value that is not sharded,"
            )

    def on_shards(self, eqn: Eqn) -> None:
        """An update equation: on shards, by DTensor's rule."""
        have = lambda v: self.value(v, eqn).layout  # noqa: E731
        try:
            if is_users(eqn):
                wanted = given = on_parts(eqn, [have(v) for v in eqn.ins])
            else:
                wanted, given = rule(eqn, have, self.axis, self.graph.axes[self.axis])
        except NoRule as error:
            raise ValueError(
                f"shard_params: the update cannot run on shards: {op_name(eqn.op)} has no sharding rule for "
                f"{', '.join(self.value(v, eqn).type for v in eqn.ins)} ({error}).\n"
                f"  at {where(eqn.source)}\n"
                f"Use elementwise operations, reductions or matmuls in the update, or leave these leaves whole: "
                f"shard_params(..., where=lambda path, leaf: ...)."
            ) from None
        ready = iter(zip(eqn.ins, wanted))

        def read(_: Var) -> Var:
            v, layout = next(ready)
            return self.laid(self.value(v, eqn), on_axis(layout, self.axis), eqn)

        args, kwargs = substitute(eqn.args, read), substitute(eqn.kwargs, read)
        outs = tuple(o and dataclasses.replace(o, layout=layout) for o, layout in zip(eqn.outs, given))
        self.eqns.append(eqn.replace(args=args, kwargs=kwargs, outs=outs))
        for old, new in zip(eqn.outs, outs):
            if old is not None:
                (self.placed if new.layout else self.local)[old] = new

    def gradient(self, eqn: Eqn) -> None:
        """A gradient for an invariant value is reduced here; one for a varying value is not."""
        g, p = eqn.args
        out = eqn.outs[0]
        over = self.over.get(g, frozenset()) - self.over.get(p, frozenset())
        if not over:
            self.same(out, g, eqn)
            return
        to = on_axis(self.placed[p].layout, self.axis) if p in self.placed else None
        self.reduce(eqn, g, out, over, to if to == Split(self.axis) else None, "grad", p.name, "mean")

    def explicit(self, eqn: Eqn) -> None:
        """What the user reduced with pmean or psum; over an axis on which it does not vary, a multiple."""
        x, axis = eqn.args
        out = eqn.outs[0]
        if axis not in self.axes:
            raise ValueError(
                f"shard_params: {eqn.op} over {axis!r}, which is none of its axes ({', '.join(self.axes)}).\n"
                f"  at {where(eqn.source)}\n"
                f"Name the axis that the step is sharded over."
            )
        if axis in self.over.get(x, frozenset()):
            consumers = self.consumers.get(out, [])
            only_update = bool(consumers) and all(e.region == "update" for e in consumers)
            split = Split(self.axis) if axis == self.axis and only_update and self.opt.stage > 0 and x.shape else None
            self.reduce(eqn, x, out, frozenset({axis}), split, "pmean", out.name, "mean" if eqn.op is PMEAN else "sum")
        elif eqn.op is PSUM:
            aten, times = torch.ops.aten, self.graph.axes[axis]
            self.eqns.append(eqn.replace(op=aten.mul.Tensor, args=(self.whole(x, eqn), times)))
            self.local[out] = out
        else:
            self.same(out, x, eqn)

    def same(self, out: Var, v: Var, eqn: Eqn) -> None:
        """`out` is `v`, wherever that lies."""
        if v in self.placed:
            self.placed[out] = self.placed[v]
        else:
            self.local[out] = self.whole(v, eqn)

    @functools.cached_property
    def consumers(self) -> dict[Var, list[Eqn]]:
        return users(self.graph)

    @functools.cached_property
    def producers(self) -> dict[Var, Eqn]:
        return producers(self.graph.eqns)

    def reduce(self, eqn: Eqn, x: Var, out: Var, over: frozenset, to: Split | None, role, path: str, op: str) -> None:
        """`out` = `x` reduced over the axes `over`: scattered over the sharded one first, where it is to be split."""
        dtype = self.opt.reduce_dtype if role == "grad" else None
        # A gradient widened only now, and to be rounded to what it was for the wire, goes as it was.
        made = self.producers.get(x)
        narrow = made is not None and made.op is _CAST and made.args[0].dtype == dtype
        value = self.local[made.args[0] if narrow else x]
        ordered = [a for a in self.axes if a in over]
        for axis in ordered:
            split = to if axis == self.axis else None
            name = out.name if axis == ordered[-1] else f"{out.name}.{axis}"
            site = self.site(eqn, role, path, axis, keep=out.name)
            more, value = reduced(value, op, split, axis, site, name, dtype, x.dtype)
            self.eqns.extend(more)
        (self.placed if value.layout else self.local)[out] = value

    def site(self, eqn: Eqn, role, path: str, axis: str | None = None, keep: str | None = None, again=False) -> Site:
        fresh = lambda name: name if name == keep else self.names.fresh(name)  # noqa: E731
        return Site(eqn.region, eqn.source, fresh, Provenance(role, (path,), axis or self.axis, again))

    # ---- values

    def value(self, v: Var, eqn: Eqn) -> Var:
        """A value as it lies on the mesh."""
        return self.placed.get(v) or self.whole(v, eqn)

    def laid(self, v: Var, to, eqn: Eqn) -> Var:
        """A value in the layout that an update equation wants; moved once, whoever asks."""
        key = (v, to)
        if key not in self.made:
            suffix = "full" if to is None else "shard"
            more, self.made[key] = redistribute(
                v, to, self.axis, self.site(eqn, "update", v.name), f"{v.name}.{suffix}"
            )
            self.eqns.extend(more)
        return self.made[key]

    def whole(self, v: Var, eqn: Eqn) -> Var:
        """A value whole on every rank, for forward and backward: gathered where it is used, in each phase (stage 3)."""
        if v in self.local:
            return self.local[v]
        phase = self.phase if self.opt.stage == 3 else None
        if (v, phase) not in self.made and v in self.lazy:
            self.again(self.lazy[v], phase, eqn)
        elif (v, phase) not in self.made:
            again = self.opt.reshard == "auto" and v in self.gathered
            self.gathered.add(v)
            site = self.site(eqn, "param", v.name, again=again)
            more, full = redistribute(self.placed[v], None, self.axis, site, f"{v.name}.full")
            self.eqns.extend(more)
            self.made[v, phase] = full
        return self.made[v, phase]

    def again(self, lazy: Eqn, phase: Any, eqn: Eqn) -> None:
        """Make a view or a cast of a gathered value for `eqn`; the first time under its own name."""
        args, kwargs = (substitute(x, lambda v: self.whole(v, eqn)) for x in (lazy.args, lazy.kwargs))
        first = not any((out, "named") in self.made for out in lazy.outs)
        outs = tuple(o if first else dataclasses.replace(o, name=self.names.fresh(o.name)) for o in lazy.outs)
        self.made.update(((old, "named"), old) for old in lazy.outs)
        self.made.update(((old, phase), new) for old, new in zip(lazy.outs, outs))
        self.eqns.append(lazy.replace(args=args, kwargs=kwargs, outs=outs, region=eqn.region))

    # ---- outputs

    def output(self, i: int, out: Any) -> Any:
        if not isinstance(out, Var):
            return out
        is_state = i < self.graph.num_state
        last = Eqn(GRADIENT, (), (), region="update")
        over = self.over.get(out)
        if not is_state:
            if over is None:
                return self.laid(self.value(out, last), None, self.from_(out, last, "output"))
            if self.opt.outputs == "local":
                return self.local[out]
            self.averages(out, "output")
            return self.averaged(out, over, None, "output")
        old = self.graph.inputs[i]
        to = on_axis(self.layout(old), self.axis)
        if over is None:
            return self.laid(self.value(out, last), to, self.from_(out, last, "update"))
        made = self.producers.get(out)
        if made is None or made.region == "update":
            raise self.unreduced(self.entry(made), "a value that depends on the batch", old)
        self.averages(out, f"state {old.name}")
        return self.averaged(out, over, to, "state")

    def from_(self, out: Var, last: Eqn, role: str) -> Eqn:
        made = self.producers.get(out)
        return last.replace(source=made.source if made else None)

    def averaged(self, out: Var, over: frozenset, to: Split | None, role: str) -> Var:
        made = self.producers[out]
        key = (out, (role, to))
        if key not in self.made:
            renamed = dataclasses.replace(out, name=self.names.fresh(f"{out.name}.mean"))
            self.reduce(made.replace(region="update"), out, renamed, over, to, role, out.name, "mean")
            self.made[key] = self.placed.get(renamed) or self.local[renamed]
        return self.made[key]

    def averages(self, out: Var, what: str) -> None:
        if out.dtype.is_floating_point or out.dtype.is_complex:
            return
        made = self.producers.get(out)
        raise ValueError(
            f"shard_params: the {what} {out} is an integer that depends on the batch, so it differs from rank to "
            f"rank and has no mean.\n  at {made.source.where if made and made.source else 'the step arguments'}\n"
            f"Reduce it with zt.psum(x, {self.axis!r}), make it a float, or pass outputs='local'."
        )

    def entry(self, eqn: Eqn | None) -> Eqn | None:
        """Where what varies entered the update that `eqn` ends."""
        made = self.producers
        while eqn is not None:
            before = [made[v] for v in eqn.ins if v in self.over and v in made and made[v].region == "update"]
            if not before:
                return eqn
            eqn = before[0]
        return None

    def unreduced(self, eqn: Eqn | None, what: str, leaf: Var | None = None) -> ValueError:
        reaches = f"reaches state {leaf.name}: {leaf.type}" if leaf else "reaches the update"
        return ValueError(
            f"shard_params: {what} {reaches} without having been reduced, so each rank would keep another state.\n"
            f"  at {eqn.source.where if eqn and eqn.source else 'the step arguments'}\n"
            f"Reduce it over the axis: zt.pmean(x, {self.axis!r}) for a mean, zt.psum for a sum. "
            f"Gradients from torch.autograd.grad, torch.func.grad and .backward() are reduced for you; "
            f"those made under vmap are not."
        )
