"""Sharding: the walk over a plain program by which `shard_params` turns it into the program of one rank.

Equations of forward and backward read whole values, which are gathered where they are used. Equations of the update run
on parts. A gradient is reduced at its mark. Each leaf of the new state has the layout of the old leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch

from ...ir.axes import members, members_of
from ...ir.graph import Eqn, Graph, Layout, Split, Var, users
from ...ir.layout import is_worth_cutting
from ...ir.marks import GRADIENT, PMEAN, PSUM
from ...ir.op_facts import is_random
from ...ir.printer import op_name
from ...ir.relations import depending
from ...ir.reshard import on_axis
from ...ir.rules import INVARIANT
from ...ir.source import where
from ...ir.user_collectives import is_users, on_parts
from ...ir.varying import differing, varying
from ...ops import EVERY_AXIS
from ..base import meta_leaves
from .leaf_axes import LeafAxes
from .registered_rules import NoRule, Placement
from .rules import Rule, rule
from .value_layouts import Values

if TYPE_CHECKING:  # it walks over programs by means of this module
    from ..shard_params import ShardParams

REDUCTIONS: Mapping[object, str] = {PMEAN: "mean", PSUM: "sum"}


class Sharding:
    """One walk over the program. The equations of the update that are in `whole` run on whole values, on every rank."""

    def __init__(self, graph: Graph, options: ShardParams, whole: Set[Eqn] = frozenset()) -> None:
        self.graph, self.opt, self.on_every_rank = graph, options, whole
        self.values = Values(graph, options)
        self.axes = LeafAxes.of_program(graph, options)
        self.over = varying(graph, self.axes.all)
        self.differ = differing(graph, self.axes.others, self.axes.all)
        self.readers = users(graph)
        self.of_tensors = depending(graph.eqns, (*graph.inputs[: graph.num_state], *graph.batch))
        self.means: dict[tuple, Var] = {}
        self.gathering: set[Eqn] = set()  # equations of the update whose rule wants whole values

    def run(self) -> Graph:
        g = self.graph
        leaves = [
            dataclasses.replace(v, layout=self.layout(v, x))
            for v, x in zip(g.inputs, meta_leaves(g))
        ]
        inputs = (*leaves, *g.inputs[g.num_state :])
        for old, new in zip(g.inputs, inputs):
            self.values.bind(old, new)
        marks = {GRADIENT: self.gradient, PMEAN: self.explicit, PSUM: self.explicit}
        for eqn in g.eqns:
            self.values.advance(eqn)
            if is_random(eqn.op) and eqn.region == "update" and not self.varies(eqn):
                self.check_draw(eqn)
            if eqn.op in marks:
                marks[eqn.op](eqn)
            elif (
                eqn.region == "update"
                and any(map(self.layout_of, eqn.ins))
                and not self.varies(eqn)
            ):
                self.on_shards(eqn)
            elif self.varies(eqn) or not self.values.defer(eqn):
                self.on_whole(eqn)
        outputs = (
            *map(self.state, g.inputs, leaves, g.outputs),
            *map(self.output, g.outputs[g.num_state :]),
        )
        return g.replace(inputs=inputs, eqns=tuple(self.values.eqns), outputs=outputs)

    def layout_of(self, v: Var) -> Layout:
        """The layout that the walk has given to a value of the plain program."""
        return self.values.placed[v].layout if v in self.values.placed else ()

    def layout(self, v: Var, leaf: torch.Tensor) -> Layout:
        layout = self.opt.layout(v.name, v.shape, leaf)
        return tuple(
            p for p in layout if self.graph.axes[p.axis] > 1
        )  # a single rank holds the whole value

    def varies(self, eqn: Eqn) -> bool:
        return any(v in self.over for v in eqn.ins)

    # ---- equations

    def check_draw(self, eqn: Eqn) -> None:
        """Check that no two ranks draw random numbers for the same elements in the update.

        Raises: ValueError if they would, each its own numbers.
        """
        cut = {p.axis for v in eqn.ins for p in self.layout_of(v) if isinstance(p, Split)}
        apart = {*members_of(cut), *(axis for v in eqn.ins for axis in self.differ.get(v, ()))}
        if any(self.graph.axes[a] > 1 and a not in apart for a in self.axes.all):
            raise self.unreduced(
                eqn,
                f"a random draw ({op_name(eqn.op)}) in the update, of a value that is not sharded,",
            )

    def on_whole(self, eqn: Eqn) -> None:
        """Add an equation of forward or backward, or one whose arguments vary: it runs on whole values, unchanged."""
        self.values.eqns.append(eqn.reading(lambda v: self.values.whole(v, eqn)))
        for out in eqn.results:
            self.values.bind(out, out)

    def on_shards(self, eqn: Eqn) -> None:
        """Add an equation of the update, which runs on shards as far as its sharding rule allows."""
        axis = self.axis_of(eqn)
        placements = [on_axis(self.values.value(v, eqn).layout, axis) for v in eqn.ins]
        chosen = self.rule(eqn, placements, axis)
        cut_inputs = {v for v, p in zip(eqn.ins, placements) if isinstance(p, Split)}
        if cut_inputs and not any(chosen.ins):
            self.gathering.add(eqn)
        if is_random(eqn.op) and any(placements) and not any(chosen.outs):
            raise self.unreduced(
                eqn, f"a random draw ({op_name(eqn.op)}) in the update, on whole values,"
            )
        remaining = iter(chosen.ins)
        read = lambda v: self.values.laid(v, next(remaining), eqn)
        outs = tuple(
            out and dataclasses.replace(out, layout=(p,) if p else ())
            for out, p in zip(eqn.outs, chosen.outs)
        )
        self.values.eqns.append(eqn.reading(read, outs=outs))
        for old, new in zip(eqn.results, self.values.eqns[-1].results):
            self.values.bind(old, new)

    def rule(self, eqn: Eqn, placements: list[Placement], axis: str) -> Rule:
        if eqn in self.on_every_rank:
            return Rule([None] * len(eqn.ins), [None] * len(eqn.outs))
        if is_users(eqn):
            layouts = on_parts(eqn, [(p,) if p else () for p in placements])
            chosen = [on_axis(layout, axis) for layout in layouts]
            return Rule(chosen, chosen)
        try:
            return rule(eqn, placements, axis, self.graph.axes[axis])
        except NoRule as error:
            raise self.no_rule(eqn, error) from None

    def axis_of(self, eqn: Eqn) -> str:
        """The axis over which most arguments of an equation of the update are cut, or in terms."""
        axes = [p.axis for v in eqn.ins for p in self.values.value(v, eqn).layout]
        return max(dict.fromkeys(axes), key=axes.count, default=self.axes.main)

    def gradient(self, eqn: Eqn) -> None:
        """Add the mark of a gradient: that of an invariant value is reduced here, that of a varying value is not.

        A leaf that differs over an axis gets the terms of all ranks of that axis: collectives of backward bring them.
        The loss is the mean over that axis too, so its gradient is their sum, divided by the number of these ranks.
        """
        g, p = eqn.args
        out, differs = eqn.out, self.differ.get(p, INVARIANT)
        varies = self.over.get(g, INVARIANT) - self.over.get(p, INVARIANT)
        if not varies:
            self.values.bind(out, self.values.value(g, eqn))
            return
        to = self.values.placed[p].split if p in self.values.placed else None
        over = self.axes.cover(varies - differs, p)
        ranks = math.prod(self.graph.axes[a] for a in differs & varies)
        mean = (
            dataclasses.replace(out, name=self.values.names.fresh(f"{out.name}.sum"))
            if ranks > 1
            else out
        )
        self.values.reduce(eqn, g, mean, over, to, "grad", p.name, "mean")
        if ranks > 1:
            value = self.values.value(mean, eqn)
            quotient = eqn.replace(
                op=torch.ops.aten.div.Tensor, args=(value, ranks), region="update"
            )
            self.values.eqns.append(
                quotient.replace(outs=(dataclasses.replace(value, name=out.name),))
            )
            self.values.bind(out, self.values.eqns[-1].out)

    def explicit(self, eqn: Eqn) -> None:
        """Add a pmean or psum of the user.

        Over an axis on which the value does not vary, the mean is the value itself, and the sum is a multiple of it.
        """
        x, out, axes = eqn.args[0], eqn.out, self.axes_of(eqn)
        over = self.may_vary_over(x) & set(axes)
        times = (
            math.prod(self.graph.axes[a] for a in axes if a not in over)
            if REDUCTIONS[eqn.op] == "sum"
            else 1
        )
        if times > 1:
            product = dataclasses.replace(x, name=self.values.names.fresh(x.name)) if over else out
            self.on_whole(
                eqn.replace(op=torch.ops.aten.mul.Tensor, args=(x, times), outs=(product,))
            )
            x = product
        if over:
            readers = self.readers.get(out)
            only_update = readers and all(e.region == "update" for e in readers)
            reduced, main = self.axes.cover(over), self.axes.main
            cut = x.shape and is_worth_cutting(x.shape[0], self.graph.axes[main])
            to = (
                Split(main)
                if main in reduced and only_update and self.opt.stage > 0 and cut
                else None
            )
            self.values.reduce(eqn, x, out, reduced, to, "pmean", out.name, REDUCTIONS[eqn.op])
        elif times == 1:
            self.values.bind(out, self.values.value(x, eqn))

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
        return self.over.get(v, INVARIANT) | self.differ.get(v, INVARIANT)

    def may_vary_over(self, v: Var) -> frozenset[str]:
        """As `varies_over`. What is computed from numbers and constants alone, as the size of a batch, may vary."""
        return self.varies_over(v) if v in self.of_tensors else frozenset(self.axes.all)

    # ---- outputs

    def state(self, old: Var, new: Var, out: Var) -> Var:
        """A leaf of the new state, `out`, in the layout that the old leaf has in the new program, where it is `new`."""
        others = self.axes.others.get(old, INVARIANT)
        if not self.varies_over(out) - others:
            return self.values.laid(out, new.split, self.end(out))
        maker = self.values.producers.get(out)
        if maker is None or maker.region == "update":
            subject = (
                "a value that depends on the batch"
                if out in self.over
                else "a value of leaves that differ"
            )
            raise self.unreduced(self.entry(maker) if out in self.over else maker, subject, old)
        return self.averaged(out, new.split, f"state {old.name}", "state", others)

    def output(self, out: Any) -> Any:
        if not isinstance(out, Var):
            return out
        if self.varies_over(out) and self.opt.outputs == "mean" and not out.shape:
            return self.averaged(out, None, "output", "output")
        return self.values.laid(
            out, None, self.end(out)
        )  # the samples of a batch are not the same on two ranks

    def end(self, out: Var) -> Eqn:
        """An equation that stands for the reader of output `out`, at the end of the update."""
        maker = self.values.producers.get(out)
        return Eqn(GRADIENT, (), (), region="update", source=maker.source if maker else None)

    def averaged(
        self, out: Var, to: Split | None, name: str, role: str, not_over: Set[str] = INVARIANT
    ) -> Var:
        """The mean of a value over all axes over which it differs, except for those of `not_over`."""
        end, key = self.end(out), (out, to, role, frozenset(not_over))
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            raise ValueError(
                f"shard_params: the {name} {out} is an integer that depends on the batch, so it differs from rank to "
                f"rank and has no mean.\n  at {where(end.source, 'the step arguments')}\n"
                f"Count with zt.psum(x, {self.axes.main!r}), return a mean such as an accuracy as a float, which is "
                f"averaged over the ranks, or pass outputs='local'."
            )
        if key not in self.means:
            self.means[key] = dataclasses.replace(
                out, name=self.values.names.fresh(f"{out.name}.mean")
            )
            over = self.axes.cover(self.varies_over(out) - not_over)
            self.values.reduce(end, out, self.means[key], over, to, role, out.name, "mean")
        return self.values.laid(self.means[key], to, end)

    # ---- errors

    def no_rule(self, eqn: Eqn, error: NoRule) -> ValueError:
        # An operator that changes its arguments is itself an argument, of the equation that copies them.
        op: Any = next(
            (arg for arg in eqn.args[:1] if isinstance(arg, torch._ops.OpOverload)), eqn.op
        )
        return ValueError(
            f"shard_params: the update cannot run on shards: {op_name(op)} has no sharding rule for "
            f"{', '.join(self.values.value(v, eqn).type for v in eqn.ins)} ({error}).\n"
            f"  at {where(eqn.source)}\n"
            f"{_advice(eqn.op)} Or leave these leaves whole: shard_params(..., where=lambda path, leaf: ...)."
        )

    def entry(self, eqn: Eqn | None) -> Eqn | None:
        """The equation through which a varying value enters the update: `eqn` or one that it depends on."""
        makers = self.values.producers
        enters = lambda v: v in self.over and v in makers and makers[v].region == "update"
        while eqn is not None and (before := [makers[v] for v in eqn.ins if enters(v)]):
            eqn = before[0]
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
    """What to do about an operation of PyTorch, or one of the user's, which DTensor cannot run on shards."""
    if getattr(op, "namespace", "aten") == "aten":
        return "Use elementwise operations, reductions or matmuls in the update."
    if isinstance(op, torch._ops.HigherOrderOperator):
        return (
            "Call it inside of an operator that returns new tensors (torch.library.custom_op, triton_op), and tell "
            "DTensor in which layouts that runs: torch.distributed.tensor.experimental.register_sharding."
        )
    return (
        f"Tell DTensor in which layouts it runs: "
        f"@torch.distributed.tensor.experimental.register_sharding(torch.ops.{op})."
    )


def gathered_early(
    graph: Graph, gathering: Set[Eqn], layout: Callable[[Var], Layout]
) -> frozenset[Eqn]:
    """The equations of the update that run whole on every rank, because it sends no more bytes than to gather later.

        x = cast(g); n = norm(x); y = div(x, n); a = mm(y, t(y)); b = mm(a, y)
          -->   x_full = wait(all_gather(x)); n = norm(x_full); y = div(x_full, n); ...

    `gathering` are those that need whole values. What they read is computed whole too, back to the values with the
    fewest bytes. So the matrices of Muon are gathered once, in bf16, and their updates have the bits of one process.

    Args:
        layout: the layout of each value if only the equations of `gathering` run whole.
    """
    bytes_of = lambda values: sum(v.numel * v.dtype.itemsize for v in values)
    needed_whole: set[Var] = set()
    on_every_rank: set[Eqn] = set()
    for e in reversed(graph.eqns):
        is_needed = not needed_whole.isdisjoint(e.results)
        if is_needed and e.region == "update" and _runs_anywhere(e):
            sent = {v for v in e.ins if layout(v) and v not in needed_whole}
            is_cheap = bytes_of(sent) <= bytes_of(e.results)
        else:
            is_cheap = False
        if e in gathering or is_cheap:
            on_every_rank.add(e)
            needed_whole.update(e.ins)
    return frozenset(on_every_rank) if on_every_rank > gathering else frozenset()


def _runs_anywhere(e: Eqn) -> bool:
    """Whether every rank can run the equation on whole values, with the same result."""
    return isinstance(e.op, torch._ops.OpOverload) and not is_random(e.op) and not is_users(e)
