"""import_record(recorded, inputs): turn the recorded operations of a step into functional equations.

An in-place operation becomes its functional form, and the result is written to the storage of the tensor that it
changes (see `functionalize`). An operation over lists (`_foreach_add_`, `_fused_adamw_`) becomes one equation for each
member, so that each parameter can be updated as soon as its gradient is known.

    y = x[0]; y.add_(1)   -->   y = select(x, 0); y1 = add(y, 1); x1 = select_scatter(x, y1, 0)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.collectives import GRADIENT, PMEAN, PSUM
from ..ir.graph import Eqn, Names, Var
from ..ir.operations import is_written, shows_argument
from ..ir.source import where
from .errors import warn_of_trace, writes_batch
from .functionalize import Alias, Builder, Storage, View
from .nested.checkpoints import policy_of
from .nested.import_graph import import_graph
from .operation import Operation, Place, mapped
from .overloads import functional, named, outs, with_defaults
from .record import Recorded
from .regions import Fact

aten, hops = torch.ops.aten, torch.ops.higher_order
_OURS = {"ztrans::gradient": GRADIENT, "ztrans::pmean": PMEAN, "ztrans::psum": PSUM}
# PyTorch computes the values of a lazy view when an operation reads it. A collective and a copy of its memory do not,
# so a program computes them where the step takes the view.
_COMPUTED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_BATCH_NORMS = ("aten::native_batch_norm", "aten::_native_batch_norm_legit")
_FUSED = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
_BROADCASTS = ("aten::copy_", "aten::fill_")  # in-place operations whose new value may have fewer dims


def import_record(
    recorded: Recorded, inputs: Sequence[Var], batch: Collection[Var] = ()
) -> tuple[list[Eqn], list[Any], dict[Eqn, Fact]]:
    """The equations of a recorded run, its outputs, and what the tracer recorded about each equation.

    Warns of lines that write into a tensor of the `batch`, which the program does not do.
    """
    builder = Builder(Names(v.name for v in inputs), {v: x.stride() for v, x in zip(inputs, recorded.inputs)})
    values: dict[int, Any] = {id(x): Alias(Storage(v)) for x, v in zip(recorded.inputs, inputs)}
    traced = lambda x: values.get(id(x), x)  # a literal tensor stays
    for o in recorded.operations:
        builder.source, builder.fact = o.origin.source, _fact(o)
        args, kwargs = tuple(mapped(o.args, traced)), mapped(o.kwargs, traced)
        if isinstance(o.op, fx.GraphModule):
            result = import_graph(builder, o.op, args, _operation)
        else:
            result = _operation(builder, o.op, args, kwargs, o.seen)
        _set(values, o.result, result)
    for x, v in zip(recorded.inputs, inputs):
        if v in batch and (written := values[id(x)].storage).version:
            warn_of_trace(writes_batch(v.name, written.written_at), written.written_at)
    return builder.eqns, builder.read(mapped(recorded.outputs, traced)), builder.facts


def _fact(operation: Operation) -> Fact:
    """The facts of an operation, with the policy of the checkpoint that it is in."""
    fact, mark = operation.origin.fact, operation.origin.mark
    if mark is None:
        return fact
    policy = policy_of(operation.meta, mark)
    if policy is not None and policy.name.endswith("OFFLOAD"):
        source = operation.origin.source
        warn_of_trace(
            f"trace: a checkpoint moves {operation.op} to the CPU, and a program keeps it where it is.\n"
            f"  at {where(source)}\nUse PREFER_SAVE, or PREFER_RECOMPUTE for less memory.",
            source,
        )
    dropped = policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return replace(fact, checkpoint=mark.number, dropped=dropped)


def _set(values: dict[int, Any], tensors: Any, traced: Any) -> None:
    """Record the traced values of the tensors in a result."""
    if isinstance(tensors, (torch.Tensor, Place)):
        values[id(tensors)] = traced
    elif isinstance(tensors, (list, tuple)) and traced is not None:
        for each, value in zip(tensors, traced):
            _set(values, each, value)


def _operation(builder: Builder, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    """Import one recorded operation: a mark, an operation over lists, a view, an in-place operation, or any other."""
    if torch.Tag.inplace_view in op.tags:  # unsqueeze_ and others change the view, not the storage
        op = functional(op)
    name = op._schema.name
    if name.startswith("profiler::"):  # optimizers name their steps for profilers
        return None
    if op in _SAME and isinstance(args[0], Alias):
        return args[0]
    if op is aten.set.source_Tensor:  # the first tensor is the second one from here on
        return args[1]
    if name in _OURS:
        return _mark(builder, _OURS[name], args[0], args[1], val)
    if name.startswith(_FUSED):
        return _per_member(builder, op, args, kwargs)
    if shows_argument(op) and isinstance(args[0], Alias):
        return _view(builder, op, args, kwargs, val)
    # A batch norm writes its statistics in training only. Only one of its two operations declares a write.
    if name in _BATCH_NORMS and isinstance(args[3], Alias):
        op = (aten._native_batch_norm_legit if args[5] else aten.native_batch_norm).default
    if any(map(is_written, op._schema.arguments)):
        return _in_place(builder, op, args, kwargs, val)
    return Alias.of(builder.emit(op, builder.read(args), {k: builder.read(v) for k, v in kwargs.items()}, val))


def _mark(builder: Builder, op: Any, x: Alias, operand: Any, val: Any) -> Alias:
    """Import a mark of a gradient, a pmean or a psum.

    The operand is the value that a gradient is for, or the axes of a pmean or psum. Nested levels of torch.func may
    mark a gradient twice; the first mark counts.
    """
    value, operand = builder.read(x), builder.read(operand)
    if op is GRADIENT and any(e.op is GRADIENT and value in e.outs for e in builder.eqns[-1:]):
        return x
    name = f"{operand.name}.grad" if isinstance(operand, Var) else ""
    return Alias.of(builder.emit(op, (value, operand), like=val, name=name))


def _view(builder: Builder, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    base, rest, op = args[0], tuple(builder.read(args[1:])), _COMPUTED.get(op, op)
    if op is aten.view.default and tuple(rest[0]) == builder.read(base).shape:  # as `x.view_as(x)`
        return base
    if op is aten.as_strided.default and base.views:  # it is a view of the whole storage, not of the view it is given
        if val.dtype != base.storage.value.dtype or any(view.op in _COMPUTED.values() for view in base.views):
            raise ValueError(
                f"trace: the step calls as_strided on a view whose values are not those in memory, such as the real "
                f"part of a complex tensor.\n  at {where(builder.source)}\nCopy the view first: .clone()."
            )
        base, rest = Alias(base.storage), (*rest[:2], val.storage_offset())
    shown = builder.emit(op, (builder.read(base), *rest), kwargs, val)
    outs = [
        Alias(base.storage, (*base.views, View(op, rest, kwargs, i)), base.storage.version, v)
        for i, v in enumerate(shown if isinstance(shown, tuple) else [shown])
    ]
    return outs if isinstance(shown, tuple) else outs[0]


def _in_place(builder: Builder, op: Any, args: Sequence, kwargs: dict, val: Any = None) -> Any:
    """Import an operation that changes arguments, `out=` included.

    Its functional form returns the new values of these arguments last.
    """
    given = named(op, args, kwargs)
    written = [given[a.name] for a in op._schema.arguments if is_written(a)]
    targets = [x for each in written for x in (each if isinstance(each, list) else [each])]
    if _is_of_library(op):
        results = _of_new_tensors(builder, op, given, targets, val)
    else:
        results = _functional_results(builder, op, args, kwargs, targets)
    own, new = results[: -len(targets)], results[-len(targets) :]
    unwritten = _unwritten(op, args, kwargs)
    for target, value in zip(targets, new):
        if id(target) in unwritten:
            continue
        old = builder.read(target)
        if value.shape != old.shape and op._schema.name not in _BROADCASTS:
            raise ValueError(
                f"trace: {op} makes {value.type} of {old.type}; a traced tensor keeps its shape.\n"
                f"  at {where(builder.source)}\nGive it the shape of the result, or make a new one."
            )
        builder.write(target, _as_type(builder, value, old))
    if own:
        return pytree.tree_unflatten(Alias.of(own), pytree.tree_structure(val))
    return targets[0] if len(op._schema.returns) == 1 else targets


def _unwritten(op: Any, args: Sequence, kwargs: dict) -> set[int]:
    """The ids of the gradients of a fused optimizer, which it writes only to unscale them."""
    is_fused = op._schema.name.startswith(_FUSED)
    return set(map(id, args[1])) if is_fused and kwargs.get("grad_scale") is None else set()


def _functional_results(builder: Builder, op: Any, args: Sequence, kwargs: dict, targets: list) -> tuple:
    """The results of the functional form of an in-place operation: what `op` returns, then the new `targets`."""
    name, values = op._schema.name, builder.read(args)
    if name in _BROADCASTS and isinstance(values[1], Var):
        return (values[1],)
    if name in ("aten::zero_", "aten::fill_"):
        return (builder.emit(aten.full_like.default, (values[0], *(values[1:] or [0]))),)
    form = functional(op)
    if form is None or not all(isinstance(x, Alias) for x in targets):
        raise ValueError(
            f"trace: the in-place operation {op} has no functional form.\n"
            f"  at {where(builder.source)}\nUse the operation that returns a new tensor."
        )
    options = {k: builder.read(v) for k, v in kwargs.items() if k not in outs(op)}
    given = with_defaults(op, form, values, kwargs)
    if form is aten.bernoulli.p:
        return (_drawn(builder, given, options),)
    like = [builder.meta(builder.read(x)) for x in targets] if name.startswith(_FUSED) else None
    results = builder.emit(form, given, options, like)
    return results if isinstance(results, tuple) else (results,)


def _drawn(builder: Builder, values: Sequence, options: dict) -> Var:
    """Random bits, drawn in the order in which the elements of the target lie in memory, as `bernoulli_` draws them.

    The functional form, `bernoulli`, draws them in the order of the elements. Those of other draws keep the layout.
    """
    target, p = values
    order = sorted(range(len(target.shape)), key=lambda dim: -builder.strides[target][dim])
    if order == sorted(order):
        return builder.emit(aten.bernoulli.p, values, options)
    drawn = builder.emit(aten.bernoulli.p, (builder.emit(aten.permute.default, (target, order)), p), options)
    return builder.emit(aten.permute.default, (drawn, [order.index(dim) for dim in range(len(order))]))


def _is_of_library(op: Any) -> bool:
    """Whether an operator comes from torch.library.custom_op, whose in-place operators have no functional forms."""
    return op.namespace not in ("aten", "prims") and torch.Tag.pt2_compliant_tag in op.tags and functional(op) is None


def _of_new_tensors(builder: Builder, op: Any, given: dict[str, Any], targets: list, val: Any) -> tuple:
    """Call an operator of torch.library that changes its arguments: PyTorch's `auto_functionalized` copies these."""
    if any(isinstance(returned.type, torch.ListType) for returned in op._schema.returns):
        raise ValueError(
            f"trace: the operator {op} changes an argument and returns a list, which PyTorch cannot functionalize.\n"
            f"  at {where(builder.source)}\nReturn a tuple of tensors, or let it change no argument."
        )
    like = [*pytree.tree_leaves(val), *(builder.meta(builder.read(x)) for x in targets)]
    return builder.emit(hops.auto_functionalized, (op,), pytree.tree_map(builder.read, given), like)


def _as_type(builder: Builder, new: Any, old: Var) -> Var:
    """`new` in the dtype and shape of `old`."""
    if new.dtype != old.dtype:
        new = builder.emit(aten._to_copy.default, (new,), {"dtype": old.dtype})
    if new.shape != old.shape:
        new = builder.emit(aten.expand.default, (new, list(old.shape)))
        new = builder.emit(aten.clone.default, (new,))
    return new


def _per_member(builder: Builder, op: Any, args: tuple, kwargs: dict) -> None:
    """`_fused_adamw_` as one update per parameter."""
    for i in range(len(args[0])):  # some of the other lists are empty
        _in_place(builder, op, [a[i : i + 1] if isinstance(a, list) else a for a in args], kwargs)
