"""Failure: what happens to a state when its step fails.

A step updates its state in place, part of it while backward still runs. If the step fails in between, some leaves are
new and some are old, and the values do not show which. So the leaves of such a state are marked, and the next use of
them raises an error. A step that fails before its first write leaves the state as it was, unmarked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .meeting import Left, Note, leave, lost
from .process_groups import LostRank

_causes = WeakIdKeyDictionary()  # a leaf of a half updated state -> the failure that left it so
_steps = (
    WeakIdKeyDictionary()
)  # the first leaf of a state -> the number of steps that the state has taken


class Writes:
    """Whether a run of a program has begun to write its state."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self) -> None:
        """Note that the first write follows; the program calls this."""
        self.begun = True


def steps_of(leaves: Sequence[Any]) -> int:
    """The number of steps that a state has taken since it was sharded, or since this process first saw it."""
    first = _first_tensor(leaves)
    return 0 if first is None else _steps.get(first, 0)


def check_whole(leaves: Sequence[Any], name: str) -> None:
    """Raises: RuntimeError if a failed step has left this state half updated."""
    if not _causes:
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf in _causes:
            raise RuntimeError(
                f"{name}: this state is half updated, some leaves are new and some are old: {_causes[leaf]}.\n"
                f"Load a checkpoint and go on from there: state = step.shard(loaded). With "
                f'overlap_grads(update="last") a step writes nothing until every reduction is done, so most failures '
                f"leave the old state whole."
            )


@contextlib.contextmanager
def running(
    name: str, leaves: Sequence[Any], mesh: DeviceMesh | None, writes: Writes
) -> Iterator[None]:
    """Run a step of the program `name`, whose state has these leaves.

    If it fails after its first write, the leaves are marked. The channels to other ranks are closed on any failure,
    because this rank has sent only some of the messages that they wait for.

    Raises: The error of the step, with a note; but LostRank if another rank failed first.
    """
    writes.begun = False
    first, grad_enabled = _first_tensor(leaves), torch.is_grad_enabled()
    try:
        yield
    except BaseException as error:
        torch.set_grad_enabled(
            grad_enabled
        )  # an interrupt may arrive inside the exit of torch.no_grad()
        name = f"step {steps_of(leaves) + 1} of {name}"
        if writes.begun:
            _mark(leaves, f"{name} failed with {type(error).__name__}")
        remark = (
            "The state is half updated."
            if writes.begun
            else "The state is as it was before the step."
        )
        cause = _report(name, mesh, error)
        if cause is None:
            error.add_note(f"ztrans: {name} was ended by this. {remark}")
            raise
        if writes.begun:
            _mark(leaves, cause.reason)
        raise LostRank(f"{cause}\n{remark}", cause.reason) from error
    if first is not None:
        _steps[first] = _steps.get(first, 0) + 1


def _mark(leaves: Sequence[Any], cause: str) -> None:
    _causes.update((leaf, cause) for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def alone(runner: dict[str, int], name: str) -> Iterator[None]:
    """Let one thread run at a time. `runner` holds the identifier of the thread that runs.

    If a thread finds its own identifier there, an interrupt kept it from being removed, and the thread may run. A lock
    would stay locked.

    Raises: RuntimeError if another thread runs.
    """
    if runner.setdefault("thread", threading.get_ident()) != threading.get_ident():
        raise RuntimeError(
            f"{name}: another thread runs a step of this mesh. Their messages would be taken for each other's.\n"
            f"Run the steps of one mesh from one thread."
        )
    try:
        yield
    finally:
        runner.clear()


def _report(name: str, mesh: DeviceMesh | None, error: BaseException) -> LostRank | None:
    """Report a failure to the other ranks. If they failed first, return an error that says what they reported."""
    if mesh is None:
        return None
    if isinstance(error, LostRank):
        return lost(mesh, name, error)
    lines = str(error).splitlines()
    text = f"failed in {name} with {type(error).__name__}{f': {lines[0]}' if lines else ''}"
    leave(mesh, Note(Left.FAILED, text))
    return None


def _first_tensor(leaves: Sequence[Any]) -> torch.Tensor | None:
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
