"""The process groups of a mesh, in a world whose other ranks do not exist."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import batches, fake_mesh, slices
from ztrans.runtime.agreement import agree_on_call
from ztrans.runtime.failure import has_note, write_note
from ztrans.runtime.mesh import _end
from ztrans.runtime.process_groups import LostRank, process_groups


@pytest.fixture
def mesh():
    with fake_mesh() as mesh:
        yield mesh


@pytest.mark.parametrize("purpose", ["gathers", "reductions"])
def test_after_a_failed_step_messages_go_through_a_new_group(mesh, purpose):
    """Other ranks may still wait in the old one for messages that this rank has not sent."""
    groups = process_groups(mesh)
    channel = groups.channel("dp", purpose)
    before = channel.group
    assert before is not mesh.get_group(), "the user's own group cannot be closed"
    groups.close()
    assert channel.is_closed
    groups.open()
    assert groups.channel("dp", purpose) is channel
    assert channel.group is not before and channel.group is not mesh.get_group()


def test_a_process_whose_last_step_failed_destroys_no_groups_at_its_end(mesh):
    """To destroy a communicator, NCCL waits for the messages that the other ranks have not sent."""
    groups = process_groups(mesh)
    groups.channel("dp", "gathers")
    groups.close()
    _end(os.getpid())
    assert dist.is_initialized()
    groups.open()
    _end(os.getpid())
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_a_channel_has_one_backend_however_that_of_the_world_is_named(backend):
    """Its name decides how messages are sent, so the bits of a reduction depend on it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    channel = process_groups(mesh).channel("dp", "reductions")
    assert channel.is_gloo
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backends", "is_aborted"),
    [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)],
)
def test_groups_with_a_backend_for_each_device_are_aborted_if_one_is_nccl(
    mesh, monkeypatch, backends, is_aborted
):
    aborted = []
    groups = process_groups(mesh)
    groups.carries_users = True
    monkeypatch.setattr("ztrans.runtime.process_groups.abort", aborted.extend)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    groups.interrupt()
    assert aborted == [mesh.get_group()] * is_aborted


def test_messages_of_the_users_own_are_aborted_with_the_mesh(mesh, monkeypatch):
    """Their kernels would keep the device from freeing anything."""
    aborted = []
    monkeypatch.setattr("ztrans.runtime.process_groups.abort", aborted.append)
    monkeypatch.setattr("ztrans.runtime.process_groups._is_nccl", lambda group: True)
    groups = process_groups(mesh)
    mine = groups.channel("dp", "gathers").group
    groups.interrupt()
    groups.carries_users = True
    groups.interrupt()
    assert aborted == [[mine], [mesh.get_group()]], "each of them once"


def test_after_a_failed_step_a_batch_may_have_a_size_that_is_new(mesh):
    """As a smaller batch, after an error about memory. Its program asks the channels what carries its messages."""
    case = CASES["mlp_momentum"]
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(case.step)
    batch, smaller = (slices(batches(case, 1)[0], ranks)[1] for ranks in (4, 8))
    state, _ = step(step.shard(case.state()), *batch)
    process_groups(mesh).close()
    step(state, *smaller)
    assert not process_groups(mesh).is_closed


def test_two_meshes_of_the_same_ranks_have_notes_of_their_own(mesh):
    """A mesh whose first axis has all ranks of the world has the group of the world, and so its store."""
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "fsdp"))
    store = dist.HashStore()
    for each in (mesh, other, flat):
        process_groups(each)._client = store
    write_note(process_groups(mesh), "failed")
    assert has_note(process_groups(mesh))
    assert not has_note(process_groups(other))
    assert not has_note(process_groups(flat))


def test_a_rank_that_does_not_come_to_open_a_channel_is_lost(mesh, monkeypatch):
    def new_group(*_, **__):
        raise dist.DistStoreError("wait timeout after 6000ms")

    monkeypatch.setattr(dist, "new_group", new_group)
    groups = process_groups(mesh)
    groups.is_alone = False
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
        process_groups(mesh).channel("dp", "gathers").errors(),
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
    channel = process_groups(mesh).channel("dp", "gathers")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"cuda:{backend}")
    with pytest.raises(type(error)) as raised, channel.errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_of_a_world_that_is_bound_to_devices_is_refused(mesh, monkeypatch, ranks):
    """Its ranks would wait for the others, which do not make the groups of the mesh."""
    part = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("tp",))
    monkeypatch.setattr("ztrans.runtime.process_groups._is_nccl", lambda group: True)
    process_groups(mesh)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    if ranks == 4:
        assert process_groups(part).ranks == (0, 1, 2, 3)
        return
    with pytest.raises(RuntimeError) as error:
        process_groups(part)
    text = str(error.value)
    assert "the mesh has 2 of the 4 ranks of the world, and init_process_group was given a" in text
    assert text.endswith("and call init_process_group without device_id.")
