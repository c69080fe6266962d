"""Messages that copy engines carry: the bits that arrive, in how many rounds, and the trial that times them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fabric import Fabric, Rank, all_to_all_single
from tests.support.gloo_threads import on_threads
from tests.support.races import Races
from ztrans.ir.collectives import all_gather, reduce, rules
from ztrans.ir.graph import Eqn, Split, Var
from ztrans.ir.routes import Hosts
from ztrans.ops.symmetric import in_one_process
from ztrans.runtime.collectives import wait
from ztrans.runtime.cuda import copies, symmetric
from ztrans.runtime.cuda.nccl import Transport
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import MOST_SPINS, Buffer, MessageKind, _Trial
from ztrans.runtime.cuda.symmetric_start import CopiedStart

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def by_copies(
    eqn: Eqn, terms: list[list[torch.Tensor]], room: int, alone: bool = False
) -> list[list[torch.Tensor]]:
    """The values of each rank if copies carry a collective through buffers of `room` bytes, without a race."""
    ranks = len(terms)
    fabric = Fabric(ranks)
    memories = in_one_process(ranks, room)

    def run(rank: int) -> list[torch.Tensor]:
        channel: Any = Rank(fabric, rank, Hosts(ranks))
        with Races() as cuda:
            buffer = Buffer(channel, room, cuda.knows(memories[rank]), MOST_SPINS)
            transport = Transport("copied", eqn.op.name, "a double")
            common = eqn, {"dp": ranks}, {"dp": rank}, channel, Streams(cuda), transport
            start = CopiedStart(buffer, *common)
            if alone:
                start.members_by_message = [[k] for k in range(len(eqn.outs))]
            values = [wait(member) for member in start(*terms[rank])]
        assert cuda.races == []
        return values

    return on_threads(ranks, run)


@pytest.fixture
def rounds(monkeypatch) -> list[list[int]]:
    """The bytes of the pieces of each round, of all ranks."""
    found = []
    true_rounds = copies.rounds

    def noted(nbytes, room):
        cuts = true_rounds(nbytes, room)
        found.extend(nbytes[cut] for cut in cuts)
        return cuts

    monkeypatch.setattr(copies, "rounds", noted)
    return found


def test_gathers_for_which_there_is_no_room_at_once_are_copied_in_rounds(rounds):
    """The next round writes over what all ranks have copied. A part without room is cut."""
    ranks = 3
    parts = [torch.arange(rank, 90 + rank, dtype=F32).split(6) for rank in range(ranks)]
    sends = [[torch.cat(part[:3]), *part[3:6]] for part in parts]  # of 72 bytes, and 24
    shards = [Var(f"w{k}", F32, (ranks * len(x),), (Split("dp"),)) for k, x in enumerate(sends[0])]
    eqn = all_gather(shards, [f"f{k}" for k in range(len(shards))], "dp")
    for values in by_copies(eqn, sends, 48, alone=True):
        for k, value in enumerate(values):
            assert torch.equal(value, torch.cat([of_rank[k] for of_rank in sends]))
    assert sorted(rounds) == [[24, 24]] * 2 * ranks + [[48]] * ranks


# The last ranks of the third member have less of it, or nothing.
SHAPES = ((16, 9), (24, 3), (11, 5))


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "packed"])
@pytest.mark.parametrize("room", [1 << 12, 64, 48], ids=["room for all", "rounds", "cut rows"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("to", [None, Split("dp")], ids=["all_reduce", "reduce_scatter"])
def test_reductions_by_copies_have_the_bits_of_the_program(to, ranks, room, alone):
    """Whatever the buffer has room for: terms are exchanged, and summed in rank order."""
    draw = torch.Generator().manual_seed(0)
    for op, dtype, wire in (("mean", BF16, BF16), ("sum", F16, F16), ("mean", F32, BF16)):
        members = [Var(f"g{k}", dtype, shape) for k, shape in enumerate(SHAPES)]
        names = [f"f{k}" for k in range(len(SHAPES))]
        eqn = reduce(members, names, "dp", op, to, wire, F32)
        terms = [[torch.randn(s, generator=draw).to(dtype) for s in SHAPES] for _ in range(ranks)]
        values = by_copies(eqn, terms, room, alone)
        for k in range(len(SHAPES)):
            want = rules(eqn).member(eqn, k, [of_rank[k].to(wire) for of_rank in terms])
            for of_rank, want_of_rank in zip(values, want):
                assert torch.equal(of_rank[k], want_of_rank)


def test_a_reduction_goes_through_its_buffer_by_rows(rounds):
    """8 ranks have a row of 256 bytes for each other one: two rows at once, and the last one alone."""
    ranks = 8
    eqn = reduce([Var("g", BF16, (1024,))], ["f"], "dp", "sum", Split("dp"))
    by_copies(eqn, [[torch.ones(1024, dtype=BF16)] for _ in range(ranks)], 512)
    assert sorted(rounds) == [[256]] * ranks + [[256, 256]] * 3 * ranks


def tried(kind: MessageKind, ranks: int, room: int) -> list[bool]:
    """Whether all ways bring the same bits to each rank, in a trial through buffers of `room` bytes."""
    fabric = Fabric(ranks)
    memories = in_one_process(ranks, room)

    def run(rank: int) -> bool:
        group: Any = Rank(fabric, rank, Hosts(ranks))
        trial = _Trial(kind, group, memories[rank])
        for way in (*trial.received, symmetric.NCCL):
            trial.seconds_of(way)
        return trial.gave_equal_bits()

    return on_threads(ranks, run)


@pytest.mark.parametrize(
    ("sums", "gathers"),
    [(False, True), (True, True), (True, False)],
    ids=["all_gather", "all_reduce", "reduce_scatter"],
)
def test_a_trial_sends_the_whole_message_in_all_ways(sums, gathers, monkeypatch, rounds):
    """Also if the buffer has less room, as for a reduction of more than 32 MiB."""
    ranks, nbytes, room = 4, 1 << 14, 1 << 10

    def gather(received, part, group):
        received.copy_(torch.cat(group.fabric.posted(group.rank, part.clone())))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(symmetric, "all_gather", gather)
    monkeypatch.setattr(symmetric, "_seconds", lambda run: run() or 1.0)
    monkeypatch.setattr(symmetric, "LARGEST_FOR_KERNEL", 0)
    kind = MessageKind(sums, gathers, BF16, nbytes)
    assert tried(kind, ranks, room) == [True] * ranks
    # A row for each other rank, and the part of an all_reduce or a gather, once for all others.
    part = nbytes // ranks
    rows = ranks - 1 if sums else 0
    parts = 1 if gathers else 0
    assert sum(map(sum, rounds)) == ranks * (rows + parts) * part
    assert max(map(sum, rounds)) == room

    def without_bits(memory, pieces, spins):
        for piece in pieces:
            for _, into in piece.reads:
                into.zero_()

    monkeypatch.setattr(copies, "_copy", without_bits)
    assert tried(kind, ranks, room) == [False] * ranks
