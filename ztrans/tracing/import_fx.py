"""Turn the FX graph of a step into functional equations.

An in-place operation becomes its functional form and a write of the result to the storage of its target (see
`functionalize`). A fused optimizer (`_fused_adamw_`) becomes one equation per parameter, so that each parameter can be
updated as soon as its gradient is known. A higher-order operator becomes one equation, with sub-programs for the
functions that it calls.

    y = x[0]; y.add_(1)   -->   y = select(x, 0); y1 = add(y, 1); x1 = select_scatter(x, y1, 0)
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.collectives import rules
from ..ir.graph import Demand, Eqn, Graph, Names, Primitive, Var, dce
from ..ir.higher_order import Function
from ..ir.marks import GRADIENT, MARKS
from ..ir.op_facts import IDENTITIES, arguments_by_name, is_random, is_written, op_facts
from ..ir.printer import op_name
from ..ir.source import where
from .annotate import Origin, origin_of
from .checkpoints import policy_of
from .errors import TraceError, unsupported_function, warn_of_written_batch
from .functionalize import Alias, Builder, Storage, View, inverse_order
from .overloads import functional, outs, with_defaults
from .regions import Fact
from .triton_kernels import import_launch

aten = torch.ops.aten
hops = torch.ops.higher_order
# Lazy views, and the operations that compute their values. PyTorch computes the values when an operation reads the
# view, but not for a collective or a copy of its memory. So a program computes them where the step makes the view.
_LAZY_VIEWS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
_BATCH_NORMS = ("aten::native_batch_norm", "aten::_native_batch_norm_legit")
# In-place operations whose new value may have fewer dims.
_BROADCASTS = ("aten::copy_", "aten::fill_")
_NO_ORIGIN = Origin(None, Fact())
# The demands of the policies of selective checkpoints. Other policies are preferences. Torch 2.11 lacks the last one.
_DEMANDS: Mapping[str, Demand] = {
    "MUST_SAVE": "save",
    "MUST_RECOMPUTE": "recompute",
    "MUST_CPU_OFFLOAD": "host",
}


def import_fx(
    module: fx.GraphModule, inputs: Sequence[Var], batch: Collection[Var] = ()
) -> tuple[list[Eqn], list[Any], dict[Eqn, Fact]]:
    """The equations of an FX graph, its outputs, and the facts about each equation for its region.

    Warns of a write into a tensor of the `batch`: the program leaves the caller's tensor as it is.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    strides = {v: node.meta["val"].stride() for v, node in zip(inputs, placeholders, strict=True)}
    builder = Builder(Names(v.name for v in inputs), strides)
    storages = [Storage(v) for v in inputs]
    outputs = _import_nodes(builder, module, list(map(Alias, storages)), _NO_ORIGIN)
    for v, storage in zip(inputs, storages):
        if v in batch and storage.version:
            warn_of_written_batch(v.name, storage.written_at)
    return builder.eqns, builder.read(list(outputs)), builder.facts


def _import_nodes(
    builder: Builder, module: fx.GraphModule, inputs: Sequence[Any], caller: Origin
) -> Any:
    """Add the equations of an FX graph, and return its outputs as traced tensors.

    A node without an origin, as in the functions of a higher-order operator, has the origin of its `caller`.
    """
    values: dict[fx.Node, Any] = {}
    remaining_inputs = iter(inputs)
    outputs: Any = []
    for node in module.graph.nodes:
        origin = origin_of(node) or caller
        builder.source = origin.source
        builder.fact = _fact(node, origin)
        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(remaining_inputs)
        elif node.op == "get_attr":
            attribute = getattr(module, node.target)
            if isinstance(attribute, fx.GraphModule):
                attribute = _function(node.target, attribute, origin)
            values[node] = attribute
        elif node.op == "output":
            outputs = args[0]
        elif node.target is operator.getitem:
            values[node] = args[0][args[1]]
        elif isinstance(node.target, HigherOrderOperator):
            values[node] = _higher_order(builder, node, args, kwargs)
        else:
            values[node] = _operation(builder, node.target, args, kwargs, node.meta.get("val"))
    return outputs


def _fact(node: fx.Node, origin: Origin) -> Fact:
    """The facts about a node, with the policy of the checkpoint around it."""
    mark = origin.checkpoint
    if mark is None:
        return origin.fact
    policy = policy_of(node.meta, mark)
    dropped = policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    # A checkpoint that is not selective demands nothing: a plan may choose.
    demand = None
    if policy is not None and mark.is_selective:
        demand = _DEMANDS.get(policy.name)
    return replace(origin.fact, checkpoint=mark.number, dropped=dropped, demand=demand)


def _operation(builder: Builder, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    """Import one operation, and return its results as traced tensors."""
    # unsqueeze_ and others change the view, not the storage.
    if torch.Tag.inplace_view in op.tags:
        op = functional(op)
    name = op._schema.name
    # Optimizers wrap their steps in a profiler's record_function.
    if name.startswith("profiler::"):
        return None
    if op in IDENTITIES and isinstance(args[0], Alias):
        return args[0]
    # From here on the first tensor is the second one.
    if op is aten.set.source_Tensor:
        return args[1]
    if name in MARKS:
        return _mark(builder, MARKS[name], args[0], args[1], val)
    if op_facts(op).fused_update:
        return _per_member(builder, op, args, kwargs, val)
    if op_facts(op).view and isinstance(args[0], Alias):
        return _view(builder, op, args, kwargs, val)
    if name in _BATCH_NORMS:
        op = _batch_norm(op, args)
    if any(map(is_written, op._schema.arguments)):
        return _in_place(builder, op, args, kwargs, val)
    return Alias.of(builder.emit(op, builder.read(args), _options(builder, kwargs), val))


def _options(builder: Builder, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: builder.read(value) for key, value in kwargs.items()}


def _batch_norm(op: Any, args: tuple) -> Any:
    """The overload of a batch norm that says whether it writes its statistics: it does only in training."""
    if not isinstance(args[3], Alias):
        return op
    return aten._native_batch_norm_legit.default if args[5] else aten.native_batch_norm.default


def _mark(builder: Builder, op: Any, x: Alias, operand: Any, val: Any) -> Alias:
    """Import a mark of a gradient, of a reduction such as pmean, or of pvary.

    The operand is the value that the gradient is for, the axes of the reduction, or the samples. Nested levels of
    torch.func may mark a gradient twice; the first mark counts.
    """
    value = builder.read(x)
    operand = builder.read(operand)
    name = ""
    if op is GRADIENT:
        last = builder.eqns[-1] if builder.eqns else None
        if last is not None and last.op is op and value in last.outs:
            return x
        name = f"{operand.name}.grad" if isinstance(operand, Var) else ""
    return Alias.of(builder.emit(op, (value, operand), like=val, name=name))


def _view(builder: Builder, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    """Import a view: one tensor, or several, in the storage of the base."""
    base = args[0]
    rest = tuple(builder.read(args[1:]))
    op = _LAZY_VIEWS.get(op, op)
    # A view of the same shape, such as `x.view_as(x)`.
    if op is aten.view.default and tuple(rest[0]) == builder.read(base).shape:
        return base
    # `as_strided` is a view of the whole storage, not of the view that it is called with.
    if op is aten.as_strided.default and base.views:
        has_computed_values = any(view.op in _LAZY_VIEWS.values() for view in base.views)
        if has_computed_values or val.dtype != base.storage.value.dtype:
            raise TraceError(
                f"trace: the step calls as_strided on a view whose values are not those in memory, such as the real "
                f"part of a complex tensor.\n  at {where(builder.source)}\nCopy the view first: .clone()."
            )
        base = Alias(base.storage)
        rest = (*rest[:2], val.storage_offset())
    results = builder.emit(op, (builder.read(base), *rest), kwargs, val)

    def alias(value: Var, number: int) -> Alias:
        views = (*base.views, View(op, rest, kwargs, number))
        return Alias(base.storage, views, base.storage.version, value)

    if isinstance(results, tuple):
        return [alias(value, i) for i, value in enumerate(results)]
    return alias(results, 0)


def _in_place(builder: Builder, op: Any, args: Sequence, kwargs: dict, val: Any = None) -> Any:
    """Import an operation that changes arguments, `out=` included.

    Its functional form returns the new values of these arguments last.
    """
    arguments = arguments_by_name(op, args, kwargs)
    # The tensors that the operation changes. An argument may be a list of them.
    targets: list[Any] = []
    for parameter in op._schema.arguments:
        if is_written(parameter):
            targets += pytree.tree_leaves(arguments[parameter.name])
    if _is_of_library(op):
        results = _auto_functionalized_results(builder, op, arguments, targets, val)
    else:
        results = _functional_results(builder, op, args, kwargs, targets)
    returned = results[: -len(targets)]
    new_values = results[-len(targets) :]

    # A fused optimizer writes its gradients only to unscale them.
    unchanged_ids: set[int] = set()
    if op_facts(op).fused_update and kwargs.get("grad_scale") is None:
        gradients = args[1]
        unchanged_ids.update(map(id, gradients))
    for target, value in zip(targets, new_values):
        if id(target) not in unchanged_ids:
            builder.write(target, _written_value(builder, op, value, builder.read(target)))

    if returned:
        return pytree.tree_unflatten(Alias.of(returned), pytree.tree_structure(val))
    return targets[0] if len(op._schema.returns) == 1 else targets


def _functional_results(
    builder: Builder, op: Any, args: Sequence, kwargs: dict, targets: list
) -> tuple:
    """The results of the functional form of an in-place operation: what `op` returns, then the new `targets`."""
    name = op._schema.name
    values = builder.read(args)
    # The source of the copy, or the tensor to fill with, is the new value.
    if name in _BROADCASTS and isinstance(values[1], Var):
        return (values[1],)
    if name == "aten::zero_":
        return (builder.emit(aten.full_like.default, (values[0], 0)),)
    if name == "aten::fill_":
        return (builder.emit(aten.full_like.default, tuple(values)),)

    form = _functional_form(builder, op, targets)
    options = _options(builder, kwargs)
    for key in outs(op):
        options.pop(key, None)
    values = with_defaults(op, form, values, kwargs)
    if form is aten.bernoulli.p:
        return (_random_bits(builder, values, options),)

    # The results of a fused optimizer have the types of its targets.
    like = None
    if op_facts(op).fused_update:
        like = [builder.meta(builder.read(x)) for x in targets]
    results = builder.emit(form, values, options, like)
    return results if isinstance(results, tuple) else (results,)


def _functional_form(builder: Builder, op: Any, targets: list) -> Any:
    form = functional(op)
    all_traced = all(isinstance(x, Alias) for x in targets)
    if form is None or not all_traced:
        raise TraceError(
            f"trace: the in-place operation {op} has no functional form.\n"
            f"  at {where(builder.source)}\nUse the operation that returns a new tensor."
        )
    return form


def _random_bits(builder: Builder, values: Sequence, options: dict) -> Var:
    """Random bits, drawn in the memory order of the target, as `bernoulli_` draws them.

    The functional form, `bernoulli`, draws them in the order of the elements. The functional forms of other draws keep
    the layout.
    """
    target, p = values
    dims = list(range(len(target.shape)))
    order = sorted(dims, key=lambda dim: -builder.strides[target][dim])
    if order == dims:
        return builder.emit(aten.bernoulli.p, values, options)
    in_order = builder.emit(aten.permute.default, (target, order))
    bits = builder.emit(aten.bernoulli.p, (in_order, p), options)
    return builder.emit(aten.permute.default, (bits, inverse_order(order)))


def _is_of_library(op: Any) -> bool:
    """Whether an operator comes from torch.library.custom_op and has no functional form."""
    return (
        op.namespace not in ("aten", "prims")
        and torch.Tag.pt2_compliant_tag in op.tags
        and functional(op) is None
    )


def _auto_functionalized_results(
    builder: Builder, op: Any, arguments: dict[str, Any], targets: list, val: Any
) -> tuple:
    """The results of an operator of torch.library that changes its arguments: what it returns, then the new `targets`.

    PyTorch's `auto_functionalized` copies these arguments first.
    """
    if any(isinstance(returned.type, torch.ListType) for returned in op._schema.returns):
        raise TraceError(
            f"trace: the operator {op} changes an argument and returns a list, which PyTorch cannot functionalize.\n"
            f"  at {where(builder.source)}\nReturn a tuple of tensors, or let it change no argument."
        )
    like = pytree.tree_leaves(val)
    for target in targets:
        like.append(builder.meta(builder.read(target)))
    values = pytree.tree_map(builder.read, arguments)
    return builder.emit(hops.auto_functionalized, (op,), values, like)


def _written_value(builder: Builder, op: Any, new: Any, old: Var) -> Var:
    """The result of `op` as it is written to a tensor: in the dtype of the tensor, and broadcast to its shape."""
    if new.shape != old.shape and op._schema.name not in _BROADCASTS:
        raise TraceError(
            f"trace: {op} makes {new.type} of {old.type}; a traced tensor keeps its shape.\n"
            f"  at {where(builder.source)}\nGive it the shape of the result, or make a new one."
        )
    if new.dtype != old.dtype:
        new = builder.emit(aten._to_copy.default, (new,), {"dtype": old.dtype})
    if new.shape != old.shape:
        new = builder.emit(aten.expand.default, (new, list(old.shape)))
        new = builder.emit(aten.clone.default, (new,))
    return new


def _per_member(
    builder: Builder, op: Any, args: tuple, kwargs: dict, val: Any
) -> tuple[list[Alias], ...] | None:
    """Import a fused optimizer, such as `_fused_adamw_` or its functional form, as one update per parameter."""
    is_functional = not any(map(is_written, op._schema.arguments))
    columns: tuple[list[Alias], ...] = tuple([] for _ in op._schema.returns)
    for i in range(len(args[0])):
        member_args = []
        for argument in args:
            # By slices, because some of the lists are empty.
            is_list = isinstance(argument, list)
            member_args.append(argument[i : i + 1] if is_list else argument)
        if not is_functional:
            _in_place(builder, op, member_args, kwargs)
            continue
        member_columns = []
        like = []
        for column, results in zip(columns, val):
            if results:
                member_columns.append(column)
                like.append(results[i])
        values = builder.emit(op, builder.read(member_args), _options(builder, kwargs), like)
        for column, value in zip(member_columns, values):
            column.append(Alias.of(value))
    return columns if is_functional else None


def _higher_order(builder: Builder, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    """Import the call of a higher-order operator."""
    if node.target is hops.triton_kernel_wrapper_mutation:
        return import_launch(builder, kwargs)
    results, tree = pytree.tree_flatten(node.meta.get("val"))
    args, kwargs = pytree.tree_map(builder.read, (args, kwargs))
    if node.target is hops.flex_attention_backward:
        # The first three results are the gradients of q, k and v. The others belong to the tensors that score_mod
        # reads. The fake results have one for each of them, but the operator returns None where the joint function
        # computes no gradient. Its first five outputs are the gradients of the score and of its four indices.
        gradients_of_read_tensors = args[8].graph.outputs[5:]
        for i, gradient in enumerate(gradients_of_read_tensors, start=3):
            if gradient is None:
                results[i] = None
    values = builder.emit(node.target, args, kwargs, results)
    return pytree.tree_unflatten(Alias.of(values), tree)


def _function(name: str, module: fx.GraphModule, caller: Origin) -> Function:
    """A function of a higher-order operator as a sub-program. make_fx has traced it as a graph of its own.

    Raises: TraceError for a function that draws, communicates, or changes an argument.
    """
    strides: dict[Var, tuple[int, ...]] = {}
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        fake = node.meta["val"]
        strides[Var(letters(k), fake.dtype, tuple(fake.shape))] = fake.stride()
    inputs = tuple(strides)
    builder = Builder(Names(v.name for v in inputs), strides, source=caller.source)
    arguments = [Alias(Storage(v)) for v in inputs]
    outputs = _import_nodes(builder, module, arguments, caller)
    # FX has its own class of lists; the function returns a plain one.
    returns: type = list
    if isinstance(outputs, tuple):
        returns = tuple
    elif not isinstance(outputs, list):
        returns = torch.Tensor
        outputs = [outputs]
    results = _in_separate_memory(builder, outputs, arguments)

    # make_fx numbers all functions of a trace. Here equal functions have equal names, so their calls share kernels.
    short = re.sub(r"\d+$", "0", name.replace("_graph", ""))
    graph = dce(Graph(short, inputs, tuple(builder.eqns), tuple(results), 0))
    problem = _problem_of_function(graph)
    for argument in arguments:
        if argument.storage.version:
            problem = "changes its argument in place"
    if problem:
        raise unsupported_function(name, problem, caller.source)
    return Function(graph, returns)


def _in_separate_memory(
    builder: Builder, outputs: Sequence[Any], arguments: Sequence[Alias]
) -> list[Any]:
    """The values of outputs. An output that shares memory with an argument or an earlier output is copied."""
    storages = {id(x.storage) for x in arguments}
    results: list[Any] = []
    for x in outputs:
        value = builder.read(x)
        if isinstance(x, Alias):
            if id(x.storage) in storages:
                value = builder.emit(aten.clone.default, (value,))
            storages.add(id(x.storage))
        results.append(value)
    return results


def _problem_of_function(graph: Graph) -> str:
    """Why a program cannot be the function of an equation; empty if it can."""
    for e in graph.eqns:
        if is_random(e):
            return f"draws random numbers ({op_name(e.op)})"
        if isinstance(e.op, Primitive) or rules(e).remote:
            return f"communicates ({op_name(e.op)})"
    return ""


def letters(index: int) -> str:
    """A short name for the argument at an index.

    >>> letters(0), letters(25), letters(26)
    ('a', 'z', 'a1')
    """
    alphabet, position = divmod(index, 26)
    letter = string.ascii_lowercase[position]
    return f"{letter}{alphabet}" if alphabet else letter
