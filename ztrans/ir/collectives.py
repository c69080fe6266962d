"""Collectives as equations over lists, and the rules of every equation.

    f, g = all_gather([a, b], dtype, axis=dp)          shards -> whole values, sent as dtype: bf16, or i8/256
    f, g = reduce_scatter([a, b], mean, axis=dp)       one term on each rank -> this rank's shard of the mean
    f, g = all_reduce([a, b], mean, axis=dp)           one term on each rank -> the mean, on every rank
    f, g = all_to_all([a, b], axis=dp)                 shards along one dim -> shards along another
    x    = wait(f)                                     a future -> its value
    s    = shard(x, dim, axis=dp)                      a whole value -> this rank's part; nothing moves
    r    = row(v, axis=dp)                             a value with one row for each rank -> this rank's row
    v    = rows(r, axis=dp)                            a row on each rank -> a value with one row for each

A list is a bucket. The operation itself packs, casts and unpacks its members; a program has no equations for that. Each
collective has a class here with all of its rules. `rules(eqn)` returns the rules of any equation, collective or not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import ops
from ..ops import HALF
from .axes import members
from .copies import is_copy, other_memory
from .graph import (
    DTYPES,
    Eqn,
    Layout,
    Partial,
    Primitive,
    Split,
    Var,
    value_of_future,
)
from .layout import bytes_on_first_rank, chunk, cut, local_shape, on_axis, split_over, without
from .rules import (
    ALL_GATHER_KIND,
    ALL_REDUCE_KIND,
    ALL_TO_ALL_KIND,
    REDUCE_SCATTER_KIND,
    Axes,
    Kind,
    Memberwise,
    Rules,
    Sizes,
    Wait,
)
from .user_collectives import user_rules
from .wire_format import Coded, Format, Uncoded, WireFormat, format_of

# The most ranks of a gather over gloo that send their parts to all others. Among more, gloo's own gather needs fewer
# messages.
MOST_RANKS_OF_EXCHANGE = 8
# A member with at least this many bytes on each rank has a message of its own. Smaller members are packed together.
LARGE_MEMBER = 1 << 16


def wire_format(eqn: Eqn, member: Var) -> Format:
    """How a member is sent."""
    return format_of(eqn.kwargs.get("dtype") or member.dtype)


def host_sum_format(eqn: Eqn, member: Var) -> Format:
    """How a host sends its sums to others: as the equation sends its terms, unless it says another format `between`.

    Sums of half precision are sent in fp32, unless the equation sets a dtype.
    """
    between = eqn.kwargs.get("between")
    if between is not None:
        return format_of(between)
    wire = wire_format(eqn, member)
    is_chosen = eqn.kwargs.get("dtype") is not None
    is_sum = eqn.kwargs["op"] in ("sum", "mean")
    is_widened = is_sum and wire.carrier in HALF and not is_chosen
    return format_of(torch.float32) if is_widened else wire


def is_reduced_by_ranks(reduction: str, wire: Format) -> bool:
    """Whether ranks exchange the terms and reduce them themselves, because gloo and NCCL are less accurate.

    Both round a sum of half precision at every hop, and a mean of fp16 overflows before it is divided. Their maximum
    and minimum of floats lose a NaN: NCCL computes `fmax`, and gloo compares. Neither adds codes.
    """
    if reduction in ("sum", "mean"):
        return wire.is_coded or wire.carrier in HALF
    return wire.carrier.is_floating_point


def buffer_bytes(eqn: Eqn, index: int, sizes: Sizes) -> int:
    """The bytes of a member on the wire: the padded parts of all ranks together."""
    elements, parts = part_sizes(eqn, index, sizes)
    return wire_format(eqn, eqn.ins[index]).nbytes(elements) * parts


def part_sizes(eqn: Eqn, index: int, sizes: Sizes) -> tuple[int, int]:
    """The elements of a padded part of a member, and the number of its parts on the wire."""
    member, ranks = eqn.ins[index], sizes[eqn.kwargs["axis"]]
    axis_of_dim: dict[int, str] = {}
    for split in (*member.layout, *eqn.results[index].layout):
        if isinstance(split, Split):
            axis_of_dim[split.dim] = split.axis

    elements, parts = 1, 1
    for dim, rows in enumerate(member.shape):
        axis = axis_of_dim.get(dim)
        elements *= rows if axis is None else chunk(rows, sizes[axis])
        # The buffer has the parts of all ranks along the axis of the collective, and only this rank's along others.
        if axis == eqn.kwargs["axis"]:
            parts *= ranks
    if parts == 1 and wire_format(eqn, member).is_coded:  # an all_reduce: each rank sums a part
        return chunk(elements, ranks), ranks
    return elements, parts


def sent_in(wire: Coded, start: Eqn, sizes: Sizes) -> Eqn:
    """A start that sends its members in a format of codes, or the start itself if that has no shorter messages.

    Whole blocks may be longer than a short member. Only floats of at most 32 bits become codes, and on one rank none.

    >>> w = Var("w", torch.float32, (32, 16), (Split("dp"),))
    >>> start = all_gather([w], ["w.full"], "dp")
    >>> sent_in(Coded(8, 64), start, {"dp": 2}).kwargs["dtype"], sent_in(Coded(8, 64), start, {"dp": 64}) is start
    (Coded(bits=8, block=64, kind='int'), True)
    """
    are_floats = all(v.dtype in _CODED for v in (*start.ins, *start.results))
    if not are_floats or sizes[start.kwargs["axis"]] == 1:
        return start
    coded = start.replace(kwargs={**start.kwargs, "dtype": wire})
    members = range(len(start.ins))
    before, after = (sum(buffer_bytes(e, k, sizes) for k in members) for e in (start, coded))
    return coded if after < before else start


def is_small(eqn: Eqn, index: int, sizes: Sizes) -> bool:
    """Whether a collective packs a member with the other small members of its bucket.

    Codes are written to a buffer in any case, so all members share it.
    """
    if wire_format(eqn, eqn.ins[index]).is_coded:
        return True
    return buffer_bytes(eqn, index, sizes) < LARGE_MEMBER * sizes[eqn.kwargs["axis"]]


def is_sent_alone(eqn: Eqn, index: int, sizes: Sizes) -> bool:
    """Whether a collective sends a member in a message of its own, instead of packing it with others.

    A large member is sent alone because a copy would cost more than a message. A single small member is sent alone
    because there is nothing to pack it with.
    """
    if not is_small(eqn, index, sizes):
        return True
    # `any` ends at the first other small member, so asking this for every member of a bucket takes linear time.
    return not any(k != index and is_small(eqn, k, sizes) for k in range(len(eqn.outs)))


class Start(Memberwise):
    """Rules of an equation that starts a collective: its results are futures, and other ranks take part."""

    starts = True
    packs = True

    def example(self, axis: str, elements: int) -> Eqn:
        """A collective of one vector, which `calibrate` measures."""
        raise NotImplementedError

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        if eqn.provenance is None:
            return "a collective has no provenance"
        if eqn.provenance.axis not in axes or self.axis(eqn) not in axes:
            return "no such mesh axis"
        if len(eqn.outs) != len(eqn.ins):
            return "members and futures differ in number"
        for index, (member, out) in enumerate(zip(eqn.ins, eqn.outs)):
            if out is None or member.shape != out.shape:
                return "shapes differ"
            if not out.future:
                return f"{out} is not a future, but a collective starts it"
            if not _may_become(member.dtype, out.dtype):
                return f"{member!r} becomes {out!r}: only floats and complex values may change their dtype"
            if wire_format(eqn, member).is_coded and {member.dtype, out.dtype} - {*_CODED}:
                return f"{member!r} cannot be sent as {eqn.kwargs['dtype']}: only f32, bf16 and f16 become codes"
            layout = self.result_layout(eqn, index)
            if frozenset(out.layout) != frozenset(layout):
                expected = dataclasses.replace(out, layout=layout)
                return f"{member!r} gives {expected!r}, not {out!r}"
        return None

    def result_layout(self, eqn: Eqn, index: int) -> Layout:
        """The layout that a result has according to its member."""
        return without(eqn.ins[index].layout, self.axis(eqn))

    def axis(self, eqn: Eqn) -> str:
        return eqn.kwargs["axis"]

    def as_sent(self, eqn: Eqn, index: int, term: torch.Tensor, ranks: int) -> torch.Tensor:
        return term.to(wire_format(eqn, eqn.ins[index]).carrier)

    def stays_in_buffer(self, eqn: Eqn, index: int) -> bool:
        return wire_format(eqn, eqn.ins[index]) == Uncoded(eqn.results[index].dtype)

    def wire_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        ranks = sizes[self.axis(eqn)]
        total = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
        # A rank has its own part already.
        return total * (ranks - 1) * self.kind.crossings // ranks

    def sent_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        total = 0
        for k in range(len(eqn.outs)):
            if not self.sends_without_copy(eqn, k, sizes):
                total += buffer_bytes(eqn, k, sizes)
        return total

    def received_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        return buffer_bytes(eqn, index, sizes)

    def value_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        if self.stays_in_buffer(eqn, index):
            return self.received_bytes(eqn, index, sizes)
        return bytes_on_first_rank(eqn.results[index], sizes)


class Gather(Start):
    """Rules of all_gather.

    A rank copies its part into the buffer of the whole value and sends it from there. Only members that are packed
    together need a send buffer. Codes are decoded at the wait.
    """

    moves = True
    lane = "gather"
    kind = ALL_GATHER_KIND
    unpacking_per_byte = 2

    def example(self, axis: str, elements: int) -> Eqn:
        return all_gather([_vector(elements, Split(axis))], ["y"], axis)

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        axis = self.axis(eqn)
        for member in eqn.ins:
            if not isinstance(on_axis(member.layout, axis), Split):
                return f"a gather over {axis} sends {member!r}, which is not cut over it"
        return super().problem(eqn, axes)

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        split = split_over(eqn.ins[index], self.axis(eqn))
        return [torch.cat(list(terms), split.dim)] * len(terms)

    def as_sent(self, eqn: Eqn, index: int, term: torch.Tensor, ranks: int) -> torch.Tensor:
        wire = wire_format(eqn, eqn.ins[index])
        dim = split_over(eqn.ins[index], self.axis(eqn)).dim
        return _arrived_rows(wire, term, dim, eqn.results[index].dtype)

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        return gloo and ranks <= MOST_RANKS_OF_EXCHANGE

    def sent_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        return self.unpacked_bytes(eqn, sizes) // sizes[self.axis(eqn)]

    def unpacked_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        small = [k for k in range(len(eqn.outs)) if is_small(eqn, k, sizes)]
        is_alone = len(small) == 1 and not wire_format(eqn, eqn.ins[small[0]]).is_coded
        if is_alone:  # it is received where its value stays
            return 0
        return sum(buffer_bytes(eqn, k, sizes) for k in small)

    def unpacking_traffic(self, eqn: Eqn, sizes: Sizes) -> int:
        """The members that are packed together are copied out of their buffer."""
        return self.decoding(eqn, sizes) or 2 * self.unpacked_bytes(eqn, sizes)

    def encoding(self, eqn: Eqn, sizes: Sizes) -> int:
        return _coding(eqn, eqn.ins, sizes, 1 / sizes[self.axis(eqn)])

    def decoding(self, eqn: Eqn, sizes: Sizes) -> int:
        return _coding(eqn, eqn.results, sizes)


class Reduction(Start):
    """Rules of both reduce_scatter and all_reduce: every rank computes the same total of the terms."""

    lane = "reduce"

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        for member in eqn.ins:
            placement = on_axis(member.layout, self.axis(eqn))
            if isinstance(placement, Split):
                return f"a reduction over {self.axis(eqn)} adds up {member!r}, which is cut over it"
        is_coded = isinstance(eqn.kwargs.get("dtype"), Coded)
        if is_coded and eqn.kwargs["op"] not in ("sum", "mean"):
            return f"a {eqn.kwargs['op']} is sent as {eqn.kwargs['dtype']}, but only a sum or mean may be"
        if eqn.kwargs.get("between") is not None and not is_coded:
            return "it has a format `between` hosts, but its terms are not sent as codes"
        return super().problem(eqn, axes)

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        return super().varies(eqn, axes_of) - {*members(self.axis(eqn))}

    def is_reduced_by_ranks(self, eqn: Eqn) -> bool:
        return is_reduced_by_ranks(eqn.kwargs["op"], wire_format(eqn, eqn.ins[0]))

    def total(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum, mean, maximum or minimum of the terms, in the dtype of the result."""
        return ops.reduce(terms, eqn.kwargs["op"], eqn.results[index].dtype)

    def sends_without_copy(self, eqn: Eqn, index: int, sizes: Sizes) -> bool:
        """Whether a member has a message of its own, and needs neither a cast nor padding."""
        member = eqn.ins[index]
        if wire_format(eqn, member) != Uncoded(member.dtype):
            return False
        split = eqn.results[index].split
        if split is not None:
            # The rows for one rank are contiguous only along dim 0.
            ranks = sizes[self.axis(eqn)]
            if split.dim != 0 or member.shape[0] % ranks != 0:
                return False
        return is_sent_alone(eqn, index, sizes)


class ReduceScatter(Reduction):
    """Rules of reduce_scatter. A rank receives its shard of every other rank's term, and reduces these shards."""

    kind = REDUCE_SCATTER_KIND
    unpacking_per_byte = 1

    def example(self, axis: str, elements: int) -> Eqn:
        return reduce([_vector(elements, Partial(axis, "sum"))], ["y"], axis, "sum", Split(axis))

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        total = self.total(eqn, index, terms)
        split = split_over(eqn.results[index], self.axis(eqn))
        # A view would keep the whole total alive.
        return [cut(total, split, len(terms), rank).clone() for rank in range(len(terms))]

    def as_sent(self, eqn: Eqn, index: int, term: torch.Tensor, ranks: int) -> torch.Tensor:
        wire = wire_format(eqn, eqn.ins[index])
        if not wire.is_coded:
            return wire.arrived(term)
        split = split_over(eqn.results[index], self.axis(eqn))
        parts = [cut(term, split, ranks, rank) for rank in range(ranks)]
        return torch.cat([_arrived_rows(wire, part, split.dim) for part in parts], split.dim)

    def result_layout(self, eqn: Eqn, index: int) -> Layout:
        """The layout of its member, and a split over the axis along the dim of the equation's result."""
        layout = super().result_layout(eqn, index)
        split = on_axis(eqn.results[index].layout, self.axis(eqn))
        if not isinstance(split, Split):
            split = Split(self.axis(eqn), 0)
        return (*layout, split)

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        return gloo or self.is_reduced_by_ranks(eqn)

    def stays_in_buffer(self, eqn: Eqn, index: int) -> bool:
        return False  # the buffer holds the terms, and their total is a new value

    def received_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        ranks = sizes[self.axis(eqn)]
        return buffer_bytes(eqn, index, sizes) * (ranks - 1) // ranks

    def unpacking_traffic(self, eqn: Eqn, sizes: Sizes) -> int:
        """The terms of all ranks are read, and their sums are written."""
        terms = sum(bytes_on_first_rank(v, sizes) for v in (*eqn.ins, *eqn.results))
        return self.decoding(eqn, sizes) or terms

    def encoding(self, eqn: Eqn, sizes: Sizes) -> int:
        return _coding(eqn, eqn.ins, sizes)

    def decoding(self, eqn: Eqn, sizes: Sizes) -> int:
        return _coding(eqn, eqn.results, sizes)


class AllReduce(Reduction):
    """Rules of all_reduce.

    Two ranks send each other their whole terms. Among more ranks, the backend computes the total in the send buffer,
    which is then the receive buffer too. Ranks that reduce the terms themselves (see `is_reduced_by_ranks`) send a
    reduce_scatter and then a gather of the parts, as terms are sent: as many bytes, and one more buffer. The whole
    terms of a short message are exchanged (see `routes`), but it is charged like a long one. Codes never are: a block
    belongs to a part.
    """

    kind = ALL_REDUCE_KIND

    def example(self, axis: str, elements: int) -> Eqn:
        return reduce([_vector(elements, Partial(axis, "sum"))], ["y"], axis, "sum", None)

    def total(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The total of the terms, whose parts are gathered in the format of the wire."""
        wire = wire_format(eqn, eqn.ins[index])
        total = ops.reduce(terms, eqn.kwargs["op"], wire.sum_dtype)
        return _arrived_parts(wire, total, len(terms), eqn.results[index].dtype)

    def as_sent(self, eqn: Eqn, index: int, term: torch.Tensor, ranks: int) -> torch.Tensor:
        return _arrived_parts(wire_format(eqn, eqn.ins[index]), term, ranks)

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        return self.is_reduced_by_ranks(eqn)

    def halves(self, eqn: Eqn) -> tuple[Eqn, Eqn] | None:
        if not self.is_reduced_by_ranks(eqn):
            return None
        gather_kwargs = {"dtype": eqn.kwargs["dtype"], "axis": self.axis(eqn)}
        scatter = eqn.replace(op=REDUCE_SCATTER)
        return scatter, eqn.replace(op=ALL_GATHER, kwargs=gather_kwargs)

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.total(eqn, index, terms)] * len(terms)

    def sends_without_copy(self, eqn: Eqn, index: int, sizes: Sizes) -> bool:
        return sizes[self.axis(eqn)] == 2 and super().sends_without_copy(eqn, index, sizes)

    def sent_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        is_in_place = sizes[self.axis(eqn)] > 2 and not self.is_reduced_by_ranks(eqn)
        return 0 if is_in_place else super().sent_bytes(eqn, sizes)

    def encoding(self, eqn: Eqn, sizes: Sizes) -> int:
        """The terms are encoded, and then this rank's part of the total."""
        return _coding(eqn, eqn.ins, sizes) + _coding(eqn, (), sizes, 1 / sizes[self.axis(eqn)])

    def decoding(self, eqn: Eqn, sizes: Sizes) -> int:
        """The terms of this rank's part are decoded, and then the parts of the total."""
        return _coding(eqn, (), sizes) + _coding(eqn, eqn.results, sizes)

    def unpacking_traffic(self, eqn: Eqn, sizes: Sizes) -> int:
        return self.decoding(eqn, sizes)


class AllToAll(Start):
    """Rules of all_to_all. Each rank sends every other rank the block that is in its own part and in the other's.

    A rank holds 1/n of a value before and after, so it receives 1/n of what a gather brings it.
    """

    moves = True
    lane = "reduce"
    kind = ALL_TO_ALL_KIND
    unpacking_per_byte = 2

    def example(self, axis: str, elements: int) -> Eqn:
        # Padded to one column for each rank, so that a rank holds as many elements as its part of a gather has.
        member = Var("x", torch.float32, (elements, 1), (Split(axis),))
        return all_to_all([member], ["y"], axis, 1)

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        axis = self.axis(eqn)
        if isinstance(eqn.kwargs["dtype"], Coded):
            return f"an all_to_all sends no codes, such as {eqn.kwargs['dtype']}"
        for member, out in zip(eqn.ins, eqn.results):
            cuts = on_axis(member.layout, axis), on_axis(out.layout, axis)
            if not all(isinstance(cut, Split) for cut in cuts) or cuts[0] == cuts[1]:
                return (
                    f"an all_to_all over {axis} cuts {member!r} along another dim, not to {out!r}"
                )
        return super().problem(eqn, axes)

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        axis = self.axis(eqn)
        whole = torch.cat(list(terms), split_over(eqn.ins[index], axis).dim)
        to = split_over(eqn.results[index], axis)
        # A view would keep the whole value alive.
        return [cut(whole, to, len(terms), rank).clone() for rank in range(len(terms))]

    def result_layout(self, eqn: Eqn, index: int) -> Layout:
        to = split_over(eqn.results[index], self.axis(eqn))
        return (*super().result_layout(eqn, index), to)

    def is_exchanged(self, eqn: Eqn, ranks: int, gloo: bool) -> bool:
        return True

    def stays_in_buffer(self, eqn: Eqn, index: int) -> bool:
        return False  # several blocks are copied into one value, unless each is one row

    def wire_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        return super().wire_bytes(eqn, sizes) // sizes[self.axis(eqn)]

    def sent_bytes(self, eqn: Eqn, sizes: Sizes) -> int:
        return super().sent_bytes(eqn, sizes) // sizes[self.axis(eqn)]

    def received_bytes(self, eqn: Eqn, index: int, sizes: Sizes) -> int:
        return buffer_bytes(eqn, index, sizes) // sizes[self.axis(eqn)]

    def unpacking_traffic(self, eqn: Eqn, sizes: Sizes) -> int:
        return 2 * sum(self.received_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))

    def sends_without_copy(self, eqn: Eqn, index: int, sizes: Sizes) -> bool:
        """Whether a member has a message of its own, in which the blocks are contiguous and without padding."""
        member, axis = eqn.ins[index], self.axis(eqn)
        start, to = split_over(member, axis), split_over(eqn.results[index], axis)
        if any(member.shape[cut.dim] % sizes[axis] for cut in (start, to)):
            return False
        shape = local_shape(member, sizes, dict.fromkeys(sizes, 0))
        is_contiguous = math.prod(shape[: to.dim]) == 1
        same_dtype = wire_format(eqn, member) == Uncoded(member.dtype)
        return is_contiguous and same_dtype and is_sent_alone(eqn, index, sizes)


class Shard(Memberwise):
    """Rules of shard: a view of the whole value, which differs from rank to rank."""

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        value, dim = eqn.args
        part = dataclasses.replace(value, layout=(*value.layout, Split(self.axis(eqn), dim)))
        if on_axis(value.layout, self.axis(eqn)) is not None:
            return f"{value!r} is not whole over {self.axis(eqn)}"
        if not part.is_like(eqn.out):
            return f"{value!r} gives {part.type}, not {eqn.out!r}"
        return None

    def axis(self, eqn: Eqn) -> str:
        return eqn.kwargs["axis"]

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        split = Split(self.axis(eqn), eqn.args[1])
        return [cut(value, split, len(terms), rank) for rank, value in enumerate(terms)]

    def shares_storage(self, eqn: Eqn) -> bool:
        return True


class Row(Memberwise):
    """Rules of row: this rank's row of a value that has one row for each rank. A view, which differs from rank to rank.

    Ranks compute with rows as with values of their batch: each has its own.
    """

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        rows = eqn.args[0]
        if rows.layout != (Split(self.axis(eqn)),) or rows.shape[0] != axes.get(self.axis(eqn)):
            return f"{rows!r} does not have one row for each rank of {self.axis(eqn)}"
        if not dataclasses.replace(rows, shape=rows.shape[1:], layout=()).is_like(eqn.out):
            return f"{eqn.out!r} is not a row of {rows!r}"
        return None

    def axis(self, eqn: Eqn) -> str:
        return eqn.kwargs["axis"]

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        return super().varies(eqn, axes_of) | {*members(self.axis(eqn))}

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [rows[0] for rows in terms]

    def shares_storage(self, eqn: Eqn) -> bool:
        return True


class Rows(Row):
    """Rules of rows: a row on each rank as the only one that it holds of a value with one for each rank. A view."""

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        row, axis = eqn.args[0], self.axis(eqn)
        if row.layout:
            return f"{row!r} is not whole on each rank"
        shape = (axes.get(axis, 0), *row.shape)
        if not dataclasses.replace(row, shape=shape, layout=(Split(axis),)).is_like(eqn.out):
            return f"{eqn.out!r} does not have the row {row!r} of each rank of {axis}"
        return None

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        return super().varies(eqn, axes_of) - {*members(self.axis(eqn))}

    def member(self, eqn: Eqn, index: int, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [row[None] for row in terms]


# The dtypes that become codes.
_CODED = (torch.float32, *HALF)
# Neither gloo nor NCCL reduces these dtypes, and PyTorch does not add the unsigned ones: each has a wider one to send.
_WIDER_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


def _may_become(member: torch.dtype, result: torch.dtype) -> bool:
    """Whether a collective may return this dtype for a member: only floats and complex values change precision."""
    are_floats = member.is_floating_point and result.is_floating_point
    are_complex = member.is_complex and result.is_complex
    return member == result or are_floats or are_complex


def _arrived_rows(
    wire: Format, part: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What arrives of one rank's part of a member, which is sent with the split dim first."""
    return wire.arrived(part.movedim(dim, 0), dtype).movedim(0, dim)


def _arrived_parts(
    wire: Format, value: torch.Tensor, ranks: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What arrives of a value that is sent in a part for each rank, in the order of its elements."""
    if not wire.is_coded:
        return wire.arrived(value, dtype)
    flat = value.reshape(-1)
    parts = flat.split(max(chunk(len(flat), ranks), 1))
    return torch.cat([wire.arrived(part, dtype) for part in parts]).view(value.shape)


def _coding(eqn: Eqn, values: Sequence[Var], sizes: Sizes, share: float = 1.0) -> int:
    """The bytes of values, and of a share of all codes; 0 if the equation sends no codes."""
    if not wire_format(eqn, eqn.ins[0]).is_coded:
        return 0
    codes = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
    return int(codes * share) + sum(bytes_on_first_rank(v, sizes) for v in values)


def _vector(elements: int, placement: Split | Partial) -> Var:
    return Var("x", torch.float32, (elements,), (placement,))


# The collectives that transforms place. To add one, add its rules here, its call over gloo to `runtime/collectives.py`,
# and its call over NCCL to `runtime/cuda/nccl.py`.
_ROWS = (Gather(), ReduceScatter(), AllReduce(), AllToAll())
COLLECTIVES: Mapping[str, Start] = {row.kind.name: row for row in _ROWS}
ALL_GATHER = Primitive("all_gather", COLLECTIVES["all_gather"])
REDUCE_SCATTER = Primitive("reduce_scatter", COLLECTIVES["reduce_scatter"])
ALL_REDUCE = Primitive("all_reduce", COLLECTIVES["all_reduce"])
ALL_TO_ALL = Primitive("all_to_all", COLLECTIVES["all_to_all"])
WAIT = Primitive("wait", Wait())
SHARD = Primitive("shard", Shard())
ROW = Primitive("row", Row())
ROWS = Primitive("rows", Rows())
_ORDINARY = Rules()


def kind_named(name: str) -> Kind:
    """The kind of messages with a name, of a collective of `COLLECTIVES` or another one that users call.

    >>> kind_named("all_reduce").crossings, kind_named("broadcast").crossings
    (2, 1)
    """
    return COLLECTIVES[name].kind if name in COLLECTIVES else Kind(name)


def all_gather(shards: Sequence[Var], names: Sequence[str], axis: str, **eqn: Any) -> Eqn:
    """Start a gather of shards: each rank of `axis` gets the whole values, when it waits for them.

        f32[32@dp,16], f32[4,8@dp]   -->   f32[32,16]!, f32[4,8]!

    Args:
        shards: values that are split over `axis`, of any dtypes. They share a message. A plan joins gathers of one
            value into buckets itself.
        names: the name of each whole value.
        axis: the mesh axis.
        eqn: other fields of the equation. A collective has a `provenance`, which says what it is for. With
            `hint="gather"`, a plan may start it earlier. `Eqn.like` gives it a region and the user's line.

    `ir.check` refuses a value that is not split over `axis`, and a collective without a provenance.

    >>> from ztrans.ir import Provenance
    >>> codes = Var("codes", torch.int8, (32, 16), (Split("dp"),))
    >>> all_gather([codes], ["codes.full"], "dp", provenance=Provenance("param", ("w",), "dp")).out
    codes.full': i8[32,16]!
    """
    futures = []
    for name, shard in zip(names, shards):
        layout = without(shard.layout, axis)
        futures.append(Var(f"{name}'", shard.dtype, shard.shape, layout, future=True))
    kwargs = {"dtype": None, "axis": axis}
    return Eqn(ALL_GATHER, (list(shards),), tuple(futures), kwargs, **eqn)


def reduce(
    terms: Sequence[Var],
    names: Sequence[str],
    axis: str,
    op: str,
    to: Split | None,
    dtype: WireFormat | None = None,
    result: torch.dtype | None = None,
    **eqn: Any,
) -> Eqn:
    """Start the reduction of `terms` over `axis`: a `reduce_scatter` if `to` splits the result, else an `all_reduce`.

        f32[32,16]{sum@dp}   -->   f32[32@dp,16]!   with to=Split("dp")
        f32[]{max@dp}        -->   f32[]!           with to=None

    Args:
        terms: values of one dtype that are whole on every rank, or one term of a value on each.
        names: the name of each result.
        axis: the mesh axis.
        op: "sum", "mean", "max" or "min". A maximum or minimum is NaN if one term is.
        to: the split of the results over `axis`, or None for whole ones.
        dtype: the dtype or format of the terms in messages, by default their own dtype. Integers that no backend
            reduces are sent in a wider one.
        result: the dtype of the results, by default that of the terms.
        eqn: other fields of the equation, as of `all_gather`; with `hint="reduce"`, a plan may move it.

    `ir.check` refuses a term that is split over `axis`.

    >>> most = Var("most", torch.float32, (), (Partial("dp", "max"),))
    >>> reduce([most], ["most.all"], "dp", "max", None).out
    most.all': f32[]!
    """
    if dtype is None:
        dtype = _WIDER_DTYPES.get(terms[0].dtype)
    futures = []
    for name, term in zip(names, terms):
        layout = without(term.layout, axis)
        if to is not None:
            layout = (*layout, to)
        futures.append(Var(f"{name}'", result or term.dtype, term.shape, layout, future=True))
    start = REDUCE_SCATTER if to else ALL_REDUCE
    kwargs = {"op": op, "dtype": dtype, "axis": axis}
    return Eqn(start, (list(terms),), tuple(futures), kwargs, **eqn)


def all_reduce(
    terms: Sequence[Var], names: Sequence[str], axis: str, op: str, **options: Any
) -> Eqn:
    """Start the reduction of `terms` to whole values on every rank; the options are those of `reduce`.

        f32[32,16]{sum@dp}   -->   f32[32,16]!

    >>> x = Var("x", torch.float32, (32, 16))
    >>> all_reduce([x], ["y"], "dp", "mean").out
    y': f32[32,16]!
    """
    return reduce(terms, names, axis, op, None, **options)


def reduce_scatter(
    terms: Sequence[Var], names: Sequence[str], axis: str, op: str, dim: int = 0, **options: Any
) -> Eqn:
    """Start the reduction of `terms` to shards, which are split along `dim`; the options are those of `reduce`.

        f32[32,16]{sum@dp}   -->   f32[32@dp,16]!

    >>> x = Var("x", torch.float32, (32, 16))
    >>> reduce_scatter([x], ["y"], "dp", "mean", dim=1).out
    y': f32[32,16@dp]!
    """
    return reduce(terms, names, axis, op, Split(axis, dim), **options)


def all_to_all(shards: Sequence[Var], names: Sequence[str], axis: str, dim: int, **eqn: Any) -> Eqn:
    """Start an exchange after which values are split over `axis` along `dim`, and not along the dim that they were.

        f32[32@dp,16]   -->   f32[32,16@dp]!

    Each rank sends and receives 1/n of what a gather over n ranks would bring it. The other arguments are those of
    `all_gather`. `ir.check` refuses a value that is not split over `axis` along another dim.

    >>> x = Var("x", torch.float32, (32, 16), (Split("dp"),))
    >>> all_to_all([x], ["y"], "dp", 1).out
    y': f32[32,16@dp]!
    """
    futures = []
    for name, value in zip(names, shards):
        layout = (*without(value.layout, axis), Split(axis, dim))
        futures.append(Var(f"{name}'", value.dtype, value.shape, layout, future=True))
    kwargs = {"dtype": None, "axis": axis}
    return Eqn(ALL_TO_ALL, (list(shards),), tuple(futures), kwargs, **eqn)


def row(rows: Var, name: str, axis: str, **eqn: Any) -> Eqn:
    """This rank's row of a value that has one row for each rank of `axis`: a view of it. Nothing is sent.

        f32[4@dp,32,16]   -->   f32[32,16], another one on each rank

    >>> row(Var("x", torch.float32, (4, 32, 16), (Split("dp"),)), "x.own", "dp").out
    x.own: f32[32,16]
    """
    out = dataclasses.replace(rows, name=name, shape=rows.shape[1:], layout=())
    return Eqn(ROW, (rows,), (out,), {"axis": axis}, **eqn)


def rows(row: Var, name: str, axis: str, ranks: int, **eqn: Any) -> Eqn:
    """A value that has the `row` of each of the `ranks` of `axis`; this rank holds its own. Nothing is sent.

        f32[32,16], another one on each rank   -->   f32[4@dp,32,16]

    >>> rows(Var("x.own", torch.float32, (32, 16)), "x", "dp", 4).out
    x: f32[4@dp,32,16]
    """
    out = dataclasses.replace(row, name=name, shape=(ranks, *row.shape), layout=(Split(axis),))
    return Eqn(ROWS, (row,), (out,), {"axis": axis}, **eqn)


def shard(value: Var, name: str, axis: str, dim: int = 0, **eqn: Any) -> Eqn:
    """This rank's shard of a value that is whole on every rank of `axis`: a view of it. Nothing is sent.

        f32[32,16]   -->   f32[32@dp,16]

    `ir.check` refuses a value that is split over `axis` already.

    >>> shard(Var("x", torch.float32, (32, 16)), "x.shard", "dp").out
    x.shard: f32[32@dp,16]
    """
    out = dataclasses.replace(value, name=name, layout=(*value.layout, Split(axis, dim)))
    return Eqn(SHARD, (value, dim), (out,), {"axis": axis}, **eqn)


def wait(future: Var, **eqn: Any) -> Eqn:
    """Wait for `future`; its value has the future's name without the quote.

        f32[32,16]!   -->   f32[32,16]

    `ir.check` refuses a future that is waited for twice or never, and a value that is read before its wait.

    >>> wait(Var("y'", torch.float32, (32, 16), future=True)).out
    y: f32[32,16]
    """
    return Eqn(WAIT, (future,), (value_of_future(future),), **eqn)


def rules(eqn: Eqn) -> Rules:
    """The rules of an equation's operation.

    >>> rules(Eqn(SHARD, (), ())).lane, rules(Eqn(WAIT, (), ())).remote
    (None, True)
    """
    # Cached on the equation: passes ask dozens of times, and PyTorch hashes an operation in Python.
    attributes = eqn.__dict__
    if "_rules" not in attributes:
        attributes["_rules"] = _rules(eqn.op)
    return attributes["_rules"]


@functools.cache
def _rules(op: Any) -> Rules:
    if isinstance(op, Primitive):
        return op.rules
    return user_rules(op) or _ORDINARY


def is_start(eqn: Eqn) -> bool:
    """Whether the equation starts a collective that a transform placed."""
    return isinstance(rules(eqn), Start)


def is_placed(eqn: Eqn) -> bool:
    """Whether a transform placed the equation: a collective, a copy, or a wait for one of them."""
    return eqn.provenance is not None or rules(eqn).reads_futures


def role(eqn: Eqn) -> str:
    """The role of a collective, or "" for any other equation."""
    return eqn.provenance.role if eqn.provenance else ""


def lane(eqn: Eqn) -> str:
    """The name of the queue of a collective or a copy.

    Each axis has one queue for gathers and one for reductions. Copies have one queue for each memory and direction.
    """
    wire = other_memory(eqn) if is_copy(eqn) else rules(eqn).axis(eqn)
    return f"{wire} {rules(eqn).lane}"


class BucketKey(NamedTuple):
    """The properties that all members of a bucket share, because they have one message and one equation."""

    operation: object
    axis: str
    role: str
    dtype: WireFormat | None  # of the message; None if it is the members' own
    split_dims: tuple[int, ...]
    # Of reductions only: gathers of several dtypes are sent as bytes (see `in_bytes`).
    wire_format: Format | None = None
    host_sum_format: Format | None = None
    member_dtype: torch.dtype | None = None
    result_dtype: torch.dtype | None = None
    reduction: str = ""
    terms: tuple[str, ...] = ()

    def differences(self, other: BucketKey) -> str:
        """The properties that differ, each with both values.

        >>> key = BucketKey(ALL_GATHER, "dp", "param", torch.bfloat16, (0,))
        >>> key.differences(key._replace(axis="tp", dtype=None))
        'axis dp and tp, dtype bf16 and its own'
        """
        texts = []
        for name, mine, others in zip(self._fields, self, other):
            if mine != others:
                texts.append(f"{name.replace('_', ' ')} {_text(mine)} and {_text(others)}")
        return ", ".join(texts)


def _text(x: object) -> str:
    """A property of a bucket as text."""
    if isinstance(x, torch.dtype):
        return DTYPES.get(x, str(x))
    if isinstance(x, tuple):
        return ", ".join(map(str, x)) or "none"
    return "its own" if x is None else str(x)


def bucket_key(start: Eqn) -> BucketKey:
    """The key of a collective: collectives with equal keys may share a bucket.

    >>> from ztrans.ir import Provenance
    >>> w = Var("w", torch.float32, (4, 2), (Split("dp"),))
    >>> bucket_key(all_gather([w], ["f"], "dp", provenance=Provenance("param", ("w",), "dp")))[:3]
    (all_gather, 'dp', 'param')
    """
    member, future = start.ins[0], start.results[0]
    axis = start.kwargs["axis"]
    placements = [p for p in (*member.layout, *future.layout) if p.axis == axis]
    dims = tuple(p.dim for p in placements if isinstance(p, Split))
    key = BucketKey(start.op, axis, role(start), start.kwargs.get("dtype"), dims)
    if rules(start).moves:
        return key
    return key._replace(
        wire_format=wire_format(start, member),
        host_sum_format=host_sum_format(start, member),
        member_dtype=member.dtype,
        result_dtype=future.dtype,
        reduction=start.kwargs["op"],
        terms=tuple(p.op for p in placements if isinstance(p, Partial)),
    )


def in_bytes(start: Eqn) -> Eqn:
    """A collective that moves members of several dtypes, as one that moves their bytes, which have one more dim.

    A bucket of members with one dtype does not change.

    >>> codes = Var("codes", torch.int8, (4, 2), (Split("dp"),))
    >>> scales = Var("scales", torch.float32, (4, 1), (Split("dp"),))
    >>> in_bytes(all_gather([codes, scales], ["c", "s"], "dp")).ins
    (codes: u8[4@dp,2,1], scales: u8[4@dp,1,4])
    """
    wires = {wire_format(start, v) for v in start.ins}
    if len(wires) == 1 or not rules(start).moves:
        return start
    members = [_bytes_of(v) for v in start.ins]
    return start.replace(args=(members,), outs=tuple(map(_bytes_of, start.results)))


def _bytes_of(v: Var) -> Var:
    return dataclasses.replace(v, dtype=torch.uint8, shape=(*v.shape, v.dtype.itemsize))


def coalesce(starts: Sequence[Eqn]) -> Eqn:
    """One equation that starts all of `starts`, which have the same key. Their futures stay the same.

    Raises: ValueError if their keys differ.
    """
    first = starts[0]
    if len(starts) == 1:
        return first.replace(hint=None)

    for start in starts:
        if bucket_key(start) != bucket_key(first):
            names = f"{first.out.name} and {start.out.name}"
            differences = bucket_key(first).differences(bucket_key(start))
            raise ValueError(f"coalesce: {names} share a bucket and differ in {differences}.")

    members: list[Var] = []
    outs: list[Var] = []
    paths: dict[str, None] = {}
    for e in starts:
        members += e.ins
        outs += e.results
        if e.provenance is not None:
            paths.update(dict.fromkeys(e.provenance.paths))

    provenance = first.provenance
    if provenance is not None:
        provenance = dataclasses.replace(provenance, paths=tuple(paths), regather=None)
    return first.replace(args=(members,), outs=tuple(outs), provenance=provenance, hint=None)
