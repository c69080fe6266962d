"""shard: this rank's part of a value that is whole on every rank; nothing moves.

s = shard(x, dim, axis=dp)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import Eqn, Primitive, Split
from ..layout import cut
from .interface import Memberwise


class Shard(Memberwise):
    """Rules of shard: a view of the whole value, which differs from rank to rank."""

    def axis(self, eqn: Eqn) -> str:
        return eqn.kwargs["axis"]

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        split = Split(self.axis(eqn), eqn.args[1])
        return [cut(whole, split, len(terms), rank) for rank, whole in enumerate(terms)]

    def shares(self, eqn: Eqn) -> bool:
        return True


SHARD = Primitive("shard", Shard())
