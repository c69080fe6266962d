"""Replicas: check that all ranks of a mesh start from the same values.

A state that is sharded from full tensors must be sharded from the same tensors on every rank. Ranks that initialised
their model from different random numbers would train different replicas, or a mixture of several models, and nothing
would show it. So the ranks compare a digest of every leaf once, when the state is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..ir.axes import rows
from .meeting import Call, everywhere, meet

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # the positions that a digest distinguishes


class Leaf(NamedTuple):
    """A description of one leaf on one rank. `values` is its digest, or None if the values are not compared."""

    path: str
    kind: str
    values: list[int] | None


def check_same(
    mesh: DeviceMesh,
    axes: Sequence[Sequence[str]],
    paths: Sequence[str],
    leaves: Sequence[Any],
    source: int | None,
) -> None:
    """Compare each leaf of a state between the ranks that differ only along the axes of that leaf.

    Along the other axes of the mesh, such as that of tensor parallelism, ranks may hold different leaves. With a
    `source`, only the values of that rank are used, so values are not compared.

    Raises: ValueError on every rank, naming the first leaf that differs.
    """
    if mesh.size() == 1:
        return
    meet(mesh, Call("shard"))
    described = _described(paths, leaves, source is None)
    by_rank = dict(zip(mesh.mesh.flatten().tolist(), everywhere(described, mesh)))
    _check_paths(by_rank)
    together = {
        of_leaf: rows(mesh.mesh, mesh.mesh_dim_names or (), of_leaf) for of_leaf in map(tuple, axes)
    }
    for k, of_leaf in enumerate(axes):
        for first, *others in together[tuple(of_leaf)]:
            for rank in others:
                if by_rank[rank][k] != by_rank[first][k]:
                    raise ValueError(_text(first, by_rank[first][k], rank, by_rank[rank][k]))


def _check_paths(by_rank: Mapping[int, Sequence[Leaf]]) -> None:
    (first, wanted), *others = by_rank.items()
    for rank, leaves in others:
        if [leaf.path for leaf in leaves] != [leaf.path for leaf in wanted]:
            raise ValueError(
                f"shard: rank {rank} has {len(leaves)} leaves and rank {first} has {len(wanted)}, or they have other "
                f"names.\nBuild the same model and optimizer on every rank. Of an optimizer that divides its state "
                f"over ranks itself, use its single-device class."
            )


def digest(x: torch.Tensor) -> torch.Tensor:
    """Two sums of the bits of a tensor, i64[2]: a plain one, and one weighted by the position of each element.

    >>> digest(torch.tensor([1.0, 2.0])).equal(digest(torch.tensor([2.0, 1.0])))
    False
    """
    x = (
        torch.view_as_real(x.detach().resolve_conj())
        if x.is_complex()
        else x.detach().resolve_neg()
    )
    words = x.contiguous().view(-1).view(_WORDS[x.itemsize])
    whole = words[: words.numel() // _ROW * _ROW].view(-1, _ROW).sum(0, dtype=torch.int64)
    rest = words[words.numel() // _ROW * _ROW :].to(torch.int64)
    whole[: rest.numel()] += rest
    weights = (
        torch.arange(1, _ROW + 1, device=x.device) * 0x9E3779B1
    )  # odd, so that every position counts
    return torch.stack([whole.sum(), (whole * weights).sum()])


def _described(paths: Sequence[str], leaves: Sequence[Any], values: bool) -> list[Leaf]:
    digests = {i: digest(x) for i, x in enumerate(leaves) if values and _is_full(x)}
    sums = (
        dict(zip(digests, torch.stack([d.cpu() for d in digests.values()]).tolist()))
        if digests
        else {}
    )
    return [
        Leaf(path, _kind(x, values), sums.get(i)) for i, (path, x) in enumerate(zip(paths, leaves))
    ]


def _is_full(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and not x.is_meta


def _kind(x: Any, values: bool) -> str:
    if isinstance(x, DTensor):
        return f"a DTensor {list(x.shape)} of {x.dtype}"
    if not isinstance(x, torch.Tensor):
        return f"a number, {x!r}"
    return (
        f"{list(x.shape)} of {x.dtype}{' on meta, without values' if x.is_meta and values else ''}"
    )


def _text(first_rank: int, first: Leaf, rank: int, here: Leaf) -> str:
    if first.kind != here.kind:
        return (
            f"shard: {here.path} is {first.kind} on rank {first_rank} and {here.kind} on rank {rank}.\n"
            f"Build the same state on every rank, or let one rank's count: step.shard(state, source=0), where the "
            f"others hold tensors of the same shapes, which may be on meta."
        )
    return (
        f"shard: {here.path} has other values on rank {rank} than on rank {first_rank}, so the ranks would train "
        f"different replicas.\nLet the values of rank 0 count, step.shard(state, source=0), or seed all ranks alike "
        f"before the model is built, and load the same checkpoint."
    )
