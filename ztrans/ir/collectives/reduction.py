"""reduce_scatter and all_reduce: reduce terms, of which each rank has one, to their sum, mean, maximum or minimum.

f, g = reduce_scatter([a, b], mean, axis=dp)    one term on each rank -> this rank's shard of the mean
f, g = all_reduce([a, b], mean, axis=dp)        one term on each rank -> the whole mean, on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ... import ops
from ..axes import members
from ..graph import Eqn, Primitive, Split, Var
from ..layout import cut, cut_over, without
from .buffers import HALF, buffer_bytes, is_alone, wire_dtype
from .start import Start


class Reduction(Start):
    """The rules that reduce_scatter and all_reduce share: the total of the terms is the same on every rank."""

    lane = "reduce"

    def varies(self, eqn: Eqn, over: Mapping[Var, frozenset[str]]) -> frozenset[str]:
        return super().varies(eqn, over) - {*members(self.axis(eqn))}

    def total(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum, mean, maximum or minimum of the terms, in the dtype of the result."""
        return ops.reduce(terms, eqn.kwargs["op"], eqn.results[index].dtype)

    def sends_own(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
        """A member is sent as it is if it has a message of its own and needs neither a cast nor padding."""
        member, ranks = eqn.ins[index], sizes[self.axis(eqn)]
        split = eqn.results[index].split
        even = split is None or (split.dim == 0 and member.shape[0] % ranks == 0)
        return even and wire_dtype(eqn, member) == member.dtype and is_alone(eqn, index, sizes)


class ReduceScatter(Reduction):
    """Rules of reduce_scatter. A rank receives its shard of the term of every other rank, and reduces these."""

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole, split = self.total(eqn, index, terms), cut_over(eqn.results[index], self.axis(eqn))
        # Cloned, because a view would keep the whole value alive.
        return [cut(whole, split, len(terms), rank).clone() for rank in range(len(terms))]

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        """NCCL would round half precision at every hop of a ring."""
        return gloo or (eqn.kwargs["op"] in ("sum", "mean") and wire_dtype(eqn, eqn.ins[0]) in HALF)

    def shares_buffer(self, eqn: Eqn, index: int) -> bool:
        return False  # the buffer holds the terms, and their sum is a new value

    def received_bytes(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
        ranks = sizes[self.axis(eqn)]
        return buffer_bytes(eqn, index, sizes) * (ranks - 1) // ranks


class AllReduce(Reduction):
    """Rules of all_reduce.

    Two ranks send each other their whole terms. Among more ranks, the total is computed in the send buffer, which is
    then the receive buffer too.
    """

    crossings = 2

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = self.total(eqn, index, terms)
        return [whole for _ in terms]

    def sends_own(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
        return sizes[self.axis(eqn)] == 2 and super().sends_own(eqn, index, sizes)

    def sent_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        return 0 if sizes[self.axis(eqn)] > 2 else super().sent_bytes(eqn, sizes)


REDUCE_SCATTER = Primitive("reduce_scatter", ReduceScatter())
ALL_REDUCE = Primitive("all_reduce", AllReduce())


def reduce(
    terms: Sequence[Var],
    names: Sequence[str],
    axis: str,
    op: str,
    to: Split | None,
    dtype=None,
    result=None,
    **eqn,
) -> Eqn:
    """Start the reduction of `terms` over `axis`: a reduce_scatter if `to` splits the result, else an all_reduce.

    The terms are sent in `dtype`, and the result has dtype `result`; both default to the dtype of the terms.
    """
    futures = (
        Var(
            f"{name}'",
            result or t.dtype,
            t.shape,
            (*without(t.layout, axis), *((to,) if to else ())),
            True,
        )
        for t, name in zip(terms, names)
    )
    start = REDUCE_SCATTER if to else ALL_REDUCE
    return Eqn(
        start, (list(terms),), tuple(futures), {"op": op, "dtype": dtype, "axis": axis}, **eqn
    )
