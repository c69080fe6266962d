"""Faults on real ranks.

No fault may end in a wrong number, in a half-updated state that nobody is told of, or in a rank that waits longer than
the time-out of its process group.
"""

from __future__ import annotations

import pytest

from tests.faults.launch import Rank, launch
from tests.faults.strangers import Strangers

pytestmark = pytest.mark.distributed
TIMEOUT = 6.0  # seconds, of the user's process group in scenarios.py


def ended_well(ranks: list[Rank]) -> list[Rank]:
    """The same ranks, after a check that none of them crashed."""
    for rank in ranks:
        assert rank.code == 0, rank.errors[-3000:]
    return ranks


@pytest.mark.parametrize(
    ("scenario", "stages"),
    [("uneven", (0, 3)), pytest.param("uneven_1_2", (1, 2), marks=pytest.mark.exhaustive)],
)
def test_batch_sizes_may_differ_between_ranks(scenario, stages):
    """Fifty steps with random batch sizes, at last a small batch. A batch of one sample has a program of its own."""
    for rank in ended_well(launch(scenario, 4, seconds=100)):
        for stage in stages:
            report = rank.reports[f"uneven {stage}"]
            assert report["distance"] <= 1e-14 and report["programs"] == 4, report


@pytest.fixture(scope="module")
def disagreements() -> list[Rank]:
    return ended_well(launch("disagreements", 2))


def test_ranks_that_call_different_steps_fail_before_they_send_anything(disagreements):
    for rank in disagreements:
        text = rank.reports["ended"]["text"]
        assert text.startswith(
            "unshard and a step of train_step: the ranks of the mesh do not do the same, so none"
        )
        assert "  rank 0: unshard\n  rank 1: a step of train_step\n" in text
        assert "an `if` around one must be the same on all ranks." in text
        assert "If the data of some ranks has ended, stop all ranks together" in text
        assert (
            "rank 1: a step of step, with a program that is new here"
            in rank.reports["names"]["text"]
        )
        assert rank.reports["goes on"]["whole"], "no rank has sent anything, so all can go on"


def test_ranks_with_different_programs_see_the_first_message_that_differs(disagreements):
    for rank in disagreements:
        text = rank.reports["messages"]["text"]
        assert text.startswith("a step of fewer, with a program that is new here: the ranks of the")
        assert "\n  Message 15 of the step is\n" in text
        assert "on rank 0: reduce_scatter mean over dp as f32 of params.b0.grad (96 bytes)" in text
        assert "on rank 1: reduce_scatter mean over dp as f32 of params.b1.grad (96 bytes)" in text
        assert (
            "  rank 1: a step of fewer, with a program that is new here\n"
            in rank.reports["known"]["text"]
        )
        assert (
            "on rank 0: all_reduce mean over dp as f32 of pmean" in rank.reports["outputs"]["text"]
        )
        assert "(192 bytes)" in rank.reports["outputs"]["text"]


def test_ranks_with_different_updates_raise_an_error(disagreements):
    for rank in disagreements:
        text = rank.reports["update"]["text"]
        assert (
            "They send the same messages, but would update the state in another way or with other numbers."
            in text
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_whose_updates_differ_by_the_size_of_the_batch_or_by_a_number_raise_an_error(
    disagreements, stage
):
    for rank in disagreements:
        size, number = (rank.reports[f"{what} {stage}"]["text"] for what in ("size", "number"))
        assert (
            "They send the same messages, but would update the state in another way or with other numbers.\n    on rank 0: an update with"
            in size
        )
        assert "and its update must not depend on the size of its batch" in size
        assert "    on rank 0: rate = 0.1\n    on rank 1: rate = 1.1\n" in number
        assert rank.reports[f"seen {stage}"]["rows"] == 3 * 8 + 7


def test_ranks_of_two_hosts_that_wait_in_different_orders_raise_an_error():
    """A wait sends the second level of a message, so each would wait for what the other one sends later."""
    for rank in ended_well(launch("waits_apart", 4)):
        error = rank.reports["waits"]
        assert error["kind"] == "RuntimeError", error  # and not LostRank, after the time-out
        assert error["text"].startswith("a step of train_step: the ranks of the mesh do not do the")
        assert "\n  Message 2 of the step is\n" in error["text"]
        for there, leaf in ((0, "b0"), (1, "w0")):
            line = f"the second level of all_gather of params.{leaf}.full, at the first wait for it"
            assert f"    on rank {there}: {line}\n" in error["text"], error["text"]
        assert not rank.reports["goes on"]["kind"], "no rank has sent anything"


def test_ranks_with_different_first_states_raise_an_error():
    for rank in ended_well(launch("starts_apart", 2)):
        for stage in (0, 3):
            text = rank.reports[f"seeds {stage}"]["text"]
            assert "\n  state.params.w2 has other values on rank 1 than on rank 0" in text
            assert "step.shard(state, source=0)" in text
            assert rank.reports[f"source {stage}"]["distance"] == 0
        shapes = rank.reports["shapes"]["text"]
        wanted = "  state.params.w1 is [24, 24] of torch.float32 on rank 0 and [25, 24] of"
        assert (
            shapes.startswith("shard: the ranks of the mesh do not do the same")
            and wanted in shapes
        )
        assert "  Rank 1 has 15 leaves and rank 0 has 16" in rank.reports["leaves"]["text"]
        assert (
            "If the optimizer divides its state over ranks itself, use its single-device class"
            in rank.reports["leaves"]["text"]
        )
        assert "on meta, without values on rank 1" in rank.reports["meta"]["text"]


def test_on_gpus_the_answer_about_a_step_is_read_when_the_next_call_begins():
    for rank in ended_well(launch("late", 2)):
        assert rank.reports["asked"]["after"] < 2, "rank 1 asks three seconds later"
        assert not rank.reports["number"]["kind"], "the step has run before its answer is read"
        text = rank.reports["next"]["text"]
        assert text.startswith(
            "a step of sized_step: the ranks of the mesh did not do the same, and the step has run"
        )
        assert "    on rank 0: rate = 0.1\n    on rank 1: rate = 1.1\n" in text
        assert rank.reports["goes on"]["rows"] == 3 * 8


def test_a_second_thread_cannot_take_a_step_at_the_same_time():
    for rank in ended_well(launch("threads", 2)):
        assert rank.reports["threads"]["text"].startswith(
            "train_step: another thread runs a step of this mesh."
        )
        assert rank.reports["goes on"]["whole"]


def test_a_forked_child_that_ends_does_not_harm_its_parent():
    assert all(rank.reports["forked"]["whole"] for rank in ended_well(launch("forked", 2)))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_thousand_steps_and_six_process_groups_leave_nothing_behind():
    for rank in ended_well(launch("steady", 2, seconds=100)):
        first, last = rank.reports["after 100"], rank.reports["after 1000"]
        assert last["descriptors"] <= first["descriptors"] and last["threads"] <= first["threads"]
        assert last["resident"] <= first["resident"] + (4 << 20), (
            "one step allocates 200 KiB: 900 would be seen"
        )
        group_0, group_6 = rank.reports["group 0"], rank.reports["group 6"]
        assert (
            group_6["threads"] <= group_0["threads"]
            and group_6["descriptors"] <= first["descriptors"]
        )
        assert group_6["resident"] <= group_0["resident"] + (8 << 20)
        assert rank.reports["called"]["text"].startswith(
            "ztrans: the process group of this step's mesh has been destroyed."
        )


def check_torn(reports: dict, cause: str) -> None:
    """The state is half updated and marked as such: each use of it raises an error with the cause and the remedy."""
    assert not reports["then"]["whole"]
    for name, who in (("then", "unshard"), ("shard", "shard"), ("next", "train_step")):
        text = reports[name]["text"]
        assert text.startswith(
            f"{who}: this state is half updated, some leaves are new and some are old: {cause}"
        ), text
        assert "Load a checkpoint" in text and 'overlap_grads(update="last")' in text


@pytest.mark.parametrize("scenario, error", [
    ("interrupted", "KeyboardInterrupt"),
    ("memory", "OutOfMemoryError: no memory is left (simulated)"),
])  # fmt: skip
def test_an_exception_on_one_rank_ends_the_step_of_all(scenario, error):
    """No rank waits, no rank goes on with a half-updated state, and the error of the other ranks names the cause."""
    first, second = ended_well(launch(scenario, 2))
    kind = error.split(":")[0]
    assert second.reports["failed"]["kind"] == kind
    *lines, last = second.reports["failed"]["notes"]
    assert last == "ztrans: step 3 of train_step was ended by this. The state is half updated."
    assert ["scenarios.py:" in text for text in lines] == [True] * (kind == "OutOfMemoryError"), (
        "where it failed"
    )
    assert f"Rank 1 failed in step 3 of train_step with {error}." in first.reports["failed"]["text"]
    assert first.reports["failed"]["after"] < TIMEOUT / 2, "long before the time-out"
    check_torn(first.reports, f"Rank 1 failed in step 3 of train_step with {kind}")
    check_torn(second.reports, f"step 3 of train_step failed with {kind}")


@pytest.mark.parametrize("scenario, shots", [
    ("interrupts", 20),
    pytest.param("interrupts_200", 200, marks=[pytest.mark.exhaustive, pytest.mark.slow]),
])  # fmt: skip
def test_an_interrupt_at_any_moment_of_a_step_ends_it_on_all_ranks(scenario, shots):
    """Also while the ranks agree. Nobody waits, and a state that is neither old nor new is marked."""
    ranks = ended_well(launch(scenario, 3, seconds=20 + shots))
    told = 0
    for rank in ranks:
        assert list(rank.reports) == ["interrupts"], "no rank has an error of another kind"
        counts = rank.reports["interrupts"]
        told += counts["told"]
        assert counts["slow"] == 0, "no rank waits for the time-out"
        assert counts["wrong"] == 0, "a state is old, or new, or marked"
        assert counts["interrupted"] > shots / 4
    assert told > shots / 4


def test_a_message_to_a_rank_that_has_been_interrupted_does_not_wait():
    """gloo never wakes a wait for a send whose connection was reset, so ranks wait for the receives only."""
    first, second = ended_well(launch("interrupted_between_messages", 2))
    assert first.reports["failed"]["kind"] == "KeyboardInterrupt"
    assert second.reports["failed"]["kind"] == "LostRank"
    assert second.reports["failed"]["after"] < TIMEOUT / 2, "long before the time-out"


def test_the_other_ranks_fail_at_once_when_a_rank_is_killed():
    first, second = launch("killed", 2)
    assert second.code == -9 and first.code == 0, first.errors[-3000:]
    assert first.reports["failed"]["after"] < 3
    assert (
        "Rank 1 said nothing: the program there has ended, or it was killed, is out of memory, stopped, or busy"
        in first.reports["failed"]["text"]
    )
    check_torn(first.reports, "Rank 1 said nothing")


def test_the_other_ranks_fail_after_the_time_out_when_a_rank_is_stopped():
    first, _ = launch("stopped", 2)
    assert first.code == 0, first.errors[-3000:]
    assert TIMEOUT - 1 < first.reports["failed"]["after"] < TIMEOUT + 1.5
    assert "Rank 1 said nothing" in first.reports["failed"]["text"]
    check_torn(first.reports, "Rank 1 said nothing")


def test_on_gpus_the_other_ranks_end_with_the_text_of_the_first_error():
    first, second = launch("as_on_gpus", 2)
    assert second.code == 0, second.errors[-3000:]
    assert second.reports["failed"]["kind"] == "OutOfMemoryError"
    text = "ztrans: rank 1 failed in step 2 of train_step with OutOfMemoryError"
    for refused in ("then", "saved"):
        assert second.reports[refused]["text"].startswith(text)
    assert first.code == 1 and first.reports["launches"]["launched"] == 1
    assert "went on" not in first.reports
    assert (
        "because the ranks of a mesh of GPUs end together: rank 1 failed in step 2" in first.errors
    )


def test_a_part_of_the_world_goes_on_after_failures():
    """The groups that it makes anew have other names, so no rank connects to the addresses of the closed ones."""
    ranks = ended_well(launch("in_a_part", 3))
    for rank in ranks[:2]:
        kinds = [rank.reports[f"failed {k}"]["kind"] for k in range(3)]
        assert kinds == [rank.reports["failed 0"]["kind"]] * 3
        assert kinds[0] in ("LostRank", "OutOfMemoryError")
        assert rank.reports["goes on"]["kind"] == ""


def test_with_update_last_a_failure_leaves_the_old_state_whole_and_all_ranks_go_on():
    first, second = ended_well(launch("interrupted_last", 2))
    assert "The state is as it was before the step." in first.reports["failed"]["text"]
    assert second.reports["failed"]["notes"][0].endswith("The state is as it was before the step.")
    for rank in (first, second):
        assert rank.reports["then"]["whole"] and not rank.reports["then"]["kind"]
        assert not rank.reports["shard"]["kind"] and not rank.reports["next"]["kind"]


def test_the_other_ranks_learn_that_a_rank_cannot_compile():
    first, second = ended_well(launch("cannot_compile", 2))
    assert second.reports["failed"]["kind"] == "RuntimeError"
    assert second.reports["failed"]["text"] == "the kernel does not compile"
    lost = first.reports["failed"]
    # To trace and lower takes both ranks the same time, which is long on a busy machine.
    soon = second.reports["failed"]["after"] + TIMEOUT / 2
    assert (lost["kind"], lost["after"] < soon) == ("LostRank", True), lost
    cause = "Rank 1 failed in step 1 of train_step with RuntimeError: the kernel does not compile"
    assert cause in lost["text"]
    assert not first.reports["goes on"]["kind"] and not second.reports["goes on"]["kind"]


def test_the_other_ranks_learn_that_a_rank_has_no_program():
    """For its first call, or for a later one. If all ranks have none, each has its own error."""
    first, second = ended_well(launch("has_no_program", 2))
    errors = {"limit": "DoesNotFit", "batch": "TraceRuntimeError"}
    calls = {"limit": "a step of train_step, with a program that is new here", "batch": "a step of"}
    for name, kind in errors.items():
        alone = second.reports[name]
        told = first.reports[name]
        soon = alone["after"] + TIMEOUT / 2
        assert alone["kind"] == kind, alone
        assert (told["kind"], told["after"] < soon) == ("RuntimeError", True), told
        assert told["text"].startswith(calls[name])
        assert f"  Rank 1 has failed with {kind}: {alone['text']}" in told["text"]
    assert "is less than the step needs in any order tried" in first.reports["limit"]["text"]
    for rank in (first, second):
        assert not rank.reports["goes on"]["kind"] and not rank.reports["goes on too"]["kind"]
        assert rank.reports["everywhere"]["kind"] == "TraceRuntimeError"
    lost = first.reports["launched"]
    soon = second.reports["launched"]["after"] + TIMEOUT / 2
    assert (lost["kind"], lost["after"] < soon) == ("LostRank", True), lost
    assert "Rank 1 failed in a step of train_step with TraceRuntimeError: " in lost["text"]


def test_the_error_says_how_the_batch_of_a_rank_differs_from_the_one_before():
    ranks = ended_well(launch("other_batches", 2))
    texts = {
        "key": "data.mask is new",
        "order": "data.y is in the place of data.x",
        "gradient": "data.x had requires_grad=False and has True",
    }
    for rank in ranks:
        for name, text in texts.items():
            error = rank.reports[name]
            assert error["kind"] == "RuntimeError", error
            assert f"with a program that is new here\n    {text}" in error["text"]
            assert not rank.reports[f"after {name}"]["kind"], "the next right call works"


def test_more_ranks_than_one_round_reaches_compare_versions_and_calls():
    for rank in ended_well(launch("many_ranks", 11)):
        versions = rank.reports["versions"]["text"]
        assert versions.startswith("ztrans: the ranks of the mesh run different versions")
        assert "  ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9: ztrans " in versions
        assert "  rank 10: ztrans " in versions and ", torch 1" in versions
        assert not rank.reports["same"]["kind"] and not rank.reports["goes on"]["kind"]
        calls = rank.reports["calls"]["text"]
        assert "  ranks 0, 1, 2, 3, 4, 5, 6, 8, 9, 10: other\n  rank 7: second\n" in calls
        assert rank.reports["stops"] == {"before": False, "after": True}


def test_a_signal_on_one_rank_ends_the_loops_of_all_after_the_same_step():
    first, second = ended_well(launch("stops", 2))
    taken = [rank.reports["stops"]["taken"] for rank in (first, second)]
    assert taken[0] == taken[1] and len(taken[0]) == 20
    assert [rank.reports["stops"]["called"] for rank in (first, second)] == [10, 10], (
        "the handler before too"
    )


def test_the_error_says_when_the_data_of_one_rank_has_ended():
    first, second = ended_well(launch("ends_early", 2))
    assert not second.reports["last step"]["kind"]
    text = first.reports["last step"]["text"]
    assert "Rank 1 said nothing: the program there has ended, or it was killed" in text
    assert "If data ends earlier on some ranks, stop all ranks together" in text


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 100])
def test_strangers_on_every_port_neither_delay_nor_harm(words):
    visits: list[Strangers] = []
    ranks = launch(
        "forked", 2, after_start=lambda ps: visits.append(Strangers([p.pid for p in ps], words))
    )
    visits[0].leave()
    assert len(visits[0].met) > 2, "the store and every rank listen on a port"
    assert all(rank.reports["forked"]["whole"] for rank in ended_well(ranks))
