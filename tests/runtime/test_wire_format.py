"""Collectives that send codes, over gloo between ranks that are objects of one process."""

from __future__ import annotations

import functools
from itertools import chain
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from benchmarks.peers.memory import Peak, lent
from tests.support.mailbox import channels
from ztrans.ir.collectives import all_gather, coalesce, reduce, rules
from ztrans.ir.graph import Eqn, Graph, Partial, Provenance, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.printer import equation, lines
from ztrans.ir.routes import Hosts, route_of
from ztrans.ir.wire_format import Coded, format_of
from ztrans.ops.decode import decode_blocks
from ztrans.ops.encode import encode_blocks
from ztrans.runtime.collectives import Start, wait
from ztrans.runtime.contract import message_lines
from ztrans.runtime.hierarchical import HierarchicalMessage
from ztrans.runtime.inductor import codec

I8, I4, E4M3 = Coded(8, 256), Coded(4, 64), Coded(8, 16, "fp8")
F32, BF16 = torch.float32, torch.bfloat16
WHY = Provenance("param", ("w",), "dp")


def gather(shapes, sent, dtype=F32, result=None, dim=0) -> Eqn:
    """A gather of one bucket."""
    starts = []
    for k, shape in enumerate(shapes):
        shard = Var(f"w{k}", dtype, shape, (Split("dp", dim),))
        start = all_gather([shard], [f"w{k}.full"], "dp", provenance=WHY)
        future = Var(f"w{k}.full'", result or dtype, shape, future=True)
        kwargs = {"dtype": sent, "axis": "dp"}
        starts.append(start.replace(outs=(future,), kwargs=kwargs))
    return coalesce(starts)


def reduction(shapes, sent, dtype=F32, to=None, op="mean", between=None) -> Eqn:
    """A reduction of one bucket: a reduce_scatter along the dim `to`, or an all_reduce."""
    terms = [Var(f"g{k}", dtype, shape, (Partial("dp", "sum"),)) for k, shape in enumerate(shapes)]
    split = None if to is None else Split("dp", to)
    names = [f"f{k}" for k in range(len(shapes))]
    start = reduce(terms, names, "dp", op, split, dtype=sent, provenance=WHY)
    return start.replace(kwargs={**start.kwargs, "between": between}) if between else start


def inputs_of(eqn: Eqn, ranks: int) -> list[list[torch.Tensor]]:
    """The members of each rank, of very different sizes."""
    torch.manual_seed(0)
    members: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for v in eqn.ins:
        whole = torch.randn(v.shape, dtype=v.dtype)
        for rank in range(ranks):
            if v.split is None:
                members[rank].append(torch.randn(v.shape).mul(10.0 ** (rank % 3)).to(v.dtype))
            else:
                members[rank].append(cut(whole, v.split, ranks, rank).clone())
    return members


def run(
    eqn: Eqn, hosts: Hosts, members, formats=MappingProxyType({})
) -> tuple[list[list[torch.Tensor]], int]:
    """The values on each rank, and the bytes that were sent between all ranks."""
    assert rules(eqn).problem(eqn, {"dp": hosts.ranks}) is None
    mail, groups, opened = channels(hosts)
    sizes = {"dp": hosts.ranks}
    started = []
    for rank, channel in enumerate(opened):
        started.append(Start(eqn, sizes, {"dp": rank}, channel, formats)(*members[rank]))
    for _ in range(4):  # the levels of a message
        for channel in opened:
            channel.advance()
        for futures in started:
            begin_levels(futures[0].future.work.works)
    values = [list(map(wait, futures)) for futures in started]
    del groups
    return values, mail.nbytes.total()


def begin_levels(works) -> None:
    """Let messages of several levels, and those inside them, send what has arrived."""
    for work in works:
        if isinstance(work, HierarchicalMessage):
            begin_levels(work._works)
            work.advance()


def lockstep(eqn: Eqn, members) -> list[list[torch.Tensor]]:
    environments = [dict(zip(eqn.ins, given)) for given in members]
    return [list(x) for x in rules(eqn).meaning([eqn] * len(members), environments)]


# Rank 2 of 3 has no row of two; rank 3 of 4 none of three.
SHAPES = [(64, 40), (2, 3), (7,), (3, 300)]
CASES = {
    "gather": gather(SHAPES, I8),
    "gather 4 bits, to bf16": gather(SHAPES, I4, result=BF16),
    "gather fp8 of bf16": gather(SHAPES, E4M3, BF16),
    "gather along dim 1": gather([(3, 7), (300, 2)], I4, dim=1),
    "gather one": gather([(5, 100)], I8),
    "scatter": reduction(SHAPES, I8, to=0),
    "scatter 4 bits of bf16": reduction(SHAPES, I4, BF16, to=0, op="sum"),
    "scatter along dim 1": reduction([(3, 7), (300, 2)], I8, to=1),
    "all_reduce": reduction([*SHAPES, ()], I8),
    "all_reduce 4 bits of bf16": reduction(SHAPES, I4, BF16),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_codes_over_gloo_have_the_bits_of_lockstep(name, ranks):
    """Blocks belong to the part of one rank, so buckets, padding and empty parts change no bit."""
    eqn = CASES[name]
    members = inputs_of(eqn, ranks)
    values, _ = run(eqn, Hosts(ranks), members)
    for here, expected in zip(values, lockstep(eqn, members)):
        for x, y in zip(here, expected):
            assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_a_bucket_has_the_bits_of_its_members_alone(name):
    eqn = CASES[name]
    members = inputs_of(eqn, 3)
    values, _ = run(eqn, Hosts(3), members)
    for k, (v, out) in enumerate(zip(eqn.ins, eqn.outs)):
        alone, _ = run(eqn.replace(args=([v],), outs=(out,)), Hosts(3), [[x[k]] for x in members])
        assert all(torch.equal(x[k], y) for x, (y,) in zip(values, alone))


@pytest.mark.parametrize("name", [name for name in CASES if "gather" in name])
def test_hosts_pass_codes_on_as_they_are(name):
    eqn = CASES[name]
    members = inputs_of(eqn, 4)
    values, _ = run(eqn, Hosts(4, 2), members)
    for here, expected in zip(values, lockstep(eqn, members)):
        assert all(map(torch.equal, here, expected))


@pytest.mark.parametrize("between", [None, I4, Coded(8, 64), BF16], ids=str)
@pytest.mark.parametrize("to", [0, None])
def test_hosts_send_each_other_sums_of_decoded_terms(to, between):
    """In fp32 inside a host, then in the format between hosts, with a mean that is divided once, at the end."""
    shapes = [(64, 40), (6, 3)]
    eqn = reduction(shapes, I8, to=to, between=between)
    members = inputs_of(eqn, 4)
    values, _ = run(eqn, Hosts(4, 2), members)
    sent = format_of(between or I8)
    for k, shape in enumerate(shapes):
        # Both shapes have as many elements for each rank, in rows or one after another.
        width = -(-shape[0] // 4) * shape[1] if to == 0 else shape[0] * shape[1] // 4 + (k and 1)
        parts = [list(members[rank][k].reshape(-1).split(width)) for rank in range(4)]
        totals = []
        for part in range(len(parts[0])):
            terms = [I8.arrived(parts[rank][part]) for rank in range(4)]
            sums = [sent.arrived(terms[0] + terms[1]), sent.arrived(terms[2] + terms[3])]
            totals.append((sums[0].float() + sums[1].float()) / 4)
        if to == 0:
            empty = [torch.empty(0)] * (4 - len(totals))
            for here, expected in zip(values, [*totals, *empty]):
                assert torch.equal(here[k].reshape(-1), expected)
        else:
            whole = torch.cat([I8.arrived(total) for total in totals]).view(shape)
            assert all(torch.equal(here[k], whole) for here in values)


# A matrix, an uneven one, and leaves of one dim: the shapes of a transformer of width 384.
LAYER = [
    (1152, 384),
    (384, 384),
    (1536, 384),
    (384, 1536),
    (1152,),
    (384,),
    (1536,),
    (384,),
    (257, 384),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_codes_of_8_bits_take_half_of_the_bytes_of_bf16(ranks):
    """Scales, whole blocks of uneven parts and leaves of one dim included."""
    for eqn_of in (
        lambda sent: gather(LAYER, sent),
        lambda sent: reduction(LAYER, sent, to=0),
        lambda sent: reduction(LAYER, sent),
    ):
        nbytes = {}
        for sent in (BF16, I8, I4):
            eqn = eqn_of(sent)
            _, nbytes[sent] = run(eqn, Hosts(ranks), inputs_of(eqn, ranks))
            counted = rules(eqn).wire_bytes(eqn, {"dp": ranks}) * ranks
            assert nbytes[sent] <= counted * 1.001 if sent is BF16 else nbytes[sent] == counted
        assert nbytes[I8] <= 0.51 * nbytes[BF16]
        assert nbytes[I4] <= 0.285 * nbytes[BF16]


def test_hosts_send_each_other_a_quarter_of_the_bytes_with_4_bits_between_them():
    hosts, nbytes = Hosts(4, 2), {}
    for sent, between in ((BF16, None), (I8, None), (I8, I4)):
        eqn = reduction(LAYER, sent, to=0, between=between)
        route = route_of(eqn, {"dp": 4}, hosts, gloo=True)
        _, total = run(eqn, hosts, inputs_of(eqn, 4))
        assert total == round((route.inside + route.between) * 4)
        nbytes[sent, between] = route.between
    assert nbytes[I8, I4] <= 0.285 * nbytes[BF16, None]
    assert nbytes[I8, None] <= 0.51 * nbytes[BF16, None]


@pytest.mark.parametrize(("eqn", "problem"), [
    (gather([(4, 2)], I8, torch.float64), "w0: f64[4@dp,2] cannot be sent as i8/256: only f32, bf16 and f16 become codes"),
    (gather([(4, 2)], I8, torch.int8), "w0: i8[4@dp,2] cannot be sent as i8/256: only f32, bf16 and f16 become codes"),
    (reduction([(4, 2)], I4, op="max"), "a max is sent as i4/64, but only a sum or mean may be"),
    (reduction([(4, 2)], BF16, between=I8), "it has a format `between` hosts, but its terms are not sent as codes"),
])  # fmt: skip
def test_the_verifier_says_what_cannot_be_sent_as_codes(eqn, problem):
    assert rules(eqn).problem(eqn, {"dp": 2}) == problem


def test_a_format_prints_in_its_collective():
    eqn = reduction([(4, 2)], I8, to=0, between=I4)
    text = "f0': f32[4@dp,2]! = reduce_scatter([g0], mean, i8/256, axis=dp, between=i4/64)"
    assert equation(eqn) == text
    folded = gather([(4, 2)] * 40, I8)
    assert "[w0, ... 39 more: 10.16 KiB], i8/256, axis=dp" in "\n".join(lines(folded))


def test_ranks_compare_the_formats_of_their_messages():
    eqn = reduction([(4, 2)], I8, to=0, between=I4)
    line = "reduce_scatter mean over dp as i8/256, between hosts as i4/64, of f0 (520 bytes)"
    assert message_lines(Graph("f", (), (eqn,), (), 0, mesh=(("dp", 2),)), {}) == [line]


def test_one_nan_makes_its_block_nan_and_no_other():
    eqn = reduction([(4, 256)], I8, to=0, op="sum")
    members = inputs_of(eqn, 2)
    members[1][0][2, 7] = float("nan")
    values, _ = run(eqn, Hosts(2), members)
    assert not values[0][0].isnan().any()
    assert values[1][0][0].isnan().all() and not values[1][0][1].isnan().any()


@pytest.mark.parametrize(
    "eqn",
    [
        gather([(7, 40)], I8, F32, BF16),
        gather([(7, 40)], I4, BF16),
        reduction([(7, 40)], I8, BF16, to=0),
        reduction([(7, 40)], I8, BF16, to=0, between=I4),
        reduction([(7, 40)], I8),
    ],
    ids=["gather", "gather bf16", "reduce_scatter", "between hosts", "all_reduce"],
)
def test_what_a_program_needs_of_the_codec_is_compiled(eqn, monkeypatch):
    """Whatever ranks of two hosts look up when they send and receive is compiled before the first step."""
    called = set()

    def encoder(*key):
        called.add(key)
        return functools.partial(encode_blocks, bits=key[0].bits, kind=key[0].kind)

    def decoder(*key):
        called.add(key)
        return functools.partial(decode_blocks, bits=key[0].bits, kind=key[0].kind, add=key[2])

    monkeypatch.setattr(codec, "encoder", encoder)
    monkeypatch.setattr(codec, "decoder", decoder)
    formats = codec.compiled_formats(SimpleNamespace(eqns=[eqn]))
    compiled = {*called}
    called.clear()
    members = inputs_of(eqn, 4)
    ours, _ = run(eqn, Hosts(4, 2), members, formats)
    assert called and called <= compiled
    plain, _ = run(eqn, Hosts(4, 2), members)
    for mine, true in zip(chain.from_iterable(ours), chain.from_iterable(plain), strict=True):
        assert torch.equal(mine, true)


def test_a_wait_holds_one_sum_and_no_decoded_term():
    """Terms of 4 MiB: their sum and a few blocks, where four decoded terms would take 16 MiB."""
    eqn = reduction([(4, 1 << 20)], I8, to=0)
    sizes, (_, groups, opened) = {"dp": 4}, channels(Hosts(4))
    started = [
        Start(eqn, sizes, {"dp": r}, c)(torch.ones(4, 1 << 20)) for r, c in enumerate(opened)
    ]
    before = lent()
    with Peak() as peak:
        total = wait(started[0][0])
    assert torch.equal(total, torch.ones(1, 1 << 20))
    assert peak.bytes - before < 10 << 20
    del groups
