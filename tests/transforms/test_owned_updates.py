"""Each rank owns the updates of some matrices: the bits of the program in which every rank computes all."""

import functools
import itertools
from collections import Counter

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.owned import OPTIMIZERS, owned_case
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.worlds import ALL, batches, clone, fake_mesh, lower_traced, slices, traced
from ztrans.calling.call import BoundCall
from ztrans.ir.collectives import is_start, role, rules
from ztrans.ir.op_facts import is_matmul
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.executable import bind
from ztrans.runtime.inductor.compiler import infer_layouts
from ztrans.runtime.transports import StreamTransports

OWNED = zt.owned_updates()


def shard(ranks, stage=2, **options):
    return zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage, **options)


def lowered(case, ranks, *transforms):
    program = traced(case, ranks).with_transforms(transforms).lower()
    zt.ir.check(program.graph)
    return program


def trained(case, ranks, program, steps=3):
    state = clone(case.state())
    for batch in batches(case, steps):
        state, _ = program.lockstep(state, slices(batch, ranks))
    return pytree.tree_leaves(state)


def equal(got, wanted):
    return all(map(torch.equal, got, wanted))


def sent(program):
    """The collectives of the update by kind, and the bytes that a rank receives in them."""
    starts = [e for e in program.graph.eqns if is_start(e) and role(e) == "update"]
    nbytes = sum(rules(e).wire_bytes(e, program.graph.axes) for e in starts)
    return Counter(e.op.name for e in starts), nbytes


def products(program):
    return sum(is_matmul(e) and e.region == "update" for e in program.graph.eqns)


@pytest.mark.parametrize(
    "name, ranks, stage",
    [
        ("muon", 2, 3),
        ("muon", 3, 1),
        ("soap", 4, 2),
        ("shampoo", 3, 3),
        ("psgd", 2, 1),
        ("twice", 3, 2),
    ],
)
def test_the_bits_are_those_of_the_program_in_which_every_rank_updates_all(name, ranks, stage):
    """Also with a rank left over in a group, and with parts of other sizes, or empty ones."""
    case = owned_case(name)
    everywhere = lowered(case, ranks, shard(ranks, stage), *ALL)
    owned = lowered(case, ranks, shard(ranks, stage), OWNED, *ALL)
    assert equal(trained(case, ranks, owned), trained(case, ranks, everywhere))
    assert sent(owned)[0]["all_to_all"] >= 4
    assert [v.type for v in owned.graph.state] == [v.type for v in everywhere.graph.state], (
        "checkpoints do not change"
    )


class Matrices(nn.Module):
    """Eight matrices of one shape, and eight of its transpose."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(12, 16), (16, 12)] * 8
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s) / 4) for s in shapes])

    def forward(self, x):
        for w in self.weights:
            x = torch.tanh(x @ w)
        return x


@functools.cache
def lifted_muon():
    """A loop with PyTorch's Muon, as it is traced on a rank, and its state."""
    model = Matrices()
    optimizer = optim.Muon(model.parameters(), lr=0.02, momentum=0.9)

    def loop_step(x):
        optimizer.zero_grad()
        loss = mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    return zt.Step.of(step).trace(state, torch.randn(2, 12)), state


@pytest.mark.parametrize("ranks", [4, 8])
def test_muon_of_pytorch(ranks):
    traced, state = lifted_muon()
    programs = [traced.with_transforms((shard(ranks), *chain)).lower() for chain in ((), (OWNED,))]
    batch = (torch.randn(2 * ranks, 12),)
    results = [program.lockstep(clone(state), slices(batch, ranks))[0] for program in programs]
    assert equal(*map(pytree.tree_leaves, results))

    (kinds, before), (kinds_owned, after) = map(sent, programs)
    assert (kinds, kinds_owned) == ({"all_gather": 16}, {"all_to_all": 2 * 16 // ranks})
    assert after <= 2.1 / ranks * before, "what is sent back is bf16 too, and is widened afterwards"
    assert products(programs[1]) == products(programs[0]) // ranks


def test_an_exchange_starts_with_its_last_gradient_and_travels_under_the_chain_before():
    traced, _ = lifted_muon()
    chain = shard(4, 3), OWNED, zt.overlap_grads(bucket=0, max_in_flight=0), *ALL[1:]
    graph = traced.with_transforms(chain).lower().graph
    exchanges = [e for e in graph.eqns if e.op is zt.ir.ALL_TO_ALL]
    place = {e: k for k, e in enumerate(graph.eqns)}
    readers = zt.ir.users(graph)
    there, back = [], []
    for e in exchanges:
        (there if e.out.split.dim == 0 else back).append(e)
    assert len(there) == len(back) == 4
    last_product_of_backward = max(place[e] for e in graph.eqns if is_matmul(e) and e.region == "backward")  # fmt: skip
    assert place[there[0]] < last_product_of_backward, "the first group is ready in backward"
    for start, next_start in itertools.pairwise(back):
        (wait,) = readers[start.out]
        assert place[wait] > place[next_start], "the next chain runs while results travel"


def test_its_laws():
    case = owned_case("soap")
    (batch,) = batches(case, 1)
    zt.testing.check_laws(
        OWNED, case.step, case.state(), batch, worlds=(1, 3), stages=(2,), unsharded=False
    )


def test_one_rank_and_an_optimizer_without_products_are_left_as_they_are():
    alone = lowered(owned_case(), 1, shard(1))
    assert [e.op for e in lowered(owned_case(), 1, shard(1), OWNED).graph.eqns] == [
        e.op for e in alone.graph.eqns
    ]
    with pytest.raises(ValueError, match="owned_updates: the program is not sharded"):
        lowered(owned_case(), 1, OWNED)
    with pytest.raises(ValueError, match="applied after owned_updates"):
        zt.chain(OWNED, shard(2))(owned_case().step)


@pytest.mark.parametrize(
    "before, after",
    [((), (zt.offload(where="moments*", at_least=0),)), ((zt.accumulate(2),), ())],
    ids=["offload", "accumulate"],
)
def test_beside_other_transforms(before, after):
    case = owned_case(clipped=True)
    chain = (*before, shard(2), *ALL, *after)
    step = zt.chain(*chain)(case.step)
    programs = []
    for transforms in (chain, (*chain, OWNED)):
        (batch,) = batches(case, 1)
        step = zt.chain(*transforms)(case.step)
        programs.append(step.lower(case.state(), *slices(batch, 2)[0]))
    everywhere, owned = (trained(case, 2, program) for program in programs)
    assert equal(owned, everywhere)
    assert sent(programs[1])[0] == Counter(all_to_all=4, all_gather=2, all_reduce=1)


# ---- what is left on every rank


def test_a_matrix_without_an_equal_stays_and_a_note_says_so():
    program = lowered(owned_case(), 4, shard(4), OWNED)
    (note,) = program.graph.hints.notes
    assert "an update from bf16[5,7@dp]: there is no other one like it" in note
    assert "owned.py" in note and note in str(program.summary())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_without_gathers_has_a_note(stage):
    """Elementwise optimizers run on shards; at stage 0 nothing is a shard."""
    case = CASES["uneven"] if stage else owned_case()
    program = lowered(case, 2, shard(2, stage), OWNED)
    (note,) = program.graph.hints.notes
    assert "gathers no matrices, so ranks exchange none" in note
    assert ("use stage=1, 2 or 3" in note) == (stage == 0)
    assert not lowered(case, 1, shard(1, stage), OWNED).graph.hints.notes


def test_a_result_that_is_read_whole_stays(monkeypatch):
    """Such as the basis of a projection that runs on shards."""

    def projected(p, g, k):
        basis = torch.linalg.eigh(g.mT @ g)[1]
        return p - 0.1 * p @ basis, k

    monkeypatch.setitem(OPTIMIZERS, "projected", (OPTIMIZERS["psgd"][0], projected))
    case = owned_case("projected")
    programs = [lowered(case, 2, shard(2), *chain) for chain in ((), (OWNED,))]
    assert sent(programs[1])[0] == sent(programs[0])[0]
    assert any("is read whole" in note for note in programs[1].graph.hints.notes)


def test_a_chain_that_runs_on_shards_in_between_stays():
    case = owned_case("twice_scaled")
    programs = [lowered(case, 2, shard(2), *chain) for chain in ((), (OWNED,))]
    assert equal(*(trained(case, 2, program, 2) for program in programs))
    notes = programs[1].graph.hints.notes
    assert any("it runs on shards in between" in note for note in notes), notes


def test_what_a_group_sends_is_stacked_in_the_update_also_if_the_state_has_it():
    graph = lowered(owned_case("soap"), 2, shard(2), OWNED).graph
    of_update = [k for k, e in enumerate(graph.eqns) if e.op is torch.ops.aten.stack.default and e.region == "update"]  # fmt: skip
    last_of_backward = max(k for k, e in enumerate(graph.eqns) if e.region == "backward" and is_matmul(e))  # fmt: skip
    assert len(of_update) >= 6 and min(of_update) > last_of_backward


# ---- how it runs


@pytest.fixture
def on_rank_one():
    """An owned program on a mesh of four ranks, as rank 1 runs it, and its inputs. The other ranks do not exist."""
    with fake_mesh() as mesh:
        case = owned_case()
        step = zt.chain(zt.shard_params(mesh), OWNED, *ALL)(case.step)
        state, batch = step.shard(case.state()), slices(batches(case, 1)[0], 4)[1]
        low = lower_traced(traced(case, 4), step)
        yield mesh, low, low.recording.local_inputs(BoundCall(state, batch)).tensors


def test_there_is_no_race_on_streams_beside_compute(on_rank_one):
    mesh, low, local = on_rank_one
    with Races() as cuda:
        transports = StreamTransports(Streams(cuda))
        program = bind(low.graph, to_fx(low.graph, mesh, True, transports=transports))
        for _ in range(2):
            program(local)
    assert "all_to_all" in str(program.program) and cuda.races == []


def test_kernels_are_compiled_for_the_rows_of_a_rank(on_rank_one):
    _, low, local = on_rank_one
    found = infer_layouts(low.graph, {"dp": 1}, local, {})
    assert all(len(each.shape) == len(each.stride) for each in found.values())
