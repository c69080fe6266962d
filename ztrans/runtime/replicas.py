"""Ranks that hold the same leaf of a state compare it.

Ranks that initialised their model from different random numbers would train different replicas, or a mixture of
several models, and nothing would show it. So each rank sends a digest of its leaves, and all ranks compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..ir.axes import groups_along
from .agreement import agree
from .process_groups import process_groups

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # the positions that a digest distinguishes


class Leaf(NamedTuple):
    """A description of one leaf on one rank. `values` is its digest, or None if the values are not compared."""

    path: str
    kind: str
    values: tuple[int, ...] | None


def agree_on_state(
    mesh: DeviceMesh,
    axes: Sequence[Sequence[str]],
    paths: Sequence[str],
    leaves: Sequence[Any],
    source: int | None,
) -> None:
    """Compare each leaf of a state between the ranks that differ only along the axes of that leaf.

    Along the other axes of the mesh, such as that of tensor parallelism, ranks may hold different leaves. With a
    `source`, only the values of that rank are used, so values are not compared.

    Raises: RuntimeError on every rank, naming the first leaf that differs.
    """
    mine = [_described(path, x, source is None) for path, x in zip(paths, leaves)]

    def explain(by_rank: Mapping[int, Sequence[Leaf]]) -> str:
        text = _path_difference(by_rank)
        if text:
            return text
        different = different_leaf(mesh, axes, by_rank)
        if different is None:
            return ""
        position, first, rank = different
        return _leaf_difference(by_rank[first][position], by_rank[rank][position], first, rank)

    agree(process_groups(mesh), "shard", mine, explain)


def _described(path: str, x: Any, compare_values: bool) -> Leaf:
    if isinstance(x, DTensor):
        return Leaf(path, f"a DTensor {list(x.shape)} of {x.dtype}", None)
    if not isinstance(x, torch.Tensor):
        return Leaf(path, f"a number, {x!r}", None)
    kind = f"{list(x.shape)} of {x.dtype}"
    if not compare_values:
        return Leaf(path, kind, None)
    if x.is_meta:
        return Leaf(path, f"{kind} on meta, without values", None)
    return Leaf(path, kind, digest(x))


def digest(x: torch.Tensor) -> tuple[int, ...]:
    """Two sums of the bits of a tensor: a plain one, and one weighted by the position of each element.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
    False
    """
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    # Bits, not values: NaN differs from itself, and 0.0 equals -0.0.
    words = x.contiguous().view(-1).view(_WORDS[x.itemsize])
    rest = words.numel() % _ROW
    sums = words[: words.numel() - rest].view(-1, _ROW).sum(0, dtype=torch.int64)
    sums[:rest] += words[words.numel() - rest :].to(torch.int64)
    # The factor is odd, so that every position counts.
    weights = torch.arange(1, _ROW + 1, device=x.device) * 0x9E3779B1
    return tuple(torch.stack([sums.sum(), (sums * weights).sum()]).tolist())


def different_leaf(
    mesh: DeviceMesh, axes: Sequence[Sequence[str]], by_rank: Mapping[int, Sequence[Any]]
) -> tuple[int, int, int] | None:
    """The first leaf that ranks which differ only along its axes describe differently, and two of these ranks.

    `by_rank` has the descriptions of all leaves, in the order of their `axes`.
    """
    names = mesh.mesh_dim_names or ()
    groups = {}  # by axes: most leaves have the same ones
    for different_axes in set(map(tuple, axes)):
        groups[different_axes] = groups_along(mesh.mesh, names, different_axes)
    for position, of_leaf in enumerate(axes):
        for first, *others in groups[tuple(of_leaf)]:
            for rank in others:
                if by_rank[rank][position] != by_rank[first][position]:
                    return position, first, rank
    return None


def _path_difference(by_rank: Mapping[int, Sequence[Leaf]]) -> str:
    """What an error says about the first rank whose leaves are other ones than those of the first rank; maybe empty."""
    (first, first_leaves), *others = by_rank.items()
    for rank, leaves in others:
        if [leaf.path for leaf in leaves] != [leaf.path for leaf in first_leaves]:
            return (
                f"  Rank {rank} has {len(leaves)} leaves and rank {first} has {len(first_leaves)}, or they "
                f"have other names.\nBuild the same model and optimizer on every rank. Of an optimizer that "
                f"divides its state over ranks itself, use its single-device class."
            )
    return ""


def _leaf_difference(there: Leaf, here: Leaf, first: int, rank: int) -> str:
    """What an error says about a leaf that is `there` on the first rank, and `here` on another one."""
    if there.kind != here.kind:
        return (
            f"  {here.path} is {there.kind} on rank {first} and {here.kind} on rank {rank}.\n"
            f"Build the same state on every rank, or let one rank's count: step.shard(state, source=0), where the "
            f"others hold tensors of the same shapes, which may be on meta."
        )
    return (
        f"  {here.path} has other values on rank {rank} than on rank {first}, so the ranks would train different "
        f"replicas.\nLet the values of rank 0 count, step.shard(state, source=0), or seed all ranks alike before the "
        f"model is built, and load the same checkpoint."
    )
