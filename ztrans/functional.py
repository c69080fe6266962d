"""import_fx(graph, inputs): a recorded FX graph as functional equations, one tensor each.

In-place operations become their functional twins, and every name of the changed storage then
reads the new value: a view of it is taken again, and a change through a view is written back to
its base by the view's inverse. Operations over lists (`_foreach_add_`, `_fused_adamw_`) become one
equation per member, so that each parameter's update can run as soon as its gradient is there.

    y = x[0]; y.add_(1)   -->   y = select(x, 0); y1 = add(y, 1); x1 = select_scatter(x, y1, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .collectives import GRADIENT, PMEAN, PSUM
from .graph import Eqn, Names, Var, is_random, substitute
from .pretty import op_name
from .regions import Fact
from .twins import functional, is_written, member, outs, with_defaults

aten = torch.ops.aten
_OURS = {"ztrans::gradient": GRADIENT, "ztrans::pmean": PMEAN, "ztrans::psum": PSUM}
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_BATCH_NORMS = ("aten::native_batch_norm", "aten::_native_batch_norm_legit")


@dataclass
class _Storage:
    """What a storage holds now, as a contiguous sequence of values of its base tensor."""

    value: Var
    version: int = 0


@dataclass
class _Name:
    """A tensor of the traced program: a storage and the views that lead from its base to this tensor."""

    storage: _Storage
    views: tuple[tuple[Any, tuple, dict, int], ...] = ()
    seen: int = 0
    value: Var | None = None


@dataclass
class _Import:
    names: Names
    strides: dict[Var, tuple[int, ...]]  # as the tracer saw them: recorded views rely on them
    eqns: list[Eqn] = field(default_factory=list)
    facts: dict[Eqn, Fact] = field(default_factory=dict)
    node: fx.Node | None = None

    def meta(self, var: Var) -> torch.Tensor:
        """A tensor without data of a value's type and strides."""
        return torch.empty_strided(var.shape, self.strides[var], dtype=var.dtype, device="meta")

    def emit(
        self, op: Any, args: Sequence, like: Any = None, name: str | None = None, kwargs: dict | None = None
    ) -> Any:
        """Add an equation whose results are typed like `like` (a tensor without data, a Var, a tuple of them),
        or as `op` types them."""
        custom = self.node.meta.get("custom", {})
        name = name or op_name(op)
        if like is None:
            like = op(*substitute(args, self.meta), **substitute(kwargs or {}, self.meta))
        many = isinstance(like, (tuple, list))
        outs = []
        for i, x in enumerate(like if many else (like,)):
            label = f"{name}.{i}" if many and len(like) > 1 else name
            is_tensor = isinstance(x, (torch.Tensor, Var))
            outs.append(Var(self.names.fresh(label), x.dtype, tuple(x.shape)) if is_tensor else None)
            if is_tensor:
                self.strides[outs[-1]] = self.strides[x] if isinstance(x, Var) else x.stride()
        eqn = Eqn(op, tuple(args), tuple(outs), kwargs or {}, source=custom.get("source"))
        self.eqns.append(eqn)
        self.facts[eqn] = Fact(custom.get("backward", False), custom.get("recorded", False))
        return tuple(outs) if many else outs[0]

    def read(self, x: Any) -> Any:
        """The current value of a traced tensor, its views taken again if the storage has changed."""
        if isinstance(x, (list, tuple)):
            return [self.read(item) for item in x]
        if not isinstance(x, _Name):
            return x
        if x.value is None or x.seen != x.storage.version:
            value = x.storage.value
            for op, args, kwargs, index in x.views:
                value = self.view(op, value, args, kwargs, index)
            x.value, x.seen = value, x.storage.version
        return x.value

    def view(self, op: Any, base: Var, args: tuple, kwargs: dict, index: int) -> Var:
        out = self.emit(op, (base, *args), kwargs=kwargs)
        return out[index] if isinstance(out, tuple) else out

    def write(self, x: _Name, value: Var) -> None:
        """Change what `x` names: write `value` through its views to the base."""
        old, bases = self.read(x), [x.storage.value]
        for op, args, kwargs, index in x.views[:-1]:
            bases.append(self.view(op, bases[-1], args, kwargs, index))
        new = value
        for base, (op, args, kwargs, index) in zip(reversed(bases), reversed(x.views)):
            new = self.unview(op, base, new, args, kwargs, index)
        x.storage.value = self.laid_out(new, bases[0])
        x.storage.version += 1
        if self.strides[value] == self.strides[old]:  # else its view is taken again, of what was written
            x.value, x.seen = value if x.views else x.storage.value, x.storage.version

    def laid_out(self, value: Var, old: Var) -> Var:
        """`value` in the memory order of `old`: whatever is viewed of `old` can be viewed of it."""
        if _is_dense(self.meta(value)) and _order(self.meta(value)) == _order(self.meta(old)):
            return value
        if self.meta(old).is_contiguous():
            return self.emit(aten.clone.default, (value,), kwargs={"memory_format": torch.contiguous_format})
        return self.emit(aten.copy.default, (old, value))

    def unview(self, op: Any, base: Var, new: Var, args: tuple, kwargs: dict, index: int) -> Var:
        """`base` with what the view `op` shows of it replaced by `new`."""
        name = op._schema.name.removeprefix("aten::")
        emit = lambda inverse, *rest, **kw: self.emit(inverse, rest, kwargs=kw)  # noqa: E731
        if op is aten.view.dtype:
            return emit(op, new, base.dtype)
        if name in ("view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze"):
            if not self.meta(new).is_contiguous():
                new = emit(aten.clone.default, new, memory_format=torch.contiguous_format)
            return emit(aten.view.default, new, list(base.shape))
        if name == "t":
            return emit(aten.t.default, new)
        if name == "transpose":
            return emit(aten.transpose.int, new, *args)
        if name == "permute":
            order = [d % len(base.shape) for d in args[0]]
            return emit(aten.permute.default, new, [order.index(d) for d in range(len(order))])
        if name == "slice":
            return emit(aten.slice_scatter.default, base, new, *args, **kwargs)
        if name == "select":
            return emit(aten.select_scatter.default, base, new, *args)
        if name == "diagonal":
            return emit(aten.diagonal_scatter.default, base, new, *args, **kwargs)
        if name in ("split", "split_with_sizes", "unbind"):
            dim = kwargs.get("dim", args[-1] if len(args) > (name != "unbind") else 0)
            if name == "unbind":
                return emit(aten.select_scatter.default, base, new, dim, index)
            sizes = args[0] if name != "split" else [args[0]] * index
            start = sum(sizes[:index])
            return emit(aten.slice_scatter.default, base, new, dim, start, start + new.shape[dim])
        if name == "expand" and tuple(base.shape) == tuple(new.shape):
            return new
        if name in ("view_as_real", "view_as_complex"):
            return emit(aten.view_as_real.default if name == "view_as_complex" else aten.view_as_complex.default, new)
        if name == "as_strided":
            return emit(aten.as_strided_scatter.default, base, new, *args)
        raise ValueError(
            f"trace: a tensor is changed in place through its view `{name}`, which has no functional form.\n"
            f"  at {self.where()}\nChange the tensor itself, or compute a new one."
        )

    def where(self) -> str:
        source = self.node.meta.get("custom", {}).get("source")
        return source.where if source else "an unknown line"


def import_fx(graph: fx.Graph, inputs: Sequence[Var]) -> tuple[list[Eqn], list[Any], dict[Eqn, Fact]]:
    """The equations of a recorded graph, its outputs, and what the tracer saw of each equation."""
    fakes = (n.meta["val"] for n in graph.nodes if n.op == "placeholder")
    imp = _Import(Names(v.name for v in inputs), {v: fake.stride() for v, fake in zip(inputs, fakes)})
    env: dict[fx.Node, Any] = {}
    unread = iter(inputs)
    outputs: list[Any] = []

    def look(tree: Any) -> Any:
        return fx.map_arg(tree, env.__getitem__)

    for node in graph.nodes:
        imp.node = node
        if node.op == "placeholder":
            env[node] = _Name(_Storage(next(unread)))
        elif node.op == "get_attr":
            env[node] = getattr(graph.owning_module, node.target)
        elif node.op == "output":
            outputs = [imp.read(x) for x in look(node.args[0])]
        elif node.target.__name__ == "getitem":
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = _operation(
                imp, node.target, look(tuple(node.args)), look(dict(node.kwargs)), node.meta.get("val")
            )
    return imp.eqns, outputs, imp.facts


def _operation(imp: _Import, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    """One recorded operation: a view, a change in place, a list of either, or plain."""
    if torch.Tag.inplace_view in op.tags:  # unsqueeze_ and its like change a name, not a storage
        op = functional(op)
    schema = op._schema
    if schema.name.startswith("profiler::"):  # optimizers name their steps for profilers
        return None
    if op in _SAME and isinstance(args[0], _Name):
        return args[0]
    if op is aten.set.source_Tensor:  # from here on another name of the same tensor
        return args[1]
    if schema.name in _OURS:
        g, other = args
        if schema.name == "ztrans::gradient" and _is_mark_of(g, imp):
            return g
        other = imp.read(other)
        name = f"{other.name}.grad" if isinstance(other, Var) else None
        return _named(imp.emit(_OURS[schema.name], (imp.read(g), other), val, name))
    if schema.name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")):
        return _per_member(imp, op, args, kwargs)
    if _is_view(op) and isinstance(args[0], _Name):
        rest = tuple(imp.read(a) for a in args[1:])
        base = args[0]
        if schema.name == "aten::as_strided" and base.views:  # of the storage, wherever the view begins
            base, rest = _Name(base.storage), (*rest[:2], val.storage_offset())
        if isinstance(val, (tuple, list)):
            outs = imp.emit(op, (imp.read(base), *rest), val, kwargs=kwargs)
            return [
                _Name(base.storage, (*base.views, (op, rest, kwargs, i)), base.storage.version, o)
                for i, o in enumerate(outs)
            ]
        out = imp.emit(op, (imp.read(base), *rest), val, kwargs=kwargs)
        return _Name(base.storage, (*base.views, (op, rest, kwargs, 0)), base.storage.version, out)
    if schema.name in _BATCH_NORMS and isinstance(args[3], _Name):
        return _batch_norm(imp, args, kwargs, val)
    if any(map(is_written, schema.arguments)):
        return _in_place(imp, op, args, kwargs)
    return _named(imp.emit(op, [imp.read(a) for a in args], val, kwargs={k: imp.read(v) for k, v in kwargs.items()}))


def _is_mark_of(g: Any, imp: _Import) -> bool:
    """Whether `g` is already marked: nested levels of torch.func may pass a gradient through twice."""
    value = imp.read(g)
    return any(e.op is GRADIENT and value in e.outs for e in imp.eqns[-1:])


def _named(out: Any) -> Any:
    """Fresh names, each of a storage of its own, for the results of an equation."""
    if isinstance(out, tuple):
        return [None if o is None else _Name(_Storage(o), (), 0, o) for o in out]
    return None if out is None else _Name(_Storage(out), (), 0, out)


def _is_view(op: Any) -> bool:
    returns = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _order(x: torch.Tensor) -> list[int]:
    """The dims of a tensor from the outermost to the innermost in memory."""
    return sorted((d for d, n in enumerate(x.shape) if n > 1), key=x.stride, reverse=True)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    step = 1
    for d in reversed(_order(x)):
        if x.stride(d) != step:
            return False
        step *= x.shape[d]
    return True


def _in_place(imp: _Import, op: Any, args: tuple, kwargs: dict) -> Any:
    """An operation that changes its first argument or its `out=`, as its functional twin and a write."""
    name, into = op._schema.name.removeprefix("aten::"), outs(op)
    targets = [kwargs[o] for o in into] or [args[0]]
    values = [imp.read(a) for a in args]
    if name == "copy_" or (name == "fill_" and isinstance(values[1], Var)):
        made = values[1]
    elif name in ("zero_", "fill_"):
        made = imp.emit(aten.full_like.default, (values[0], *(values[1:] or [0])))
    else:
        twin, declared = functional(op), op._schema.arguments
        written = [a.name for a in declared if is_written(a)]
        if twin is None or written != (into or [declared[0].name]) or not isinstance(targets[0], _Name):
            raise ValueError(
                f"trace: the in-place operation {op} has no functional form.\n"
                f"  at {imp.where()}\nUse the operation that returns a new tensor."
            )
        others = {k: imp.read(v) for k, v in kwargs.items() if k not in into}
        like = values[0] if is_random(twin) else None
        made = imp.emit(twin, with_defaults(op, twin, values, kwargs), like, kwargs=others)
    for target, new in zip(targets, made if len(targets) > 1 else [made]):
        old = imp.read(target)
        if new.shape != old.shape and name not in ("copy_", "fill_"):  # which broadcast
            raise ValueError(
                f"trace: {op} makes {new.type} of {old.type}; a traced tensor keeps its shape.\n"
                f"  at {imp.where()}\nGive it the shape of the result, or make a new one."
            )
        imp.write(target, _as_type(imp, new, old))
    return targets[0] if len(targets) == 1 else targets


def _as_type(imp: _Import, new: Any, old: Var) -> Var:
    """`new` in the dtype and shape of `old`."""
    if new.dtype != old.dtype:
        new = imp.emit(aten._to_copy.default, (new,), kwargs={"dtype": old.dtype})
    if new.shape != old.shape:
        new = imp.emit(aten.expand.default, (new, list(old.shape)))
        new = imp.emit(aten.clone.default, (new,))
    return new


def _batch_norm(imp: _Import, args: tuple, kwargs: dict, val: Any) -> Any:
    """Batch norm with running statistics: the functional form returns them, and they are written back."""
    values = [imp.read(a) for a in args]
    if not values[5]:  # not training: the statistics are only read
        return _named(imp.emit(aten.native_batch_norm.default, values, val, kwargs=kwargs))
    mean, var = values[3], values[4]
    outs = imp.emit(aten._native_batch_norm_legit_functional.default, values, [*val, mean, var], kwargs=kwargs)
    imp.write(args[3], outs[3])
    imp.write(args[4], outs[4])
    return _named(outs[:3])


def _per_member(imp: _Import, op: Any, args: tuple, kwargs: dict) -> Any:
    """`_foreach_add_([a, b], [c, d])` as two additions, `_fused_adamw_` as one update per parameter."""
    name, declared = op._schema.name, op._schema.arguments
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    if name.startswith("aten::_fused_"):
        for i in range(count):
            _fused(imp, op, [[a[i]] if isinstance(a, (list, tuple)) and a else a for a in args], kwargs)
        return None
    keywords = {"value": "value", "alpha": "alpha", "dtype": "dtype"}
    if "_addc" in name:
        keywords["scalars"] = "value"
    results = []
    for i in range(count):
        given = {s.name: a for s, a in zip(declared, args)} | kwargs
        given = {k: imp.read(a[i] if isinstance(a, (list, tuple)) else a) for k, a in given.items()}
        values = [a for k, a in given.items() if k not in keywords]
        extra = {keywords[k]: a for k, a in given.items() if k in keywords}
        if name == "aten::_foreach_copy_":
            new = values[1]
        elif name == "aten::_foreach_zero_":
            new = imp.emit(aten.full_like.default, (values[0], 0))
        elif (plain := member(op, values)) is not None:
            new = imp.emit(plain, values, kwargs=extra)
        else:
            raise ValueError(
                f"trace: {op} has no form for one tensor at a time.\n"
                f"  at {imp.where()}\nUse the optimizer with foreach=False."
            )
        if name.endswith("_"):
            imp.write(args[0][i], _as_type(imp, new, values[0]))
        else:
            results.append(_named(new))
    return None if name.endswith("_") else results


def _fused(imp: _Import, op: Any, lists: list, kwargs: dict) -> None:
    """One member of a fused optimizer."""
    written = [a[0] for a, s in zip(lists, op._schema.arguments) if is_written(s) and a]
    values, others = [imp.read(a) for a in lists], {k: imp.read(v) for k, v in kwargs.items()}
    for name, new in zip(written, imp.emit(functional(op), values, [*map(imp.read, written)], kwargs=others)):
        imp.write(name, new)
