"""Send gathered parameters as short codes.

Nothing computes on codes, so a program has no equations for them: a format of the wire is an option of a collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..ir.collectives import all_gather, rules, sent_in, shard
from ..ir.collectives import wait as wait_for
from ..ir.graph import Eqn, Graph, Kept, Role, Var
from ..ir.layout import split_over
from ..ir.op_facts import CAST
from ..ir.pairing import pair
from ..ir.printer import first_names
from ..ir.rewriter import Rewriter
from ..ir.wire_format import Coded
from ..rewrites.neighbours import own_part
from .base import (
    Transform,
    Where,
    check_where,
    chosen_leaves,
    constructor,
    matches,
    matches_none,
)
from .ema import is_parameter

aten = torch.ops.aten


@constructor
def quantize_gathers(
    bits: Literal[8, 4, "auto"] = 8,
    block: int = 256,
    *,
    format: Literal["int", "fp8"] = "int",
    where: Where | None = None,
    of: Literal["weights", "differences"] = "weights",
    inside: str | None = None,
) -> Transform:
    """Gather parameters as codes of 8 or 4 bits: about half or a quarter of the bytes of bf16. This changes results.

    Each rank sends its part of a parameter in blocks of `block` elements, which share one fp32 scale, and every rank,
    the sender too, computes with what arrives. A gathered element errs by at most 1/254 (8 bits) or 1/14 (4 bits) of
    the largest magnitude in its block. The update reads the exact shards, so errors never add up. A block with a NaN or
    an infinity arrives as NaN. The gradient is that at the rounded parameters.

    Rewrites:
        f = all_gather([w], axis=dp)     -->     f = all_gather([w], i8/256, axis=dp)

    With `of="differences"` each rank keeps a whole reference of each parameter from step to step, and gathers only how
    far the parameter is from it now. The reference has what really arrived, so errors never add up: 4 bits of
    differences are ten times as exact as 8 bits of weights, for 4 more bytes a parameter on every rank. Forward and
    backward read the reference, which begins as a copy of the parameter (`step.init`).

    Rewrites:
        a = wait(all_gather([w]))        -->     a = add(r, wait(all_gather([sub(w, shard(r))], i4/256)))
        return w1                                return w1, a                                   # a is the next r

    With `inside="dp"`, the axis of the ranks of a host, these keep a reference `r` in parts: 4 bytes a parameter on
    each host. Each rank also keeps `own`, the part of it that belongs to its shard: 4 bytes a parameter on all hosts
    together. Codes go between hosts, and references in fp32 inside. The bits are those of whole references.

    Rewrites:
        a = wait(all_gather([w]))        -->     a = add(wait(all_gather([r], axis=dp)),
                                                         wait(all_gather([sub(w, own)], i4/256, axis=host*dp)))
                                                 r1 = clone(shard(a, axis=dp)); own1 = clone(shard(a, axis=host*dp))
        b = wait(all_gather([w]))                b = wait(all_gather([r1], axis=dp))            # in backward

    A gather stays as it is if it sends 8 bits or fewer for each element already, as with fp8 and `fuse_cast_gather`,
    or if codes in whole blocks would not make its message shorter. A gather that the step itself calls, as in tensor
    parallelism, stays too.

    Args:
        bits: the bits of a code: 8 or 4. With "auto", a plan sends codes of 8 bits for all leaves if they make the step
            more than 1% faster, and else what is sent without this transform.
        block: the number of elements that share a scale; even.
        format: "int" for integers, or "fp8" for e4m3 floats of 8 bits, whose errors are about four times as large.
        where: the leaves to quantize, as a pattern for `fnmatch` of their paths, or as a function `where(path, leaf)`
            of the path and a meta tensor. By default, those with at least two dims; of differences, only those at
            "params", as a lifted state has them.
        of: "weights", or "differences" of the parameters from a reference; at stage 3 only with `inside`.
        inside: of differences, the mesh axis over which a reference is kept in parts, such as "dp" of
            `shard_params(mesh, axis=("host", "dp"))`. By default each rank keeps it whole.

    Raises: ValueError if there is no such format, or if `inside` is given without differences; TypeError if `where` is
        neither of these. When the step starts or is lowered, ValueError if it is not sharded, if `where` matches no
        leaf, if parameters are not cut over `inside` and another axis, or for whole references at stage 3.

    Source: Wang et al., ZeRO++, 2023 (qwZ); of differences, Jia et al., SDP4Bit, 2024.

    >>> quantize_gathers(4, block=64)
    quantize_gathers(bits=4, block=64)
    """
    check_format("quantize_gathers", "bits", 8 if bits == "auto" else bits, block, format)
    if where is not None:
        check_where("quantize_gathers", where, "params.*.weight")
    if of not in ("weights", "differences"):
        raise ValueError(f"quantize_gathers: of={of!r}; use 'weights' or 'differences'.")
    if of == "differences" and bits == "auto":
        raise ValueError("quantize_gathers: of='differences' takes 8 or 4 bits, not 'auto'.")
    if of == "weights" and inside is not None:
        raise ValueError(
            f"quantize_gathers: inside={inside!r} says where references of differences are kept.\n"
            f"Add of='differences', or leave it out."
        )
    return _QuantizeGathers(bits, block, format, where, of, inside)


@dataclass(frozen=True)
class _QuantizeGathers(Transform):
    bits: Bits = 8
    block: int = 256
    format: str = "int"
    where: Where | None = None
    of: str = "weights"
    inside: str | None = None

    # After the transforms that decide what is gathered, and in which dtype, and before leaves move to the host.
    phase: ClassVar[float] = 2.5
    variants_change_bits: ClassVar[bool] = True

    @property
    def variants(self) -> tuple[Transform, ...]:
        if self.bits != "auto":
            return (self,)
        return tuple(dataclasses.replace(self, bits=bits) for bits in (None, 8))

    def keeps(self, leaves: Mapping[str, torch.Tensor]) -> Sequence[Kept]:
        if self.of == "weights":
            return ()
        paths = kept_parameters(self, leaves, self.where)
        if self.inside is None:
            return [Kept(path, like=path, start="copy", layout="whole") for path in paths]
        parts = [Kept(path, like=path, start="copy", axis=self.inside) for path in paths]
        return [*parts, *(Kept(f"own.{path}", like=path, start="copy") for path in paths)]

    def rewrite(self, graph: Graph) -> Graph:
        bits = chosen_bits(self, self.bits)
        if bits is None:
            return graph
        wire = Coded(bits, self.block, self.format)
        paths = quantized_paths(self, graph, self.where)
        references = graph.kept_by(self.name)
        if references and graph.zero_stage == 3 and self.inside is None:
            raise ValueError(
                "quantize_gathers: of='differences' keeps a whole reference of each parameter on every rank, and at "
                "stage 3 a rank need not have room for all parameters.\n"
                "1. Let the ranks of a host keep it in parts: zt.make_mesh(device, host=-1, dp=8), "
                "shard_params(mesh, axis=('host', 'dp')), and quantize_gathers(..., of='differences', inside='dp').\n"
                "2. Use shard_params(stage=2).\n"
                "3. Gather codes of the parameters, without of='differences'."
            )
        new = Rewriter(graph)
        following: dict[Var, Var] = {}  # the next reference of each parameter
        for start, started in pair(graph).starts.items():
            if rules(start).lane != "gather" or not serves(start, "param", paths):
                continue
            if self.of == "weights":
                new.replace(start, sent_in(wire, start, graph.axes))
                continue
            parameter, wait = start.ins[0], graph.eqns[started.first_wait]
            if parameter in following and start.provenance and start.provenance.regather:
                _gather_again(new, start, wait, following[parameter])
            elif parameter.name in references:
                own = references.get(f"own.{parameter.name}")
                reference = references[parameter.name]
                arrived = _gather_difference(new, wire, start, wait, reference, own)
                if arrived is not None:
                    following[parameter] = arrived
        return new.applied()


def _gather_difference(
    new: Rewriter, wire: Coded, start: Eqn, wait: Eqn, reference: Var, own: Var | None
) -> Var | None:
    """Gather the difference of a parameter from its reference, to which every rank adds what arrives.

    Args:
        new: the edits.
        wire: the format of the codes.
        start, wait: the gather of the parameter.
        reference: the reference, whole on every rank or in parts inside a host.
        own: the part of the reference that belongs to this rank's shard; None to cut it from the whole reference.

    Returns: The next reference; None if codes would not be shorter, and the gather stays.
    """
    (parameter,) = start.ins
    split = split_over(parameter, start.kwargs["axis"])
    before: list[Eqn] = []
    if own is None:
        name = new.fresh_name(f"{reference.name}.shard")
        before.append(shard(reference, name, split.axis, split.dim).like(start))
    difference = new.fresh(parameter, ".difference", dtype=reference.dtype)
    operands = parameter, own or before[0].out
    before.append(Eqn(aten.sub.Tensor, operands, (difference,)).like(start))
    name = new.fresh_name(f"{difference.name}.full")
    options = {"provenance": start.provenance, "hint": start.hint}
    wide = all_gather([difference], [name], split.axis, **options).like(start)
    coded = sent_in(wire, wide, new.graph.axes)
    if coded is wide:
        return None
    # At the start of the step, so that the gather may start as early as that of the parameter.
    new.insert_before(new.graph.eqns[0], *before)

    starts, eqns, whole = [coded], [wait_for(coded.out)], reference
    if reference.layout:
        full = new.fresh(reference, ".full", layout=())
        future = dataclasses.replace(full, name=f"{full.name}'", future=True)
        wide = start.replace(kwargs={**start.kwargs, "dtype": None}, outs=(future,))
        starts.append(_among_holders(reference, wide))
        eqns.append(wait_for(future))
        whole = eqns[-1].out
    following = value = new.fresh(reference, ".next", layout=())
    eqns.append(Eqn(aten.add.Tensor, (whole, eqns[0].out), (following,)))
    if wait.out.dtype != following.dtype:
        value = new.fresh(wait.out)
        eqns.append(Eqn(CAST, (following,), (value,), {"dtype": value.dtype}))
    new_leaves = {reference: following}
    for leaf in (reference, own):
        if leaf is not None and leaf.split is not None:
            part = own_part(following, leaf.split, new.fresh_name(f"{leaf.name}.new"))
            eqns += part
            new_leaves[leaf] = part[-1].out
    new.replace(start, *starts)
    new.replace(wait, *(e.like(wait) for e in eqns))
    new.alias(wait.out, value)
    for leaf, new_leaf in new_leaves.items():
        new.set_leaf(leaf, new_leaf)
    return new_leaves[reference]


def _among_holders(reference: Var, start: Eqn) -> Eqn:
    """The gather of a reference from the ranks that hold its parts, in place of that of its parameter."""
    (split,) = reference.layout
    provenance = start.provenance and dataclasses.replace(
        start.provenance, axis=split.axis, regather=start.provenance.regather and "always"
    )
    kwargs = {**start.kwargs, "axis": split.axis}
    return start.replace(args=([reference],), kwargs=kwargs, provenance=provenance)


def _gather_again(new: Rewriter, start: Eqn, wait: Eqn, reference: Var) -> None:
    """Gather the next reference in backward instead of its parameter; a rank that has it whole reads it."""
    if reference.layout:
        new.replace(start, _among_holders(reference, start))
        return
    new.drop(start)
    value = new.fresh(wait.out)
    new.replace(wait, Eqn(CAST, (reference,), (value,), {"dtype": value.dtype}).like(wait))
    new.alias(wait.out, value)


# The bits of codes; "auto" if a plan is to choose them, and None if it has chosen to send no codes.
Bits = int | Literal["auto"] | None


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


def kept_parameters(
    transform: Transform, leaves: Mapping[str, torch.Tensor], where: Where | None
) -> list[str]:
    """The paths of the parameters for each of which a transform keeps a leaf: by default the matrices at "params".

    In a state that has "params", `where` chooses among them: a moment that it matches is never gathered or reduced.

    Raises: ValueError if there are none.
    """
    candidates = [path for path in leaves if is_parameter(path)]
    if where is not None and not candidates:
        candidates = [*leaves]
    chosen = _is_matrix if where is None else where
    paths = [path for path in candidates if matches(chosen, path, leaves[path])]
    if not paths:
        which = "matrices at 'params'" if where is None else f"leaves where {where!r}"
        raise ValueError(
            f"{transform!r}: it keeps a leaf for each parameter, and the state has no {which}. It has "
            f"{first_names([*leaves])}.\nName the parameters, such as where='weights.*'."
        )
    return paths


def serves(start: Eqn, role: Role, paths: Set[str]) -> bool:
    """Whether a collective has this role, for some of these leaves alone."""
    provenance = start.provenance
    return provenance is not None and provenance.role == role and paths >= {*provenance.paths}


def _is_matrix(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim >= 2
