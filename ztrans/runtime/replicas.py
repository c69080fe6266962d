"""Compare the leaves of a state between the ranks that must hold the same.

Ranks that initialised their model from different random numbers would train different replicas, or a mixture of
several models, and nothing would show it. So each rank sends a digest of its leaves, and all ranks compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..calling.leaf_records import RECORDS
from ..ir.axes import groups_along
from ..ir.printer import counted
from .agreement import agree
from .session import session_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # the number of positions that a digest distinguishes


class Leaf(NamedTuple):
    """A description of one leaf on one rank."""

    path: str
    kind: str
    values: tuple[int, ...] | None  # the digest; None if values are not compared


def agree_on_state(
    mesh: DeviceMesh,
    axes: Sequence[Sequence[str]],
    paths: Sequence[str],
    leaves: Sequence[Any],
    source: int | None,
) -> None:
    """Compare each leaf of a state between the ranks that differ only along the axes of that leaf.

    Along the other axes of the mesh, such as an axis of tensor parallelism, ranks may hold different leaves. With a
    `source`, only the values of this one rank are used, so values are not compared. Of DTensors, only the parts of
    replicas that have trained apart are compared.

    Raises: RuntimeError on every rank, naming the first leaf that differs.
    """
    descriptions = []
    for path, x, leaf_axes in zip(paths, leaves, axes):
        if isinstance(x, DTensor):
            # Compare parts along the axes of replicas alone. Along other axes, they are parts of one leaf.
            is_of_replicas = {*leaf_axes} <= {*RECORDS.of(x).independent}
            descriptions.append(_described_dtensor(path, x, is_of_replicas))
        else:
            descriptions.append(_described(path, x, source is None))

    def explain(by_rank: Mapping[int, Sequence[Leaf]]) -> str:
        text = _path_difference(by_rank)
        if text:
            return text
        different = different_leaf(mesh, axes, by_rank)
        if different is None:
            return ""
        position, first, rank = different
        return _leaf_difference(by_rank[first][position], by_rank[rank][position], first, rank)

    agree(session_of(mesh), "shard", descriptions, explain)


def _described_dtensor(path: str, x: DTensor, compare_values: bool) -> Leaf:
    values = digest(x.to_local()) if compare_values and not x.is_meta else None
    return Leaf(path, f"a DTensor {list(x.shape)} of {x.dtype}", values)


def _described(path: str, x: Any, compare_values: bool) -> Leaf:
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
    """The position of the first leaf that two ranks describe differently, and these ranks; None if all are equal.

    A leaf is compared between ranks that differ only along its axes.

    Args:
        mesh: the mesh of the ranks.
        axes: for each leaf, these axes.
        by_rank: for each rank, the descriptions of all leaves.
    """
    names = mesh.mesh_dim_names or ()
    groups = {}  # by axes: most leaves have the same ones
    for unique_axes in {tuple(leaf_axes) for leaf_axes in axes}:
        groups[unique_axes] = groups_along(mesh.mesh, names, unique_axes)
    for position, leaf_axes in enumerate(axes):
        for first, *others in groups[tuple(leaf_axes)]:
            for rank in others:
                if by_rank[rank][position] != by_rank[first][position]:
                    return position, first, rank
    return None


def _path_difference(by_rank: Mapping[int, Sequence[Leaf]]) -> str:
    """The text of an error about a rank whose leaves have other paths than on the first rank; empty if none has."""
    (first, first_leaves), *others = by_rank.items()
    for rank, leaves in others:
        if [leaf.path for leaf in leaves] != [leaf.path for leaf in first_leaves]:
            return (
                f"  Rank {rank} has {counted(len(leaves), 'leaf', 'leaves')} and rank {first} has {len(first_leaves)}, "
                f"or they have other names.\nBuild the same model and optimizer on every rank. If the optimizer "
                f"divides its state over ranks itself, use its single-device class."
            )
    return ""


def _leaf_difference(first_leaf: Leaf, leaf: Leaf, first: int, rank: int) -> str:
    """The text of an error about a leaf that differs between the ranks `first` and `rank`."""
    if first_leaf.kind != leaf.kind:
        return (
            f"  {leaf.path} is {first_leaf.kind} on rank {first} and {leaf.kind} on rank {rank}.\n"
            f"Build the same state on every rank, or let one rank's count: step.shard(state, source=0), where the "
            f"others hold tensors of the same shapes, which may be on meta."
        )
    text = f"  {leaf.path} has other values on rank {rank} than on rank {first}, "
    if leaf.kind.startswith("a DTensor"):
        return (
            f"{text}because replicas have trained apart (independent_axis), and this step has one model.\n"
            f"Average them in a step first: zt.pmean(p, axis)."
        )
    return (
        f"{text}so the ranks would train different replicas.\n"
        f"Let the values of rank 0 count, step.shard(state, source=0), or seed all ranks alike before the model is "
        f"built, and load the same checkpoint."
    )
