"""Several gloo processes: what `ranks.py` measured, against what it must be."""

import pytest

from tests.support.torchrun import torchrun

MiB = 1 << 20


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return torchrun(2, "ranks.py", "two")


def of(figures: list[dict], check: str) -> list[dict]:
    found = [f for f in figures if f["check"] == check]
    assert found, f"ranks.py did not report {check}"
    return found


@pytest.mark.distributed
def test_two_ranks_compute_what_the_lockstep_executor_says(two):
    """Bit for bit: with two ranks no sum has a choice of order."""
    figures = of(two, "equal")
    assert len(figures) == 9 * 4
    for f in figures:
        assert f["bitwise"] and f["lockstep"] == 0 and f["output"] == 0, f
        half = f["case"] in ("autocast", "cast_inside")
        assert f["plain"] <= (0.05 if half else 1e-10), f


@pytest.fixture(scope="module")
def four() -> list[dict]:
    return torchrun(4, "ranks.py", "four")


@pytest.mark.distributed
def test_four_ranks_in_two_hosts(four):
    for f in of(four, "equal"):
        assert f["lockstep"] <= 1e-14 and f["plain"] <= 1e-10, f


@pytest.mark.distributed
def test_a_mesh_may_be_a_part_of_the_world(four):
    """Ranks of other meshes run other programs, and are not asked."""
    figures = of(four, "pipeline")
    assert sorted(f["stage"] for f in figures) == [0, 0, 1, 1]
    for f in figures:
        assert f["distance"] <= 1e-5 and f["axes"] == 1, f


@pytest.mark.distributed
def test_the_steps_own_collectives_are_left_where_they_are(four):
    (f,) = of(four, "tensor_parallel")
    assert f["named"] and f["distance"] <= 1e-6


@pytest.mark.distributed
def test_in_place_collectives_do_what_they_do_outside_of_a_step(two):
    figures = of(two, "in_place")
    assert len(figures) == 2 * 10 and all(f["bitwise"] for f in figures), figures


@pytest.mark.distributed
def test_fused_gathers_hand_half_the_bytes_to_the_backend(two):
    figures = of(two, "wire")
    assert [f["stage"] for f in figures] == [1, 2, 3]
    for f in figures:
        assert 2 * f["fused"] == f["plain"] > 0, f
        assert f["said"] == f["fused"], f


@pytest.mark.distributed
def test_ranks_that_disagree_are_told_so(two):
    (f,) = of(two, "disagree")
    for rank, error in enumerate(f["error"]):
        assert "step: ranks [1] lowered another program than rank 0 did." in error
        assert f"On rank {rank} its batch is batch.0: f32[{4 + rank},6]" in error


@pytest.mark.distributed
def test_state_is_scattered_made_on_meta_and_checkpointed(two):
    assert of(two, "source")[0]["distance"] == 0
    assert of(two, "meta")[0]["finite"]
    assert of(two, "meta")[0]["share"] < 0.51
    assert of(two, "checkpoint")[0] == {"check": "checkpoint", "distance": 0.0, "dtensors": True}


@pytest.mark.distributed
def test_state_that_lies_otherwise_is_laid_out_by_shard_and_refused_by_a_compiled_step(two):
    (f,) = of(two, "laid_out")
    assert f["distance"] == 0 and f["placed"] and len(f["told"]) == 2
    assert all("was called with state that is not laid out for it" in text for text in f["told"])


@pytest.mark.distributed
def test_ranks_that_tune_agree_on_a_plan_and_change_no_bit(two):
    (f,) = of(two, "tuned")
    assert f["bitwise"] == [True, True] and f["programs"] == 1 and f["agreed"]
    assert f["lanes"] == [["compute", "dp gather", "dp reduce"]] * 2
    assert f["wire"] == f["said"] > 0, "every message is there, with its bytes"
    assert 0 < f["bandwidth"] != f["assumed"], "planned for the link that was measured"


@pytest.mark.distributed
def test_memory_falls_as_the_arithmetic_says(two):
    """State is world times smaller from stage 1 on; it is updated where it lies; the peak is what was computed."""
    figures = of(two, "memory")
    whole, *parts = (f["state"] for f in figures)
    assert [f["stage"] for f in figures] == [0, 1, 2, 3]
    for part in parts:
        assert part == pytest.approx(whole / 2, rel=1e-3)
    for f in figures:
        assert f["kept"], "the state moved: it was not updated in place"
        assert f["held"] == pytest.approx(f["state"], abs=6 * MiB), f
        assert f["peak"] == pytest.approx(f["said"], rel=0.02, abs=3 * MiB), f
    assert figures[3]["state"] + figures[3]["peak"] < figures[1]["state"] + figures[1]["peak"]
    assert figures[1]["state"] + figures[1]["peak"] < figures[0]["state"] + figures[0]["peak"]
