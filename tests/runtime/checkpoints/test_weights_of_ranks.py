"""Weights of four ranks: `tests/support/weights.py` loads, exports and streams them."""

import pytest

from tests.support.processes import run_ranks

COMPARISONS = 4000  # bytes with which ranks compare their calls


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return run_ranks(4, "weights.py", str(tmp_path_factory.mktemp("weights")))


def of(reports: list[dict], check: str) -> list[dict]:
    found = sorted((r for r in reports if r["check"] == check), key=lambda r: r["rank"])
    assert {r["rank"] for r in found} == {0, 1, 2, 3}
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_ranks_read_their_parts_of_the_files_of_another_program(four):
    for report in of(four, "loaded"):
        assert report["equal"]
        assert report["peak"] <= COMPARISONS, "parts are copied from the mapped files"


def test_ranks_write_files_that_safetensors_reads_and_hold_one_leaf(four):
    for report in of(four, "exported"):
        assert report["equal"], report["name"]
        assert report["peak"] <= report["largest"] + COMPARISONS, report["name"]
        if report["name"] == "one":
            assert report["files"] == ["model.safetensors", "ztrans.json"]
        else:
            assert "model.safetensors.index.json" in report["files"]
            assert len(report["files"]) > 5


def test_an_export_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_one(four):
    first, second, *others = of(four, "failed")
    assert second["text"] == "OSError: [Errno 28] No space left on device"
    for report in first, *others:
        text = "RuntimeError: export: rank 1 has failed with OSError: [Errno 28] No space left"
        assert report["text"].startswith(text)
    assert others[0]["interrupted"] == "KeyboardInterrupt: "
    for report in first, second, others[1]:
        assert "Rank 2 failed in export with KeyboardInterrupt" in report["interrupted"]
    for report in first, second, *others:
        assert report["intact"] and report["others"] == []


def test_weights_are_streamed_to_one_rank_and_to_all_and_only_what_has_changed(four):
    reports = of(four, "streamed")
    for report in reports:
        assert report["sent"] and report["everywhere"]
        assert report["changed"] == (["model.norm.weight"] if report["rank"] == 1 else [])
        assert report["again"] == []
    assert max(reports[0]["peak"], reports[2]["peak"], reports[3]["peak"]) <= COMPARISONS
    assert reports[1]["largest"] <= reports[1]["peak"] <= reports[1]["largest"] + COMPARISONS


def test_a_stream_that_is_left_early_is_an_error_on_the_other_ranks(four):
    reports = of(four, "stopped")
    for report in reports[1:]:
        assert "Rank 0 has not iterated to the end of stream_weights" in report["text"]
    assert all(report["after"] for report in reports)


def test_ranks_that_do_not_do_the_same_are_told(four):
    for report in of(four, "wrong"):
        stream, load = report["texts"]
        assert "stream_weights: the ranks of the mesh do not do the same" in stream
        assert "load_weights: the ranks of the mesh do not do the same" in load


def test_leaves_with_tensor_parallelism_are_whole_in_files_and_streams(four):
    """Parts along two dims, two cuts of one dim, and copies on each host; and hosts that pass boxes on."""
    for report in of(four, "divided"):
        assert report["equal"] == [True] * 3


def test_copies_that_differ_are_neither_written_nor_sent(four):
    for report in of(four, "copies"):
        export, stream = report["texts"]
        assert export.startswith("export: w has other values on rank 1 than on rank 0, although")
        assert stream.startswith("stream_weights: w has other values on rank 1 than on rank 0")
        assert not report["exists"]
