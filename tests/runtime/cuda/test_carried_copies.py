"""Copies to the host that go on under the next step, on a simulated GPU: the same bits, no race, nothing stays behind."""

from __future__ import annotations

import weakref

import pytest
import torch

import ztrans as zt
from tests.support.fake_cuda import FakeCuda
from tests.support.programs import CASES
from tests.support.races import Races
from ztrans.calling.call import BoundCall
from ztrans.runtime import host_copies
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.host_copies import StreamedHostCopy
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.executable import bind
from ztrans.runtime.failure import check_ended
from ztrans.runtime.host_copies import CarriedCopies, carried_copies
from ztrans.runtime.transports import StreamTransports

NAMES = ("mlp_momentum", "clipped", "adamw_fused", "adamw_foreach")


def lowered(name: str, across_steps: bool, rows: int = 64):
    """A program whose moments are on the host, and the inputs of a state of its own."""
    case = CASES[name]
    step = zt.offload(where="[mv].*", at_least=0, across_steps=across_steps)(case.step)
    torch.manual_seed(0)
    state = step.shard(case.state())
    batch = case.batch(rows)
    low = step.lower(state, *batch)
    return low, low.recording.local_inputs(BoundCall(state, batch)).tensors


def program(low, cuda: Races | None):
    transports = None if cuda is None else StreamTransports(Streams(cuda))
    return bind(low.graph, to_fx(low.graph, None, True, transports=transports))


def carried_by(low) -> int:
    return sum(v.future for v in low.graph.inputs)


def stepped(name: str, across_steps: bool, cuda: Races | None, steps: int = 4) -> list:
    """The outputs of the last step. They are read when all copies have ended."""
    low, inputs = lowered(name, across_steps)
    run = program(low, cuda)
    for _ in range(steps):
        outputs = run(inputs)
    return outputs


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_without_streams_and_there_is_no_race(name):
    assert carried_by(lowered(name, True)[0])
    with Races() as cuda:
        streamed = stepped(name, True, cuda)
    assert not cuda.races
    assert same(streamed, stepped(name, False, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_the_wait_in_the_next_step_there_is_a_race(name, monkeypatch):
    """The checker sees what it is there for."""
    take = CarriedCopies.take

    def without_waits(copies, *leaves):
        copies.futures = {}
        return take(copies, *leaves)

    monkeypatch.setattr(CarriedCopies, "take", without_waits)
    with Races() as cuda:
        stepped(name, True, cuda)
    assert cuda.races


def test_the_end_of_a_step_waits_for_no_copy():
    low, inputs = lowered("clipped", True)
    with Races() as cuda:
        run = program(low, cuda)
        run(inputs)
        copies = carried_copies(cuda, 0)
        assert len(copies.futures) == carried_by(low) > 0
        for future in copies.futures.values():
            event = future.work.event
            assert any(at > cuda.compute.clock.get(lane, 0) for lane, at in event.clock.items())
        run(inputs)
    assert not cuda.races


@pytest.mark.slow
@pytest.mark.parametrize("second", ["another state", "another program", "one that carries nothing"])
def test_other_steps_take_their_own_copies_and_wait_for_the_others(second):
    """Two states take turns; a batch has another size; a step without the option reads the same state."""
    low, inputs = lowered("clipped", True)
    rows, across_steps = (48, True) if second == "another program" else (64, False)
    other_low, other_inputs = lowered("clipped", across_steps, rows)
    if second == "another state":
        other_low, other_inputs = low, lowered("clipped", True)[1]
    else:
        other_inputs = [*inputs[: low.graph.num_state], *other_inputs[low.graph.num_state :]]
    ends = []
    for cuda in (Races(), None):
        states = [[x.clone() for x in each] for each in (inputs, other_inputs)]
        if second != "another state":
            states[1][: low.graph.num_state] = states[0][: low.graph.num_state]
        if cuda is None:
            runs = [program(low, None), program(other_low, None)]
            for turn in (0, 1, 0, 0, 1, 1):
                outputs = runs[turn](states[turn])
        else:
            with cuda:
                runs = [program(low, cuda), program(other_low, cuda)]
                for turn in (0, 1, 0, 0, 1, 1):
                    outputs = runs[turn](states[turn])
                assert len(carried_copies(cuda, 0).futures) == carried_by(other_low)
            assert not cuda.races
        ends.append(outputs)
    assert same(*ends)


def test_a_step_that_fails_leaves_no_copy():
    low, inputs = lowered("clipped", True)
    n = low.graph.num_state
    with Races() as cuda:
        run = program(low, cuda)
        run(inputs)
        assert carried_copies(cuda, 0).futures
        with pytest.raises(RuntimeError, match="shape"):
            run([*inputs[:n], *(x[..., :1] for x in inputs[n:])])
        assert not carried_copies(cuda, 0).futures
        for lane in dict.fromkeys(cuda.entered):
            for stream, at in lane.clock.items():
                assert cuda.compute.clock.get(stream, 0) >= at, "compute has waited for all copies"
        run(inputs)
    assert not cuda.races


def test_what_was_copied_is_free_when_the_next_step_has_waited():
    """The memory of the device does not grow from step to step."""
    low, inputs = lowered("adamw_fused", True)
    peaks = []
    with Races() as cuda:
        run = program(low, cuda)
        for _ in range(4):
            run(inputs)
            peaks.append(cuda.peak)
    assert peaks[1] == peaks[3]


def test_the_caller_may_write_over_the_state_on_the_device_at_once():
    low, inputs = lowered("clipped", True)
    with Races() as cuda:
        run = program(low, cuda)
        for _ in range(3):
            run(inputs)
            for v, x in zip(low.graph.inputs, inputs):
                if v.memory == "device" and x.is_floating_point():
                    x.mul_(0.5)
    assert not cuda.races


def test_a_leaf_without_elements_is_not_taken_for_another_one():
    """Such leaves have one address."""
    copies = CarriedCopies()
    streams = Streams(Races())
    leaves = [torch.empty(0, 2), torch.empty(0, 3)]
    out = StreamedHostCopy("host out", streams, None)
    returned = copies.put(*(out(torch.empty_like(leaf), leaf) for leaf in leaves))
    assert [x.shape for x in returned] == [(0, 2), (0, 3)]
    members = copies.take(*leaves)
    assert [m.future.value(0).shape for m in members] == [(0, 2), (0, 3)]


def test_who_lets_all_copies_end_frees_what_they_read(monkeypatch):
    """As `zt.save` and `zt.write_back` do."""
    copies = CarriedCopies()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(host_copies, "carried_copies", lambda cuda, device: copies)
    source = torch.ones(4)
    reference = weakref.ref(source)
    out = StreamedHostCopy("host out", Streams(FakeCuda()), None)
    copies.put(out(source, torch.zeros(4)))
    del source
    assert reference() is not None
    check_ended([], "save")
    assert reference() is None
