"""import_fx(graph, inputs): a recorded FX graph as functional equations, one tensor each.

In-place operations become their functional twins, and every name of the changed storage then
reads the new value: a view of it is taken again, and a change through a view is written back to
its base by the view's inverse. Operations over lists (`_foreach_add_`, `_fused_adamw_`) become one
equation per member, so that each parameter's update can run as soon as its gradient is there.

    y = x[0]; y.add_(1)   -->   y = select(x, 0); y1 = add(y, 1); x1 = select_scatter(x, y1, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .collectives import GRADIENT, PMEAN, PSUM
from .graph import Eqn, Names, Var, is_random, substitute
from .pretty import op_name
from .regions import Fact

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
    eqns: list[Eqn] = field(default_factory=list)
    facts: dict[Eqn, Fact] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    node: fx.Node | None = None

    def emit(self, op: Any, args: Sequence, like: Any, name: str | None = None, kwargs: dict | None = None) -> Any:
        """Add an equation whose results are typed like `like` (a fake tensor, a Var, or a tuple of them)."""
        custom = self.node.meta.get("custom", {})
        name = name or op_name(op)
        many = isinstance(like, (tuple, list))
        outs = []
        for i, x in enumerate(like if many else (like,)):
            label = f"{name}.{i}" if many and len(like) > 1 else name
            is_tensor = isinstance(x, (torch.Tensor, Var))
            outs.append(Var(self.names.fresh(label), x.dtype, tuple(x.shape)) if is_tensor else None)
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
        made = op(_meta(base), *args, **kwargs)
        out = self.emit(op, (base, *args), made, kwargs=kwargs)
        return out[index] if isinstance(out, tuple) else out

    def write(self, x: _Name, value: Var) -> None:
        """Change what `x` names: write `value` through its views to the base."""
        bases = [x.storage.value]
        for op, args, kwargs, index in x.views[:-1]:
            bases.append(self.view(op, bases[-1], args, kwargs, index))
        new = value
        for base, (op, args, kwargs, index) in zip(reversed(bases), reversed(x.views)):
            new = self.unview(op, base, new, args, kwargs, index)
        x.storage.value = new
        x.storage.version += 1
        x.value, x.seen = value, x.storage.version

    def unview(self, op: Any, base: Var, new: Var, args: tuple, kwargs: dict, index: int) -> Var:
        """`base` with what the view `op` shows of it replaced by `new`."""
        name = op._schema.name.removeprefix("aten::")
        emit = lambda inverse, *rest, **kw: self.emit(inverse, rest, base, kwargs=kw)  # noqa: E731
        if name in ("view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze"):
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
    imp = _Import(names=Names(v.name for v in inputs))
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
        op = _functional(op)
    schema = op._schema
    if op in _SAME and isinstance(args[0], _Name):
        return args[0]
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
    changed = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if changed:
        return _in_place(imp, op, args, kwargs, val)
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


def _meta(var: Var) -> torch.Tensor:
    return torch.empty(var.shape, dtype=var.dtype, device="meta")


def _functional(op: Any) -> Any:
    """The functional twin of an operation that changes an argument: `add_.Tensor` and `add.out` -> `add.Tensor`."""
    namespace, name = op._schema.name.split("::")
    if op._schema.arguments[-1].name == "out":
        packet, inputs = (
            getattr(getattr(torch.ops, namespace), name),
            [a.name for a in op._schema.arguments[:-1]],
        )
        alike = (getattr(packet, o) for o in packet.overloads())
        return next((o for o in alike if [a.name for a in o._schema.arguments] == inputs), None)
    overload = op._schema.overload_name or "default"
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, overload, None) if packet is not None else None
    return twin or getattr(getattr(torch.ops, namespace), f"{name.removesuffix('_')}_functional", None)


def _in_place(imp: _Import, op: Any, args: tuple, kwargs: dict, val: Any) -> Any:
    """An operation that changes its first argument, as its functional twin and a write."""
    name = op._schema.name.removeprefix("aten::")
    target = kwargs.get("out", args[0])
    kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    old = imp.read(target)
    rest = [imp.read(a) for a in args[1:]]
    if name == "copy_":
        new = _as_type(imp, rest[0], old)
    elif name in ("zero_", "fill_"):
        new = imp.emit(aten.full_like.default, (old, *(rest or [0])), old)
    else:
        twin = _functional(op)
        if twin is None or not isinstance(target, _Name):
            raise ValueError(
                f"trace: the in-place operation {op} has no functional form.\n"
                f"  at {imp.where()}\nUse the operation that returns a new tensor."
            )
        twin = getattr(twin, "default", twin)
        first = imp.read(args[0])
        new = imp.emit(
            twin,
            (first, *rest),
            _result(twin, first, rest, kwargs),
            kwargs={k: imp.read(v) for k, v in kwargs.items()},
        )
        new = _as_type(imp, new, old)
    imp.write(target, new)
    return target


def _result(op: Any, old: Var, rest: list, kwargs: dict) -> Any:
    """What the functional twin returns: its shape broadcast, its dtype promoted."""
    return old if is_random(op) else _meta_result(op, [old, *rest], kwargs)


def _as_type(imp: _Import, new: Any, old: Var) -> Var:
    """`new` in the dtype and shape of `old`."""
    if not isinstance(new, Var):
        return imp.emit(aten.full_like.default, (old, new), old)
    if new.dtype != old.dtype:
        new = imp.emit(aten._to_copy.default, (new,), Var("", old.dtype, new.shape), kwargs={"dtype": old.dtype})
    if new.shape != old.shape:
        new = imp.emit(aten.expand.default, (new, list(old.shape)), old)
        new = imp.emit(aten.clone.default, (new,), old)
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


# Which overload of the plain operation a member of a list operation is.
_OVERLOADS = {"List": ("Tensor", "default"), "Scalar": ("Scalar", "Tensor", "Tensor_Scalar", "default"),
              "ScalarList": ("Scalar", "Tensor", "Tensor_Scalar", "default"), "Tensor": ("Tensor", "default"),
              "ScalarAndTensor": ("Scalar",), "default": ("default",)}  # fmt: skip
_PLAIN = {"norm": "linalg_vector_norm", "max": "max", "powsum": "linalg__powsum"}


def _per_member(imp: _Import, op: Any, args: tuple, kwargs: dict) -> Any:
    """`_foreach_add_([a, b], [c, d])` as two additions, `_fused_adamw_` as one update per parameter."""
    schema = op._schema
    in_place = schema.name.endswith("_")
    count = len(args[0])
    results = []
    if schema.name.startswith("aten::_fused_"):
        for i in range(count):
            lists = [[a[i]] if isinstance(a, (list, tuple)) and a else a for a in args]
            twin = _functional(op)
            values = [imp.read(a) for a in lists]
            written = [a for a, s in zip(lists, schema.arguments) if s.alias_info is not None and isinstance(a, list)]
            outs = imp.emit(
                twin,
                values,
                [imp.read(a[0]) for a in written if a],
                kwargs={k: imp.read(v) for k, v in kwargs.items()},
            )
            for name, new in zip((a[0] for a in written if a), outs):
                imp.write(name, new)
        return None
    short = schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    for i in range(count):
        member = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        extra = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        old = imp.read(member[0])
        if short == "copy":
            new = _as_type(imp, imp.read(member[1]), old)
        elif short == "zero":
            new = imp.emit(aten.full_like.default, (old, 0), old)
        else:
            plain = getattr(aten, _PLAIN.get(short, short))
            if len(member) > 3 or (short in ("addcdiv", "addcmul") and len(member) == 4):
                extra, member = {"value": member[3]}, member[:3]
            chosen = _overload(imp, plain, schema.overload_name or "default", op)
            values = [imp.read(a) for a in member]
            like = _meta_result(chosen, values, extra)
            new = imp.emit(chosen, values, like, kwargs={k: imp.read(v) for k, v in extra.items()})
            if in_place:
                new = _as_type(imp, new, old)
        if in_place:
            imp.write(member[0], new)
        else:
            results.append(new)
    return None if in_place else [_Name(_Storage(r), (), 0, r) for r in results]


def _overload(imp: _Import, plain: Any, name: str, op: Any) -> Any:
    for choice in _OVERLOADS.get(name, ()):
        if choice in plain.overloads():
            return getattr(plain, choice)
    raise ValueError(
        f"trace: {op} has no form for one tensor at a time.\n  at {imp.where()}\nUse the optimizer with foreach=False."
    )


def _meta_result(op: Callable, values: list, kwargs: dict) -> torch.Tensor:
    return op(*substitute(values, _meta), **substitute(kwargs, _meta))
