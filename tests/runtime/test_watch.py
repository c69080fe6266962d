"""A rank that watches the steps which its GPU runs, on doubles of events and of the other ranks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from tests.support.programs import CASES
from ztrans.runtime import failure, watch
from ztrans.runtime.failure import (
    Writes,
    check_ended,
    check_launched,
    check_whole,
    has_note,
    running,
    write_note,
)
from ztrans.runtime.in_flight import InFlight, StepInFlight
from ztrans.runtime.process_groups import Channel, LostRank, process_groups
from ztrans.runtime.watch import Watch, watched


class Event:
    """An event of a GPU that is done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.is_done


class Kernels:
    """The symmetric memory of a mesh: whether its kernels have waited in vain, and were told to leave."""

    def __init__(self) -> None:
        self.found = ""
        self.interrupts = 0

    def error(self) -> str:
        return self.found

    def interrupt(self) -> None:
        self.interrupts += 1


@pytest.fixture
def mesh(monkeypatch):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    store = dist.HashStore()
    groups = process_groups(mesh)
    groups.is_alone = False  # the other rank is fake, but its notes are not
    groups.symmetric = Kernels()
    monkeypatch.setattr(groups, "store", lambda: store)
    monkeypatch.setattr(type(groups), "timeout", 10.0)
    monkeypatch.setattr("ztrans.runtime.failure._PATIENCE", 0.05)
    yield mesh
    dist.destroy_process_group()


def in_flight(mesh, name="step 3 of train", leaf=None) -> StepInFlight:
    """A step in flight, of a state of one leaf."""
    step = StepInFlight(name, [torch.zeros(2) if leaf is None else leaf], Event())
    process_groups(mesh).in_flight.add(step)
    return step


def note_of_rank_0(mesh, text):
    store = process_groups(mesh).store()
    store.set("note/0", text)
    store.set("a rank has left a note", "")


def test_a_rank_gives_up_when_another_one_leaves_a_note(mesh):
    groups = process_groups(mesh)
    watch = Watch()
    step = in_flight(mesh)
    watch.look(groups, 0.0)
    assert not groups.in_flight.given_up and groups.symmetric.interrupts == 0
    note_of_rank_0(mesh, "failed in step 3 of train with KeyError")
    watch.look(groups, 0.1)
    assert groups.symmetric.interrupts == 1, "kernels that wait for rank 0 leave"
    watch.look(groups, 0.2)
    assert groups.symmetric.interrupts == 1
    step.end.is_done = True  # what it has returned is garbage
    with pytest.raises(LostRank) as error:
        check_launched(mesh, "train")
    text = str(error.value)
    assert "Rank 0 failed in step 3 of train with KeyError." in text
    assert text.endswith("The backend says: another rank failed while step 3 of train was running")
    with pytest.raises(RuntimeError, match=r"save: this state is half updated.*Rank 0 failed in"):
        check_whole(step.leaves, "save")
    check_launched(mesh, "train")  # the next step begins afresh


def test_a_rank_gives_up_before_the_time_out_when_a_step_does_not_end(mesh):
    groups = process_groups(mesh)
    watch = Watch()
    first = in_flight(mesh)
    second = in_flight(mesh, "step 4 of train", first.leaves[0])
    watch.look(groups, 100.0)
    first.end.is_done = True
    watch.look(groups, 108.0)
    watch.look(groups, 116.9)
    assert not groups.in_flight.given_up, "the second step is the oldest one since 108 s"
    watch.look(groups, 117.1)
    assert groups.in_flight.given_up == "step 4 of train has not ended for 9 s"
    assert groups.store().get("note/1") == b"", "the others may know why"
    with pytest.raises(LostRank, match="Rank 0 said nothing"):
        check_launched(mesh, "train")
    with pytest.raises(RuntimeError, match="half updated"):
        check_whole(second.leaves, "save")


def test_a_rank_gives_up_when_the_store_has_gone(mesh, monkeypatch):
    groups = process_groups(mesh)

    def gone():
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(groups, "store", gone)
    in_flight(mesh)
    Watch().look(groups, 0.0)
    assert groups.in_flight.given_up == (
        "the process group of the mesh, or the process that holds its store, has ended"
    )
    assert groups.symmetric.interrupts == 1


def test_an_error_that_is_found_after_the_end_of_a_step_counts_for_it(mesh):
    """A kernel sets its error before the event of its step is done. So the events are looked at first."""
    groups = process_groups(mesh)
    well = in_flight(mesh)
    badly = in_flight(mesh, "step 4 of train")
    well.end.is_done = True
    assert groups.in_flight.error() == ""
    badly.end.is_done = True
    groups.symmetric.found = "rank 1 waited in vain for rank 0"
    with pytest.raises(LostRank, match="waited in vain"):
        check_launched(mesh, "train")
    check_whole(well.leaves, "save")
    with pytest.raises(RuntimeError, match="half updated"):
        check_whole(badly.leaves, "save")


def test_a_state_is_saved_when_the_steps_that_wrote_it_have_ended_well(mesh, tmp_path):
    step = in_flight(mesh)
    state = {"w": step.leaves[0]}
    query = step.end.query

    def ends_later() -> bool:
        step.end.is_done = step.end.looks > 3
        return query()

    step.end.query = ends_later
    zt.save(tmp_path / "good", state).result()
    assert step.end.looks > 3
    torn = in_flight(mesh, "step 4 of train", state["w"])
    torn.end.is_done = True
    process_groups(mesh).symmetric.found = "rank 1 waited in vain for rank 0"
    with pytest.raises(RuntimeError, match="save: this state is half updated"):
        zt.save(tmp_path / "bad", state)
    assert not (tmp_path / "bad").exists()


def test_a_rank_that_fails_lets_earlier_steps_end_before_it_says_so(mesh, monkeypatch):
    step = in_flight(mesh)
    notes = []

    def note(groups, text):
        notes.append((text, step.end.is_done))
        write_note(groups, text)

    monkeypatch.setattr("ztrans.runtime.failure.write_note", note)
    query = step.end.query

    def ends_later() -> bool:
        step.end.is_done = step.end.looks > 3
        return query()

    step.end.query = ends_later
    with pytest.raises(KeyError), running("train", step.leaves, mesh, Writes()):
        raise KeyError("x")
    assert notes == [("failed in step 1 of train with KeyError: 'x'", True)]
    check_whole(step.leaves, "save")


def test_an_error_of_the_host_is_that_of_another_rank_if_the_gpu_has_lost_it(mesh):
    """As an NCCL call on a communicator that the watching thread has aborted."""
    step = in_flight(mesh)
    note_of_rank_0(mesh, "failed in step 3 of train with KeyError")
    Watch().look(process_groups(mesh), 0.0)
    with (
        pytest.raises(LostRank, match="Rank 0 failed in step 3"),
        running("train", step.leaves, mesh, Writes()),
    ):
        raise dist.DistBackendError("NCCL communicator was aborted")


def broken() -> bool:
    """What an event of a GPU that has failed does."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging ...")


def test_a_device_that_has_failed_ends_no_step_well(mesh):
    step = in_flight(mesh)
    step.end.query = broken
    assert "illegal memory access" in process_groups(mesh).in_flight.error()


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_other_ranks_learn_that_the_device_of_this_rank_has_failed(mesh, is_watched):
    """The thread that watches, the next call, or the step that the host launches may find it first."""
    groups = process_groups(mesh)
    step = in_flight(mesh)
    step.end.query = broken
    if is_watched:
        Watch().look(groups, 0.0)
        note = groups.store().get("note/1").decode()
        assert note.startswith("failed in step 3 of train with CUDA error: an illegal memory")
    with pytest.raises(RuntimeError, match="train: the device of rank 1 has failed: CUDA") as error:
        check_launched(mesh, "train")
    assert not isinstance(error.value, LostRank), "no other rank is lost"
    assert "new processes" in str(error.value)
    assert "illegal memory access" in groups.store().get("note/1").decode()
    with pytest.raises(RuntimeError, match="save: this state is half updated"):
        check_whole(step.leaves, "save")


def test_an_error_of_the_host_is_its_own_if_its_device_has_failed(mesh):
    step = in_flight(mesh)
    step.end.query = broken
    with (
        pytest.raises(RuntimeError, match="CUDA error: device-side assert") as error,
        running("train", [torch.zeros(2)], mesh, Writes()),
    ):
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert not isinstance(error.value, LostRank)
    note = process_groups(mesh).store().get("note/1").decode()
    assert (
        note
        == "failed in step 1 of train with RuntimeError: CUDA error: device-side assert triggered"
    )
    with pytest.raises(RuntimeError, match="half updated"):
        check_whole(step.leaves, "save")


def test_a_state_is_not_saved_if_the_device_of_this_rank_has_failed(mesh, tmp_path):
    step = in_flight(mesh)
    step.end.query = broken
    with pytest.raises(RuntimeError, match=r"half updated.*illegal memory access"):
        zt.save(tmp_path / "bad", {"w": step.leaves[0]})
    assert "illegal memory access" in process_groups(mesh).store().get("note/1").decode()


def test_nothing_waits_for_the_copies_of_a_device_that_has_failed(mesh, monkeypatch):
    """The error that says why the state is of no use comes instead of that of the device."""
    step = in_flight(mesh)
    step.end.query = broken
    monkeypatch.setattr(failure, "let_copies_end", broken)
    with pytest.raises(RuntimeError, match=r"save: this state is half updated.*illegal memory"):
        check_ended(step.leaves, "save")


def test_a_thread_that_has_ended_is_replaced(mesh, monkeypatch):
    groups = process_groups(mesh)
    groups.watched_by = os.getpid()

    def look(self, groups, now):
        raise AttributeError("a defect")

    monkeypatch.setattr(Watch, "look", look)
    with pytest.raises(AttributeError):
        watch._watch(weakref.ref(groups))
    assert groups.watched_by == 0, "the next step starts another thread"


def test_a_channel_may_be_opened_while_kernels_are_told_to_leave(mesh):
    groups = process_groups(mesh)

    class Opened:
        def live_group(self):
            groups._channels["dp", "gathers"] = Channel("dp", "gathers")

    groups._channels[None, "ranks"] = Opened()
    groups.interrupt()
    assert groups.symmetric.interrupts == 1


def test_a_group_is_aborted_once_if_two_threads_interrupt_it(mesh, monkeypatch):
    groups = process_groups(mesh)
    groups.carries_users = True
    aborted = []

    def abort(some):
        aborted.extend(some)
        time.sleep(0.1)

    monkeypatch.setattr("ztrans.runtime.process_groups._is_nccl", lambda group: True)
    monkeypatch.setattr("ztrans.runtime.process_groups.abort", abort)
    thread = threading.Thread(target=groups.interrupt)
    thread.start()
    groups.interrupt()
    thread.join()
    assert aborted == [mesh.get_group(0)]


def test_each_step_of_a_profile_has_the_whole_time(mesh, monkeypatch):
    groups = process_groups(mesh)
    looking = Watch()
    in_flight(mesh)
    looking.look(groups, 100.0)
    groups.in_flight.renew()  # the first step of the profile has ended
    looking.look(groups, 108.0)
    looking.look(groups, 116.9)
    assert not groups.in_flight.given_up
    looking.look(groups, 117.1)
    assert groups.in_flight.given_up == "step 3 of train has not ended for 9 s"


def test_a_profile_says_that_a_step_of_it_has_ended(monkeypatch):
    steps = []
    case = CASES["mlp_momentum"]
    step = zt.shard_params(zt.make_mesh("cpu", dp=-1))(case.step)
    state = step.shard(case.state())
    batch = case.batch(4)
    monkeypatch.setattr(InFlight, "renew", lambda self: steps.append(self))
    step.lower(state, *batch).compile().profile(state, *batch, steps=3)
    assert len(steps) == 3


def test_an_error_is_that_of_the_step_although_no_thread_can_write_a_note(mesh, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(MemoryError), running("train", [torch.zeros(2)], mesh, Writes()):
        raise MemoryError("none is left")
    assert process_groups(mesh).symmetric.interrupts == 1, "other ranks do not wait"


def test_time_counts_although_the_store_does_not_answer(mesh, monkeypatch):
    groups = process_groups(mesh)

    def silent():
        raise AssertionError("the store is asked before the clock")

    monkeypatch.setattr(groups, "store", silent)
    monkeypatch.setattr("ztrans.runtime.watch.write_note", lambda groups, note: None)
    in_flight(mesh)
    looking = Watch()
    looking.since = 0.0
    looking.oldest = groups.in_flight.oldest()
    looking.look(groups, 9.1)
    assert groups.in_flight.given_up == "step 3 of train has not ended for 9 s"


@pytest.mark.slow
def test_notes_are_read_while_a_group_waits_in_the_store():
    """As while NCCL makes a communicator. A client of the store answers one call at a time."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", rank=1, world_size=2, store=store)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        groups = process_groups(mesh)
        groups.connect_store()
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            with contextlib.suppress(RuntimeError):
                mesh.get_group(0).get_group_store().wait(["never"], timedelta(seconds=4))

        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait()
        time.sleep(0.2)
        began = time.monotonic()
        write_note(groups, "failed")
        assert has_note(groups)
        assert time.monotonic() - began < 2
        thread.join()
    finally:
        dist.destroy_process_group()


def test_a_step_is_watched_while_the_host_launches_it(mesh, monkeypatch):
    """The host may wait for a kernel in the middle of a step, as when the queue of launches is full."""
    groups = process_groups(mesh)
    leaf = torch.zeros(2)
    on_a_gpu = SimpleNamespace(device_type="cuda", get_group=mesh.get_group)
    monkeypatch.setattr("ztrans.runtime.watch.process_groups", lambda mesh: groups)
    monkeypatch.setattr("torch.Event", lambda device: Recorded())
    groups.watched_by = os.getpid()  # the test looks in place of the thread
    with watched(on_a_gpu, "train", [leaf]), running("train", [leaf], mesh, Writes()):
        assert groups.in_flight.oldest().name == "step 1 of train"
    assert groups.in_flight.oldest() is None, "its event is done"
    note_of_rank_0(mesh, "failed in step 2 of train with KeyError")
    with (
        pytest.raises(LostRank, match="Rank 0 failed in step 2"),
        watched(on_a_gpu, "train", [leaf]),
        running("train", [leaf], mesh, Writes()),
    ):
        Watch().look(groups, 0.0)
        raise RuntimeError("a collective was launched on a communicator that is aborted")
    assert groups.in_flight.oldest() is None
    check_whole([leaf], "train")  # the step had not begun to write
    cut_off = in_flight(mesh, leaf=leaf)
    with (
        pytest.raises(LostRank, match="The state is half updated"),
        watched(on_a_gpu, "train", cut_off.leaves),
        running("train", cut_off.leaves, mesh, Writes()),
    ):
        raise LostRank("while the step before was still running")
    with pytest.raises(KeyError), watched(on_a_gpu, "train", [leaf]):
        raise KeyError("x")
    assert groups.in_flight.oldest() is None


class Recorded(Event):
    """An event that is done as soon as it is recorded."""

    def record(self) -> None:
        self.is_done = True
