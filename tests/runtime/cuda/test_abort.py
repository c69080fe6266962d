"""NCCL communicators are aborted together, on doubles of groups."""

from __future__ import annotations

import threading

import pytest

from ztrans.runtime.cuda import abort as aborts
from ztrans.runtime.cuda.abort import abort


class Device:
    """A GPU that frees memory when the kernels of all communicators have left."""

    def __init__(self, communicators: int) -> None:
        self.kernels_have_left = threading.Barrier(communicators, timeout=20)
        self.freed: list[str] = []


class Group:
    """A process group over NCCL whose kernel waits for a rank that does not come."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self.device = device

    def abort(self) -> None:
        self.device.kernels_have_left.wait()
        self.device.freed.append(self.name)


class AbortedBefore:
    """A process group that has been aborted, or that another thread destroys meanwhile."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def abort(self) -> None:
        raise self.error


class InAGraph:
    """A process group whose communicator is freed with a CUDA graph."""

    def __init__(self) -> None:
        self.graph_is_released = threading.Event()

    def abort(self) -> None:
        self.graph_is_released.wait(20)


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch):
    monkeypatch.setattr(
        aborts.distributed_c10d, "_abort_process_group", lambda group: group.abort()
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [RuntimeError("it has been aborted"), KeyError("group")])
def test_all_communicators_are_told_to_stop_before_one_is_freed(error):
    device = Device(2)
    abort([Group("gathers", device), AbortedBefore(error), Group("reductions", device)])
    assert sorted(device.freed) == ["gathers", "reductions"]


def test_nobody_waits_for_a_communicator_that_a_graph_holds(monkeypatch):
    monkeypatch.setattr(aborts, "_PATIENCE", 0.05)
    group = InAGraph()
    abort([group])
    group.graph_is_released.set()
