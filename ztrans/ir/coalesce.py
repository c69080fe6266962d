"""coalesce: several collectives of one kind as one equation over lists.

    f = all_gather([a], axis=dp); g = all_gather([b], axis=dp)   -->   f, g = all_gather([a, b], axis=dp)

Members need not be neighbours in the program; what they must share is their `key`: the operation,
the axis, the role, the dtypes in memory and on the wire, the dim along which they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from .collectives import wire_dtype
from .graph import Eqn, Partial, Split, Var


def key(start: Eqn) -> tuple:
    """What the members of one bucket have in common.

    >>> from .collectives import all_gather
    >>> from .graph import Provenance
    >>> import torch
    >>> w = Var("w", torch.float32, (4, 2), (Split("dp"),))
    >>> key(all_gather([w], ["f"], "dp", provenance=Provenance("param", ("w",), "dp")))[:3]
    (all_gather, 'dp', 'param')
    """
    member, future = start.ins[0], start.outs[0]
    axis = start.kwargs["axis"]
    dims = tuple(p.dim for v in (member, future) for p in v.layout if isinstance(p, Split) and p.axis == axis)
    terms = tuple(p.op for p in member.layout if isinstance(p, Partial) and p.axis == axis)
    wire = wire_dtype(start, member)
    role = start.provenance.role
    return start.op, axis, role, wire, member.dtype, future.dtype, start.kwargs.get("op"), dims, terms


def coalesce(starts: Sequence[Eqn]) -> Eqn:
    """One equation that starts all of `starts`, which have one key; their futures stay what they are."""
    first, *rest = starts
    if not rest:
        return first.replace(order=None)
    other = next((e for e in rest if key(e) != key(first)), None)
    if other is not None:
        raise ValueError(f"coalesce: {first.outs[0].name} and {other.outs[0].name} share a bucket, but not one key.")
    members = [v for e in starts for v in e.ins]
    paths = tuple(dict.fromkeys(p for e in starts for p in e.provenance.paths))
    provenance = first.provenance.__class__(first.provenance.role, paths, first.provenance.axis)
    outs: tuple[Var, ...] = tuple(out for e in starts for out in e.outs)
    return first.replace(args=(members,), outs=outs, provenance=provenance, order=None)
