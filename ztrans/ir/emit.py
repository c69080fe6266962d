"""Turn a function of PyTorch into equations.

    emit(lambda g: g.clamp(-1, 1), g)   -->   clamp = clamp(g, -1, 1)

`make_fx` runs the function once, on tensors without elements and with the global shapes of the values, and records its
operations. On shards each operation runs by its sharding rule (see `sharding_rules`), where this needs no message.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .ambient import without_autocast
from .graph import Eqn, Layout, Names, Region, Var, variables
from .layout import on_axis
from .marks import MARKS
from .op_facts import IDENTITIES, is_written
from .printer import op_name
from .registered_rules import NoRule
from .rules import Sizes
from .sharding_rules import rule
from .source import Source, where


class Recorded(NamedTuple):
    """The operations of a function, as `make_fx` recorded them, and the tree of its results."""

    fn: Callable
    graph: fx.Graph
    out_tree: pytree.TreeSpec


def emit(
    fn: Callable,
    *args: Any,
    names: Names | None = None,
    axes: Sizes | None = None,
    like: Eqn | None = None,
    region: Region | None = None,
    name: str = "",
) -> tuple[list[Eqn], Any]:
    """The equations that compute `fn(*args)`, and its results. `Rewriter.emit` also puts them into a program.

    In the program of one rank, a function may read shards. A result is cut like them, such as a `f32[32@dp,1]` of the
    rows of a `f32[32@dp,16]`, or it is a term, such as the `f32[]{max@dp}` of all elements, if its operations need no
    message for that. `zt.pmean` and its like are for the traced program, in phases 0 and 1.

    Args:
        fn: a function of tensors that returns new tensors, on the device of its arguments.
        args: values of a program, in lists and dicts too, and constants. `emit` passes no keywords on: write
            `lambda x: torch.clamp(x, min=0)`, with constants inside.
        names: the names of the program, from which the new values get theirs.
        axes: the sizes of the mesh axes over which arguments are cut (`Graph.axes`).
        like, region: the equation whose region and line of the user the new ones have, and another region.
        name: the name of the result; several results are numbered. By default a value has the name of its operation.

    Returns: The equations, and the results of `fn`, with a `Var` in place of each tensor.

    Raises: ValueError if `fn` changes a tensor in place, makes one from no argument, reads a tensor from outside or a
        number out of a tensor, or needs a message to run on shards.

    >>> x = Var("x", torch.float32, (4, 2))
    >>> eqns, (codes, scale) = emit(lambda x: ((x / x.abs().max()).round(), x.abs().max()), x, name="code")
    >>> [e.out for e in eqns]
    [abs: f32[4,2], max: f32[], div: f32[4,2], code.0: f32[4,2], abs_1: f32[4,2], code.1: f32[]]
    """
    names = names or Names(v.name for v in variables(args))
    return written(record(fn, args), args, names, axes or {}, like, region, name)


def record(fn: Callable, args: Sequence[Any]) -> Recorded:
    """Run a function on tensors without elements, and record its operations."""
    leaves, tree = pytree.tree_flatten(args)
    values = [v for v in leaves if isinstance(v, Var)]
    for v in values:
        if v.future or v.memory != "device":
            place = "not yet waited for" if v.future else f"on the {v.memory}"
            raise refused(fn, f"{v!r} is {place}, so no operation reads it.")
    out_tree = pytree.tree_structure(())

    def on_tensors(*tensors: torch.Tensor) -> list[Any]:
        nonlocal out_tree
        remaining = iter(tensors)
        filled = [next(remaining) if isinstance(x, Var) else x for x in leaves]
        results, out_tree = pytree.tree_flatten(fn(*pytree.tree_unflatten(filled, tree)))
        return results

    with without_autocast():
        metas = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in values]
        try:
            module = make_fx(on_tensors)(*metas)
        except RuntimeError as error:
            if "_local_scalar_dense" not in str(error):
                raise
            reads = "it reads the number in a tensor, as x.item() and `if x > 0` do."
            raise refused(fn, f"{reads} Keep it a tensor: torch.where(x > 0, a, b).") from None
    return Recorded(fn, module.graph, out_tree)


def written(
    recorded: Recorded,
    args: Sequence[Any],
    names: Names,
    axes: Sizes,
    like: Eqn | None,
    region: Region | None,
    name: str,
) -> tuple[list[Eqn], Any]:
    """The equations of a recorded function on values of a program, and its results (see `emit`)."""
    values: dict[fx.Node, Any] = {}
    inputs = iter(variables(args))
    labels = _labels(recorded.graph, name)
    eqns: list[Eqn] = []
    results: Any = []
    for node in recorded.graph.nodes:
        node_args, kwargs = _plain(fx.map_arg((node.args, node.kwargs), values.__getitem__))
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "output":
            results = node_args[0]
        elif node.target is operator.getitem:
            values[node] = node_args[0][node_args[1]]
        elif node.target in IDENTITIES:
            values[node] = node_args[0]
        else:
            op = node.target
            problem = _problem(op, node_args, kwargs, bool(axes))
            if problem:
                raise refused(recorded.fn, problem)
            outs = _new_values(node.meta["val"], labels.get(node) or op_name(op), names)
            mark = MARKS.get(op._schema.name, op)
            eqn = Eqn(mark, node_args, tuple(outs), kwargs).like(like, region)
            if any(v.layout for v in eqn.ins):
                eqn = _on_shards(eqn, axes, recorded.fn)
            eqns.append(eqn)
            values[node] = eqn.outs if isinstance(node.meta["val"], (tuple, list)) else eqn.outs[0]
    return eqns, pytree.tree_unflatten(results, recorded.out_tree)


def _labels(graph: fx.Graph, name: str) -> dict[fx.Node, str]:
    """The names of the nodes that compute results."""
    results: Any = graph.output_node().args[0]
    nodes = [node for node in results if isinstance(node, fx.Node)] if name else []
    return {node: f"{name}.{i}" if len(nodes) > 1 else name for i, node in enumerate(nodes)}


def _plain(x: Any) -> Any:
    """Arguments in lists, tuples and dicts, in place of FX's immutable ones."""
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        items = map(_plain, x)
        return tuple(items) if isinstance(x, tuple) else list(items)
    return x


def _new_values(results: Any, label: str, names: Names) -> list[Var | None]:
    """A value for each tensor among the results of an operation."""
    leaves = pytree.tree_leaves(results)
    outs: list[Var | None] = []
    for i, x in enumerate(leaves):
        numbered = label if len(leaves) == 1 else f"{label}.{i}"
        is_tensor = isinstance(x, torch.Tensor)
        outs.append(Var(names.fresh(numbered), x.dtype, tuple(x.shape)) if is_tensor else None)
    return outs


def _on_shards(eqn: Eqn, axes: Sizes, fn: Callable) -> Eqn:
    """The equation on the shards or terms of its arguments, with results in the layouts of its rule.

    Raises: ValueError if the rule reads an argument in another layout.
    """
    layouts: list[Layout] = [()] * len(eqn.outs)
    for axis in dict.fromkeys(p.axis for v in eqn.ins for p in v.layout):
        placements = [on_axis(v.layout, axis) for v in eqn.ins]
        try:
            found = rule(eqn, placements, axis, axes[axis])
        except NoRule:
            found = None
        if found is None or list(found.ins) != placements:
            types = ", ".join(v.type for v in eqn.ins)
            raise refused(
                fn,
                f"{op_name(eqn.op)} of {types} needs a message. Gather what it reads first (ir.all_gather), cut it "
                f"alike (ir.shard), or write the transform in phase 0 or 1, where all values are whole.",
            )
        layouts = [(*rest, p) if p else rest for rest, p in zip(layouts, found.outs)]
    outs = [v and dataclasses.replace(v, layout=layout) for v, layout in zip(eqn.outs, layouts)]
    return eqn.replace(outs=tuple(outs))


def _problem(op: Any, args: tuple, kwargs: dict[str, Any], is_of_one_rank: bool) -> str:
    """Why an operation cannot be an equation, and what to write; empty if it can."""
    if isinstance(op, str):
        return "it reads a tensor from outside. Pass it as an argument, or write a number."
    if not isinstance(op, torch._ops.OpOverload):
        return f"{op} runs other code. Emit that code itself."
    if any(map(is_written, op._schema.arguments)):
        return f"{op} changes a tensor in place. Use the operation that returns a new one."
    if not variables((args, kwargs)):  # so nothing says on which device
        advice = "Make it from one, as zeros_like does"
        if op is torch.ops.aten.scalar_tensor.default:
            advice = "In place of torch.where with a number, use masked_fill"
        return f"{op} makes a tensor from no argument. {advice}."
    if kwargs.get("device") is not None:
        return f"{op} names a device. Leave it out: a program runs on the device of its inputs."
    if is_of_one_rank and op._schema.name in MARKS:
        return f"zt.{MARKS[op._schema.name]} is for phases 0 and 1. Reduce in the program of one rank by ir.reduce."
    return ""


def refused(fn: Callable, problem: str) -> ValueError:
    name = getattr(fn, "__name__", repr(fn))
    return ValueError(
        f"emit: {name} cannot become equations: {problem}\n  at {where(Source.of(fn))}"
    )
