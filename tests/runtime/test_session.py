"""The session of a mesh, in a world whose other ranks do not exist."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import batches, fake_mesh, slices
from ztrans.compiled import _check_room
from ztrans.planning.limit import DoesNotFit
from ztrans.runtime.agreement import agree_on_call
from ztrans.runtime.channels import LostRank
from ztrans.runtime.communicators import connect
from ztrans.runtime.mesh import _end
from ztrans.runtime.session import all_sessions, session_of

REDUCTIONS = "all_reduce", "reduce_scatter_single", "all_gather_single"


@pytest.fixture
def mesh():
    with fake_mesh() as mesh:
        yield mesh


@pytest.mark.parametrize("purpose", ["gathers", "reductions"])
def test_after_a_failed_step_messages_go_through_a_new_group(mesh, purpose):
    """Other ranks may still wait in the old one for messages that this rank has not sent."""
    session = session_of(mesh)
    channel = session.channel("dp", purpose)
    before = channel.group
    assert before is not mesh.get_group(), "the user's own group cannot be closed"
    session.close()
    assert channel.is_closed
    session.open()
    assert session.channel("dp", purpose) is channel
    assert channel.group is not before and channel.group is not mesh.get_group()


def test_a_process_whose_last_step_failed_destroys_no_groups_at_its_end(mesh, monkeypatch):
    """To destroy a communicator, NCCL waits for the messages that the other ranks have not sent."""
    session = session_of(mesh)
    assert session in all_sessions()
    # Closed meshes of other tests, which tracebacks keep, and an error of theirs, have not failed here.
    monkeypatch.setattr("ztrans.runtime.mesh.all_sessions", lambda: [session])
    monkeypatch.delattr(sys, "last_type", raising=False)
    session.channel("dp", "gathers")
    session.close()
    _end(os.getpid())
    assert dist.is_initialized()
    session.open()
    _end(os.getpid())
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())


def test_over_nccl_no_process_destroys_groups_at_its_end(mesh, monkeypatch):
    """Nothing shows that sys.exit has ended this program, while the other ranks are inside a collective."""
    session_of(mesh).channel("dp", "gathers")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    _end(os.getpid())
    assert dist.is_initialized()


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_a_channel_has_one_backend_however_that_of_the_world_is_named(backend):
    """Its name decides how messages are sent, so the bits of a reduction depend on it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    channel = session_of(mesh).channel("dp", "reductions")
    assert channel.is_gloo
    dist.destroy_process_group()


def test_after_a_failed_step_a_batch_may_have_a_size_that_is_new(mesh):
    """As a smaller batch, after an error about memory. Its program asks the channels what carries its messages."""
    case = CASES["mlp_momentum"]
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(case.step)
    batch, smaller = (slices(batches(case, 1)[0], ranks)[1] for ranks in (4, 8))
    state, _ = step(step.shard(case.state()), *batch)
    session_of(mesh).close()
    step(state, *smaller)
    assert not session_of(mesh).is_closed


def test_two_meshes_of_the_same_ranks_have_notes_of_their_own(mesh):
    """A mesh whose first axis has all ranks of the world has the group of the world, and so its store."""
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "fsdp"))
    store = dist.HashStore()
    for each in (mesh, other, flat):
        session_of(each).is_alone = False
        session_of(each)._root_store = lambda: store
    before = session_of(mesh).store()
    session_of(mesh).leave("failed")
    assert before.check(["note/1"])
    assert not session_of(other).store().check(["note/1"])
    assert not session_of(flat).store().check(["note/1"])


def test_a_rank_that_does_not_come_to_open_a_channel_is_lost(mesh, monkeypatch):
    def new_group(*_, **__):
        raise dist.DistStoreError("wait timeout after 6000ms")

    monkeypatch.setattr(dist, "new_group", new_group)
    session = session_of(mesh)
    session.is_alone = False
    with pytest.raises(LostRank, match=r"has lost other ranks of the mesh(.|\n)*wait timeout"):
        agree_on_call(mesh, "shard")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer"),
        dist.DistBackendError("NCCL communicator was aborted"),
        dist.DistNetworkError("Connection reset by peer"),
    ],
)
def test_an_error_of_a_connection_is_a_lost_rank(mesh, error):
    with (
        pytest.raises(LostRank, match=str(error)),
        session_of(mesh).channel("dp", "gathers").errors(),
    ):
        raise error


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("fake", torch.OutOfMemoryError("CUDA out of memory")),
        ("fake", RecursionError("maximum recursion depth exceeded")),
        ("nccl", RuntimeError("Tensors must be contiguous")),
    ],
)
def test_an_error_of_this_rank_stays_what_it_is(mesh, monkeypatch, backend, error):
    """Else the other ranks would be searched for what has happened here."""
    channel = session_of(mesh).channel("dp", "gathers")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cuda:{backend}")
    with pytest.raises(type(error)) as raised, channel.errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: unhandled cuda error\nLast error: Cuda failure 2 'out of memory'",
        "NCCL error: unhandled system error\nFailed to CUDA calloc 536870912 bytes",
    ],
)
def test_an_error_of_nccl_about_memory_is_of_this_rank(mesh, text):
    channel = session_of(mesh).channel("dp", "reductions")
    with pytest.raises(torch.OutOfMemoryError) as raised, channel.errors():
        raise dist.DistBackendError(text)
    assert "NCCL finds no memory on the GPU of rank 1 for reductions over dp: NCCL error" in str(
        raised.value
    )
    assert "zt.Device(reserve=...)" in str(raised.value)


@pytest.mark.parametrize(
    ("purpose", "hosts", "expected"),
    [
        ("gathers", 2, ["all_gather_single"]),
        ("weights", 2, ["all_gather_single"]),
        ("reductions", 1, [*REDUCTIONS, [1, 1, 1, 1]]),
        ("reductions", 2, [*REDUCTIONS, [0, 1, 0, 1]]),
        ("reductions inside hosts", 2, [[1, 1, 0, 0]]),
    ],
)
def test_a_communicator_connects_when_it_is_opened(mesh, monkeypatch, purpose, hosts, expected):
    """By a message of each kind that it will carry, to the ranks that get one; the host waits until all have come."""
    messages = []
    for name in ("all_gather_single", "all_reduce", "reduce_scatter_single"):

        def note(*tensors, group, name=name):
            assert all(len(x) for x in tensors), "NCCL connects nobody for an empty message"
            messages.append(name)

        monkeypatch.setattr(dist, name, note, raising=False)

    def exchange(into, terms, splits_in, splits, group):
        assert len(into) == len(terms) == sum(splits) and splits_in == splits
        messages.append(splits)

    zeros = torch.zeros
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: messages.append("waited"))
    monkeypatch.setattr(torch, "zeros", lambda count, device: zeros(count))
    connect(mesh.get_group(), purpose, hosts)
    assert messages == [*expected, "waited"]


@pytest.mark.parametrize("is_nccl", [False, True])
def test_only_groups_of_nccl_connect(mesh, monkeypatch, is_nccl):
    opened = []
    session = session_of(mesh)
    session.is_alone = False
    session._host_names = dict.fromkeys(range(4), ("one host",))
    monkeypatch.setattr("ztrans.runtime.session.is_nccl", lambda group: is_nccl)
    note = lambda group, purpose, hosts: opened.append((purpose, hosts))
    monkeypatch.setattr("ztrans.runtime.session.connect", note)
    session.channel("dp", "gathers")
    session.channel("dp", "reductions")
    assert opened == [("gathers", 1), ("reductions", 1)] * is_nccl


@pytest.mark.parametrize(("usable", "fits"), [(1 << 30, True), (100, False)])
def test_a_step_must_fit_in_what_nccl_has_left_on_every_gpu(mesh, monkeypatch, usable, fits):
    case = CASES["mlp_momentum"]
    step = zt.shard_params(mesh)(case.step)
    batch = slices(batches(case, 1)[0], 4)[1]
    graph = step.lower(step.shard(case.state()), *batch).graph
    monkeypatch.setattr("ztrans.compiled.usable_bytes", lambda: 1 << 40)
    monkeypatch.setattr("ztrans.compiled.everywhere", lambda mine, mesh: [mine, usable])
    on_gpus = SimpleNamespace(device_type="cuda")
    if fits:
        _check_room(on_gpus, graph)
        return
    with pytest.raises(DoesNotFit) as error:
        _check_room(on_gpus, graph)
    assert "and a GPU of the mesh has 100 B for it, without CUDA's context and the" in str(
        error.value
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_of_a_world_that_is_bound_to_devices_is_refused(mesh, monkeypatch, ranks):
    """Its ranks would wait for the others, which do not make the groups of the mesh."""
    part = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tp",))
    monkeypatch.setattr("ztrans.runtime.communicators.is_nccl", lambda group: True)
    session_of(mesh)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    if ranks == 4:
        assert session_of(part).ranks == (0, 1, 2, 3)
        return
    with pytest.raises(RuntimeError) as error:
        session_of(part)
    text = str(error.value)
    assert "the mesh has 2 of the 4 ranks of the world, and init_process_group was given a" in text
    assert text.endswith("and call init_process_group without device_id.")
