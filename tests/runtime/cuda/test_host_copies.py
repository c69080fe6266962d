"""Copies between a GPU and its host, on a simulated GPU: the same bits, no race, and the host never waits."""

from __future__ import annotations

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.worlds import batches, lower_traced, traced
from ztrans.calling.call import BoundCall
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.host_copies import StreamedHostCopy
from ztrans.runtime.cuda.streams import Done, Streams
from ztrans.runtime.executable import bind
from ztrans.runtime.transports import StreamTransports

MOMENTS = {"mlp_momentum": "m.*", "gpt_adam": "[mv].*", "adamw_fused": "[mv].*"}


def lowered(name: str, *transforms: zt.Transform):
    case = CASES[name]
    step = zt.chain(*transforms)(case.step)
    state = step.shard(case.state())
    batch = batches(case, 1)[0]
    low = lower_traced(traced(case, 1), step)
    return low, low.recording.local_inputs(BoundCall(state, batch)).tensors


def run(low, local, cuda: Races | None, steps: int = 3) -> list[torch.Tensor]:
    transports = None if cuda is None else StreamTransports(Streams(cuda))
    program = bind(low.graph, to_fx(low.graph, None, True, transports=transports))
    for _ in range(steps):
        outputs = program(local)
    return [x.clone() for x in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MOMENTS))
def test_the_bits_are_those_without_streams_and_there_is_no_race(name):
    offload = zt.offload(where=MOMENTS[name], at_least=0)
    with Races() as cuda:
        streamed = run(*lowered(name, offload), cuda)
    assert not cuda.races
    plain = run(*lowered(name), None)
    assert all(torch.equal(a, b) for a, b in zip(streamed, plain, strict=True))
    copies = [stream for operation, stream in cuda.launches if operation == "copy_"]
    assert len(set(copies)) >= 2, "each direction has a stream"


@pytest.mark.parametrize("missing", ["the copy waits for compute", "compute waits for the copy"])
def test_without_a_wait_there_is_a_race(missing, monkeypatch):
    """The checker sees what it is there for."""
    low, local = lowered("mlp_momentum", zt.offload(where="m.*", at_least=0))
    if missing == "compute waits for the copy":
        monkeypatch.setattr(Done, "wait", lambda done: None)
    with Races() as cuda:
        program = bind(
            low.graph, to_fx(low.graph, None, True, transports=StreamTransports(Streams(cuda)))
        )
        for module in program.program.modules():
            if isinstance(module, StreamedHostCopy) and missing == "the copy waits for compute":
                monkeypatch.setattr(module.lane, "wait_stream", lambda stream: None)
        for _ in range(2):
            program(local)
    assert cuda.races


def test_a_leaf_on_the_host_is_written_in_place():
    low, local = lowered("mlp_momentum", zt.offload(where="m.*", at_least=0))
    before = [x.data_ptr() for x in local]
    with Races() as cuda:
        outputs = run(low, local, cuda)
    n = low.graph.num_state
    assert [x.data_ptr() for x in local] == before
    assert len(outputs) > n


def test_a_value_without_storage_on_the_host_gets_one_for_all_steps():
    streams = Streams(Races())
    copy = StreamedHostCopy("host out", streams, None)
    first = copy(torch.ones(4)).future.value(0)
    second = copy(torch.zeros(4)).future.value(0)
    assert first is second and not first.any()
