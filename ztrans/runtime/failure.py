"""failure: what becomes of a state when its step fails.

A step updates its state in place, and in part while backward goes on. If it fails in between, some leaves are new
and some are old, and nothing shows it. So the leaves of such a state are marked, and whoever uses them next is told.
A step that fails before its first write leaves the state as it was, and no mark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .meeting import leave, lost
from .process_groups import LostRank

_causes = WeakIdKeyDictionary()  # leaves of half updated states, and what happened to them
_steps = WeakIdKeyDictionary()  # first leaves of states, and how many steps these have taken


class Writes:
    """Whether a run of a program has begun to write its state."""

    def __init__(self) -> None:
        self.begun = False

    def begin(self) -> None:
        """Called by the program before its first write."""
        self.begun = True


def steps_of(leaves: Sequence[Any]) -> int:
    """How many steps a state has taken since it was sharded, or since this process first saw it."""
    first = _first(leaves)
    return 0 if first is None else _steps.get(first, 0)


def check_whole(leaves: Sequence[Any], name: str) -> None:
    """Raises: RuntimeError when a step that failed has left this state half updated."""
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
def running(name: str, leaves: Sequence[Any], mesh: DeviceMesh | None, writes: Writes) -> Iterator[None]:
    """Run a step; `leaves` are those of its state.

    If it fails after its first write the state is marked. The channels to other ranks are closed, because this rank
    has sent only a part of what they wait for.
    """
    writes.begun = False
    first, grad_enabled = _first(leaves), torch.is_grad_enabled()
    try:
        yield
    except BaseException as error:
        torch.set_grad_enabled(grad_enabled)  # an interrupt may come while torch.no_grad() ends
        if writes.begun:
            _mark(leaves, f"{name} failed with {type(error).__name__}")
        remark = "The state is half updated." if writes.begun else "The state is as it was before the step."
        told = _told(name, mesh, error)
        if told is None:
            error.add_note(f"ztrans: {name} was ended by this. {remark}")
            raise
        if writes.begun:
            _mark(leaves, str(told).splitlines()[1].strip().rstrip("."))
        raise LostRank(f"{told}\n{remark}") from error
    if first is not None:
        _steps[first] = _steps.get(first, 0) + 1


def _mark(leaves: Sequence[Any], cause: str) -> None:
    _causes.update((leaf, cause) for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def alone(runner: dict[str, int], name: str) -> Iterator[None]:
    """Let one thread run at a time; `runner` holds its number.

    A thread that finds its own number was interrupted on its way in, and may go on; a lock would stay locked.

    Raises: RuntimeError when another thread runs.
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


def _told(name: str, mesh: DeviceMesh | None, error: BaseException) -> LostRank | None:
    """Tell the other ranks of a failure; the error that says what they told, where theirs was the first."""
    if mesh is None:
        return None
    if isinstance(error, LostRank):
        return lost(mesh, name, error)
    text = str(error).splitlines()
    leave(mesh, f"failed in {name} with {type(error).__name__}{f': {text[0]}' if text else ''}")
    return None


def _first(leaves: Sequence[Any]) -> torch.Tensor | None:
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
