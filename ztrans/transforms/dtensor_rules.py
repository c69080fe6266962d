"""Sharding rules: how an update equation runs on shards, as DTensor's own propagation says.

Asked about one equation at a time, with shapes only: no process group, no data, no communication.
DTensor says which layouts the inputs must have and which the outputs will; the collectives that
this takes are placed in the program by the caller.

Private torch APIs live here too; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

from ..ir.graph import Eqn, Layout, Partial, Split, Var, is_random, variables
from ..ir.layout import part
from ..ir.operations import shows_argument

aten = torch.ops.aten
# Operations that DTensor knows in another form, which is laid out in the same way.
_KNOWN_AS = {aten._conj_physical.default: aten._conj.default}
# Casts, copies, and values made like others; sums, and products of matrices, which are sums.
_ON_NOTHING = {
    *(aten._to_copy, aten.copy, aten.fill, aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    *(aten.sum, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.vdot),
}


_DIMS = ("dim", "dims", "dim0", "dim1", "dim1d", "start_dim", "end_dim")
_ONE_DIM_MORE = (aten.unsqueeze, aten.stack)  # their dim is one of the result


class NoRule(Exception):
    """DTensor has no rule for this operation on these layouts."""


@functools.lru_cache
def _mesh(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("x",), _init_backend=False, _rank=0)


def _placement(layout: Layout) -> Any:
    for p in layout:
        if isinstance(p, Split):
            return Shard(p.dim)
        if p.op.startswith("norm"):
            return _NormPartial(float(p.op.removeprefix("norm")))
        return DPartial({"mean": "avg"}.get(p.op, p.op))
    return Replicate()


def _layout(spec: DTensorSpec | None, axis: str) -> Layout:
    if spec is None:
        return ()
    placed = spec.placements[0]
    if isinstance(placed, Shard):
        return (Split(axis, placed.dim),)
    if isinstance(placed, _NormPartial):
        return (Partial(axis, f"norm{float(placed.norm_type)}"),)
    if isinstance(placed, DPartial):
        return (Partial(axis, {"avg": "mean"}.get(placed.reduce_op, placed.reduce_op)),)
    if isinstance(placed, Replicate):
        return ()
    raise NoRule(f"DTensor asks for the placement {placed}")


def rule(eqn: Eqn, layouts: Callable[[Var], Layout], axis: str, size: int) -> tuple[list[Layout], list[Layout]]:
    """The layouts that `eqn` wants of its inputs (in the order of `eqn.ins`) and those of its outputs.

    Raises: NoRule when DTensor cannot shard the operation.
    """
    ins = eqn.ins
    have = [layouts(v) for v in ins]
    if not any(have):
        return have, [()] * len(eqn.outs)
    if eqn.op is aten.add.Tensor and eqn.args[1] == 0 and not isinstance(eqn.args[1], Var):
        return have, have  # what sum() starts from; terms stay terms
    if eqn.op._schema.name.startswith("aten::_fused_"):
        return _fused(eqn, have)
    whole = [()] * len(ins), [()] * len(eqn.outs)
    if any(v.numel == 0 for v in ins) and torch.Tag.pointwise not in eqn.op.tags:
        return whole  # DTensor's rule for views of them never returns
    try:
        wanted, given = _ask(eqn, ins, have, axis, size) or whole
    except NoRule:
        if not shows_argument(eqn.op):
            raise
        return whole  # a view of a whole value takes no compute and no memory
    if _makes_terms(have, wanted):
        # A value cannot be spread into terms without waste: reduce the terms that are there instead.
        have = [() if any(isinstance(p, Partial) for p in h) else h for h in have]
        wanted, given = _ask(eqn, ins, have, axis, size) or whole
    given = [tuple(_extreme(p, v) for p in layout) for layout, v in zip(given, eqn.outs)]
    empty = any(_has_empty_part(v, layout, size) for v, layout in zip(ins, wanted)) and not _runs_on_nothing(eqn)
    unknown = any(isinstance(p, Partial) and p.op == "product" for layout in given for p in layout)
    return whole if empty or unknown or _makes_terms(have, wanted) else (wanted, given)


def _runs_on_nothing(eqn: Eqn) -> bool:
    """Whether an equation may run on a part without elements: one that works element by element, a view, or a sum.

    Others fail there (a norm of negative order, a Fourier transform), and only on the rank that has such a part.
    """
    packet = eqn.op.overloadpacket
    if packet is aten.linalg_vector_norm:
        return 0 < (eqn.args[1] if len(eqn.args) > 1 else 2) < float("inf")
    return torch.Tag.pointwise in eqn.op.tags or packet in _ON_NOTHING or shows_argument(eqn.op) or is_random(eqn.op)


def _extreme(p: Split | Partial, v: Var | None) -> Split | Partial:
    """Truth values are reduced by `min` where all of them must hold, and by `max` where one is enough."""
    if isinstance(p, Partial) and v is not None and v.dtype == torch.bool:
        return Partial(p.axis, {"product": "min", "sum": "max"}.get(p.op, p.op))
    return p


def _makes_terms(have: list[Layout], wanted: list[Layout]) -> bool:
    """Whether a value is wanted as terms that it does not lie in."""
    return any(h != w and any(isinstance(p, Partial) for p in w) for h, w in zip(have, wanted))


def _has_empty_part(v: Var, layout: Layout, size: int) -> bool:
    return any(isinstance(p, Split) and part(v.shape[p.dim], size, size - 1)[1] == 0 for p in layout)


def _fused(eqn: Eqn, have: list[Layout]) -> tuple[list[Layout], list[Layout]]:
    """The optimizer of one parameter works elementwise; its step and learning rate are whole. (DTensor knows Adam.)"""
    cut = next((h for h in have if any(isinstance(p, Split) for p in h)), ())
    lists = [(a.name, x) for a, x in zip(eqn.op._schema.arguments, eqn.args)] + list(eqn.kwargs.items())
    alike = [isinstance(x, (list, tuple)) and name != "state_steps" for name, x in lists for _ in variables(x)]
    return [cut if a else () for a in alike], [cut] * len(eqn.outs)


def _ask(
    eqn: Eqn, ins: list[Var], have: list[Layout], axis: str, size: int
) -> tuple[list[Layout], list[Layout]] | None:
    if not any(have):
        return have, [()] * len(eqn.outs)
    types = tuple((v.shape, v.dtype, layout) for v, layout in zip(ins, have))
    args, kwargs = _from_the_front(eqn)
    literals = repr(_strip(args)) + repr(_strip(kwargs))
    return _asked(_Question(_KNOWN_AS.get(eqn.op, eqn.op), types, literals, args, kwargs, axis, size))


def _from_the_front(eqn: Eqn) -> tuple[tuple, dict[str, Any]]:
    """The arguments of an equation, with dims counted from the front.

    DTensor's rule for `cumsum` and its kin does not know that dim -1 of a vector is dim 0, and sums each part alone.
    """
    first, arguments = eqn.ins[0], eqn.op._schema.arguments
    if eqn.op.overloadpacket in _ONE_DIM_MORE or not isinstance(eqn.args[0], Var):
        return eqn.args, dict(eqn.kwargs)
    count = lambda x: x + max(len(first.shape), 1) if type(x) is int and x < 0 else x
    named = lambda name, x: ([*map(count, x)] if isinstance(x, list | tuple) else count(x)) if name in _DIMS else x
    args = tuple(named(a.name, x) for a, x in zip(arguments, eqn.args))
    return args, {name: named(name, x) for name, x in eqn.kwargs.items()}


class _Question:
    """A hashable question to DTensor; equal operations on equal types have one answer."""

    def __init__(self, op, types, literals, args, kwargs, axis, size):
        self.op, self.types, self.args, self.kwargs, self.axis, self.size = (
            op,
            types,
            args,
            kwargs,
            axis,
            size,
        )
        self.key = (op, types, literals, axis, size)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self.key == other.key


def _strip(tree: Any) -> Any:
    if isinstance(tree, Var):
        return "v"
    if isinstance(tree, (list, tuple)):
        return [_strip(x) for x in tree]
    if isinstance(tree, Mapping):
        return {k: _strip(x) for k, x in tree.items()}
    return tree


@functools.lru_cache(maxsize=4096)
def _asked(question: _Question) -> tuple[list[Layout], list[Layout]] | None:
    """What DTensor answers; None where it has a rule, and none for parts that lie as these do, or would."""
    layouts = iter(layout for _, _, layout in question.types)
    mesh = _mesh(question.size)
    dispatcher = DTensor._op_dispatcher

    def tensor(v: Var) -> DTensor:
        whole = torch.empty(v.shape, dtype=v.dtype, device="meta")
        spec = DTensorSpec(mesh, (_placement(next(layouts)),), TensorMeta(whole.shape, whole.stride(), v.dtype))
        return DTensor(whole, spec, requires_grad=False)

    def build(tree: Any) -> Any:
        if isinstance(tree, Var):
            return tensor(tree)
        if isinstance(tree, (list, tuple)):
            return [build(x) for x in tree]
        if isinstance(tree, Mapping):
            return {k: build(x) for k, x in tree.items()}
        return tree

    args, kwargs = tuple(build(a) for a in question.args), build(dict(question.kwargs))
    try:
        info = dispatcher.unwrap_to_op_info(question.op, args, kwargs)
        dispatcher.sharding_propagator.propagate(info)
    except (NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
        if "redistribut" in str(error):  # it shards, but not as it lies: make the inputs whole
            return None
        raise NoRule(str(error).split("\n")[0]) from None
    found = info.output_sharding
    specs = found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
    schema = found.redistribute_schema if found.needs_redistribute else info.schema
    wanted = [
        s
        for s in torch.utils._pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
        if isinstance(s, DTensorSpec)
    ]
    count = len(list(variables((question.args, question.kwargs))))
    if len(wanted) != count:
        raise NoRule(f"DTensor's rule names {len(wanted)} inputs for {count}")
    if any(isinstance(s.placements[0], _StridedShard) for s in (*wanted, *specs) if s is not None):
        return None
    return [_layout(s, question.axis) for s in wanted], [_layout(s, question.axis) for s in specs]
