"""NCCL communicators are aborted together, on doubles of groups."""

from __future__ import annotations

import pytest

from ztrans.runtime.cuda.abort import abort


class Group:
    """A process group over NCCL, which is its own backend and writes down what it is told."""

    def __init__(self, name: str, told: list[str], fails: bool = False) -> None:
        self.name = name
        self.told = told
        self.fails = fails

    def _get_backend(self, device):
        assert device.type == "cuda"
        return self

    def _group_start(self) -> None:
        self.told.append("start")

    def _group_end(self) -> None:
        self.told.append("end")

    def abort(self) -> None:
        self.told.append(self.name)
        if self.fails:
            raise RuntimeError("it cannot be aborted")


def test_all_communicators_are_told_to_stop_before_one_is_freed():
    told: list[str] = []
    abort([Group("gathers", told), Group("reductions", told)])
    assert told == ["start", "gathers", "reductions", "end"]
    abort([])


def test_a_group_call_of_nccl_ends_if_an_abort_fails():
    told: list[str] = []
    with pytest.raises(RuntimeError, match="cannot be aborted"):
        abort([Group("gathers", told, fails=True), Group("reductions", told)])
    assert told == ["start", "gathers", "end"]
