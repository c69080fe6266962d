"""Kernels in Triton's interpreter, on CPU tensors: `TRITON_INTERPRET=1 pytest tests/ops/interpreted`.

The variable must be set before Triton is imported. So these tests run in a process of their own, which
`test_interpreted.py` starts, and no other process collects them.
"""

from __future__ import annotations

import os

import pytest

from tests.ops.interpreted.casts import exact_casts, exact_fma

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore::RuntimeWarning"
    )  # numpy's, of infinities and NaN


@pytest.fixture(autouse=True, scope="session")
def _exact_arithmetic() -> None:
    exact_casts()
    exact_fma()


@pytest.fixture(params=[0, 1], ids=["aligned", "misaligned"])
def skew(request: pytest.FixtureRequest) -> int:
    """How many elements a tensor starts after an aligned address."""
    return request.param
