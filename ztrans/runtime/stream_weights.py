"""Gather weights one after the other, for another program, while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .named_weights import Weights, check_dtype
from .replicas import digest
from .whole_leaves import Leaf, Ranks, located, whole_leaves


def stream_weights(
    weights: Any,
    *,
    to: int | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 256 << 20,
    since: dict[str, Any] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over whole weights, each with its name. All ranks must call it, and iterate to the end.

    Weights are gathered in their order, and the next ones arrive while the caller uses one. The iterator keeps none of
    them. A tied weight comes once, by its first name. Finish the loop before the next step.

    Args:
        weights: tensors or DTensors by name, such as `zt.state_dict(model, state)` of a lifted loop, or a state without
            buffers: its `params`.
        to: the rank that gets the weights; the iterators of other ranks are empty, and send. By default, all ranks.
        dtype: the dtype of floats; by default their own. A shard is cast before it is sent.
        bucket_bytes: the bytes of weights that are on their way at the same time. One weight always is.
        since: a dict in which the iterator writes what it has sent, empty at first; pass it again to get only weights
            with other bits in `dtype` than those that were sent. Ranks compare two sums of the bits of each shard.

    Raises: TypeError for weights that are not tensors; ValueError for weights on meta, for a rank that the mesh does
        not have, or copies of a weight that differ; RuntimeError if the state is half updated, if not all ranks make
        the same call, or if weights change before they are sent.

    >>> sent: dict = {}
    >>> weights = {"w": torch.ones(2), "b": torch.zeros(1)}
    >>> [(name, x.dtype) for name, x in stream_weights(weights, dtype=torch.bfloat16, since=sent)]
    [('w', torch.bfloat16), ('b', torch.bfloat16)]
    >>> _ = weights["b"].add_(1)
    >>> list(stream_weights(weights, dtype=torch.bfloat16, since=sent))
    [('b', tensor([1.], dtype=torch.bfloat16))]
    """
    check_dtype(dtype, "stream_weights")
    named = Weights.of(weights, "stream_weights")
    named.agree("stream_weights", to, dtype, bucket_bytes, since is not None)
    session = named.session
    members = [0] if session is None else sorted(session.ranks)
    if to is not None and to not in members:
        raise ValueError(f"stream_weights: to={to} is not a rank of the mesh, which has {members}.")
    leaves = located(named.tensors, dtype, session, "stream_weights")
    digests: dict[str, Any] = {}
    if since is not None:
        digests = {
            leaf.name: (str(leaf.dtype), digest(leaf.part.to(leaf.dtype))) for leaf in leaves
        }
        mine = [since.get(leaf.name) != digests[leaf.name] for leaf in leaves]
        by_rank = [mine] if session is None else session.from_all(mine)
        leaves = [leaf for leaf, changed in zip(leaves, zip(*by_rank)) if any(changed)]
    ranks = Ranks.of(session)
    receivers = [0] if ranks.channel is None else list(range(len(ranks.hosts)))
    if to is not None and ranks.channel is not None:
        receivers = [members.index(to)]
    gathered = whole_leaves(leaves, [receivers] * len(leaves), ranks, bucket_bytes)
    versions = {leaf.name: leaf.part._version for leaf in leaves}

    def next_leaf() -> tuple[Leaf, torch.Tensor | None]:
        with session.leaving("stream_weights") if session is not None else contextlib.nullcontext():
            leaf, whole = next(gathered)
            if leaf.part._version != versions[leaf.name]:
                raise RuntimeError(
                    f"stream_weights: {leaf.name} has changed since the iterator was made, so the receiver may have "
                    f"parts from before and from after.\nFinish the loop before the next step."
                )
            return leaf, whole

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for left in reversed(range(len(leaves))):
            leaf, whole = next_leaf()
            if since is not None:
                since[leaf.name] = digests[leaf.name]
            if whole is None:
                continue
            held = [whole]
            del whole  # the next leaf may take its memory
            try:
                yield leaf.name, held.pop()
            except GeneratorExit:
                gathered.close()  # messages in progress would keep the connections
                if session is not None and left:
                    session.leave("has not iterated to the end of stream_weights")
                raise
        gathered.close()

    return stream()
