"""Files: a checkpoint in a folder, and the tensors of an ordinary model in files.

A folder has the format of torch.distributed.checkpoint. It is written in a temporary folder beside it. Once all ranks
have written and the files are on the disk, the temporary folder takes the name of the checkpoint. So a folder with that
name is always complete. The tensors of a model are in a file of torch.save, or in files of safetensors.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping, Set
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ...calling.trees import named_leaves
from ..state import cut_as

_INDEX = ".metadata"  # the file that makes a folder a checkpoint
_TORCH = (".pt", ".pth", ".bin")
_SAFE = ".safetensors"


class FolderWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Its `stage` copies a state to the CPU."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = partial(target)
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
        if self.target.exists() and not _is_checkpoint(self.target) and any(self.target.iterdir()):
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
        _sync(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Delete the temporary folder of a save that has failed."""
        shutil.rmtree(self.partial, ignore_errors=True)


class Folder:
    """A checkpoint to read: the shapes of its tensors by name, and their values."""

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
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


class ModelFile:
    """Files of a model to read: the shapes of their tensors by name, and their values, which are read where used."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob(f"*{_SAFE}")) if path.is_dir() else [path]:
            self._tensors |= _read(file)
        self.shapes = {name: tuple(x.shape) for name, x in self._tensors.items()}

    def fill(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of each tensor in place. Nothing is communicated."""
        for name, leaf in parts.items():
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            local.detach().copy_(cut_as(self._tensors[name], leaf))

    def others(self, used: Set[str]) -> list[str]:
        """The names of the tensors that are not used. A second name of a used tensor is not among them."""

        def view(x: torch.Tensor) -> tuple:
            return x.data_ptr(), x.shape, x.stride(), x.dtype

        used_views = {view(self._tensors[name]) for name in used}
        unused = {name: x for name, x in self._tensors.items() if name not in used}
        return [name for name, x in unused.items() if view(x) not in used_views]


def committed(path: Path) -> Path | None:
    """The folder of the last complete checkpoint with this path, or None if there is none."""
    return next((folder for folder in (path, _old(path)) if _is_checkpoint(folder)), None)


def is_model_file(path: Path) -> bool:
    """Whether the suffix of a path is that of a file with tensors."""
    return path.suffix in (*_TORCH, _SAFE)


def is_model(path: Path) -> bool:
    """Whether a path is a file with tensors, or a folder with files of safetensors."""
    return is_model_file(path) or next(path.glob(f"*{_SAFE}"), None) is not None


def write_model_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name. The file is replaced as a whole.

    Raises: ImportError if it is a file of safetensors, and safetensors is not installed.
    """
    part = partial(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == _SAFE:
            contiguous = {name: x.contiguous() for name, x in tensors.items()}
            _safetensors().save_file(contiguous, part, {"format": "pt"})
        else:
            torch.save(dict(tensors), part)
        _sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def partial(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f"{path.name}.partial")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _is_checkpoint(path: Path) -> bool:
    return (path / _INDEX).is_file()


def _read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory."""
    if file.suffix == _SAFE:
        return _safetensors().load_file(file)
    leaves = named_leaves(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return {
        name: torch.as_tensor(x)
        for name, x in leaves.items()
        if isinstance(x, torch.Tensor | int | float)
    }


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(f"{error}\nA file {_SAFE} needs it: pip install safetensors.") from None


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
