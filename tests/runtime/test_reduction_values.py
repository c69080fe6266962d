"""A table: each reduction, of each dtype, on each way between ranks, has the values that torch has for the stacked terms.

NaN, both infinities and a negative zero are at the place of each rank in turn. Finite terms are whole multiples of 1/4,
so every order of a sum has the same bits, if it is not rounded on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.support.fabric import Fabric, Rank, on_all_ranks
from tests.support.fake_cuda import FakeCuda
from tests.support.gloo_threads import gloo_channels, on_threads
from tests.support.mailbox import LocalChannel, channels
from ztrans.ir.collectives import LARGE_MEMBER, host_sum_format, reduce
from ztrans.ir.graph import Eqn, Partial, Split, Var
from ztrans.ir.layout import cut
from ztrans.ir.routes import Hosts
from ztrans.ops.symmetric import in_one_process
from ztrans.runtime import collectives
from ztrans.runtime.channels import Channel
from ztrans.runtime.collectives import Start, has_second_level_at_wait, wait
from ztrans.runtime.cuda.nccl import Transport
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import MOST_SPINS, Buffer
from ztrans.runtime.cuda.symmetric_start import SymmetricStart

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [F64, F32, BF16, F16, torch.int64, torch.int32, torch.int16, torch.bool]
OPS = ["sum", "mean", "max", "min"]
SPECIAL = [math.nan, math.inf, -math.inf]
# Elements of a message whose whole terms ranks exchange, and of one that is too long for that in any dtype.
SHORT, LONG = 96, LARGE_MEMBER * 3 // 2 + 96


def all_terms(dtype: torch.dtype, ranks: int, numel: int) -> list[torch.Tensor]:
    """The term of each rank. The first elements have a special value at one rank; the last ones are large."""
    draw = torch.Generator().manual_seed(0)
    terms = torch.randint(-8, 8, (ranks, numel), generator=draw)
    if dtype == torch.bool:
        return list((terms > 0) | (torch.arange(numel) < ranks))
    if not dtype.is_floating_point:
        terms[:, -4:] = 3 + 2 ** {torch.int16: 10, torch.int32: 20, torch.int64: 40}[dtype]
        return list(terms.to(dtype))
    values = terms.to(F64) / 4
    for rank in range(ranks):
        for k, special in enumerate(SPECIAL):
            values[rank, 3 * rank + k] = special
        for k, others in enumerate((-1.0, 0.0, 1.0)):
            values[:, 3 * (ranks + rank) + k] = others
            values[rank, 3 * (ranks + rank) + k] = -0.0
    values[:, -8:-4] = -0.0
    # Each is finite in fp16, and so is their mean, but not their sum.
    values[:, -4:] = 40_000 if dtype == F16 else 2.0**20
    return list(values.to(dtype))


def expected(terms: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(list(terms))
    dtype = stacked.dtype
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if dtype == torch.bool:
        return stacked.any(0)
    # Term by term: `sum` begins with a positive zero.
    total = functools.reduce(torch.add, stacked.to(F32 if dtype in (BF16, F16) else dtype))
    if op == "mean":
        rounding = None if dtype.is_floating_point else "trunc"
        total = torch.div(total, torch.tensor(len(terms)), rounding_mode=rounding)
    return total.to(dtype)


def same(value: torch.Tensor, want: torch.Tensor, is_signed: torch.Tensor) -> bool:
    """Whether all values are equal, NaN where NaN is expected, and the zeros at `is_signed` have the same sign."""
    if not want.dtype.is_floating_point:
        return torch.equal(value, want)
    zeros = is_signed & (want == 0)
    signs = torch.equal(value.signbit()[zeros], want.signbit()[zeros])
    return torch.allclose(value, want, rtol=0, atol=0, equal_nan=True) and signs


def reduction(op: str, dtype: torch.dtype, numel: int, scatters: bool) -> Eqn:
    term = Var("g", dtype, (numel,), (Partial("dp", "sum"),))
    return reduce([term], ["f"], "dp", op, Split("dp") if scatters else None)


def check(eqn: Eqn, terms: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    op = eqn.kwargs["op"]
    whole = expected(terms, op)
    # The larger one of two zeros may have either sign: that of `torch.maximum` depends on the processor.
    signs = torch.stack([term.signbit() for term in terms])
    is_signed = (signs == signs[0]).all(0) | (op in ("sum", "mean"))
    split = eqn.results[0].split
    for rank, value in enumerate(values):
        want, is_signed_here = whole, is_signed
        if split is not None:
            want, is_signed_here = (cut(x, split, len(terms), rank) for x in (whole, is_signed))
        assert value.shape == want.shape and value.dtype == want.dtype
        if not same(value, want, is_signed_here):
            raise AssertionError(
                f"rank {rank} of {len(terms)} has {value.tolist()}, not {want.tolist()}"
            )


# (hosts, elements, whether a shard is wanted): short and long messages, one host and several, more ranks than exchange.
WAYS = [
    (Hosts(2), SHORT, False), (Hosts(3), SHORT, False), (Hosts(3), LONG, False), (Hosts(9), SHORT, False),
    (Hosts(3), SHORT, True), (Hosts(6, 2), SHORT, True), (Hosts(6, 2), LONG, False), (Hosts(10, 2), SHORT, False),
]  # fmt: skip
NAMES = [
    f"{h.count}x{h.local}-{'long' if n == LONG else 'short'}-{'part' if s else 'whole'}"
    for h, n, s in WAYS
]


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def gloo(request) -> Iterator[tuple[Hosts, int, bool, list[Channel]]]:
    hosts, numel, scatters = request.param
    with gloo_channels(hosts) as opened:
        groups = [channel.group for channel in opened]
        yield hosts, numel, scatters, opened
        del groups


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_over_gloo(gloo, op, dtype):
    hosts, numel, scatters, opened = gloo
    eqn = reduction(op, dtype, numel, scatters)
    terms = all_terms(dtype, hosts.ranks, numel)

    def run(rank: int) -> torch.Tensor:
        start = Start(eqn, {"dp": hosts.ranks}, {"dp": rank}, opened[rank])
        (member,) = start(terms[rank].clone())
        return wait(member)

    check(eqn, terms, on_threads(hosts.ranks, run))


@pytest.mark.parametrize(("hosts", "numel", "scatters"), WAYS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_over_nccl(hosts, numel, scatters, op, dtype):
    """On a double that rounds at every hop, and whose maximum loses NaN."""
    eqn = reduction(op, dtype, numel, scatters)
    terms = all_terms(dtype, hosts.ranks, numel)
    values = on_all_ranks(eqn, hosts, [[term.clone()] for term in terms])
    check(eqn, terms, [value for (value,) in values])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_through_symmetric_memory(op, dtype):
    """It carries sums of half precision alone."""
    ranks = 3
    eqn = reduction(op, dtype, SHORT, scatters=True)
    terms = all_terms(dtype, ranks, SHORT)
    memories = in_one_process(ranks, 2 * SHORT)
    fabric = Fabric(ranks)

    def run(rank: int) -> torch.Tensor:
        channel = Rank(fabric, rank, Hosts(ranks))
        buffer = Buffer(channel, 2 * SHORT, memories[rank], MOST_SPINS)
        transport = Transport("symmetric", "reduce_scatter", "a double")
        common = eqn, {"dp": ranks}, {"dp": rank}, channel, Streams(FakeCuda()), transport
        (member,) = SymmetricStart(buffer, *common)(terms[rank].clone())
        return wait(member)

    check(eqn, terms, on_threads(ranks, run))


@pytest.mark.parametrize("scatters", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_mean_of_a_host_is_finite_in_fp16(backend, scatters):
    """With `reduce_dtype=torch.float16` the hosts send what they have reduced in fp16, where their sum is infinite."""
    hosts = Hosts(6, 2)
    term = Var("g", F32, (LONG,), (Partial("dp", "sum"),))
    to = Split("dp") if scatters else None
    eqn = reduce([term], ["f"], "dp", "mean", to, F16, F32)
    terms = [torch.full((LONG,), 30_000.0 + 64 * rank) for rank in range(6)]
    if backend == "nccl":
        values = [value for (value,) in on_all_ranks(eqn, hosts, [[term] for term in terms])]
    else:
        with gloo_channels(hosts) as opened:
            groups = [channel.group for channel in opened]
            starts = [Start(eqn, {"dp": 6}, {"dp": rank}, opened[rank]) for rank in range(6)]
            values = on_threads(6, lambda rank: wait(*starts[rank](terms[rank])))
            del groups
    for value in values:
        assert ((value - 30_160).abs() <= 16).all(), "to the rounding of fp16"


def test_a_bucket_changes_no_bit_of_half_precision():
    """Eight fp16 gradients of 20 KiB, alone and in one message of 160 KiB, among three ranks of gloo."""
    ranks = 3
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(8, ranks, 10_000, generator=draw).mul(4e4).add(2e4).to(F16)
    with gloo_channels(Hosts(ranks)) as opened:
        groups = [channel.group for channel in opened]

        def run(rank: int) -> list[torch.Tensor]:
            alone = reduction("mean", F16, 10_000, scatters=False)
            members = [Var(f"g{k}", F16, (10_000,), (Partial("dp", "sum"),)) for k in range(8)]
            bucket = reduce(members, [f"f{k}" for k in range(8)], "dp", "mean", None)
            sizes, at = {"dp": ranks}, {"dp": rank}
            by_member = [
                wait(*Start(alone, sizes, at, opened[rank])(term[rank])) for term in values
            ]
            together = Start(bucket, sizes, at, opened[rank])(*(term[rank] for term in values))
            return [
                torch.equal(wait(member), value) and bool(value.isfinite().all())
                for member, value in zip(together, by_member)
            ]

        assert on_threads(ranks, run) == [[True] * 8] * ranks
        del groups


def test_parts_of_a_total_are_gathered_from_the_next_start_on():
    """So they cross the wire beside compute, and not only when they are waited for."""
    eqn = reduction("mean", BF16, LONG, scatters=False)
    mail, groups, opened = channels(Hosts(3))
    starts = [Start(eqn, {"dp": 3}, {"dp": rank}, opened[rank]) for rank in range(3)]
    terms = all_terms(BF16, 3, LONG)
    first = [start(term) for start, term in zip(starts, terms)]
    half = 3 * 2 * 2 * -(-LONG // 3)
    assert mail.nbytes.total() == half
    second = [start(term) for start, term in zip(starts, terms)]
    assert mail.nbytes.total() == 3 * half
    for channel in opened:
        channel.advance()
    assert mail.nbytes.total() == 4 * half, "as many bytes as in a ring"
    for started in (first, second):
        check(eqn, terms, [wait(member) for (member,) in started])
    del groups


@pytest.mark.parametrize(
    ("dtype", "op", "hosts", "numel", "has_second"),
    [
        (BF16, "mean", Hosts(3), LONG, True),
        (BF16, "mean", Hosts(3), SHORT, False),
        (BF16, "mean", Hosts(9), SHORT, True),
        (BF16, "mean", Hosts(2), LONG, False),
        (F32, "max", Hosts(3), LONG, True),
        (F32, "mean", Hosts(3), LONG, False),
        (F32, "mean", Hosts(10, 2), LONG, False),
    ],
)
def test_ranks_compare_the_waits_that_send_parts_of_a_total(
    monkeypatch, dtype, op, hosts, numel, has_second
):
    """If ranks waited in different orders, each could wait for what another one sends later."""
    channel = LocalChannel("dp", "reductions", hosts=hosts)
    monkeypatch.setattr(collectives, "channel_of", lambda mesh, eqn: channel)
    eqn = reduction(op, dtype, numel, scatters=False)
    assert has_second_level_at_wait(None, eqn, {"dp": hosts.ranks}) == has_second


def test_a_maximum_is_sent_between_hosts_in_its_own_dtype():
    """It is exact, where a sum of half precision is sent in fp32."""
    largest, total = (reduction(op, BF16, SHORT, scatters=True) for op in ("max", "sum"))
    assert host_sum_format(largest, largest.ins[0]).carrier == BF16
    assert host_sum_format(total, total.ins[0]).carrier == F32
