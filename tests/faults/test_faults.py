"""Faults on real ranks: none of them may end in a wrong number, a state that only looks whole, or a rank that waits
longer than the time-out of its process group."""

from __future__ import annotations

import pytest

from tests.faults.launch import Rank, launch
from tests.faults.strangers import Strangers

pytestmark = pytest.mark.distributed
TIMEOUT = 6.0  # seconds, of the user's process group in scenarios.py


def lived(ranks: list[Rank]) -> list[Rank]:
    for rank in ranks:
        assert rank.code == 0, rank.errors[-3000:]
    return ranks


def test_batches_of_other_sizes_on_every_rank_are_data_parallelism():
    """Fifty steps with sizes at random, at last the small batch; one sample makes a program of other equations."""
    for rank in lived(launch("uneven", 4, seconds=100)):
        for stage in (0, 1, 2, 3):
            said = rank.said[f"uneven {stage}"]
            assert said["distance"] <= 1e-14 and said["programs"] == 4, said


@pytest.fixture(scope="module")
def disagreements() -> list[Rank]:
    return lived(launch("disagreements", 2))


def test_a_rank_that_calls_something_else_is_found_before_anything_is_sent(disagreements):
    for rank in disagreements:
        text = rank.said["ended"]["text"]
        assert text.startswith("unshard and a step of train_step: the ranks of the mesh do not do the same, so none")
        assert "  rank 0: unshard\n  rank 1: a step of train_step\n" in text
        assert "If the data of some ranks has ended, stop all ranks together" in text
        assert "rank 1: a step of step, with a program that is new here" in rank.said["names"]["text"]
        assert rank.said["goes on"]["whole"], "nobody has sent anything, so all can go on"


def test_ranks_with_other_programs_are_told_the_first_message_that_differs(disagreements):
    for rank in disagreements:
        text = rank.said["messages"]["text"]
        assert text.startswith("fewer: ranks [1] lowered another program than rank 0 did.\n  Message 15 of the step is")
        assert "on rank 0: reduce_scatter mean over dp as f32 of params.b0.grad (96 bytes)" in text
        assert "on rank 1: reduce_scatter mean over dp as f32 of params.b1.grad (96 bytes)" in text
        assert "  rank 1: a step of fewer, with a program that is new here\n" in rank.said["known"]["text"]
        assert "all_reduce mean over dp as f32 of mm.mean (192 bytes)" in rank.said["outputs"]["text"]


def test_ranks_that_update_otherwise_are_told(disagreements):
    for rank in disagreements:
        text = rank.said["update"]["text"]
        assert "They send the same messages, and update the state otherwise." in text


def test_ranks_that_start_apart_are_told():
    for rank in lived(launch("starts_apart", 2)):
        for stage in (0, 3):
            text = rank.said[f"seeds {stage}"]["text"]
            assert text.startswith("shard: state.params.w2 has other values on rank 1 than on rank 0")
            assert "step.shard(state, source=0)" in text
            assert rank.said[f"source {stage}"]["distance"] == 0
        shapes = rank.said["shapes"]["text"]
        assert shapes.startswith("shard: state.params.w1 is [24, 24] of torch.float32 on rank 0 and [25, 24] of")
        assert rank.said["leaves"]["text"].startswith("shard: rank 1 has 15 leaves and rank 0 has 16")
        assert "on meta, without values on rank 1" in rank.said["meta"]["text"]


def test_a_second_thread_in_the_steps_of_a_mesh_is_told():
    for rank in lived(launch("threads", 2)):
        assert rank.said["threads"]["text"].startswith("train_step: another thread runs a step of this mesh.")
        assert rank.said["goes on"]["whole"]


def test_children_that_are_forked_change_nothing():
    assert all(rank.said["forked"]["whole"] for rank in lived(launch("forked", 2)))


@pytest.mark.slow
def test_a_thousand_steps_and_six_process_groups_leave_nothing_behind():
    for rank in lived(launch("steady", 2, seconds=100)):
        first, last = rank.said["after 100"], rank.said["after 1000"]
        assert last["descriptors"] <= first["descriptors"] and last["threads"] <= first["threads"]
        assert last["resident"] <= first["resident"] + (4 << 20), "of which one step allocates 200 KiB"
        made, again = rank.said["made again 0"], rank.said["made again 6"]
        assert again["threads"] <= made["threads"] and again["descriptors"] <= first["descriptors"]
        assert again["resident"] <= made["resident"] + (8 << 20)
        assert rank.said["called"]["text"].startswith("ztrans: the process group of this step's mesh has been destroyed.")


def check_torn(said: dict, cause: str) -> None:
    """The state is marked: whoever uses it is told what happened, and how to go on."""
    assert not said["then"]["whole"]
    for name, who in (("then", "unshard"), ("shard", "shard"), ("next", "train_step")):
        text = said[name]["text"]
        assert text.startswith(f"{who}: this state is half updated, some leaves are new and some are old: {cause}"), text
        assert "Load a checkpoint" in text and 'overlap_grads(update="last")' in text


@pytest.mark.parametrize("scenario, error", [
    ("interrupted", "KeyboardInterrupt"),
    ("memory", "OutOfMemoryError: no memory is left (pretended)"),
])  # fmt: skip
def test_an_exception_on_one_rank_ends_the_step_of_all(scenario, error):
    """No rank waits, no rank goes on with a state that is half updated, and the others know why."""
    first, second = lived(launch(scenario, 2))
    kind = error.split(":")[0]
    assert second.said["failed"]["kind"] == kind
    assert second.said["failed"]["notes"] == ["ztrans: step 3 of train_step was ended by this. The state is half updated."]
    assert f"Rank 1 failed in step 3 of train_step with {error}." in first.said["failed"]["text"]
    assert first.said["failed"]["after"] < 2, "long before the time-out"
    check_torn(first.said, f"Rank 1 failed in step 3 of train_step with {kind}")
    check_torn(second.said, f"step 3 of train_step failed with {kind}")


def test_a_rank_that_is_killed_is_missed_at_once():
    first, second = launch("killed", 2)
    assert second.code == -9 and first.code == 0, first.errors[-3000:]
    assert first.said["failed"]["after"] < 3
    assert "Rank 1 said nothing: killed, out of memory, stopped, or busy" in first.said["failed"]["text"]
    check_torn(first.said, "Rank 1 said nothing")


def test_a_rank_that_is_stopped_is_missed_within_the_time_out():
    first, _ = launch("stopped", 2)
    assert first.code == 0, first.errors[-3000:]
    assert TIMEOUT - 1 < first.said["failed"]["after"] < TIMEOUT + 1.5
    assert "Rank 1 said nothing" in first.said["failed"]["text"]
    check_torn(first.said, "Rank 1 said nothing")


def test_with_updates_last_a_failure_leaves_the_old_state_whole_and_all_ranks_go_on():
    first, second = lived(launch("interrupted_last", 2))
    assert "The state is as it was before the step." in first.said["failed"]["text"]
    assert second.said["failed"]["notes"][0].endswith("The state is as it was before the step.")
    for rank in (first, second):
        assert rank.said["then"]["whole"] and not rank.said["then"]["kind"]
        assert not rank.said["shard"]["kind"] and not rank.said["next"]["kind"]


def test_data_that_ends_on_one_rank_is_named_as_that():
    first, second = lived(launch("ends_early", 2))
    assert not second.said["last step"]["kind"]
    text = first.said["last step"]["text"]
    assert "Rank 1 ended its program, or destroyed its process group, after" in text
    assert "If data ends earlier on some ranks, stop all ranks together" in text


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 100])
def test_strangers_on_every_port_neither_delay_nor_harm(words):
    visits: list[Strangers] = []
    ranks = launch("forked", 2, after_start=lambda ps: visits.append(Strangers([p.pid for p in ps], words)))
    visits[0].leave()
    assert len(visits[0].met) > 2, "the store, and every rank"
    assert all(rank.said["forked"]["whole"] for rank in lived(ranks))
