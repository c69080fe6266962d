"""Compile the codec of wire formats with Inductor, for messages between CPUs.

On a CPU `ops.encode` and `ops.decode` run the operations of PyTorch. Compiled, they have the same bits in a quarter of
the time. A kernel takes any number of blocks, so a process needs one for each format and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ir.collectives import host_sum_format, is_start, rules, wire_format
from ...ir.graph import Graph
from ...ir.wire_format import Coded
from ...ops.decode import compiled as decoders
from ...ops.decode import decode_blocks
from ...ops.encode import compiled as encoders
from ...ops.encode import encode_blocks
from .compiler import Strided, fused, inner_callable


def compile_codec(graph: Graph) -> None:
    """Compile what encodes and decodes the messages of a program, unless this process has done so before."""
    for eqn in filter(is_start, graph.eqns):
        reduces = not rules(eqn).moves
        for member, value in zip(eqn.ins, eqn.results):
            sent = wire_format(eqn, member)
            if not isinstance(sent, Coded):
                continue
            compile_encode(sent, member.dtype)
            if not reduces:
                compile_decode(sent, value.dtype)
                continue
            for form in {sent, host_sum_format(eqn, member)}:  # sums are encoded again
                if isinstance(form, Coded):
                    compile_encode(form, torch.float32)
                    compile_decode(form, torch.float32)
                    compile_decode(form, torch.float32, add=True)
            if rules(eqn).halves(eqn) is not None:  # the total of an all_reduce is gathered
                compile_decode(sent, value.dtype)


def compile_encode(form: Coded, dtype: torch.dtype) -> None:
    """Compile what encodes tensors of a dtype."""

    def encode(x: torch.Tensor) -> list[torch.Tensor]:
        return [*encode_blocks(x, form.bits, form.kind)]

    key = form.bits, form.kind, form.block, dtype
    if key not in encoders:
        kernel = _kernel(encode, (dtype, form.block))
        encoders[key] = lambda x, bits, kind: kernel([x])


def compile_decode(form: Coded, dtype: torch.dtype, add: bool = False) -> None:
    """Compile what decodes to a dtype, or with `add` adds to values of it."""

    def decode(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        decode_blocks(codes, scale, form.bits, form.kind, out, add)
        return []

    codes = torch.int8, form.block * form.bits // 8
    key = form.bits, form.kind, form.block, dtype, add
    if key not in decoders:
        kernel = _kernel(decode, codes, (torch.float32, 1), (dtype, form.block))
        decoders[key] = lambda codes, scale, bits, kind, out: kernel([codes, scale, out])


def _kernel(function: Callable, *columns: tuple[torch.dtype, int]) -> Callable[[list], Any]:
    """A kernel of contiguous tensors with equally many rows, of any number, and these dtypes and columns."""
    cpu = torch.device("cpu")
    like = [Strided(dtype, (8, width), (width, 1), cpu) for dtype, width in columns]
    kernel = fused(function, like, any_rows=True)
    kernel(
        [layout.empty().zero_() for layout in like]
    )  # after its first call, it has the function inside
    return inner_callable(kernel)
