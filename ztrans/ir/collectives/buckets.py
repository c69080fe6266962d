"""Buckets: collectives of one kind share a start, whose arguments are then a list of several members."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..graph import Eqn, Partial, Split
from .buffers import partial_dtype, wire_dtype


def bucket_key(start: Eqn) -> tuple:
    """The properties that all members of a bucket share.

    >>> import torch
    >>> from ztrans.ir import Provenance, Var, all_gather
    >>> w = Var("w", torch.float32, (4, 2), (Split("dp"),))
    >>> bucket_key(all_gather([w], ["f"], "dp", provenance=Provenance("param", ("w",), "dp")))[:3]
    (all_gather, 'dp', 'param')
    """
    member, future = start.ins[0], start.results[0]
    axis = start.kwargs["axis"]
    dims = tuple(
        p.dim for v in (member, future) for p in v.layout if isinstance(p, Split) and p.axis == axis
    )
    terms = tuple(p.op for p in member.layout if isinstance(p, Partial) and p.axis == axis)
    partial = partial_dtype(start, member) if "op" in start.kwargs else None
    wire, role = (
        wire_dtype(start, member),
        start.provenance.role if start.provenance is not None else None,
    )
    return (
        start.op,
        axis,
        role,
        wire,
        partial,
        member.dtype,
        future.dtype,
        start.kwargs.get("op"),
        dims,
        terms,
    )


def coalesce(starts: Sequence[Eqn]) -> Eqn:
    """One equation that starts all of `starts`, which have the same key. Their futures stay the same.

    Raises: ValueError if their keys differ.
    """
    first, *rest = starts
    if not rest:
        return first.replace(order=None)
    misfit = next((e for e in rest if bucket_key(e) != bucket_key(first)), None)
    if misfit is not None:
        names = first.results[0].name, misfit.results[0].name
        raise ValueError(f"coalesce: {names[0]} and {names[1]} share a bucket, but not one key.")
    members = [v for e in starts for v in e.ins]
    paths = tuple(
        dict.fromkeys(p for e in starts if e.provenance is not None for p in e.provenance.paths)
    )
    provenance = first.provenance and dataclasses.replace(first.provenance, paths=paths, again=None)
    outs = tuple(out for e in starts for out in e.results)
    return first.replace(args=(members,), outs=outs, provenance=provenance, order=None)
