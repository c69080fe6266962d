"""The rules that the starts of all collectives share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ..graph import Eqn
from .buffers import buffer_bytes, wire_dtype
from .interface import Memberwise


class Start(Memberwise):
    """Rules of an equation that starts a collective: its results are futures, and other ranks take part.

    `crossings` is how often a rank receives a whole value: once in a gather, twice in an all_reduce.
    """

    starts = True
    packs = True
    crossings: ClassVar[int] = 1

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        if eqn.provenance is None:
            return "a collective has no provenance"
        if eqn.provenance.axis not in axes:
            return "no such mesh axis"
        if len(eqn.outs) != len(eqn.ins):
            return "members and futures differ in number"
        if any(out is None or member.shape != out.shape for member, out in zip(eqn.ins, eqn.outs)):
            return "shapes differ"
        return None

    def axis(self, eqn: Eqn) -> str:
        return eqn.kwargs["axis"]

    def sent(self, eqn: Eqn, terms: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        dtype = eqn.kwargs["dtype"]
        return terms if dtype is None else [term.to(dtype) for term in terms]

    def shares_buffer(self, eqn: Eqn, index: int) -> bool:
        return wire_dtype(eqn, eqn.ins[index]) == eqn.results[index].dtype

    def wire_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        ranks = sizes[self.axis(eqn)]
        total = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
        return total * (ranks - 1) * self.crossings // ranks

    def sent_bytes(self, eqn: Eqn, sizes: Mapping[str, int]) -> int:
        packed = (k for k in range(len(eqn.outs)) if not self.sends_own(eqn, k, sizes))
        return sum(buffer_bytes(eqn, k, sizes) for k in packed)

    def received_bytes(self, eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
        return buffer_bytes(eqn, index, sizes)
