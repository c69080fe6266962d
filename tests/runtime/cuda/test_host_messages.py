"""On GPUs no step waits for the host of another rank, and a replay sends it nothing. The other rank is a double."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.fake_cuda import FakeCuda
from tests.support.programs import CASES
from tests.support.runners import FunctionRunner
from tests.support.worlds import batches, slices
from ztrans.compiled import LocalProgram
from ztrans.runtime import stop
from ztrans.runtime.agreement import agree, agree_on_call
from ztrans.runtime.channels import Channel, LostRank
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.contract import Contract
from ztrans.runtime.cuda.graph_capture import Capture
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.executable import bind
from ztrans.runtime.failure import Writes, check_ended
from ztrans.runtime.session import session_of
from ztrans.runtime.transports import StreamTransports
from ztrans.runtime.watch import InFlight

RANKS = 2
STEPS = 10


class HostMessages:
    """The messages between hosts: those that were begun, and those for which this host had to wait.

    The other host is one step behind: its part of a message arrives when this host has launched the next step.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.blocking: list[str] = []
        self.launched = 0
        self.bits_of_others: dict[
            int, int
        ] = {}  # of the record of rank 0, which else is that of this rank

    def launch(self) -> None:
        self.launched += 1

    def clear(self) -> None:
        self.begun.clear()
        self.blocking.clear()

    def block(self, name: str) -> None:
        self.begun.append(name)
        self.blocking.append(name)

    def exchange(self, channel, pieces, into, ranks=None, tag=None) -> list[Arriving]:
        assert channel.purpose == "ranks"
        for piece, record in zip(pieces, into):
            record.copy_(piece)
        for position, bit in self.bits_of_others.items():
            into[0][position] = bit
        self.begun.append("exchange")
        return [Arriving(self)]

    def gather_objects(self, values, value, group=None) -> None:
        self.block("all_gather_object")
        values[:] = [value] * len(values)


class NeverDone:
    """The event of a step that does not end."""

    def query(self) -> bool:
        return False


class Arriving:
    """A message on its way from the other host."""

    def __init__(self, messages: HostMessages) -> None:
        self.messages = messages
        self.launched_before = messages.launched

    def wait(self) -> None:
        if self.messages.launched == self.launched_before:
            self.messages.blocking.append("exchange")


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def mesh(monkeypatch, store):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, *_, **__: new_group(ranks))
    session = session_of(mesh)
    session.is_alone = False  # the other rank sends nothing to the device, but its host talks
    session.has_compared_versions = True
    session._host_names = dict.fromkeys(range(RANKS), ("one host",))
    session.store = lambda: store
    yield mesh
    dist.destroy_process_group()


@pytest.fixture
def messages(monkeypatch) -> HostMessages:
    messages = HostMessages()
    monkeypatch.setattr(
        Channel, "exchange", lambda channel, *pieces: messages.exchange(channel, *pieces)
    )
    monkeypatch.setattr(dist, "all_gather_object", messages.gather_objects)
    for name in ("barrier", "broadcast_object_list", "broadcast", "monitored_barrier"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: messages.block(name))
    return messages


def trained(compiled, state, steps, case, messages) -> HostMessages:
    """What hosts send each other in some steps, after one that compiles the program, and one that captures it."""
    data = [slices(batch, RANKS)[1] for batch in batches(case, 2)]
    for k in range(2 + steps):
        if k == 2:
            messages.clear()
        state, _ = compiled(state, *data[k % 2])
    return messages


def compiled_step(mesh, case, messages, cuda_graph=False):
    """A sharded step on simulated streams, maybe captured, and its state."""
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(case.step)
    state = step.shard(case.state())
    lowered = step.lower(state, *slices(batches(case, 1)[0], RANKS)[1])
    cuda = FakeCuda()
    program = to_fx(lowered.graph, mesh, True, transports=StreamTransports(Streams(cuda)))
    run = bind(lowered.graph, program)

    def launched(inputs):
        messages.launch()
        return run(inputs)

    runner = FunctionRunner(launched)
    if cuda_graph:
        runner = Capture(launched, lowered.graph, cuda, "cpu")
    compiled = lowered.compile()
    contract = Contract(lowered.graph, "")
    compiled.binding.local_program = LocalProgram(
        lowered, runner, Writes(), session_of(mesh), contract
    )
    return compiled, state


@pytest.mark.parametrize(("launches", "blocking"), [(True, 0), (False, STEPS)])
def test_no_step_waits_for_the_host_of_another_rank(mesh, messages, launches, blocking):
    """Each step asks the others, and reads the answer when the next step begins. On CPUs it waits for the answer."""
    session_of(mesh).launches_first = launches
    case = CASES["mlp_momentum"]
    compiled, state = compiled_step(mesh, case, messages)
    trained(compiled, state, STEPS, case, messages)
    assert messages.begun == ["exchange"] * STEPS
    assert len(messages.blocking) == blocking


def test_a_rank_that_launched_a_step_learns_of_another_call_when_it_reads_the_answer(
    mesh, messages, store
):
    """Then it asks for nothing more: the other rank has left, and its note says why."""
    session = session_of(mesh)
    agree(session, "a step", 1, lambda values: "they differ", launches=True)
    session.pending.records[0, 5] = 1  # the other rank waits
    store.set("note/0", "made another call, save")
    messages.clear()
    with pytest.raises(LostRank, match="Rank 0 made another call, save"):
        session.read_pending()
    assert messages.begun == []


@pytest.mark.parametrize(("launches", "later"), [(True, 1), (False, 0)])
def test_a_request_to_stop_is_read_with_the_record_of_a_step(mesh, messages, launches, later):
    """On GPUs by the next call, so all ranks see it after the same step there too."""
    session_of(mesh).launches_first = launches
    case = CASES["mlp_momentum"]
    compiled, state = compiled_step(mesh, case, messages)
    data = slices(batches(case, 1)[0], RANKS)[1]
    session = session_of(mesh)
    seen = []
    for k in range(5):
        messages.bits_of_others = {6: int(k == 2)}
        state, _ = compiled(state, *data)
        seen.append(session.stop_requested)
    assert seen == [k >= 2 + later for k in range(5)]


@pytest.mark.slow
def test_after_stop_on_a_replay_sends_whether_its_rank_has_been_asked_to_stop(
    mesh, messages, monkeypatch
):
    session_of(mesh).launches_first = True
    monkeypatch.setattr(stop, "_watched", {15})
    case = CASES["mlp_momentum"]
    compiled, state = compiled_step(mesh, case, messages, cuda_graph=True)
    trained(compiled, state, STEPS, case, messages)
    assert messages.begun == ["exchange"] * STEPS
    assert session_of(mesh).pending is not None, "the next call reads the answer"


@pytest.mark.slow
def test_a_replay_sends_nothing_to_the_host_of_another_rank(mesh, messages):
    session_of(mesh).launches_first = True
    case = CASES["mlp_momentum"]
    compiled, state = compiled_step(mesh, case, messages, cuda_graph=True)
    captured = compiled.binding.local_program.runner
    trained(compiled, state, STEPS, case, messages)
    assert captured.captured.replays == STEPS + 1
    assert messages.begun == []


def differ(session) -> None:
    """Let the other rank have sent another digest, and its complement."""
    record = session.pending.records[0]
    record[0] ^= 1
    record[2] ^= 1


def test_after_a_late_difference_no_message_of_that_step_is_waited_for(mesh, messages):
    """Ranks that did not do the same may wait for each other on the device, so all of them close their channels."""
    session = session_of(mesh)
    agree(session, "a step", (1, True), lambda values: "they differ", launches=True)
    differ(session)
    with pytest.raises(RuntimeError, match="they differ"):
        session.read_pending()
    assert session.is_closed


def test_a_difference_is_read_before_a_save_waits_for_the_step(mesh, messages, monkeypatch):
    """Its messages may wait for each other forever, and the error says in what the ranks differ."""
    session = session_of(mesh)
    monkeypatch.setattr(type(session), "timeout", 0.1)
    leaf = torch.zeros(2)
    in_flight = InFlight()
    in_flight.record(NeverDone())
    session.watcher = SimpleNamespace(failure="", in_flight=in_flight, fail=lambda text: None)
    agree(session, "a step", 1, lambda values: "they differ", launches=True)
    differ(session)
    with pytest.raises(RuntimeError, match="they differ"):
        check_ended([leaf], "save")


def test_a_rank_that_makes_another_call_leaves_those_that_have_launched_a_step(
    mesh, messages, store
):
    """Their kernels wait for this rank, which is in another call."""
    session = session_of(mesh)
    messages.bits_of_others = {4: 1, 5: 0}  # it launches a step
    text = "unshard: the ranks of the mesh do not make the same call. This rank has sent nothing"
    with pytest.raises(RuntimeError, match=text):
        agree_on_call(mesh, "unshard")
    assert store.get("note/1") == b"made another call, unshard"
    assert session.is_closed


def test_a_failure_before_the_channels_are_open_is_told_to_the_others(
    mesh, messages, monkeypatch, store
):
    """They wait for this rank to open channels with them."""

    def reserve(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr("ztrans.compiled.reserve", reserve)
    case = CASES["mlp_momentum"]
    session = session_of(mesh)
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    with pytest.raises(MemoryError, match="no memory"):
        step(state, *slices(batches(case, 1)[0], RANKS)[1])
    assert session.is_closed
    assert store.get("note/1") == b"failed in step 1 of step with MemoryError: no memory"


@pytest.mark.slow
def test_a_refused_replay_is_told_to_the_others(mesh, messages, store):
    """They have launched theirs, and no rank compares replays."""
    session_of(mesh).launches_first = True
    case = CASES["mlp_momentum"]
    compiled, state = compiled_step(mesh, case, messages, cuda_graph=True)
    trained(compiled, state, 1, case, messages)
    copied = pytree.tree_map_only(torch.Tensor, torch.clone, state)
    with pytest.raises(ValueError, match="is not where it was when the step was captured"):
        compiled(copied, *slices(batches(case, 1)[0], RANKS)[1])
    note = store.get("note/1").decode()
    assert note.startswith("refused a step of step with ValueError: step: state leaf ")
    assert session_of(mesh).is_closed


def test_a_refused_call_is_told_to_the_others(mesh, messages, monkeypatch, store):
    """On GPUs they have launched the step, on CPUs they wait to compare it."""
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    batch = slices(batches(case, 1)[0], RANKS)[1]
    compiled = step.lower(state, *batch).compile()
    messages.bits_of_others = {4: 1, 5: 0}  # it launches a step
    with pytest.raises(TypeError):
        compiled(state, *batch[:-1])
    refused = store.get("note/1").decode()
    assert refused.startswith("failed in a step of step with TypeError: step")
