"""Fixtures of every test: goldens, seeds, threads.

    def test_prints(golden):
        assert str(lowered) == golden       # tests/golden/<test file stem>/<test name>.txt

`pytest --update-golden` writes the files; they are reviewed as code.
"""

from __future__ import annotations

import difflib
import functools
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

from ztrans.runtime.inductor.compiler import check_compiler

GOLDEN = Path(__file__).parent / "golden"

# A test that fails shows all frames, also of the processes that it starts.
os.environ.setdefault("ZTRANS_TRACEBACK", "full")

# The modules of torch have so many objects that each full collection of garbage takes half a second.
gc.set_threshold(20_000, 20, 20)

# PyTorch takes a stack trace for each fake tensor if anybody listens to this logger, and pytest listens to all that do
# not propagate: nearly half of the time of a trace.
_trace_log = logging.getLogger("torch.__trace")
_trace_log.propagate = True
_trace_log.handlers.clear()

# How long an example takes says nothing on a busy machine. `make test` draws the same examples in each run, so that a
# failure is one of the change; `make random` draws others.
hypothesis.settings.register_profile("ztrans", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("random", deadline=None, max_examples=300)
hypothesis.settings.load_profile("ztrans")


class Golden(str):
    """The text that a test expects, read from its file; comparing with it is the test, or writes it."""

    path: Path
    update: bool

    def __eq__(self, text: object) -> bool:
        __tracebackhide__ = True
        if not isinstance(text, str):
            raise TypeError(f"A golden holds text: compare str(x), not {type(text).__name__}.")
        if self.update:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text.rstrip("\n") + "\n")
            self.update = False  # a second comparison in the same test is one with the same text
        elif not self.path.exists():
            pytest.fail(
                f"No golden {self.path}. `pytest --update-golden` writes it; review it as code."
            )
        return self.path.read_text().rstrip("\n") == text.rstrip("\n")

    __hash__ = str.__hash__


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the goldens instead of comparing with them",
    )


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    if op != "==" or not (isinstance(left, Golden) or isinstance(right, Golden)):
        return None
    golden, text = (left, right) if isinstance(left, Golden) else (right, left)
    before, after = golden.path.read_text().splitlines(), str(text).splitlines()
    diff = difflib.unified_diff(before, after, golden.path.name, "this run", lineterm="")
    return ["not the golden; `pytest --update-golden` accepts this run", *diff]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take long come first, so that the workers end at the same time."""
    cost = Counter[Path]()
    for item in items:
        cost[item.path] += sum(_COSTS.get(mark.name, 0) for mark in item.iter_markers())
    for path in cost:
        cost[path] = max(cost[path], _SECONDS.get(path.name, 0))
    items.sort(key=lambda item: -cost[item.path])


_COSTS = {"distributed": 5, "compiles": 3, "slow": 1}  # about the seconds of a test
# The files that take much longer than the marks of their tests say. One of them at the end leaves the others waiting.
_SECONDS = {
    "test_plan_recomputation.py": 60,
    "test_fuzz.py": 55,
    "test_solver.py": 50,
    "test_interpreted.py": 50,
    "test_models.py": 45,
    "test_analyses.py": 40,
    "test_choose.py": 30,
    "test_examples.py": 25,
}


def pytest_collection_finish() -> None:
    """What is imported by now stays, so the garbage collector need not visit it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    name = request.node.nodeid.split("::", 1)[1]  # with its class, if it has one
    file = re.sub(r"[^\w.=-]+", "_", name).strip("_") + ".txt"
    path = GOLDEN / request.path.stem / file
    owner = request.config.stash.setdefault(_OWNERS, {}).setdefault(path, request.node.nodeid)
    assert owner == request.node.nodeid, f"{owner} and {request.node.nodeid} would share {path}"
    expected = Golden(path.read_text().rstrip("\n") if path.exists() else "")
    expected.path, expected.update = path, request.config.getoption("--update-golden")
    return expected


_OWNERS = pytest.StashKey[dict[Path, str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiles") and not _has_compiler():
        pytest.skip("needs a C++ compiler: install g++ or clang, or name one in CXX")


@functools.cache
def _has_compiler() -> bool:
    try:
        check_compiler()
    except ValueError:
        return False
    return True


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """As torch.manual_seed, which takes a stack trace for every GPU that is not initialised: 1 to 3 ms a call."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="module")
def _no_process_group() -> Iterator[None]:
    """Files of tests follow each other in one process: a file leaves no process group to the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
