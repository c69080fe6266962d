"""Save a state as a checkpoint while steps go on.

A checkpoint is a folder in the format of torch.distributed.checkpoint. All ranks write to a new folder beside it (see
`folder`). Once the files are on disk, each rank checks the files of another rank. Then the new folder takes the name of
the checkpoint, so a folder with that name is always complete.
"""

from __future__ import annotations

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

from ...calling.leaf_records import RECORDS
from ...calling.trees import named_leaves
from ...ir.axes import members_of
from ...ir.dependencies import grouped
from ...ir.layout import as_tensor, mesh_axes
from ..agreement import agree, different_steps, from_first
from ..channels import Channel
from ..failure import check_ended
from ..replicas import different_leaf, digest
from ..session import rank_names, session_of
from ..state import mesh_of_state, with_replicas
from . import folder
from .extras import records_of_rank, serialized

log = logging.getLogger("ztrans")
_saves_in_progress: list[Future[Path]] = []  # at most one


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Future[Path]:
    """Save a state as a checkpoint. All ranks must call it.

    The call copies this rank's parts and returns, and a thread writes the copies while steps go on. All ranks write to
    one new folder, on a file system that they must share, and check its files. The complete folder takes the name
    `path`, and a checkpoint that had this name is deleted. A save first waits for the previous one. A leaf of replicas
    that train apart (`independent_axis`) is saved with a first dim of these.

    Args:
        path: the folder of the checkpoint, or a link to it. A relative path begins at the current working folder.
        state: a pytree of DTensors, tensors and numbers, such as the state of a step.
        extras: what else to save, by name: schedulers, with the settings of their optimizers; `zt.GlobalRng()` and
            generators; objects with `state_dict` and `load_state_dict`; numbers, text, tensors, and containers of
            these. Their values are taken in this call. They may differ from rank to rank.
        keep: the number of checkpoints to keep of a series, such as step-100 and step-200. Once this one is complete,
            those with lower numbers are deleted, but for the last `keep - 1`. Only what a save has made under its name
            is deleted.

    Returns: A future. Its `result()` waits until the checkpoint is complete, and returns its absolute path. If the save
        fails, `result()` raises RuntimeError, and the logger "ztrans" logs an error at once.

    Raises: ValueError if `path` has the name of a file of an ordinary model, or with `keep` no number at its end;
        TypeError if a leaf is neither a tensor nor a number, or an extra has no value to save; RuntimeError if the
        state is half updated, if not all ranks call it with the same path and the names of the same extras, or if
        copies of a leaf differ, because a checkpoint holds only one of them.

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
            f"Write the weights as safetensors, for other programs: zt.export(folder, zt.state_dict(model, state))."
        )
    if keep is not None:
        _check_keep(target, keep)
    leaves_by_name = named_leaves(state)
    leaves = list(leaves_by_name.values())
    tensors = {name: _tensor(name, leaf) for name, leaf in leaves_by_name.items()}
    check_ended(leaves, "save")
    values = serialized(extras or {})
    wait_for_saves()  # so that only one copy of the state exists at a time
    mesh = mesh_of_state(leaves)
    channel = None
    nonce = secrets.token_hex(4)
    if mesh is not None and not session_of(mesh).is_alone:
        steps = RECORDS.of_state(leaves).steps
        channel = _agreed_channel(target, tensors, steps, mesh)
        nonce = from_first(nonce, mesh)
    own_records = records_of_rank(extras or {}, values, mesh)
    writer = FolderWriter(target, nonce, keep)
    try:
        copies = writer.stage({**tensors, **own_records})
        executor = ThreadPoolExecutor(1, "ztrans-save")
        future = executor.submit(_write_folder, writer, copies, channel)
    except BaseException as error:
        if channel is not None:
            writer.fail_on_all_ranks(error, channel)
        raise
    executor.shutdown(wait=False)
    _saves_in_progress[:] = [future]
    return future


def last_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint of a series, or None: of the names that are `path` and a number, the greatest.

    It first waits for a save in progress. All ranks find the same one, on a file system that they share.

    >>> import tempfile, ztrans as zt
    >>> folder = tempfile.mkdtemp()
    >>> for i in (8, 9, 10):
    ...     _ = zt.save(f"{folder}/step-{i}", {"w": torch.ones(2)}, keep=2).result()
    >>> zt.last_checkpoint(f"{folder}/step-").name, sorted(os.listdir(folder))
    ('step-10', ['step-10', 'step-9'])
    """
    wait_for_saves()
    parent, prefix = os.path.split(path)
    return folder.last_of_series(Path(parent).absolute(), prefix)


def _check_keep(target: Path, keep: int) -> None:
    """Raises: ValueError if `keep` is not a positive number, or the checkpoint belongs to no series."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ValueError(
            f"save: keep={keep!r}; it is a number of checkpoints, at least 1, or None for all."
        )
    name = folder.real_path(target).name
    if folder.numbered(name) is None:
        raise ValueError(
            f"save: keep={keep} with a checkpoint called {name}, which has no number at its end. `keep` deletes "
            f"checkpoints of the same name with lower numbers.\nCount the steps in the name: f'{name}-{{step}}'."
        )


def wait_for_saves() -> None:
    """Wait until this process has no save in progress. A save that fails logs its error itself."""
    wait(_saves_in_progress)


def _tensor(name: str, leaf: Any) -> torch.Tensor:
    """A leaf of the state as a tensor to write.

    Raises: TypeError if it is neither a tensor nor a number.
    """
    if not isinstance(leaf, torch.Tensor | Real) or isinstance(leaf, bool):
        what = f"state {name}" if name else "the state"
        raise TypeError(f"save: {what} is {leaf!r}; a state holds tensors and numbers.")
    tensor = with_replicas(leaf) if isinstance(leaf, DTensor) else as_tensor(leaf)
    tensor = tensor.detach()
    # In torch 2.13, FolderWriter.stage does not copy a DTensor without dims. It is whole on every rank.
    return tensor.to_local() if isinstance(tensor, DTensor) and not tensor.ndim else tensor


def _agreed_channel(
    target: Path, tensors: Mapping[str, torch.Tensor], steps: int, mesh: DeviceMesh
) -> Channel:
    """Check that all ranks save the same state to the same path, with equal values in all copies of a leaf.

    Returns: the channel for the save. From here on, a rank that fails must call `fail_on_all_ranks`.
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
        all_digests = {rank: rank_digests for rank, (_, _, rank_digests) in by_rank.items()}
        different = different_leaf(mesh, axes, all_digests)
        if different is None:
            return ""
        position, first, rank = different
        return (
            f"  {list(tensors)[position]} has other values on rank {rank} than on rank {first}, although the layout "
            f"says that they have copies. With tensor or expert parallelism, cut the leaf over its axis as a DTensor. "
            f"If they are replicas that train apart, say so: shard_params(independent_axis=...)."
        )

    session = session_of(mesh)
    agree(session, "save", (str(target), steps, digests), explain)
    if any(session.from_all(session.saves.is_closed or session.saves.is_broken)):
        with session.leaving("save"):
            session.reopen(session.saves)
    return session.saves


def _different_paths(paths: Mapping[str, Sequence[int]]) -> str:
    """The error text for ranks that save to different paths."""
    lines = "".join(f"  {rank_names(ranks)}: save to {path}\n" for path, ranks in paths.items())
    return (
        f"{lines}The ranks write one checkpoint together: pass the same path, on a file system of all ranks. A "
        f"relative path begins at the working folder of each rank."
    )


def _copied_axes(x: torch.Tensor, mesh: DeviceMesh) -> list[str]:
    """The axes of the mesh along which ranks hold copies of a leaf, whose own mesh may have only some of these axes."""
    split_axes: list[str] = []
    if isinstance(x, DTensor):
        for (axis, _), placement in zip(mesh_axes(x.device_mesh), x.placements):
            if not isinstance(placement, Replicate):
                split_axes.append(axis)
    return [
        axis for axis, size in mesh_axes(mesh) if size > 1 and axis not in members_of(split_axes)
    ]


def _write_folder(
    writer: FolderWriter,
    copies: Mapping[str, Any],
    channel: Channel | None,
) -> Path:
    """Write the copies of a state as a checkpoint, in the thread of a save. Returns its path.

    Raises: RuntimeError, which is also logged, if it fails.
    """
    try:
        writer.write(copies, channel)
    except BaseException as error:
        writer.discard()
        text = (
            f"save: {writer.requested_path} was not written. {_causes(error)}\n"
            f"An earlier checkpoint at this path is intact."
        )
        log.error(text)
        raise RuntimeError(text) from error
    return writer.requested_path


def _causes(error: BaseException) -> str:
    """The text of an error; if it is of several ranks, of each rank's error."""
    if not isinstance(error, CheckpointException):
        return _sentence(error)
    return " ".join(
        f"Rank {rank}: {_sentence(cause)}" for rank, (cause, _) in error.failures.items()
    )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).removesuffix('.')}."


@dataclass(frozen=True)
class _WrittenRecord(WriteResult):
    """The location and the checksum of a record that a rank has written. DCP sends it to the first rank."""

    checksum: int


class FolderWriter(dcp.FileSystemWriter):
    """Writes one checkpoint. Its `stage` copies a state to the CPU."""

    def __init__(self, requested_path: Path, nonce: str, keep: int | None = None) -> None:
        self.requested_path = requested_path
        self.keep = keep
        self.target = folder.real_path(requested_path)
        self.unfinished = folder.unfinished_name(self.target, nonce)
        self._has_made_folder = False
        self._own_error: BaseException | None = None
        super().__init__(self.unfinished)

    def write(self, copies: Mapping[str, Any], channel: Channel | None) -> None:
        """Write the copies of a state and the extras. All ranks of the channel must call it, or `fail_on_all_ranks`."""
        if channel is not None:
            self._write_together(dict(copies), channel)
            return
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(copies), self.storage_meta(), is_coordinator=True)
        self.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = self.prepare_global_plan(plans)
        self.finish(metadata, [self.write_data(planner.finish_plan(plan), planner).wait()])
        self._check_files(0, 1)
        self._replace()

    def fail_on_all_ranks(self, error: BaseException, channel: Channel) -> None:
        """Make the save fail on the other ranks too, because this rank cannot write."""
        self._own_error = error
        try:
            self._write_together({}, channel)
        except CheckpointException:
            pass  # it has this error, on all ranks
        except Exception as lost:
            log.warning("save: the other ranks may not know that this rank cannot write: %s", lost)

    def _write_together(self, copies: dict[str, Any], channel: Channel) -> None:
        try:
            dcp.save(copies, storage_writer=self, process_group=channel.group)
            rank, ranks = channel.group.rank(), channel.group.size()
            _on_all_ranks("check", lambda: self._check_files(rank, ranks), channel.group)
            _on_all_ranks("replace", self._replace if rank == 0 else lambda: None, channel.group)
        except CheckpointException:  # all ranks raise it, and none sends any more
            raise
        except BaseException:
            channel.is_broken = True
            raise

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Return the plan unchanged: the first rank makes the folder. An error raised here is raised on all ranks."""
        if self._own_error is not None:
            raise self._own_error
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the new folder. Runs on the first rank only."""
        folder.check_replaceable(self.target)
        self._has_made_folder = True
        folder.make(self.unfinished)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's parts, and read them back to compute their checksums."""
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
        """Write the index and the checksums. Runs on the first rank only."""
        super().finish(metadata, [list(rank_results) for rank_results in results])
        checksums: dict[str, list[tuple[int, int, int]]] = {}
        for rank_results in results:
            for x in rank_results:
                record = x.storage_data.offset, x.storage_data.length, x.checksum
                checksums.setdefault(x.storage_data.relative_path, []).append(record)
        folder.write_checksums(self.unfinished, self.target.name, checksums)

    def _check_files(self, rank: int, ranks: int) -> None:
        """Check this rank's share of the files: the next rank's files, and a few more.

        Raises: Damaged if one of these files is missing, or differs from what was written.
        """
        checksums = folder.read_checksums(self.unfinished)
        for name in list(checksums)[(rank + 1) % ranks :: ranks]:
            folder.check_file(self.unfinished, name, checksums)

    def _replace(self) -> None:
        folder.replace(self.target, self.unfinished)
        if self.keep is None:
            return
        try:
            folder.delete_older(self.target, self.keep)
        except OSError as error:  # the new checkpoint is complete
            log.warning("save: checkpoints before %s were not deleted: %s", self.target, error)

    def discard(self) -> None:
        """Delete the new folder of a failed save, if this rank has made it."""
        if self._has_made_folder:
            folder.delete(self.unfinished)


def _on_all_ranks(name: str, call: Callable[[], object], group: dist.ProcessGroup) -> None:
    """Run `call`, and wait until all ranks have run it.

    Raises: CheckpointException on all ranks if one has failed.
    """
    own_failure = None
    try:
        call()
    except BaseException as error:
        own_failure = error, traceback.extract_tb(error.__traceback__)
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, own_failure, group=group)
    failures = {rank: failure for rank, failure in enumerate(by_rank) if failure is not None}
    if failures:
        raise CheckpointException(name, failures)


def is_model_file(path: Path) -> bool:
    """Whether a path is named like a file with the tensors of an ordinary model."""
    return path.suffix in (".pt", ".pth", ".bin", ".safetensors")
