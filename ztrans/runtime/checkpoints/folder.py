"""A checkpoint in a folder, in the format of torch.distributed.checkpoint.

It is written in a temporary folder beside it. Once all ranks have written and the files are on the disk, the temporary
folder takes the name of the checkpoint. So a folder with that name is always complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_INDEX = ".metadata"  # the file that makes a folder a checkpoint


class FolderWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Its `stage` copies a state to the CPU."""

    def __init__(self, target: Path) -> None:
        self.target, self.partial = target, partial(target)
        super().__init__(self.partial)

    def write(self, staged: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Write a staged state. All ranks of the group must call it."""
        if group is not None:
            dcp.save(dict(staged), storage_writer=self, process_group=group)
            return
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(staged), self.storage_meta(), is_coordinator=True)
        self.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = self.prepare_global_plan(plans)
        self.finish(metadata, [self.write_data(planner.finish_plan(plan), planner).wait()])

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Leave the temporary folder to the first rank."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the temporary folder, on the first rank. An incomplete save may have left one."""
        if self.target.exists() and not is_checkpoint(self.target) and any(self.target.iterdir()):
            raise FileExistsError(f"{self.target} exists and is no checkpoint; choose a new name")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the parts of this rank."""
        if not self.partial.is_dir():
            raise FileNotFoundError(
                f"{self.partial}, which the first rank has made, is not on a file system of all ranks"
            )
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index, on the first rank, and let the temporary folder replace the checkpoint."""
        super().finish(metadata, results)
        old = _old(self.target)
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)  # `committed` finds it there if this process is killed now
        self.partial.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Delete the temporary folder of a save that has failed."""
        shutil.rmtree(self.partial, ignore_errors=True)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (path / _INDEX).is_file()


def committed(path: Path) -> Path | None:
    """The folder of the last complete checkpoint with this path, or None if there is none."""
    return next((folder for folder in (path, _old(path)) if is_checkpoint(folder)), None)


class Folder:
    """A checkpoint to read: its shapes by name, and its values."""

    def __init__(self, path: Path) -> None:
        self._reader = dcp.FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        entries = self._metadata.state_dict_metadata.items()
        self.shapes = {
            name: tuple(x.size) for name, x in entries if isinstance(x, TensorStorageMetadata)
        }

    def fill(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's part of each tensor in place. Nothing is communicated."""
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(dict(parts), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, True)
        plans: Sequence[dcp.LoadPlan] = planner.create_global_plan([planner.create_local_plan()])
        self._reader.read_data(planner.finish_plan(plans[0]), planner).wait()


def partial(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f"{path.name}.partial")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
