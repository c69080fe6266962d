"""Turn a plain program into the program of one rank, equation by equation.

Equations of forward and backward read whole values, which are gathered where they are used. Equations of the update run
on shards where their rules allow it. A gradient is reduced at its mark. Each leaf of the new state has the layout of
the old leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...ir.axes import members, members_of
from ...ir.collectives import rules
from ...ir.dependencies import depending
from ...ir.graph import Eqn, Graph, Layout, Placement, Split, Var, users
from ...ir.layout import is_worth_splitting, on_axis
from ...ir.marks import GRADIENT, REDUCTIONS
from ...ir.op_facts import is_random
from ...ir.printer import op_name
from ...ir.registered_rules import NoRule
from ...ir.rules import INVARIANT
from ...ir.sharding_rules import Rule, rule
from ...ir.source import where
from ...ir.user_collectives import accepted_layouts, is_user_collective
from ...ir.varying import varying, varying_by_leaf
from ...ops import EVERY_AXIS
from ..base import program_shardings
from .leaf_axes import LeafAxes
from .rank_values import EndOfStep, RankValues

if TYPE_CHECKING:  # `shard_params` imports this module
    from ..shard_params import ShardParams

aten = torch.ops.aten


def shard_program(graph: Graph, options: ShardParams) -> Graph:
    """The program of one rank for a plain program.

    The first walk finds the equations of the update whose rules want whole values. If equations before these should
    then run on whole values too, a second walk makes the program.
    """
    walk = Walk(graph, options)
    program = walk.run()
    runs_whole = whole_value_eqns(graph, walk.wants_whole, walk.layout_of)
    if runs_whole == walk.wants_whole:
        return program
    return Walk(graph, options, runs_whole).run()


def may_run_on_shards(e: Eqn) -> bool:
    """Whether an equation belongs to the update, or adds up what the update reads."""
    return e.region == "update" or rules(e).over_all_micro_batches


def whole_value_eqns(
    graph: Graph, wants_whole: Set[Eqn], layout_of: Callable[[Var], Layout]
) -> set[Eqn]:
    """The equations of the update that run on whole values on every rank.

        x = cast(g); n = norm(x); y = div(x, n); a = mm(y, t(y))
          -->   x_full = wait(all_gather(x)); n = norm(x_full); y = div(x_full, n); ...

    These are the equations whose rules want whole values, and all equations before them that need no more bytes from
    other ranks than their results would. So Muon's matrices are gathered once, in bf16, and their updates have the same
    bits as in one process.

    Args:
        wants_whole: the equations whose rules want whole values.
        layout_of: the layout of each value if only these equations run on whole values.
    """
    runs_whole: set[Eqn] = set()
    whole_values: set[Var] = set()
    # Backwards, so that the readers of a value are known before the equation that computes it.
    for e in reversed(graph.eqns):
        makes_whole_value = e.region == "update" and any(v in whole_values for v in e.results)
        if e in wants_whole or (makes_whole_value and _is_cheap_whole(e, whole_values, layout_of)):
            runs_whole.add(e)
            whole_values.update(e.ins)
    return runs_whole


def _is_cheap_whole(e: Eqn, whole_values: Set[Var], layout_of: Callable[[Var], Layout]) -> bool:
    """Whether a gather of an equation's arguments sends no more bytes than a gather of its results."""
    if not isinstance(e.op, torch._ops.OpOverload) or is_random(e) or is_user_collective(e):
        return False
    # A value that another equation needs whole is gathered anyway.
    arguments = {v for v in e.ins if layout_of(v) and v not in whole_values}
    return _whole_bytes(arguments) <= _whole_bytes(e.results)


def _whole_bytes(values: Iterable[Var]) -> int:
    """The bytes of whole values."""
    return sum(v.nbytes for v in values)


class Walk:
    """One walk over a plain program.

    Attributes:
        runs_whole: the equations of the update that run on whole values, whatever their rules say.
        wants_whole: the equations of the update that have cut arguments, but whose rules want whole values.
        values: the program of one rank so far.
        axes: the axes over which each leaf is sharded or replicated.
        leaves: the leaves of the state in the program of one rank.
        varying: the axes over which values differ from rank to rank because of the batch.
        varying_by_leaf: the axes over which values differ because ranks hold other leaves, such as their own experts.
        tensor_dependent: the values that depend on a tensor of the state or of the batch.
    """

    def __init__(
        self, graph: Graph, options: ShardParams, runs_whole: Set[Eqn] = frozenset()
    ) -> None:
        self.graph = graph
        self.options = options
        self.runs_whole = runs_whole
        self.wants_whole: set[Eqn] = set()
        self.values = RankValues(graph, options.reduce_dtype)
        self.axes = LeafAxes.of_program(graph, options)
        self.varying = varying(graph, self.axes.all)
        self.varying_by_leaf = varying_by_leaf(graph, self.axes.absent, self.axes.all)
        self.readers = users(graph)
        self.leaves = self.local_leaves()
        tensors = (*graph.state, *graph.batch)
        self.tensor_dependent = depending(graph.eqns, tensors)
        self._means: dict[tuple, Var] = {}

    def run(self) -> Graph:
        """The program of one rank."""
        graph = self.graph
        inputs = (*self.leaves, *graph.arguments)
        for plain, local in zip(graph.inputs, inputs):
            self.values.bind(plain, local)

        for eqn in graph.eqns:
            self.values.enter_phase(eqn)
            self.add(eqn)

        outputs: list[Any] = []
        for (plain, new), local in zip(graph.leaves, self.leaves):
            outputs.append(self.new_leaf(plain, local, new))
        for out in graph.results:
            outputs.append(self.output(out))
        return graph.replace(inputs=inputs, eqns=tuple(self.values.eqns), outputs=tuple(outputs))

    def local_leaves(self) -> list[Var]:
        """The leaves of the state in the layouts that the options choose."""
        leaves = []
        for v, sharding in program_shardings(self.graph, [self.options]).items():
            # The only rank of an axis has the whole value.
            layout = tuple(p for p in sharding.layout if self.graph.axes[p.axis] > 1)
            own = tuple(axis for axis in sharding.independent if self.graph.axes[axis] > 1)
            leaves.append(dataclasses.replace(v, layout=layout, own=own))
        return leaves

    def layout_of(self, v: Var) -> Layout:
        """The layout that the walk has chosen for a value of the plain program; () if the value is whole."""
        value = self.values.with_layout.get(v)
        return value.layout if value is not None else ()

    # ---- equations

    def add(self, eqn: Eqn) -> None:
        """Add an equation of the plain program to the program of one rank."""
        if eqn.op is GRADIENT:
            self.add_gradient(eqn)
        elif eqn.op in REDUCTIONS:
            self.add_reduction(eqn)
        elif any(self.varying.get(v, INVARIANT) - self.axes.independent for v in eqn.ins):
            self.add_whole(eqn)
        elif may_run_on_shards(eqn):
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
        axis = self.cut_axis(eqn)
        placements = [on_axis(self.values.value(v, eqn).layout, axis) for v in eqn.ins]
        sharding_rule = self.rule(eqn, placements, axis)
        has_cuts = any(isinstance(p, Split) for p in placements)
        # A second walk may run equations before this one on whole values too (see `shard_program`).
        if has_cuts and not any(sharding_rule.ins):
            self.wants_whole.add(eqn)
        if is_random(eqn) and any(placements) and not any(sharding_rule.outs):
            draw = f"a random draw ({op_name(eqn.op)}) in the update, on whole values,"
            raise self.unreduced(eqn, draw)

        outs: list[Var | None] = []
        for out, placement in zip(eqn.outs, sharding_rule.outs):
            layout = (placement,) if placement else ()
            outs.append(None if out is None else dataclasses.replace(out, layout=layout))
        # The rule has a placement for each variable that the equation reads, in this order.
        remaining = iter(sharding_rule.ins)
        local = eqn.with_inputs(
            lambda v: self.values.in_layout(v, next(remaining), eqn), outs=tuple(outs)
        )
        self.values.eqns.append(local)
        for plain, result in zip(eqn.results, local.results):
            self.values.bind(plain, result)

    def rule(self, eqn: Eqn, placements: list[Placement], axis: str) -> Rule:
        """The sharding rule of an equation of the update.

        Raises: ValueError if it calls a user's operator that has no rule.
        """
        if eqn in self.runs_whole:
            return Rule([None] * len(eqn.ins), [None] * len(eqn.outs))
        if is_user_collective(eqn):
            layouts = accepted_layouts(eqn, [(p,) if p else () for p in placements])
            accepted = [on_axis(layout, axis) for layout in layouts]
            return Rule(accepted, accepted)
        try:
            return rule(eqn, placements, axis, self.graph.axes.get(axis, 1))
        except NoRule as error:
            raise self.no_rule(eqn, error) from None

    def cut_axis(self, eqn: Eqn) -> str:
        """The axis over which an equation of the update runs on parts or terms, or "" if it runs on whole values.

        It is the axis over which most arguments are split; of two such axes, the one with more ranks. An axis over
        which ranks hold other leaves, or train apart, does not count. If each host has leaves of its own, a host needs
        the whole result for them, so the result is cut over the ranks inside a host.
        """
        axes_apart: set[str] = set()
        for v in eqn.ins:
            axes_apart |= self.varies_over(v)
        axes: list[str] = []
        for v in eqn.ins:
            for placement in self.values.value(v, eqn).layout:
                if axes_apart.isdisjoint(members(placement.axis)):
                    axes.append(placement.axis)
        sizes = self.graph.axes
        return max(
            dict.fromkeys(axes), key=lambda axis: (axes.count(axis), sizes[axis]), default=""
        )

    def check_draw(self, eqn: Eqn) -> None:
        """Check that no two ranks draw random numbers for the same elements in the update.

        Raises: ValueError if two ranks would draw different numbers for an element.
        """
        disjoint_axes: set[str] = set()  # the axes whose ranks have different elements
        for v in eqn.ins:
            disjoint_axes.update(self.varying_by_leaf.get(v, ()))
            cut_axes = [p.axis for p in self.layout_of(v) if isinstance(p, Split)]
            disjoint_axes.update(members_of(cut_axes))
        if any(self.graph.axes[axis] > 1 and axis not in disjoint_axes for axis in self.axes.all):
            draw = f"a random draw ({op_name(eqn.op)}) in the update"
            raise self.unreduced(eqn, f"{draw}, of a value that is not sharded,")

    # ---- reductions

    def add_gradient(self, eqn: Eqn) -> None:
        """Add a gradient. It is reduced over the axes along which it varies with the batch, but its leaf does not.

        The gradient of a leaf that differs over an axis, such as the experts of a rank, already has the terms of all
        ranks of that axis: collectives of backward bring them. The loss is a mean over that axis too, so the gradient
        is divided by the number of these ranks, but not reduced over them. Replicas that train apart have a loss each.
        """
        gradient, value = eqn.args
        over_batch = self.varying.get(gradient, INVARIANT) - self.varying.get(value, INVARIANT)
        if not over_batch:
            self.values.bind(eqn.out, self.values.value(gradient, eqn))
            return
        over_leaves = self.varying_by_leaf.get(value, INVARIANT)
        axes = self.axes.cover(over_batch - over_leaves, value)
        summed_axes = (over_batch & over_leaves) - self.axes.independent
        summed_ranks = math.prod(self.graph.axes[axis] for axis in summed_axes)
        # The reduction gives the mean over `axes`. Over axes whose ranks hold other leaves it is still a sum, and is
        # divided below.
        reduced = eqn.out
        if summed_ranks > 1:
            name = self.values.names.fresh(f"{eqn.out.name}.sum")
            reduced = dataclasses.replace(eqn.out, name=name)
        leaf = self.values.with_layout.get(value)
        split = leaf.split if leaf is not None else None
        self.values.reduce(
            gradient, reduced, axes, split, eqn, op="mean", role="grad", path=value.name
        )
        if summed_ranks > 1:
            self.add_quotient(eqn, self.values.value(reduced, eqn), summed_ranks)

    def add_quotient(self, eqn: Eqn, value: Var, ranks: int) -> None:
        """Divide a value by a number of ranks, to give the result of `eqn`."""
        quotient = dataclasses.replace(value, name=eqn.out.name)
        args = (value, ranks)
        self.values.eqns.append(
            eqn.replace(op=aten.div.Tensor, args=args, outs=(quotient,), region="update")
        )
        self.values.bind(eqn.out, quotient)

    def add_reduction(self, eqn: Eqn) -> None:
        """Add a reduction of the user, such as a pmean.

        Over an axis on which the value does not vary, the sum is a multiple of it, and all others are the value itself.
        A sum of bools is whether any of them is true.
        """
        x = eqn.args[0]
        out = eqn.out
        axes = self.reduction_axes(eqn)
        op = REDUCTIONS[eqn.op]
        varying_axes = self.may_vary_over(x) & set(axes)
        equal_ranks = math.prod(self.graph.axes[axis] for axis in axes if axis not in varying_axes)
        if op == "sum" and equal_ranks > 1 and x.dtype != torch.bool:
            multiple = out
            if varying_axes:
                multiple = dataclasses.replace(x, name=self.values.names.fresh(x.name))
            self.add(eqn.replace(op=aten.mul.Tensor, args=(x, equal_ranks), outs=(multiple,)))
            x = multiple
        if varying_axes:
            reduced_axes = self.axes.cover(varying_axes)
            split = self.split_of_reduced(x, out, op, reduced_axes)
            if split is not None and {*members_of(reduced_axes)} < {*members(split.axis)}:
                reduced_axes = [split.axis]
            self.values.reduce(x, out, reduced_axes, split, eqn, op=op, role="pmean", path=out.name)
        elif x is not out:
            self.values.bind(out, self.values.value(x, eqn))

    def split_of_reduced(
        self, x: Var, out: Var, op: str, reduced_axes: Sequence[str]
    ) -> Split | None:
        """The split of `out`, the reduced value of `x`; None if it is whole.

            m = all_reduce(x, mean, host); s = shard(m, host*dp)   -->   s = reduce_scatter(x, mean, host*dp)

        Forward, backward and the caller read whole values. What the update reads as cut over a joint axis is reduced
        over all of that axis: along its other members `x` is the same on all ranks. If `x` is cut over another axis,
        each part is reduced by itself.
        """
        readers = self.readers.get(out, [])
        is_read_whole = not all(map(may_run_on_shards, readers))
        if is_read_whole or self.is_returned(out):
            return None
        split = self.split_of_readers(out, readers)
        if split is not None and op != "sum":
            joined = {*members(split.axis)}
            if self.varies_over(x) & joined == {*members_of(reduced_axes)} < joined:
                return split
        layout = self.layout_of(x)
        if layout:
            return layout[0] if isinstance(layout[0], Split) else None
        return split if split is not None and split.axis in reduced_axes else None

    def is_returned(self, v: Var) -> bool:
        """Whether the step returns a value, or its mean over micro-batches: their sum, divided by their number."""
        if v in self.graph.results:
            return True
        for e in self.readers.get(v, ()) if self.graph.micro > 1 else ():
            divides = e.op is aten.div.Tensor and e.args[1:] == (self.graph.micro,)
            if (divides or rules(e).over_all_micro_batches) and self.is_returned(e.out):
                return True
        return False

    def split_of_readers(self, out: Var, readers: Sequence[Eqn]) -> Split | None:
        """The split in which the update reads a value; None if it is whole.

        A new leaf has the split of the old one, and an operand of an equation that of the other operand.
        """
        graph = self.graph
        splits = {leaf.split for leaf, new in zip(self.leaves, graph.new_state) if new is out}
        for e in readers:
            for v in e.ins:
                operand = self.values.with_layout.get(v)
                if operand is not None and operand.split and v.shape == out.shape:
                    splits.add(operand.split)
        if splits:
            return splits.pop() if len(splits) == 1 else None
        if self.options.stage == 0 or not readers or not out.shape:
            return None
        main = self.axes.main
        return Split(main) if is_worth_splitting(out.shape[0], graph.axes[main]) else None

    def reduction_axes(self, eqn: Eqn) -> tuple[str, ...]:
        """The axes of a reduction of the user; without a name, all that the step is sharded over.

        Raises: ValueError for an axis that the mesh does not have.
        """
        axis = eqn.args[1]
        if axis == EVERY_AXIS:
            return self.axes.all
        mesh_axes = [name for name, _ in self.graph.mesh]
        if not {*members(axis)} <= {*mesh_axes}:
            raise ValueError(
                f"shard_params: {eqn.op} over {axis!r}, which is not an axis of the mesh ({', '.join(mesh_axes)}).\n"
                f"  at {where(eqn.source)}\n"
                f"Name one of these axes, or none: then the {eqn.op} is over all axes that the step is sharded over."
            )
        return members(axis)

    def varies_over(self, v: Var) -> frozenset[str]:
        """The axes over which a value differs from rank to rank, because the batch or the state does."""
        return self.varying.get(v, INVARIANT) | self.varying_by_leaf.get(v, INVARIANT)

    def may_vary_over(self, v: Var) -> frozenset[str]:
        """As `varies_over`, and over all axes of the mesh over which the step is not sharded: there ranks train apart.

        Values that are computed from numbers alone, such as a batch size, may vary over all axes.
        """
        every_axis = frozenset(name for name, _ in self.graph.mesh)
        if v not in self.tensor_dependent:
            return every_axis
        return self.varies_over(v) | (every_axis - {*self.axes.all})

    # ---- outputs

    def new_leaf(self, plain: Var, local: Var, out: Var) -> Var:
        """A leaf of the new state, in the layout of the old leaf.

        Args:
            plain, local: the old leaf in the plain program, and in the program of one rank.
            out: the new leaf in the plain program.
        """
        if out is plain:
            return local
        absent = self.axes.absent.get(plain, INVARIANT)
        if not self.varies_over(out) - absent:
            return self.values.in_layout(out, local.split, self.end(out))
        maker = self.values.producers.get(out)
        if maker is not None and maker.region != "update":
            return self.averaged(out, local.split, f"state {plain.name}", "state", absent)
        if out in self.varying:
            subject = "a value that depends on the batch"
            raise self.unreduced(self.entry(maker), subject, plain)
        axis = min(self.varies_over(out) - absent)
        raise self.unreduced(maker, "a value of leaves that differ", plain, axis)

    def output(self, out: Any) -> Any:
        if not isinstance(out, Var):
            return out
        apart = self.axes.independent
        if self.varies_over(out) - apart and self.options.outputs == "mean" and not out.shape:
            return self.averaged(out, None, "output", "output", apart)
        # Other values that vary are not averaged: two ranks have different samples of the batch.
        return self.values.in_layout(out, None, self.end(out))

    def end(self, out: Var) -> EndOfStep:
        """The reader of an output."""
        maker = self.values.producers.get(out)
        return EndOfStep(maker.source if maker else None)

    def averaged(
        self,
        out: Var,
        to: Split | None,
        name: str,
        role: Literal["state", "output"],
        excluded_axes: Set[str] = INVARIANT,
    ) -> Var:
        """The mean of a value over all axes over which it differs, except for `excluded_axes`."""
        end = self.end(out)
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            raise ValueError(
                f"shard_params: the {name} {out} is an integer that depends on the batch, so it differs from rank to "
                f"rank and has no mean.\n  at {where(end.source, 'the step arguments')}\n"
                f"Count with zt.psum(x, {self.axes.main!r}), return a mean such as an accuracy as a float, which is "
                f"averaged over the ranks, or pass outputs='local'."
            )
        # Two outputs may be one value, whose mean is computed once.
        key = (out, to, role, frozenset(excluded_axes))
        if key not in self._means:
            mean = dataclasses.replace(out, name=self.values.names.fresh(f"{out.name}.mean"))
            axes = self.axes.cover(self.varies_over(out) - excluded_axes)
            self.values.reduce(out, mean, axes, to, end, op="mean", role=role, path=out.name)
            self._means[key] = mean
        return self.values.in_layout(self._means[key], to, end)

    # ---- errors

    def no_rule(self, eqn: Eqn, error: NoRule) -> ValueError:
        # An operator that mutates its arguments is itself the first argument of an equation that copies them.
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
            varying_makers = [makers[v] for v in eqn.ins if v in self.varying and v in makers]
            earlier = next((e for e in varying_makers if e.region == "update"), None)
            if earlier is None:
                break
            eqn = earlier
        return eqn

    def unreduced(
        self, eqn: Eqn | None, subject: str, leaf: Var | None = None, axis: str = ""
    ) -> ValueError:
        reaches = f"reaches state {leaf.name}: {leaf.type}" if leaf else "reaches the update"
        return ValueError(
            f"shard_params: {subject} {reaches} without having been reduced, so each rank would keep another state.\n"
            f"  at {where(eqn.source if eqn else None, 'the step arguments')}\n"
            f"Reduce it over the axis: zt.pmean(x, {axis or self.axes.main!r}) for a mean, zt.psum for a sum. "
            f"Gradients from torch.autograd.grad, torch.func.grad and .backward() are reduced for you; "
            f"those made under vmap are not."
        )


def _advice(op: Any) -> str:
    """The remedy for a user's operator that has no rule."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return (
            "Call it inside of an operator that returns new tensors (torch.library.custom_op, triton_op), and tell "
            "DTensor in which layouts that runs: torch.distributed.tensor.experimental.register_sharding."
        )
    return (
        f"Tell DTensor in which layouts it runs: "
        f"@torch.distributed.tensor.experimental.register_sharding(torch.ops.{op})."
    )
