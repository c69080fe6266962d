"""Tracebacks end at the user's line."""

import traceback
from pathlib import Path

import pytest
import torch

import ztrans as zt
from ztrans.report.tracebacks import ends_at_user

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
