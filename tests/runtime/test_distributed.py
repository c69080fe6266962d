"""Several gloo processes: the figures that `tests/support/ranks.py` reports are compared with the expected ones."""

import pytest

from tests.support.processes import run_ranks
from tests.support.ranks import FOUR, MORE_ON_FOUR, MORE_ON_TWO, TWO

MiB = 1 << 20


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return run_ranks(2, "ranks.py", "two")


def of(figures: list[dict], check: str) -> list[dict]:
    rows = [f for f in figures if f["check"] == check]
    assert rows, f"ranks.py did not report {check}"
    return rows


def check_two_ranks(figures: list[dict], stages: dict[str, tuple[int, ...]]) -> None:
    assert len(figures) == sum(map(len, stages.values()))
    for f in figures:
        assert f["bitwise"] and f["lockstep"] == 0 and f["output"] == 0, f
        half = f["case"] in ("autocast", "cast_inside")
        assert f["plain"] <= (0.05 if half else 1e-10), f


@pytest.mark.distributed
def test_two_ranks_have_the_bits_of_lockstep(two):
    """A sum of two terms has the same bits in either order."""
    check_two_ranks(of(two, "equal"), TWO)


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_two_ranks_have_the_bits_of_lockstep_at_further_stages():
    check_two_ranks(of(run_ranks(2, "ranks.py", "more_on_two"), "equal"), MORE_ON_TWO)


@pytest.mark.distributed
def test_two_ranks_have_the_bits_of_lockstep_in_micro_batches(two):
    figures = of(two, "micro_batches")
    assert [f["stage"] for f in figures] == [0, 1, 3] and all(f["bitwise"] for f in figures), (
        figures
    )


@pytest.mark.distributed
def test_fp8_is_gathered_over_gloo(two):
    """In messages to each rank, and in gloo's own all_gather, which knows no fp8."""
    figures = of(two, "fp8")
    assert [f["direct"] for f in figures] == [True, False] and all(f["bitwise"] for f in figures), (
        figures
    )


@pytest.mark.distributed
def test_codes_over_gloo_have_the_bits_of_lockstep(two):
    """Of 8 and 4 bits, in uneven and empty parts, in buckets, micro-batches and between steps, and of replicas."""
    figures = of(two, "codes")
    assert [f["chain"] for f in figures] == ["stage 1", "stage 3", "early", "replicas", "kept"]
    assert all(f["bitwise"] for f in figures), figures
    for f in figures:
        assert f["received"] == f["predicted"], f


@pytest.fixture(scope="module")
def four() -> list[dict]:
    return run_ranks(4, "ranks.py", "four")


@pytest.mark.distributed
def test_four_ranks_on_two_hosts_agree_with_lockstep(four):
    """On two hosts with two ranks each, and over two axes as one."""
    figures = of(four, "equal")
    assert len(figures) == sum(map(len, FOUR.values())) + 2
    for f in figures:
        assert f["lockstep"] <= 1e-14 and f["plain"] <= 1e-10, f


@pytest.mark.distributed
def test_references_in_parts_inside_hosts_have_the_bits_of_lockstep(four):
    (figure,) = of(four, "codes")
    assert figure["chain"] == "in parts" and figure["bitwise"], figure
    assert figure["gathered"] == figure["predicted_gathers"] > 0, figure


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_two_hosts_agree_with_lockstep_at_further_stages():
    figures = of(run_ranks(4, "ranks.py", "more_on_four"), "equal")
    assert len(figures) == sum(map(len, MORE_ON_FOUR.values()))
    for f in figures:
        assert f["lockstep"] <= 1e-14 and f["plain"] <= 1e-10, f


@pytest.mark.distributed
def test_a_mixture_of_experts_over_ep_and_dp(four):
    """Experts as DTensors and as tensors of each rank; the gradients of all leaves are those of one process."""
    figures = of(four, "mixture")
    assert len(figures) == 3 * 4
    for f in figures:
        assert f["state"] <= 1e-14 and f["loss"] <= 1e-14, f
    assert [f["distance"] for f in of(four, "mixture saved")] == [0], (
        "and saved for ranks without ep"
    )


@pytest.mark.distributed
def test_attention_over_cp_and_dp(four):
    """Keys and values are gathered, or go around a ring, and both are attention to the whole sequence."""
    figures = of(four, "attention")
    assert sorted(f["way"] for f in figures) == ["gathered"] * 4 + ["ring"] * 4
    for f in figures:
        assert f["state"] <= 1e-14 and f["loss"] <= 1e-14, f


@pytest.mark.distributed
def test_a_mesh_may_be_a_part_of_the_world(four):
    """As in a pipeline, where the ranks of another mesh run another program."""
    figures = of(four, "pipeline")
    assert sorted(f["stage"] for f in figures) == [0, 0, 1, 1]
    for f in figures:
        assert f["distance"] <= 1e-5 and f["axes"] == 1, f


@pytest.mark.distributed
def test_a_model_of_parallelize_module_computes_what_one_process_computes(four):
    """Llama at two stages: DTensors on tp become DTensors on dp and tp, cut over tp first."""
    figures = of(four, "parallelized")
    assert sorted((f["stage"], f["bucketed"]) for f in figures) == [
        (0, False),
        (3, True),
    ]
    for f in figures:
        assert f["state"] <= 1e-5 and f["loss"] <= 1e-6, f
        assert f["rows"] == (20 if f["stage"] == 0 else 10), "of the vocabulary, 40"


@pytest.mark.distributed
def test_a_lifted_loop_on_a_sequence_parallel_module(four):
    (f,) = of(four, "lifted")
    assert f["state"] <= 1e-5 and f["loss"] <= 1e-6, f


@pytest.mark.distributed
def test_the_steps_own_collectives_are_left_where_they_are(four):
    (f,) = of(four, "tensor_parallel")
    assert f["named"] and f["distance"] <= 1e-6


@pytest.mark.distributed
def test_in_place_collectives_have_the_same_results_inside_a_step(two):
    figures = of(two, "in_place")
    assert len(figures) == 2 * 9 and all(f["bitwise"] for f in figures), figures


@pytest.mark.distributed
def test_fused_gathers_send_half_the_bytes(two):
    figures = of(two, "wire")
    assert [f["stage"] for f in figures] == [1, 3]
    for f in figures:
        assert 2 * f["fused"] == f["plain"] > 0, f
        assert f["predicted"] == f["fused"], f


@pytest.mark.distributed
def test_moments_on_the_host_change_no_bit(two):
    """Nor does a checkpoint in between."""
    assert [f["bitwise"] for f in of(two, "on host")] == [True] * 8


@pytest.mark.distributed
def test_ranks_that_own_updates_change_no_bit(two):
    (figures,) = of(two, "owned")
    assert figures["bitwise"], figures


@pytest.fixture(scope="module")
def across_steps() -> list[dict]:
    return run_ranks(2, "across_steps.py")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("check", "starts"),
    [("steps", 1), ("checkpoint", 2), ("sizes", 1), ("two states", 4), ("changed", 2)],
)
def test_steps_that_pass_gathers_to_each_other_have_the_bits_of_steps_alone(
    across_steps, check, starts
):
    """They start gathers from the state only in the first step, and after each change of the state."""
    figures = of(across_steps, check)
    assert [(f["bitwise"], f["starts"]) for f in figures] == [(True, starts)] * 2


@pytest.mark.distributed
def test_a_profile_of_steps_that_pass_gathers_to_each_other(across_steps):
    assert [f["bitwise"] for f in of(across_steps, "tuned")] == [True] * 2


@pytest.mark.distributed
def test_a_state_that_one_rank_has_changed_is_an_error_on_all(across_steps):
    """The others would wait for gathers that this rank does not start. All of them can go on."""
    for f in of(across_steps, "changed on one rank"):
        assert f["error"] == (
            "a step of step: the ranks of the mesh do not do the same, so none of them has sent anything.\n"
            "  On rank 0 the step begins with gathers that the step before has started, as "
            "prefetch(across_steps=True) says. On rank 1 it has another state, or one that has changed since.\n"
            "Change the state between the same two steps on all ranks. The next call starts these gathers again on all "
            "of them."
        )
    assert [f["bitwise"] for f in of(across_steps, "goes on")] == [True] * 2


@pytest.mark.distributed
def test_after_a_failed_step_gathers_start_anew(across_steps):
    """If the step fails at its first message, the state is the old one. If it fails at its last one, it is marked."""
    figures = of(across_steps, "failed")
    assert len(figures) == 2 * 2
    for f in figures:
        failure = "no memory" if f["rank"] else "Rank 1 failed in step 3 of step with RuntimeError"
        assert failure in f["error"] and f["bitwise"], f
        assert ("half updated" in f["torn"]) == (not f["is_first"]), f


@pytest.mark.distributed
def test_ranks_with_different_programs_raise_an_error(two):
    (f,) = of(two, "disagree")
    for rank, error in enumerate(f["error"]):
        assert "step: ranks [1] lowered another program than rank 0 did." in error
        assert f"On rank {rank} its batch is batch.0: f32[{4 + rank},6]" in error


@pytest.mark.distributed
def test_state_can_be_scattered_initialised_on_meta_and_checkpointed(two):
    assert of(two, "source")[0]["distance"] == 0
    assert of(two, "meta")[0]["finite"]
    assert of(two, "meta")[0]["share"] < 0.51
    assert of(two, "checkpoint")[0] == {"check": "checkpoint", "distance": 0.0, "dtensors": True}


@pytest.mark.distributed
def test_state_with_another_layout_is_resharded_by_shard_and_refused_by_a_compiled_step(two):
    (f,) = of(two, "laid_out")
    assert f["distance"] == 0 and f["placed"] and len(f["errors"]) == 2
    assert all("was called with state that is not laid out for it" in text for text in f["errors"])


@pytest.mark.distributed
def test_ranks_that_tune_agree_on_a_plan_and_change_no_bit(two):
    (f,) = of(two, "tuned")
    assert f["bitwise"] == [True, True] and f["programs"] == 1 and f["agreed"]
    assert f["lanes"] == [["compute", "dp gather", "dp reduce"]] * 2
    assert f["wire"] == f["predicted"] > 0, "the timeline has every message, with its bytes"
    assert 0 < f["bandwidth"] != f["assumed"], "the plan is made for the measured link"


@pytest.mark.distributed
def test_memory_by_stage_is_as_predicted(two):
    """From stage 1 on, each rank holds half of the state. It is updated in place, and the peak is the predicted one."""
    figures = of(two, "memory")
    whole, *parts = (f["state"] for f in figures)
    assert [f["stage"] for f in figures] == [0, 1, 2, 3]
    for part in parts:
        assert part == pytest.approx(whole / 2, rel=1e-3)
    for f in figures:
        assert f["kept"], "the state was not updated in place: its addresses changed"
        assert f["held"] == pytest.approx(f["state"], abs=6 * MiB), f
        assert f["peak"] == pytest.approx(f["predicted"], rel=0.02, abs=3 * MiB), f
    assert figures[3]["state"] + figures[3]["peak"] < figures[1]["state"] + figures[1]["peak"]
    assert figures[1]["state"] + figures[1]["peak"] < figures[0]["state"] + figures[0]["peak"]
