"""Steps on several GPUs, if there are as many, one rank on each: compared with lockstep, with FSDP2, and after failures.

The scenarios are those of benchmarks/gpu/two_ranks.py, which runs them on one card.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import two_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", two_ranks.SCENARIOS)
def test_a_scenario_ends_well(name):
    ranks = two_ranks.SCENARIOS[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    lines = two_ranks.outcome(name, ranks, "cuda", 120.0, shares_card=False)
    assert lines
    assert not [line for line in lines if "failed" in line]
