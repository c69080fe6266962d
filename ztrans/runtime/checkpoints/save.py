"""Write a state while steps go on.

A checkpoint is a folder in the format of torch.distributed.checkpoint. It is written in a temporary folder beside it.
Once all ranks have written and the files are on the disk, the temporary folder takes the name of the checkpoint. So a
folder with that name is always complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...calling.trees import named_leaves
from ...ir.axes import members_of
from ...ir.layout import as_tensor, mesh_axes
from ..agreement import agree, different_steps, everywhere
from ..failure import check_ended, quitting_after_loss, steps_of
from ..process_groups import Channel, process_groups
from ..replicas import different_leaf, digest
from ..state import mesh_of_state

_running: list[Future[Path]] = []  # the save in progress


def save(path: str | os.PathLike[str], state: Any) -> Future[Path]:
    """Write a state. All ranks must call it.

    The parts of this rank are copied; then the call returns, and a thread writes the copies, so steps may go on. The
    ranks write together into a folder, which has to be on a file system of all ranks. It takes the name `path` when it
    is complete; a checkpoint that had this name is deleted. A save waits for the one before.

    Args:
        path: the folder.
        state: a pytree of DTensors, tensors and numbers, as the state of a step is.

    Returns: A future; its `result()` waits until the checkpoint is complete, and is its path. If the save fails, it
        raises RuntimeError, and a warning tells so at once.

    Raises: ValueError if `path` has the name of a file of an ordinary model; TypeError if a leaf is neither a tensor
        nor a number; RuntimeError if the state is half updated, the ranks do not all call it, or copies of a leaf
        differ: a checkpoint has only one of them.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> state = {"params": {"w": torch.ones(2)}, "lr": 0.1}
    >>> zt.save(folder, state).result() == folder
    True
    """
    target = Path(path)
    if is_model_file(target):
        raise ValueError(
            f"save: {target} has the name of a file of an ordinary model, and save writes a folder.\n"
            f"Write such a file yourself, on one rank: params = step.unshard(state)['params'], on all ranks, then "
            f"model.save_pretrained(folder, state_dict=params), torch.save or safetensors."
        )
    leaves_by_name = named_leaves(state)
    leaves = list(leaves_by_name.values())
    tensors = {name: _tensor(name, leaf) for name, leaf in leaves_by_name.items()}
    check_ended(leaves, "save")
    wait_for_saves()  # so that there is one copy of the state at a time
    mesh = mesh_of_state(leaves)
    channel = None
    if mesh is not None and not process_groups(mesh).is_alone:
        channel = _agreed_channel(target, tensors, steps_of(leaves), mesh)
    writer = FolderWriter(target)
    try:
        staged = writer.stage(tensors)
        executor = ThreadPoolExecutor(1, "ztrans-save")
        future = executor.submit(_write_folder, writer, staged, channel)
    except BaseException as error:
        if channel is not None:
            writer.give_up(error, channel)
        raise
    executor.shutdown(wait=False)
    _running[:] = [future]
    return future


def wait_for_saves() -> None:
    """Wait until no save of this process runs. If one fails, it has said so."""
    wait(_running)


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor | Real) or isinstance(leaf, bool):
        raise TypeError(f"save: state {name} is {leaf!r}; a state holds tensors and numbers.")
    tensor = as_tensor(leaf).detach()
    # FolderWriter.stage copies no DTensor without dims, in torch 2.13. These are whole on every rank.
    return tensor.to_local() if isinstance(tensor, DTensor) and not tensor.ndim else tensor


def _agreed_channel(
    target: Path, tensors: Mapping[str, torch.Tensor], steps: int, mesh: DeviceMesh
) -> Channel:
    """Check that all ranks save the same state, in which copies of a leaf have the same values.

    Returns: the channel on which they save it. From here on a rank that fails must tell the others, by `give_up`.
    """
    axes = []
    digests = []
    for x in tensors.values():
        copied_axes = _copied_axes(x, mesh)
        local = x.to_local() if isinstance(x, DTensor) else x
        axes.append(copied_axes)
        digests.append(digest(local) if copied_axes else None)

    def explain(by_rank: Mapping[int, tuple[int, Sequence]]) -> str:
        all_steps = {rank: count for rank, (count, _) in by_rank.items()}
        if len(set(all_steps.values())) > 1:
            return different_steps(all_steps)
        all_digests = {rank: of_rank for rank, (_, of_rank) in by_rank.items()}
        different = different_leaf(mesh, axes, all_digests)
        if different is None:
            return ""
        position, first, rank = different
        return (
            f"  {list(tensors)[position]} has other values on rank {rank} than on rank {first}, although the layout "
            f"says that they have copies. With tensor or expert parallelism, cut the leaf over its axis as a DTensor."
        )

    agree(mesh, f"save to {str(target)[-80:]}", (steps, digests), explain)
    groups = process_groups(mesh)
    if any(everywhere(groups.saves.is_closed or groups.saves.is_broken, mesh)):
        with quitting_after_loss(groups, "save"):
            groups.reopen(groups.saves)
    return groups.saves


def _copied_axes(x: torch.Tensor, mesh: DeviceMesh) -> list[str]:
    """The axes of the mesh over which ranks have copies of a leaf. The leaf may live on some of them only."""
    cut_axes: list[str] = []
    if isinstance(x, DTensor):
        for (axis, _), placement in zip(mesh_axes(x.device_mesh), x.placements):
            if not isinstance(placement, Replicate):
                cut_axes.append(axis)
    return [axis for axis, size in mesh_axes(mesh) if size > 1 and axis not in members_of(cut_axes)]


def _write_folder(
    writer: FolderWriter,
    staged: Mapping[str, torch.Tensor],
    channel: Channel | None,
) -> Path:
    try:
        writer.write(staged, channel)
    except BaseException as error:
        writer.discard()
        text = f"save: {writer.target} was not written. {_causes(error)}\nA checkpoint that it had before is whole."
        warnings.warn(text, stacklevel=1)
        raise RuntimeError(text) from error
    return writer.target


def _causes(error: BaseException) -> str:
    """What went wrong, by rank."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}."
    causes = []
    for rank, (cause, _) in error.failures.items():
        causes.append(f"Rank {rank}: {type(cause).__name__}: {cause}.")
    return " ".join(causes)


class FolderWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Its `stage` copies a state to the CPU."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.unfinished = unfinished(target)
        self._has_made_folder = False
        self._obstacle: BaseException | None = None
        super().__init__(self.unfinished)

    def write(self, staged: Mapping[str, torch.Tensor], channel: Channel | None) -> None:
        """Write a staged state. All ranks of the channel must call it, or `give_up`."""
        if channel is not None:
            self._write_together(dict(staged), channel)
            return
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(staged), self.storage_meta(), is_coordinator=True)
        self.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = self.prepare_global_plan(plans)
        self.finish(metadata, [self.write_data(planner.finish_plan(plan), planner).wait()])

    def give_up(self, error: BaseException, channel: Channel) -> None:
        """Let the save fail on the other ranks too, because this one cannot write."""
        self._obstacle = error
        with contextlib.suppress(CheckpointException, Exception):
            self._write_together({}, channel)

    def _write_together(self, staged: dict[str, torch.Tensor], channel: Channel) -> None:
        try:
            dcp.save(staged, storage_writer=self, process_group=channel.group)
        except CheckpointException:  # all ranks have it, and none sends anything more
            raise
        except BaseException:
            channel.is_broken = True
            raise

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Leave the temporary folder to the first rank. What is raised here, all ranks raise."""
        if self._obstacle is not None:
            raise self._obstacle
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the temporary folder, on the first rank. An incomplete save may have left one."""
        is_other = self.target.exists() and not _is_checkpoint(self.target)
        if is_other and any(self.target.iterdir()):
            raise FileExistsError(f"{self.target} exists and is no checkpoint; choose a new name")
        self._has_made_folder = True
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the parts of this rank."""
        if not self.unfinished.is_dir():
            raise FileNotFoundError(
                f"{self.unfinished}, which the first rank has made, is not on a file system of all ranks"
            )
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index, on the first rank, and let the temporary folder replace the checkpoint."""
        super().finish(metadata, results)
        old = _old(self.target)
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)  # `committed` finds it there if this process is killed now
        self.unfinished.rename(self.target)
        _sync(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Delete the temporary folder of a save that has failed, if this rank has made it."""
        if self._has_made_folder:
            shutil.rmtree(self.unfinished, ignore_errors=True)


def committed(path: Path) -> Path | None:
    """The folder of the last complete checkpoint with this path, or None if there is none."""
    for folder in (path, _old(path)):
        if _is_checkpoint(folder):
            return folder
    return None


def is_model_file(path: Path) -> bool:
    """Whether a path has the name of a file with the tensors of an ordinary model."""
    return path.suffix in (".pt", ".pth", ".bin", ".safetensors")


def unfinished(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f"{path.name}.partial")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def index_of(path: Path) -> Path:
    """The file that makes a folder a checkpoint."""
    return path / ".metadata"


def _is_checkpoint(path: Path) -> bool:
    return index_of(path).is_file()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
