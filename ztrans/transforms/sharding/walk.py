"""The walk: how `shard_params` turns a plain program into the program of one rank, equation by equation.

Equations of forward and backward read whole values, which are gathered where they are used. Equations of the update run
on shards as far as their rules allow. A gradient is reduced at its mark. Each leaf of the new state has the layout of
the old leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from ...ir.axes import members, members_of
from ...ir.graph import Eqn, Graph, Layout, Names, Provenance, Split, Var, producers, users
from ...ir.layout import is_worth_cutting, on_axis
from ...ir.marks import GRADIENT, PMEAN, PSUM
from ...ir.op_facts import CAST, is_random, is_view_or_cast
from ...ir.printer import op_name
from ...ir.relations import depending
from ...ir.reshard import Site, redistribute, reduced
from ...ir.rules import INVARIANT
from ...ir.source import where
from ...ir.user_collectives import is_users, on_parts
from ...ir.varying import differing, varying
from ...ops import EVERY_AXIS
from ..base import meta_leaves
from .leaf_axes import LeafAxes
from .registered_rules import NoRule, Placement
from .rules import Rule, rule

if TYPE_CHECKING:  # `shard_params` imports this module
    from ..shard_params import ShardParams

aten = torch.ops.aten
REDUCTIONS: Mapping[object, str] = {PMEAN: "mean", PSUM: "sum"}


def sharded(graph: Graph, options: ShardParams) -> Graph:
    """The program of one rank of a plain program."""
    walk = Walk(graph, options)
    program = walk.run()
    whole_eqns = whole_value_eqns(graph, walk.gathering, walk.layout_of)
    if whole_eqns == walk.gathering:
        return program
    return Walk(graph, options, whole_eqns).run()


def whole_value_eqns(
    graph: Graph, gathering: Set[Eqn], layout_of: Callable[[Var], Layout]
) -> set[Eqn]:
    """The equations of the update that run on whole values, on every rank.

        x = cast(g); n = norm(x); y = div(x, n); a = mm(y, t(y))
          -->   x_full = wait(all_gather(x)); n = norm(x_full); y = div(x_full, n); ...

    These are those of `gathering`, whose rules want whole values, and those before them that need no more bytes from
    other ranks than their results would need. So Muon's matrices are gathered once, in bf16, and their updates have the
    bits that they have in one process.

    Args:
        layout_of: the layout of each value if only the equations of `gathering` run on whole values.
    """
    whole_values: set[Var] = set()
    whole_eqns: set[Eqn] = set()
    for e in reversed(graph.eqns):
        needs_result = e.region == "update" and not whole_values.isdisjoint(e.results)
        if e in gathering or (needs_result and _is_cheap_whole(e, whole_values, layout_of)):
            whole_eqns.add(e)
            whole_values.update(e.ins)
    return whole_eqns


def _is_cheap_whole(e: Eqn, whole_values: Set[Var], layout_of: Callable[[Var], Layout]) -> bool:
    """Whether to gather what an equation reads sends no more bytes than to gather its results."""
    if not isinstance(e.op, torch._ops.OpOverload) or is_random(e) or is_users(e):
        return False
    gathered = {v for v in e.ins if layout_of(v) and v not in whole_values}
    size = lambda values: sum(v.numel * v.dtype.itemsize for v in values)
    return size(gathered) <= size(e.results)


class Walk:
    """One walk over a plain program.

    Attributes:
        whole_eqns: the equations of the update that run on whole values, whatever their rules say.
        gathering: the equations of the update whose rules want whole values of arguments that are cut.
    """

    def __init__(
        self, graph: Graph, options: ShardParams, whole_eqns: Set[Eqn] = frozenset()
    ) -> None:
        self.graph = graph
        self.options = options
        self.whole_eqns = whole_eqns
        self.gathering: set[Eqn] = set()
        self.values = RankValues(graph, options)
        self.axes = LeafAxes.of_program(graph, options)
        self.varying = varying(graph, self.axes.all)
        self.differing = differing(graph, self.axes.absent, self.axes.all)
        self.readers = users(graph)
        tensors = (*graph.inputs[: graph.num_state], *graph.batch)
        self.of_tensors = depending(graph.eqns, tensors)
        self.means: dict[tuple, Var] = {}

    def run(self) -> Graph:
        """The program of one rank."""
        g = self.graph
        leaves = []
        for v, leaf in zip(g.inputs, meta_leaves(g)):
            layout = self.options.layout(v.name, v.shape, leaf)
            # The only rank of an axis has the whole value.
            layout = tuple(p for p in layout if g.axes[p.axis] > 1)
            leaves.append(dataclasses.replace(v, layout=layout))
        inputs = (*leaves, *g.inputs[g.num_state :])
        for plain, local in zip(g.inputs, inputs):
            self.values.bind(plain, local)
        for eqn in g.eqns:
            self.values.enter_phase(eqn)
            self.add(eqn)
        state = map(self.state, g.inputs, leaves, g.outputs)
        outputs = (*state, *map(self.output, g.outputs[g.num_state :]))
        return g.replace(inputs=inputs, eqns=tuple(self.values.eqns), outputs=outputs)

    def layout_of(self, v: Var) -> Layout:
        """The layout that the walk has given to a value of the plain program."""
        return self.values.placed[v].layout if v in self.values.placed else ()

    def varies(self, eqn: Eqn) -> bool:
        return any(v in self.varying for v in eqn.ins)

    # ---- equations

    def add(self, eqn: Eqn) -> None:
        """Add an equation of the plain program to that of one rank."""
        if eqn.op is GRADIENT:
            self.add_gradient(eqn)
        elif eqn.op in REDUCTIONS:
            self.add_reduction(eqn)
        elif self.varies(eqn):
            self.add_whole(eqn)
        elif eqn.region == "update":
            self.add_update(eqn)
        elif not self.values.defer(eqn):
            self.add_whole(eqn)

    def add_whole(self, eqn: Eqn) -> None:
        """Add an equation that runs unchanged, on whole values and on values that vary."""
        self.values.eqns.append(eqn.with_inputs(lambda v: self.values.whole_value(v, eqn)))
        for out in eqn.results:
            self.values.bind(out, out)

    def add_update(self, eqn: Eqn) -> None:
        """Add an equation of the update, which runs on shards as far as its rule allows."""
        if is_random(eqn):
            self.check_draw(eqn)
        if any(map(self.layout_of, eqn.ins)):
            self.add_on_shards(eqn)
        elif not self.values.defer(eqn):
            self.add_whole(eqn)

    def add_on_shards(self, eqn: Eqn) -> None:
        axis = self.axis_of(eqn)
        placements = [on_axis(self.values.value(v, eqn).layout, axis) for v in eqn.ins]
        sharding_rule = self.rule(eqn, placements, axis)
        has_cuts = any(isinstance(p, Split) for p in placements)
        if has_cuts and not any(sharding_rule.ins):
            self.gathering.add(eqn)
        if is_random(eqn) and any(placements) and not any(sharding_rule.outs):
            draw = f"a random draw ({op_name(eqn.op)}) in the update, on whole values,"
            raise self.unreduced(eqn, draw)
        remaining = iter(sharding_rule.ins)
        outs = []
        for out, placement in zip(eqn.outs, sharding_rule.outs):
            layout = (placement,) if placement else ()
            outs.append(out and dataclasses.replace(out, layout=layout))
        local = eqn.with_inputs(
            lambda v: self.values.in_layout(v, next(remaining), eqn), outs=tuple(outs)
        )
        self.values.eqns.append(local)
        for plain, out in zip(eqn.results, local.results):
            self.values.bind(plain, out)

    def rule(self, eqn: Eqn, placements: list[Placement], axis: str) -> Rule:
        """The sharding rule of an equation of the update.

        Raises: ValueError if it calls an operator of a user without a rule.
        """
        if eqn in self.whole_eqns:
            return Rule([None] * len(eqn.ins), [None] * len(eqn.outs))
        if is_users(eqn):
            layouts = on_parts(eqn, [(p,) if p else () for p in placements])
            parts = [on_axis(layout, axis) for layout in layouts]
            return Rule(parts, parts)
        try:
            return rule(eqn, placements, axis, self.graph.axes[axis])
        except NoRule as error:
            raise self.no_rule(eqn, error) from None

    def axis_of(self, eqn: Eqn) -> str:
        """The axis over which most arguments of an equation of the update are cut, or in terms."""
        axes: list[str] = []
        for v in eqn.ins:
            axes += (p.axis for p in self.values.value(v, eqn).layout)
        return max(dict.fromkeys(axes), key=axes.count, default=self.axes.main)

    def check_draw(self, eqn: Eqn) -> None:
        """Check that no two ranks draw random numbers for the same elements in the update.

        Raises: ValueError if they would, each its own numbers.
        """
        apart: set[str] = set()  # the axes whose ranks have different elements
        for v in eqn.ins:
            apart.update(self.differing.get(v, ()))
            cut_axes = [p.axis for p in self.layout_of(v) if isinstance(p, Split)]
            apart.update(members_of(cut_axes))
        if any(self.graph.axes[axis] > 1 and axis not in apart for axis in self.axes.all):
            draw = f"a random draw ({op_name(eqn.op)}) in the update"
            raise self.unreduced(eqn, f"{draw}, of a value that is not sharded,")

    # ---- reductions

    def add_gradient(self, eqn: Eqn) -> None:
        """Add the mark of a gradient: that of an invariant value is reduced here, that of a varying value is not.

        A leaf that differs over an axis, such as the experts of a rank, already has the terms of all ranks of that
        axis: collectives of backward bring them. The loss is a mean over that axis too, so its gradient is divided by
        the number of these ranks, and not reduced over them.
        """
        g, p = eqn.args
        out = eqn.out
        differs = self.differing.get(p, INVARIANT)
        varies = self.varying.get(g, INVARIANT) - self.varying.get(p, INVARIANT)
        if not varies:
            self.values.bind(out, self.values.value(g, eqn))
            return
        to = self.values.placed[p].split if p in self.values.placed else None
        axes = self.axes.cover(varies - differs, p)
        ranks = math.prod(self.graph.axes[axis] for axis in differs & varies)
        if ranks == 1:
            self.values.reduce(eqn, g, out, axes, to, "grad", p.name, "mean")
            return
        total = dataclasses.replace(out, name=self.values.names.fresh(f"{out.name}.sum"))
        self.values.reduce(eqn, g, total, axes, to, "grad", p.name, "mean")
        value = self.values.value(total, eqn)
        quotient = dataclasses.replace(value, name=out.name)
        self.values.eqns.append(
            eqn.replace(op=aten.div.Tensor, args=(value, ranks), outs=(quotient,), region="update")
        )
        self.values.bind(out, quotient)

    def add_reduction(self, eqn: Eqn) -> None:
        """Add a pmean or psum of the user.

        Over an axis on which the value does not vary, the mean is the value itself, and the sum is a multiple of it.
        A sum of bools is whether any of them is true.
        """
        x = eqn.args[0]
        out = eqn.out
        axes = self.axes_of(eqn)
        how = REDUCTIONS[eqn.op]
        varies = self.may_vary_over(x) & set(axes)
        equal_ranks = math.prod(self.graph.axes[axis] for axis in axes if axis not in varies)
        if how == "sum" and equal_ranks > 1 and x.dtype != torch.bool:
            multiple = out
            if varies:
                multiple = dataclasses.replace(x, name=self.values.names.fresh(x.name))
            product = eqn.replace(op=aten.mul.Tensor, args=(x, equal_ranks), outs=(multiple,))
            self.add_whole(product)
            x = multiple
        if varies:
            reduced_axes = self.axes.cover(varies)
            to = self.split_for_update(out, reduced_axes)
            self.values.reduce(eqn, x, out, reduced_axes, to, "pmean", out.name, how)
        elif x is not out:
            self.values.bind(out, self.values.value(x, eqn))

    def split_for_update(self, out: Var, reduced_axes: Sequence[str]) -> Split | None:
        """The split of a reduced value that only the update reads; None if it is whole."""
        main = self.axes.main
        readers = self.readers.get(out, [])
        only_update = readers and all(e.region == "update" for e in readers)
        if not only_update or main not in reduced_axes or self.options.stage == 0 or not out.shape:
            return None
        return Split(main) if is_worth_cutting(out.shape[0], self.graph.axes[main]) else None

    def axes_of(self, eqn: Eqn) -> tuple[str, ...]:
        """The axes of a pmean or psum.

        Raises: ValueError for an axis that the step is not sharded over.
        """
        axis = eqn.args[1]
        if axis == EVERY_AXIS:
            return self.axes.all
        if not {*members(axis)} <= {*self.axes.all}:
            raise ValueError(
                f"shard_params: {eqn.op} over {axis!r}, which is none of its axes ({', '.join(self.axes.all)}).\n"
                f"  at {where(eqn.source)}\n"
                f"Name the axis that the step is sharded over."
            )
        return members(axis)

    def varies_over(self, v: Var) -> frozenset[str]:
        """The axes over which a value differs from rank to rank, because of the batch or because the state does."""
        return self.varying.get(v, INVARIANT) | self.differing.get(v, INVARIANT)

    def may_vary_over(self, v: Var) -> frozenset[str]:
        """As `varies_over`. What is computed from numbers and constants alone, as the size of a batch, may vary."""
        return self.varies_over(v) if v in self.of_tensors else frozenset(self.axes.all)

    # ---- outputs

    def state(self, plain: Var, local: Var, out: Var) -> Var:
        """A leaf of the new state, `out`, in the layout of the old leaf, which is `plain`, and `local` on one rank."""
        absent = self.axes.absent.get(plain, INVARIANT)
        if not self.varies_over(out) - absent:
            return self.values.in_layout(out, local.split, self.end(out))
        maker = self.values.producers.get(out)
        if maker is not None and maker.region != "update":
            return self.averaged(out, local.split, f"state {plain.name}", "state", absent)
        if out in self.varying:
            subject = "a value that depends on the batch"
            raise self.unreduced(self.entry(maker), subject, plain)
        raise self.unreduced(maker, "a value of leaves that differ", plain)

    def output(self, out: Any) -> Any:
        if not isinstance(out, Var):
            return out
        if self.varies_over(out) and self.options.outputs == "mean" and not out.shape:
            return self.averaged(out, None, "output", "output")
        # Other values that vary are not averaged: the samples of a batch are not the same on two ranks.
        return self.values.in_layout(out, None, self.end(out))

    def end(self, out: Var) -> Eqn:
        """An equation that stands for the reader of output `out`, at the end of the update."""
        maker = self.values.producers.get(out)
        return Eqn(GRADIENT, (), (), region="update", source=maker.source if maker else None)

    def averaged(
        self, out: Var, to: Split | None, name: str, role: str, but_over: Set[str] = INVARIANT
    ) -> Var:
        """The mean of a value over all axes over which it differs, except for those of `but_over`."""
        end = self.end(out)
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            raise ValueError(
                f"shard_params: the {name} {out} is an integer that depends on the batch, so it differs from rank to "
                f"rank and has no mean.\n  at {where(end.source, 'the step arguments')}\n"
                f"Count with zt.psum(x, {self.axes.main!r}), return a mean such as an accuracy as a float, which is "
                f"averaged over the ranks, or pass outputs='local'."
            )
        key = (out, to, role, frozenset(but_over))
        if key not in self.means:
            mean = dataclasses.replace(out, name=self.values.names.fresh(f"{out.name}.mean"))
            axes = self.axes.cover(self.varies_over(out) - but_over)
            self.values.reduce(end, out, mean, axes, to, role, out.name, "mean")
            self.means[key] = mean
        return self.values.in_layout(self.means[key], to, end)

    # ---- errors

    def no_rule(self, eqn: Eqn, error: NoRule) -> ValueError:
        # An operator that changes its arguments is itself an argument, of the equation that copies them.
        first = eqn.args[0] if eqn.args else None
        op: Any = first if isinstance(first, torch._ops.OpOverload) else eqn.op
        types = ", ".join(self.values.value(v, eqn).type for v in eqn.ins)
        return ValueError(
            f"shard_params: the update cannot run on shards: {op_name(op)} has no sharding rule for {types} "
            f"({error}).\n  at {where(eqn.source)}\n"
            f"{_advice(eqn.op)} Or leave these leaves whole: shard_params(..., where=lambda path, leaf: ...)."
        )

    def entry(self, eqn: Eqn | None) -> Eqn | None:
        """The equation through which a varying value enters the update: `eqn` or one that it depends on."""
        makers = self.values.producers
        while eqn is not None:
            inputs = (makers[v] for v in eqn.ins if v in self.varying and v in makers)
            earlier = next((maker for maker in inputs if maker.region == "update"), None)
            if earlier is None:
                break
            eqn = earlier
        return eqn

    def unreduced(self, eqn: Eqn | None, subject: str, leaf: Var | None = None) -> ValueError:
        reaches = f"reaches state {leaf.name}: {leaf.type}" if leaf else "reaches the update"
        return ValueError(
            f"shard_params: {subject} {reaches} without having been reduced, so each rank would keep another state.\n"
            f"  at {where(eqn.source if eqn else None, 'the step arguments')}\n"
            f"Reduce it over the axis: zt.pmean(x, {self.axes.main!r}) for a mean, zt.psum for a sum. "
            f"Gradients from torch.autograd.grad, torch.func.grad and .backward() are reduced for you; "
            f"those made under vmap are not."
        )


def _advice(op: Any) -> str:
    """What to do about an operator of the user that has no rule."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return (
            "Call it inside of an operator that returns new tensors (torch.library.custom_op, triton_op), and tell "
            "DTensor in which layouts that runs: torch.distributed.tensor.experimental.register_sharding."
        )
    return (
        f"Tell DTensor in which layouts it runs: "
        f"@torch.distributed.tensor.experimental.register_sharding(torch.ops.{op})."
    )


class RankValues:
    """The equations of the program of one rank so far, and its value for each value of the plain program.

    `placed` has the values that are split over the mesh or in terms, and `local` those that are whole or vary. Each has
    one layout. If equations need another one, collectives change the layout once for all of them. At stage 3, forward
    and backward each gather the parameters that they read, and repeat their views and casts. An equation that changes a
    layout has the region and the line of the equation that needs the change.
    """

    def __init__(self, graph: Graph, options: ShardParams) -> None:
        self.options = options
        self.eqns: list[Eqn] = []
        self.producers = producers(graph.eqns)
        self.names = Names(v.name for v in (*graph.inputs, *self.producers))
        self.placed: dict[Var, Var] = {}
        self.local: dict[Var, Var] = {}
        self._converted: dict[tuple[Var, Placement], Var] = {}
        # Views and casts of values that will be gathered, which are computed where they are used.
        self._deferred: dict[Var, Eqn] = {}
        # For each value, the whole value in each phase of a step.
        self._gathered: dict[Var, dict[tuple | None, Var]] = {}
        self._phase = (0, "forward")

    def bind(self, plain: Var, local: Var) -> None:
        """Let `local` be the value of the program of one rank for `plain` of the plain program."""
        values = self.placed if local.layout else self.local
        values[plain] = local

    def enter_phase(self, eqn: Eqn) -> None:
        """Count the forwards and backwards: at stage 3, a gathered parameter is dropped after each of them."""
        count, region = self._phase
        if eqn.region not in (region, "update"):
            self._phase = (count + (eqn.region == "forward"), eqn.region)

    def value(self, v: Var, eqn: Eqn) -> Var:
        """A value in the layout that it has."""
        return self.placed.get(v) or self.whole_value(v, eqn)

    def in_layout(self, v: Var, to: Placement, eqn: Eqn) -> Var:
        """A value in the layout that an equation of the update needs."""
        value = self.value(v, eqn)
        axis = value.layout[0].axis if value.layout else None
        if axis is not None and to is not None and axis != to.axis:
            value = self._convert(value, None, axis, eqn)  # shards over another axis become whole
            axis = None
        if axis is None and to is None:
            return value
        return self._convert(value, to, axis or to.axis, eqn)  # type: ignore[union-attr]

    def _convert(self, value: Var, to: Placement, axis: str, eqn: Eqn) -> Var:
        if (value, to) not in self._converted:
            name = f"{value.name}.{'full' if to is None else 'shard'}"
            site = self._site(eqn, "update", value.name, axis)
            eqns, self._converted[value, to] = redistribute(value, to, site, name)
            self.eqns.extend(eqns)
        return self._converted[value, to]

    def defer(self, eqn: Eqn) -> bool:
        """Defer `eqn` until its result is used, if it is a view or a cast of a value that will be gathered.

        Returns: Whether it was deferred.
        """
        v = eqn.ins[0] if is_view_or_cast(eqn) else None
        is_deferred = v in self._deferred or v in self.placed
        if is_deferred:
            self._deferred.update(dict.fromkeys(eqn.results, eqn))
        return is_deferred

    def whole_value(self, v: Var, eqn: Eqn) -> Var:
        """A value whole on every rank, gathered at its first use; at stage 3, at its first use in each phase."""
        if v in self.local:
            return self.local[v]
        phase = self._phase if self.options.stage == 3 else None
        by_phase = self._gathered.setdefault(v, {})
        if phase not in by_phase and v in self._deferred:
            self._compute(self._deferred[v], phase, eqn, is_first=not by_phase)
        elif phase not in by_phase:
            axis = self.placed[v].layout[0].axis
            regather = self.options.reshard if by_phase else None
            site = self._site(eqn, "param", v.name, axis, regather=regather)
            eqns, by_phase[phase] = redistribute(self.placed[v], None, site, f"{v.name}.full")
            self.eqns.extend(eqns)
        return by_phase[phase]

    def _compute(self, deferred: Eqn, phase: tuple | None, eqn: Eqn, is_first: bool) -> None:
        """Compute a view or a cast of a gathered value for `eqn`; the first computation keeps its name."""
        outs = deferred.outs
        if not is_first:
            fresh = lambda out: dataclasses.replace(out, name=self.names.fresh(out.name))
            outs = tuple(out and fresh(out) for out in outs)
        whole = lambda v: self.whole_value(v, eqn)
        local = deferred.with_inputs(whole, outs=outs, region=eqn.region)
        for plain, out in zip(deferred.results, local.results):
            self._gathered.setdefault(plain, {})[phase] = out
        self.eqns.append(local)

    def reduce(
        self,
        eqn: Eqn,
        x: Var,
        out: Var,
        axes: Sequence[str],
        to: Split | None,
        role: str,
        path: str,
        op: str,
    ) -> None:
        """Reduce `x` over each of the `axes` to `out`; with `to`, the reduction over its axis scatters it."""
        # A complex gradient is sent in its own dtype: a cast to a real dtype would lose its imaginary part.
        is_real_grad = role == "grad" and not x.dtype.is_complex
        dtype = self.options.reduce_dtype if is_real_grad else None
        value = self._before_cast(x, dtype, eqn)
        for axis in axes:
            split = to if to is not None and axis == to.axis else None
            name = out.name if axis == axes[-1] else f"{out.name}.{axis}"
            site = self._site(eqn, role, path, axis, fixed_name=out.name)
            eqns, value = reduced(value, op, split, site, name, dtype, x.dtype)
            self.eqns.extend(eqns)
        self.bind(out, value)

    def _before_cast(self, x: Var, dtype: torch.dtype | None, eqn: Eqn) -> Var:
        """The value to send for `x`: that before its cast, if that widened it and would be undone."""
        cast = self.producers.get(x)
        if cast is not None and cast.op is CAST and _has_widened(cast, dtype):
            x = cast.args[0]
        return self.local[x] if x in self.local else self.in_layout(x, None, eqn)

    def _site(
        self,
        eqn: Eqn,
        role: Any,
        path: str,
        axis: str,
        fixed_name: str | None = None,
        regather: Any = None,
    ) -> Site:
        fresh = lambda name: name if name == fixed_name else self.names.fresh(name)
        return Site(eqn.region, eqn.source, fresh, Provenance(role, (path,), axis, regather))


def _has_widened(cast: Eqn, dtype: torch.dtype | None) -> bool:
    """Whether a cast has widened a value of this dtype, so that a cast back gives the same value."""
    former, wide = cast.args[0].dtype, cast.out.dtype
    return former == dtype and torch.promote_types(former, wide) == wide
