"""all_gather: every rank's shard of a value becomes the whole value, on every rank.

f, g = all_gather([a, b], dtype, axis=dp)       shards -> whole values, cast to dtype before they are sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..graph import Eqn, Primitive, Var
from ..layout import cut_over, without
from .buffers import DIRECT, buffer_bytes, is_alone
from .start import Start


class Gather(Start):
    """Rules of all_gather.

    A rank copies its part into the buffer of the whole value, and sends it from there. It needs a send buffer only for
    members that are packed together.
    """

    moves = True
    lane = "gather"

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(list(terms), cut_over(eqn.ins[index], self.axis(eqn)).dim)
        return [whole for _ in terms]

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        return gloo and ranks <= DIRECT

    def sent_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        return self.unpacked_bytes(eqn, sizes) // sizes[self.axis(eqn)]

    def unpacked_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        return sum(
            buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)) if not is_alone(eqn, k, sizes)
        )


ALL_GATHER = Primitive("all_gather", Gather())


def all_gather(shards: Sequence[Var], names: Sequence[str], axis: str, **eqn) -> Eqn:
    """Start a gather of `shards`, each of which is split over `axis`."""
    futures = (
        Var(f"{name}'", s.dtype, s.shape, without(s.layout, axis), True)
        for s, name in zip(shards, names)
    )
    return Eqn(ALL_GATHER, (list(shards),), tuple(futures), {"dtype": None, "axis": axis}, **eqn)
