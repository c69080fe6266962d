"""Send gathered parameters as short codes.

Nothing computes on codes, so a program has no equations for them: a format of the wire is an option of a collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import rules, sent_in
from ..ir.graph import Eqn, Graph, Role
from ..ir.rewriter import Rewriter
from ..ir.wire_format import Coded
from .base import Transform, Where, check_where, chosen_leaves, constructor, matches_none


@constructor
def quantize_gathers(
    bits: Literal[8, 4, "auto"] = 8,
    block: int = 256,
    *,
    format: Literal["int", "fp8"] = "int",
    where: Where | None = None,
) -> Transform:
    """Gather parameters as codes of 8 or 4 bits: about half or a quarter of the bytes of bf16. This changes results.

    Each rank sends its part of a parameter in blocks of `block` elements, which share one fp32 scale, and every rank,
    the sender too, computes with what arrives. A gathered element errs by at most 1/254 (8 bits) or 1/14 (4 bits) of
    the largest magnitude in its block. The update reads the exact shards, so errors never add up. A block with a NaN or
    an infinity arrives as NaN. The gradient is that at the rounded parameters.

    Rewrites:
        f = all_gather([w], axis=dp)     -->     f = all_gather([w], i8/256, axis=dp)

    A gather stays as it is if it sends 8 bits or fewer for each element already, as with fp8 and `fuse_cast_gather`,
    or if codes in whole blocks would not make its message shorter. A gather that the step itself calls, as in tensor
    parallelism, stays too.

    Args:
        bits: the bits of a code: 8 or 4. With "auto", a plan sends codes of 8 bits if they make the step more than 1%
            faster, and else what is sent without this transform.
        block: the number of elements that share a scale; even.
        format: "int" for integers, or "fp8" for e4m3 floats of 8 bits, whose errors are about four times as large.
        where: the leaves to quantize, as a pattern for `fnmatch` of their paths, or as a function `where(path, leaf)`
            of the path and a meta tensor. By default, those with at least two dims.

    Raises: ValueError if there is no such format; TypeError if `where` is neither of these. When the step is lowered,
        ValueError if it is not sharded, or if `where` matches no leaf.

    Source: Wang et al., ZeRO++, 2023 (qwZ).

    >>> quantize_gathers(4, block=64)
    quantize_gathers(bits=4, block=64)
    """
    check_format("quantize_gathers", "bits", 8 if bits == "auto" else bits, block, format)
    if where is not None:
        check_where("quantize_gathers", where, "params.*.weight")
    return _QuantizeGathers(bits, block, format, where)


@dataclass(frozen=True)
class _QuantizeGathers(Transform):
    bits: Bits = 8
    block: int = 256
    format: str = "int"
    where: Where | None = None

    # After the transforms that decide what is gathered, and in which dtype.
    phase: ClassVar[float] = 3
    variants_change_bits: ClassVar[bool] = True

    @property
    def variants(self) -> tuple[Transform, ...]:
        return tuple(dataclasses.replace(self, bits=bits) for bits in bits_to_plan(self.bits))

    def rewrite(self, graph: Graph) -> Graph:
        paths = quantized_paths(self, graph, self.where)
        bits = chosen_bits(self, self.bits)
        if bits is None:
            return graph
        new = Rewriter(graph)
        for e in graph.eqns:
            if rules(e).lane == "gather" and serves(e, "param", paths):
                new.replace(e, sent_in(Coded(bits, self.block, self.format), e, graph.axes))
        return new.applied()


# The bits of codes; "auto" if a plan is to choose them, and None if it has chosen to send no codes.
Bits = int | Literal["auto"] | None


def bits_to_plan(bits: Bits) -> tuple[Bits, ...]:
    """What a plan chooses from. The first of the fastest is chosen, so it sends codes only where they are faster."""
    return (None, 8) if bits == "auto" else (bits,)


def chosen_bits(transform: Transform, bits: Bits) -> int | None:
    """The bits of codes, or None for no codes.

    Raises: ValueError if no plan has chosen them.
    """
    if bits == "auto":
        raise ValueError(
            f"{transform!r}: the bits are chosen by Step.lower. Name them to rewrite a program with it."
        )
    return bits


def check_format(name: str, option: str, bits: object, block: object, kind: object) -> None:
    """Check the options of a format of codes; `option` is the name of the one that has the bits.

    Raises: ValueError that names the valid values.
    """
    if bits not in (8, 4) or isinstance(bits, bool):
        raise ValueError(f"{name}: {option}={bits!r}; codes have 8 or 4 bits.")
    if not isinstance(block, int) or isinstance(block, bool) or block < 2 or block % 2:
        raise ValueError(f"{name}: block={block!r}; it is an even number of elements, such as 256.")
    if kind not in ("int", "fp8"):
        raise ValueError(f"{name}: format={kind!r}; use 'int' or 'fp8'.")
    if kind == "fp8" and bits != 8:
        raise ValueError(f"{name}: format='fp8' has 8 bits, not {bits}. Leave out one of the two.")


def quantized_paths(transform: Transform, graph: Graph, where: Where | None) -> set[str]:
    """The paths of the leaves whose messages a transform quantizes: by default those with at least two dims.

    Raises: ValueError if the program is not sharded, or if `where` matches no leaf.
    """
    if not graph.mesh:
        raise ValueError(
            f"{transform.name}: the program is not sharded, so it sends nothing.\n"
            f"Apply shard_params first: it must be the innermost decorator, or the first in zt.chain."
        )
    chosen = chosen_leaves(graph, _is_matrix if where is None else where)
    if where is not None and not chosen:
        raise matches_none(transform.name, where, graph.state)
    return {v.name for v in chosen}


def serves(start: Eqn, role: Role, paths: Set[str]) -> bool:
    """Whether a collective has this role, for some of these leaves alone."""
    provenance = start.provenance
    if provenance is None or provenance.role != role:
        return False
    return paths >= {*provenance.paths}


def _is_matrix(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim >= 2
