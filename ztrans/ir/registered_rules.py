"""The sharding rules that users register for their operators.

`torch.distributed.tensor.experimental.register_sharding` writes them to a table of DTensor, which is not public.
DTensor chooses among the layouts that a rule accepts. We ask it about one equation at a time, with shapes only: it
needs neither a process group nor data. `sharding_rule` makes a rule for it from a pattern.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from .graph import Eqn, Partial, Placement, Split, Var, substitute
from .patterns import WHOLE, along, letters_of, parse


class NoRule(Exception):
    """No rule is registered for an operator, or the rule does not accept these layouts."""


def sharding_rule(pattern: str) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """A rule for `register_sharding`, as a pattern in the notation of einops.

        register_sharding(torch.ops.my.product.default)(zt.sharding_rule("m k, k n -> m n"))

    The operator may run on parts along any letter, one at a time. Arguments and results with this letter are cut along
    it; the other arguments are whole, and the other results are terms of a sum, one on each rank.

    Args:
        pattern: a letter or a word for each dim of each tensor among the arguments, and of each result. `_` is a dim
            that may not be cut, and `...` stands for any number of dims: "... -> ..." is an elementwise operator.

    >>> x = torch.empty(4, 3)
    >>> spec = DTensorSpec(_mesh(2), (Replicate(),), TensorMeta(x.shape, x.stride(), x.dtype))
    >>> sharding_rule("rows _ -> rows")(spec)
    [([Replicate()], [Replicate()]), ([Shard(dim=0)], [Shard(dim=0)])]
    """
    letters_of_tensors = parse(pattern)

    def accepted_layouts(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple(x.shape for x in leaves if isinstance(x, DTensorSpec))
        ins, outs = letters_of(letters_of_tensors, shapes, len(letters_of_tensors.outs))
        layouts: list[tuple[list[Any], list[Any]]] = [
            ([Replicate()] * len(outs), [Replicate()] * len(ins))
        ]
        for letter in dict.fromkeys(letter for letters in ins for letter in letters):
            if letter != WHOLE:
                cut_outs = along(letter, outs, Shard, DPartial())
                layouts.append((cut_outs, along(letter, ins, Shard, Replicate())))
        return layouts

    return accepted_layouts


@functools.lru_cache
def _mesh(size: int) -> DeviceMesh:
    """A mesh of DTensor without a process group."""
    ranks = torch.arange(size)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("x",), _init_backend=False, _rank=0)


def registered_rule(
    eqn: Eqn, placements: Sequence[Placement], axis: str, size: int
) -> tuple[list[Placement], list[Placement]]:
    """The placements of the arguments and the results of a user's operator. Terms are reduced before it.

    Raises: NoRule if no rule is registered for the operator, or if the rule accepts no layout of these values.
    """
    dispatcher = DTensor._op_dispatcher
    mesh = _mesh(size)
    remaining = iter(placements)

    def distributed(v: Var) -> DTensor:
        p = next(remaining)
        placement = Shard(p.dim) if isinstance(p, Split) else Replicate()
        x = torch.empty(v.shape, dtype=v.dtype, device="meta")
        meta = TensorMeta(x.shape, x.stride(), x.dtype)
        return DTensor(x, DTensorSpec(mesh, (placement,), meta), requires_grad=False)

    op: Any = eqn.op
    args, kwargs = substitute((eqn.args, eqn.kwargs), distributed)
    try:
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        dispatcher.sharding_propagator.propagate(info)
    except (NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
        raise NoRule(str(error).split("\n")[0]) from None

    # If the rule does not accept the layouts of the arguments, DTensor has chosen others.
    sharding: Any = info.output_sharding
    schema: Any = sharding.redistribute_schema if sharding.needs_redistribute else info.schema
    specs = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    ins = [_placement(spec, axis) for spec in specs if isinstance(spec, DTensorSpec)]
    if len(ins) != len(eqn.ins):
        raise NoRule(f"its rule names {len(ins)} arguments, and it has {len(eqn.ins)}")
    out_specs = sharding.output_spec
    if not isinstance(out_specs, list | tuple):
        out_specs = [out_specs]
    return ins, [_placement(spec, axis) for spec in out_specs]


def _placement(spec: DTensorSpec | None, axis: str) -> Placement:
    """Convert a placement of DTensor to one of ours. A result without a spec, which is not a tensor, is whole.

    Raises: NoRule for a placement that programs do not have, such as a strided shard.
    """
    placement = Replicate() if spec is None else spec.placements[0]
    # Subclasses of these placements mean something else.
    if type(placement) is Shard:
        return Split(axis, placement.dim)
    if type(placement) is DPartial:
        op = "mean" if placement.reduce_op == "avg" else placement.reduce_op
        return Partial(axis, op)
    if isinstance(placement, Replicate):
        return None
    raise NoRule(f"its rule has the placement {placement}")
