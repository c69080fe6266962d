"""Wire formats: how a collective sends the elements of its members.

`kwargs["dtype"]` of a collective is a dtype, a `Coded` format, or None for the dtype of the members. A format says how
values cross the wire, never what they are: a future keeps its type. `format_of` makes a dtype answer the same questions
as a format of codes: how many bytes a part has, how it is encoded and decoded, and what arrives of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import ops
from ..ops.cast_pack import reference as cast_pack
from .graph import DTYPES


class Shaped(NamedTuple):
    """The shape and dtype of a value that arrives."""

    shape: Sequence[int]
    dtype: torch.dtype


# What a receiver gets of a value that is sent as codes: arrived(value, parts, dim, bits, block, kind).
ARRIVED = torch.ops.ztrans.arrived.default
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

    @property
    def is_coded(self) -> bool:
        return True

    @property
    def carrier(self) -> torch.dtype:
        """The dtype of the elements of a message: bytes."""
        return torch.uint8

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of a sum whose parts are sent on."""
        return torch.float32

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes(self.block) / self.block

    def nbytes(self, elements: int) -> int:
        """The bytes of one part of so many elements: the codes of whole blocks, then their scales.

        >>> Coded(8, 256).nbytes(1000), Coded(4, 64).nbytes(65), Coded(8, 256).nbytes(0)
        (1040, 72, 0)
        """
        blocks = -(-elements // self.block)
        return blocks * (self.block * self.bits // 8 + 4)

    def arrived(self, part: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What arrives of one rank's part of a member, whose elements are sent in order."""
        dtype = dtype or self.sum_dtype
        codes = ops.encode(part.reshape(1, -1), self.bits, self.block, self.kind)
        values = ops.decode(codes, part.numel(), dtype, self.bits, self.block, self.kind)
        return values.view(part.shape)

    def pack(
        self, parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Encode members into the rows of a send buffer, in parts of so many elements each."""
        return ops.encode_pack(parts, sizes, self.bits, self.block, self.kind, ranks=ranks, out=out)

    def unpack(
        self, buffer: torch.Tensor, sizes: Sequence[int], outs: Sequence[Shaped]
    ) -> list[torch.Tensor]:
        """The whole values of gathered send buffers: those of all ranks, row by row."""
        values = []
        rows = buffer.split([self.nbytes(size) for size in sizes], 1)
        for codes, size, (shape, dtype) in zip(rows, sizes, outs, strict=True):
            values += ops.decode_unpack(
                codes, [size], [shape], dtype, self.bits, self.block, self.kind
            )
        return values

    def totals(
        self,
        terms: Sequence[torch.Tensor],
        sizes: Sequence[int],
        outs: Sequence[Shaped],
        reduction: str,
        count: int,
        memory: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """The sums or means of the rows of all ranks; these are decoded and added block by block."""
        totals = [terms[0].new_empty(shape, dtype=dtype) for shape, dtype in outs]
        ops.sum_coded(terms, totals, sizes, reduction, count, self.bits, self.block, self.kind)
        return totals


@dataclass(frozen=True)
class Uncoded:
    """A dtype as a format: elements are cast to it, and sent as they are.

    >>> wire = Uncoded(torch.bfloat16)
    >>> print(wire, wire.nbytes(3), wire.arrived(torch.tensor([1.001])).item())
    bf16 6 1.0
    """

    dtype: torch.dtype

    def __str__(self) -> str:
        return DTYPES.get(self.dtype, str(self.dtype))

    @property
    def is_coded(self) -> bool:
        return False

    @property
    def carrier(self) -> torch.dtype:
        return self.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def bytes_per_element(self) -> float:
        return self.dtype.itemsize

    def nbytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def arrived(self, part: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return part.to(self.dtype).to(dtype or self.sum_dtype)

    def pack(
        self, parts: Sequence[torch.Tensor], sizes: Sequence[int], ranks: int, out: torch.Tensor
    ) -> torch.Tensor:
        cast_pack(parts, sizes, ranks, out)
        return out

    def unpack(
        self, buffer: torch.Tensor, sizes: Sequence[int], outs: Sequence[Shaped]
    ) -> list[torch.Tensor]:
        values = ops.unpack(buffer, sizes, [out.shape for out in outs], len(buffer))
        return [value.to(out.dtype) for value, out in zip(values, outs)]

    def totals(
        self,
        terms: Sequence[torch.Tensor],
        sizes: Sequence[int],
        outs: Sequence[Shaped],
        reduction: str,
        count: int,
        memory: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """The totals of the rows of all ranks. They may overwrite `memory`, which is one of the first two rows."""
        totals = []
        offset = 0
        for size, (shape, dtype) in zip(sizes, outs, strict=True):
            span = slice(offset, offset + math.prod(shape))
            parts = [term[span] for term in terms]
            result = None if memory is None else memory[span]
            totals.append(ops.reduce(parts, reduction, dtype, result, count).view(shape))
            offset += size
        return totals


WireFormat = torch.dtype | Coded
Format = Uncoded | Coded


@functools.cache
def format_of(wire: WireFormat) -> Format:
    """A dtype or format of codes, as something that encodes and decodes.

    >>> print(format_of(torch.float16), format_of(Coded(8, 256)))
    f16 i8/256
    """
    return wire if isinstance(wire, Coded) else Uncoded(wire)
