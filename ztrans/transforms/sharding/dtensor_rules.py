"""Sharding rules: the layouts in which an equation of the update runs on shards, according to DTensor.

`rule` asks DTensor about one equation at a time, with shapes only: there is no process group, no data and no
communication. The answer is the layouts that the inputs must have, and the layouts of the outputs. The caller adds the
collectives that change layouts.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from ...ir.graph import Eqn, Layout, Partial, Split, Var, substitute, variables
from ...ir.higher_order import functions
from ...ir.op_facts import is_random, is_written, op_facts
from .rule_checks import extreme, is_right, reads_terms

aten = torch.ops.aten
# Operations for which DTensor has no rule, each with an operation of the same layouts for which it has one.
_KNOWN_AS = {aten._conj_physical.default: aten._conj.default}

_DIMS = ("dim", "dims", "dim0", "dim1", "dim1d", "start_dim", "end_dim")
_ONE_DIM_MORE = (aten.unsqueeze, aten.stack)  # their argument `dim` is a dim of the result


class NoRule(Exception):
    """DTensor has no rule for this operation on these layouts."""


@functools.lru_cache
def _mesh(size: int) -> DeviceMesh:
    return DeviceMesh(
        "cpu", torch.arange(size), mesh_dim_names=("x",), _init_backend=False, _rank=0
    )


@functools.lru_cache
def _context() -> TracingContext:
    """The mode in which DTensor finds the shapes of results. Without it, DTensor makes a mode for each question."""
    return TracingContext(FakeTensorMode())


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


def rule(
    eqn: Eqn, layouts: Callable[[Var], Layout], axis: str, size: int
) -> tuple[list[Layout], list[Layout]]:
    """The layouts that `eqn` must have its inputs in (in the order of `eqn.ins`), and those of its outputs.

    An operation of PyTorch for which DTensor has no rule runs on whole values.

    Raises: NoRule if that may give other results on each rank (see `_needs_no_rule`).
    """
    have = [layouts(v) for v in eqn.ins]
    if (known := _known(eqn, have)) is not None:
        return known
    have = [layout if reads_terms(eqn, layout) else () for layout in have]
    wanted, given = _ask(eqn, have, axis, size)
    if _makes_terms(have, wanted):
        # DTensor would spread a value into terms, which is wasteful. Instead, reduce the inputs that are terms.
        have = [() if any(isinstance(p, Partial) for p in h) else h for h in have]
        wanted, given = _ask(eqn, have, axis, size)
    given = [tuple(extreme(eqn, p, v) for p in layout) for layout, v in zip(given, eqn.outs)]
    fits = not _makes_terms(have, wanted) and is_right(eqn, wanted, given, axis, size)
    return (wanted, given) if fits else _whole(eqn)


def _known(eqn: Eqn, have: list[Layout]) -> tuple[list[Layout], list[Layout]] | None:
    """The rule for an equation that needs no answer from DTensor, or None."""
    op: Any = eqn.op
    if not any(have):
        return have, [()] * len(eqn.outs)
    if op is aten.add.Tensor and eqn.args[1] == 0 and not isinstance(eqn.args[1], Var):
        return have, have  # `sum()` starts from 0, and adding 0 leaves terms as they are
    if isinstance(op, torch._ops.HigherOrderOperator):
        if not functions(eqn):
            raise NoRule("DTensor has rules for operators of torch.library only")
        return _whole(eqn)  # it calls functions, which may read any elements of their arguments
    if op._schema.name.startswith("aten::_fused_"):
        return _fused(eqn, have)
    if any(v.numel == 0 for v in eqn.ins) and torch.Tag.pointwise not in op.tags:
        return _whole(eqn)  # DTensor's rule for views of values without elements never returns
    return None


def _needs_no_rule(op: Any) -> bool:
    """Whether an operation may run on whole values if DTensor has no rule for it.

    Every rank must get the same results. So it is a view, or an operation of PyTorch that draws no random numbers and
    changes no argument. Of users' operators nothing is known, and the result of a collective depends on other ranks.
    """
    is_pure = not is_random(op) and not any(is_written(a) for a in op._schema.arguments)
    return op_facts(op).view or (op.namespace == "aten" and is_pure)


def _whole(eqn: Eqn) -> tuple[list[Layout], list[Layout]]:
    """The layouts of an equation that runs on whole values."""
    return [()] * len(eqn.ins), [()] * len(eqn.outs)


def _makes_terms(have: list[Layout], wanted: list[Layout]) -> bool:
    """Whether a value that is not in terms would have to be spread into terms."""
    return any(h != w and any(isinstance(p, Partial) for p in w) for h, w in zip(have, wanted))


def _fused(eqn: Eqn, have: list[Layout]) -> tuple[list[Layout], list[Layout]]:
    """The rule for a fused optimizer of one parameter: it is elementwise, and reads a whole step count and rate.

    DTensor has a rule for Adam only.
    """
    op: Any = eqn.op
    cut = next((h for h in have if any(isinstance(p, Split) for p in h)), ())
    lists = [(a.name, x) for a, x in zip(op._schema.arguments, eqn.args)] + list(eqn.kwargs.items())
    alike = [
        isinstance(x, (list, tuple)) and name != "state_steps"
        for name, x in lists
        for _ in variables(x)
    ]
    return [cut if a else () for a in alike], [cut] * len(eqn.outs)


def _ask(eqn: Eqn, have: list[Layout], axis: str, size: int) -> tuple[list[Layout], list[Layout]]:
    """DTensor's rule for inputs in these layouts. If it has no rule for such parts, the equation runs on whole values.

    Raises: NoRule if DTensor has no rule for the operation, and `_needs_no_rule` says that it needs one.
    """
    if not any(have):
        return have, [()] * len(eqn.outs)
    op: Any = eqn.op
    types = tuple((v.shape, v.dtype, layout) for v, layout in zip(eqn.ins, have))
    arguments = _from_the_front(eqn)
    literals = repr(substitute(arguments, lambda v: "v"))
    try:
        answer = _asked(_Question(_KNOWN_AS.get(op, op), types, literals, axis, size, arguments))
    except NoRule:
        if not _needs_no_rule(op):
            raise
        return _whole(eqn)
    return answer or _whole(eqn)


def _from_the_front(eqn: Eqn) -> tuple[tuple, dict[str, Any]]:
    """The arguments of an equation, with dims counted from the front.

    DTensor's rules for `cumsum` and similar operations take dim -1 of a vector for another dim than 0, so they would
    sum each part alone. That of torch 2.11 for `stack` counts the dim from the end of an argument.
    """
    op: Any = eqn.op
    first, arguments = eqn.ins[0], op._schema.arguments
    more = op.overloadpacket in _ONE_DIM_MORE
    if not (more or isinstance(eqn.args[0], Var)):
        return eqn.args, dict(eqn.kwargs)
    count = lambda x: x + max(len(first.shape) + more, 1) if type(x) is int and x < 0 else x
    named = lambda name, x: (
        ([*map(count, x)] if isinstance(x, list | tuple) else count(x)) if name in _DIMS else x
    )
    args = tuple(named(a.name, x) for a, x in zip(arguments, eqn.args))
    return args, {name: named(name, x) for name, x in eqn.kwargs.items()}


@dataclass(frozen=True)
class _Question:
    """A question to DTensor. Equal operations on equal types have the same answer, which is cached.

    `arguments` are the positional arguments and the keyword arguments.
    """

    op: Any
    types: tuple
    literals: str
    axis: str
    size: int
    arguments: tuple[tuple, dict[str, Any]] = field(compare=False)


@functools.lru_cache(maxsize=4096)
def _asked(question: _Question) -> tuple[list[Layout], list[Layout]] | None:
    """DTensor's answer, or None if it has a rule for the operation, but not for inputs or results in such layouts."""
    layouts = iter(layout for _, _, layout in question.types)
    mesh = _mesh(question.size)
    dispatcher = DTensor._op_dispatcher

    def tensor(v: Var) -> DTensor:
        whole = torch.empty(v.shape, dtype=v.dtype, device="meta")
        spec = DTensorSpec(
            mesh, (_placement(next(layouts)),), TensorMeta(whole.shape, whole.stride(), v.dtype)
        )
        return DTensor(whole, spec, requires_grad=False)

    try:
        info = dispatcher.unwrap_to_op_info(question.op, *substitute(question.arguments, tensor))
        with tracing(_context()):
            dispatcher.sharding_propagator.propagate(info)
    except (
        KeyError,
        IndexError,
        TypeError,
    ):  # its rule fails, for instance for a dim of one row that is cut
        return None
    except (NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
        raise NoRule(str(error).split("\n")[0]) from None
    sharding: Any = info.output_sharding
    specs = (
        sharding.output_spec
        if isinstance(sharding.output_spec, (list, tuple))
        else [sharding.output_spec]
    )
    schema: Any = sharding.redistribute_schema if sharding.needs_redistribute else info.schema
    leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    wanted = [spec for spec in leaves if isinstance(spec, DTensorSpec)]
    count = len(list(variables(question.arguments)))
    if len(wanted) != count:
        raise NoRule(f"DTensor's rule names {len(wanted)} inputs for {count}")
    if any(isinstance(s.placements[0], _StridedShard) for s in (*wanted, *specs) if s is not None):
        return None
    return [_layout(s, question.axis) for s in wanted], [_layout(s, question.axis) for s in specs]
