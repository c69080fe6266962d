"""Write a state while steps go on.

A checkpoint is a folder in the format of torch.distributed.checkpoint. It is written in a new folder beside it (see
`folder`). Once all ranks have written and the files are on the disk, each rank checks the files of another rank. Then
the new folder takes the name of the checkpoint. So a folder with that name is always complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...calling.trees import named_leaves
from ...ir.axes import members_of
from ...ir.dependencies import grouped
from ...ir.layout import as_tensor, mesh_axes
from ..agreement import agree, different_steps, everywhere, from_first
from ..failure import check_ended, quitting_after_loss, rank_names, steps_of
from ..process_groups import Channel, process_groups
from ..replicas import different_leaf, digest
from ..state import mesh_of_state
from . import folder

log = logging.getLogger("ztrans")
_running: list[Future[Path]] = []  # the save in progress


def save(path: str | os.PathLike[str], state: Any) -> Future[Path]:
    """Write a state. All ranks must call it.

    The parts of this rank are copied; then the call returns, and a thread writes the copies, so steps may go on. The
    ranks write together into a new folder, which has to be on a file system of all ranks, and check it. It takes the
    name `path` when it is complete; a checkpoint that had this name is deleted. A save waits for the one before.

    Args:
        path: the folder, or a link to it. A relative one begins at the working folder of this call.
        state: a pytree of DTensors, tensors and numbers, as the state of a step is.

    Returns: A future; its `result()` waits until the checkpoint is complete, and is its absolute path. If the save
        fails, it raises RuntimeError, and the logger "ztrans" logs an error at once.

    Raises: ValueError if `path` has the name of a file of an ordinary model; TypeError if a leaf is neither a tensor
        nor a number; RuntimeError if the state is half updated, the ranks do not all call it with one path, or copies
        of a leaf differ: a checkpoint has only one of them.

    >>> import tempfile, ztrans as zt
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint"
    >>> state = {"params": {"w": torch.ones(2)}, "lr": 0.1}
    >>> zt.save(folder, state).result() == folder
    True
    """
    target = Path(path).absolute()
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
    nonce = secrets.token_hex(4)
    if mesh is not None and not process_groups(mesh).is_alone:
        channel = _agreed_channel(target, tensors, steps_of(leaves), mesh)
        nonce = from_first(nonce, mesh)
    writer = FolderWriter(target, nonce)
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

    def explain(by_rank: Mapping[int, tuple[str, int, Sequence]]) -> str:
        paths = grouped((path, rank) for rank, (path, _, _) in by_rank.items())
        if len(paths) > 1:
            return _different_paths(paths)
        all_steps = {rank: count for rank, (_, count, _) in by_rank.items()}
        if len(set(all_steps.values())) > 1:
            return different_steps(all_steps)
        all_digests = {rank: of_rank for rank, (_, _, of_rank) in by_rank.items()}
        different = different_leaf(mesh, axes, all_digests)
        if different is None:
            return ""
        position, first, rank = different
        return (
            f"  {list(tensors)[position]} has other values on rank {rank} than on rank {first}, although the layout "
            f"says that they have copies. With tensor or expert parallelism, cut the leaf over its axis as a DTensor."
        )

    agree(process_groups(mesh), "save", (str(target), steps, digests), explain)
    groups = process_groups(mesh)
    if any(everywhere(groups.saves.is_closed or groups.saves.is_broken, mesh)):
        with quitting_after_loss(groups, "save"):
            groups.reopen(groups.saves)
    return groups.saves


def _different_paths(paths: Mapping[str, Sequence[int]]) -> str:
    """What an error says about ranks that save to different paths."""
    lines = "".join(f"  {rank_names(ranks)}: save to {path}\n" for path, ranks in paths.items())
    return (
        f"{lines}The ranks write one checkpoint together: pass the same path, on a file system of all ranks. A "
        f"relative path begins at the working folder of each rank."
    )


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
        text = (
            f"save: {writer.path_of_call} was not written. {_causes(error)}\n"
            f"A checkpoint that it had before is whole."
        )
        log.error(text)
        raise RuntimeError(text) from error
    return writer.path_of_call


def _causes(error: BaseException) -> str:
    """What went wrong, by rank."""
    if not isinstance(error, CheckpointException):
        return _sentence(error)
    return " ".join(
        f"Rank {rank}: {_sentence(cause)}" for rank, (cause, _) in error.failures.items()
    )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).removesuffix('.')}."


@dataclass(frozen=True)
class _WrittenRecord(WriteResult):
    """The place and the checksum of a record that a rank has written; DCP sends these to the first rank."""

    checksum: int


class FolderWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Its `stage` copies a state to the CPU."""

    def __init__(self, path_of_call: Path, nonce: str) -> None:
        self.path_of_call = path_of_call
        self.target = folder.real_path(path_of_call)
        self.unfinished = folder.unfinished_name(self.target, nonce)
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
        self._check_files(0, 1)
        self._replace()

    def give_up(self, error: BaseException, channel: Channel) -> None:
        """Let the save fail on the other ranks too, because this one cannot write."""
        self._obstacle = error
        with contextlib.suppress(CheckpointException, Exception):
            self._write_together({}, channel)

    def _write_together(self, staged: dict[str, torch.Tensor], channel: Channel) -> None:
        try:
            dcp.save(staged, storage_writer=self, process_group=channel.group)
            rank, ranks = channel.group.rank(), channel.group.size()
            _on_all_ranks("check", lambda: self._check_files(rank, ranks), channel.group)
            _on_all_ranks("replace", self._replace if rank == 0 else lambda: None, channel.group)
        except CheckpointException:  # all ranks have it, and none sends anything more
            raise
        except BaseException:
            channel.is_broken = True
            raise

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Let the first rank make the new folder. An error that is raised here is raised on all ranks."""
        if self._obstacle is not None:
            raise self._obstacle
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the new folder, on the first rank."""
        folder.check_replaceable(self.target)
        self._has_made_folder = True
        folder.make(self.unfinished)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the parts of this rank, and read them again for their checksums."""
        if not self.unfinished.is_dir():
            raise FileNotFoundError(
                f"{self.unfinished}, which the first rank has made, is not on a file system of all ranks"
            )
        written_records = super().write_data(plan, planner).wait()
        results = []
        by_file = grouped((x.storage_data.relative_path, x) for x in written_records)
        for name, records in by_file.items():
            with (self.unfinished / name).open("rb") as file:
                for x in records:
                    crc = folder.checksum(file, x.storage_data.offset, x.storage_data.length)
                    results.append(_WrittenRecord(x.index, x.size_in_bytes, x.storage_data, crc))
        future: torch.futures.Future[list[_WrittenRecord]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[Any]]) -> None:
        """Write the index and the checksums, on the first rank."""
        super().finish(metadata, [list(of_rank) for of_rank in results])
        checksums: dict[str, list[tuple[int, int, int]]] = {}
        for x in (x for of_rank in results for x in of_rank):
            record = x.storage_data.offset, x.storage_data.length, x.checksum
            checksums.setdefault(x.storage_data.relative_path, []).append(record)
        folder.write_checksums(self.unfinished, checksums)

    def _check_files(self, rank: int, ranks: int) -> None:
        """Check this rank's share of all files: the files that the next rank has written, and a few more.

        Raises: Damaged if a file that this rank reads is missing, or has other bytes than were written.
        """
        checksums = folder.read_checksums(self.unfinished)
        for name in list(checksums)[(rank + 1) % ranks :: ranks]:
            folder.check_file(self.unfinished, name, checksums)

    def _replace(self) -> None:
        folder.replace(self.target, self.unfinished)

    def discard(self) -> None:
        """Delete the new folder of a save that has failed, if this rank has made it."""
        if self._has_made_folder:
            folder.delete(self.unfinished)


def _on_all_ranks(name: str, call: Callable[[], object], group: dist.ProcessGroup) -> None:
    """Run `call`, and wait until all ranks have run it.

    Raises: CheckpointException on all ranks if one has failed.
    """
    mine = None
    try:
        call()
    except BaseException as error:
        mine = error, traceback.extract_tb(error.__traceback__)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    failures = {rank: failure for rank, failure in enumerate(everyone) if failure is not None}
    if failures:
        raise CheckpointException(name, failures)


def is_model_file(path: Path) -> bool:
    """Whether a path has the name of a file with the tensors of an ordinary model."""
    return path.suffix in (".pt", ".pth", ".bin", ".safetensors")
