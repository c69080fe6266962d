"""Wire formats: how a collective sends the elements of its members.

`kwargs["dtype"]` of a collective is a dtype, a `Coded` format, or None for the dtype of the members. A format says how
values cross the wire, never what they are: a future keeps its type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_KINDS = {"int": (8, 4), "fp8": (8,)}  # the kinds of codes, with their bits


@dataclass(frozen=True)
class Coded:
    """A format of short codes, in blocks that share a scale: ZeRO++ (arXiv 2306.10209) sends weights and gradients so.

    A block belongs to one rank's part of one member, so its codes depend neither on buckets nor on the schedule.

    Attributes:
        bits: the bits of a code: 8 or 4.
        block: the number of elements that share one fp32 scale; even. The last block of a part is padded with zeros.
        kind: "int" for integers, or "fp8" for e4m3 floats of 8 bits.

    Raises: ValueError if there is no such format.

    >>> print(Coded(8, 256), Coded(4, 64), Coded(8, 256, "fp8"))
    i8/256 i4/64 e4m3/256
    """

    bits: int
    block: int
    kind: str = "int"

    def __post_init__(self) -> None:
        if self.bits not in _KINDS.get(self.kind, ()):
            raise ValueError(
                f"Coded: there are no codes of {self.bits} bits and kind {self.kind!r}.\n"
                f'Write 8 or 4 bits, or 8 bits with "fp8".'
            )
        if self.block < 2 or self.block % 2:
            raise ValueError(f"Coded: block is {self.block}; write an even number, such as 256.")

    def __str__(self) -> str:
        name = "e4m3" if self.kind == "fp8" else f"i{self.bits}"
        return f"{name}/{self.block}"

    def nbytes(self, elements: int) -> int:
        """The bytes of one part of so many elements: the codes of whole blocks, then their scales.

        >>> Coded(8, 256).nbytes(1000), Coded(4, 64).nbytes(65), Coded(8, 256).nbytes(0)
        (1040, 72, 0)
        """
        blocks = -(-elements // self.block)
        return blocks * (self.block * self.bits // 8 + 4)


WireFormat = torch.dtype | Coded
