"""The values of reductions over NCCL, on a double of its process groups that computes what NCCL does."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.test_hierarchical import by_hosts, random_terms, scatter
from tests.support.fabric import Fabric, Rank, on_all_ranks
from tests.support.fake_cuda import FakeCuda
from tests.support.races import Races
from ztrans import ops
from ztrans.ir.collectives import reduce, rules
from ztrans.ir.graph import Eqn, Split, Var
from ztrans.ir.routes import Hosts
from ztrans.runtime import mesh
from ztrans.runtime.channels import Channel
from ztrans.runtime.collectives import Start, wait
from ztrans.runtime.communicators import tuning_of
from ztrans.runtime.cuda.hierarchical import HierarchicalStart
from ztrans.runtime.cuda.nccl import StreamedStart, Transport
from ztrans.runtime.cuda.streams import Streams

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
DTYPES = [
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("to", [None, Split("dp")], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reduction_over_nccl_has_the_values_of_the_program(dtype, op, to):
    """The mean of integers too: it is a sum that is divided after it has arrived."""
    eqn = reduce([Var("x", dtype, (4,))], ["x"], "dp", op, to)
    terms = [[torch.tensor([5, 7, 0, 1]).to(dtype)], [torch.tensor([2, 4, 0, 6]).to(dtype)]]
    want = rules(eqn).member(eqn, 0, [term for (term,) in terms])
    for rank, (value,) in enumerate(on_all_ranks(eqn, Hosts(2), terms)):
        assert torch.equal(value, want[rank])


def test_the_mean_of_integers_is_exact_and_cut_off():
    """A quotient in fp32 would round an integer of more than 24 bits."""
    terms = [torch.tensor([2**24 + 1, -7]), torch.tensor([2**24 + 1, 0])]
    assert ops.reduce(terms, "mean", torch.int64).tolist() == [2**24 + 1, -3]


def test_gloo_does_not_add_the_bytes_of_bools(monkeypatch):
    """A bool that holds 2 is neither true nor false to torch."""

    def as_gloo(tensor, op, group, async_op):
        mine = tensor.view(torch.uint8)
        theirs = torch.tensor([1, 1, 0, 0], dtype=torch.uint8)
        if op == dist.ReduceOp.SUM:
            mine.add_(theirs)
        else:
            torch.maximum(mine, theirs, out=mine)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", as_gloo)
    monkeypatch.setattr(Channel, "group", None)
    monkeypatch.setattr(Channel, "is_gloo", False)
    eqn = reduce([Var("x", torch.bool, (4,))], ["x"], "dp", "sum", None)
    start = Start(eqn, {"dp": 9}, {"dp": 0}, Channel("dp", "reductions"))
    (member,) = start(torch.tensor([True, False, True, False]))
    assert wait(member).view(torch.uint8).tolist() == [1, 1, 1, 0]


RANKS = 8
# A member with a message of its own, and two that share one. The last ranks have less of the third, or nothing.
SHAPES = ((1 << 18,), (24, 3), (RANKS + 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("result", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_half_precision_is_summed_in_rank_order(op, result, dim):
    """Members that are transposed, and results of other dtypes, have the same bits."""
    shapes = SHAPES if dim == 0 else ((4, 40), (3, 3, 2))
    eqn = scatter(shapes, op, result, BF16, dim)
    terms = random_terms(eqn, RANKS)
    for rank, values in enumerate(on_all_ranks(eqn, Hosts(RANKS), terms)):
        for k, value in enumerate(values):
            sent = [term[k].to(BF16) for term in terms]
            assert torch.equal(value, rules(eqn).member(eqn, k, sent)[rank])
            assert value.is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [Hosts(6, 2), Hosts(16, 4)])
@pytest.mark.parametrize(("dtype", "wire", "partial"), [(BF16, None, F32), (F32, BF16, BF16)])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_between_hosts_the_bits_are_those_of_sums_by_host(hosts, op, dtype, wire, partial):
    eqn = scatter([(6 * 2**15,), (7, 3), (hosts.ranks + 1, 2)], op, dtype, wire)
    terms = random_terms(eqn, hosts.ranks)
    values = on_all_ranks(eqn, hosts, terms)
    for k in range(len(eqn.outs)):
        whole = by_hosts([term[k] for term in terms], op, hosts, BF16, partial, dtype)
        assert torch.equal(torch.cat([each[k] for each in values]), whole)


def test_the_first_level_of_a_message_runs_beside_the_second_level_of_the_one_before(monkeypatch):
    """Each level has a communicator and a lane. The second level of a message waits for its own first level alone."""
    hosts = Hosts(6, 2)
    eqn = scatter([(6 * 2**15,)], "mean", F32, BF16)
    launched = []

    def all_to_all(into, terms, group, ranks):
        into.fill_(0)
        launched.append((group, list(ranks), dict(cuda.now.clock)))

    monkeypatch.setattr("ztrans.runtime.cuda.hierarchical.all_to_all", all_to_all)
    inside = Rank(Fabric(6), 1, hosts)
    between = Rank(Fabric(6), 1, hosts)
    (term,) = random_terms(eqn, 1)[0]
    with Races() as cuda:
        common = (
            eqn,
            {"dp": 6},
            {"dp": 1},
            between,
            Streams(cuda),
            Transport("hierarchical", "reduce_scatter", "a double"),
        )
        start = HierarchicalStart(inside, *common)
        futures = [start(term), start(term)]
        for (member,) in futures:
            wait(member)
    assert cuda.races == []
    first, _, second, first_of_next, _, second_of_next = launched
    assert [group for group, _, _ in launched] == [inside, inside, between] * 2
    assert [ranks for _, ranks, _ in launched] == [[0, 1, 2], [0, 1, 2], [1, 4]] * 2
    lane, inside_lane = start.lane, start.inside_lane
    assert lane not in first_of_next[2], "it does not wait for the second level before it"
    assert first[2][inside_lane] <= second[2][inside_lane] < first_of_next[2][inside_lane]
    assert second[2][lane] < second_of_next[2][lane]


class OutOfMemory(Exception):
    """The error of a step."""


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_that_fails_in_a_hierarchical_message_frees_no_memory_in_use(monkeypatch, call):
    """The first level may still read the terms, and write the sums, when the launch of the second level fails."""
    hosts = Hosts(6, 2)
    eqn = scatter([(6 * 2**15 - 1,)], "mean", F32, BF16)
    calls = []

    def all_to_all(into, terms, group, ranks):
        into.copy_(terms[: len(into)])
        calls.append(group)
        if len(calls) == call:
            raise OutOfMemory

    monkeypatch.setattr("ztrans.runtime.cuda.hierarchical.all_to_all", all_to_all)
    inside, between = (Rank(Fabric(6), 1, hosts) for _ in range(2))
    (term,) = random_terms(eqn, 1)[0]
    with Races() as cuda:
        transport = Transport("hierarchical", "reduce_scatter", "a double")
        common = eqn, {"dp": 6}, {"dp": 1}, between, Streams(cuda), transport
        start = HierarchicalStart(inside, *common)
        with pytest.raises(OutOfMemory):
            start(term)
        start.join()  # as an executable does after an error
        gc.collect()
        tensors = [torch.empty(size).fill_(1.0) for size in 6 * [64, 2**12, 2**15, 2**17]]
    assert len(calls) == call and tensors and cuda.races == []


@pytest.mark.parametrize(
    ("hosts", "most"),
    [(Hosts(16, 2), 0), (Hosts(64, 8), 0), (Hosts(8, 2), 1 / 8), (Hosts(6, 2), 1 / 2)],
)
@pytest.mark.parametrize("sends_without_copy", [True, False])
def test_the_bytes_of_a_hierarchical_message(monkeypatch, hosts, most, sends_without_copy):
    """The sums of hosts, and what one exchange sends and receives, or the sums of all hosts.

    An exchange of the terms for one host sends them in place; one for several hosts packs them.
    """
    shape = (hosts.ranks * 4096,) if sends_without_copy else (hosts.ranks * 4096 - 1,)
    eqn = scatter([shape], "mean", BF16)
    assert rules(eqn).sends_without_copy(eqn, 0, {"dp": hosts.ranks}) == sends_without_copy
    monkeypatch.setattr(
        "ztrans.runtime.cuda.hierarchical.all_to_all",
        lambda into, terms, group, ranks: into.fill_(0),
    )
    inside, between = (Rank(Fabric(1), 1, hosts) for _ in range(2))
    (term,) = random_terms(eqn, 1)[0]
    with Races() as cuda:
        streams = Streams(cuda)
        transport = Transport("hierarchical", "reduce_scatter", "a double")
        sizes = {"dp": hosts.ranks}
        start = HierarchicalStart(inside, eqn, sizes, {"dp": 1}, between, streams, transport)
        (member,) = start(term)
        value = wait(member)
    terms = hosts.ranks * 4096 * 2
    sums = terms * 2 // hosts.local
    taken = sums + max(terms // 2, sums)
    send_buffer = 0 if sends_without_copy else terms
    assert cuda.races == [] and cuda.peak == send_buffer + taken + value.nbytes
    assert rules(eqn).sent_bytes(eqn, sizes) == send_buffer
    assert taken - rules(eqn).received_bytes(eqn, 0, sizes) <= most * terms


def test_a_sum_of_half_precision_moves_20_bytes_an_element():
    """For 8 ranks: 16 are read, and 4 written, in one launch. A launch for each term would move 92."""
    eqn = scatter([(RANKS * 4096,)], "mean", F32, BF16)
    terms = random_terms(eqn, RANKS)
    assert moved_by_each_rank(eqn, terms)["sum_terms"] == 20 * 4096
    rows = [term[0].to(BF16)[:4096] for term in terms]
    with Traffic() as traffic:
        total = ops.reduce(rows, "mean", F32)
        torch.ops.ztrans.unpack(total, [4096], 1, [torch.empty(4096)])
    assert traffic.launches == 10 and sum(traffic.moved.values()) // 4096 == 92


def test_a_mean_of_packed_floats_is_scaled_while_it_is_delivered():
    """One read and one write of each element. A mean of its own message is scaled in place."""
    eqn = scatter([(RANKS, 4), (RANKS, 2)], "mean", F32)
    moved = moved_by_each_rank(eqn, random_terms(eqn, RANKS))
    assert moved["sum_terms"] == 8 * 6 and not {"div_", "mul_"} & moved.keys()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_total_that_is_cast_is_scaled_by_the_same_launch(op):
    """Also of 3 ranks, whose reciprocal is not exact: the quotient is rounded once."""
    terms = [Var(f"g{k}", BF16, shape) for k, shape in enumerate([(1 << 17,), (5, 3), (7,)])]
    eqn = reduce(terms, ["f", "g", "h"], "dp", op, None, F32, BF16)
    values = random_terms(eqn, 3)
    moved = moved_by_each_rank(eqn, values)
    padded, numel = (1 << 17) + 2 * 16, (1 << 17) + 15 + 7
    assert moved["sum_terms"] == 4 * padded + 2 * numel
    assert not {"mul_", "div_"} & moved.keys()
    for rank in on_all_ranks(eqn, Hosts(3), values):
        for k, value in enumerate(rank):
            total = values[0][k].float() + values[1][k].float() + values[2][k].float()
            assert torch.equal(value, (total / 3 if op == "mean" else total).to(BF16))


@pytest.mark.parametrize("numel", [48, 1 << 20], ids=["short", "long"])
def test_a_whole_total_of_half_precision_is_written_over_its_terms(numel):
    """Its parts are summed in fp32, rounded once, and gathered as the backend would send them."""
    eqn = reduce([Var("g", BF16, (numel,))], ["f"], "dp", "mean", None)
    values = random_terms(eqn, 3)
    part = -(-numel // (3 * 16)) * 16
    moved = moved_by_each_rank(eqn, values)
    terms = 3 * numel if numel == 48 else 3 * part
    assert moved["sum_terms"] == 2 * terms + 2 * terms // 3
    assert not {"mul_", "div_"} & moved.keys()
    for (value,) in on_all_ranks(eqn, Hosts(3), values):
        assert torch.equal(value, rules(eqn).total(eqn, 0, [term for (term,) in values]))


@pytest.mark.parametrize("wire", [None, BF16], ids=["in place", "cast"])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_launches_of_two_levels_do_not_grow_with_hosts_and_members(monkeypatch, wire, dim):
    """At most three exchanges inside a host, with a sum for each, and one between hosts, with another sum."""
    launched = []

    def all_to_all(into, terms, group, ranks):
        into.fill_(0)
        launched.append(group)

    monkeypatch.setattr("ztrans.runtime.cuda.hierarchical.all_to_all", all_to_all)
    for count, members in ((2, 1), (2, 6), (8, 1), (8, 6), (16, 7)):
        hosts = Hosts(8 * count, count)
        shape = (8 * count * 2**13,) if dim == 0 else (2, 8 * count * 2**12)
        eqn = scatter([shape] * members, "mean", F32 if wire else BF16, wire, dim)
        inside, between = (Rank(Fabric(1), 1, hosts) for _ in range(2))
        (terms,) = random_terms(eqn, 1)
        launched.clear()
        transport = Transport("hierarchical", "reduce_scatter", "a double")
        with Races() as cuda:
            common = eqn, {"dp": hosts.ranks}, {"dp": 1}, between, Streams(cuda), transport
            for member in HierarchicalStart(inside, *common)(*terms):
                wait(member)
        names = [name for name, _ in cuda.launches]
        exchanges = launched.count(inside)
        assert exchanges <= 4 and launched.count(between) == 1, (count, members, exchanges)
        assert names.count("sum_terms") == exchanges + 1
        assert names.count("cast_pack") <= exchanges + 1
        assert cuda.races == []


def moved_by_each_rank(eqn: Eqn, terms: list[list[torch.Tensor]]) -> dict[str, int]:
    """The bytes that a rank's launches read and write, by operation."""
    modes = [Traffic() for _ in terms]
    on_all_ranks(eqn, Hosts(len(terms)), terms, modes)
    assert all(mode.moved == modes[0].moved for mode in modes)
    return modes[0].moved


@pytest.mark.parametrize(
    ("name", "of_user", "expected"),
    [
        ("NCCL_LAUNCH_ORDER_IMPLICIT", None, "1"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "0", "0"),
        ("NCCL_GRAPH_REGISTER", None, "0"),
        ("NCCL_GRAPH_REGISTER", "1", "1"),
    ],
)
def test_nccl_is_set_up_before_the_first_communicator(monkeypatch, name, of_user, expected):
    """It orders launches, and registers no buffers of CUDA graphs. A value of the user stays."""
    monkeypatch.setenv(name, of_user or "")
    if of_user is None:
        monkeypatch.delenv(name)
    began = []
    monkeypatch.setattr(mesh, "_chosen_device", lambda device: device)
    monkeypatch.setattr(mesh, "_begin", lambda backend: began.append(os.environ.get(name)))
    monkeypatch.setattr(mesh, "init_device_mesh", lambda *shape, mesh_dim_names: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    mesh.make_mesh("cpu", dp=-1)
    assert began == [of_user], "nothing is set for gloo"
    mesh.make_mesh("cuda", dp=-1)
    assert began == [of_user, expected]


class Traffic(TorchDispatchMode):
    """Counts the launches, and the bytes that they read and write."""

    WRITE_ONLY = ("copy_", "sum_terms", "unpack", "cast_pack", "_to_copy", "full")

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.moved: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            arguments = zip(func._schema.arguments, args)
            written = [x for a, x in arguments if a.alias_info is not None]
            only_written = pytree.tree_leaves(written) if name in self.WRITE_ONLY else []
            read = [x for x in pytree.tree_leaves(args) if not any(x is y for y in only_written)]
            writes = pytree.tree_leaves(written) or pytree.tree_leaves(result)
            self.launches += 1
            nbytes = sum(x.nbytes for x in (*read, *writes) if isinstance(x, torch.Tensor))
            self.moved[name] = self.moved.get(name, 0) + nbytes
        return result


@pytest.mark.parametrize("kept", [True, False])
def test_a_term_is_sent_from_its_storage_only_if_the_program_keeps_it(monkeypatch, kept):
    """The program may write over a term that it does not keep while the term is sent."""
    eqn = scatter([(4, 3)], "sum", F32)
    assert rules(eqn).sends_without_copy(eqn, 0, {"dp": 2})
    monkeypatch.setattr(type(rules(eqn)), "sends_without_copy", lambda *arguments: kept)
    channel = Rank(Fabric(2), 0, Hosts(2))
    transport = Transport("nccl", "reduce_scatter", "a double")
    start = StreamedStart(eqn, {"dp": 2}, {"dp": 0}, channel, Streams(FakeCuda()), transport)
    term = torch.ones(4, 3)
    message = start.message([0], [term])
    (send_buffer,) = message.send_buffers
    assert (send_buffer.data_ptr() == term.data_ptr()) == kept


class Options:
    """Stands in for the options of a group of NCCL."""

    def __init__(self) -> None:
        self.config = "as NCCL chooses"
        self.is_high_priority_stream = False
        self.split_from = None
        self._timeout = None


def test_a_new_communicator_is_tuned_as_the_one_of_the_mesh():
    user = Options()
    user.config = "max_ctas=8"
    user.is_high_priority_stream = True
    user.split_from = "the world"
    backend = SimpleNamespace(options=user)
    group = SimpleNamespace(_device_types=["cuda"], _get_backend=lambda device: backend)
    tuned = tuning_of(group, timedelta(seconds=5))
    assert vars(tuned) == vars(user) | {"split_from": None, "_timeout": timedelta(seconds=5)}
    assert tuned is not user
    backend.options = SimpleNamespace(_timeout=timedelta(seconds=5))
    assert tuning_of(group, None) is None, "gloo has no tuning"
