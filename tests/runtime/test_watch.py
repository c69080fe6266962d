"""Ranks of GPUs that end together, on doubles of their steps: what the process that watches decides, and real ones."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ztrans as zt
from tests.support import watched_ranks
from tests.support.processes import Running
from tests.support.programs import CASES
from tests.support.worlds import fake_mesh
from ztrans.calling.leaf_records import check_whole
from ztrans.runtime import watch
from ztrans.runtime.channels import LostRank
from ztrans.runtime.failure import Writes, check_ended, check_launched, running
from ztrans.runtime.session import session_of
from ztrans.runtime.watch import InFlight, Place
from ztrans.runtime.watching import Watch

TIMEOUT = 10.0


def ranks_of(count: int = 2) -> list[Watch]:
    """The processes that watch over the ranks of one mesh."""
    store = dist.HashStore()
    return [Watch(store, rank, count, TIMEOUT, 0.0) for rank in range(count)]


def say(watching: Watch, *lines: str, now: float = 0.0) -> None:
    for line in lines:
        watching.hear(line, now)


# ---- what the process that watches decides


def test_every_other_rank_ends_with_the_text_of_the_first_failure():
    first, second, third = ranks_of(3)
    for each in (first, second, third):
        say(each, "launched 4")
        assert each.look(0.0, True) == ""
    say(second, f"failed {json.dumps('failed in step 4 of train with KeyError: x')}")
    say(third, f"failed {json.dumps('failed in step 4 of train with a later error')}")
    assert second.look(0.5, True) == "", "it raises its own error"
    assert third.look(0.5, True) == ""
    assert first.look(0.5, True) == "rank 1 failed in step 4 of train with KeyError: x."
    assert second.look(0.6, False) is None, "it has ended"


def test_a_rank_that_is_killed_is_missed_by_the_process_beside_it():
    first, second = ranks_of()
    say(second, "launched 1", "ended 1")
    assert second.look(0.0, False) is None
    text = first.look(0.0, True)
    assert text.startswith("rank 1 has ended without a word: it was killed, perhaps for lack")


def test_a_rank_that_has_said_that_it_leaves_is_not_missed():
    first, second = ranks_of()
    for each in (first, second):
        say(each, "launched 2", "ended 2")
    say(second, "left")
    assert second.look(0.0, True) == "", "it waits for the other program"
    assert first.look(0.0, True) == ""
    say(first, "left")
    assert first.look(0.5, True) is None
    assert second.look(0.5, True) is None


def test_a_step_for_which_another_rank_does_not_come_ends_all():
    first, second = ranks_of()
    for each in (first, second):
        say(each, "launched 2", "ended 2")
    say(second, "left")
    second.look(0.0, True)
    assert first.look(0.0, True) == ""
    say(first, "launched 3")
    assert first.look(0.0, True) == (
        "rank 0 has launched step 3, and the program of rank 1 has ended after step 2, by sys.exit or because its "
        "data has ended. Every rank must take the same number of steps. If data ends earlier on some ranks, stop all "
        "ranks together, or drop the last batches: DistributedSampler(..., drop_last=True)."
    )
    assert second.look(0.0, True) is None, "its program ends without those of the others"


def test_a_step_that_does_not_end_within_the_time_out_ends_all():
    first, second = ranks_of()
    say(first, "launched 2", now=100.0)
    say(first, "ended 1", now=105.0)
    assert first.look(113.9, True) == "", "the second step is the oldest one since 105 s"
    text = first.look(114.1, True)
    assert text.startswith("rank 0 has waited 9 s for step 2 to end, nine tenths of the time-out")
    assert second.look(114.1, True) == text


@pytest.mark.parametrize(
    ("lines", "timeout"), [(["launched 2", "ended 2"], TIMEOUT), (["launched 2"], math.inf)]
)
def test_a_rank_without_a_step_or_without_a_time_out_may_take_its_time(lines, timeout):
    watching = Watch(dist.HashStore(), 0, 2, timeout, 0.0)
    say(watching, *lines)
    assert watching.look(1e6, True) == ""


def test_each_step_of_a_profile_has_the_whole_time():
    watching, _ = ranks_of()
    say(watching, "launched 1", now=0.0)
    say(watching, "launched 1", now=8.0)
    assert watching.look(16.9, True) == ""
    assert "has waited 9 s for step 1" in watching.look(17.1, True)


def test_a_rank_that_has_lost_its_connection_waits_for_the_cause():
    first, second, third = ranks_of(3)
    for each in (first, third):
        say(each, f"lost {json.dumps('Connection closed by peer')}", now=10.0)
        assert each.look(10.0, True) == ""
    say(second, f"failed {json.dumps('failed in step 1')}")
    second.look(10.5, True)
    assert first.look(10.6, True) == third.look(10.6, True) == "rank 1 failed in step 1."
    alone, _ = ranks_of()
    say(alone, f"lost {json.dumps('Connection closed by peer')}", now=10.0)
    assert alone.look(14.9, True) == ""
    text = "rank 0 has lost other ranks, which said nothing: Connection closed by peer."
    assert alone.look(15.1, True) == text


# ---- the rank


class Event:
    """An event of a GPU, which the test ends, or in which the GPU fails."""

    def __init__(self, looks: int = 0, error: str = "") -> None:
        self.looks = looks
        self.error = error

    def record(self) -> None:
        pass

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        self.looks -= 1
        return self.looks < 0


class Ended(BaseException):
    """In place of the end of this process."""


class Watcher:
    """The connection to the process that watches: what this rank has said."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.failure = ""
        self.said: list[str] = []

    def launched(self) -> None:
        self.said.append(f"launched {self.in_flight.launched}")

    def fail(self, text: str) -> None:
        self.failure = self.failure or text
        self.said.append(text)

    def lost(self, text: str) -> None:
        self.said.append(f"lost: {text}")
        raise Ended(text)


@pytest.fixture
def session(monkeypatch):
    """What the steps of a mesh share, as on GPUs of two ranks, of which the other one does nothing."""
    with fake_mesh() as mesh:
        session = session_of(mesh)
        session.is_alone = False
        session.watcher = Watcher()
        monkeypatch.setattr(torch, "Event", Event)
        yield session


def in_flight(session, **event) -> None:
    session.watcher.in_flight.begin()
    session.watcher.in_flight.record(Event(**event))


def test_a_step_is_counted_while_the_host_launches_it(session):
    with running("train", [], session, Writes()):
        assert session.watcher.said == ["launched 1"]
        assert session.watcher.in_flight.look() == 0
    assert session.watcher.in_flight.look() == 1


def test_after_a_step_that_fails_no_other_one_runs(session):
    leaf = torch.zeros(2)
    writes = Writes()
    with pytest.raises(KeyError), running("train", [leaf], session, writes):
        writes.begin()
        raise KeyError("x\nin two lines")
    assert session.watcher.failure == "failed in step 1 of train with KeyError: 'x\\nin two lines'"
    with pytest.raises(RuntimeError, match="step 1 of train failed with KeyError"):
        check_whole([leaf], "save")
    with pytest.raises(RuntimeError) as error:
        check_launched(session, "train")
    assert str(error.value).startswith("ztrans: rank 1 failed in step 1 of train with KeyError: 'x")
    assert "start all of them again from the last checkpoint" in str(error.value)
    with pytest.raises(RuntimeError, match="On GPUs all ranks end together"):
        session.open()


@pytest.mark.parametrize("text", ["\x1b" * 3000, '"\n' * 3000, "\udcff" * 9, "ü" * 9000], ids=ascii)
def test_a_line_of_any_text_fits_a_pipe_whole(text):
    """A longer line would be written in part, and the process that watches could not read it."""
    line = watch._json(text)
    assert len(line.encode()) <= 4000 and "\n" not in line
    assert text.encode(errors="replace").decode().startswith(json.loads(line)) and json.loads(line)


def test_a_rank_that_has_lost_another_one_ends(session):
    with pytest.raises(Ended), running("train", [torch.zeros(2)], session, Writes()):
        raise LostRank("Connection closed by peer\nand more")
    assert session.watcher.said == ["launched 1", "lost: Connection closed by peer"]


def test_a_kernel_that_has_waited_in_vain_ends_the_process(session):
    session.symmetric = SimpleNamespace(error=lambda: "rank 1 waited in vain for rank 0")
    with pytest.raises(Ended):
        check_launched(session, "train")
    with pytest.raises(Ended):
        check_ended([], "save")
    assert session.watcher.said == ["lost: rank 1 waited in vain for rank 0"] * 2


def test_a_state_is_saved_when_the_steps_that_wrote_it_have_ended(session, tmp_path):
    in_flight(session, looks=3)
    zt.save(tmp_path / "good", {"w": torch.zeros(2)}).result()
    assert session.watcher.in_flight.ended == 1


def test_a_device_that_has_failed_is_an_error_of_this_rank(session, tmp_path):
    in_flight(session, error="CUDA error: an illegal memory access was encountered\nFor debugging")
    text = "save: the device of rank 1 has failed: CUDA error: an illegal memory access was"
    with pytest.raises(RuntimeError, match=text):
        zt.save(tmp_path / "bad", {"w": torch.zeros(2)})
    assert not (tmp_path / "bad").exists()
    assert session.watcher.said == [
        "has a GPU that failed: CUDA error: an illegal memory access was encountered"
    ]


def test_a_profile_says_that_a_step_of_it_has_ended(session, monkeypatch):
    case = CASES["mlp_momentum"]
    mesh = zt.make_mesh("cpu", dp=-1)
    mine = session_of(mesh)
    mine.is_alone = True
    step = zt.shard_params(mesh)(case.step)
    state = step.shard(case.state())
    batch = case.batch(4)
    step.lower(state, *batch).compile().profile(state, *batch, steps=3)
    assert mine.watcher.said == ["launched 1"] * 4


def test_a_store_in_the_memory_of_one_process_is_refused():
    place = Place(dist.PrefixStore("x", dist.HashStore()), "mesh", 0, 2, 10.0)
    with pytest.raises(ValueError, match="HashStore: no other process can read this store"):
        place.described()


def test_runs_that_share_a_store_have_keys_of_their_own(tmp_path):
    """As the restarts of torchrun. A failure of the run before must not end this one."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    places = []
    for run in ("attempt_0", "attempt_1"):
        for rank in range(2):
            place = Place(dist.PrefixStore(run, store), "mesh", rank, 2, 10.0)
            places.append(json.loads(place.described()))
    assert places[0]["key"] == places[1]["key"] != places[2]["key"] == places[3]["key"]
    assert places[0]["path"] == str(tmp_path / "store")


# ---- real processes


def launch(scenario: str, port: int) -> list[Running]:
    script = Path(watched_ranks.__file__)
    return [
        Running(script, (str(port), str(rank), scenario), dict(os.environ)) for rank in range(2)
    ]


@pytest.fixture(scope="module")
def endings():
    """By scenario: the codes, outputs and errors of the two ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = "fails beside a launch", "exits", "both end"
    running_ranks = {name: launch(name, store.port) for name in names}
    found = {}
    for name, ranks in running_ranks.items():
        ended = [rank.end(watched_ranks.LONG) for rank in ranks]
        found[name] = [(rank.code, rank.output, rank.errors) for rank in ended]
    return found


@pytest.mark.slow
def test_a_rank_inside_a_launch_that_keeps_the_lock_of_python_is_ended(endings):
    (code, _, errors), (of_failed, _, _) = endings["fails beside a launch"]
    assert code == -signal.SIGKILL
    assert "rank 1 failed in step 3 of train with ValueError: planted\nin two lines." in errors
    assert of_failed == 0, "it ends by itself"


@pytest.mark.slow
def test_a_rank_for_which_no_other_one_comes_logs_why_and_writes_its_buffers(endings):
    (code, output, errors), (of_other, _, _) = endings["exits"]
    assert code == 1 and of_other == 7
    assert output == "rank 0 has taken two steps\n"
    assert errors.count("rank 0 ends, because the ranks of a mesh of GPUs end together") == 1
    assert "the program of rank 1 has ended after step 2, by sys.exit" in errors
    assert "as torchrun --max-restarts does (docs/launch.md)" in errors


@pytest.mark.slow
def test_programs_that_end_wait_for_each_other(endings):
    (code, _, errors), (of_other, _, errors_of_other) = endings["both end"]
    assert code == of_other == 0
    assert "ends, because" not in errors + errors_of_other
