"""Tracebacks end at the user's line, and of several ranks with the same error one prints it."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import ztrans as zt
from tests.support.processes import ROOT
from ztrans.report.tracebacks import ends_at_user
from ztrans.runtime.process_groups import LostRank
from ztrans.runtime.uncaught import print_once

STATE, X = {"w": torch.ones(2)}, torch.ones(2)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.delenv("ZTRANS_TRACEBACK", raising=False)


def frames(error):
    """(file name, source line) of each frame of a traceback."""
    return [(Path(f.filename).name, f.line) for f in traceback.extract_tb(error.__traceback__)]


def reads(state, x):
    return state, float(x.sum())


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step(STATE, X),
        lambda step: step.trace(STATE, X),
        lambda step: step.lower(STATE, X),
        lambda step: step.compiled(STATE, X),
    ],
)
def test_a_traceback_has_the_frames_of_the_user_alone(short, use):
    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        use(zt.Step.of(reads))
    here = Path(__file__).name
    assert [name for name, _ in frames(e.value)] == [here] * 3  # this test, the lambda, the step
    assert frames(e.value)[-1] == (here, "return state, float(x.sum())")
    assert e.value.__notes__ == [
        "ztrans: the frames of ztrans and torch are left out; ZTRANS_TRACEBACK=full shows them."
    ]
    assert len(traceback.format_exception(e.value)) < 12


def test_all_frames_are_shown_on_request(monkeypatch):
    monkeypatch.setenv("ZTRANS_TRACEBACK", "full")
    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        zt.Step.of(reads).trace(STATE, X)
    assert {"annotate.py", "trace.py", "step.py"} < {name for name, _ in frames(e.value)}
    assert not hasattr(e.value, "__notes__")


def test_errors_of_the_users_code_end_there_too(short):
    def looks_up(state, x):
        return state, state["v"]

    with pytest.raises(KeyError) as e:
        zt.Step.of(looks_up)(STATE, X)
    assert [line for _, line in frames(e.value)] == [
        "zt.Step.of(looks_up)(STATE, X)",
        'return state, state["v"]',
    ]


def test_causes_are_shortened_too(short):
    torch.library.define("test_tracebacks::unknown", "(Tensor x) -> Tensor")

    def calls(state, x):
        return state, torch.ops.test_tracebacks.unknown(x)

    with pytest.raises(ValueError, match="which does not run on tensors without values") as e:
        zt.Step.of(calls)(STATE, X)
    assert e.value.__cause__ is not None and len(frames(e.value.__cause__)) <= 1


def test_a_defect_of_ztrans_keeps_its_frames(short, monkeypatch):
    def defect(*args):
        return {}["nothing"]

    monkeypatch.setattr("ztrans.report.tracebacks.is_ztrans", lambda file: file == __file__)
    with pytest.raises(KeyError) as e:
        ends_at_user(defect)(STATE)
    assert [name for name, _ in frames(e.value)][1:] == ["tracebacks.py", Path(__file__).name]


def test_an_interrupt_keeps_its_frames(short):
    def interrupts(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as e:
        ends_at_user(interrupts)()
    assert "tracebacks.py" in [name for name, _ in frames(e.value)]


# ---- several ranks


@pytest.fixture
def told(monkeypatch):
    """Run the hook of each rank in turn; returns the ranks that print the error, and what the others print."""
    store = torch.distributed.HashStore()

    def tell(errors, capsys):
        printed = []
        for rank, error in enumerate(errors):
            monkeypatch.setattr(sys, "excepthook", lambda *_, rank=rank: printed.append(rank))
            print_once(store, rank)
            sys.excepthook(type(error), error, None)
        return printed, capsys.readouterr().err.splitlines()

    return tell


def test_one_rank_prints_what_all_would(told, capsys):
    same = [ValueError("a mistake") for _ in range(3)]
    assert told(same, capsys) == (
        [0],
        [f"[rank{rank}]: ValueError, as on rank 0, which prints it." for rank in (1, 2)],
    )


def test_ranks_print_what_is_their_own(told, capsys):
    errors = [
        ValueError("mine"),
        ValueError("other"),
        KeyError("mine"),
        LostRank("rank 3 has lost"),
        LostRank("rank 4"),
    ]
    assert told(errors, capsys) == (
        [0, 1, 2, 3],
        ["[rank4]: LostRank, as on rank 3, which prints it."],
    )


def test_the_own_number_of_a_rank_makes_no_difference(told, capsys):
    assert told([RuntimeError("rank 0 fails"), RuntimeError("rank 1 fails")], capsys)[0] == [0]


def test_without_a_store_every_rank_prints(monkeypatch):
    class Gone:
        def compare_set(self, *_):
            raise torch.distributed.DistStoreError("gone")

    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: printed.append(1))
    print_once(Gone(), 1)
    sys.excepthook(ValueError, ValueError("mine"), None)
    assert printed == [1]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_print_one_mistake_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, ztrans as zt\n"
        "mesh = zt.make_mesh('cpu', dp=-1)\n"
        "@zt.shard_params(mesh)\n"
        "def train_step(state, x):\n"
        "    return state, (x @ state['w']).sum().item()\n"
        "state = train_step.shard({'w': torch.ones(8)})\n"
        "train_step(state, torch.ones(3, 8))\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ZTRANS_TRACEBACK": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    ours = [row for row in done.stderr.splitlines() if row.startswith("[rank")]
    assert done.returncode != 0
    assert len([row for row in ours if "train_step reads a tensor's value" in row]) == 1
    assert len(ours) <= 13, done.stderr
