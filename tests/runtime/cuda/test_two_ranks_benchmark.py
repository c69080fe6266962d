"""How the scenarios of benchmarks/gpu/two_ranks.py are judged, which need GPUs to run."""

from __future__ import annotations

import signal

import pytest

from benchmarks.gpu import two_ranks
from benchmarks.gpu.two_ranks import ENDINGS, SCENARIOS, expected_codes, said


def test_every_scenario_that_ends_all_processes_is_there():
    assert set(ENDINGS) <= set(SCENARIOS)


@pytest.mark.parametrize(
    ("name", "device", "is_last", "codes"),
    [
        ("stages", "cuda", True, (0,)),
        ("an exception", "cpu", False, (0,)),
        ("an exception", "cuda", True, (1,)),
        ("an exception", "cuda", False, (1, -signal.SIGKILL)),
        ("a rank is killed", "cpu", True, (-signal.SIGKILL,)),
        ("a rank is killed", "cuda", False, (1, -signal.SIGKILL, -signal.SIGABRT)),
    ],
)
def test_the_codes_of_ranks_that_are_no_failures(name, device, is_last, codes):
    assert expected_codes(name, device, is_last) == codes


def test_the_ranks_that_were_ended_must_say_why():
    text = "ztrans: rank 0 ends, because ...: rank 1 has ended without a word: it was killed\n"
    assert "result" in said("a rank is killed", [f"x\n{text}"], [1])
    assert "failed" in said("a rank is killed", ["ztrans: rank 0 ends for no reason\n"], [1])
    assert "PyTorch has aborted it" in said("a rank is killed", ["NCCL error"], [-6])["result"]


@pytest.mark.parametrize("shares_card", [False, True])
def test_links_are_checked_unless_ranks_share_a_card(monkeypatch, shares_card):
    """A card has no link to itself. On cards without NVLink the check must refuse symmetric memory."""
    variables = []

    class Ended:
        returncode = 0

        def __init__(self, command, env, **options):
            variables.append(env)

        def communicate(self, timeout):
            return "", ""

    monkeypatch.setattr(two_ranks.subprocess, "Popen", Ended)
    monkeypatch.delenv("SHARES_CARD", raising=False)
    two_ranks.outcome("stages", 2, "cuda", 10.0, shares_card)
    assert ["SHARES_CARD" in environment for environment in variables] == [shares_card] * 2
