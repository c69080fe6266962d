"""Let each rank compute the updates of some matrices instead of all.

Optimizers such as Muon, SOAP and Shampoo multiply whole matrices. `shard_params` gathers these, and each rank repeats
the same products. Here N matrices of one shape form a group, and each of N ranks owns one of them:

    x = wait(all_gather([x1])); y = f(x); s = shard(y)      on every rank, for each matrix x1, ..., xN
      -->
    v = wait(all_to_all([stack([x1, ..., xN])]))            f32[N,m@dp,n] -> f32[N@dp,m,n]
    y = f(row(v))                                           on each rank, for the matrix that it owns
    w = wait(all_to_all([rows(y)])); s = select(w, 0, 0)    f32[N@dp,m,n] -> f32[N,m@dp,n]

The equations of f do not change, so the results have the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import torch

from ..ir.collectives import (
    all_to_all,
    bucket_key,
    coalesce,
    role,
    row,
    rows,
    rules,
    shard,
    wait,
)
from ..ir.dependencies import components, grouped, read_from_outside
from ..ir.graph import (
    Eqn,
    Graph,
    Names,
    Primitive,
    Provenance,
    Split,
    Var,
    dce,
    producers,
    substitute,
    users,
    variables,
)
from ..ir.op_facts import CAST, is_matmul, is_random
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.rewriter import prerequisites, reordered
from ..ir.source import where
from ..ir.structure import structures
from ..ir.user_collectives import is_user_collective
from ..rewrites.redistribute import Site, redistribute
from .base import Transform, constructor

aten = torch.ops.aten


@constructor
def owned_updates() -> Transform:
    """Compute the update of each matrix on one rank, for updates that need whole matrices, such as Muon's.

    Without it every rank gathers all of these matrices, and computes the same update of each. With N ranks, groups of
    N matrices with the same shape and the same update are exchanged instead, so that each rank owns one matrix of a
    group, and their results are exchanged back. So a rank computes 1/N of the products, and receives 2/N of the bytes.
    Gradients, moments and parameters stay on shards, as does all of the update that runs on them: clipping, momentum,
    weight decay.

    A group is made of matrices whose gradients are complete at about the same time. Its exchange starts as soon as they
    are, with `overlap_grads` during backward. The last group of a shape may have fewer matrices than there are ranks;
    ranks that are left over repeat the last one. A matrix without an equal one is updated on every rank, as
    without the transform. So is one whose update has collectives of its own. `Lowered.summary()` has a note on each,
    with its line.

    Rewrites:
        x = wait(all_gather([x1]))               v = wait(all_to_all([stack([x1, ..., xN])]))
        y = f(x); s = shard(y)            -->    y = f(row(v))
        ... for each of x1, ..., xN              w = wait(all_to_all([rows(y)])); s = select(w, 0, 0); ...

    Raises: ValueError when the step is lowered, if `shard_params` does not come before it.

    Source: Liu et al., Muon is Scalable for LLM Training, 2025 (distributed Muon); Canzona, 2026.

    >>> owned_updates()
    owned_updates()
    """
    return _OwnedUpdates()


@dataclass(frozen=True)
class _OwnedUpdates(Transform):
    def rewrite(self, graph: Graph) -> Graph:
        if not graph.mesh:
            raise ValueError(
                "owned_updates: the program is not sharded, so this rank updates everything anyway.\n"
                "Apply shard_params first: it must be the innermost decorator, or the first in zt.chain."
            )
        found, problems = _chains(graph)
        if not found and not problems and math.prod(dict(graph.mesh).values()) > 1:
            problems = [_nothing_gathered(graph)]
        groups: list[list[Chain]] = []
        for members in grouped((each.structure, each) for each in found).values():
            ranks = graph.axes[members[0].axis]
            groups += [members[k : k + ranks] for k in range(0, len(members), ranks)]
        for single in [group[0] for group in groups if len(group) == 1]:
            problems.append(single.note("there is no other one like it left for the other ranks"))
        groups = [group for group in groups if len(group) > 1]
        groups.sort(key=lambda group: (group[-1].depth, group[-1].ready))
        return _with_owners(graph, groups).with_hints(
            notes=(*graph.hints.notes, *dict.fromkeys(problems))
        )


def _nothing_gathered(graph: Graph) -> str:
    note = f"owned_updates: the update of {graph.name} gathers no matrices, so ranks exchange none"
    if graph.zero_stage == 0:
        note += "\n  At stage 0 every rank has whole matrices, and computes all updates: use stage=1, 2 or 3."
    return note


# ---- chains


class Exit(NamedTuple):
    """A value of a chain that the rest of the program reads.

    Attributes:
        value: the value to send back.
        casts: the widening casts between it and the value that is read, which run after the way back.
        read: the value that is read: a shard, or a whole scalar.
        shard: the equation that cuts the shard; None for a scalar.
    """

    value: Var
    casts: tuple[Eqn, ...]
    read: Var
    shard: Eqn | None

    @property
    def placement(self) -> Split | None:
        return None if self.shard is None else self.read.split


@dataclass(frozen=True, eq=False)
class Chain:
    """Equations of the update that run on whole values and are connected by gathered values.

    Attributes:
        gathers: the gathers of values that they read, each with its wait.
        eqns: the equations, in order.
        outside: the other values that they read, which are whole on every rank.
        exits: the values that others read.
        ready: the place of the last matrix product that it needs from backward.
        depth: the number of chains that it needs.
    """

    gathers: Mapping[Eqn, Eqn]
    eqns: tuple[Eqn, ...]
    outside: tuple[Var, ...]
    exits: tuple[Exit, ...]
    ready: int = 0
    depth: int = 0

    @property
    def axis(self) -> str:
        return next(iter(self.gathers)).kwargs["axis"]

    @property
    def structure(self) -> Hashable:
        """What chains have in common if the ranks can compute them in one program."""
        inputs = [*(wait.out for wait in self.gathers.values()), *self.outside]
        results = [exit.value for exit in self.exits]
        shards = tuple((start.ins[0].type, bucket_key(start)) for start in self.gathers)
        ends = tuple((exit.placement, exit.read.dtype) for exit in self.exits)
        eqns = structures(self.eqns, inputs, results, lambda v: v.type)
        return eqns, shards, ends, self.depth

    @property
    def problem(self) -> str | None:
        """Why one rank cannot compute this chain for all, or None."""
        axis = self.axis
        results = producers(self.eqns)
        for start in self.gathers:
            if start.kwargs["axis"] != axis or start.ins[0].layout != (start.ins[0].split,):
                return "its values are cut over several axes"
        for e in self.eqns:
            if rules(e).remote:
                return f"{op_name(e.op)} sends messages of its own"
        for exit in self.exits:
            if exit.value not in results:
                return f"{exit.value.name} is read whole elsewhere too"
            if exit.placement is None and exit.value.numel > 1:
                return f"{exit.value.name} is read whole"
            if exit.placement is not None and exit.placement.axis != axis:
                return "its results are cut over another axis"
        return None

    def note(self, reason: str) -> str:
        """A note that says why every rank computes this chain. Many chains may have the same."""
        line = where(self.eqns[0].source)
        types = list(dict.fromkeys(start.ins[0].type for start in self.gathers))
        if len(types) > 3:
            types[3:] = [f"{len(types) - 3} more"]
        return f"owned_updates: every rank computes an update from {', '.join(types)}: {reason}\n  at {line}"


def _chains(graph: Graph) -> tuple[list[Chain], list[str]]:
    """The chains that one rank may compute for all, as they get ready, and notes on the other ones."""
    pairs = pair(graph)
    gather_of: dict[Var, tuple[Eqn, Eqn]] = {}
    for start, paired in pairs.starts.items():
        is_whole_after = rules(start).moves and not start.out.layout
        if is_whole_after and role(start) == "update" and len(start.outs) == 1:
            wait = graph.eqns[paired.first_wait]
            gather_of[wait.out] = start, wait

    # An equation that reads values of chains connects these chains.
    inside: list[Eqn] = []
    of_chains: set[Var] = set(gather_of)
    connected: list[tuple[Var, Var]] = []
    for e in graph.eqns:
        read = [v for v in e.ins if v in of_chains]
        if not read or any(v.layout for v in e.ins) or isinstance(e.op, Primitive):
            continue
        inside.append(e)
        of_chains.update(e.results)
        connected += ((v, read[0]) for v in (*read[1:], *e.results))
    chain_of = components(connected)

    found: list[Chain] = []
    notes: list[str] = []
    outputs = set(variables(graph.outputs))
    for eqns in grouped((chain_of[e.out], e) for e in inside).values():
        new = _chain(eqns, gather_of, users(graph), outputs)
        if new.problem is None:
            found.append(new)
        else:
            notes.append(new.note(new.problem))
    ready, circular = _as_they_get_ready(graph, found)
    notes += [each.note("it runs on shards in between") for each in circular]
    return ready, notes


def _chain(
    eqns: Sequence[Eqn],
    gather_of: Mapping[Var, tuple[Eqn, Eqn]],
    readers: Mapping[Var, Sequence[Eqn]],
    outputs: set[Var],
) -> Chain:
    """The chain of these equations, in order."""
    makers = producers(eqns)
    members = set(eqns)
    inputs = read_from_outside(eqns)
    gathered = [v for v in inputs if v in gather_of]
    outside = tuple(v for v in inputs if v not in gather_of)
    exits: list[Exit] = []
    for v in (*gathered, *makers):
        value, casts = _before_widening(v, makers)
        others = [e for e in readers.get(v, ()) if e not in members]
        cuts = [e for e in others if e.out.layout and not any(x.layout for x in e.ins)]
        for cut in cuts:
            exits.append(Exit(value, casts, cut.out, cut))
        if len(others) > len(cuts) or v in outputs:
            exits.append(Exit(value, casts, v, None))
    return Chain(dict(gather_of[v] for v in gathered), tuple(eqns), outside, tuple(exits))


def _before_widening(v: Var, makers: Mapping[Var, Eqn]) -> tuple[Var, tuple[Eqn, ...]]:
    """The value before the widening casts that end in `v`, which is sent back in place of `v`, and these casts."""
    casts: list[Eqn] = []
    while v in makers and makers[v].op is CAST:
        cast = makers[v]
        if cast.ins[0].dtype.itemsize >= v.dtype.itemsize:
            break
        casts.insert(0, cast)
        v = cast.ins[0]
    return v, tuple(casts)


def _as_they_get_ready(graph: Graph, found: Sequence[Chain]) -> tuple[list[Chain], list[Chain]]:
    """The chains sorted by their places, which become known here, and those that need results of their own."""
    bit_of: dict[Eqn, int] = {}
    for k, each in enumerate(found):
        bit_of.update(dict.fromkeys(each.eqns, 1 << k))
    chains_before: dict[Var, int] = {}  # as bits
    ready: dict[Var, int] = {}
    for place, e in enumerate(graph.eqns):
        bits = bit_of.get(e, 0)
        last_product = place if is_matmul(e) and e.region != "update" else 0
        for v in e.ins:
            bits |= chains_before.get(v, 0)
            last_product = max(last_product, ready.get(v, 0))
        chains_before.update(dict.fromkeys(e.results, bits))
        ready.update(dict.fromkeys(e.results, last_product))

    ready_chains: list[Chain] = []
    circular: list[Chain] = []
    for k, each in enumerate(found):
        bits = 0
        for v in (*(start.ins[0] for start in each.gathers), *each.outside):
            bits |= chains_before.get(v, 0)
        place = max(ready.get(start.ins[0], 0) for start in each.gathers)
        # A chain needs all chains that those before it need, so depths grow from chain to chain.
        each = dataclasses.replace(each, ready=place, depth=bits.bit_count())
        (circular if bits & 1 << k else ready_chains).append(each)
    return sorted(ready_chains, key=lambda each: each.ready), circular


# ---- the new program


class _Exchange:
    """The new equations of a group, in which each rank owns one chain; ranks that are left over repeat the last one.

    Attributes:
        there: what sends the shards of each matrix to its owner.
        owned: the chain on each rank, and what sends its results.
        back: what waits for the results, and makes the values that the program reads.
        scalars: for each scalar of a chain that the program reads, what it reads in its place; also of groups before.
    """

    def __init__(
        self, graph: Graph, group: Sequence[Chain], names: Names, scalars: dict[Var, Var]
    ) -> None:
        self.group = group
        self.names = names
        self.axis = group[0].axis
        self.ranks = graph.axes[self.axis]
        paths: dict[str, None] = {}
        for start in chain.from_iterable(each.gathers for each in group):
            if start.provenance is not None:
                paths.update(dict.fromkeys(start.provenance.paths))
        provenance = Provenance("update", tuple(paths), self.axis)
        self.site = Site("update", group[0].eqns[0].source, names.fresh, provenance)
        self.there: list[Eqn] = []
        self.owned: list[Eqn] = []
        self.back: list[Eqn] = []
        self.scalars = scalars

        own = self._gathered_by_owners() | self._from_outside()
        for e in group[0].eqns:
            self.owned.append(e.with_inputs(lambda v: own.get(v, v)))
        self._send_back()

    def _gathered_by_owners(self) -> dict[Var, Var]:
        """Send the shards. Returns: for each gathered value of the first chain, what a rank has in its place."""
        starts: list[Eqn] = []
        value_of: dict[Var, Var] = {}
        for k, (gather, gather_wait) in enumerate(self.group[0].gathers.items()):
            stack = self._stacked([list(each.gathers)[k].ins[0] for each in self.group])
            name = self.names.fresh(f"{gather_wait.out.name}.owned")
            start = all_to_all([stack], [name], self.axis, 0)
            future = dataclasses.replace(start.out, dtype=gather.out.dtype)
            starts.append(start.replace(outs=(future,), kwargs=gather.kwargs))
            value_of[future] = gather_wait.out
        own: dict[Var, Var] = {}
        for same_message in grouped((bucket_key(start), start) for start in starts).values():
            start, _ = self.site.start_and_wait(coalesce(same_message))
            self.there.append(start)
            for future in start.results:
                self.owned.append(wait(future).like(start))
                own[value_of[future]] = self._own_row(self.owned[-1].out)
        return own

    def _from_outside(self) -> dict[Var, Var]:
        """What a rank has in place of other values that differ from chain to chain, such as counts of steps."""
        own: dict[Var, Var] = {}
        for k, v in enumerate(self.group[0].outside):
            of_chains = [self.scalars.get(x, x) for x in (each.outside[k] for each in self.group)]
            own[v] = of_chains[0]
            if len(set(of_chains)) > 1:
                cut = shard(
                    self._stacked(of_chains), self.names.fresh(f"{v.name}.shard"), self.axis
                )
                self.owned.append(cut.replace(region="update", source=self.site.source))
                own[v] = self._own_row(cut.out)
        return own

    def _stacked(self, values: Sequence[Var]) -> Var:
        """A value with a row for each rank."""
        v = values[0]
        layout = tuple(Split(self.axis, p.dim + 1) for p in v.layout if isinstance(p, Split))
        name = self.names.fresh(f"{v.name}.stack")
        out = Var(name, v.dtype, (self.ranks, *v.shape), layout)
        of_ranks = [*values, *[values[-1]] * (self.ranks - len(values))]
        self.there.append(self.site.equation(aten.stack.default, (of_ranks,), out))
        return out

    def _own_row(self, v: Var) -> Var:
        own = row(v, self.names.fresh(f"{v.name}.row"), self.axis, region="update")
        self.owned.append(own.replace(source=self.site.source))
        return own.out

    def _send_back(self) -> None:
        """Send the results of all ranks to where the program reads them."""
        sent_back: dict[tuple[Var, Split | None], Var] = {}
        for k, exit in enumerate(self.group[0].exits):
            v, to = exit.value, exit.placement
            if (v, to) not in sent_back:
                of_owners = rows(v, self.names.fresh(f"{v.name}.rows"), self.axis, self.ranks)
                self.owned.append(of_owners.replace(region="update", source=self.site.source))
                split = None if to is None else Split(self.axis, to.dim + 1)
                moves, moved = redistribute(of_owners.out, split, self.site, f"{v.name}.back")
                self.owned += moves[:-1]
                self.back.append(moves[-1])
                sent_back[v, to] = moved
            for index, each in enumerate(self.group):
                self._read_back(each.exits[k], sent_back[v, to], index)

    def _read_back(self, exit: Exit, sent_back: Var, index: int) -> None:
        """Make the value that the program reads from row `index` of the values that were sent back."""
        layout = () if exit.placement is None else (exit.placement,)
        v = dataclasses.replace(exit.value, name=self.names.fresh(exit.value.name), layout=layout)
        eqns = [Eqn(aten.select.int, (sent_back, 0, index), (v,))]
        for cast in exit.casts:
            wide = dataclasses.replace(
                cast.out, name=self.names.fresh(cast.out.name), layout=layout
            )
            eqns.append(Eqn(cast.op, (eqns[-1].out,), (wide,), cast.kwargs))
        if exit.shard is None:
            self.scalars[exit.read] = eqns[-1].out
        else:
            eqns[-1] = eqns[-1].replace(outs=(exit.read,))
        self.back += [e.like(exit.shard or self.back[0], "update") for e in eqns]


def _with_owners(graph: Graph, groups: Sequence[Sequence[Chain]]) -> Graph:
    """The program in which the ranks own the chains of each group.

    In the update, equations of no chain come first, then the chains, group by group. The program waits for the results
    of a group after the chains of the next group, which hide the message.
    """
    if not groups:
        return graph
    makers = producers(graph.eqns)
    names = Names.of(graph)
    place = {e: k for k, e in enumerate(graph.eqns)}
    turn: dict[Eqn, int] = {}  # odd for chains, even for what reads their results
    dropped: set[Eqn | None] = set()
    scalars: dict[Var, Var] = {}
    new_eqns: list[Eqn] = []
    for k, group in enumerate(groups):
        new = _Exchange(graph, group, names, scalars)
        turn.update(dict.fromkeys(new.owned, 2 * k + 1))
        turn.update(dict.fromkeys(new.back, 2 * k + 4))
        new_eqns += (*new.there, *new.owned, *new.back)
        # What a group sends is stacked when the last of it exists, and not before the update.
        sent = [v for e in new.there for v in e.ins if v in makers]
        first_gather = min(place[start] for each in group for start in each.gathers)
        place.update(
            dict.fromkeys(new.there, max([place[makers[v]] for v in sent], default=first_gather))
        )
        for each in group:
            dropped |= {*each.eqns, *each.gathers, *each.gathers.values()}
            dropped |= {exit.shard for exit in each.exits}

    def read(v: Var) -> Var:
        return scalars.get(v, v)

    kept: list[Eqn] = []
    for e in graph.eqns:
        if e not in dropped:
            kept.append(e.with_inputs(read))
            place[kept[-1]] = place[e]
    outputs = substitute(graph.outputs, read)
    program = graph.replace(eqns=(*kept, *new_eqns), outputs=outputs)
    return dce(_in_turns(program, turn, place))


def _in_turns(program: Graph, turn: dict[Eqn, int], place: dict[Eqn, int]) -> Graph:
    """The program sorted by turns, then by places. What reads results of a group takes their turn, which is even."""
    needs = prerequisites(program)
    in_given_order = [e for e in program.eqns if is_random(e) or is_user_collective(e)]
    for earlier, later in pairwise(in_given_order):
        needs[later].append(earlier)
    for e in reordered(program, lambda e: 0, needs).eqns:
        turns_of_results = [turn[x] for x in needs[e] if turn[x] % 2 == 0]
        turn[e] = max([turn.get(e, 0), *turns_of_results])
        place.setdefault(e, max([place[x] for x in needs[e]], default=0))
    return reordered(program, lambda e: (turn[e], place[e]), needs)
