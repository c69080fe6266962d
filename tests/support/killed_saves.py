"""Kill a save, and an export, at each of its file operations in turn, and report what can be loaded then.

Prints a line of JSON for each.

A process that is killed by SIGKILL has written a part of its files, in the order in which it wrote them. So each trial
is a forked child that kills itself before its n-th operation on a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import ztrans as zt

WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "shutil.rmtree")


def state(value: float) -> dict:
    return {"w": torch.full((5,), value), "m": {"w": torch.full((5,), -value)}, "lr": value}


def save(folder: Path, value: float) -> None:
    zt.save(folder, state(value)).result()


def saved(folder: Path) -> dict:
    return zt.load(folder, state(0.0), lambda state: state)


def weights(value: float) -> dict:
    return {**state(value), "lr": torch.tensor(value)}


def export(folder: Path, value: float) -> None:
    zt.export(folder, weights(value), max_file_bytes=30)


def exported(folder: Path) -> dict:
    return zt.load_weights(weights(0.0), folder)


Call = tuple[Callable[[Path, float], None], Callable[[Path], dict]]
CALLS: dict[str, Call] = {"save": (save, saved), "export": (export, exported)}


def save_until(write: Callable[[Path, float], None], folder: Path, operation: int) -> None:
    """Save over the checkpoint, and kill this process before the given operation on a file of its folder."""
    count = [0]

    def watch(event: str, arguments: tuple) -> None:
        if event in WATCHED and str(folder.parent) in str(arguments[0]):
            count[0] += 1
            if count[0] == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    write(folder, 2.0)


def trial(call: Call, first: Path, operation: int) -> tuple[bool, str]:
    """Whether the save was killed at this operation, and which checkpoint is then loaded."""
    folder = first.parent / f"trial {operation}" / "checkpoint"
    shutil.copytree(first, folder)
    child = os.fork()
    if not child:
        save_until(call[0], folder, operation)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), loaded_from(call, folder)


def loaded_from(call: Call, folder: Path) -> str:
    """The value of a whole checkpoint, or "torn"."""
    like = call[1](folder)
    value = float(like["lr"])
    whole = like["w"].eq(value).all() and like["m"]["w"].eq(-value).all()
    return f"{value:g}" if whole else "torn"


def report(name: str, call: Call) -> dict:
    """What was loaded after a kill at each operation, after none, and after a later call."""
    with tempfile.TemporaryDirectory() as parent:
        first, loaded = Path(parent) / "first", list[str]()
        call[0](first, 1.0)
        while (outcome := trial(call, first, len(loaded) + 1))[0]:
            loaded.append(outcome[1])
        later = []
        for operation in range(1, len(loaded) + 1, 3):
            folder = Path(parent) / f"trial {operation}" / "checkpoint"
            call[0](folder, 3.0)
            later.append((loaded_from(call, folder), os.listdir(folder.parent)))
    return {"call": name, "loaded": loaded, "at_the_end": outcome[1], "later": later}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, call in CALLS.items():
        sys.stdout.write(json.dumps(report(name, call)) + "\n")
