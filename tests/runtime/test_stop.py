"""Requests to stop, in one process: signals, and the handlers that a program had before."""

import os
import signal

import pytest

import ztrans as zt
from ztrans.runtime import stop


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """The state of a new process, and the handlers of pytest afterwards."""
    monkeypatch.setattr(stop, "_watched", set())
    stop._requested.clear()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    stop._requested.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_step_of_one_process_is_asked_to_stop():
    step = zt.Step.of(lambda state, x: (state + x.sum(), x))
    assert not step.stop_requested
    zt.request_stop()
    assert step.stop_requested
    mesh = zt.make_mesh("cpu", dp=-1)
    assert zt.shard_params(mesh)(step.fn).stop_requested


def test_a_signal_that_would_end_the_process_is_a_request():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    zt.stop_on(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_requested()


def test_a_handler_that_the_program_had_is_still_called_once_for_each_signal():
    called = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    zt.stop_on(signal.SIGUSR1, signal.SIGTERM)
    zt.stop_on(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.is_requested() and called == [signal.SIGUSR1]


def test_the_second_ctrl_c_interrupts_the_program():
    """Python's own handler raises, which would cut off the step that is to be the last."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    zt.stop_on(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.is_requested()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_stop_on_without_a_signal_is_refused():
    with pytest.raises(TypeError, match=r"zt\.stop_on\(signal\.SIGTERM\)"):
        zt.stop_on()
    assert not stop.is_watched()
